"""The set-up: what `make run` installs, and what is told of it."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

PIP = """\
Looking in indexes: https://user:secret@example.org/simple
Obtaining file:///somewhere/octavo
  Installing build dependencies: started
  Installing build dependencies: finished with status 'done'
Collecting torch==2.13.0 (from octavo==0.1.0)
  Downloading torch-2.13.0.whl.metadata (29 kB)
  Downloading torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl (187.2 MB)
Requirement already satisfied: click>=8.1 in somewhere (from octavo==0.1.0)
Processing /wheels/jinja2-3.1.6-py3-none-any.whl (from octavo==0.1.0)
  Using cached numpy-2.4.6-cp311-cp311-linux_x86_64.whl (18.5 MB)
  Downloading idna-3.20-py3-none-any.whl (800 bytes)
Installing collected packages: torch, jinja2, numpy, idna, octavo
"""


@pytest.fixture(scope="module")
def install() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "install.py"))


def test_what_pip_does_is_told(install: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    report = install["Report"]("octavo")
    report.follow(PIP.splitlines(keepends=True))
    report.close()
    assert capsys.readouterr().out.splitlines() == [
        "  looking for what it needs",
        "  fetching torch-2.13.0+cpu (187.2 MB)",
        "  at hand: jinja2-3.1.6",
        "  at hand: numpy-2.4.6",
        "  fetching idna-3.20 (800 bytes)",
        "  unpacking 5 distributions",
    ]
    assert report.summary().startswith("octavo: 2 files, 187 MB fetched, 2 files were at hand; ")


def dry_run(directory: Path, target: str) -> list[str]:
    """The installations that `make` would do for a target."""
    command = ["make", "--dry-run", "--file", str(ROOT / "Makefile"), target]
    lines = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
    return [line for line in lines.stdout.splitlines() if "tools/install.py" in line]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_tools_for_development_are_installed_for_tests_only(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    runtime, tools = ".venv/bin/python tools/install.py", ".venv/bin/python tools/install.py dev"
    assert dry_run(tmp_path, "run") == dry_run(tmp_path, "generate") == [runtime]
    for target in ("test", "check", "reproduce"):
        assert dry_run(tmp_path, target) == [tools]
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "installed").touch()
    assert dry_run(tmp_path, "run") == []
    assert dry_run(tmp_path, "test") == [tools]
    (tmp_path / ".venv" / "installed-dev").touch()
    assert dry_run(tmp_path, "run") == dry_run(tmp_path, "test") == []
