"""The processes of a group of ranks: started, told the same, killed together. Loads no torch."""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import Any, NoReturn

from octavo.channel import Channel, frame
from octavo.child_process import ChildProcess, describe_exit, is_stopped
from octavo.config import EngineConfig
from octavo.core.step import StepResult
from octavo.errors import EngineFailed, ProcessKilled
from octavo.executor.messages import Failed, LogLine, Ready, Start, decode, encode
from octavo.models.config import ModelConfig
from octavo.parallel import Shard

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "octavo.executor.rank")
# A rank that dies makes the others' collectives fail: how long to look for one after an error.
CAUSE_SECONDS = 0.5
EXIT_SECONDS = 5.0  # for a process that was killed, or whose socket has closed


class RankProcess:
    """One rank's process, and the channel to it."""

    def __init__(self, rank: int, command: Sequence[str], send_seconds: float) -> None:
        self.rank = rank
        self.child = ChildProcess(command, f"rank {rank}")
        self.channel = Channel(self.child.connection, send_seconds)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.child.pid})"


class RankGroup:
    """Owns the processes of all ranks. When one of them fails, all are killed, and every call from
    then on raises what went wrong."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Start `config.tensor_parallel_size` ranks, and wait until they can compute.

        Args:
            config: the settings, which each rank adapts to its device.
            model_config: of the whole model.
            command: the ranks' program; see ChildProcess.

        Raises:
            ConfigError, ModelError, OutOfMemory: the settings, the files or the machine do not do,
                in the rank that was the first to say so. EngineFailed: a rank broke down. No
                process is left then.
        """
        self._seconds = config.rank_timeout
        self._error: Exception | None = None
        self._ranks: list[RankProcess] = []
        self._received: deque[tuple[int, Any]] = deque()  # (rank, Ready or StepResult)
        self._poll = select.poll()
        self._end = weakref.finalize(self, _end_all, self._ranks, os.getpid())
        folder = Path(tempfile.mkdtemp(prefix="octavo-"))
        size = config.tensor_parallel_size
        level = min(logging.INFO, logging.getLogger("octavo").getEffectiveLevel())
        try:
            for rank in range(size):
                process = RankProcess(rank, command, self._seconds)
                self._ranks.append(process)
                self._poll.register(process.channel, select.POLLIN)
            for process in self._ranks:
                shard, address = Shard(process.rank, size), f"file://{folder}/ranks"
                start = Start(config, model_config, shard, address, level)
                self._send_to(process, frame(encode(start)))
            self.ready = self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids."""
        return [process.child.pid for process in self._ranks]

    def send(self, payload: bytes) -> None:
        """Send a message to all ranks. Raises EngineFailed."""
        self._check()
        message = frame(payload)
        for process in self._ranks:
            self._send_to(process, message)

    def check(self) -> None:
        """Raise what went wrong in any rank, if something did. Not while a result is due."""
        self._check()
        self._read(self._poll.poll(0))
        assert not self._received, "nothing was asked for"

    def receive_result(self) -> StepResult:
        """Wait for rank 0's next result. Raises what went wrong in any rank."""
        self._check()
        deadline = time.monotonic() + self._seconds
        _, result = self._receive(deadline)
        assert isinstance(result, StepResult), result
        return result

    def close(self) -> None:
        """End all processes; returns when they have ended. A second call does nothing."""
        if self._error is None:
            self._error = EngineFailed("the executor was shut down")
        self._end()

    # ---------------------------------------------------------------- inside

    def _wait_until_ready(self) -> list[Ready]:
        ready: dict[int, Ready] = {}
        while len(ready) < len(self._ranks):
            rank, message = self._receive(None)
            assert isinstance(message, Ready), message
            ready[rank] = message
        return [ready[rank] for rank in range(len(self._ranks))]

    def _send_to(self, process: RankProcess, message: bytes) -> None:
        try:
            process.channel.send_framed(message)
        except BlockingIOError:
            self._fail(self._hang(f"{process} reads no messages"))
        except OSError:
            self._bury(process)

    def _receive(self, deadline: float | None) -> tuple[int, Any]:
        """Wait for the next answer of any rank: (rank, Ready or StepResult)."""
        while not self._received:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
            events = self._poll.poll(timeout)
            if not events:
                self._fail(self._hang("a step has not been computed"))
            self._read(events)
        return self._received.popleft()

    def _read(self, events: list[tuple[int, int]]) -> None:
        """Take in what has come from ranks. Raises what went wrong there."""
        readable = {descriptor for descriptor, _ in events}
        for process in self._ranks:
            if process.channel.fileno() not in readable:
                continue
            messages = process.channel.read()
            if messages is None:
                self._bury(process)
            for payload in messages:
                message = decode(payload)
                if isinstance(message, LogLine):
                    _relay(process.rank, message)
                elif isinstance(message, Failed):
                    self._bury(process, message)
                else:
                    self._received.append((process.rank, message))

    def _check(self) -> None:
        if self._error is not None:
            raise EngineFailed(f"the ranks were ended: {self._error}")

    def _hang(self, what: str) -> EngineFailed:
        text = f"{what} within rank_timeout ({self._seconds:g} s)"
        stopped = [str(each) for each in self._ranks if is_stopped(each.child.pid)]
        if stopped:
            return EngineFailed(f"{text}: {', '.join(stopped)} was stopped")
        return EngineFailed(f"{text}; raise it if steps take so long")

    def _bury(self, process: RankProcess, failed: Failed | None = None) -> NoReturn:
        """A rank has ended, or says that it fails. Find out which rank was the first."""
        others = {each.child.exit_status: each for each in self._ranks}
        if failed is None:
            wait([process.child.exit_status], EXIT_SECONDS)
            failed = _last_words(process)
        else:
            del others[process.child.exit_status]  # which ends because of its error
            wait(others, CAUSE_SECONDS, FIRST_COMPLETED)
        for status, each in others.items():
            if status.done() and status.result() < 0:
                text = f"{each}: {describe_exit(status.result())}"
                was_killed = -status.result() == signal.SIGKILL
                self._fail(ProcessKilled(text) if was_killed else EngineFailed(text))
        if failed is not None:
            if isinstance(failed.error, EngineFailed):  # no mistake of the user's
                logger.error("rank %d: %s", process.rank, failed.traceback)
            self._fail(failed.error)
        status = process.child.exit_status
        how = describe_exit(status.result()) if status.done() else "it has closed its socket"
        self._fail(EngineFailed(f"{process}: {how}"))

    def _fail(self, error: Exception) -> NoReturn:
        self._error = error
        self.close()
        raise error


def _last_words(process: RankProcess) -> Failed | None:
    """What a rank that has ended said of it, if that was not received yet."""
    messages = process.channel.receive(0) or ()
    return next((each for each in map(decode, messages) if isinstance(each, Failed)), None)


def _end_all(ranks: list[RankProcess], owner: int) -> None:
    """Kill all processes, and wait for their ends. A fork of their owner leaves them alone."""
    if os.getpid() != owner:
        return
    for process in ranks:
        process.child.kill()
        process.channel.close()
    _, alive = wait([process.child.exit_status for process in ranks], EXIT_SECONDS)
    if alive:
        logger.error("%d ranks were killed and have not ended", len(alive))


def _relay(rank: int, line: LogLine) -> None:
    """Log what a rank has logged. What all ranks do, rank 0 alone tells."""
    if rank and line.level < logging.WARNING:
        return
    target = logging.getLogger(line.logger)
    if target.isEnabledFor(line.level):
        record = logging.LogRecord(line.logger, line.level, "", 0, line.text, None, None)
        record.created = line.time
        target.handle(record)
