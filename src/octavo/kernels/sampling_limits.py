"""The limits that top_k and top_p set, found without sorting.

Floats of one sign order like the integers with the same bits. So the k-th largest logit, and the
logit at which the most likely tokens reach top_p, are found by cutting the range of those integers
into four in every pass over the row: 8 passes for 16-bit logits, 16 for float32. Counts and sums of
weights are integers: the limits are exact, and tokens that tie at a limit stay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.pdl import allow_next, wait_previous
from octavo.kernels.sampling_weights import row_peak, scaled_logits, shares_of


@triton.jit
def ordered_key(values):
    """int32 that order as the values do."""
    if values.dtype.primitive_bitwidth == 32:
        bits = values.to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        bits = values.to(tl.int16, bitcast=True).to(tl.int32)
        return bits ^ ((bits >> 31) & 0x7FFF)


@triton.jit
def value_of_key(key, dtype: tl.constexpr):
    """The float of a key."""
    if dtype.primitive_bitwidth == 32:
        return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        return (key ^ ((key >> 31) & 0x7FFF)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _quarters(low, high):
    """Three places that cut (low, high) into four; int64, as a range of int32 has 2 ** 32 keys."""
    step = tl.maximum((high - low) // 4, 1)
    return low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)


@triton.jit
def _counts(start, vocab_size, a, b, c, BLOCK: tl.constexpr):
    """How many logits have a key of at least a, b and c."""
    ids = tl.arange(0, BLOCK)
    a, b, c = a.to(tl.int32), b.to(tl.int32), c.to(tl.int32)
    in_a = tl.zeros((BLOCK,), tl.int32)
    in_b = in_a
    in_c = in_a
    for first in tl.range(0, vocab_size, BLOCK, num_stages=3):
        inside = ids < vocab_size - first
        keys = ordered_key(tl.load(start + first + ids, mask=inside, other=-float("inf")))
        in_a += (inside & (keys >= a)).to(tl.int32)
        in_b += (inside & (keys >= b)).to(tl.int32)
        in_c += (inside & (keys >= c)).to(tl.int32)
    return tl.sum(in_a, 0), tl.sum(in_b, 0), tl.sum(in_c, 0)


@triton.jit
def _sums_above(start, vocab_size, peak, temperature, limit, a, b, c, BLOCK: tl.constexpr):
    """Sums of the weights of the tokens that pass `limit`, with keys above a, b and c."""
    ids = tl.arange(0, BLOCK)
    a, b, c = a.to(tl.int32), b.to(tl.int32), c.to(tl.int32)
    in_a = tl.zeros((BLOCK,), tl.int64)
    in_b = in_a
    in_c = in_a
    for first in tl.range(0, vocab_size, BLOCK, num_stages=3):
        inside = ids < vocab_size - first
        values = tl.load(start + first + ids, mask=inside, other=-float("inf"))
        keys = ordered_key(values)
        scaled = scaled_logits(values, peak, temperature)
        kept = inside & (scaled >= limit)
        weights = tl.where(kept, shares_of(scaled), 0.0).to(tl.int64)
        in_a += tl.where(keys > a, weights, 0)
        in_b += tl.where(keys > b, weights, 0)
        in_c += tl.where(keys > c, weights, 0)
    return tl.sum(in_a, 0), tl.sum(in_b, 0), tl.sum(in_c, 0)


@triton.jit(do_not_specialize=["num_chunks"])
def find_limits(
    logits,
    rows,
    temperatures,
    top_ks,
    top_ps,
    log_min_p,
    peaks,
    limits,
    stride,
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write what a kept token has at least: its scaled logit, and its share (sampling_weights.py).

    limits: float32 [num_draws, 2].
    """
    allow_next(PDL)
    draw = tl.program_id(0)
    wait_previous(PDL)
    dtype: tl.constexpr = logits.dtype.element_ty
    lowest: tl.constexpr = -(2 ** (dtype.primitive_bitwidth - 1))
    temperature = tl.load(temperatures + draw)
    top_k = tl.load(top_ks + draw)
    top_p = tl.load(top_ps + draw)
    start = logits + tl.load(rows + draw) * stride
    peak = row_peak(peaks, draw, num_chunks, CHUNKS)[0]
    limit = tl.load(log_min_p + draw)
    least_share = 0.0
    # The key of the largest logit: float32 holds it exactly.
    peak_key = ordered_key(peak.to(dtype)).to(tl.int64)
    if (temperature > 0) & (top_k > 0) & (top_k < vocab_size):
        low = tl.full((), lowest, tl.int64)
        high = peak_key + 1
        while high - low > 1:
            a, b, c = _quarters(low, high)
            count_a, count_b, count_c = _counts(start, vocab_size, a, b, c, BLOCK)
            next_low = tl.where(count_a >= top_k, a, low)
            next_low = tl.where(count_b >= top_k, b, next_low)
            next_low = tl.where(count_c >= top_k, c, next_low)
            next_high = tl.where(count_c < top_k, c, high)
            next_high = tl.where(count_b < top_k, b, next_high)
            high = tl.where(count_a < top_k, a, next_high)
            low = next_low
        kth = value_of_key(low.to(tl.int32), dtype)
        limit = tl.maximum(limit, scaled_logits(kth, peak, temperature))
    if (temperature > 0) & (top_p < 1):
        low = tl.full((), lowest, tl.int64)
        high = peak_key
        total = _sums_above(start, vocab_size, peak, temperature, limit, low, low, low, BLOCK)[0]
        wanted = top_p * total.to(tl.float64)
        while high - low > 1:
            a, b, c = _quarters(low, high)
            sum_a, sum_b, sum_c = _sums_above(
                start, vocab_size, peak, temperature, limit, a, b, c, BLOCK
            )
            next_low = tl.where(sum_a.to(tl.float64) >= wanted, a, low)
            next_low = tl.where(sum_b.to(tl.float64) >= wanted, b, next_low)
            next_low = tl.where(sum_c.to(tl.float64) >= wanted, c, next_low)
            next_high = tl.where(sum_c.to(tl.float64) < wanted, c, high)
            next_high = tl.where(sum_b.to(tl.float64) < wanted, b, next_high)
            high = tl.where(sum_a.to(tl.float64) < wanted, a, next_high)
            low = next_low
        last = value_of_key(high.to(tl.int32), dtype)
        least_share = shares_of(scaled_logits(last, peak, temperature))
    tl.store(limits + 2 * draw, limit)
    tl.store(limits + 2 * draw + 1, least_share)
