"""The connection between two processes: a socket, with length-prefixed messages.

On one host it is one end of a socket pair, which has no address, so no other process can connect.
The system closes a socket when either process ends, however it ends; and what was sent before can
still be read afterwards.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

LENGTH_BYTES = 4
RECEIVE_BYTES = 1 << 18
# What the end of the other process, of its host or of the way there may leave.
GONE = frozenset({errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})


def frame(payload: bytes) -> bytes:
    """A message as it is sent: after its length."""
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
    """One end of a connection. Sending blocks while the other side does not read."""

    def __init__(self, connection: socket.socket, send_seconds: float | None = None) -> None:
        """send_seconds: how long `send` waits for room before it raises BlockingIOError."""
        if send_seconds is not None:
            # The kernel's own timeout: Python's would take another system call for each message.
            whole = int(send_seconds)
            limit = struct.pack("@ll", whole, int((send_seconds - whole) * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._socket = connection
        self._reader = FrameReader()
        self._lock = threading.Lock()  # log records may come from any thread
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def fileno(self) -> int:
        """The file descriptor to poll."""
        return self._socket.fileno()

    def send(self, payload: bytes) -> None:
        """Send a message. Raises OSError if the other side is gone."""
        self.send_framed(frame(payload))

    def send_framed(self, message: bytes) -> None:
        """See `send`; of a message that is framed already."""
        with self._lock:
            self._socket.sendall(message)

    def receive(self, seconds: float | None) -> list[bytes] | None:
        """Messages that have arrived; waits for one, if there is none, for so many seconds (None:
        as long as it takes), also if parts of one come meanwhile. None if the other side is gone,
        and all that it has sent was received."""
        messages: list[bytes] = []
        timeout = None if seconds is None else seconds * 1e3
        deadline = None if not seconds else time.monotonic() + seconds
        while self._poll.poll(0 if messages else timeout):
            received = self.read()
            if received is None:
                return messages or None
            messages += received
            if deadline is not None and not messages:
                timeout = (deadline - time.monotonic()) * 1e3
                if timeout <= 0:
                    break
        return messages

    def read(self) -> list[bytes] | None:
        """Messages that one read completes, which waits for data; None as `receive`."""
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except OSError as error:
            if error.errno not in GONE:
                raise
            data = b""
        return list(self._reader.feed(data)) if data else None

    def close(self) -> None:
        """Close this end, which the other side learns."""
        self._socket.close()
