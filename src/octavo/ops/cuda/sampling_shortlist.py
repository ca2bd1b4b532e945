"""The likeliest tokens of rows with top_k or top_p, gathered so that limits are found among few.

The limits (sampling_limits.py) take many passes over the logits that they are looked for in. Most
often few tokens are enough: all above some threshold, if these are as many as top_k, or together
as probable as top_p.
  1. Per chunk of a row: how many tokens are above each of several thresholds, or what they weigh;
     and the exact weight of all.
  2. Per chunk again: the highest threshold with enough tokens above it, and their logits, which are
     copied to the row's shortlist in any order.
If more tokens may be above that threshold than a shortlist holds, which is so where the
distribution is flat, the limits are looked for in the whole row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.pdl import allow_next, wait_previous
from octavo.ops.cuda.sampling_weights import load_early, row_peak, scaled_logits, shares_of

CAPACITY = 4096  # logits of a shortlist
_CAPACITY = tl.constexpr(CAPACITY)
NUM_THRESHOLDS = 8
_NUM_THRESHOLDS = tl.constexpr(NUM_THRESHOLDS)
_DISTANCE = tl.constexpr(2.0)  # from each threshold of scaled logits to the next one
# What the weights above a threshold exceed top_p by, as a share of all: sums in float32 are off by
# less.
_MARGIN = tl.constexpr(1e-3)


class Shortlists(NamedTuple):
    """What the kernels leave for the search of limits, of each draw."""

    # float32 [num_draws, num_chunks, NUM_THRESHOLDS]: how many tokens are above each, with top_k;
    # otherwise what they weigh. All are above the last one.
    amounts: Tensor
    totals: Tensor  # int64 [num_draws, num_chunks]: what all tokens weigh
    lengths: Tensor  # int32 [num_draws]; more than CAPACITY: there is none
    logits: Tensor  # [num_draws, CAPACITY]

    @classmethod
    def empty(cls, num_draws: int, num_chunks: int, logits: Tensor) -> Shortlists:
        """Memory for the kernels. logits: of the draws."""
        device = logits.device
        return cls(
            torch.empty(
                (num_draws, num_chunks, NUM_THRESHOLDS), dtype=torch.float32, device=device
            ),
            torch.empty((num_draws, num_chunks), dtype=torch.int64, device=device),
            torch.empty(num_draws, dtype=torch.int32, device=device),
            torch.empty((num_draws, CAPACITY), dtype=logits.dtype, device=device),
        )


@triton.jit
def load_limits(temperature, top_ks, top_ps, draw, vocab_size):
    """(top_k, top_p, whether top_k rules any token out, whether top_p may) of a draw."""
    top_k, top_p = tl.load(top_ks + draw), tl.load(top_ps + draw)
    has_top_k = (temperature > 0) & (top_k > 0) & (top_k < vocab_size)
    return top_k, top_p, has_top_k, (temperature > 0) & (top_p < 1)


@triton.jit
def _load_kept(
    logits, row, ids, stride, vocab_size, peaks, draw, num_parts, temperature, least,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Some logits of a row, and the scaled ones: -inf for tokens that min_p rules out."""
    inside = ids < vocab_size
    values = tl.load(logits + row * stride + ids, mask=inside, other=-float("inf"))
    peak = row_peak(peaks, draw, num_parts, PARTS)[0]
    scaled = scaled_logits(values, peak, temperature)
    return values, tl.where(inside & (scaled >= least), scaled, -float("inf"))


