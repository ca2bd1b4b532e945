"""One engine behind the server: its process is started, monitored, and replaced when it has died.

What a process was computing belongs to the fleet, which sends it to another replica, or to the next
process of this one. Sampling depends only on a request's seed and position, so requests resume as
if uninterrupted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from msgspec.structs import replace

from octavo.child_process import NoRoom
from octavo.config import EngineConfig
from octavo.engine.events import Counters, Gauges
from octavo.errors import EngineFailed, InvalidRequest, shown
from octavo.server.engine_process import messages as m
from octavo.server.engine_process.exchange import Exchange, Reader
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.process import COMMAND, Death, EngineProcess
from octavo.server.engine_process.supervision import Supervision

logger = logging.getLogger(__name__)

# Draining: it takes no more requests. Stopped: it has no process, and gets one only when told.
State = Literal["starting", "ready", "draining", "restarting", "stopped", "failed", "closed"]
TICK_SECONDS = 0.5
MAX_PAUSE_SECONDS = 5.0  # before another attempt after a fruitless one
NO_ROOM_SECONDS = 1.0  # between attempts while the system lacks resources for a process
MAX_REVIVAL_DOUBLINGS = 4  # limits how often Supervision.revival_seconds doubles


R = TypeVar("R")


class Owner(Reader, Protocol):
    """Callbacks for what happens to replicas; the fleet's."""

    def replica_ready(self, replica: Replica) -> None:
        """Its process can be sent requests."""

    def replica_died(self, replica: Replica, death: Death) -> bool:
        """Its process is gone. True if what caused that was found, and will not be tried again."""

    def replica_checked(self, replica: Replica) -> None:
        """Its process runs; called every TICK_SECONDS."""

    def replica_troubled(self, replica: Replica) -> None:
        """Its process could not be started again; another attempt follows."""

    def replica_given_up(self, replica: Replica, error: EngineFailed) -> None:
        """Its process is not started again for a while, or ever."""


