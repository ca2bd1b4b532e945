"""Cuts a step's attention into pieces of work for the Triton kernels: host work, NumPy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]

FIELDS = 8
MIN_SPLIT = 128  # keys: below it a piece costs more to start than it reads


class Sequences(NamedTuple):
    """Some sequences of a step: int32 [num_seqs] each."""

    tokens: Int32s  # where the new tokens begin
    rows: Int32s  # of the block table
    contexts: Int32s  # keys, new ones included; 0: padding
    lens: Int32s  # new tokens

    def select(self, mask: NDArray[np.bool_]) -> Sequences:
        return Sequences(*(x[mask] for x in self))


def decode_items(
    seqs: Sequences, window: int | None, tile: int, alignment: int, num_pieces: int
) -> Int32s:
    """[num_seqs + num_pieces, FIELDS], as `decode_attention` reads them; the rest names no work.

    All keys together are cut into about `num_pieces` equal pieces, so the number of items depends
    on the number of sequences alone; which keys a piece holds, on their lengths.
    """
    tokens, rows, contexts, _ = seqs
    starts = np.zeros_like(contexts)
    if window is not None:
        starts = np.maximum(contexts - window, 0) // alignment * alignment
    lens = contexts - starts
    longest = -(-max(MIN_SPLIT, -(-int(lens.sum()) // num_pieces)) // tile) * tile
    splits = np.maximum(-(-lens // longest), 1)
    items = np.empty((len(tokens) + num_pieces, FIELDS), np.int32)
    num_items = len(tokens)
    if int(splits.sum()) == num_items:
        order = np.argsort(-lens, kind="stable")
        begin, end = starts[order], contexts[order]
        split: Int32s | int = 0
        place: Int32s | int = 0
        num_splits: Int32s | int = 1
    else:
        sizes = _round_up(-(-lens // splits), tile)
        splits = np.maximum(-(-lens // np.maximum(sizes, 1)), 1)
        # Large pieces first, so that programs end together.
        by_size = np.argsort(-sizes, kind="stable")
        counts = splits[by_size]
        ends = counts.cumsum()
        order = by_size.repeat(counts)
        num_items = len(order)
        split = np.arange(num_items) - (ends - counts).repeat(counts)
        begin = starts[order] + split * sizes[order]
        end = np.minimum(begin + sizes[order], contexts[order])
        # Only results of split sequences need a place.
        needed = np.where(counts > 1, counts, 0)
        place = (needed.cumsum() - needed).repeat(counts)
        num_splits = splits[order]
    used = items[:num_items]
    used[:, 0] = tokens[order]
    used[:, 1] = rows[order]
    used[:, 2] = begin
    used[:, 3] = end
    used[:, 4] = contexts[order]
    used[:, 5] = split
    used[:, 6] = num_splits
    used[:, 7] = place
    items[num_items:, 0] = -1
    return items


def num_places(num_pieces: int) -> int:
    """Results of split sequences that `decode_items` may ask room for.

    A sequence of x > 1 longest pieces is cut into at most ceil(x) < 2 x.
    """
    return 2 * num_pieces


def prefill_items(
    seqs: Sequences, window: int | None, tile: int, alignment: int, tokens_per_item: int
) -> Int32s:
    """[num_items, FIELDS], as `prefill_attention` reads them."""
    tokens, rows, contexts, lens = seqs
    counts = -(-lens // tokens_per_item)
    seq = np.arange(len(lens)).repeat(counts)
    offset = (np.arange(len(seq)) - (counts.cumsum() - counts).repeat(counts)) * tokens_per_item
    position = contexts[seq] - lens[seq] + offset
    count = np.minimum(lens[seq] - offset, tokens_per_item)
    begin = np.zeros_like(position)
    if window is not None:
        begin = np.maximum(position - window + 1, 0) // alignment * alignment
    end = position + count
    order = np.argsort(begin - end, kind="stable")  # the costly first
    items = np.zeros((len(seq), FIELDS), np.int32)
    items[:, 0] = tokens[seq] + offset
    items[:, 1] = rows[seq]
    items[:, 2] = begin
    items[:, 3] = (position + 1) // tile * tile
    items[:, 4] = end
    items[:, 5] = position
    items[:, 6] = count
    return items[order]


def _round_up(x: Int32s, multiple: int) -> Int32s:
    return -(-x // multiple) * multiple
