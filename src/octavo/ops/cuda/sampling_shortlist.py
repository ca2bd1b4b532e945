"""The likeliest tokens of rows with top_k or top_p, gathered so that limits are found among few.

The limits (sampling_limits.py) take many passes over the logits that they are looked for in. Most
often few tokens decide: all that reach some level, of which there are enough for top_k, or which
together reach top_p.
  1. Per chunk of a row: how many tokens reach each level, or what they weigh; and the exact weight
     of all.
  2. Per chunk again: the highest level that is low enough, and the logits that reach it, which move
     to the row's shortlist in any order.
If more tokens may reach that level than a shortlist holds, which is so where the distribution is
flat, the limits are looked for in the whole row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.pdl import allow_next, wait_previous
from octavo.ops.cuda.sampling_weights import row_peak, scaled_logits, shares_of

CAPACITY = 4096  # logits of a shortlist
_CAPACITY = tl.constexpr(CAPACITY)
NUM_LEVELS = 8
_NUM_LEVELS = tl.constexpr(NUM_LEVELS)
_LEVEL = tl.constexpr(2.0)  # the levels of scaled logits are so far from each other
# What the weights of a level exceed top_p by, as a share of all: float32 sums are off by less.
_MARGIN = tl.constexpr(1e-3)


class Shortlists(NamedTuple):
    """What the kernels leave for the search of limits, of each draw."""

    # float32 [num_draws, num_chunks, NUM_LEVELS]: how many tokens reach a level, with top_k;
    # otherwise what they weigh. All reach the last one.
    amounts: Tensor
    totals: Tensor  # int64 [num_draws, num_chunks]: what all tokens weigh
    lengths: Tensor  # int32 [num_draws]; more than CAPACITY: there is none
    logits: Tensor  # [num_draws, CAPACITY]

    @classmethod
    def empty(cls, num_draws: int, num_chunks: int, logits: Tensor) -> Shortlists:
        """Memory for the kernels. logits: of the draws."""
        device = logits.device
        return cls(
            torch.empty((num_draws, num_chunks, NUM_LEVELS), dtype=torch.float32, device=device),
            torch.empty((num_draws, num_chunks), dtype=torch.int64, device=device),
            torch.empty(num_draws, dtype=torch.int32, device=device),
            torch.empty((num_draws, CAPACITY), dtype=logits.dtype, device=device),
        )


@triton.jit
def has_limits(temperature, top_k, top_p, vocab_size):
    """Whether top_k rules any token out, and whether top_p may."""
    return (
        (temperature > 0) & (top_k > 0) & (top_k < vocab_size),
        (temperature > 0) & (top_p < 1),
    )


@triton.jit
def _kept(scaled, inside, least):
    """Scaled logits, and -inf for tokens that min_p rules out."""
    return tl.where(inside & (scaled >= least), scaled, -float("inf"))


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
    row = tl.load(rows + draw, cache_modifier=".cg")
    temperature = tl.load(temperatures + draw, cache_modifier=".cg")
    least = tl.load(log_min_p + draw, cache_modifier=".cg")
    wait_previous(PDL)
    top_k, top_p = tl.load(top_ks + draw), tl.load(top_ps + draw)
    has_top_k, has_top_p = has_limits(temperature, top_k, top_p, vocab_size)
    if chunk == 0:
        tl.store(lengths + draw, 0)
    if has_top_k | has_top_p:
        inside = ids < vocab_size
        values = tl.load(logits + row * stride + ids, mask=inside, other=-float("inf"))
        peak = row_peak(peaks, draw, num_parts, PARTS)[0]
        scaled = _kept(scaled_logits(values, peak, temperature), inside, least)
        shares = shares_of(scaled)
        amount = tl.where(has_top_k, 1.0, shares)
        of_levels = amounts + place * _NUM_LEVELS
        for level in tl.static_range(_NUM_LEVELS - 1):
            reaches = scaled >= -_LEVEL * (level + 1)
            tl.store(of_levels + level, tl.sum(tl.where(reaches, amount, 0.0), 0))
        every = tl.where(scaled > -float("inf"), amount, 0.0)
        tl.store(of_levels + _NUM_LEVELS - 1, tl.sum(every, 0))
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
    row = tl.load(rows + draw, cache_modifier=".cg")
    temperature = tl.load(temperatures + draw, cache_modifier=".cg")
    least = tl.load(log_min_p + draw, cache_modifier=".cg")
    wait_previous(PDL)
    top_k, top_p = tl.load(top_ks + draw), tl.load(top_ps + draw)
    has_top_k, has_top_p = has_limits(temperature, top_k, top_p, vocab_size)
    if has_top_k | has_top_p:
        levels = tl.arange(0, _NUM_LEVELS)
        chunks = tl.arange(0, CHUNKS)
        places = (draw * num_chunks + chunks)[:, None] * _NUM_LEVELS + levels[None, :]
        there = (chunks < num_chunks)[:, None]
        amount = tl.sum(tl.load(amounts + places, mask=there, other=0.0), 0)
        # If top_k holds, top_p counts those alone that it lets pass.
        needed = tl.where(has_top_k, top_k.to(tl.float64), (top_p + _MARGIN) * tl.max(amount, 0))
        is_enough = (amount >= needed) | (levels == _NUM_LEVELS - 1)
        level = tl.min(tl.where(is_enough, levels, _NUM_LEVELS), 0)
        lowest = tl.where(level < _NUM_LEVELS - 1, (level + 1) * -_LEVEL, -3.0e38)
        # How many tokens reach the level: at most so many, if it is their weight that is known.
        most = tl.sum(tl.where(levels == level, amount, 0.0), 0)
        if not has_top_k:
            above = tl.sum(tl.where(levels == level - 1, amount, 0.0), 0)
            most = (most - above) / shares_of(lowest) + above / shares_of(level * -_LEVEL)
        is_long = (most > _CAPACITY) | (level == _NUM_LEVELS - 1)
        if is_long & (vocab_size > _CAPACITY):
            if chunk == 0:
                tl.store(lengths + draw, _CAPACITY + 1)
        else:
            inside = ids < vocab_size
            values = tl.load(logits + row * stride + ids, mask=inside, other=-float("inf"))
            peak = row_peak(peaks, draw, num_parts, PARTS)[0]
            scaled = _kept(scaled_logits(values, peak, temperature), inside, least)
            reaches = scaled >= lowest
            of_draw = lengths + draw + tl.zeros_like(ids)
            place = tl.atomic_add(of_draw, 1, mask=reaches, sem="relaxed")
            tl.store(likely + draw * _CAPACITY + place, values, mask=reaches & (place < _CAPACITY))
