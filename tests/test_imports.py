"""Who may import whom: the contracts in pyproject.toml hold, and bite; and imports stay light."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

import model_zoo

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "paper", "demo")


def contracts() -> dict[str, dict[str, Any]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        linter = tomllib.load(file)["tool"]["importlinter"]
    return {contract["id"]: contract for contract in linter["contracts"]}


def lint(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the sources below `root`, where a pyproject.toml lies."""
    program = "from importlinter.cli import lint_imports_command as lint; lint()"
    command = [sys.executable, "-c", program, "--no-cache", "--no-logo", *options]
    paths = os.pathsep.join(str(root / folder) for folder in FOLDERS)
    environment = os.environ | {"PYTHONPATH": paths, "COLUMNS": "200"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def test_the_sources_keep_the_contracts() -> None:
    run = lint(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"Contracts: {len(contracts())} kept, 0 broken." in run.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, to be violated."""
    root = tmp_path_factory.mktemp("sources")
    shutil.copy(ROOT / "pyproject.toml", root)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            target = root / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return root


@pytest.mark.parametrize(
    ("contract", "importer", "line", "imported"),
    [
        ("torch-free", "core.x", "import torch", "torch"),
        ("torch-free", "core.x", "def f():\n    import torch.nn as nn", "torch"),
        ("torch-free", "engine.x", "from ..executor import local", "octavo.executor.local"),
        (
            "torch-free",
            "simulation.x",
            "from octavo.worker.worker import Worker",
            "octavo.worker.worker",
        ),
        ("torch-later", "cli.x", "import torch", "torch"),
        ("torch-later", "server.http.x", "from transformers import GPT2Config", "transformers"),
        ("layers", "core.x", "from octavo.worker import worker", "octavo.worker.worker"),
        ("layers", "executor.x", "from octavo.engine.engine import Engine", "octavo.engine.engine"),
        ("layers", "ops.x", "import octavo.layers.norm", "octavo.layers.norm"),
        ("layers", "worker.x", "from octavo import LLM", "octavo"),
        ("layers", "server.x", "import octavo.simulation.run", "octavo.simulation.run"),
        ("core", "layers.x", "from octavo.core.step import StepPlan", "octavo.core.step"),
        (
            "core",
            "server.x",
            "from octavo.core.scheduler import Scheduler",
            "octavo.core.scheduler",
        ),
        ("core", "worker.x", "from octavo.core import scheduler", "octavo.core.scheduler"),
        ("offline", "engine.x", "import msgspec", "msgspec"),
        ("offline", "worker.x", "def f():\n    from rich.table import Table", "rich"),
        ("offline", "layers.x", "from octavo.cli import options", "octavo.cli.options"),
        ("devices", "ops.cuda.x", "from octavo.ops.cpu import linear", "octavo.ops.cpu.linear"),
        ("beside", "cli.x", "from octavo_paper import figures", "octavo_paper.figures"),
        ("beside", "demo.x", "import octavo_demo.corpus", "octavo_demo.corpus"),
    ],
)
def test_the_contracts_bite(
    copy: Path, contract: str, importer: str, line: str, imported: str
) -> None:
    file = copy / "src" / "octavo" / f"{importer.replace('.', '/')}.py"
    file.write_text(f"{line}\n")
    try:
        run = lint(copy, "--contract", contract)
    finally:
        file.unlink()
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"{contracts()[contract]['name']} BROKEN" in run.stdout
    assert f"octavo.{importer} -> {imported} (l." in run.stdout


@pytest.mark.parametrize("package", ["bench", "core", "server"])
def test_a_circle_is_found(copy: Path, package: str) -> None:
    folder = copy / "src" / "octavo" / package
    first, second = folder / "x.py", folder / "y.py"
    first.write_text(f"import octavo.{package}.y\n")
    second.write_text(f"def f():\n    from octavo.{package} import x\n")
    try:
        run = lint(copy, "--contract", "acyclic")
    finally:
        first.unlink()
        second.unlink()
    assert run.returncode == 1
    assert f"No cycles are allowed in octavo.{package}." in run.stdout


def test_a_new_package_needs_a_layer(copy: Path) -> None:
    package = copy / "src" / "octavo" / "novelty"
    package.mkdir()
    (package / "__init__.py").touch()
    try:
        run = lint(copy, "--contract", "layers")
    finally:
        shutil.rmtree(package)
    assert run.returncode == 1
    assert "octavo.novelty" in run.stdout


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / folder) for folder in FOLDERS)
    environment = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def modules_below(name: str) -> list[str]:
    """A module or package, and all that the package has."""
    [folder] = [each for each in FOLDERS if (ROOT / each / name.partition(".")[0]).exists()]
    path = ROOT / folder / Path(*name.split("."))
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    found = [".".join(file.relative_to(ROOT / folder).with_suffix("").parts) for file in files]
    return [module.removesuffix(".__init__") for module in found]


def test_what_should_import_without_torch_does() -> None:
    """Also whatever these modules import in turn when they are imported."""
    contract = contracts()
    names = [*contract["torch-free"]["source_modules"], *contract["torch-later"]["source_modules"]]
    modules = ["octavo", *(module for name in names for module in modules_below(name))]
    assert {"octavo.core.scheduler", "octavo.cli.main", "octavo_paper.command"} <= set(modules)
    forbidden = contract["torch-free"]["forbidden_modules"]
    assert "torch" in forbidden
    run = run_python(
        f"""
        import importlib, sys
        for name in {forbidden}:
            sys.modules[name] = None  # an import of it raises
        for name in {modules}:
            importlib.import_module(name)
        """
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_offline_use_needs_no_library_of_the_server() -> None:
    """A model generates where only the libraries of offline use are installed."""
    contract = contracts()["offline"]
    forbidden = contract["forbidden_modules"]
    assert {"msgspec", "pydantic", "rich", "click"} <= set(forbidden)
    modules = [module for name in contract["source_modules"] for module in modules_below(name)]
    device_modules = ("octavo.ops.cpu", "octavo.ops.cuda")  # they need numba and triton
    modules = [module for module in modules if not module.startswith(device_modules)]
    directory = str(model_zoo.model_directory("llama3"))
    run = run_python(
        f"""
        import importlib, sys
        for name in {forbidden}:
            sys.modules[name] = None  # an import of it raises
        for name in {modules}:
            importlib.import_module(name)
        from octavo import LLM, SamplingParams
        params = SamplingParams(max_tokens=4, logprobs=2, ignore_eos=True)
        with LLM({directory!r}, num_blocks=16) as llm:
            [output] = llm.generate([[5, 6, 7]], params)
        [sample] = output.outputs
        print(len(sample.token_ids), [len(entry.top) for entry in sample.logprobs])
        """
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "4 [2, 2, 2, 2]\n"


@pytest.mark.parametrize(
    ("program", "forbidden"),
    [
        ("import octavo", {"torch", "numba", "tokenizers", "numpy", "click"}),
        ("from octavo.cli.main import main", {"torch", "numba", "tokenizers", "numpy", "tqdm"}),
    ],
)
def test_light_imports(program: str, forbidden: set[str]) -> None:
    run = run_python(f"{program}; import sys; print(*sys.modules)")
    assert run.returncode == 0, run.stderr
    assert forbidden.isdisjoint(run.stdout.split())


def test_help_loads_nothing_but_click() -> None:
    program = """
        import atexit, sys
        atexit.register(lambda: print(*sys.modules))
        from octavo.cli.main import main
        main(["--help"], prog_name="octavo")
    """
    run = run_python(program)
    assert run.returncode == 0, run.stderr
    loaded = {name.partition(".")[0] for name in run.stdout.splitlines()[-1].split()}
    foreign = {name for name in loaded - sys.stdlib_module_names if not name.startswith("_")}
    assert foreign == {"octavo", "click"}
