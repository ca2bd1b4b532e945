"""A connection: uvicorn's HTTP/1.1, behind bounds on what a client may send and how slowly.

`Connection` stands between the socket and uvicorn's protocol. It parses what comes in with a parser
of its own (the same httptools), so that it can track the progress of each request; it refuses what
is too large, too slow or not HTTP, and forwards everything else unchanged. It uses uvicorn as
uvicorn's own server does: a protocol is made from a config, a `ServerState` and an `app_state`, is
called as asyncio calls protocols, and has a `shutdown`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Literal, cast

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from octavo.server.http.errors import ApiError
from octavo.server.http.settings import ConnectionLimits

MAX_HEAD_BYTES = 1 << 16  # of a request line and its headers
MAX_HEADERS = 128
MIN_BODY_RATE = 4096  # bytes per second, after ConnectionLimits.body_seconds
LINGER_SECONDS = 2.0  # for a client to read why it was refused
SPARE_SECONDS = 3.0  # the whole life of a connection beyond max_connections
MAX_BODIES_BYTES = 1 << 28  # of all bodies that have not been received to their end
RETRY_SECONDS = 1.0  # for clients that were refused for want of room
GRACE_SECONDS = 1.0  # a younger connection is not closed to make room for another
CONNECTION = "octavo.connection"  # the key in a scope's state under which its connection is

Phase = Literal["none", "head", "body"]  # what of a request is being received


async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
    """The application that uvicorn calls: leads each request back to its connection."""
    connection: Connection = scope["state"].pop(CONNECTION)
    await connection.respond(scope, receive, send)


class Connections:
    """Owns all connections of a server, and knows which of them may be closed to make room."""

    def __init__(self, limits: ConnectionLimits, when_spare_ends: Callable[[], None]) -> None:
        self.limits = limits
        self.when_spare_ends = when_spare_ends
        self.uvicorn = ServerState()
        self.open: set[Connection] = set()
        # Those whose TLS handshake has not ended.
        self.arriving: dict[Connection, asyncio.Task[None]] = {}
        # Connections without a request, or with an unfinished one, in the order in which they
        # became so: with the time at which they did.
        self.waiting: dict[Connection, float] = {}
        self.receiving: dict[Connection, float] = {}
        self.num_body_bytes = 0  # of those in `receiving`
        self.spare: set[Connection] = set()  # beyond max_connections
        self.num_ended = 0
        self.closed: Counter[str] = Counter()  # by the server, and why; since the last log line

    @property
    def is_full(self) -> bool:
        num_open = len(self.open) + len(self.arriving) - len(self.spare)
        return num_open >= self.limits.max_connections

    def has_room(self, now: float) -> bool:
        """Whether one more connection is within the limit, or takes the place of another."""
        return not self.is_full or self._replaceable(now) is not None

    def make_room(self, now: float) -> bool:
        """Close the connection that has been without a whole request for longest. False if each of
        them has one, or is too young to tell."""
        oldest = self._replaceable(now)
        if oldest is None:
            return False
        if oldest in self.arriving:
            self.closed["to make room"] += 1
            self.arriving.pop(oldest).cancel()
        else:
            oldest.end("to make room")
        return True

    def _replaceable(self, now: float) -> Connection | None:
        """The connection that `make_room` closes; none of `spare`, whose end makes no room."""
        shaking = next((each for each in self.arriving if each not in self.spare), None)
        if shaking is not None and now - shaking.start_time >= GRACE_SECONDS:
            return shaking
        for group in (self.waiting, self.receiving):
            oldest = next((each for each in group if each not in self.spare), None)
            if oldest is not None and now - group[oldest] >= GRACE_SECONDS:
                return oldest
        return None

    def bound_bodies(self) -> None:
        """Refuse the bodies that have been coming for longest, while all take too much memory."""
        while self.num_body_bytes > MAX_BODIES_BYTES and len(self.receiving) > 1:
            self.closed["with a body for which there was no room"] += 1
            next(iter(self.receiving)).refuse_body()

    def check(self, now: float) -> None:
        """End what is overdue; to be called about once a second."""
        for connection in list(self.open):
            connection.check(now)


class Connection(asyncio.Protocol):
    """One connection. What is no HTTP, is too large or too slow is refused in the one shape of
    errors; uvicorn would wait for it without end."""

    transport: asyncio.Transport

    def __init__(self, config: uvicorn.Config, connections: Connections, app: ASGIApp) -> None:
        """`config` is loaded, and has `dispatch` for its application; `app` answers requests."""
        self._all = connections
        self._app = app
        make: Callable[..., Any] = config.http_protocol_class
        self._http = make(
            config=config, server_state=connections.uvicorn, app_state={CONNECTION: self}
        )
        self._parser = httptools.HttpRequestParser(self)
        # As uvicorn does, so that both parsers take the same.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_made = False
        self._is_lost_to_uvicorn = False
        self._phase: Phase = "none"
        self._url = b""
        self._num_headers = 0  # and trailers
        self._num_head_bytes = 0  # of headers and trailers
        self._num_body_bytes = 0
        self._num_pending_bytes = 0  # of an incomplete header
        self._has_parsed = False  # anything, of the data that came last
        self._num_requests = 0
        # The host in the URL of each request without a complete reply.
        self._authorities: deque[bytes | None] = deque()
        self._num_unanswered = 0
        self._has_begun_reply = False
        self._too_large: str | None = None
        self.start_time = self._since = time.monotonic()  # _since: when the phase began
        self._num_unread = 0  # bytes that the client had not taken at the last check
        self._reading_since = self.start_time  # when the client was last seen to take any
        self._linger_until: float | None = None  # refused: only the end is waited for

    # ---------------------------------------------------------------- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, but have their methods.
        self.transport = cast("asyncio.Transport", transport)
        self._is_made = True
        self._all.open.add(self)
        self._all.arriving.pop(self, None)
        self._http.connection_made(transport)
        self.start_time = self._reading_since = time.monotonic()
        self._enter("none")

    def data_received(self, data: bytes) -> None:
        if self._linger_until is not None:
            return
        self._has_parsed = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # uvicorn answers as if it had not been asked for
        except httptools.HttpParserError:
            if self._too_large is not None:
                self._refuse(431, self._too_large)
            else:
                self._refuse(400, "this is no HTTP/1.1 request")
        # The parser reports a header, or a trailer, only when it is complete.
        is_pending = not self._has_parsed and self._phase != "none"
        self._num_pending_bytes = self._num_pending_bytes + len(data) if is_pending else 0
        if self._linger_until is not None:
            return
        if self._num_pending_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes")
            return
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._is_lost_to_uvicorn else self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.open.discard(self)
        self._lose_to_uvicorn(exc)
        self._all.num_ended += 1
        self.forget()

    # ---------------------------------------------------------------- what httptools calls

    def on_message_begin(self) -> None:
        self._has_parsed = True
        self._url = b""
        self._num_headers = self._num_head_bytes = self._num_body_bytes = 0
        self._enter("head")

    def on_url(self, url: bytes) -> None:
        self._has_parsed = True
        self._url += url
        if len(self._url) > MAX_HEAD_BYTES:
            self._too_large = f"the request line is longer than {MAX_HEAD_BYTES} bytes"
            raise ValueError(self._too_large)  # becomes an HttpParserError

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_parsed = True
        self._num_headers += 1
        self._num_head_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS:
            self._too_large = f"there are more than {MAX_HEADERS} headers"
            raise ValueError(self._too_large)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._too_large = f"the headers are larger than {MAX_HEAD_BYTES} bytes"
            raise ValueError(self._too_large)

    def on_headers_complete(self) -> None:
        self._has_parsed = True
        self._num_requests += 1
        self._num_unanswered += 1
        self._authorities.append(_authority(self._url))
        self._enter("body")

    def on_body(self, body: bytes) -> None:
        self._has_parsed = True
        self._num_body_bytes += len(body)
        if self in self._all.receiving:
            self._all.num_body_bytes += len(body)
            self._all.bound_bodies()

    def on_message_complete(self) -> None:
        self._has_parsed = True
        self._enter("none")

    # ---------------------------------------------------------------- what uvicorn calls

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; they come in the order in which they were received."""
        authority = self._authorities.popleft()
        if authority is not None:
            # An absolute URI names the host that is meant, whatever the header says (RFC 9112,
            # section 3.2.2).
            scope["headers"] = [
                (name, authority if name == b"host" else value) for name, value in scope["headers"]
            ]
        self._has_begun_reply = False
        if scope["http_version"] == "1.0":
            scope, send = {**scope}, self._unchunked(scope, send)

        def noting_send(message: Message) -> Awaitable[None]:
            self._has_begun_reply = True
            return send(message)

        try:
            await self._app(scope, receive, noting_send)
        finally:
            self._num_unanswered -= 1
            self._enter(self._phase)

    # ---------------------------------------------------------------- bounds in time

    def check(self, now: float) -> None:
        """End the connection if its client has been too slow."""
        limits = self._all.limits
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread < self._num_unread:
            self._reading_since = now
        self._num_unread = unread
        elapsed = now - self._since
        if self._linger_until is not None:
            if now >= self._linger_until:
                self.end()
        elif self in self._all.spare and now - self.start_time > SPARE_SECONDS:
            self.end("refused and still there")
        elif now - self._reading_since > limits.unread_seconds:
            self.end("that read nothing")
        elif self._phase == "body":
            if not self.transport.is_reading():
                self._since += min(elapsed, 1.0)  # it is this process that does not go on
            elif elapsed > limits.body_seconds + self._num_body_bytes / MIN_BODY_RATE:
                self._time_out("the body", "with an unfinished body")
        elif self._num_unanswered:
            pass
        elif self._phase == "head" and elapsed > limits.header_seconds:
            self._time_out("the headers", "with unfinished headers")
        elif self._phase == "none":
            is_new = self._num_requests == 0
            if elapsed > (limits.header_seconds if is_new else limits.keep_alive_seconds):
                self.end("without a request")

    def end(self, why: str | None = None) -> None:
        """Close the connection at once, whatever is still to be sent; `why` is for the log."""
        if why is not None:
            self._all.closed[why] += 1
        self.forget()
        self._all.open.discard(self)
        self.transport.abort()

    def shutdown(self) -> None:
        """Close the connection once the request that runs, if any, is answered."""
        self._http.shutdown()

    def forget(self) -> None:
        """The connection is closed, or will be soon: it takes no room."""
        self._all.waiting.pop(self, None)
        self._leave_receiving()
        self._all.arriving.pop(self, None)
        if self in self._all.spare:
            self._all.spare.remove(self)
            self._all.when_spare_ends()

    def refuse_body(self) -> None:
        """Refuse the rest of a body, since too much memory is taken by bodies."""
        message = f"bodies that are being received have more than {MAX_BODIES_BYTES} bytes"
        self._refuse(503, message, "too_many_bodies", RETRY_SECONDS)

    @property
    def is_made(self) -> bool:
        """Whether the TLS handshake, if there is one, has succeeded."""
        return self._is_made

    # ---------------------------------------------------------------- inside

    def _unchunked(self, scope: Scope, send: Send) -> Send:
        """`send` for a client of HTTP/1.0, which knows no chunks: a body whose length is not told
        beforehand goes as it is, and ends with the connection. uvicorn would send it in chunks, so
        that in its own `scope` the client asks for the head alone."""
        is_open_ended = False

        async def unchunked_send(message: Message) -> None:
            nonlocal is_open_ended
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                is_open_ended = b"content-length" not in names and scope["method"] != "HEAD"
                if is_open_ended:
                    scope["method"] = "HEAD"
            elif is_open_ended and not self._is_lost_to_uvicorn:
                self.transport.write(message.get("body", b""))
            await send(message)

        return unchunked_send

    def _enter(self, phase: Phase) -> None:
        """Note what is being received from now on."""
        now = self._since = time.monotonic()
        has_begun_waiting = self not in self._all.waiting
        self._phase = phase
        if self._linger_until is not None or self not in self._all.open:
            return
        if phase == "body":
            self._all.waiting.pop(self, None)
            self._all.receiving[self] = now
        else:
            self._leave_receiving()
            if self._num_unanswered or self.transport.is_closing():
                self._all.waiting.pop(self, None)
            elif has_begun_waiting:
                self._all.waiting[self] = now

    def _leave_receiving(self) -> None:
        if self._all.receiving.pop(self, None) is not None:
            self._all.num_body_bytes -= self._num_body_bytes

    def _time_out(self, what: str, why: str) -> None:
        self._all.closed[why] += 1
        self._refuse(408, f"{what} did not come in time", "request_timeout")

    def _refuse(
        self,
        status: int,
        message: str,
        code: str = "invalid_http",
        retry_after: float | None = None,
    ) -> None:
        """Reply, unless a reply is on its way, and close the connection once the client has had
        time to read it: closing a connection from which something has not been read resets it, and
        what was sent may be lost."""
        self.forget()
        self._linger_until = time.monotonic() + LINGER_SECONDS
        if self._num_unanswered:
            if self._has_begun_reply:
                self.end()
                return
            self._lose_to_uvicorn(ConnectionAbortedError(message))
        error = ApiError(status, message, code=code, retry_after=retry_after)
        body = msgspec.json.encode(error.reply)
        headers = {
            **error.headers,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)

    def _lose_to_uvicorn(self, error: Exception | None) -> None:
        """Tell uvicorn that its client has gone: it tells the application, and sends no more."""
        if self._is_made and not self._is_lost_to_uvicorn:
            self._is_lost_to_uvicorn = True
            self._http.connection_lost(error)


def _authority(url: bytes) -> bytes | None:
    """The host (and port) in a request's URL, as a Host header has it; None if there is none.

    Raises ValueError for a path that uvicorn would not take.
    """
    parsed = httptools.parse_url(url)
    if parsed.path is None:
        raise ValueError(f"{url[:64]!r} has no path")
    parsed.path.decode("ascii")
    if url.startswith((b"/", b"*")) or parsed.host is None:
        return None
    host = b"[%b]" % parsed.host if b":" in parsed.host else parsed.host
    return b"%b:%d" % (host, parsed.port) if parsed.port else bytes(host)
