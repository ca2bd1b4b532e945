"""The API process's end of the connection to an engine process, in its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from octavo.channel import FrameReader, frame


class ChannelProtocol(asyncio.Protocol):
    """One end of a socket pair whose other end is a `Channel`."""

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
