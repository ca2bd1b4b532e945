"""Keeps Python's garbage collector from running while the device waits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later(is_wanted: bool) -> Iterator[None]:
    """A context that delays garbage collection, if `is_wanted`, until after it.

    The lists and tuples of one step are enough to trigger a collection. If the program has disabled
    the collector, it stays disabled.
    """
    pauses = is_wanted and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()
