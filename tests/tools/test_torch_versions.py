"""`make test-torch`: which versions it takes; a failure of one does not keep it from the other."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "torch_versions.py"))


def pyproject(torch: str) -> str:
    return f'[project]\nname = "octavo"\ndependencies = ["numpy>=2.0", "{torch}", "torchdata"]\n'


def test_the_ends_of_the_range(tool: dict[str, Any]) -> None:
    found = tool["requirements"](pyproject("torch>=2.11"))
    assert found == {"oldest": "torch==2.11.*", "newest": "torch>=2.11"}
    bounded = tool["requirements"](pyproject("torch>=2.11,<3"))
    assert bounded == {"oldest": "torch==2.11.*", "newest": "torch<3,>=2.11"}
    with pytest.raises(SystemExit, match=r"torch==2\.13\.0 is no range"):
        tool["requirements"](pyproject("torch==2.13.0"))


def test_each_end_is_installed_once_and_tested_each_time(
    tool: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pyproject.toml").write_text(pyproject("torch>=2.11"))
    monkeypatch.setitem(tool["main"].__globals__, "ROOT", tmp_path)
    ran: list[list[str]] = []

    def run(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
        command = [str(each) for each in command]
        ran.append(command)
        if command[1:3] == ["-m", "venv"]:
            Path(command[3]).mkdir(parents=True)
        fails = "pytest" in command and "oldest" in command[0]
        return subprocess.CompletedProcess(command, int(fails))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["torch_versions.py"])
    assert tool["main"]() == 1
    assert "tests fail on the oldest torch" in capsys.readouterr().err
    installed = [command[4:] for command in ran if "pip" in command]
    assert [each[1] for each in installed if each[0] == "--upgrade"] == [
        "torch==2.11.*",
        "torch>=2.11",
    ]
    assert installed[1] == ["numpy<2.4"]  # beside the oldest
    tested = [command for command in ran if "pytest" in command]
    assert [Path(command[0]).parts[-3] for command in tested] == ["torch-oldest", "torch-newest"]
    assert all(command[3:] == ["-n", "auto", "-m", "not slow"] for command in tested)

    ran.clear()
    monkeypatch.setattr(sys, "argv", ["torch_versions.py", "newest", "--tests", "-x", "tests/core"])
    assert tool["main"]() == 0
    assert not [command for command in ran if "pip" in command]
    assert ran[-1][1:] == ["-m", "pytest", "-x", "tests/core"]
