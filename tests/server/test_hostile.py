"""benchmarks/server_hostile.py, small: what must hold, not how fast it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "server_hostile.py"
STREAMS = ("--streams", "6", "--tokens", "40", "--crowd", "100")
CONNECTIONS = ("--silent", "200", "--heads", "40", "--bodies", "40", "--unread", "4")
BODIES = ("--prompts", "2", "--megabytes", "1", "--messages", "4000")


@pytest.mark.slow
def test_hostile_clients_harm_nobody() -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *STREAMS, *CONNECTIONS, *BODIES],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    result = json.loads(run.stdout.splitlines()[-1])
    assert (result["wrong"], result["right_beside"], result["right_killed"]) == ([], 6, 6)
    assert result["health"]["answers"] > 0
    assert result["health"]["failures"] == []
    assert result["replies_to_large_bodies"] == {"400": 4}
    assert result["blocks_held_after"] == 0
    assert result["crowd"] == {"200": 100}
