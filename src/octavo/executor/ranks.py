"""A group of ranks: told the same, watched, ended together. Loads no torch."""

from __future__ import annotations

import logging
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NoReturn

from octavo.channel import frame
from octavo.config import EngineConfig
from octavo.core.step import StepResult
from octavo.errors import EngineFailed, ProcessKilled
from octavo.executor.launching import (
    EXIT_SECONDS,
    Ending,
    Launcher,
    LocalLauncher,
    RankProcess,
)
from octavo.executor.messages import Failed, LogLine, Ready, decode, encode
from octavo.models.config import ModelConfig

logger = logging.getLogger(__name__)


class RankGroup:
    """Owns all ranks. When one of them fails, all are killed, and every call from then on raises
    what went wrong."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        launcher: Launcher | None = None,
    ) -> None:
        """Start `config.tensor_parallel_size` ranks, and wait until they can compute.

        Args:
            config: the settings, which each rank adapts to its device.
            model_config: of the whole model.
            launcher: how the ranks come to be; None: as processes of this machine.

        Raises:
            ConfigError, ModelError, OutOfMemory: the settings, the files or the machine do not do,
                in the rank that was the first to say so. EngineFailed: a rank broke down. No
                process is left then.
        """
        self._seconds = config.rank_timeout
        self._error: Exception | None = None
        self._launcher = launcher or LocalLauncher()
        self._ranks: Sequence[RankProcess] = ()
        self._received: deque[tuple[int, Any]] = deque()  # (rank, Ready or StepResult)
        self._poll = select.poll()
        self._end = weakref.finalize(self, _end, self._launcher, os.getpid())
        level = min(logging.INFO, logging.getLogger("octavo").getEffectiveLevel())
        try:
            self._ranks = self._launcher.launch(config, model_config, level)
            for process in self._ranks:
                self._poll.register(process.channel, select.POLLIN)
                self._send_to(process, frame(encode(process.start)))
            self.ready = self._wait_until_ready()
        except BaseException:
            self.close()
            raise

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
        """Wait for the next answer of any rank: (rank, Ready or StepResult). Without a deadline as
        long as it takes, but not for ranks that were stopped."""
        while not self._received:
            seconds = self._seconds if deadline is None else max(0.0, deadline - time.monotonic())
            if events := self._poll.poll(seconds * 1e3):
                self._read(events)
            elif deadline is not None:
                self._fail(self._hang("a step has not been computed"))
            elif self._stopped():
                self._fail(self._hang("the ranks that start have said nothing"))
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
        if stopped := self._stopped():
            return EngineFailed(f"{text}: {stopped} was stopped")
        return EngineFailed(f"{text}; raise it if steps take so long")

    def _stopped(self) -> str:
        """Names the ranks that were stopped, if there are any."""
        return ", ".join(str(each) for each in self._ranks if each.is_stopped())

    def _bury(self, process: RankProcess, failed: Failed | None = None) -> NoReturn:
        """A rank has ended, or says that it fails. Find out which rank was the first."""
        others = {each.ended: each for each in self._ranks}
        if failed is None:
            wait([process.ended], EXIT_SECONDS)
            failed = _last_words(process)
        else:
            del others[process.ended]  # which ends because of its error
            _wait_for_cause(others, self._launcher.cause_seconds)
        for ended, each in others.items():
            if ended.done() and ended.result().is_cause:
                text, _, was_killed = ended.result()
                error = f"{each}: {text}"
                self._fail(ProcessKilled(error) if was_killed else EngineFailed(error))
        if failed is not None:
            if isinstance(failed.error, EngineFailed):  # no mistake of the user's
                logger.error("rank %d: %s", process.rank, failed.traceback)
            self._fail(failed.error)
        how = process.ended.result().text if process.ended.done() else "it has closed its socket"
        self._fail(EngineFailed(f"{process}: {how}"))

    def _fail(self, error: Exception) -> NoReturn:
        self._error = error
        self.close()
        raise error


def _last_words(process: RankProcess) -> Failed | None:
    """What a rank that has ended said of it, if that was not received yet."""
    messages = process.channel.receive(0) or ()
    return next((each for each in map(decode, messages) if isinstance(each, Failed)), None)


def _wait_for_cause(ends: Iterable[Future[Ending]], seconds: float) -> None:
    """Wait until one of them is the cause of others' errors, if that is to come."""
    pending, deadline = set(ends), time.monotonic() + seconds
    while pending and (left := deadline - time.monotonic()) > 0:
        done, pending = wait(pending, left, FIRST_COMPLETED)
        if any(ended.result().is_cause for ended in done):
            return


def _end(launcher: Launcher, owner: int) -> None:
    """End all processes. A fork of their owner leaves them alone."""
    if os.getpid() == owner:
        launcher.close()


def _relay(rank: int, line: LogLine) -> None:
    """Log what a rank has logged. What all ranks do, rank 0 alone tells."""
    if rank and line.level < logging.WARNING:
        return
    target = logging.getLogger(line.logger)
    if target.isEnabledFor(line.level):
        record = logging.LogRecord(line.logger, line.level, "", 0, line.text, None, None)
        record.created = line.time
        target.handle(record)
