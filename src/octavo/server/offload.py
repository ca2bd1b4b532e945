"""Work that would hold up the event loop, done in threads.

Short work is done at once, in the event loop: a thread would cost more than it does. Long texts go
to threads, in which tokenizing gives the GIL up, and huge ones to a single thread that takes one
after the other: each needs a core for seconds, and hundreds of megabytes, which are given back to
the system afterwards. Large bodies have a single thread of their own, because decoding holds the
GIL: several threads would do no more work than one, and the event loop would wait for each of them.
Large replies have another such thread, in which what is written by Python gives it up in between.
Grammars have two threads, which wait for processes that compile them, for seconds at worst.
So nothing waits for work of another kind, or for much longer work of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.host_memory import return_freed_memory

# Characters. Tokenizing more takes milliseconds, in which the event loop would stand still.
LONG_TEXT = 8_192
# Characters. Tokenizing more takes a tenth of a second and tens of megabytes.
HUGE_TEXT = 131_072
# Bytes. Decoding more takes milliseconds, too.
LARGE_BODY = 65_536
# Outputs, and tokens with their log-probabilities. Writing more takes milliseconds, too.
LARGE_REPLY = 256

R = TypeVar("R")


class Offload:
    """Owns the threads."""

    def __init__(self) -> None:
        self._huge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="huge-text")
        self._bodies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")
        self._replies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replies")
        self._grammars = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammars")

    async def text(self, size: int, work: Callable[[], R]) -> R:
        """work(), which renders or tokenizes; it takes about as long as tokenizing `size`
        characters."""
        if size < LONG_TEXT:
            return work()
        if size < HUGE_TEXT:
            return await asyncio.to_thread(work)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._huge, _run_and_trim, work)

    async def body(self, size: int, work: Callable[[], R]) -> R:
        """work(), which decodes `size` bytes. How long that takes must be bounded."""
        if size <= LARGE_BODY:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._bodies, work)

    async def reply(self, size: int, work: Callable[[], R]) -> R:
        """work(), which writes `size` outputs and tokens with log-probabilities."""
        if size <= LARGE_REPLY:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._replies, work)

    async def grammar(self, work: Callable[[], R]) -> R:
        """work(), which checks a grammar."""
        return await asyncio.get_running_loop().run_in_executor(self._grammars, work)

    def close(self) -> None:
        """Drop the work that has not begun. A second call does nothing."""
        for threads in (self._huge, self._bodies, self._replies, self._grammars):
            threads.shutdown(wait=False, cancel_futures=True)


def _run_and_trim(work: Callable[[], R]) -> R:
    try:
        return work()
    finally:
        return_freed_memory()  # glibc keeps it for this thread's next allocations
