"""The wheel: the engine with all its files, and not the packages beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel's files lie."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(directory)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site")
    return directory / "site"


def run_python(unpacked: Path, program: str) -> subprocess.CompletedProcess[str]:
    """With octavo as the wheel has it."""
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)


def test_it_has_every_file_of_the_engine_and_none_of_the_packages_beside_it(unpacked: Path) -> None:
    shipped = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    files = {path.relative_to(SOURCE) for path in (SOURCE / "octavo").rglob("*") if path.is_file()}
    ours = {path for path in files if "__pycache__" not in path.parts}
    metadata = {path for path in shipped if path.parts[0].endswith(".dist-info")}
    assert shipped - metadata == ours
    for kept in (
        "llm.py",
        "core/scheduler.py",
        "server/http/static/index.html",
        "simulation/data/sharegpt_opt_lengths.csv.gz",
        "simulation/models/opt-13b/config.json",
        "demo/weights/model.safetensors",
    ):
        assert Path("octavo", kept) in shipped


def test_the_demo_model_and_the_simulators_data_are_found(unpacked: Path) -> None:
    program = """if True:
        from octavo.demo import demo_model_path
        from octavo.simulation.models import find_model
        from octavo.simulation.sources import SOURCES
        print(demo_model_path())
        print(len(SOURCES["alpaca"]()), find_model("opt-13b").num_layers)
    """
    run = run_python(unpacked, program)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{unpacked}/octavo/demo/weights", "1000 40"]


def test_reproduce_says_in_one_line_what_to_install(unpacked: Path) -> None:
    program = """if True:
        import sys
        sys.modules["octavo_paper"] = None  # a development install has it
        from octavo.cli.main import main
        main(["reproduce", "fig12"])
    """
    run = run_python(unpacked, program)
    assert run.returncode == 1
    [line] = run.stderr.splitlines()
    assert line == (
        "error: the paper's figures are not installed: "
        "run `pip install ./demo ./paper` in a checkout of octavo"
    )
