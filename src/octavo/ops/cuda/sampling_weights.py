"""The integer weights of tokens, which the sampler's kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

_WEIGHT_SCALE = tl.constexpr(2.0**40)
_NEVER = tl.constexpr(-60.0)  # exp of it, scaled, rounds to 0


@triton.jit
def row_peak(peaks, draw, num_chunks, CHUNKS: tl.constexpr):
    """The largest logit of a draw's row and the lowest chunk that holds it."""
    chunks = tl.arange(0, CHUNKS)
    places = peaks + draw * num_chunks + chunks
    values = tl.load(places, mask=chunks < num_chunks, other=-float("inf"))
    return tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def scaled_logits(values, peak, temperature):
    """(logit - largest) / temperature: at most 0."""
    return tl.div_rn(values.to(tl.float32) - peak, temperature)


@triton.jit
def shares_of(scaled):
    """exp(scaled) * 2 ** WEIGHT_BITS, float32; a token's weight is this, rounded down."""
    return tl.exp(tl.maximum(scaled, _NEVER)) * _WEIGHT_SCALE


@triton.jit
def weights_of(values, inside, draw, peak, temperature, log_min_p, limits, LIMITED: tl.constexpr):
    """int64 weights of some logits of a draw; 0 for what its limits leave out."""
    scaled = scaled_logits(values, peak, temperature)
    kept = inside & (scaled >= tl.load(log_min_p + draw))
    shares = shares_of(scaled)
    if LIMITED:
        kept &= scaled >= tl.load(limits + 2 * draw)
        kept &= shares >= tl.load(limits + 2 * draw + 1)
    return tl.where(kept, shares, 0.0).to(tl.int64)
