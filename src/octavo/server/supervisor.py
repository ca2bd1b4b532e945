"""Starts the engine process, watches it, and starts another when it is gone.

A new process gets the pinned prefixes and all open requests, with what they have generated so far.
Draws depend on a request's seed and position alone, so they go on as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from octavo.config import EngineConfig
from octavo.engine.events import Admitted
from octavo.errors import ConfigError, EngineFailed, OctavoError, RequestFailed, Unavailable
from octavo.server import messages as m
from octavo.server.journal import Journal, OpenRequest, Pin
from octavo.server.process import COMMAND, EngineProcess

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "failed", "closed"]
TICK_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Supervision:
    """How patient the supervisor is. Times in seconds."""

    max_waiting: int = 1024  # requests that may wait for their first block; more are refused
    stall_seconds: float = 30.0  # without a step while work waits: unhealthy
    hang_seconds: float = 300.0  # the same: the engine process is killed and replaced
    start_seconds: float = 1800.0  # for an engine process to become ready
    max_fruitless_restarts: int = 5  # in a row, without a new token: the engine is given up

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(field.name, f"{value} is not positive")


class Owner(Protocol):
    """Who is told what the engine processes say and what becomes of them."""

    def engine_ready(self, info: m.EngineInfo) -> None: ...

    def engine_died(self, cause: str) -> None: ...

    def admitted(self, admitted: Admitted) -> None: ...

    def reported(self, report: m.StepReport) -> None: ...

    def failed(self, entry: OpenRequest, error: OctavoError) -> None:
        """A request is given up; it is no longer in the journal."""


class Supervisor:
    """Owns the engine process that runs now, and decides what it gets."""

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
        self._seconds_without_step = 0.0  # while there was something to do
        self._down_since = 0.0  # only for the state "restarting"
        self.is_watched = False  # whether the engine sends all events
        self._config = config
        self._supervision = supervision
        self._journal = journal
        self._owner = owner
        self._command = command
        self._process: EngineProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._tickets = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._pinning: dict[int, Pin] = {}
        self._accepting: dict[int, OpenRequest] = {}
        self._accepted: dict[str, asyncio.Future[None]] = {}  # by request id
        self._searching: dict[str, OpenRequest] = {}  # beam searches that run, by request id
        self._suspects: deque[OpenRequest] = deque()  # run one at a time; the first has been sent
        self._num_fruitless = 0
        self._has_advanced = False  # this engine process has brought tokens

    async def start(self) -> None:
        """Start the first engine process; raises what it raised."""
        try:
            await self._launch()
        except BaseException:
            self.state = "failed"
            raise
        self._keeper = asyncio.create_task(self._keep())
        self._keeper.add_done_callback(_report_bug)

    async def close(self) -> None:
        """End the engine process for good."""
        self.state = "closed"
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        if self._process is not None:
            await self._process.end()
            self._process = None
        self._refuse_asked("the server has closed")

    @property
    def seconds_stalled(self) -> float:
        """How long no step has come, while something was to be done or there was no engine."""
        if self.state == "restarting":
            return time.monotonic() - self._down_since
        return self._seconds_without_step

    # ---------------------------------------------------------------- what the client asks for

    def open(self, entry: OpenRequest) -> asyncio.Future[None]:
        """Take a request into the journal; the future is done when the engine has accepted it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._journal.requests[entry.request_id] = entry
        self._accepted[entry.request_id] = future
        if self.state == "ready" and not self._suspects:
            self._send_request(entry)
        return future

    def drop(self, entry: OpenRequest) -> None:
        """A request has ended, or nobody wants it any more."""
        del self._journal.requests[entry.request_id]
        self._accepted.pop(entry.request_id, None)
        self._searching.pop(entry.request_id, None)
        self._end_trial()

    def tell(self, command: m.Abort | m.FinishSample) -> None:
        """A command without an answer. An engine that is not there need not be told."""
        if self.state == "ready" and self._process is not None:
            self._process.send(command)

    def pin(self, pin: Pin) -> None:
        """Pin a prefix in this engine process and all later ones; `pin.computed` says when."""
        self._journal.pins[pin.name] = pin
        if self.state == "ready":
            self._send_pin(pin)

    async def unpin(self, pin: Pin) -> None:
        """Neither this engine process nor a later one shall keep it."""
        del self._journal.pins[pin.name]
        if self.state == "ready":
            # An engine that dies meanwhile has forgotten it, too.
            with contextlib.suppress(Unavailable):
                await self.ask(m.Unpin, name=pin.name)

    async def ask(self, make: type[m.Look] | type[m.Unpin], **fields: Any) -> Any:
        """A command with an answer: what Seen holds, or None. Raises what the engine raised, and
        Unavailable if there is none or it dies meanwhile."""
        if self.state != "ready" or self._process is None:
            raise Unavailable(f"the engine is not there to be asked ({self.state})", 1.0)
        ticket = next(self._tickets)
        future = self._asked[ticket] = asyncio.get_running_loop().create_future()
        self._process.send(make(ticket=ticket, **fields))
        try:
            return await future
        finally:
            self._asked.pop(ticket, None)

    def watch(self, on: bool) -> None:
        """Whether all events are wanted from now on."""
        self.is_watched = on
        if self.state == "ready" and self._process is not None:
            self._process.send(m.Watch(on))

    # ---------------------------------------------------------------- one process after another

    async def _launch(self) -> None:
        """Start a process and give it what is open."""
        process = EngineProcess(self._command, self._receive)
        level = min(logging.INFO, logging.getLogger("octavo").getEffectiveLevel())
        info = await process.start(m.Start(self._config, level), self._supervision.start_seconds)
        self._process = process
        self.state = "ready"
        self._seconds_without_step = 0.0
        self._has_advanced = False
        self._owner.engine_ready(info)
        if self.is_watched:
            process.send(m.Watch(True))
        for pin in self._journal.pins.values():
            self._send_pin(pin)
        self._send_waiting()

    async def _keep(self) -> None:
        """Replace the process whenever it is gone."""
        while True:
            cause = await self._wait_for_death()
            self.state = "restarting"
            self._down_since = time.monotonic()
            self._count_death(cause)
            while self.state == "restarting":
                if self._num_fruitless > self._supervision.max_fruitless_restarts:
                    self._give_up(cause)
                    return
                if self._num_fruitless:
                    await asyncio.sleep(min(MAX_BACKOFF_SECONDS, 0.1 * 2**self._num_fruitless))
                self.num_restarts += 1
                try:
                    await self._launch()
                except Exception as error:
                    cause = str(error)
                    logger.error("the engine process could not be started again: %s", cause)
                    self._num_fruitless += 1

    async def _wait_for_death(self) -> str:
        """Watch the process until it is gone; one that hangs is killed. Returns how it ended."""
        process = self._process
        assert process is not None, "there is a process to watch"
        while not process.gone.done():
            await asyncio.wait([process.gone], timeout=TICK_SECONDS)
            # Counted in ticks: time in which this process did not run is nobody's fault.
            self._seconds_without_step += TICK_SECONDS
            if not self._has_work:
                self._seconds_without_step = 0.0
            elif self._seconds_without_step >= self._supervision.hang_seconds:
                logger.error(
                    "the engine process has not finished a step for %.0f s; it is killed",
                    self._seconds_without_step,
                )
                process.kill()
                await process.gone
        return await process.end()

    @property
    def _has_work(self) -> bool:
        is_running = any(entry.is_sent for entry in self._journal.requests.values())
        return is_running or bool(self._asked or self._pinning)

    def _count_death(self, cause: str) -> None:
        """Learn from it, and prepare for the next process."""
        process, self._process = self._process, None
        assert process is not None, "the one that died"
        logger.error(
            "the engine process %d died (%s); %d requests are open",
            process.pid,
            cause,
            len(self._journal.requests),
        )
        self._owner.engine_died(cause)
        had_work = self._has_work
        self._refuse_asked("the engine process died")
        self._accepting.clear()
        self._searching.clear()
        is_fruitless = had_work and not self._has_advanced
        self._num_fruitless = self._num_fruitless + 1 if is_fruitless else 0
        running = [entry for entry in self._journal.requests.values() if entry.is_running]
        on_trial = self._suspects[0] if self._suspects else None
        for entry in self._journal.requests.values():
            entry.note_death()
        alone = running[0] if len(running) == 1 else on_trial
        if alone is not None and alone in running and alone.is_suspect:
            self._convict(alone, cause)
        self._suspects = deque(e for e in self._journal.requests.values() if e.is_suspect)
        self._count_death_of_pins(cause)

    def _count_death_of_pins(self, cause: str) -> None:
        for pin in self._pinning.values():
            pin.num_deaths += 1
            if pin.num_deaths >= 2:
                self._drop_pin(
                    pin, RequestFailed(f"the engine process died twice while it computed ({cause})")
                )
        self._pinning.clear()

    def _convict(self, entry: OpenRequest, cause: str) -> None:
        self._num_fruitless = 0
        self._fail(
            entry,
            RequestFailed(
                f"the engine process died {entry.num_deaths} times while it computed request "
                f"{entry.request_id!r} and nothing else that could have been the cause (last: "
                f"{cause}); the request is not tried again"
            ),
        )

    def _give_up(self, cause: str) -> None:
        self.state = "failed"
        message = (
            f"the engine process died {self._num_fruitless} times in a row without having computed "
            f"anything (last: {cause})"
        )
        logger.critical("%s; the engine is given up", message)
        for entry in list(self._journal.requests.values()):
            self._fail(entry, EngineFailed(message))

    def _fail(self, entry: OpenRequest, error: OctavoError) -> None:
        logger.error("request %s has failed: %s", entry.request_id, error)
        future = self._accepted.get(entry.request_id)
        if future is not None and not future.done():
            future.set_exception(error)
        self.drop(entry)
        self._owner.failed(entry, error)

    def _refuse_asked(self, reason: str) -> None:
        for future in self._asked.values():
            if not future.done():
                future.set_exception(Unavailable(reason, 1.0))
        self._asked.clear()

    # ---------------------------------------------------------------- what the process gets

    def _send_waiting(self) -> None:
        """Send what has not been sent: all, or the first of the suspects alone."""
        entries = list(self._journal.requests.values())
        for entry in [self._suspects[0]] if self._suspects else entries:
            if not entry.is_sent:
                self._send_request(entry)

    def _send_pin(self, pin: Pin) -> None:
        assert self._process is not None, "only a process that is ready gets prefixes"
        ticket = next(self._tickets)
        self._pinning[ticket] = pin
        self._process.send(m.Pin(ticket, pin.name, pin.token_ids, pin.cache_salt))

    def _send_request(self, entry: OpenRequest) -> None:
        assert self._process is not None, "only a process that is ready gets requests"
        ticket = next(self._tickets)
        self._accepting[ticket] = entry
        entry.is_sent = True
        self._process.send(entry.add_message(ticket))

    def _end_trial(self) -> None:
        """Go on to the next suspect if the first has ended, or has got past where it was."""
        was_on_trial = len(self._suspects)
        while self._suspects:
            entry = self._suspects[0]
            is_open = self._journal.requests.get(entry.request_id) is entry
            if is_open and entry.position <= entry.position_at_death:
                break
            self._suspects.popleft()
            entry.num_deaths = 0
        if len(self._suspects) < was_on_trial and self.state == "ready":
            self._send_waiting()

    # ---------------------------------------------------------------- what the process says

    def _receive(self, message: m.Message) -> None:
        if isinstance(message, m.StepReport):
            self._seconds_without_step = 0.0
            self._has_advanced = self._has_advanced or bool(message.deltas or message.finished)
            for searching in self._searching.values():
                searching.num_steps += 1
            self._owner.reported(message)
            if self._suspects:
                self._end_trial()
        elif isinstance(message, Admitted):
            entry = self._journal.requests.get(message.request_id)
            if entry is not None:
                entry.is_running = True
                if entry.request.beam is not None:
                    self._searching[entry.request_id] = entry
            self._owner.admitted(message)
        elif isinstance(message, m.Reply):
            self._take_reply(message)
        elif isinstance(message, m.Seen):
            self._resolve(message.ticket, message.snapshot or message.request)
        elif isinstance(message, m.LogLine):
            _log(message)
        elif isinstance(message, m.Crashed):
            logger.error("the engine process failed: %s\n%s", message.message, message.traceback)

    def _take_reply(self, reply: m.Reply) -> None:
        error = None if reply.error is None else m.error_of(reply.error)
        pin = self._pinning.pop(reply.ticket, None)
        if pin is not None:
            self._take_pin_reply(pin, error)
            return
        entry = self._accepting.pop(reply.ticket, None)
        if entry is None:
            self._resolve(reply.ticket, None, error)
            return
        if self._journal.requests.get(entry.request_id) is not entry:
            return  # given up meanwhile
        future = self._accepted.pop(entry.request_id, None)
        if future is not None and not future.done():
            if error is None:
                future.set_result(None)
            else:
                self.drop(entry)
                future.set_exception(error)
        elif error is not None:
            self._fail(entry, error)

    def _take_pin_reply(self, pin: Pin, error: OctavoError | None) -> None:
        self._has_advanced = True
        pin.num_deaths = 0
        if error is not None:
            self._drop_pin(pin, error)
        elif not pin.computed.done():
            pin.computed.set_result(None)

    def _resolve(self, ticket: int, value: Any, error: Exception | None = None) -> None:
        future = self._asked.pop(ticket, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _drop_pin(self, pin: Pin, error: OctavoError) -> None:
        logger.error("prefix %r could not be pinned: %s", pin.name, error)
        self._journal.pins.pop(pin.name, None)
        if not pin.computed.done():
            pin.computed.set_exception(error)


def _report_bug(keeper: asyncio.Task[None]) -> None:
    if not keeper.cancelled() and (error := keeper.exception()) is not None:
        logger.critical("the supervision of the engine process has ended", exc_info=error)


def _log(line: m.LogLine) -> None:
    """Give a record of the engine process to the loggers of this one."""
    target = logging.getLogger(line.logger)
    if target.isEnabledFor(line.level):
        record = target.makeRecord(line.logger, line.level, "", 0, line.message, (), None)
        record.created = line.time
        target.handle(record)
