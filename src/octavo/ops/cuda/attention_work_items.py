"""Cuts a step's attention into pieces of work for the Triton kernels: host work, NumPy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.ops.base import MOST_LEVELS, SharedKeys
from octavo.ops.cuda.paged import ITEM_FIELDS, MEMBER_FIELDS

Int32s = NDArray[np.int32]

MIN_SPLIT = 128  # keys: below it a piece costs more to start than it reads
SHARED_PLACES = 4096  # results that shared keys may leave, with those they are added to
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


class SharedWork(NamedTuple):
    """Keys that are read once for several sequences, cut into pieces for `shared_attention`."""

    items: Int32s  # [shared_capacity, ITEM_FIELDS]; the last ones name no work
    members: Int32s  # [num_members]: sequences, as the items name them
    places: Int32s  # [num_members]: each one's first result, counted from its sequence's first one
    ends: Int32s  # [num_seqs]: the keys before it are taken care of
    counts: Int32s  # [num_seqs]: results that are left for it

    def member_table(self, seqs: Sequences, first_places: Int32s) -> Int32s:
        """[num_members, MEMBER_FIELDS], as `shared_attention` reads it; one row at least, so that
        it has an address.

        first_places [num_seqs]: where the results of each sequence begin.
        """
        first = first_places.take(self.members)
        table = np.zeros((max(1, len(self.members)), MEMBER_FIELDS), np.int32)
        used = table[: len(self.members)]
        used[:, 0] = seqs.tokens.take(self.members)
        used[:, 1] = seqs.contexts.take(self.members) - 1
        used[:, 2] = first + self.places
        used[:, 3] = first
        return table


class DecodeWork(NamedTuple):
    """What the programs of `decode_attention` do."""

    items: Int32s  # [item_capacity, ITEM_FIELDS]
    first_places: Int32s  # [num_seqs], of those with several results


def shared_work(
    seqs: Sequences,
    shared: SharedKeys | None,
    tile: int,
    num_pieces: int,
    members_per_item: int,
    num_padded: int = 0,
) -> SharedWork:
    """Cut shared keys into about `num_pieces` pieces; into none if there is no room for these or
    for their results.

    The number of items depends on the number of sequences alone, as in `decode_items`.
    """
    num_seqs = len(seqs.tokens)
    items = np.zeros(
        (shared_capacity(max(num_seqs, num_padded), num_pieces), ITEM_FIELDS), np.int32
    )
    nothing = np.zeros(num_seqs, np.int32)
    nobody = SharedWork(items, nothing[:0], nothing[:0], nothing, nothing)
    if shared is None:
        return nobody
    sizes = np.diff(shared.starts)
    lens = shared.ends - shared.begins
    tiles = -(-sizes // members_per_item)
    fair = -(-int((tiles * lens).sum()) // num_pieces)
    longest = -(-max(fair, MIN_SPLIT) // tile) * tile
    counts = -(-lens // longest)
    lengths = -(-lens // (counts * tile)) * tile  # of a piece
    counts = -(-lens // lengths)
    results = counts.repeat(sizes)
    num_results = np.bincount(shared.members, results, num_seqs).astype(np.int32)
    per_stretch = tiles * counts
    num_places = int(num_results.sum()) + int((num_results > 0).sum())
    if num_places > SHARED_PLACES or int(per_stretch.sum()) > len(items):
        return nobody

    which = np.arange(len(sizes)).repeat(per_stretch)
    number = np.arange(len(which)) - (per_stretch.cumsum() - per_stretch).take(which)
    piece, length = number % counts.take(which), lengths.take(which)
    first = number // counts.take(which) * members_per_item
    used = items[: len(which)]
    used[:, 0] = np.minimum(sizes.take(which) - first, members_per_item)
    used[:, 4] = shared.starts.take(which) + first
    used[:, 1] = seqs.rows.take(shared.members.take(used[:, 4]))
    used[:, 2] = shared.begins.take(which) + piece * length
    used[:, 3] = np.minimum(used[:, 2] + length, shared.ends.take(which))
    used[:, 5] = piece

    ends = np.zeros(num_seqs, np.int32)
    ends[shared.members] = shared.ends.repeat(sizes)  # a sequence's last stretch comes last
    # By sequences, in the order of their stretches: each result stands behind those before it.
    order = shared.members.argsort(kind="stable")
    behind = results.take(order).cumsum() - results.take(order)
    places = np.empty(len(order), np.int32)
    places[order] = behind - (num_results.cumsum() - num_results).take(shared.members.take(order))
    return SharedWork(items, shared.members, places, ends, num_results)


def shared_capacity(num_seqs: int, num_pieces: int) -> int:
    """Items that `shared_work` gives for so many sequences, used or not.

    A stretch has two members or more, and a sequence MOST_LEVELS stretches at most. Where an item
    takes two members, stretches of three that lie in each other may need some more.
    """
    return MOST_LEVELS * num_seqs // 2 + num_pieces + 1


def decode_items(
    seqs: Sequences,
    window: int | None,
    tile: int,
    alignment: int,
    num_pieces: int,
    num_padded: int = 0,
    shared: SharedWork | None = None,
) -> DecodeWork:
    """The pieces of work of decodes, as `decode_attention` reads them; the last may name no work.

    The number of items depends on the number of sequences alone, or on `num_padded` if that is
    more; which keys a piece holds, on their lengths. What `shared` computes of a sequence's keys
    is left out, and counts among its splits, as the first ones.
    """
    tokens, rows, contexts, _ = seqs
    capacity = item_capacity(max(len(tokens), num_padded), num_pieces)
    if not len(tokens):
        items = np.zeros((capacity, ITEM_FIELDS), np.int32)
        items[:, 0] = -1
        return DecodeWork(items, tokens)
    positions = contexts - 1
    starts = None if window is None else np.maximum(contexts - window, 0) // alignment * alignment
    if shared is not None:
        assert starts is None, "no keys are shared where a window moves over them"
        starts = shared.ends
    lens = positions if starts is None else positions - starts  # cached keys that the token sees
    splits, sizes = _split(lens, tile, num_pieces)
    # Large pieces first, so that programs end together.
    order = (-sizes).argsort(kind="stable")
    items = np.zeros((capacity, ITEM_FIELDS), np.int32)
    num_items = len(tokens)
    split: Int32s | int = 0
    first_places = np.zeros(num_items, np.int32)
    if shared is not None and splits is None:
        splits = np.ones_like(lens)
    if splits is not None:
        counts = splits.take(order)
        which = np.arange(num_items).repeat(counts)
        num_items = len(which)
        split = np.arange(num_items) - (counts.cumsum() - counts).take(which)
        done = np.zeros_like(counts) if shared is None else shared.counts.take(order)
        # Only results of split sequences need a place.
        needed = np.where(counts + done > 1, counts + done, 0)
        places = needed.cumsum() - needed
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
    used[:, 4] = position
    items[num_items:, 0] = -1
    return DecodeWork(items, first_places)


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
    """[num_items, ITEM_FIELDS], as `prefill_attention` reads them."""
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
    items = np.zeros((len(seq), ITEM_FIELDS), np.int32)
    items[:, 0] = tokens[seq] + offset
    items[:, 1] = rows[seq]
    items[:, 2] = begin
    items[:, 3] = (position + 1) // tile * tile
    items[:, 4] = end
    items[:, 5] = position
    items[:, 6] = count
    return items[order]
