"""Work on large bodies, kept out of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# One thread: each one that computes makes the event loop wait for the GIL, and several would do no
# more work than one.
_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")


async def aside(work: Callable[[], T]) -> T:
    """Do `work`, which must be bounded, in the thread for large bodies."""
    return await asyncio.get_running_loop().run_in_executor(_worker, work)
