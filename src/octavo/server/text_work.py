"""Where templates are rendered and texts become tokens, so that a long text stops no one else.

Short texts are done at once, in the event loop: a thread would cost more than they do. Long ones go
to threads, and the longest to a single thread that takes one after the other: each needs a core for
seconds, and hundreds of megabytes, which are given back to the system afterwards. What is shorter
never waits for them.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# Characters. Tokenizing more takes milliseconds, in which the event loop would stand still.
LONG_TEXT = 8_192
# Characters. Tokenizing more takes a tenth of a second and tens of megabytes.
HUGE_TEXT = 131_072

R = TypeVar("R")


class TextWork:
    """Owns the thread that huge texts wait for."""

    def __init__(self) -> None:
        self._huge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="huge-text")

    async def run(self, size: int, work: Callable[[], R]) -> R:
        """work(), which takes about as long as tokenizing `size` characters."""
        if size < LONG_TEXT:
            return work()
        if size < HUGE_TEXT:
            return await asyncio.to_thread(work)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._huge, _run_and_trim, work)

    def close(self) -> None:
        """Drop the work that has not begun. A second call does nothing."""
        self._huge.shutdown(wait=False, cancel_futures=True)


def _run_and_trim(work: Callable[[], R]) -> R:
    try:
        return work()
    finally:
        # glibc keeps what a thread has freed for that thread's next allocations.
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:
            malloc_trim(0)
