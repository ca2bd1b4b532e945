"""The clients of server_hostile.py, in a separate process: `python hostile_clients.py URL`.

Reads one command per line, `{"do": ..., ...}`, and answers each with a line of JSON once it is
done. All connections go to a loopback address, in the given numbers, and are closed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import sys
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

REPLY_SECONDS = 120.0
REOPEN_SECONDS = 1.0  # before a client reconnects after the server has closed its connection
CONNECT_AT_ONCE = 200
HEAD = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def post(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    return HEAD % path.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data


class Clients:
    """Clients that hold connections open, and clients that send requests and count the replies."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._holding: list[asyncio.Task[None]] = []
        self._connecting = asyncio.Semaphore(CONNECT_AT_ONCE)
        self._num_open = 0

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        work = getattr(self, f"_{command.pop('do')}")
        result: dict[str, Any] = await work(**command)
        return result

    async def _hold(self, silent: int, heads: int, bodies: int, unread: int) -> dict[str, Any]:
        """Open connections that never send a complete request, and streams that are not read."""
        stream = {
            "prompt": "Once upon a time",
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 5,
        }
        kinds = (
            (silent, b""),
            (heads, HEAD % b"/v1/completions"),
            (bodies, HEAD % b"/v1/completions" + b'Content-Length: 100000\r\n\r\n{"prompt": "'),
        )
        for count, data in kinds:
            for _ in range(count):
                self._holding.append(asyncio.create_task(self._keep_open(data)))
        for _ in range(unread):
            self._holding.append(asyncio.create_task(self._ignore(post("/v1/completions", stream))))
        while self._num_open < silent + heads + bodies + unread:
            await asyncio.sleep(0.05)
        return {"open": self._num_open}

    async def _keep_open(self, data: bytes) -> None:
        """Open a connection, and reopen it whenever the server closes it."""
        while True:
            with contextlib.suppress(OSError):
                async with self._connecting:
                    reader, writer = await asyncio.open_connection(*self._address)
                self._num_open += 1
                writer.write(data)
                try:
                    await reader.read()
                finally:
                    writer.close()
                    self._num_open -= 1
            await asyncio.sleep(REOPEN_SECONDS)

    async def _ignore(self, data: bytes) -> None:
        """Request a stream and never read from it."""
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, self._address)
            await loop.sock_sendall(connection, data)
            self._num_open += 1
            await asyncio.Event().wait()

    async def _fire(self, prompts: int, megabytes: float, messages: int) -> dict[str, Any]:
        """Send long prompts at once, then bodies of many messages; returns the counted outcomes."""
        text = "Once upon a time there was a little dog. " * int(megabytes * 1e6 / 41)
        prompt = post("/v1/completions", {"prompt": text, "max_tokens": 1})
        chat = [{"role": "user", "content": "Hi", "no_such_field": 1}] * messages
        many = post("/v1/chat/completions", {"messages": chat, "max_tokens": 1})
        outcomes = await asyncio.gather(*[self._ask(prompt) for _ in range(prompts)])
        outcomes += await asyncio.gather(*[self._ask(many) for _ in range(2)])
        return dict(Counter(outcomes))

    async def _crowd(self, count: int) -> dict[str, Any]:
        """Send `count` valid completions at once; returns the counted outcomes."""
        data = post("/v1/completions", {"prompt": "Once", "max_tokens": 2, "ignore_eos": True})
        return dict(Counter(await asyncio.gather(*[self._ask(data) for _ in range(count)])))

    async def _ask(self, data: bytes) -> str:
        """The status of a reply, marked if it has Retry-After; or the name of the error."""
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                reader, writer = await asyncio.open_connection(*self._address)
                try:
                    writer.write(data)
                    head = await reader.readuntil(b"\r\n\r\n")
                    status = head.split(maxsplit=2)[1].decode()
                    return status + ("+retry-after" if b"\r\nretry-after:" in head else "")
                finally:
                    writer.close()
        except (OSError, EOFError, TimeoutError) as error:
            return type(error).__name__

    async def _leave(self) -> dict[str, Any]:
        for task in self._holding:
            task.cancel()
        await asyncio.gather(*self._holding, return_exceptions=True)
        self._holding.clear()
        return {}


async def main(url: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    parts = urlsplit(url)
    assert parts.hostname == "127.0.0.1", "hostile clients may only be used on a local server"
    assert parts.port is not None
    clients = Clients((parts.hostname, parts.port))
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await clients.do(json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
