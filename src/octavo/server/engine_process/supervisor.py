"""Starts the engine process, monitors it, and replaces it when it has died.

A new process gets the pinned prefixes and all open requests, with what they have generated so far.
Sampling depends only on a request's seed and position, so requests resume as if uninterrupted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from msgspec.structs import replace

from octavo.child_process import NoRoom
from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineFailed, Unavailable
from octavo.server.engine_process import messages as m
from octavo.server.engine_process.exchange import Exchange, Owner
from octavo.server.engine_process.journal import Journal
from octavo.server.engine_process.process import COMMAND, Death, EngineProcess

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "failed", "closed"]
TICK_SECONDS = 0.5
MAX_PAUSE_SECONDS = 5.0  # before another attempt after a fruitless one
NO_ROOM_SECONDS = 1.0  # between attempts while the system lacks resources for a process
MAX_REVIVAL_DOUBLINGS = 4  # limits how often Supervision.revival_seconds doubles


@dataclass(frozen=True, slots=True)
class Supervision:
    """The supervisor's limits. Times in seconds."""

    max_waiting: int = 1024
    """Requests that may wait for their first block; more are refused with 429."""
    stall_seconds: float = 30.0
    """After this long without a step while requests wait, /health answers 503."""
    hang_seconds: float = 300.0
    """After this long without a step while requests wait, the engine process is replaced."""
    start_seconds: float = 1800.0
    """How long an engine process may take to become ready."""
    max_fruitless_restarts: int = 5
    """Restarts in a row, without a new token, until the engine is given up."""
    revival_seconds: float = 30.0
    """Until the next attempt to start an engine that was given up; doubles up to 8 minutes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(field.name, f"{value} is not positive")


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the server can serve requests, for /health and the metrics."""

    healthy: bool
    reason: str | None  # why not
    state: str  # "starting", "ready", "restarting", "draining", "failed" or "closed"
    num_open: int  # requests that have not ended


class Supervisor:
    """Owns the current engine process, and decides when to start another."""

    def __init__(
        self,
        config: EngineConfig,
        supervision: Supervision,
        journal: Journal,
        owner: Owner,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.state: State = "starting"
        self.num_restarts = 0
        self.exchange = Exchange(journal, owner)
        self._config = config
        self._supervision = supervision
        self._journal = journal
        self._owner = owner
        self._command = command
        self._process: EngineProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._num_fruitless = 0  # processes in a row that died without having computed anything
        self._seconds_without_step = 0.0  # while there was something to do
        self._down_since = 0.0  # only for the state "restarting"
        self._num_given_up = 0  # since a process has last computed anything
        self._revival_time: float | None = None  # only for the state "failed"

    async def start(self) -> None:
        """Start the first engine process; raises its error if it fails."""
        try:
            await self._launch()
        except BaseException:
            self.state = "failed"
            raise
        self._keeper = asyncio.create_task(self._keep())
        self._keeper.add_done_callback(self._check_keeper)

    async def close(self) -> None:
        """End the engine process; it is not replaced."""
        self.state = "closed"
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        if self._process is not None:
            await self._process.end()
            self._process = None
        self.exchange.lose("the server has closed")
        self.exchange.give_up(Unavailable("the server has closed"))

    @property
    def seconds_stalled(self) -> float:
        """How long there has been work but no step, or no engine."""
        if self.state == "restarting":
            return time.monotonic() - self._down_since
        return self._seconds_without_step

    @property
    def seconds_to_revival(self) -> float | None:
        """Seconds until an engine that was given up is started again; None if it will not be."""
        if self._revival_time is None:
            return None
        return max(0.0, self._revival_time - time.monotonic())

    def health(self, num_open: int, is_draining: bool) -> Health:
        """The server's present health, with `num_open` requests that have not ended."""
        state, stalled = self.state, self.seconds_stalled
        reason = None
        if state == "failed":
            seconds = self.seconds_to_revival
            reason = "the engine is given up"
            reason += "" if seconds is None else f"; it is started again in {seconds:.0f} s"
        elif state not in ("ready", "restarting"):
            reason = f"the engine is {state}"
        elif stalled >= self._supervision.stall_seconds:
            what = "no engine process" if state == "restarting" else "no step"
            reason = f"{what} for {stalled:.0f} s while {num_open} requests are open"
        elif is_draining:
            reason = "the server is shutting down"
        shown = "draining" if is_draining and state == "ready" else state
        return Health(reason is None, reason, shown, num_open)

    async def _launch(self, is_restart: bool = False) -> None:
        """Start a process, and send it all open requests and pins."""
        process = EngineProcess(self._command, self.exchange.receive)
        # The process does not know our loggers' levels: it sends records below INFO only if needed.
        level = min(logging.INFO, logging.getLogger("octavo").getEffectiveLevel())
        info = await process.start(m.Start(self._config, level), self._supervision.start_seconds)
        self._process = process
        self.num_restarts += is_restart
        self._seconds_without_step = 0.0
        if self.state == "failed":
            logger.warning("the engine, which had been given up, is running again")
            self._num_fruitless, self._revival_time = 0, None
        self.state = "ready"
        self._owner.engine_ready(replace(info, num_restarts=self.num_restarts))
        self.exchange.begin(process)

    async def _keep(self) -> None:
        """Replace the process whenever it has died."""
        while self._process is not None:
            death = await self._wait_for_death(self._process)
            self._down_since = time.monotonic()
            self.state = "restarting"
            self._take_death(self._process, death)
            self._process = None
            await self._start_again(death.cause)

    async def _start_again(self, cause: str) -> None:
        """Try to start a process until one runs; after too many failures, at long intervals."""
        while self._process is None:
            if self._num_fruitless > self._supervision.max_fruitless_restarts:
                await asyncio.sleep(self._give_up(cause))
            elif self._num_fruitless:
                await asyncio.sleep(min(MAX_PAUSE_SECONDS, 0.1 * 2**self._num_fruitless))
            try:
                await self._launch(is_restart=True)
            except NoRoom as error:  # not a failure of the engine
                logger.error("%s; another attempt follows", error)
                await asyncio.sleep(NO_ROOM_SECONDS)
            except Exception as error:
                cause = str(error)
                logger.error("the engine process could not be started again: %s", cause)
                self._num_fruitless += 1

    async def _wait_for_death(self, process: EngineProcess) -> Death:
        """Monitor a process until it has died; one that hangs is killed."""
        num_reports = self.exchange.num_reports
        while not process.gone.done():
            await asyncio.wait([process.gone], timeout=TICK_SECONDS)
            # Counted in ticks, so that time in which this process did not run does not count.
            self._seconds_without_step += TICK_SECONDS
            if self.exchange.num_reports > num_reports or not self.exchange.has_work:
                num_reports = self.exchange.num_reports
                self._seconds_without_step = 0.0
            elif self._seconds_without_step >= self._supervision.hang_seconds:
                logger.error(
                    "the engine process has not finished a step for %.0f s; killing it",
                    self._seconds_without_step,
                )
                process.kill()
                await process.gone
        return await process.end()

    def _take_death(self, process: EngineProcess, death: Death) -> None:
        """Record a death, decide what caused it, and prepare for the next process."""
        num_open = len(self._journal.requests)
        logger.error(
            "the engine process %d died (%s); open requests: %d", process.pid, death.cause, num_open
        )
        had_work = self.exchange.has_work
        self.exchange.lose("the engine process died")
        self._owner.engine_died(death.cause)
        is_blamed = self.exchange.blame(death)
        if had_work and not self.exchange.has_advanced and not is_blamed:
            self._num_fruitless += 1
        else:
            self._num_fruitless = self._num_given_up = 0

    def _give_up(self, cause: str) -> float:
        """Fail open requests and unfinished pins. Returns the seconds until the next attempt."""
        self.state = "failed"
        doublings = min(self._num_given_up, MAX_REVIVAL_DOUBLINGS)
        pause = self._supervision.revival_seconds * (1 << doublings)
        self._num_given_up += 1
        self._revival_time = time.monotonic() + pause
        message = (
            f"the engine process died {self._num_fruitless} times in a row without having computed "
            f"anything (last: {cause})"
        )
        logger.critical("%s; the engine is given up for %.0f s", message, pause)
        self.exchange.give_up(EngineFailed(message))
        return pause

    def _check_keeper(self, keeper: asyncio.Task[None]) -> None:
        """Fail everything that is open if the supervision itself has failed."""
        if keeper.cancelled() or (error := keeper.exception()) is None:
            return
        self.state, self._revival_time = "failed", None
        logger.critical("the supervision of the engine process has ended", exc_info=error)
        self.exchange.give_up(EngineFailed(f"the supervision has failed: {error!r}"))
