"""What the host does not have to know between two steps: the tokens that were drawn, and where the
sequences that draw them stand. Both are kept on the device."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.base import DecodeItems
from octavo.ops.cuda.logit_edits import EditRecords, count_drawn
from octavo.ops.cuda.paged import ITEM_FIELDS
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous

_BLOCK = 128  # an element per thread
_MOVED = 512  # tokens or work items that the one program of a kernel has at once
_FIELDS = tl.constexpr(ITEM_FIELDS)


@triton.jit(do_not_specialize=["num_tokens"])
def _fill_pending(token_ids, rows, last_tokens, num_tokens, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < num_tokens
    token = tl.load(token_ids + offset, mask=inside, other=0)
    pending = inside & (token < 0)
    row = tl.load(rows + offset, mask=pending, other=0)
    tl.store(token_ids + offset, tl.load(last_tokens + row, mask=pending), mask=pending)


def fill_pending(token_ids: Tensor, rows: Tensor, last_tokens: Tensor) -> None:
    """Where token_ids[i] is negative, it becomes last_tokens[rows[i]].

    token_ids int64 [n], rows int32 [n], last_tokens int64 [num_rows], all dense.
    """
    n = len(token_ids)
    _fill_pending[(triton.cdiv(n, _BLOCK),)](token_ids, rows, last_tokens, n, BLOCK=_BLOCK)


@triton.jit
def _load_tokens(token_ids, rows, first, num_tokens, BLOCK: tl.constexpr):
    """(places, which of them there are, tokens, rows), from `first` on."""
    offset = first + tl.arange(0, BLOCK)
    inside = offset < num_tokens
    token = tl.load(token_ids + offset, mask=inside, other=0)
    row = tl.load(rows + offset, mask=inside, other=0)
    return offset, inside, token, row


@triton.jit
def _move_items(
    items, num_items, WINDOW: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr
):
    """Work items of decodes that have one more key."""
    for first in range(0, num_items, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        item = items + offset * _FIELDS
        inside = offset < num_items
        # All is asked for before any of it is used.
        token = tl.load(item, mask=inside, other=-1)
        position = tl.load(item + 4, mask=inside, other=-1) + 1
        split = tl.load(item + 5, mask=inside, other=0)
        num_splits = tl.load(item + 6, mask=inside, other=0)
        if WINDOW:
            begin = tl.load(item + 2, mask=inside, other=0)
        # Padding has no position, and where all keys are cached, their number stays the same.
        moves = inside & (token >= 0) & (position > 0)
        if WINDOW:
            start = tl.maximum(position + 1 - WINDOW, 0) // ALIGNMENT * ALIGNMENT
            tl.store(item + 2, tl.maximum(begin, start), mask=moves & (split == 0))
        tl.store(item + 4, position, mask=moves)
        tl.store(item + 3, position, mask=moves & (split == num_splits - 1))


@triton.jit
def _begin_decodes(
    is_staged,
    token_ids,
    positions,
    rows,
    last_tokens,
    draw_positions,
    num_tokens,
    items,
    num_items,
    WINDOWS: tl.constexpr,
    ALIGNMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    continues = tl.load(is_staged) == 0
    for first in range(0, num_tokens, BLOCK):
        offset, inside, token, row = _load_tokens(token_ids, rows, first, num_tokens, BLOCK)
        position = tl.load(positions + offset, mask=inside, other=0)
        draw_position = tl.load(draw_positions + offset, mask=inside, other=0)
        last = tl.load(last_tokens + row, mask=inside)
        moves = inside & (row > 0) & continues  # row 0 is padding's
        tl.store(token_ids + offset, last, mask=moves | (token < 0))
        tl.store(positions + offset, position + 1, mask=moves)
        tl.store(draw_positions + offset, draw_position + 1, mask=moves)
    if continues:
        for i in tl.static_range(len(items)):
            _move_items(items[i], num_items[i], WINDOWS[i], ALIGNMENTS[i], BLOCK)
    tl.debug_barrier()
    tl.store(is_staged, 0)


def begin_decodes(
    is_staged: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    rows: Tensor,
    last_tokens: Tensor,
    draw_positions: Tensor,
    items: Sequence[DecodeItems],
) -> None:
    """Begin a step that computes one token of each sequence; launched without PDL, so that all
    kernels before it have ended, and it ends before the embedding begins (pdl.py).

    If the host has staged it, this is `fill_pending`. Otherwise the step continues the one before,
    which had the same sequences: each goes on with its last token, one position further. From then
    on is_staged is 0, until the host stages a step again.

    Args:
        is_staged: int32 [1].
        token_ids, positions: int64 [n], dense.
        rows: int32 [n], dense; 0 is that of padding, which stays as it is.
        last_tokens: int64 [num_rows], dense.
        draw_positions: int64 [n], dense: of the tokens to be drawn; those of padding stay.
        items: of all shapes of layers.
    """
    _begin_decodes[(1,)](
        is_staged,
        token_ids,
        positions,
        rows,
        last_tokens,
        draw_positions,
        len(token_ids),
        tuple(each.items for each in items),
        tuple(len(each.items) // ITEM_FIELDS for each in items),
        WINDOWS=tuple(each.window or 0 for each in items),
        ALIGNMENTS=tuple(each.alignment for each in items),
        BLOCK=_MOVED,
    )


@triton.jit(do_not_specialize=["num_tokens", "first_token"])
def _keep_tokens(
    token_ids,
    rows,
    last_tokens,
    results,
    counter,
    places,
    counts,
    num_tokens,
    words,
    first_token,
    num_counted,
    SIZE: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    # What wrote these comes before the kernels that draw: the step before, and layers of experts.
    if results is not None:
        number = tl.load(results + 1, cache_modifier=".cg")
        address = tl.load(results, cache_modifier=".cg")
        target = address.to(tl.pointer_type(tl.int64)) + number * SIZE
        if counter is not None:
            num_hit = tl.load(counter, cache_modifier=".cg")
    wait_previous(PDL)
    if results is not None and counter is not None:
        tl.store(target, num_hit)
    for first in range(0, num_tokens, BLOCK):
        offset, inside, token, row = _load_tokens(token_ids, rows, first, num_tokens, BLOCK)
        # Logits that are not finite give no token; the next step must not look for its embedding.
        kept = tl.maximum(token, 0)
        tl.store(last_tokens + row, kept, mask=inside)
        if results is not None:
            tl.store(target + 1 + offset, token, mask=inside)
        if counts is not None:
            record = tl.load(places + row, mask=inside, other=-1)
            count_drawn(counts, words, record, kept.to(tl.int32) - first_token, num_counted)
    if results is not None:
        tl.debug_barrier()
        tl.store(results + 1, (number + 1) % NUM)


def keep_tokens(
    token_ids: Tensor,
    rows: Tensor,
    last_tokens: Tensor,
    results: Tensor | None = None,
    counter: Tensor | None = None,
    results_shape: tuple[int, int] = (1, 1),
    records: EditRecords | None = None,
    first_token: int = 0,
) -> None:
    """last_tokens[rows[i]] becomes token_ids[i], or 0 where that is negative.

    Only row 0, which belongs to no sequence, may repeat.

    Args:
        token_ids: int64 [n], dense.
        rows: int32 [n], dense.
        last_tokens: int64 [num_rows], dense.
        results: int64 [2 or more]: the address of int64 `results_shape`, in memory of the device,
            or pinned memory of the host, and the index of a row of it. The kernel writes the tokens
            there, too, from the second element on, and goes on to the next row.
        counter: int64 [1], which it writes into the first element.
        results_shape: rows, and elements of a row, at least 1 + n.
        records: of rows, where their tokens are counted.
        first_token: of the vocabulary that the records are for.
    """
    counted = (None, None, 0, 0) if records is None else records.counted
    _keep_tokens[(1,)](
        token_ids,
        rows,
        last_tokens,
        results,
        counter,
        *counted[:2],
        len(token_ids),
        counted[2],
        first_token,
        counted[3],
        SIZE=results_shape[1],
        NUM=results_shape[0],
        BLOCK=_MOVED,
        **launch_options(token_ids.device),
    )
