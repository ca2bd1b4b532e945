"""Captured CUDA graphs of decode steps: one launch instead of hundreds.

A step in which every sequence computes one token is padded to the next size of the ladder and
replayed. A graph reads its batch from the staged arrays and the device's block tables, whose
addresses never change, and leaves the hidden states in a buffer that all graphs share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

WARM_UPS = 1  # runs before a capture: kernels are compiled and loaded, workspaces taken


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending; the last one takes every batch that may come.

    At most an eighth of a large batch is padding.
    """
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Owns one graph a batch size."""

    def __init__(self, sizes: list[int], run: Callable[[int], None]) -> None:
        """`run(size)` computes a padded decode step of that size from the staged arrays."""
        self._sizes = sizes
        self._run = run
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def size_for(self, num_seqs: int) -> int:
        """The smallest size that takes so many sequences."""
        return self._sizes[bisect_left(self._sizes, num_seqs)]

    def capture(self, prepare: Callable[[int], None]) -> None:
        """Capture all sizes, the largest first: the others fit into its memory.

        `prepare(size)` stages a batch of padding.
        """
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            prepare(size)
            for _ in range(WARM_UPS):
                self._run(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._run(size)
            self._graphs[size] = graph
        torch.cuda.synchronize()

    def replay(self, size: int) -> None:
        """Compute a step whose batch of `size` sequences has been staged."""
        self._graphs[size].replay()


def copy_hidden(hidden: Tensor, buffer: Tensor) -> None:
    """Leave a step's hidden states [n, size] at the head of the buffer."""
    buffer[: len(hidden)].copy_(hidden)
