"""Cuts a step's attention into pieces of work for the Triton kernels: host work, NumPy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]

FIELDS = 8
MIN_SPLIT = 128  # keys: below it a piece costs more to start than it reads
# Lengths of a piece to be tried, in fair shares.
_STRETCHES = (1.0, 1.07, 1.15, 1.25, 1.35, 1.5)


class Sequences(NamedTuple):
    """Some sequences of a step: int32 [num_seqs] each."""

    tokens: Int32s  # where the new tokens begin
    rows: Int32s  # of the block table
    contexts: Int32s  # keys, new ones included; 0: padding
    lens: Int32s  # new tokens

    def select(self, mask: NDArray[np.bool_]) -> Sequences:
        return Sequences(*(x[mask] for x in self))


def decode_items(
    seqs: Sequences,
    window: int | None,
    tile: int,
    alignment: int,
    num_pieces: int,
    num_padded: int = 0,
) -> Int32s:
    """[item_capacity, FIELDS], as `decode_attention` reads them; the last ones may name no work.

    The number of items depends on the number of sequences alone, or on `num_padded` if that is
    more; which keys a piece holds, on their lengths.
    """
    tokens, rows, contexts, _ = seqs
    capacity = item_capacity(max(len(tokens), num_padded), num_pieces)
    if not len(tokens):
        items = np.zeros((capacity, FIELDS), np.int32)
        items[:, 0] = -1
        return items
    positions = contexts - 1
    starts = None if window is None else np.maximum(contexts - window, 0) // alignment * alignment
    lens = positions if starts is None else positions - starts  # cached keys that the token sees
    splits, sizes = _split(lens, tile, num_pieces)
    # Large pieces first, so that programs end together.
    order = (-sizes).argsort(kind="stable")
    items = np.zeros((capacity, FIELDS), np.int32)
    num_items = len(tokens)
    split: Int32s | int = 0
    if splits is not None:
        counts = splits.take(order)
        # Only results of split sequences need a place.
        needed = np.where(counts > 1, counts, 0)
        which = np.arange(num_items).repeat(counts)
        num_items = len(which)
        split = np.arange(num_items) - (counts.cumsum() - counts).take(which)
        items[:num_items, 5] = split
        items[:num_items, 6] = counts.take(which)
        items[:num_items, 7] = (needed.cumsum() - needed).take(which)
        order = order.take(which)
    else:
        items[:num_items, 6] = 1
    used = items[:num_items]
    used[:, 0] = tokens.take(order)
    used[:, 1] = rows.take(order)
    size, position = sizes.take(order), positions.take(order)
    begin = split * size if starts is None else split * size + starts.take(order)
    used[:, 2] = begin
    used[:, 3] = np.minimum(begin + size, position)
    used[:, 4] = position
    items[num_items:, 0] = -1
    return items


def item_capacity(num_seqs: int, num_pieces: int) -> int:
    """Items that `decode_items` gives for so many sequences, used or not.

    A sequence is cut into less than 1 + its keys / (2/3 of a fair share) pieces.
    """
    return num_seqs + 3 * num_pieces // 2 + 1


def num_places(num_pieces: int) -> int:
    """Results of split sequences that `decode_items` may ask room for.

    A sequence of x > 1 longest pieces is cut into at most ceil(x) < 2 x.
    """
    return 3 * num_pieces + 2


def _split(lens: Int32s, tile: int, num_pieces: int) -> tuple[Int32s | None, Int32s]:
    """Into how many pieces each sequence is cut (None: no sequence is), and their size.

    `num_pieces` in all where that is fair, so that all programs run at once: a few too many would
    cost a second round. Otherwise more and smaller ones, of which several follow each other.
    """
    padded = np.maximum(lens, 1)
    fair = -(-int(padded.sum()) // num_pieces)
    short = -(-2 * fair // 3)
    if max(short, MIN_SPLIT) >= int(lens.max()):
        return None, lens
    splits = _cut(padded, fair * _STRETCHES[-1], tile)
    if int(splits.sum()) > num_pieces:
        splits = _cut(padded, short, tile)
    else:
        for stretch in _STRETCHES[:-1]:
            finer = _cut(padded, fair * stretch, tile)
            if int(finer.sum()) <= num_pieces:
                splits = finer
                break
    # Rounding a piece up to whole tiles may leave nothing for the last one.
    tiles = splits * tile
    sizes = (padded + (tiles - 1)) // tiles * tile
    return (padded + (sizes - 1)) // sizes, sizes


def _cut(lens: Int32s, longest: float, tile: int) -> Int32s:
    """Into how many pieces of at most about `longest` keys each sequence is cut."""
    size = -(-max(int(longest), MIN_SPLIT) // tile) * tile
    splits: Int32s = (lens + (size - 1)) // size
    return splits


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
