"""The integer weights of tokens, which the sampler's kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.base import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)
_WEIGHT_SCALE = tl.constexpr(2.0**40)
_NEVER = tl.constexpr(-60.0)  # exp of it, scaled, rounds to 0


@triton.jit
def load_early(rows, temperatures, log_min_p, draw):
    """What a draw asks for and is complete before the wait (sampling.py): its row, its temperature,
    and the scaled logit of the least likely token that min_p lets pass."""
    return (
        tl.load(rows + draw, cache_modifier=".cg"),
        tl.load(temperatures + draw, cache_modifier=".cg"),
        tl.load(log_min_p + draw, cache_modifier=".cg"),
    )


@triton.jit
def row_peak(peaks, draw, num_parts, PARTS: tl.constexpr):
    """The largest logit of a draw's row and the lowest part that holds it."""
    parts = tl.arange(0, PARTS)
    places = peaks + draw * num_parts + parts
    values = tl.load(places, mask=parts < num_parts, other=-float("inf"))
    return tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def scaled_logits(values, peak, temperature):
    """(logit - largest) * (1 / temperature): at most 0."""
    return (values.to(tl.float32) - peak) * tl.div_rn(1.0, temperature)


@triton.jit
def shares_of(scaled):
    """exp(scaled) * 2 ** WEIGHT_BITS, float32; a token's weight is this, rounded down."""
    return tl.exp2(tl.maximum(scaled, _NEVER) * _LOG2_E) * _WEIGHT_SCALE


@triton.jit
def weights_of(values, draw, peak, temperature, least, limits, LIMITED: tl.constexpr):
    """int64 weights of some logits of a draw; 0 for -inf, and for what its limits leave out.

    least: scaled logit of a token that min_p lets pass."""
    scaled = scaled_logits(values, peak, temperature)
    if LIMITED:
        least = tl.maximum(least, tl.load(limits + 2 * draw))
    shares = shares_of(tl.where(scaled >= least, scaled, _NEVER))
    if LIMITED:
        shares = tl.where(shares >= tl.load(limits + 2 * draw + 1), shares, 0.0)
    return shares.to(tl.int64)
