"""Processes that tests start, as Linux shows them in /proc.

Threads and processes may end at any moment while these functions run. What they say holds for
processes that live through the whole call.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

PROC = Path("/proc")
INIT = 1  # adopts processes whose parent has ended
HANG = 300.0  # seconds; a process that does not end, or does not start, must end a test


def state_of(pid: int) -> tuple[str, int] | None:
    """The state of a process ("Z" when it has ended and was not waited for), and its parent's id.

    None if there is no such process.
    """
    try:
        status = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = status.rpartition(")")[2].split()[:2]  # the name in () may be anything
    return state, int(parent)


def parent_of(pid: int) -> int:
    """The parent of a process that is there."""
    state = state_of(pid)
    assert state is not None, pid
    return state[1]


def children(pid: int) -> set[int]:
    """The processes whose parent is `pid`, also those that have ended and were not waited for.

    They are found by their parent, not in /proc/PID/task/*/children: the kernel moves a child from
    a thread that ends to another one, which may have been read already.
    """
    return {child for child, parent in _parents().items() if parent == pid}


def descendants(pid: int) -> dict[int, str]:
    """Process id -> the module that it runs (`python -m MODULE`), of all processes below `pid`.

    A process that runs something else has another word of its command, or none, in that place.
    Processes that have ended are left out.
    """
    parents = _parents()
    found: dict[int, str] = {}
    below = {pid}
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        for child in below:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if command := (PROC / str(child) / "cmdline").read_text():
                    found[child] = [*command.split("\0"), "", ""][2]
    return found


def running(pid: int, module: str) -> list[int]:
    """The processes below `pid` that run a module, in the order of their ids."""
    return sorted(child for child, name in descendants(pid).items() if name == module)


def engines(pid: int) -> list[int]:
    """The engine processes of the server `pid`."""
    return running(pid, "octavo.server.engine_process.loop")


def wait_for_engines(pid: int, count: int = 1) -> list[int]:
    """The engine processes of the server `pid`, once there are `count`, which it may start anew."""
    deadline = time.monotonic() + HANG
    while len(found := engines(pid)) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def assert_gone(pids: Collection[int]) -> None:
    """Wait until the processes have ended and their parents have waited for them."""
    deadline = time.monotonic() + HANG
    while (left := [pid for pid in pids if _is_left(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def _is_left(pid: int) -> bool:
    # The first process of a container may be one that never waits for those which it adopts.
    return state_of(pid) not in (None, ("Z", INIT))


def _parents() -> dict[int, int]:
    """Process id -> its parent's, of all processes."""
    pids = [int(name) for name in os.listdir(PROC) if name.isdecimal()]
    return {pid: state[1] for pid in pids if (state := state_of(pid)) is not None}