@triton.jit(do_not_specialize=["num_chunks", "num_parts"])
def outline(
    logits,
    rows,
    temperatures,
    top_ks,
    top_ps,
    log_min_p,
    peaks,
    amounts,
    totals,
    lengths,
    stride,
    vocab_size,
    num_chunks,
    num_parts,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first kernel; see above."""
    allow_next(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    place = draw * num_chunks + chunk
    row, temperature, least = load_early(rows, temperatures, log_min_p, draw)
    wait_previous(PDL)
    _, _, has_top_k, has_top_p = load_limits(temperature, top_ks, top_ps, draw, vocab_size)
    if chunk == 0:
        tl.store(lengths + draw, 0)
    if has_top_k | has_top_p:
        _values, scaled = _load_kept(
            logits, row, ids, stride, vocab_size, peaks, draw, num_parts, temperature, least, PARTS
        )
        shares = shares_of(scaled)
        amount = tl.where(has_top_k, 1.0, shares)
        of_chunk = amounts + place * _NUM_THRESHOLDS
        for threshold in tl.static_range(_NUM_THRESHOLDS - 1):
            reaches = scaled >= -_DISTANCE * (threshold + 1)
            tl.store(of_chunk + threshold, tl.sum(tl.where(reaches, amount, 0.0), 0))
        every = tl.where(scaled > -float("inf"), amount, 0.0)
        tl.store(of_chunk + _NUM_THRESHOLDS - 1, tl.sum(every, 0))
        if has_top_p:
            tl.store(totals + place, tl.sum(shares.to(tl.int64), 0))


@triton.jit(do_not_specialize=["num_chunks", "num_parts"])
def gather(
    logits,
    rows,
    temperatures,
    top_ks,
    top_ps,
    log_min_p,
    peaks,
    amounts,
    lengths,
    likely,
    stride,
    vocab_size,
    num_chunks,
    num_parts,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The second kernel; see above. likely: Shortlists.logits."""
    allow_next(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    row, temperature, least = load_early(rows, temperatures, log_min_p, draw)
    wait_previous(PDL)
    top_k, top_p, has_top_k, has_top_p = load_limits(temperature, top_ks, top_ps, draw, vocab_size)
    if has_top_k | has_top_p:
        thresholds = tl.arange(0, _NUM_THRESHOLDS)
        chunks = tl.arange(0, CHUNKS)
        places = (draw * num_chunks + chunks)[:, None] * _NUM_THRESHOLDS + thresholds[None, :]
        there = (chunks < num_chunks)[:, None]
        amount = tl.sum(tl.load(amounts + places, mask=there, other=0.0), 0)
        # If top_k holds, top_p counts those alone that it lets pass.
        needed = tl.where(has_top_k, top_k.to(tl.float64), (top_p + _MARGIN) * tl.max(amount, 0))
        is_enough = (amount >= needed) | (thresholds == _NUM_THRESHOLDS - 1)
        threshold = tl.min(tl.where(is_enough, thresholds, _NUM_THRESHOLDS), 0)
        lowest = tl.where(threshold < _NUM_THRESHOLDS - 1, (threshold + 1) * -_DISTANCE, -3.0e38)
        # How many tokens are above it: at most so many, if it is their weight that is known.
        most = tl.sum(tl.where(thresholds == threshold, amount, 0.0), 0)
        if not has_top_k:
            above = tl.sum(tl.where(thresholds == threshold - 1, amount, 0.0), 0)
            most = (most - above) / shares_of(lowest) + above / shares_of(threshold * -_DISTANCE)
        is_long = (most > _CAPACITY) | (threshold == _NUM_THRESHOLDS - 1)
        own = tl.load(amounts + (draw * num_chunks + chunk) * _NUM_THRESHOLDS + threshold)
        if is_long & (vocab_size > _CAPACITY):
            if chunk == 0:
                tl.store(lengths + draw, _CAPACITY + 1)
        elif own > 0:
            values, scaled = _load_kept(
                logits,
                row,
                ids,
                stride,
                vocab_size,
                peaks,
                draw,
                num_parts,
                temperature,
                least,
                PARTS,
            )
            reaches = scaled >= lowest
            of_draw = lengths + draw + tl.zeros_like(ids)
            place = tl.atomic_add(of_draw, 1, mask=reaches, sem="relaxed")
            tl.store(likely + draw * _CAPACITY + place, values, mask=reaches & (place < _CAPACITY))
