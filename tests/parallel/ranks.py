"""Groups of processes, each a rank, that carry out functions side by side over gloo."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from octavo.ops.connect import connect
from octavo.parallel import Shard

TIMEOUT = 300  # seconds; Triton's interpreter on a busy machine takes tens
# It imports transformers and octavo, which would take each process seconds.
PRELOADED = ["sharded", "octavo.models.fallback.model"]


class Ranks:
    """Owns `size` processes. Functions are called in all of them, and see their communicator.

    The processes are forked from a server that has imported what functions need, which takes a few
    milliseconds.
    """

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # for the first group
            forkserver.ensure_running()
        self.size = size
        self.is_closed = False
        self._directory = Path(tempfile.mkdtemp(prefix="octavo-ranks-"))
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, size, self._directory),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Call function(communicator, *args) in every rank."""
        for connection in self._connections:
            connection.send((function, args))

    def results(self) -> list[Any]:
        """What the call that was started first has returned, by rank.

        If it raises in one of them, the others may wait for that one forever: the group is closed.
        """
        answers: dict[Connection, Any] = {}
        while missing := [each for each in self._connections if each not in answers]:
            ready = wait(missing, TIMEOUT)
            assert ready, f"{len(missing)} of {self.size} ranks hang"
            for connection in ready:
                kind, answer, *where = connection.recv()
                if kind == "error":
                    self.close()
                    answer.add_note(*where)
                    raise answer
                answers[connection] = answer
        return [answers[connection] for connection in self._connections]

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`start` and `results`."""
        self.start(function, *args)
        return self.results()

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        self.is_closed = True
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=2)
            process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


def _serve(connection: Connection, rank: int, size: int, directory: Path) -> None:
    torch.set_num_threads(1)
    address = (directory / "store").as_uri()
    communicator = connect(Shard(rank, size), address, torch.device("cpu"))
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            break
        try:
            connection.send(("result", function(communicator, *args)))
        except Exception as error:
            connection.send(("error", error, f"rank {rank}: {traceback.format_exc()}"))
    communicator.close()
