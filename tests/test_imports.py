"""Who may import whom (DESIGN.md section 3): the law, and that the source keeps it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo

SOURCE = Path(__file__).resolve().parent.parent / "src"

PLAIN = {"config", "errors", "json_fields", "models.config", "models.families", "outputs"} | {
    "models.rope_scaling",
    "sampling_params",
    "core.step",
    "core.kv.specs",
}
# Package -> what it may import of octavo besides itself. The longest name that fits a module wins.
LAW: dict[str, set[str]] = {
    "": PLAIN | {"llm"},  # octavo/__init__.py
    "config": {"errors", "models.config"},
    "errors": set(),
    "json_fields": {"errors"},
    "models.config": {"core.kv.specs", "demo", "errors", "models.families"},
    "models.families": {"errors", "json_fields", "models.config", "models.rope_scaling"}
    | {"sampling_params"},
    "models.rope_scaling": {"errors", "json_fields", "models.config"},
    "outputs": {"core.step", "errors"},
    "sampling_params": {"core.step", "errors"},
    "llm": PLAIN | {"core.sequence", "engine", "executor"},
    "core": {"config", "errors"},
    "engine": PLAIN | {"core", "executor.base"},
    "executor.base": {"core.step", "core.kv.specs", "memory_budget"},
    "executor": PLAIN | {"worker", "memory_budget", "host_memory"},
    "host_memory": set(),
    "memory_budget": {"config", "core.kv.specs", "errors", "models.config"},
    "worker": PLAIN | {"ops", "layers", "models", "memory_budget", "host_memory"},
    "models": {"ops", "config", "errors", "layers", "json_fields"},
    "layers": {"ops", "errors", "models.config"},
    "ops": {"errors"},
    "bench": PLAIN | {"core", "engine", "executor.base"},
    "simulation": PLAIN | {"bench", "core", "engine", "executor.base", "memory_budget"},
    "server.http.playpool": {"core", "errors"},  # the page that drives the core itself by hand
    "server": PLAIN | {"engine", "executor", "llm", "host_memory"},
    "cli": PLAIN
    | {"bench", "demo", "engine", "llm", "models.registry", "server", "simulation"}
    | {"memory_budget", "host_memory"},
    "demo": PLAIN | {"llm", "engine"},
}
TORCH_FREE = {
    "",
    *PLAIN,
    "core",
    "engine",
    "executor.base",
    "host_memory",
    "memory_budget",
} | {
    "bench",
    "cli",
    "server",
    "simulation",
}
HEAVY = {"torch", "numba", "triton", "transformers"}


def imports_of(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, wherever in it."""
    is_package = path.name == "__init__.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base]).rstrip(".")
            # `from octavo.core import step` imports a module, too; the law sees the longer name.
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def covers(room: str, name: str) -> bool:
    """Whether the module or attribute `name` (without "octavo.") lies in `room`."""
    return room == "" or name == room or name.startswith(f"{room}.")


def room_of(name: str) -> str:
    """The room of the law that a module belongs to."""
    return max((room for room in LAW if covers(room, name)), key=len)


def violations(source: Path) -> list[str]:
    found = []
    for path in sorted((source / "octavo").rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        name = module.removeprefix("octavo").removeprefix(".")
        room = room_of(name)
        for line, imported in imports_of(path, module):
            target = imported.removeprefix("octavo.")
            # `from octavo import LLM` means the module where LLM is at home.
            target = octavo._HOMES.get(target, f".{target}").partition(".")[2]
            where = f"{path.relative_to(source)}:{line}"
            if imported.split(".")[0] in HEAVY and room in TORCH_FREE:
                found.append(f"{where}: {room} must not import {imported}")
            if not imported.startswith("octavo.") or (room and covers(room, target)):
                continue
            if target.split(".")[0] == "__version__":
                continue
            if not any(covers(allowed, target) for allowed in LAW[room]):
                found.append(f"{where}: {room or 'octavo'} must not import {target}")
    return found


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )


def test_source_keeps_the_law() -> None:
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("core/policy.py", "import torch", "core must not import torch"),
        ("core/x.py", "def f():\n    import torch.nn as nn", "core must not import torch.nn"),
        ("core/x.py", "from octavo.worker import worker", "core must not import worker.worker"),
        ("engine/x.py", "from ..executor import local", "engine must not import executor.local"),
        ("executor/base.py", "from octavo.worker.worker import Worker", "executor.base must not"),
        ("layers/x.py", "from octavo.core.step import StepPlan", "layers must not import core"),
        ("ops/x.py", "import octavo.layers.norm", "ops must not import layers"),
        ("server/x.py", "from octavo.core.scheduler import Scheduler", "server must not import"),
        ("worker/x.py", "from octavo.core import scheduler", "worker must not import core.sch"),
        ("cli/x.py", "import torch", "cli must not import torch"),
        ("worker/x.py", "from octavo import LLM", "worker must not import llm"),
    ],
)
def test_the_law_bites(tmp_path: Path, path: str, line: str, found: str) -> None:
    file = tmp_path / "octavo" / path
    file.parent.mkdir(parents=True)
    file.write_text(f"{line}\n")
    [violation] = violations(tmp_path)
    assert found in violation
    assert f"octavo/{path}:" in violation


def test_torch_free_rooms_can_be_imported_without_torch() -> None:
    """Also what they import in turn: no detour leads to torch."""
    modules = []
    for path in sorted((SOURCE / "octavo").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if room_of(module.removeprefix("octavo").removeprefix(".")) in TORCH_FREE:
            modules.append(module)
    assert "octavo.core.scheduler" in modules
    program = textwrap.dedent(
        f"""
        import importlib, sys
        for name in {sorted(HEAVY)}:
            sys.modules[name] = None  # an import of it raises
        for name in {modules}:
            importlib.import_module(name)
        """
    )
    run = run_python(program)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("program", "forbidden"),
    [
        ("import octavo", {"torch", "numba", "tokenizers", "numpy", "click"}),
        ("from octavo.cli.main import main", {"torch", "numba", "tokenizers", "numpy", "tqdm"}),
    ],
)
def test_light_imports(program: str, forbidden: set[str]) -> None:
    program += "; import sys; print(*sys.modules)"
    run = run_python(program)
    assert run.returncode == 0, run.stderr
    assert forbidden.isdisjoint(run.stdout.split())


def test_help_loads_nothing_but_click() -> None:
    program = """
        import atexit, sys
        atexit.register(lambda: print(*sys.modules))
        from octavo.cli.main import main
        main(["--help"], prog_name="octavo")
    """
    run = run_python(textwrap.dedent(program))
    assert run.returncode == 0, run.stderr
    loaded = {name.partition(".")[0] for name in run.stdout.splitlines()[-1].split()}
    foreign = {name for name in loaded - sys.stdlib_module_names if not name.startswith("_")}
    assert foreign == {"octavo", "click"}
