"""The connection between the two processes: a socket pair, with length-prefixed messages.

A pair has no address, so no other process can connect. The system closes it when either process
ends, however it ends; and what was sent before can still be read afterwards.
"""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import cast

LENGTH_BYTES = 4
RECEIVE_BYTES = 1 << 18


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


class FrameReader:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that `data` completes."""
        buffer = self._buffer
        buffer += data
        start = 0
        while (body := start + LENGTH_BYTES) <= len(buffer):
            end = body + int.from_bytes(buffer[start:body], "little")
            if end > len(buffer):
                break
            yield bytes(buffer[body:end])
            start = end
        del buffer[:start]


class Channel:
    """The engine process's end. Sending blocks while the other side does not read."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = FrameReader()
        self._lock = threading.Lock()  # log records may come from any thread
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, payload: bytes) -> None:
        with self._lock:
            self._socket.sendall(frame(payload))

    def receive(self, wait: bool) -> list[bytes] | None:
        """Messages that have arrived; with `wait`, at least one. None if the other side is gone."""
        messages: list[bytes] = []
        while self._poll.poll(None if wait and not messages else 0):
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except ConnectionResetError:
                return None
            if not data:
                return None
            messages += self._reader.feed(data)
        return messages


class ChannelProtocol(asyncio.Protocol):
    """The API process's end, in its event loop."""

    def __init__(self, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """`on_end` is called once, when the other side is gone and all its messages are read."""
        self._reader = FrameReader()
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_end()

    def send(self, payload: bytes) -> None:
        """Never blocks; does nothing if the other side is gone."""
        if self._transport is not None:
            self._transport.write(frame(payload))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
