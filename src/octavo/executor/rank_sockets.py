"""Connections between an engine's process and ranks on other hosts: TCP, with proof of a secret.

Messages are pickled, so nothing is read from a peer before it has proved that it knows the secret,
and the engine's process proves the same to the rank (HMAC-SHA-256 over fresh nonces of both sides).
What follows is neither encrypted nor signed: as for Ray and for the ranks' collectives, the network
between the hosts must be trusted.

    engine to rank    nonce
    rank to engine    its number, nonce, proof
    engine to rank    proof
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.errors import EngineFailed

SECRET_BYTES = NONCE_BYTES = PROOF_BYTES = 32
RANK_BYTES = 4
REPLY_BYTES = RANK_BYTES + NONCE_BYTES + PROOF_BYTES
# Connections that have proved nothing yet; when there are more, the oldest is closed.
MAX_STRANGERS = 64
JOIN_SECONDS = 20.0  # for a rank to connect, and for each answer of the engine's process
# A host that is gone without a word is noticed after KEEP_IDLE + KEEP_COUNT * KEEP_INTERVAL
# seconds, or if data is not acknowledged for so long.
KEEP_IDLE, KEEP_INTERVAL, KEEP_COUNT = 10, 5, 4


class RankListener:
    """Where the ranks of one group connect."""

    def __init__(self, host: str, size: int) -> None:
        """
        Args:
            host: an address of this machine that the ranks' hosts reach.
            size: how many ranks there are.
        """
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._size = size
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, tuple[bytes, bytes]] = {}  # nonce sent, bytes received
        self.ranks: dict[int, socket.socket] = {}  # those that have proved what they are

    def accept(self, seconds: float) -> bool:
        """Serve those that connect for so long, or until all ranks are in `ranks`: then True."""
        deadline = time.monotonic() + seconds
        while len(self.ranks) < self._size:
            if (left := deadline - time.monotonic()) <= 0:
                return False
            for key, _ in self._selector.select(left):
                if key.fileobj is self._listener:
                    self._welcome()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._strangers:
                    self._hear(key.fileobj)
        return True

    def close(self) -> None:
        """Take no more connections; those left in `ranks` are closed."""
        for stranger in [*self._strangers]:
            self._forget(stranger).close()
        for connection in self.ranks.values():
            connection.close()
        self._selector.close()
        self._listener.close()

    def _welcome(self) -> None:
        try:
            stranger, _ = self._listener.accept()
        except OSError:  # it has left already
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._forget(next(iter(self._strangers))).close()
        nonce = secrets.token_bytes(NONCE_BYTES)
        stranger.setblocking(False)
        self._strangers[stranger] = nonce, b""
        self._selector.register(stranger, selectors.EVENT_READ)
        try:
            stranger.sendall(nonce)
        except OSError:
            self._forget(stranger).close()

    def _hear(self, stranger: socket.socket) -> None:
        """Take in a reply, and let the peer in if it is right."""
        nonce, reply = self._strangers[stranger]
        try:
            data = stranger.recv(REPLY_BYTES - len(reply))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        reply += data
        if data and len(reply) < REPLY_BYTES:
            self._strangers[stranger] = nonce, reply
            return
        self._forget(stranger)
        rank = int.from_bytes(reply[:RANK_BYTES], "little")
        theirs, proof = reply[RANK_BYTES:-PROOF_BYTES], reply[-PROOF_BYTES:]
        expected = prove(self.secret, b"rank", rank, nonce, theirs)
        is_right = len(reply) == REPLY_BYTES and hmac.compare_digest(proof, expected)
        if not is_right or rank >= self._size or rank in self.ranks:
            stranger.close()
            return
        try:
            stranger.sendall(prove(self.secret, b"engine", rank, nonce, theirs))
        except OSError:
            stranger.close()
            return
        stranger.setblocking(True)
        set_up(stranger)
        self.ranks[rank] = stranger

    def _forget(self, stranger: socket.socket) -> socket.socket:
        self._selector.unregister(stranger)
        del self._strangers[stranger]
        return stranger


def join(address: tuple[str, int], secret: bytes, rank: int) -> socket.socket:
    """Connect to the engine's process as a rank.

    Raises:
        EngineFailed: no peer that knows the secret answers there.
    """
    host, port = address
    with _unreachable(host, port):
        connection = socket.create_connection(address, JOIN_SECONDS)
    try:
        with _unreachable(host, port):
            nonce, own = _receive(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
            proof = prove(secret, b"rank", rank, nonce, own)
            connection.sendall(rank.to_bytes(RANK_BYTES, "little") + own + proof)
            answer = _receive(connection, PROOF_BYTES)
        if not hmac.compare_digest(answer, prove(secret, b"engine", rank, nonce, own)):
            raise EngineFailed(f"who listens at {host}:{port} is not the engine's process")
        connection.settimeout(None)
        set_up(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def prove(secret: bytes, who: bytes, rank: int, nonce: bytes, other_nonce: bytes) -> bytes:
    """What only one who knows the secret can say: `who` is b"rank" or b"engine"."""
    said = who + rank.to_bytes(RANK_BYTES, "little") + nonce + other_nonce
    return hmac.digest(secret, said, "sha256")


def set_up(connection: socket.socket) -> None:
    """Send at once, and notice a host that is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        limits = {
            socket.TCP_KEEPIDLE: KEEP_IDLE,
            socket.TCP_KEEPINTVL: KEEP_INTERVAL,
            socket.TCP_KEEPCNT: KEEP_COUNT,
            socket.TCP_USER_TIMEOUT: (KEEP_IDLE + KEEP_COUNT * KEEP_INTERVAL) * 1000,
        }
        for option, value in limits.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


@contextmanager
def _unreachable(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise EngineFailed(
            f"the engine's process at {host}:{port} is not reached: {reason}"
        ) from None


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := connection.recv(count - len(data))):
            raise ConnectionResetError("it has closed the connection")
        data += part
    return data
