"""`make test-torch`: all tests but the slow ones, on the oldest and the newest torch allowed.

    python tools/torch_versions.py                               # both
    python tools/torch_versions.py oldest --tests -x tests/core  # one, with arguments for pytest

Each has an environment of its own below .venv, which the first run makes; builds of torch for GPUs
take several gigabytes each. Which versions these are follows from pyproject.toml.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
ENDS = ("oldest", "newest")
# The interpreter of the Triton that comes with the oldest torch fails with later ones.
INTERPRETER_NUMPY = "numpy<2.4"
TESTS = ["-n", "auto", "-m", "not slow"]


def requirements(pyproject: str) -> dict[str, str]:
    """What to install at each end of the range that pyproject.toml allows."""
    dependencies = tomllib.loads(pyproject)["project"]["dependencies"]
    [torch] = [each for each in map(Requirement, dependencies) if each.name == "torch"]
    lowest = [each.version for each in torch.specifier if each.operator == ">="]
    if len(lowest) != 1:
        raise SystemExit(f"pyproject.toml: {torch} is no range of versions from an oldest one on")
    return {"oldest": f"torch=={lowest[0]}.*", "newest": str(torch)}


def prepare(end: str, requirement: str) -> Path:
    """The Python of an environment with that torch; it is made if it is not there, or outdated."""
    place = ROOT / ".venv" / f"torch-{end}"
    python = place / "bin" / "python"
    done = place / "installed"
    wanted = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if not done.exists() or done.read_text(encoding="utf-8") != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        install = [str(python), "-m", "pip", "install", "--upgrade", requirement]
        for project in (".[dev]", "./demo", "./paper"):
            install += ["--editable", project]
        subprocess.run(install, cwd=ROOT, check=True)
        if end == "oldest":
            install = [str(python), "-m", "pip", "install", INTERPRETER_NUMPY]
            subprocess.run(install, cwd=ROOT, check=True)
        done.write_text(wanted, encoding="utf-8")
    return python


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ends", nargs="*", choices=[*ENDS, []], help="oldest or newest; else both")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, default=TESTS, help="for pytest")
    options = parser.parse_args()
    wanted = requirements((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    failed = []
    for end in options.ends or ENDS:
        python = prepare(end, wanted[end])
        version = "import torch; print('torch', torch.__version__, flush=True)"
        subprocess.run([python, "-c", version], check=True)
        if subprocess.run([python, "-m", "pytest", *options.tests], cwd=ROOT).returncode:
            failed.append(end)
    if failed:
        print(f"tests fail on the {' and the '.join(failed)} torch", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
