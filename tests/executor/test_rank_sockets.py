"""Who may speak to an engine's process as a rank, and to a rank as its engine."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.channel import Channel
from octavo.errors import EngineFailed
from octavo.executor import rank_sockets
from octavo.executor.rank_sockets import (
    MAX_STRANGERS,
    NONCE_BYTES,
    REPLY_BYTES,
    RankListener,
    join,
    prove,
)

SECONDS = 20.0


@pytest.fixture
def listener() -> Iterator[RankListener]:
    with contextlib.closing(RankListener("127.0.0.1", 2)) as made:
        yield made


def reply(secret: bytes, rank: int, nonce: bytes) -> bytes:
    own = bytes(NONCE_BYTES)
    return rank.to_bytes(4, "little") + own + prove(secret, b"rank", rank, nonce, own)


def test_ranks_that_know_the_secret_are_connected(listener: RankListener) -> None:
    with ThreadPoolExecutor(2) as pool:
        joins = [pool.submit(join, listener.address, listener.secret, rank) for rank in (1, 0)]
        assert listener.accept(SECONDS)
        theirs = [made.result() for made in joins]
    for rank, connection in zip((1, 0), theirs, strict=True):
        Channel(connection).send(b"%d" % rank)
        assert Channel(listener.ranks[rank]).receive(SECONDS) == [b"%d" % rank]
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        connection.close()


def test_strangers_get_nowhere_and_keep_nobody_out(listener: RankListener) -> None:
    """Silent ones, more than are kept; those that say something else, too little or too late."""
    silent = [socket.create_connection(listener.address) for _ in range(2 * MAX_STRANGERS)]
    wrong = []
    for number in range(6):
        stranger = socket.create_connection(listener.address)
        while not select.select([stranger], [], [], 0)[0]:
            listener.accept(0.02)
        nonce = stranger.recv(NONCE_BYTES)
        answers = [
            b"GET / HTTP/1.1\r\n\r\n" * 9,
            reply(bytes(32), 0, nonce),  # another secret
            reply(listener.secret, 0, bytes(32)),  # another nonce: an answer heard before
            reply(listener.secret, 2, nonce),  # a rank that the group does not have
            reply(listener.secret, 0, nonce)[:-1] + b"\0\0",
            nonce + bytes(REPLY_BYTES),
        ]
        stranger.sendall(answers[number])
        wrong.append(stranger)
    assert not listener.accept(0.3)
    assert listener.ranks == {}
    for stranger in wrong:
        stranger.settimeout(SECONDS)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    with ThreadPoolExecutor(2) as pool:
        joins = [pool.submit(join, listener.address, listener.secret, rank) for rank in (0, 1)]
        assert listener.accept(SECONDS)
        for made in [*(made.result() for made in joins), *silent, *wrong]:
            made.close()


def test_a_rank_is_connected_once(listener: RankListener) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, listener.address, listener.secret, 0)
        while not first.done():
            listener.accept(0.02)
        second = pool.submit(join, listener.address, listener.secret, 0)
        while not second.done():
            listener.accept(0.02)
        first.result().close()
        with pytest.raises(EngineFailed, match="is not reached: it has closed the connection"):
            second.result()
    assert set(listener.ranks) == {0}


def test_a_rank_trusts_no_engine_without_the_secret() -> None:
    def pretend(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer:
            peer.sendall(bytes(NONCE_BYTES))
            peer.recv(REPLY_BYTES)
            peer.sendall(bytes(32))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        with pytest.raises(EngineFailed, match=r"who listens at 127.0.0.1:\d+ is not the engine's"):
            join(server.getsockname(), bytes(32), 0)
        thread.join()


def test_an_engine_that_is_not_there_or_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sockets, "JOIN_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with pytest.raises(EngineFailed, match="is not reached: timed out"):
            join(address, bytes(32), 0)
    with pytest.raises(EngineFailed, match="is not reached: Connection refused"):
        join(address, bytes(32), 0)
