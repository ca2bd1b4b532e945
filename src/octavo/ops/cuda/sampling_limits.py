"""The limits that top_k and top_p set, found without sorting rows.

Floats of one sign order like the integers with the same bits. So the k-th largest logit, and the
logit at which the most likely tokens reach top_p, are found by cutting the range of those integers
into four in every pass over the row: 8 passes for 16-bit logits, 16 for float32. Counts and sums of
weights are integers: the limits are exact, and tokens that tie at a limit stay. For top_p a search
with float32 sums comes first, and exact sums only confirm where it has led.

The shortlists of most draws hold so few logits that these are sorted after all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.base import LOG2_E
from octavo.ops.cuda.pdl import allow_next, wait_previous
from octavo.ops.cuda.sampling_shortlist import CAPACITY, load_limits
from octavo.ops.cuda.sampling_weights import row_peak, scaled_logits, shares_of

SORTED = 512  # logits of a shortlist that are sorted; of more, the limits are searched

_CAPACITY = tl.constexpr(CAPACITY)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def ordered_key(values):
    """int32 keys in the same order as the values."""
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
def _lowest_key(dtype: tl.constexpr):
    """The key of -inf, int64; below it are NaNs, which compare with nothing."""
    return ordered_key(tl.full((), -float("inf"), tl.float32).to(dtype)).to(tl.int64)


@triton.jit
def _quarters(low, high):
    """Three places that cut (low, high) into four; int64, as a range of int32 has 2 ** 32 keys."""
    step = tl.maximum((high - low) // 4, 1)
    return low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)


@triton.jit
def _values_of_keys(a, b, c, dtype: tl.constexpr):
    return (
        value_of_key(a.to(tl.int32), dtype),
        value_of_key(b.to(tl.int32), dtype),
        value_of_key(c.to(tl.int32), dtype),
    )


@triton.jit
def _counts(start, vocab_size, a, b, c, BLOCK: tl.constexpr):
    """How many logits have keys of at least a, b and c."""
    a, b, c = _values_of_keys(a, b, c, start.dtype.element_ty)
    ids = tl.arange(0, BLOCK)
    in_a = tl.zeros((BLOCK,), tl.int32)
    in_b = in_a
    in_c = in_a
    for first in tl.range(0, vocab_size, BLOCK, num_stages=3):
        inside = ids < vocab_size - first
        values = tl.load(start + first + ids, mask=inside, other=-float("inf")).to(tl.float32)
        in_a += (inside & (values >= a)).to(tl.int32)
        in_b += (inside & (values >= b)).to(tl.int32)
        in_c += (inside & (values >= c)).to(tl.int32)
    return tl.sum(in_a, 0), tl.sum(in_b, 0), tl.sum(in_c, 0)


@triton.jit
def _rough_sums(start, vocab_size, peak, temperature, least, a, b, c, BLOCK: tl.constexpr):
    """`_exact_sums` / 2 ** WEIGHT_BITS, approximately: in float32, and several times as fast."""
    a, b, c = _values_of_keys(a, b, c, start.dtype.element_ty)
    scale = _LOG2_E / temperature  # for powers of 2
    ids = tl.arange(0, BLOCK)
    in_a = tl.zeros((BLOCK,), tl.float32)
    in_b = in_a
    in_c = in_a
    for first in tl.range(0, vocab_size, BLOCK, num_stages=3):
        inside = ids < vocab_size - first
        values = tl.load(start + first + ids, mask=inside, other=-float("inf")).to(tl.float32)
        shares = tl.where(values >= least, tl.exp2((values - peak) * scale), 0.0)
        in_a += tl.where(values > a, shares, 0.0)
        in_b += tl.where(values > b, shares, 0.0)
        in_c += tl.where(values > c, shares, 0.0)
    return tl.sum(in_a, 0), tl.sum(in_b, 0), tl.sum(in_c, 0)


@triton.jit
def _exact_sums(start, vocab_size, peak, temperature, limit, a, b, c, BLOCK: tl.constexpr):
    """Sums of the weights of the tokens that pass `limit`, of those with keys above a, b and c."""
    a, b, c = _values_of_keys(a, b, c, start.dtype.element_ty)
    ids = tl.arange(0, BLOCK)
    in_a = tl.zeros((BLOCK,), tl.int64)
    in_b = in_a
    in_c = in_a
    for first in tl.range(0, vocab_size, BLOCK, num_stages=3):
        inside = ids < vocab_size - first
        values = tl.load(start + first + ids, mask=inside, other=-float("inf")).to(tl.float32)
        scaled = scaled_logits(values, peak, temperature)
        kept = inside & (scaled >= limit)
        weights = tl.where(kept, shares_of(scaled), 0.0).to(tl.int64)
        in_a += tl.where(values > a, weights, 0)
        in_b += tl.where(values > b, weights, 0)
        in_c += tl.where(values > c, weights, 0)
    return tl.sum(in_a, 0), tl.sum(in_b, 0), tl.sum(in_c, 0)


@triton.jit
def _narrow(low, high, a, b, c, is_low_a, is_low_b, is_low_c):
    """The quarter between the last place that is low and the first that is not."""
    next_low = tl.where(is_low_a, a, low)
    next_low = tl.where(is_low_b, b, next_low)
    next_low = tl.where(is_low_c, c, next_low)
    next_high = tl.where(is_low_c, high, c)
    next_high = tl.where(is_low_b, next_high, b)
    next_high = tl.where(is_low_a, next_high, a)
    return next_low, next_high


@triton.jit
def _kth_largest(start, vocab_size, peak_key, top_k, BLOCK: tl.constexpr):
    """The k-th largest logit, float32."""
    dtype: tl.constexpr = start.dtype.element_ty
    low = _lowest_key(dtype)
    high = peak_key + 1
    while high - low > 1:
        a, b, c = _quarters(low, high)
        count_a, count_b, count_c = _counts(start, vocab_size, a, b, c, BLOCK)
        low, high = _narrow(
            low, high, a, b, c, count_a >= top_k, count_b >= top_k, count_c >= top_k
        )
    return value_of_key(low.to(tl.int32), dtype)


@triton.jit
def _last_of_top_p(
    start, vocab_size, peak, peak_key, temperature, limit, top_p, total, BLOCK: tl.constexpr
):
    """The smallest logit whose more likely tokens, of those that pass `limit`, are below top_p.

    total: what all that pass `limit` weigh."""
    dtype: tl.constexpr = start.dtype.element_ty
    exact_block: tl.constexpr = BLOCK // 4
    lowest = _lowest_key(dtype)
    wanted = top_p * total.to(tl.float64)
    rough = (wanted * 2.0**-40).to(tl.float32)
    least = peak + limit * temperature
    low = lowest
    high = peak_key
    while high - low > 1:
        a, b, c = _quarters(low, high)
        sum_a, sum_b, sum_c = _rough_sums(
            start, vocab_size, peak, temperature, least, a, b, c, BLOCK
        )
        low, high = _narrow(low, high, a, b, c, sum_a >= rough, sum_b >= rough, sum_c >= rough)
    # Almost always right already; if not, the search begins again with exact sums.
    a = tl.maximum(high - 1, lowest)
    b = high
    c = tl.minimum(high + 1, peak_key)
    low = lowest
    high = peak_key
    while high - low > 1:
        sum_a, sum_b, sum_c = _exact_sums(
            start, vocab_size, peak, temperature, limit, a, b, c, exact_block
        )
        low, high = _narrow(
            low,
            high,
            a,
            b,
            c,
            sum_a.to(tl.float64) >= wanted,
            sum_b.to(tl.float64) >= wanted,
            sum_c.to(tl.float64) >= wanted,
        )
        a, b, c = _quarters(low, high)
    return value_of_key(high.to(tl.int32), dtype)


@triton.jit
def _exact_total(totals, draw, num_chunks, CHUNKS: tl.constexpr):
    """What all tokens of a draw weigh."""
    chunks = tl.arange(0, CHUNKS)
    places = totals + draw * num_chunks + chunks
    return tl.sum(tl.load(places, mask=chunks < num_chunks, other=0), 0)


@triton.jit
def _sorted_limits(
    start,
    length,
    peak,
    temperature,
    limit,
    top_k,
    top_p,
    has_top_k,
    has_top_p,
    every,
    SORTED: tl.constexpr,
):
    """What `find_limits` writes, by at most SORTED logits, which are all that matter.

    limit: the least scaled logit because of min_p. every: what all tokens weigh."""
    places = tl.arange(0, SORTED)
    inside = places < length
    values = tl.load(start + places, mask=inside, other=-float("inf")).to(tl.float32)
    values = tl.sort(values, descending=True)
    if has_top_k:  # if fewer pass min_p, nothing else is ruled out
        kth = tl.max(tl.where(places == top_k - 1, values, -float("inf")), 0)
        limit = tl.maximum(limit, scaled_logits(kth, peak, temperature))
    least_share = 0.0
    if has_top_p:
        scaled = scaled_logits(values, peak, temperature)
        weights = tl.where(inside & (scaled >= limit), shares_of(scaled), 0.0).to(tl.int64)
        ends = tl.cumsum(weights, 0)
        total = tl.where(has_top_k, tl.sum(weights, 0), every)
        # Of equal logits, the first one has the sum of all that are larger.
        is_before = (ends - weights).to(tl.float64) < top_p * total.to(tl.float64)
        last = tl.min(tl.where(inside & is_before, values, float("inf")), 0)
        least_share = shares_of(scaled_logits(last, peak, temperature))
    return limit, least_share


@triton.jit(do_not_specialize=["num_chunks", "num_parts"])
def find_limits(
    logits,
    rows,
    temperatures,
    top_ks,
    top_ps,
    log_min_p,
    peaks,
    limits,
    totals,
    lengths,
    likely,
    stride,
    vocab_size,
    num_chunks,
    num_parts,
    SHORT: tl.constexpr,
    SORTED: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the least scaled logit and the least share (sampling_weights.py) of tokens to keep.

    limits: float32 [num_draws, 2]. totals, lengths, likely: of Shortlists.
    SHORT: of draws that have a shortlist, which is read in place of the row; otherwise of others.
    """
    allow_next(PDL)
    draw = tl.program_id(0)
    wait_previous(PDL)
    temperature = tl.load(temperatures + draw)
    top_k, top_p, has_top_k, has_top_p = load_limits(temperature, top_ks, top_ps, draw, vocab_size)
    has_any = has_top_k | has_top_p
    length = tl.load(lengths + draw)
    if (has_any & (length <= _CAPACITY)) == SHORT:
        limit = tl.load(log_min_p + draw)
        least_share = 0.0
        if has_any:
            if SHORT:
                start = likely + draw * _CAPACITY
                size = length
            else:
                start = logits + tl.load(rows + draw) * stride
                size = vocab_size
            peak = row_peak(peaks, draw, num_parts, PARTS)[0]
            every = tl.full((), 0, tl.int64)
            if has_top_p & (has_top_k == 0):
                every = _exact_total(totals, draw, num_chunks, CHUNKS)
            if SHORT & (size <= SORTED):
                limit, least_share = _sorted_limits(
                    start,
                    size,
                    peak,
                    temperature,
                    limit,
                    top_k,
                    top_p,
                    has_top_k,
                    has_top_p,
                    every,
                    SORTED,
                )
            else:
                # The key of the largest logit: float32 holds it exactly.
                peak_key = ordered_key(peak.to(logits.dtype.element_ty)).to(tl.int64)
                if has_top_k:
                    kth = _kth_largest(start, size, peak_key, top_k, BLOCK)
                    limit = tl.maximum(limit, scaled_logits(kth, peak, temperature))
                if has_top_p:
                    if has_top_k:
                        lowest = _lowest_key(start.dtype.element_ty)
                        every = _exact_sums(
                            start, size, peak, temperature, limit, lowest, lowest, lowest,
                            BLOCK // 4,
                        )[0]  # fmt: skip
                    last = _last_of_top_p(
                        start, size, peak, peak_key, temperature, limit, top_p, every, BLOCK
                    )
                    least_share = shares_of(scaled_logits(last, peak, temperature))
        tl.store(limits + 2 * draw, limit)
        tl.store(limits + 2 * draw + 1, least_share)
