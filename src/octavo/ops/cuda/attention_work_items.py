"""Cuts a step's attention into work items for the Triton kernels: host work, NumPy only."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.ops.base import MAX_CASCADE_LEVELS, CascadeSegments
from octavo.ops.cuda.paged import ITEM_FIELDS, MEMBER_FIELDS, PREFILL_FIELDS

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

MIN_SPLIT = 128  # keys: a shorter split costs more to start than to read
UNSPLIT_TILES = 2  # that take less time one after the other than splits and combining them
FEW_TILES = 8  # of a split: with more, more rounds of combining take less time than they do
MAX_CASCADE_RESULTS = 4096  # partial results of cascades, with those they are added to
# Lengths of a split to try, in multiples of an even share.
_SPLIT_SIZES = (1.0, 1.07, 1.15, 1.25, 1.35, 1.5)


class Sequences(NamedTuple):
    """Some sequences of a step: int32 [num_seqs] each."""

    tokens: Int32s  # where the new tokens begin
    rows: Int32s  # of the block table
    contexts: Int32s  # keys, new ones included (if there are any); 0: padding
    lens: Int32s  # new tokens

    def select(self, mask: NDArray[np.bool_]) -> Sequences:
        return Sequences(*(x[mask] for x in self))


class CascadeWork(NamedTuple):
    """Shared segments of keys, cut into work items for `cascade_attention`."""

    items: Int32s  # [cascade_capacity, ITEM_FIELDS]; the last ones are empty
    members: Int32s  # [num_members]: sequences, in the order in which the items name them
    places: Int32s  # [num_members]: its first partial result, relative to its sequence's first one
    ends: Int32s  # [num_seqs]: the keys before this one are covered by the cascade
    counts: Int32s  # [num_seqs]: partial results that the cascade leaves for the sequence

    def member_table(self, seqs: Sequences, first_places: Int32s) -> Int32s:
        """[num_members, MEMBER_FIELDS], as `cascade_attention` reads it.

        It has at least one row, so that it has an address. first_places [num_seqs]: where the
        partial results of each sequence begin.
        """
        first = first_places.take(self.members)
        table = np.zeros((max(1, len(self.members)), MEMBER_FIELDS), np.int32)
        used = table[: len(self.members)]
        used[:, 0] = seqs.tokens.take(self.members)
        used[:, 1] = seqs.contexts.take(self.members) - 1
        used[:, 2] = first + self.places
        return table


class Splitting(NamedTuple):
    """How items of prompts with many keys are split."""

    at_once: int  # how many items a GPU computes at the same time for each KV head
    added_keys: int  # that a program computes while another one adds up one partial result

    def min_split(self, longest: int) -> int:
        """Keys of a split, at least. longest: keys of an item.

        n splits take the time of longest / n + n * added_keys keys, of which the sum is least where
        both are equal.
        """
        return math.isqrt(self.added_keys * longest)


class DecodeWork(NamedTuple):
    """Work items of `decode_attention`."""

    items: Int32s  # [item_capacity, ITEM_FIELDS]
    first_places: Int32s  # [num_seqs]: of sequences with several partial results


def parts_of(counts: Int32s | Int64s) -> tuple[Int64s, Int64s]:
    """Number the parts of work items, of which item i has `counts[i]`: for each part, in order, its
    item, and its number among those of the item."""
    which = np.arange(len(counts)).repeat(counts)
    return which, np.arange(len(which)) - starts_of(counts).take(which)


def starts_of(counts: Int32s | Int64s) -> Int64s:
    """How many parts come before the first one of each i: see parts_of."""
    starts: Int64s = counts.cumsum() - counts
    return starts


def cascade_work(
    seqs: Sequences,
    segments: CascadeSegments | None,
    tile: int,
    num_splits: int,
    members_per_item: int,
    num_padded: int = 0,
) -> CascadeWork:
    """Cut shared segments into about `num_splits` splits.

    There are none if the buffers have no room for them or for their partial results. The number of
    items depends on the number of sequences alone, as in `decode_items`.
    """
    num_seqs = len(seqs.tokens)
    items = np.zeros(
        (cascade_capacity(max(num_seqs, num_padded), num_splits), ITEM_FIELDS), np.int32
    )
    zeros = np.zeros(num_seqs, np.int32)
    empty = CascadeWork(items, zeros[:0], zeros[:0], zeros, zeros)
    if segments is None:
        return empty
    sizes = np.diff(segments.starts)
    lens = segments.ends - segments.begins
    tiles = -(-sizes // members_per_item)
    even = -(-int((tiles * lens).sum()) // num_splits)
    longest = -(-max(even, MIN_SPLIT) // tile) * tile
    counts = -(-lens // longest)
    lengths = -(-lens // (counts * tile)) * tile  # of a split
    counts = -(-lens // lengths)
    results = counts.repeat(sizes)
    num_results = np.bincount(segments.members, results, num_seqs).astype(np.int32)
    per_segment = tiles * counts
    num_places = int(num_results.sum()) + int((num_results > 0).sum())
    if num_places > MAX_CASCADE_RESULTS or int(per_segment.sum()) > len(items):
        return empty

    which, number = parts_of(per_segment)
    split, length = number % counts.take(which), lengths.take(which)
    first = number // counts.take(which) * members_per_item
    used = items[: len(which)]
    used[:, 0] = np.minimum(sizes.take(which) - first, members_per_item)
    used[:, 4] = segments.starts.take(which) + first
    used[:, 1] = seqs.rows.take(segments.members.take(used[:, 4]))
    used[:, 2] = segments.begins.take(which) + split * length
    used[:, 3] = np.minimum(used[:, 2] + length, segments.ends.take(which))
    used[:, 5] = split

    ends = np.zeros(num_seqs, np.int32)
    ends[segments.members] = segments.ends.repeat(sizes)  # a sequence's last segment comes last
    # By sequence, in the order of its segments: partial results follow each other.
    order = segments.members.argsort(kind="stable")
    behind = starts_of(results.take(order))
    places = np.empty(len(order), np.int32)
    places[order] = behind - starts_of(num_results).take(segments.members.take(order))
    return CascadeWork(items, segments.members, places, ends, num_results)


def cascade_capacity(num_seqs: int, num_splits: int) -> int:
    """Items that `cascade_work` gives for so many sequences, used or not.

    A segment has at least two members, and a sequence at most MAX_CASCADE_LEVELS segments. Where an
    item takes two members, nested segments of three members may need a few more items: then
    `cascade_work` gives none.
    """
    return MAX_CASCADE_LEVELS * num_seqs // 2 + num_splits + 1


def decode_items(
    seqs: Sequences,
    window: int | None,
    tile: int,
    alignment: int,
    num_splits: int | None,
    num_padded: int = 0,
    cascade: CascadeWork | None = None,
    is_causal: bool = True,
    min_split: int = MIN_SPLIT,
    at_once: int | None = None,
) -> DecodeWork:
    """The work items of decodes, as `decode_attention` reads them; the last may be empty.

    The number of items depends on the number of sequences alone, or on `num_padded` if that is
    more; which keys an item reads depends on the context lengths. Keys that `cascade` covers are
    left out, and its partial results count as the first splits of a sequence. is_causal: the last
    key is that of the new token itself; otherwise all keys are cached, and there is no new one.
    num_splits: for how many splits the keys are cut, in all; None: one item for each sequence.
    at_once: a sequence gets no more splits than these, while they have few tiles each, and a short
    one a single split.
    """
    tokens, rows, contexts, _ = seqs
    num_seqs = max(len(tokens), num_padded)
    capacity = num_seqs if num_splits is None else item_capacity(num_seqs, num_splits)
    if not len(tokens):
        items = np.zeros((capacity, ITEM_FIELDS), np.int32)
        items[:, 0] = -1
        return DecodeWork(items, tokens)
    positions = contexts - 1 if is_causal else contexts  # behind the cached keys
    starts = None if window is None else np.maximum(contexts - window, 0) // alignment * alignment
    if cascade is not None:
        assert starts is None, "no cascades where a window moves over the keys"
        starts = cascade.ends
    lens = positions if starts is None else positions - starts  # cached keys that the query sees
    if at_once is not None and num_splits is not None:
        longest = int(lens.max())
        if longest <= UNSPLIT_TILES * tile:
            min_split = longest
        if longest <= at_once * FEW_TILES * tile:
            num_splits = min(num_splits, at_once * len(tokens))
    splits, sizes = (
        (None, lens) if num_splits is None else _split(lens, tile, num_splits, min_split)
    )
    # The largest splits come first, so that programs end at about the same time.
    order = (-sizes).argsort(kind="stable")
    items = np.zeros((capacity, ITEM_FIELDS), np.int32)
    num_items = len(tokens)
    split: Int64s | int = 0
    first_places = np.zeros(num_items, np.int32)
    if cascade is not None and splits is None:
        splits = np.ones_like(lens)
    if splits is not None:
        counts = splits.take(order)
        which, split = parts_of(counts)
        num_items = len(which)
        done = np.zeros_like(counts) if cascade is None else cascade.counts.take(order)
        # Only sequences with several partial results need places for them.
        needed = np.where(counts + done > 1, counts + done, 0)
        places = starts_of(needed)
        first_places[order] = places
        items[:num_items, 5] = split + done.take(which)
        items[:num_items, 6] = (counts + done).take(which)
        items[:num_items, 7] = places.take(which)
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
    used[:, 4] = position if is_causal else -1
    items[num_items:, 0] = -1
    return DecodeWork(items, first_places)


def item_capacity(num_seqs: int, num_splits: int) -> int:
    """Items that `decode_items` gives for so many sequences, used or not.

    One sequence is cut into `num_splits` at most; several, into less than 1 + their keys / (2/3 of
    an even share) each.
    """
    if num_seqs == 1:
        return num_splits
    return num_seqs + 3 * num_splits // 2 + 1


def num_places(num_splits: int) -> int:
    """Partial results of split sequences that `decode_items` may need places for.

    A sequence of x > 1 longest splits is cut into at most ceil(x) < 2 x.
    """
    return 3 * num_splits + 2


def _split(
    lens: Int32s, tile: int, num_splits: int, min_split: int
) -> tuple[Int32s | None, Int32s]:
    """How many splits each sequence gets (None: no sequence is split), and their size.

    `num_splits` in all where they are even, so that all programs run in one wave: a few too many
    would cost a second wave. Otherwise more and smaller ones, in several waves.
    """
    padded = np.maximum(lens, 1)
    even = -(-int(padded.sum()) // num_splits)
    short = -(-2 * even // 3)
    if max(short, min_split) >= int(lens.max()):
        return None, lens
    splits = _cut(padded, even * _SPLIT_SIZES[-1], tile, min_split)
    if int(splits.sum()) > num_splits:
        splits = _cut(padded, short, tile, min_split)
    else:
        for factor in _SPLIT_SIZES[:-1]:
            finer = _cut(padded, even * factor, tile, min_split)
            if int(finer.sum()) <= num_splits:
                splits = finer
                break
    # Rounding a split up to whole tiles may leave no keys for the last one.
    tiles = splits * tile
    sizes = (padded + (tiles - 1)) // tiles * tile
    return (padded + (sizes - 1)) // sizes, sizes


def _cut(lens: Int32s, longest: float, tile: int, min_split: int) -> Int32s:
    """How many splits of at most about `longest` keys each sequence gets."""
    size = -(-max(int(longest), min_split) // tile) * tile
    splits: Int32s = (lens + (size - 1)) // size
    return splits


def prefill_items(
    seqs: Sequences,
    window: int | None,
    tile: int,
    alignment: int,
    tokens_per_item: int,
    is_causal: bool = True,
    splitting: Splitting | None = None,
) -> Int32s:
    """[num_items, PREFILL_FIELDS], as `prefill_attention` reads them.

    is_causal: see there. splitting: if items with many more keys than an even share are split. With
    it there are `item_capacity` items at most, and `num_places` partial results.
    """
    tokens, rows, contexts, lens = seqs
    counts = -(-lens // tokens_per_item)
    seq, number = parts_of(counts)
    offset = number * tokens_per_item
    position = contexts[seq] - lens[seq] + offset
    count = np.minimum(lens[seq] - offset, tokens_per_item)
    begin = np.zeros_like(position)
    if window is not None:
        begin = np.maximum(position - window + 1, 0) // alignment * alignment
    end = position + count if is_causal else contexts[seq]
    items = np.zeros((len(seq), PREFILL_FIELDS), np.int32)
    items[:, 0] = tokens[seq] + offset
    items[:, 1] = rows[seq]
    items[:, 2] = begin
    items[:, 3] = (position + 1 if is_causal else end) // tile * tile
    items[:, 4] = end
    items[:, 5] = position
    items[:, 6] = count
    items[:, 7] = contexts[seq]
    items[:, 9] = 1
    if splitting is not None and len(items):
        items = _split_items(items, tile, splitting)
    return items[np.argsort(items[:, 2] - items[:, 4], kind="stable")]  # the most keys first


def _split_items(items: Int32s, tile: int, splitting: Splitting) -> Int32s:
    """See `prefill_items`."""
    sizes = items[:, 4] - items[:, 2]
    min_split = splitting.min_split(int(sizes.max()))
    splits, size = _split(sizes, tile, splitting.at_once, min_split)
    if splits is None:
        return items
    which, number = parts_of(splits)
    parts = items.take(which, axis=0)
    parts[:, 2] += number * size.take(which)
    parts[:, 4] = np.minimum(parts[:, 2] + size.take(which), parts[:, 4])
    parts[:, 3] = parts[:, 3].clip(parts[:, 2], parts[:, 4])
    parts[:, 8] = number
    parts[:, 9] = splits.take(which)
    parts[:, 10] = starts_of(np.where(splits > 1, splits, 0)).take(which)
    return parts
