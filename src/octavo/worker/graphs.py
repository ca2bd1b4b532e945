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

from octavo.ops import PaddedSizes

MOST_MIXED_TOKENS = 2048  # launching a step of so many takes the host half its time on the device
ROOM_FOR_PROMPTS = 512  # tokens beside as many decodes as may run
MOST_CHUNKS = 16  # sequences with several tokens in a captured step
# Decodes beside prompts: one program per head is launched for each of the padded size.
FEW_SINGLES = 256
CROWD_STEP = 256  # tokens between the sizes for more of them


def graph_sizes(max_num_seqs: int) -> list[int]:
    """CUDA-graph batch sizes, ascending; the last one takes every batch that may come.

    At most an eighth of a large batch is padding.
    """
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_sizes(max_num_seqs: int, max_num_tokens: int) -> list[PaddedSizes]:
    """To what steps with prompts are padded, the smallest first."""
    limit = min(max_num_tokens, max(MOST_MIXED_TOKENS, max_num_seqs + ROOM_FOR_PROMPTS))
    sizes = [16, 32, 64, 96, 128, *range(192, limit + 1, 64)]
    found = []
    for size in (size for size in sizes if size <= limit):
        most = min(size, max_num_seqs)
        found.append(PaddedSizes(size, min(most, FEW_SINGLES), MOST_CHUNKS))
        if most > FEW_SINGLES and size % CROWD_STEP == 0:
            found.append(PaddedSizes(size, most, MOST_CHUNKS))
    return found


class Graphs:
    """Owns the captured graphs, by key, and their memory."""

    def __init__(self, sizes: list[int], mixed: list[PaddedSizes], device: torch.device) -> None:
        """`sizes`: of steps of decodes, in sequences; `mixed`: of others; both ascending."""
        self.sizes = sizes
        self.mixed = mixed
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen: set[Hashable] = set()
        self._captures = device.type == "cuda"  # a CPU goes through the same steps uncaptured
        if self._captures:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def num_graphs(self) -> int:
        """Of steps that may be captured, each with shared keys and without; how tokens are drawn is
        small beside them."""
        return 2 * (len(self.sizes) + len(self.mixed))

    def size_for(self, num_seqs: int) -> int:
        """The smallest size that takes so many sequences."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def mixed_size_for(self, wanted: PaddedSizes) -> PaddedSizes | None:
        """The smallest size that takes so many of each; None: too many."""
        for size in self.mixed:
            if (
                wanted.num_tokens <= size.num_tokens
                and wanted.num_singles <= size.num_singles
                and wanted.num_chunks <= size.num_chunks
            ):
                return size
        return None

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
