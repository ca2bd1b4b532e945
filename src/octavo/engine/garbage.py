"""Python's garbage collector, kept out of what the device waits for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later(is_wanted: bool) -> Iterator[None]:
    """A context in which nothing is collected, if that is wanted: what comes due, comes after it.

    The lists and tuples of one step are enough to make a collection due. A program that has turned
    the collector off finds it off.
    """
    pauses = is_wanted and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()
