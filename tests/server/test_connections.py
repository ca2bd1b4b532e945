"""Clients that are slow, silent or too many; on a real socket, with the clock moved by hand."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from octavo.server.http import protocol as http_protocol
from octavo.server.http.listener import MAX_SPARE, HttpServer
from octavo.server.http.protocol import MIN_BODY_RATE, dispatch
from octavo.server.http.settings import ConnectionLimits, Listening
from server.clients import run

GET = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
EARLY = b"POST /early HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
HIGH_WATER = 1 << 16  # bytes; with more of them unsent, asyncio pauses the application
# So long that what a test itself takes, on a busy machine, counts for nothing beside them.
LIMITS = ConnectionLimits(
    header_seconds=1000, body_seconds=2000, keep_alive_seconds=3000, unread_seconds=4000
)


class App:
    """Reads the body, unless the path is `/early`; `/wait` is answered when `go_on` is set, `/host`
    with the Host header, `/flood` without end."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.num_running = 0
        self.num_begun = 0
        self.num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_running += 1
        self.num_begun += 1
        try:
            if scope["path"] == "/early":
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"early"})
                return
            while (message := await receive()).get("more_body"):
                pass
            if message["type"] == "http.disconnect":
                return
            if scope["path"] == "/wait":
                await self.go_on.wait()
            if scope["path"] == "/host":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                host = dict(scope["headers"])[b"host"]
                await send({"type": "http.response.body", "body": host})
                return
            headers = [] if scope["path"] == "/flood" else [(b"content-length", b"2")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while scope["path"] == "/flood" and not self.go_on.is_set():
                await send({"type": "http.response.body", "body": bytes(99_999), "more_body": True})
                self.num_sent += 1
            await send({"type": "http.response.body", "body": b"ok"})
        finally:
            self.num_running -= 1


class Rig:
    """A server and its clients."""

    def __init__(self, limits: ConnectionLimits, listener: socket.socket | None = None) -> None:
        self.app = App()
        self.listener = socket.socket() if listener is None else listener
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(1000)
        self.server = HttpServer(self.app, self.listener, Listening(), limits)
        self.server.start()
        self.connections = self.server.connections
        self.writers: list[asyncio.StreamWriter] = []  # one that is collected closes its connection

    async def connect(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        port = self.listener.getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        self.writers.append(writer)
        writer.write(data)
        return reader, writer

    async def until(self, condition: Any) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    def pass_time(self, seconds: float) -> None:
        """Check all connections as if so much time had passed."""
        self.connections.check(time.monotonic() + seconds)


@contextlib.asynccontextmanager
async def rig(
    limits: ConnectionLimits = LIMITS, listener: socket.socket | None = None
) -> AsyncIterator[Rig]:
    made = Rig(limits, listener)
    with made.listener:
        yield made
        made.app.go_on.set()
        await made.server.close(0.0)
        for writer in made.writers:
            writer.close()


def status_of(reply: bytes) -> int:
    return int(reply.split(maxsplit=2)[1])


def test_slow_clients_are_ended_each_in_its_time() -> None:
    async def test() -> None:
        async with rig() as made:
            silent, _ = await made.connect(b"")
            blank, _ = await made.connect(b"\r\n" * 9)
            head, _ = await made.connect(b"GET / HTTP/1.1\r\nHost: ")
            body, _ = await made.connect(POST % 10 + b"{")
            idle, _ = await made.connect(GET % b"")
            busy, _ = await made.connect(GET % b"wait")
            assert status_of(await idle.readuntil(b"ok")) == 200
            await made.until(lambda: made.app.num_running == 2)
            await made.until(lambda: len(made.connections.waiting) == 4)

            made.pass_time(900)
            assert len(made.connections.open) == 6
            made.pass_time(1100)
            assert (await silent.read(), await blank.read()) == (b"", b"")
            assert status_of(await head.readuntil(b"}}")) == 408
            made.pass_time(1900)
            assert made.app.num_running == 2
            made.pass_time(2100)
            late = await body.readuntil(b"}}")
            assert status_of(late) == 408
            assert json.loads(late.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
            await made.until(lambda: made.app.num_running == 1)
            made.pass_time(3100)
            assert await idle.read() == b""
            made.pass_time(1_000_000)
            assert len(made.connections.open) == 1
            made.app.go_on.set()
            assert status_of(await busy.readuntil(b"ok")) == 200

    run(test())


def test_a_refused_client_that_stays_is_ended() -> None:
    async def test() -> None:
        async with rig() as made:
            reader, _ = await made.connect(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 129 + b"\r\n")
            assert status_of(await reader.readuntil(b"}}")) == 431
            made.pass_time(http_protocol.LINGER_SECONDS + 1)
            assert await reader.read() == b""

    run(test())


def test_trailers_are_bounded_like_headers() -> None:
    chunked = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"

    async def test() -> None:
        async with rig() as made:
            many, _ = await made.connect(chunked + b"a: b\r\n" * 200)
            assert status_of(await many.readuntil(b"}}")) == 431
            long, writer = await made.connect(chunked + b"a: ")
            reply = asyncio.create_task(long.readuntil(b"}}"))
            while not reply.done():
                writer.write(b"a" * 10_000)
                await asyncio.sleep(0)
            assert status_of(await reply) == 431
            assert made.connections.num_body_bytes == 0

    run(test())


def test_a_slow_upload_that_goes_on_may_take_longer() -> None:
    async def test() -> None:
        async with rig() as made:
            seconds = 15  # so few that no more has come than the application takes at once
            size = seconds * MIN_BODY_RATE
            reader, writer = await made.connect(POST % (size + 1) + bytes(size))
            await made.until(lambda: len(made.connections.receiving) == 1)
            [connection] = made.connections.receiving
            await made.until(lambda: connection._num_body_bytes == size)
            made.pass_time(LIMITS.body_seconds + seconds / 2)
            writer.write(b"}")
            assert status_of(await reader.readuntil(b"ok")) == 200

    run(test())


def test_an_early_reply_does_not_free_a_client_from_sending_its_body() -> None:
    async def test() -> None:
        async with rig(ConnectionLimits(1)) as made:
            holder, _ = await made.connect(GET % b"wait")
            await made.until(lambda: made.app.num_running == 1)
            made.connections.limits = LIMITS
            reader, _ = await made.connect(EARLY % 10 + b"{")
            assert status_of(await reader.readuntil(b"early")) == 401
            await made.until(lambda: len(made.connections.receiving) == 1)
            made.pass_time(LIMITS.body_seconds + 1)
            assert b"408" in await reader.readuntil(b"}}")
            holder.feed_eof()

    run(test())


def test_a_client_that_reads_nothing_is_ended() -> None:
    async def test() -> None:
        async with rig() as made:
            _, writer = await made.connect(GET % b"flood")
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            [connection] = await wait_for_one(made)
            transport = connection.transport
            await made.until(lambda: transport.get_write_buffer_size() > HIGH_WATER)
            made.pass_time(0)  # the first check
            num_sent = made.app.num_sent
            made.pass_time(LIMITS.unread_seconds - 100)
            assert made.app.num_running == 1
            assert made.app.num_sent == num_sent
            made.pass_time(LIMITS.unread_seconds + 1)
            assert made.connections.closed["that read nothing"] == 1
            made.app.go_on.set()
            await made.until(lambda: made.app.num_running == 0)

    run(test())


async def wait_for_one(made: Rig) -> list[Any]:
    await made.until(lambda: made.app.num_running == 1)
    return list(made.connections.open)


def test_everybody_beyond_the_limit_gets_a_reply() -> None:
    async def test() -> None:
        async with rig(ConnectionLimits(3)) as made:
            for _ in range(3):
                await made.connect(GET % b"wait")
            await made.until(lambda: made.app.num_running == 3)
            clients = [await made.connect(POST % 100_000) for _ in range(3 * MAX_SPARE)]
            assert len(made.connections.spare) <= MAX_SPARE
            for reader, writer in clients:
                writer.write(bytes(100_000))
                reply = await reader.read()
                assert status_of(reply) == 503
                assert b"retry-after: 1\r\n" in reply
                assert b"too_many_connections" in reply
                writer.close()
            reader, _ = await made.connect(GET % b"health")
            assert status_of(await reader.read()) == 200
            assert made.connections.closed["refused for want of room"] == 3 * MAX_SPARE + 1
            made.app.go_on.set()

    run(test())


def test_those_without_a_whole_request_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(http_protocol, "GRACE_SECONDS", 1000.0)
        async with rig(ConnectionLimits(3)) as made:
            await made.connect(GET % b"wait")
            body, _ = await made.connect(POST % 10)
            await made.until(lambda: len(made.connections.receiving) == 1)
            head, _ = await made.connect(b"GET")
            await made.until(lambda: len(made.connections.waiting) == 1)
            young, _ = await made.connect(GET % b"")
            assert status_of(await young.read()) == 503
            monkeypatch.setattr(http_protocol, "GRACE_SECONDS", 0.0)
            for victim in (head, body):
                reader, _ = await made.connect(GET % b"wait")
                with contextlib.suppress(ConnectionResetError):
                    assert await victim.read() == b""
            await made.until(lambda: made.app.num_running == 3)
            made.app.go_on.set()
            assert status_of(await reader.readuntil(b"ok")) == 200

    run(test())


def test_the_end_of_a_spare_connection_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(http_protocol, "GRACE_SECONDS", 0.0)
        async with rig(ConnectionLimits(1)) as made:
            await made.connect(GET % b"wait")
            await made.until(lambda: made.app.num_running == 1)
            await made.connect(b"")
            await made.until(lambda: len(made.connections.spare) == 1)
            reader, _ = await made.connect(GET % b"wait")
            assert status_of(await reader.read()) == 503
            assert made.app.num_running == 1

    run(test())


def test_all_that_can_be_replaced_are_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(http_protocol, "GRACE_SECONDS", 1000.0)
        async with rig(ConnectionLimits(20)) as made:
            for _ in range(20 + MAX_SPARE):
                await made.connect(b"")
            await made.until(lambda: len(made.connections.spare) == MAX_SPARE)
            for _ in range(10):
                await made.connect(b"")
            reader, _ = await made.connect(GET % b"")
            await asyncio.sleep(0.2)
            monkeypatch.setattr(http_protocol, "GRACE_SECONDS", 0.2)
            made.connections.when_spare_ends()
            assert status_of(await reader.readuntil(b"ok")) == 200
            assert len(made.connections.spare) == MAX_SPARE

    run(test())


def test_unfinished_bodies_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(http_protocol, "MAX_BODIES_BYTES", 10_000)
        async with rig() as made:
            clients = []
            for count in range(1, 6):
                clients.append(await made.connect(POST % 4_001 + bytes(4_000)))
                await made.until(lambda: made.app.num_begun == count)  # noqa: B023
                await made.until(lambda: made.connections.num_body_bytes >= 4_000 * min(count, 2))  # noqa: B023
            for reader, _ in clients[:3]:
                reply = await reader.readuntil(b"}}")
                assert status_of(reply) == 503
                assert b"\r\nretry-after: 1\r\n" in reply
            for reader, writer in clients[3:]:
                writer.write(b"}")
                assert status_of(await reader.readuntil(b"ok")) == 200
            assert made.connections.num_body_bytes == 0

    run(test())


class Exhausted(socket.socket):
    """A listening socket of a process that may open no more files."""

    num_failures = 3
    num_accepts = 0

    def accept(self) -> Any:
        self.num_accepts += 1
        if self.num_accepts <= self.num_failures:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_files_connections_wait() -> None:
    async def test() -> None:
        listener = Exhausted()
        async with rig(listener=listener) as made:
            reader, _ = await made.connect(GET % b"")
            assert status_of(await reader.readuntil(b"ok")) == 200
            # One for each failure, which is followed by a pause; the client's; and the last.
            assert listener.num_accepts <= listener.num_failures + 2

    run(test())


def test_an_absolute_uri_names_the_host_of_its_own_request() -> None:
    absolute = b"GET http://other.example:80/host HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def test() -> None:
        async with rig() as made:
            reader, _ = await made.connect(GET % b"host" + absolute + GET % b"host" + GET % b"")
            text = await reader.readuntil(b"ok")
            hosts = re.findall(rb"localhost|other.example:80", text)
            assert hosts == [b"localhost", b"other.example:80", b"localhost"]

    run(test())


@pytest.mark.parametrize(("path", "reply"), [(b"host", b"localhost"), (b"", b"ok")])
def test_a_client_of_http_1_0_gets_no_chunks(path: bytes, reply: bytes) -> None:
    async def test() -> None:
        async with rig() as made:
            request = (GET % path).replace(b"1.1", b"1.0\r\nConnection: keep-alive")
            reader, _ = await made.connect(request)
            head, body = (await reader.read()).split(b"\r\n\r\n", 1)
            assert body == reply
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            assert (b"content-length" in head) == (path == b"")

    run(test())


def test_a_client_of_http_1_0_that_reads_nothing_is_waited_for() -> None:
    async def test() -> None:
        async with rig() as made:
            reader, _ = await made.connect((GET % b"flood").replace(b"1.1", b"1.0"))
            num_sent = -1
            while num_sent < made.app.num_sent:
                num_sent = made.app.num_sent
                await asyncio.sleep(0.1)
            made.app.go_on.set()
            _, body = (await reader.read()).split(b"\r\n\r\n", 1)
            assert body == bytes(99_999 * made.app.num_sent) + b"ok"

    run(test())


def test_uvicorn_protocols_have_what_its_own_server_uses() -> None:
    """All that `Connection` relies on, beside what asyncio calls: should uvicorn change it, this
    test says so."""
    signature = inspect.signature(HttpToolsProtocol.__init__)
    assert {"config", "server_state", "app_state"} <= signature.parameters.keys()
    assert not inspect.signature(HttpToolsProtocol.shutdown).parameters.keys() - {"self"}
    state = ServerState()
    assert (state.tasks, state.default_headers, state.total_requests) == (set(), [], 0)
    config = uvicorn.Config(dispatch, http="httptools", ws="none", lifespan="off")
    config.load()
    assert config.http_protocol_class is HttpToolsProtocol