class Replica:
    """Owns the current engine process, and decides when to start another."""

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        path: Path,
        supervision: Supervision,
        owner: Owner,
        command: Sequence[str] = COMMAND,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            number: 0, 1, ...: by which replicas are told apart.
            config: the options of its engine. Of the server's engine processes, only the first one
                of replica 0 measures what quantization loses: it is the same in all.
            path: of its model. What a hub id stands for may change before an engine starts again.
            supervision: how patient to be with the process.
            owner: gets the requests of a process that has died.
            command: starts an engine process; see `EngineProcess`.
            environment: variables of the process, beside those of this one.
        """
        self.number = number
        self.state: State = "starting"
        self.num_restarts = 0
        self.info: m.EngineInfo | None = None  # of the process that runs, or ran last
        self.gauges = Gauges()  # after the last step
        self.load = 0  # tokens of its requests, as the router counts them
        self.exchange = Exchange(number, owner)
        self._config = config if number == 0 else _unmeasured(config)
        self._path = path
        self._supervision = supervision
        self._owner = owner
        self._command = command
        self._environment = environment
        self._process: EngineProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._counters = Counters()  # of the process that runs
        self._earlier_counters = Counters()  # of those before it
        self._num_fruitless = 0  # processes in a row that died without having computed anything
        self._num_failed_starts = 0  # since a process has last run
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
        self._supervise()

    async def close(self) -> None:
        """End the engine process; it is not replaced."""
        self.state = "closed"
        await self._end_process()
        self.exchange.lose("the server has closed")

    def drain(self) -> None:
        """Take no more requests."""
        assert self.state == "ready", "only what serves can be drained"
        self.state = "draining"

    async def stop(self, state: Literal["stopped", "restarting"]) -> None:
        """End the engine process, until `restart`; the state says whether that comes next. The
        owner has taken its requests before."""
        self.state, self._down_since = state, time.monotonic()
        self._num_failed_starts = self._num_fruitless = 0  # it will be tried afresh
        await self._end_process()
        self._close_books()

    def restart(self) -> None:
        """Start another engine process in place of one that was stopped."""
        assert self._keeper is None, "a process that runs is drained and stopped first"
        self.state, self._down_since = "restarting", time.monotonic()
        self._supervise()

    # ---------------------------------------------------------------- how it is

    @property
    def pid(self) -> int | None:
        """The process id of its engine; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def is_serving(self) -> bool:
        """Whether it takes requests now."""
        return self.state == "ready"

    @property
    def has_engine(self) -> bool:
        """Whether there is an engine to which its gauges apply; it may be draining."""
        return self.state in ("ready", "draining")

    @property
    def is_unproven(self) -> bool:
        """Whether the process before this one died without having computed anything, and this one
        has not computed anything yet."""
        return self._num_fruitless > 0 and not self.exchange.has_advanced

    @property
    def is_coming(self) -> bool:
        """Whether it can be expected to serve soon."""
        return self.state == "restarting" and not self._num_failed_starts

    @property
    def is_behind(self) -> bool:
        """Whether requests wait in it for longer than until its next step, or that takes long."""
        return self.gauges.num_waiting > 0 or self._seconds_without_step >= 2 * TICK_SECONDS

    @property
    def is_vacant(self) -> bool:
        """Whether its process computes nothing that it might die of."""
        return self.exchange.is_vacant

    @property
    def counters(self) -> Counters:
        """Totals over all its processes."""
        return add_counters([self._earlier_counters, self._counters])

    @property
    def seconds_to_revival(self) -> float | None:
        """Seconds until an engine that was given up is started again; None if it will not be."""
        if self._revival_time is None:
            return None
        return max(0.0, self._revival_time - time.monotonic())

    def trouble(self, num_open: int) -> str | None:
        """Why it cannot do its work, with `num_open` requests that have not ended."""
        state, stalled = self.state, self._seconds_stalled
        if state == "failed":
            seconds = self.seconds_to_revival
            reason = "the engine is given up"
            return reason + ("" if seconds is None else f"; it is started again in {seconds:.0f} s")
        if state not in ("ready", "restarting"):
            return f"the engine is {state}"
        if stalled >= self._supervision.stall_seconds:
            what = "no engine process" if state == "restarting" else "no step"
            return f"{what} for {stalled:.0f} s while {num_open} requests are open"
        return None

    def movable(self) -> list[OpenRequest]:
        """The requests that another replica may have instead."""
        return [entry for entry in self.exchange.open.values() if entry.is_movable]

    @property
    def has_waiting(self) -> bool:
        """Whether it has requests that have not begun to run."""
        assigned = (entry.assignment for entry in self.exchange.open.values())
        return not all(each is not None and each.is_running for each in assigned)

    def take_report(self, report: m.StepReport) -> None:
        """Note how things stand after a step."""
        self.gauges, self._counters = report.gauges, report.counters

    @property
    def _seconds_stalled(self) -> float:
        """How long there has been work but no step, or no engine."""
        if self.state == "restarting":
            return time.monotonic() - self._down_since
        return self._seconds_without_step

    # ---------------------------------------------------------------- processes come and go

    async def _launch(self, is_restart: bool = False) -> None:
        """Start a process."""
        process = EngineProcess(self._command, self.exchange.receive, self._environment)
        # The process does not know our loggers' levels: it sends records below INFO only if needed.
        level = min(logging.INFO, logging.getLogger("octavo").getEffectiveLevel())
        # A process that is replaced has left its share of the host's memory behind.
        config = dataclasses.replace(self._config, host_share=1) if is_restart else self._config
        start = m.Start(config, str(self._path), level)
        info = await process.start(start, self._supervision.start_seconds)
        self._process = process
        self.num_restarts += is_restart
        self._seconds_without_step = 0.0
        self._num_failed_starts = 0
        if self.state == "failed":
            logger.warning("the engine, which had been given up, is running again")
            self._num_fruitless, self._revival_time = 0, None
        self.state = "ready"
        self.keep_quantization(info)
        self._config = _unmeasured(self._config)
        self.info = replace(info, num_restarts=self.num_restarts)
        self.gauges = Gauges(
            num_free_blocks=info.num_blocks, num_free_swap_blocks=info.num_swap_blocks
        )
        self.exchange.begin(process)
        self._owner.replica_ready(self)

    def keep_quantization(self, info: m.EngineInfo) -> None:
        """Have engines from now on load weights as that one has, if the choice was left to it:
        requests go on in any of them."""
        if self._config.quantization == "auto":
            chosen = info.load_quantization
            self._config = dataclasses.replace(self._config, quantization=chosen)

    def _supervise(self) -> None:
        self._keeper = asyncio.create_task(self._keep())
        self._keeper.add_done_callback(self._check_keeper)

    async def _end_process(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        if self._process is not None:
            await self._process.end()
            self._process = None

    async def _keep(self) -> None:
        """Have a process, and replace it whenever it has died."""
        cause = "it was stopped"
        while True:
            await self._start_again(cause)
            process = self._process
            assert process is not None, "it has just been started"
            await self._wait_until_gone(process)
            self._down_since = time.monotonic()
            self.state = "restarting"  # what comes from now on goes elsewhere
            death = await process.death()
            self._take_death(process, death)
            while not await process.ends():  # the next one needs what it has
                self._note_failed_start()
            self._process, cause = None, death.cause

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
                self._note_failed_start()
                await asyncio.sleep(NO_ROOM_SECONDS)
            except Exception as error:
                cause = str(error)
                logger.error("the engine process could not be started again: %s", cause)
                self._num_fruitless += 1
                self._note_failed_start()

    def _note_failed_start(self) -> None:
        self._num_failed_starts += 1
        self._owner.replica_troubled(self)

    async def _wait_until_gone(self, process: EngineProcess) -> None:
        """Monitor a process until nothing more comes of it; one that hangs is killed."""
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
            self._owner.replica_checked(self)

    def _take_death(self, process: EngineProcess, death: Death) -> None:
        """Record a death, and let the owner decide what caused it."""
        logger.error(
            "the engine process %d of replica %d died (%s); its open requests: %d",
            process.pid,
            self.number,
            death.cause,
            len(self.exchange.open),
        )
        had_work, has_advanced = self.exchange.has_work, self.exchange.has_advanced
        self._close_books()
        is_blamed = self._owner.replica_died(self, death)
        if had_work and not has_advanced and not is_blamed:
            self._num_fruitless += 1
        else:
            self._num_fruitless = self._num_given_up = 0

    def _close_books(self) -> None:
        """Add what the process has counted to the totals."""
        self._earlier_counters = self.counters
        self._counters, self.gauges = Counters(), Gauges()

    def _give_up(self, cause: str) -> float:
        """Try no longer for a while. Returns the seconds until the next attempt."""
        self.state = "failed"
        doublings = min(self._num_given_up, MAX_REVIVAL_DOUBLINGS)
        pause = self._supervision.revival_seconds * (1 << doublings)
        self._num_given_up += 1
        self._revival_time = time.monotonic() + pause
        message = (
            f"the engine process died {self._num_fruitless} times in a row without having computed "
            f"anything (last: {cause})"
        )
        logger.critical("%s; replica %d is given up for %.0f s", message, self.number, pause)
        self._owner.replica_given_up(self, EngineFailed(message))
        return pause

    def _check_keeper(self, keeper: asyncio.Task[None]) -> None:
        """Give up if the supervision has failed: a death of the process would go unnoticed."""
        if keeper.cancelled() or (error := keeper.exception()) is None:
            return
        self.state, self._revival_time = "failed", None
        logger.critical("the supervision of replica %d has ended", self.number, exc_info=error)
        failure = EngineFailed(f"the supervision has failed: {error!r}")
        self._owner.replica_given_up(self, failure)


def _unmeasured(config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(config, measure_quantization=False)


def find_replica(replicas: Sequence[R], number: int) -> R:
    """The replica of this number. Raises InvalidRequest: there is none."""
    if not 0 <= number < len(replicas):
        raise InvalidRequest(
            "replica", f"{shown(number)} is not one of the {len(replicas)} replicas, from 0 on"
        )
    return replicas[number]


def add_counters(all_counters: Sequence[Counters]) -> Counters:
    """The sum of several engines' totals."""
    return Counters(*map(sum, zip(*map(astuple, all_counters), strict=True)))


def add_gauges(all_gauges: Sequence[Gauges]) -> Gauges:
    """The sum of how things stand in several engines."""
    return Gauges(*map(sum, zip(*all_gauges, strict=True)))
