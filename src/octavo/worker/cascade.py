"""Finds the blocks that sequences of a step share, so that cascade attention reads them once.

Samples and beams share the blocks of their prompt and of common ancestors, and requests those of a
common prefix (paper section 4.4). Tables in lexicographic order put sharers next to each other: the
blocks that neighbours have in common form a tree, whose edges are the segments to find.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.ops import MAX_CASCADE_LEVELS, CascadeSegments

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

# Measured (ops/cuda/attention_cascade.py): with shorter segments, cascade attention is no faster,
# since sequences that run at the same time find the shared keys in the L2 cache. Nor where little
# is saved in all (docs/experiments.md, Few sequences that share keys): it is a kernel more, and the
# last program of a sequence has more results to combine.
MIN_KEYS = 256  # per segment
MIN_SAVING = 0.25  # as a fraction of the keys that the step reads
MIN_BYTES = 64 << 20  # of keys and values that a layer need not read
_WIDE, _MORE_OF_WIDE = 128, 1.5  # heads of more elements, whose tiles are smaller, need more


def least_saved_keys(num_kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """How many keys a layer must save for cascade attention to pay off."""
    saved = MIN_BYTES * (_MORE_OF_WIDE if head_dim > _WIDE else 1)
    return int(saved / (2 * num_kv_heads * head_dim * element_bytes))


class SegmentFinder:
    """Caches the segments: while the same sequences decode, tables only grow at their ends."""

    def __init__(
        self, block_sizes: Sequence[int], have_windows: Sequence[bool], least_saved: int
    ) -> None:
        """
        Args:
            block_sizes: tokens per block, by KV group.
            have_windows: which KV groups have a sliding window, and so no cascade attention.
            least_saved: see `least_saved_keys`.
        """
        self._block_sizes = block_sizes
        self._least_saved = least_saved
        self._have_windows = have_windows
        self._rows: Int64s | None = None
        self._found: list[CascadeSegments | None] = []

    @property
    def has_cached(self) -> bool:
        return self._rows is not None

    def invalidate(self) -> None:
        """Call this when tables have changed anywhere but at their ends."""
        self._rows = None

    def find(
        self, tables: Int32s, rows: Int64s, query_lens: Int64s, contexts: Int64s
    ) -> list[CascadeSegments | None]:
        """For each KV group, the segments that decodes among `rows` share: the same for all groups
        with full attention. [] if there are none.

        `tables`: [groups, num_rows, max_blocks].
        """
        (singles,) = np.nonzero(query_lens == 1)
        rows = rows[singles]
        if self._rows is None or not np.array_equal(rows, self._rows):
            self._rows = rows
            contexts = contexts[singles]
            self._found = [
                None
                if has_window
                else find_segments(table[rows], contexts, size, self._least_saved)
                for table, has_window, size in zip(
                    tables, self._have_windows, self._block_sizes, strict=True
                )
            ]
            if not _agree(self._found, self._have_windows):
                self._found = []
        if len(singles) == len(query_lens):
            return self._found
        return [
            None if keys is None else keys._replace(members=singles[keys.members].astype(np.int32))
            for keys in self._found
        ]


def _agree(found: Sequence[CascadeSegments | None], have_windows: Sequence[bool]) -> bool:
    """Whether there are segments, the same in all groups with full attention. Sequences share their
    blocks in all of these or in none, unless the same prefix was computed twice and its blocks were
    evicted one by one."""
    full = [each for each, has_window in zip(found, have_windows, strict=True) if not has_window]
    if not full or full[0] is None:
        return False
    return all(other is not None and all(map(np.array_equal, full[0], other)) for other in full[1:])


def find_segments(
    tables: Int32s, contexts: Int64s, block_size: int, least_saved: int = 0
) -> CascadeSegments | None:
    """The shared segments for which cascade attention pays off; None if there are none.

    Args:
        tables: int32 [num_seqs, max_blocks]; entries beyond a context may be anything.
        contexts: int64 [num_seqs]: tokens in the cache after this step, the new one included.
        least_saved: see `least_saved_keys`.
    """
    if contexts.max(initial=0) <= MIN_KEYS:
        return None
    num_full = np.maximum(contexts - 1, 0) // block_size  # blocks whose keys are all cached
    sharers = _sharers(tables, num_full)
    if not len(sharers):
        return None
    num_full = num_full[sharers]
    width = int(num_full.max())
    blocks = tables[sharers, :width]
    blocks[np.arange(width) >= num_full[:, None]] = 0
    order = _lexicographic(blocks)
    blocks, sharers = blocks[order], sharers[order]
    differs = (blocks[1:] != blocks[:-1]) | (blocks[1:] == 0)
    common = np.where(differs.any(1), differs.argmax(1), width)

    segments = np.array(_long_segments(common.tolist(), -(-MIN_KEYS // block_size)), np.int32)
    if not len(segments):
        return None
    begins, ends, first, last = segments.T
    sizes = last - first
    num_saved = ((sizes - 1) * (ends - begins)).sum() * block_size
    if num_saved < max(least_saved, MIN_SAVING * contexts.sum()):
        return None
    starts = np.zeros(len(sizes) + 1, np.int32)
    sizes.cumsum(out=starts[1:])
    members = np.arange(starts[-1]) + (first - starts[:-1]).repeat(sizes)
    return CascadeSegments(
        begins * block_size, ends * block_size, starts, sharers.take(members).astype(np.int32)
    )


def _long_segments(common: list[int], min_blocks: int) -> list[tuple[int, int, int, int]]:
    """(first block, end, first row, last + 1) of segments that are long enough, by their ends."""
    shared_until = [0] * (len(common) + 1)
    num_levels = [0] * (len(common) + 1)
    segments = []
    # Parents come before children, which need not cover what a parent covers.
    for depth, first, last in sorted(_tree(common)):
        begin, levels = shared_until[first], num_levels[first]
        if depth - begin >= min_blocks and levels < MAX_CASCADE_LEVELS:
            shared_until[first:last] = [depth] * (last - first)
            num_levels[first:last] = [levels + 1] * (last - first)
            segments.append((begin, depth, first, last))
    return segments


def _sharers(tables: Int32s, num_full: Int64s) -> Int64s:
    """Sequences that share their first block with another one."""
    heads = np.where(num_full > 0, tables[:, 0], 0)
    _, which, counts = np.unique(heads, return_inverse=True, return_counts=True)
    return np.flatnonzero((counts[which] > 1) & (heads != 0))


def _lexicographic(blocks: Int32s) -> Int64s:
    """Indices that sort the rows; big-endian bytes compare like the numbers."""
    num_rows, width = blocks.shape
    return blocks.astype(">u4").view(f"V{4 * width}").reshape(num_rows).argsort(kind="stable")


def _tree(common: list[int]) -> Iterator[tuple[int, int, int]]:
    """(depth, first, last + 1) of each maximal run of rows that have `depth` > 0 blocks in common.

    common[i]: length in blocks of the common prefix of rows i and i + 1.
    """
    open_runs: list[tuple[int, int]] = []  # (depth, first), depth increasing
    for last, depth in enumerate([*common, 0], start=1):
        first = last - 1
        while open_runs and open_runs[-1][0] > depth:
            ended, first = open_runs.pop()
            yield ended, first, last
        if depth and not (open_runs and open_runs[-1][0] == depth):
            open_runs.append((depth, first))
