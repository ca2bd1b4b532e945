"""Long work of the event loop, done in slices between which everything else has its turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

SLICE_UNITS = 64
SLICE_TOKENS = 1 << 16  # what a request costs grows with its tokens


class Slices:
    """Owns work that was begun and is not done. Works are done one after the other."""

    def __init__(self) -> None:
        self._works: deque[Iterator[int]] = deque()
        self._is_running = False
        self._handle: asyncio.Handle | None = None

    def begin(self, work: Iterator[int]) -> None:
        """Do some work: its first slice at once unless other work is under way.

        `work` yields after each unit, which is of about the same size for everything, for how many
        tokens that was. What it depends on may have changed between two units.
        """
        self._works.append(work)
        if self._handle is None and not self._is_running:
            self._run()

    def close(self) -> None:
        """Leave undone what is not done."""
        self._works.clear()
        if self._handle is not None:
            self._handle.cancel()

    def _run(self) -> None:
        self._handle, self._is_running = None, True
        try:
            self._run_slice()
        finally:
            self._is_running = False
            if self._works:
                self._handle = asyncio.get_running_loop().call_soon(self._run)

    def _run_slice(self) -> None:
        num_units = num_tokens = 0
        while self._works and num_units < SLICE_UNITS and num_tokens < SLICE_TOKENS:
            try:
                num_tokens += next(self._works[0])
                num_units += 1
            except BaseException as end:
                self._works.popleft()
                if not isinstance(end, StopIteration):
                    raise
