"""Server-sent events as the ASGI server sees them: pings, clients that leave, clients that wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from sse_starlette import EventSourceResponse
from starlette.types import ASGIApp, Message

from octavo.errors import ConfigError
from octavo.outputs import RequestOutput, SequenceDelta
from octavo.server.engine_process.stream import RequestStream
from octavo.server.http.app import create_app
from octavo.server.http.settings import ServerSettings
from octavo.server.http.streams import EventStream, merged
from server.clients import run, symbolic_client
from server.symbolic_engine import expected_tokens

PING = b": ping\n\n"
PATHS = ("/v1/completions", "/v1/chat/completions")


def scope_of(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }


class Client:
    """Sends one request to an application, and notes what comes back."""

    def __init__(self, **body: Any) -> None:
        self._body: bytes | None = json.dumps(body | {"stream": True}).encode()
        self.pieces: list[bytes] = []
        self.has_begun = asyncio.Event()
        self.leaves = asyncio.Event()
        self.reads = asyncio.Event()  # while it is not set, nothing is taken from the server
        self.reads.set()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.headers = {name: value.decode() for name, value in message["headers"]}
        if message.get("body"):
            self.pieces.append(message["body"])
            self.has_begun.set()

    async def ask(self, app: ASGIApp, path: str) -> None:
        await app(scope_of(path), self.receive, self.send)

    @property
    def events(self) -> list[Any]:
        """All events but the last, [DONE]."""
        *events, done = [
            each.removeprefix("data: ")
            for each in b"".join(self.pieces).decode().split("\n\n")
            if each and not each.startswith(":")
        ]
        assert done == "[DONE]"
        return list(map(json.loads, events))


def completion(num_tokens: int) -> dict[str, Any]:
    fixed = {"ignore_eos": True, "return_token_ids": True, "seed": 0}
    return {"prompt": [1, 2], "max_tokens": num_tokens} | fixed


def chat(num_tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}], "max_tokens": num_tokens}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ping_seconds", [0.02, 0.0])
def test_a_slow_request_gets_pings(path: str, ping_seconds: float) -> None:
    async def test() -> None:
        settings = ServerSettings(("demo",), ping_seconds=ping_seconds)
        async with symbolic_client("step=0.1") as http:
            body = completion(3) if path == PATHS[0] else chat(3)
            client = Client(**body)
            await client.ask(create_app(http, settings), path)
            assert (PING in client.pieces) == (ping_seconds > 0)
            assert client.headers[b"content-type"].startswith("text/event-stream")
            assert client.headers[b"x-accel-buffering"] == "no"
            assert b"connection" not in client.headers
            assert client.pieces[-1] != PING, "nothing follows the end"
            if path == PATHS[0]:
                tokens = [t for e in client.events for c in e["choices"] for t in c["token_ids"]]
                assert tokens == expected_tokens([1, 2], 0, 0, 3)

    run(test())


def test_a_client_that_leaves_ends_its_request() -> None:
    async def test() -> None:
        async with symbolic_client("step=0.01") as http:
            client = Client(**completion(2000))
            task = asyncio.create_task(
                client.ask(create_app(http, ServerSettings(("demo",))), PATHS[0])
            )
            await client.has_begun.wait()
            assert len(http.open_requests) == 1
            client.leaves.set()
            await task
            assert http.open_requests == {}
            assert b"[DONE]" not in client.pieces[-1]

    run(test())


def test_a_client_that_reads_slowly_gets_few_large_pieces() -> None:
    async def test() -> None:
        num_tokens = 400
        settings = ServerSettings(("demo",), ping_seconds=0.01)
        async with symbolic_client() as http:
            client = Client(**completion(num_tokens))
            task = asyncio.create_task(client.ask(create_app(http, settings), PATHS[0]))
            await client.has_begun.wait()
            client.reads.clear()
            while http.open_requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # some pings later
            num_before = len(client.pieces)
            client.reads.set()
            await task
            assert client.pieces[num_before:].count(PING) <= 2, "pings do not pile up"
            tokens = [t for e in client.events for c in e["choices"] for t in c["token_ids"]]
            assert tokens == expected_tokens([1, 2], 0, 0, num_tokens)
            assert len(client.pieces) - num_before < num_tokens / 4

    run(test())


@pytest.mark.parametrize("leaves", [True, False])
def test_the_end_of_a_stream_is_told_once(leaves: bool) -> None:
    """Also the generator behind it ends, at once: it may hold a viewer's place."""

    async def test() -> None:
        ends: list[str] = []

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                yield b"data: 1\n\n"
                if leaves:
                    await asyncio.Event().wait()
            finally:
                ends.append("generator")

        client = Client()
        await client.receive()
        stream = EventStream(events(), 15.0, lambda: ends.append("stream"))
        task = asyncio.create_task(stream(scope_of("/"), client.receive, client.send))
        await client.has_begun.wait()
        if leaves:
            client.leaves.set()
        await task
        assert ends == ["generator", "stream"]

    run(test())


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 1e9])
def test_pings_come_at_a_time(seconds: float) -> None:
    with pytest.raises(ConfigError, match="ping_seconds"):
        ServerSettings(("demo",), ping_seconds=seconds)


def test_the_library_sends_events_by_the_method_that_event_streams_override() -> None:
    """Under another name, each event would cost a cancel scope again."""
    assert "_send_with_timeout" in vars(EventSourceResponse)
    assert EventStream._send_with_timeout is not EventSourceResponse._send_with_timeout


class Piecewise:
    """A stream whose pieces come when the test says so."""

    def __init__(self) -> None:
        self.pieces = asyncio.Queue[SequenceDelta | RequestOutput]()

    async def __anext__(self) -> SequenceDelta | RequestOutput:
        return await self.pieces.get()


def test_a_piece_of_one_stream_is_no_work_for_the_others() -> None:
    """Of 200 prompts in one request, of which most wait while one is answered."""
    num_callbacks = 0

    class Counting(asyncio.Task[Any]):
        def add_done_callback(self, *args: Any, **options: Any) -> None:
            nonlocal num_callbacks
            num_callbacks += 1
            super().add_done_callback(*args, **options)

    async def test() -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda loop, work, **options: Counting(work, loop=loop, **options))
        streams = [Piecewise() for _ in range(200)]
        for number in range(100):
            streams[7].pieces.put_nowait(SequenceDelta("r", 0, str(number), [number], []))
        pieces = merged(cast("list[RequestStream]", streams))
        found = [await anext(pieces) for _ in range(100)]
        assert [(index, each.text) for index, each in found] == [  # type: ignore[union-attr]
            (7, str(number)) for number in range(100)
        ]
        assert num_callbacks < 200 + 2 * 100
        await pieces.aclose()  # type: ignore[attr-defined]

    asyncio.run(test())
