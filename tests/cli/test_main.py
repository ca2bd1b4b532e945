"""The command as a module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src"


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "octavo", "memory", "no-such-model"]
    environment = os.environ | {"PYTHONPATH": str(SOURCES)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    assert "no-such-model" in run.stderr
    assert "Traceback" not in run.stderr
