"""The connection between two processes."""

from __future__ import annotations

import socket
from itertools import count, islice
from types import SimpleNamespace

import pytest

from octavo import channel
from octavo.channel import Channel, frame


def test_parts_of_a_message_do_not_prolong_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side sends a byte per second, by the clock of this test."""
    ours, theirs = socket.socketpair()
    to_come = iter(frame(b"late"))

    class Dripped(Channel):
        def read(self) -> list[bytes] | None:
            messages = super().read()
            theirs.send(bytes(islice(to_come, 1)))
            return messages

    with ours, theirs:
        receiver = Dripped(ours)
        theirs.send(bytes([next(to_come)]))
        clock = SimpleNamespace(monotonic=count().__next__)
        monkeypatch.setattr(channel, "time", clock, raising=False)
        assert receiver.receive(3) == []
        messages = []
        while not messages:
            messages = receiver.receive(3) or []
        assert messages == [b"late"], "what had come is kept"
