"""Captured CUDA graphs: one launch instead of hundreds.

A step is padded to the next of the CUDA-graph batch sizes and replayed. Sizes count sequences if
each of them computes one token, and tokens otherwise, up to a limit beyond which the device takes
longer than the launches. A graph reads its batch from the staged arrays and the device's block
tables, whose addresses never change. Graphs run one after another and keep nothing between runs, so
they share one memory pool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable

import torch

from octavo.ops import PaddedSizes
from octavo.ops.cuda.shared_workspace import replay

MAX_MIXED_TOKENS = 2048  # from here on, launches take at most half of the step's time on the device
MIN_PROMPT_TOKENS = 512  # that the largest mixed size has room for beside the most decodes
MAX_CHUNKS = 16  # sequences with several tokens in a captured step
# Decodes in a mixed step. Sizes for more of them are rarer, since decode attention launches one
# program per head for each decode of the padded size.
MAX_FEW_SINGLES = 256
MOST_RARE = 256  # graphs of draws that clients may vary: some 0.2 MB each
MANY_SINGLES_STEP = 256  # tokens from one size for more decodes to the next


def graph_sizes(max_num_seqs: int) -> list[int]:
    """CUDA-graph batch sizes, ascending; the last one is for the largest possible batch.

    At most an eighth of a large batch is padding.
    """
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_sizes(max_num_seqs: int, max_num_tokens: int) -> list[PaddedSizes]:
    """The sizes that mixed steps (with prompts) are padded to, ascending."""
    limit = min(max_num_tokens, max(MAX_MIXED_TOKENS, max_num_seqs + MIN_PROMPT_TOKENS))
    sizes = [16, 32, 64, 96, 128, *range(192, limit + 1, 64)]
    found = []
    for size in (size for size in sizes if size <= limit):
        most = min(size, max_num_seqs)
        found.append(PaddedSizes(size, min(most, MAX_FEW_SINGLES), MAX_CHUNKS))
        if most > MAX_FEW_SINGLES and size % MANY_SINGLES_STEP == 0:
            found.append(PaddedSizes(size, most, MAX_CHUNKS))
    return found


class Graphs:
    """Owns the captured graphs, by key, and their memory."""

    def __init__(
        self,
        sizes: list[int],
        mixed: list[PaddedSizes],
        device: torch.device,
        captures: bool = True,
    ) -> None:
        """
        Args:
            sizes: for steps of decodes, in sequences, ascending.
            mixed: for other steps, ascending.
            captures: otherwise a runner launches all kernels once, and captures nothing.
        """
        self.sizes = sizes
        self.mixed = mixed
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen: set[Hashable] = set()
        self._num_rare = 0  # captured
        self.captures = captures
        self._has_graphs = captures and device.type == "cuda"  # on a CPU, steps are padded alone
        if self._has_graphs:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def num_graphs(self) -> int:
        """How many steps may be captured: each size with cascade attention and without.

        Graphs of sampling, and those of few sequences with kernels for longer contexts, are small
        or few by comparison, and not counted.
        """
        return 2 * (len(self.sizes) + len(self.mixed))

    def size_for(self, num_seqs: int) -> int:
        """The smallest size for `num_seqs` sequences."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def mixed_size_for(self, needed: PaddedSizes) -> PaddedSizes | None:
        """The smallest size that is at least `needed` in every count; None if there is none."""
        for size in self.mixed:
            if (
                needed.num_tokens <= size.num_tokens
                and needed.num_singles <= size.num_singles
                and needed.num_chunks <= size.num_chunks
            ):
                return size
        return None

    def prepare(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run `work` eagerly, then capture it, so that `run` never has to; once for each key."""
        if key in self._graphs:
            return
        work()
        if self._has_graphs:
            self._graphs[key] = self._capture(work)

    def run(self, key: Hashable, work: Callable[[], None], is_rare: bool = False) -> None:
        """Run `work`, which makes the same launches whenever the key is the same.

        The first time it runs eagerly, so that kernels are compiled and loaded; the second time
        it is captured; from then on it is replayed.

        is_rare: the key is one of very many; of such, no more than MOST_RARE are captured.
        """
        graph = self._graphs.get(key)
        is_left_out = is_rare and self._num_rare >= MOST_RARE
        if not self._has_graphs or (graph is None and (key not in self._seen or is_left_out)):
            self._seen.add(key)
            work()
            return
        if graph is None:
            graph = self._graphs[key] = self._capture(work)
            self._num_rare += is_rare
        replay(graph)

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Thread-local, since other threads may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph
