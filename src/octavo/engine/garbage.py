"""Keeps Python's garbage collector from holding up what must be quick."""

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


@contextmanager
def what_is_there_left_out() -> Iterator[None]:
    """A context in which collections do not look at the objects that there were before: modules,
    a tokenizer and endpoints are a hundred thousand, at which one looks for a tenth of a second.

    Only for processes whose main work this is, as the whole process changes.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
