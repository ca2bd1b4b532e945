"""Captured CUDA graphs: one launch instead of hundreds.

A step in which every sequence computes one token is padded to the next size of the ladder and
replayed. A graph reads its batch from the staged arrays and the device's block tables, whose
addresses never change. Graphs run one after another and keep nothing between their runs, so they
share one pool of memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable

import torch


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending; the last one takes every batch that may come.

    At most an eighth of a large batch is padding.
    """
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class Graphs:
    """Owns the captured graphs, by key, and their memory."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.sizes = sizes
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen: set[Hashable] = set()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def size_for(self, num_seqs: int) -> int:
        """The smallest size that takes so many sequences."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do `work`, the same launches for the same key every time.

        The first time it runs as it is, so that kernels are compiled and loaded; the second time
        it is captured; from then on it is replayed.
        """
        graph = self._graphs.get(key)
        if graph is None and key not in self._seen:
            self._seen.add(key)
            work()
            return
        if graph is None:
            graph = self._graphs[key] = self._capture(work)
        graph.replay()

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Other threads may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph
