"""docs/extending.md, "From a package of your own": a plugin reaches the server's engine process."""

from __future__ import annotations

import os
from pathlib import Path

from server.live_server import live_server

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = """
import os
from pathlib import Path

from octavo.core.policies import SchedulingPolicy
from octavo.registry import POLICIES


class ShortestFirst(SchedulingPolicy):
    def __init__(self, config):
        Path(os.environ["TOY_MARK"]).write_text(str(os.getpid()))

    def order(self, request):
        return (request.num_prompt_tokens, request.number)


def register():
    POLICIES.register("shortest-first", ShortestFirst)
"""


def install(directory: Path) -> None:
    """As pip would install a distribution with a plugin."""
    (directory / "toy_plugin.py").write_text(PLUGIN)
    metadata = directory / "toy_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[octavo.plugins]\ntoy = toy_plugin:register\n")


def test_the_server_s_engine_process_runs_a_plugin_s_policy(tmp_path: Path) -> None:
    install(tmp_path)
    mark = tmp_path / "mark"
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    with live_server("--policy", "shortest-first", PYTHONPATH=paths, TOY_MARK=str(mark)) as server:
        assert server.complete("Once upon a time", max_tokens=5)["usage"]["completion_tokens"] == 5
        assert int(mark.read_text()) not in (os.getpid(), server.process.pid)
