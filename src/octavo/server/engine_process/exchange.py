"""Messages to and from the engine process: commands, replies and reports."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Any, Protocol

from octavo.engine.events import Admitted
from octavo.engine.results import error_of
from octavo.errors import OctavoError, RequestFailed, Unavailable
from octavo.server.engine_process import messages as m
from octavo.server.engine_process.journal import Journal, OpenRequest, Pin
from octavo.server.engine_process.process import Death, EngineProcess
from octavo.server.engine_process.quarantine import Quarantine

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # until an engine that is being replaced may reply again


class Owner(Protocol):
    """Callbacks for messages from engine processes and for their end."""

    def engine_ready(self, info: m.EngineInfo) -> None: ...

    def engine_died(self, cause: str) -> None: ...

    def accepted(self, entry: OpenRequest) -> None:
        """A request was accepted for the first time; a later engine may accept it again."""

    def admitted(self, entry: OpenRequest | None, admitted: Admitted) -> None:
        """A request got its first blocks; None if it is no longer open."""

    def reported(self, report: m.StepReport) -> None: ...

    def failed(self, entry: OpenRequest, error: OctavoError) -> None:
        """A request has failed; it is no longer in the journal."""


class Exchange:
    """Owns the communication with the current process, if there is one. Open requests and pins are
    in the journal, so that they can be sent to the next process."""

    def __init__(self, journal: Journal, owner: Owner) -> None:
        self.num_reports = 0  # steps of all processes
        self.has_advanced = False  # this process has generated tokens, or pinned a prefix
        self._journal = journal
        self._owner = owner
        self._process: EngineProcess | None = None
        self._quarantine = Quarantine(journal)
        self._is_watched = False
        self._tickets = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._pinning: dict[int, Pin] = {}
        self._accepting: dict[int, OpenRequest] = {}
        self._accepted: dict[str, asyncio.Future[None]] = {}  # by request id
        self._searching: dict[str, OpenRequest] = {}  # beam searches that run, by request id

    # ---------------------------------------------------------------- processes come and go

    @property
    def has_work(self) -> bool:
        """Whether the process has unfinished work."""
        is_sent = any(entry.is_sent for entry in self._journal.requests.values())
        return is_sent or bool(self._asked or self._pinning)

    def begin(self, process: EngineProcess) -> None:
        """Called when a process is ready: sends it all open requests and pins."""
        self._process = process
        self.has_advanced = False
        if self._is_watched:
            process.send(m.Watch(True))
        for pin in self._journal.pins.values():
            self._send_pin(process, pin)
        self._send_requests(process)

    def lose(self, reason: str) -> None:
        """Called when the process is gone; no more messages come from it."""
        self._process = None
        for future in self._asked.values():
            if not future.done():
                future.set_exception(Unavailable(reason, RETRY_SECONDS))
        for table in (self._asked, self._accepting, self._searching):
            table.clear()

    def blame(self, death: Death) -> bool:
        """Find what caused the process's death. True if that will not be tried again."""
        killer = self._quarantine.note_death(death)
        if killer is not None:
            self._fail_killer(killer, death)
        is_blamed = killer is not None
        for pin in self._pinning.values():
            if pin.computed.done():
                continue  # an earlier engine has computed it without dying
            pin.num_deaths += 1
            if pin.num_deaths >= 2:
                is_blamed = True
                message = f"the engine process died twice while it computed it ({death.cause})"
                self._drop_pin(pin, RequestFailed(message))
        self._pinning.clear()
        return is_blamed

    def fail(self, entry: OpenRequest, error: OctavoError) -> None:
        """Fail a request."""
        logger.error("request %s has failed: %s", entry.request_id, error)
        future = self._accepted.get(entry.request_id)
        if future is not None and not future.done():
            future.set_exception(error)
        self.drop(entry)
        self._owner.failed(entry, error)

    def give_up(self, error: OctavoError) -> None:
        """Fail all open requests and unfinished pins, since no other process will be started."""
        for entry in list(self._journal.requests.values()):
            self.fail(entry, error)
        for pin in [pin for pin in self._journal.pins.values() if not pin.computed.done()]:
            self._drop_pin(pin, error)

    # ---------------------------------------------------------------- what the client asks for

    def open(self, entry: OpenRequest) -> asyncio.Future[None]:
        """Add a request to the journal; the future is done when an engine has accepted it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._journal.add(entry)
        self._accepted[entry.request_id] = future
        if self._process is not None and self._quarantine.first is None:
            self._send_request(self._process, entry)
        return future

    def drop(self, entry: OpenRequest) -> None:
        """A request has ended, or its client has left."""
        if self._journal.requests.get(entry.request_id) is not entry:
            return  # refused while its client was leaving
        self._journal.remove(entry)
        future = self._accepted.pop(entry.request_id, None)
        if (
            future is not None and not future.done()
        ):  # ended by a caller other than the one that waits
            future.set_exception(Unavailable("the request was ended before it was accepted"))
        self._searching.pop(entry.request_id, None)
        self._release_from_quarantine()

    def tell(self, command: m.Abort | m.FinishSample) -> None:
        """Send a command that has no reply; does nothing if there is no engine."""
        if self._process is not None:
            self._process.send(command)

    def watch(self, on: bool) -> None:
        """Subscribe to all events, or unsubscribe."""
        self._is_watched = on
        if self._process is not None:
            self._process.send(m.Watch(on))

    async def ask(self, make: type[m.Look] | type[m.Unpin], **fields: Any) -> Any:
        """Send a command, and return the contents of Seen, or None. Raises the engine's error, and
        Unavailable if there is no engine or it dies meanwhile."""
        if self._process is None:
            raise Unavailable("there is no engine process to ask", RETRY_SECONDS)
        ticket = next(self._tickets)
        future = self._asked[ticket] = asyncio.get_running_loop().create_future()
        self._process.send(make(ticket=ticket, **fields))
        try:
            return await future
        finally:
            self._asked.pop(ticket, None)

    def pin(self, pin: Pin) -> None:
        """Pin a prefix in this engine process and all later ones; sets `pin.computed` when done."""
        self._journal.pins[pin.name] = pin
        if self._process is not None:
            self._send_pin(self._process, pin)

    async def unpin(self, pin: Pin) -> None:
        """Unpin a prefix in this engine process and all later ones."""
        del self._journal.pins[pin.name]
        # If it is still being computed, this command gets the only reply.
        self._pinning = {ticket: p for ticket, p in self._pinning.items() if p is not pin}
        # If the engine dies meanwhile, the prefix is no longer pinned either.
        with contextlib.suppress(Unavailable):
            await self.ask(m.Unpin, name=pin.name)

    # ---------------------------------------------------------------- what the process gets

    def _send_requests(self, process: EngineProcess) -> None:
        """Send all requests not sent yet, or only the first quarantined one."""
        alone = self._quarantine.first
        for entry in list(self._journal.requests.values()) if alone is None else [alone]:
            if not entry.is_sent:
                self._send_request(process, entry)

    def _send_request(self, process: EngineProcess, entry: OpenRequest) -> None:
        ticket = next(self._tickets)
        self._accepting[ticket] = entry
        entry.is_sent = True
        process.send(entry.add_message(ticket))

    def _send_pin(self, process: EngineProcess, pin: Pin) -> None:
        ticket = next(self._tickets)
        self._pinning[ticket] = pin
        process.send(m.Pin(ticket, pin.name, pin.token_ids, pin.cache_salt))

    def _release_from_quarantine(self) -> None:
        if self._quarantine.release() and self._process is not None:
            self._send_requests(self._process)

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
        self._owner.reported(report)
        self._release_from_quarantine()

    def _take_admission(self, admitted: Admitted) -> None:
        entry = self._journal.requests.get(admitted.request_id)
        if entry is not None and not entry.is_accepted:
            entry = None  # it was about an earlier request with the same id
        if entry is not None:
            entry.is_running = True
            self._journal.note_start(entry)
            if entry.request.beam is not None:
                self._searching[entry.request_id] = entry
        self._owner.admitted(entry, admitted)

    def _take_reply(self, ticket: int, error: OctavoError | None) -> None:
        pin = self._pinning.pop(ticket, None)
        entry = self._accepting.pop(ticket, None)
        if pin is not None:
            self._take_pin_reply(pin, error)
        elif entry is None:
            self._resolve(ticket, None, error)
        elif self._journal.requests.get(entry.request_id) is entry:  # else given up meanwhile
            self._take_acceptance(entry, error)

    def _take_acceptance(self, entry: OpenRequest, error: OctavoError | None) -> None:
        future = self._accepted.pop(entry.request_id, None)
        entry.is_accepted = error is None
        if future is None or future.done():
            if error is not None:  # an earlier engine had accepted it
                self.fail(entry, error)
        elif error is None:
            self._owner.accepted(entry)
            future.set_result(None)
        else:
            self.drop(entry)
            future.set_exception(error)

    def _take_pin_reply(self, pin: Pin, error: OctavoError | None) -> None:
        self.has_advanced = True
        if error is None:
            if not pin.computed.done():
                pin.computed.set_result(None)
            return
        if pin.computed.done():  # an earlier engine had computed it
            logger.error("prefix %r could not be pinned again: %s", pin.name, error)
        self._drop_pin(pin, error)

    def _resolve(self, ticket: int, value: Any, error: Exception | None) -> None:
        future = self._asked.pop(ticket, None)
        if future is None or future.done():
            return  # its caller no longer waits
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _drop_pin(self, pin: Pin, error: OctavoError) -> None:
        if self._journal.pins.get(pin.name) is pin:
            del self._journal.pins[pin.name]
        if not pin.computed.done():
            pin.computed.set_exception(error)

    def _fail_killer(self, entry: OpenRequest, death: Death) -> None:
        error = RequestFailed(
            f"the engine process died {entry.num_deaths} times in the same place while it computed "
            f"request {entry.request_id!r} ({death.cause}); the request is not tried again"
        )
        self.fail(entry, error)


def _log(line: m.LogLine) -> None:
    """Pass a log record of the engine process to the loggers of this process."""
    target = logging.getLogger(line.logger)
    if target.isEnabledFor(line.level):
        record = target.makeRecord(line.logger, line.level, "", 0, line.message, (), None)
        record.created = line.time
        target.handle(record)
