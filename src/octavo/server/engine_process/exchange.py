"""Messages to and from the engine process of one replica: commands, replies and reports."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any, Protocol

from octavo.engine.events import Admitted
from octavo.engine.results import error_of
from octavo.errors import OctavoError, Unavailable
from octavo.server.engine_process import messages as m
from octavo.server.engine_process.journal import OpenRequest, Pin
from octavo.server.engine_process.process import EngineProcess

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # until an engine that is being replaced may reply again
_tickets = itertools.count()  # of all exchanges, so that a late reply is never taken for another


class Reader(Protocol):
    """Callbacks for what the engine processes of replicas say. `number` is the replica's."""

    def answered(self, entry: OpenRequest, error: OctavoError | None) -> None:
        """An engine has accepted a request, or refused it."""

    def admitted(self, entry: OpenRequest, admitted: Admitted) -> None:
        """A request got its first blocks."""

    def reported(self, number: int, report: m.StepReport) -> None:
        """An engine has taken a step."""

    def pinned(self, number: int, pin: Pin, error: OctavoError | None) -> None:
        """An engine has computed a prefix, or could not."""


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
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._accepting: dict[int, OpenRequest] = {}
        self._pinning: dict[int, Pin] = {}
        self._searching: dict[str, OpenRequest] = {}  # beam searches that run, by request id
        self._admissions: list[Admitted] = []  # since the last report

    # ---------------------------------------------------------------- processes come and go

    @property
    def has_work(self) -> bool:
        """Whether the process has unfinished work."""
        return bool(self.open or self._asked or self._pinning)

    def begin(self, process: EngineProcess) -> None:
        """Called when a process is ready."""
        self._process = process
        self.has_advanced = False
        if self._is_watched:
            process.send(m.Watch(True))

    def lose(self, reason: str) -> tuple[list[OpenRequest], list[Pin]]:
        """Called when the process is gone; no more messages come from it. Returns the requests and
        the unfinished pins that it had."""
        self._process = None
        for future in self._asked.values():
            if not future.done():
                future.set_exception(Unavailable(reason, RETRY_SECONDS))
        entries, pins = [*self.open.values()], [*self._pinning.values()]
        for table in (self.open, self._searching, self._asked, self._accepting, self._pinning):
            table.clear()
        self._admissions.clear()
        return entries, pins

    # ---------------------------------------------------------------- what it is asked for

    def send_request(self, entry: OpenRequest) -> None:
        """Have the process begin with a request, or go on with it."""
        assert self._process is not None, "there is no engine process"
        entry.replica, entry.ticket = self._number, next(_tickets)
        self.open[entry.request_id] = self._accepting[entry.ticket] = entry
        self._process.send(entry.add_message(entry.ticket))

    def forget(self, entry: OpenRequest) -> None:
        """What still comes of a request is ignored: it has ended, or goes on elsewhere."""
        self.open.pop(entry.request_id, None)
        self._searching.pop(entry.request_id, None)

    def send_pin(self, pin: Pin) -> None:
        """Have the process compute and pin a prefix."""
        assert self._process is not None, "there is no engine process"
        ticket = next(_tickets)
        self._pinning[ticket] = pin
        pin.holders.add(self._number)
        pin.computing.add(self._number)
        self._process.send(m.Pin(ticket, pin.name, pin.token_ids, pin.cache_salt))

    async def unpin(self, pin: Pin) -> None:
        """Unpin a prefix. Raises Unavailable if there is no engine or it dies meanwhile."""
        self._forget_pin(pin)
        await self.ask(m.Unpin, name=pin.name)

    def release_pin(self, pin: Pin) -> None:
        """Unpin a prefix without waiting for the reply."""
        self._forget_pin(pin)
        if self._process is not None:
            self._process.send(m.Unpin(next(_tickets), pin.name))

    def tell(self, command: m.Abort | m.FinishSample | m.OfferTail) -> None:
        """Send a command that has no reply; does nothing if there is no engine."""
        if self._process is not None:
            self._process.send(command)

    def watch(self, on: bool) -> None:
        """Subscribe to all events, or unsubscribe."""
        self._is_watched = on
        if self._process is not None:
            self._process.send(m.Watch(on))

    async def ask(self, make: type[m.Look | m.Unpin | m.ResetPrefixCache], **fields: Any) -> Any:
        """Send a command, and return the contents of Seen, or None. Raises the engine's error, and
        Unavailable if there is no engine or it dies meanwhile."""
        if self._process is None:
            raise Unavailable("there is no engine process to ask", RETRY_SECONDS)
        ticket = next(_tickets)
        future = self._asked[ticket] = asyncio.get_running_loop().create_future()
        self._process.send(make(ticket=ticket, **fields))
        try:
            return await future
        finally:
            self._asked.pop(ticket, None)

    # ---------------------------------------------------------------- what the process says

    def receive(self, message: m.Message) -> None:
        """Handle one message from the current process."""
        if isinstance(message, m.StepReport):
            self._take_report(message)
        elif isinstance(message, m.Admission):
            self._take_admission(message.admitted)
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
        for entry in self._searching.values():
            entry.num_steps += 1
        report.admitted, self._admissions = self._admissions, []
        self._reader.reported(self._number, report)

    def _take_admission(self, admitted: Admitted) -> None:
        self._admissions.append(admitted)
        entry = self.open.get(admitted.request_id)
        if entry is None or not entry.is_accepted:
            return  # it was about an earlier request with the same id
        entry.is_running = True
        if entry.request.beam is not None:
            self._searching[entry.request_id] = entry
        self._reader.admitted(entry, admitted)

    def _take_reply(self, ticket: int, error: OctavoError | None) -> None:
        if (entry := self._accepting.pop(ticket, None)) is not None:
            if self.open.get(entry.request_id) is entry and entry.ticket == ticket:
                entry.is_accepted = error is None
                self._reader.answered(entry, error)
        elif (pin := self._pinning.pop(ticket, None)) is not None:
            self.has_advanced = True
            self._reader.pinned(self._number, pin, error)
        else:
            self._resolve(ticket, None, error)

    def _forget_pin(self, pin: Pin) -> None:
        """If it is still being computed, the command to unpin it gets the only reply."""
        self._pinning = {ticket: p for ticket, p in self._pinning.items() if p is not pin}

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
