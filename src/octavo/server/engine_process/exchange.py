"""Messages to and from the engine process of one replica: commands, replies and reports."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.engine.events import Admitted
from octavo.engine.results import error_of
from octavo.engine.snapshot import Snapshot
from octavo.errors import OctavoError, Unavailable
from octavo.server.engine_process import messages as m
from octavo.server.engine_process.assignments import Assignments
from octavo.server.engine_process.journal import Assignment, OpenRequest, Pin
from octavo.server.engine_process.process import EngineProcess

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # until an engine that is being replaced may reply again
_tickets = itertools.count()  # of all exchanges, so that a late reply is never taken for another


class Reader(Protocol):
    """Callbacks for the messages of engine processes. `number` is the replica's."""

    def answered(self, entry: OpenRequest, error: OctavoError | None) -> None:
        """An engine has accepted a request, or refused it."""

    def admitted(self, entry: OpenRequest, admitted: Admitted) -> None:
        """A request got its first blocks."""

    def reported(self, number: int, report: m.StepReport) -> None:
        """An engine has taken a step."""

    def pinned(self, number: int, pin: Pin, error: OctavoError | None) -> None:
        """An engine has computed a prefix, or could not."""

    def let_go(self, number: int) -> None:
        """An engine has stopped computing something that was taken away from it."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a process that died was working on."""

    entries: list[OpenRequest]
    pins: list[Pin]  # prefixes that it had still to compute
    # What it may have been computing, including what was taken away from it.
    at_risk: dict[OpenRequest, Assignment]

    @property
    def only_one(self) -> OpenRequest | None:
        """The request that must have crashed the process, unless it was killed from outside: it
        cannot have been computing anything else that might."""
        if len(self.at_risk) != 1 or not all(pin.is_proven for pin in self.pins):
            return None
        return next(iter(self.at_risk))


