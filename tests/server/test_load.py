"""The load test of benchmarks/server_load.py, small: what it must show, not how fast it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "server_load.py"
# So few blocks that requests wait, are preempted and are refused.
SMALL = ("--scale", "0.05", "--num-blocks", "24", "--max-waiting", "8", "--shares", "0.5")


def test_overload_loses_nothing() -> None:
    sizes = ("--num-requests", "16", "--num-overload", "80")
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, *sizes], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["lost"] == []
    assert result["blocks_held_after"] == 0
    [half] = result["runs"]
    assert (half["completed"] + half["refused"], half["failed"]) == (16, 0)
    for flood in result["overloads"]:
        assert (flood["completed"] + flood["refused"], flood["failed"]) == (80, 0)
        assert flood["completed"] > 0
        assert flood["refused"] > 0
