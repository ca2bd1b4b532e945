"""Captured CUDA graphs: one launch instead of hundreds.

A step is padded to the next size of a ladder and replayed: by sequences if each computes one token,
otherwise by tokens, up to a limit beyond which the device takes longer than the launches. A graph
reads its batch from the staged arrays and the device's block tables, whose addresses never change.
Graphs run one after another and keep nothing between their runs, so they share one pool of memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable

import torch

MOST_MIXED_TOKENS = 2048  # launched one by one, so many take the host half as long as the device
ROOM_FOR_PROMPTS = 512  # tokens beside as many decodes as may run
MOST_CHUNKS = 16  # sequences with several tokens in a captured step


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending; the last one takes every batch that may come.

    At most an eighth of a large batch is padding.
    """
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_sizes(max_num_seqs: int, max_num_tokens: int) -> list[int]:
    """Numbers of tokens to which steps with prompts are padded, ascending."""
    limit = min(max_num_tokens, max(MOST_MIXED_TOKENS, max_num_seqs + ROOM_FOR_PROMPTS))
    sizes = [16, 32, 64, 96, 128, *range(192, 1024, 64), *range(1024, 1536, 128)]
    sizes += range(1536, limit + 1, 256)  # products are computed in tiles of 256 tokens anyway
    return [size for size in sizes if size <= limit]


class Graphs:
    """Owns the captured graphs, by key, and their memory."""

    def __init__(self, sizes: list[int], token_sizes: list[int], device: torch.device) -> None:
        """`sizes`: of steps of decodes, in sequences; `token_sizes`: of others, in tokens."""
        self.sizes = sizes
        self.token_sizes = token_sizes
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen: set[Hashable] = set()
        self._captures = device.type == "cuda"  # a CPU goes through the same steps uncaptured
        if self._captures:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def most_tokens(self) -> int:
        """Of any captured step."""
        return max(self.sizes[-1:] + self.token_sizes[-1:], default=0)

    @property
    def num_graphs(self) -> int:
        """Of steps that may be captured, each with shared keys and without; how tokens are drawn is
        small beside them."""
        return 2 * (len(self.sizes) + len(self.token_sizes))

    def size_for(self, num_seqs: int) -> int:
        """The smallest size that takes so many sequences."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def token_size_for(self, num_tokens: int) -> int | None:
        """The smallest size that takes so many tokens, prompts among them; None: too many."""
        place = bisect_left(self.token_sizes, num_tokens)
        return self.token_sizes[place] if place < len(self.token_sizes) else None

    def prepare(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do `work` as it is, and capture it, so that `run` never has to."""
        work()
        if self._captures:
            self._graphs[key] = self._capture(work)

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do `work`, the same launches for the same key every time.

        The first time it runs as it is, so that kernels are compiled and loaded; the second time
        it is captured; from then on it is replayed.
        """
        graph = self._graphs.get(key)
        if not self._captures or (graph is None and key not in self._seen):
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