class Exchange:
    """Owns the communication with the current process of a replica, if there is one."""

    def __init__(self, number: int, reader: Reader) -> None:
        self.num_reports = 0  # steps of all processes
        self.has_advanced = False  # this process has generated tokens, or pinned a prefix
        self.open: dict[str, OpenRequest] = {}  # the requests that it has, by their ids
        self._number = number
        self._reader = reader
        self._process: EngineProcess | None = None
        self._is_watched = False
        self._num_commands = 0  # that this process was sent
        self._assignments = Assignments()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._pinning: dict[int, Pin] = {}
        # Prefixes being unpinned, with the number of that command.
        self._unpinning: deque[tuple[int, Pin]] = deque()
        self._searching: dict[str, Assignment] = {}  # beam searches that run, by request id
        self._admissions: list[Admitted] = []  # since the last report
        self._looking = asyncio.Lock()  # held until the picture that was asked for has come
        self._picture: asyncio.Task[Snapshot] | None = None  # the one that is to be asked for

    # ---------------------------------------------------------------- processes come and go

    @property
    def has_work(self) -> bool:
        """Whether the process has unfinished work."""
        return bool(
            self._asked or self._pinning or self._unpinning or not self._assignments.is_empty
        )

    @property
    def is_vacant(self) -> bool:
        """Whether the process computes nothing that might crash it."""
        pins = [*self._pinning.values(), *(pin for _, pin in self._unpinning)]
        return self._assignments.is_empty and all(pin.is_proven for pin in pins)

    def begin(self, process: EngineProcess) -> None:
        """Called when a process is ready."""
        self._process = process
        self.has_advanced, self._num_commands = False, 0
        if self._is_watched:
            self._send(m.Watch(True))

    def lose(self, reason: str) -> Loss:
        """Called when the process is gone; no more messages come from it."""
        self._process = None
        for future in self._asked.values():
            if not future.done():
                future.set_exception(Unavailable(reason, RETRY_SECONDS))
        pins = [*self._pinning.values(), *(pin for _, pin in self._unpinning)]
        loss = Loss([*self.open.values()], pins, self._assignments.at_risk())
        for table in (self.open, self._searching, self._asked, self._pinning):
            table.clear()
        self._assignments.clear()
        self._unpinning.clear()
        self._admissions.clear()
        return loss

    # ---------------------------------------------------------------- what it is asked for

    def send_request(self, entry: OpenRequest, load: int) -> None:
        """Have the process start or continue a request."""
        entry.assignment = Assignment(entry, self._number, next(_tickets), load)
        self._assignments.begin(entry.assignment)
        self.open[entry.request_id] = entry
        self._send(entry.add_message(entry.assignment.ticket))

    def forget(self, entry: OpenRequest) -> None:
        """Ignore further results of a request, which has ended or continues elsewhere. The process
        knows that: it was sent a command, or reported the end itself."""
        if entry.assignment is not None:
            self._assignments.leave(entry.assignment)
            entry.assignment = None
        self.open.pop(entry.request_id, None)
        self._searching.pop(entry.request_id, None)

    def send_pin(self, pin: Pin) -> None:
        """Have the process compute and pin a prefix."""
        ticket = next(_tickets)
        self._pinning[ticket] = pin
        pin.holders.add(self._number)
        pin.computing.add(self._number)
        self._send(m.Pin(ticket, pin.name, pin.token_ids, pin.cache_salt))

    async def unpin(self, pin: Pin) -> None:
        """Unpin a prefix. Raises Unavailable if there is no engine or it dies meanwhile."""
        self._forget_pin(pin)
        await self.ask(m.Unpin, name=pin.name)

    def release_pin(self, pin: Pin) -> None:
        """Unpin a prefix without waiting for the reply."""
        self._forget_pin(pin)
        if self._process is not None:
            self._send(m.Unpin(next(_tickets), pin.name))

    def tell(self, entry: OpenRequest, command: m.Abort | m.FinishSample | m.OfferTail) -> None:
        """Send a command that has no reply, about a request that the process has."""
        if self._process is not None and entry.assignment is not None:
            self._send(command)
            if not isinstance(command, m.OfferTail):
                entry.assignment.left_at = self._num_commands

    def watch(self, on: bool) -> None:
        """Subscribe to all events, or unsubscribe."""
        self._is_watched = on
        if self._process is not None:
            self._send(m.Watch(on))

    async def ask(self, make: type[m.Look | m.Unpin | m.ResetPrefixCache], **fields: Any) -> Any:
        """Send a command, and return the contents of Seen, or None. Raises the engine's error, and
        Unavailable if there is no engine or it dies meanwhile."""
        if self._process is None:
            raise Unavailable("there is no engine process to ask", RETRY_SECONDS)
        ticket = next(_tickets)
        future = self._asked[ticket] = asyncio.get_running_loop().create_future()
        self._send(make(ticket=ticket, **fields))
        try:
            return await future
        finally:
            self._asked.pop(ticket, None)

    async def picture(self) -> Snapshot:
        """A snapshot that is taken after this call. Raises as `ask`.

        All who call before it is asked for share it, and none is asked for before the one before
        has come: however many look, the engine does not spend its time on it.
        """
        if self._picture is None:
            self._picture = asyncio.create_task(self._take_picture())
        return await asyncio.shield(self._picture)

    async def _take_picture(self) -> Snapshot:
        async with self._looking:
            self._picture = None
            picture: Snapshot = await self.ask(m.Look)
            return picture

    def _send(self, command: m.Command) -> None:
        assert self._process is not None, "there is no engine process"
        self._num_commands += 1
        self._process.send(command)

    # ---------------------------------------------------------------- what the process says

    def receive(self, message: m.Message) -> None:
        """Handle one message from the current process."""
        if isinstance(message, m.StepReport):
            self._take_report(message)
        elif isinstance(message, m.Admission):
            self._take_admission(message.admitted)
        elif isinstance(message, m.Acknowledged):
            self._take_acknowledgement(message.num_commands)
        elif isinstance(message, m.Reply):
            error = None if message.error is None else error_of(message.error)
            self._take_reply(message.ticket, error)
        elif isinstance(message, m.Seen):
            self._resolve(message.ticket, message.snapshot or message.request, None)
        elif isinstance(message, m.LogLine):
            _log(message)
        elif isinstance(message, m.Crashed):
            logger.error("the engine process failed: %s\n%s", message.message, message.traceback)

    def _take_report(self, report: m.StepReport) -> None:
        self.num_reports += 1
        self.has_advanced = self.has_advanced or report.results.has_any
        for assignment in self._searching.values():
            assignment.num_steps += 1
        report.admitted, self._admissions = self._admissions, []
        self._assignments.end(
            (end.request_id for end in report.results.finished), report.is_computing
        )
        self._reader.reported(self._number, report)
        self._take_acknowledgement(report.num_commands)

    def _take_acknowledgement(self, num_commands: int) -> None:
        has_let_go = self._assignments.acknowledge(num_commands)
        while self._unpinning and self._unpinning[0][0] <= num_commands:
            self._unpinning.popleft()
            has_let_go = True
        if has_let_go:
            self._reader.let_go(self._number)

    def _take_admission(self, admitted: Admitted) -> None:
        self._admissions.append(admitted)
        assignment = self._assignments.admit(admitted.request_id)
        if assignment is None or assignment is not assignment.entry.assignment:
            return  # it was about a request that was taken away
        if assignment.entry.request.beam is not None:
            self._searching[admitted.request_id] = assignment
        self._reader.admitted(assignment.entry, admitted)

    def _take_reply(self, ticket: int, error: OctavoError | None) -> None:
        if (assignment := self._assignments.answer(ticket, error is None)) is not None:
            if assignment is assignment.entry.assignment:
                self._reader.answered(assignment.entry, error)
        elif (pin := self._pinning.pop(ticket, None)) is not None:
            self.has_advanced = True
            self._reader.pinned(self._number, pin, error)
        else:
            self._resolve(ticket, None, error)

    def _forget_pin(self, pin: Pin) -> None:
        """Called before the command to unpin it, which gets the only reply if it is still being
        computed."""
        for ticket in [ticket for ticket, each in self._pinning.items() if each is pin]:
            del self._pinning[ticket]
            self._unpinning.append((self._num_commands + 1, pin))

    def _resolve(self, ticket: int, value: Any, error: Exception | None) -> None:
        future = self._asked.pop(ticket, None)
        if future is None or future.done():
            return  # its caller no longer waits
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def _log(line: m.LogLine) -> None:
    """Pass a log record of the engine process to the loggers of this process."""
    target = logging.getLogger(line.logger)
    if target.isEnabledFor(line.level):
        record = target.makeRecord(line.logger, line.level, "", 0, line.message, (), None)
        record.created = line.time
        target.handle(record)
