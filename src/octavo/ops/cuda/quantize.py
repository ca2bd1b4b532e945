"""Rounds activations to FP8, or makes two numbers of 8 bits of each, for products with FP8 or with
packed integers, where no kernel before has done so."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.quantized import (
    FLOAT8_MAX,
    LARGEST_INTEGER,
    LATTER,
    RoundedInputs,
    Rounding,
)

TOKENS = 128  # of the largest tiles of products with groups
# Inputs of a program, where they have groups.
_BLOCKS = {
    Rounding.GROUPS: 1024,
    Rounding.IN_TWO: 512,
    Rounding.INTEGERS: 512,
    Rounding.SPANS: 512,
}
_MAX = tl.constexpr(FLOAT8_MAX)
_IN_TWO = tl.constexpr(int(Rounding.IN_TWO))
_INTEGERS = tl.constexpr(int(Rounding.INTEGERS))
_TOKENS_IN_TWO = tl.constexpr(int(Rounding.TOKENS_IN_TWO))
_LATTER = tl.constexpr(LATTER)
_LARGEST = tl.constexpr(LARGEST_INTEGER)
SMALLEST_SIZE = tl.constexpr(0x0DA24260)  # the bits of 1e-30: groups of zeros have a scale, too
# The lowest bits of a sum with 1.5 * 2^23 are a rounded integer. With 128 more, its second octet is
# `high`, and its first one `low` + 128.
ROUNDER = tl.constexpr(1.5 * 2**23 + 128)


def empty_inputs(
    num_tokens: int, size: int, rounding: Rounding, device: torch.device, group: int | None = None
) -> RoundedInputs:
    """What a kernel writes. Of groups there are scales for whole tiles of TOKENS, so that the
    kernels that follow may read them.

    group: if another one than the rounding's, see RoundedInputs.
    """
    group = rounding.group if group is None else group
    dtype = torch.int8 if rounding is Rounding.INTEGERS else torch.float8_e4m3fn
    values = torch.empty((num_tokens, size), dtype=dtype, device=device)
    if rounding in (Rounding.IN_TWO, Rounding.INTEGERS, Rounding.TOKENS_IN_TWO):
        values = values.new_empty((num_tokens, 2, size))
    shape: tuple[int, ...] = num_tokens, 1
    if group:
        shape = triton.cdiv(size, group), triton.cdiv(num_tokens, TOKENS) * TOKENS
    if rounding is Rounding.INTEGERS:
        shape = shape[0], 2, shape[1]
    scales = torch.empty(shape, dtype=torch.float32, device=device)
    return RoundedInputs(values, scales, group)


def round_inputs(x: Tensor, rounding: Rounding) -> RoundedInputs:
    """See ops/quantized.py; rows of x [num_tokens, size] may be strided."""
    num_tokens, size = x.shape
    values, scales, _ = rounded = empty_inputs(num_tokens, size, rounding, x.device)
    block = _BLOCKS.get(rounding) or power_of_2(size)
    _round_kernel[(num_tokens, triton.cdiv(size, block))](
        x,
        values,
        scales,
        x.stride(0),
        size,
        scales.stride(0),
        BLOCK=block,
        GROUP=rounding.group or block,
        ROUNDING=int(rounding),
        num_warps=max(1, min(16, block // 256 if rounding.group else block // 512)),
        **launch_options(x.device),
    )
    return rounded


@triton.jit
def _sizes(values):
    """Infinity of NaN, too."""
    sizes = tl.abs(values)
    return tl.where(sizes < float("inf"), sizes, float("inf"))


@triton.jit
def store_rounded(
    values,
    rounded,
    scales,
    scale_stride,
    row,
    start,
    end,
    size,
    GROUP: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """Store a token's float32 inputs from `start` on, of those before `end`, as one or two numbers
    each, and the scale of each GROUP of them.

    start, end: multiples of GROUP, or the first and the last place of all.
    size: inputs of the token.
    """
    BLOCK: tl.constexpr = values.shape[0]
    KIND: tl.constexpr = _IN_TWO if ROUNDING == _TOKENS_IN_TWO else ROUNDING
    if GROUP < BLOCK or ROUNDING == _INTEGERS:
        values = tl.reshape(values, [BLOCK // GROUP, GROUP])
        group = start // GROUP + tl.arange(0, BLOCK // GROUP)[:, None]
        places = group * GROUP + tl.arange(0, GROUP)[None, :]
        top = tl.max(_sizes(values), 1, keep_dims=True)
    else:
        group = start // GROUP + tl.arange(0, 1)
        places = start + tl.arange(0, BLOCK)
        top = tl.max(_sizes(values), 0, keep_dims=True)
    inside = places < end
    targets = scales + group.to(tl.int64) * scale_stride + row
    is_group = group * GROUP < end
    if ROUNDING == _INTEGERS:
        scale, total = _store_integers(values, rounded + row * 2 * size, start, end, size)
        tl.store(targets + scale_stride // 2, total, mask=is_group)
    elif KIND == _IN_TWO:
        both = rounded + row * 2 * size + places
        scale = _store_in_two(values, top, both, size, inside, ROUNDING)
    else:
        scale = tl.where(top < float("inf"), tl.maximum(top, 1e-12) / _MAX, float("nan"))
        values = (values / scale).to(rounded.dtype.element_ty)
        tl.store(rounded + row * size + places, values, mask=inside)
    tl.store(targets, scale, mask=is_group)


@triton.jit
def _words_of(octets):
    """Pack the lowest octets of int32 [groups, 128], four to a word: [groups, 2, 8, 2], by the bits
    of an input's place: the highest one, the three above the lowest two, and the second lowest.

    Words of 4 bits are unpacked by octets (pack_integers, linear_hopper_packed.py): the four in one
    register are the same place of two planes, and the next place of both. They are added up here,
    because what Triton 3.6 makes of 8 bits that are permuted is wrong.
    """
    GROUPS: tl.constexpr = octets.shape[0]
    bits = tl.reshape(octets & 0xFF, [GROUPS, 2, 2, 8, 2, 2])
    first = tl.arange(0, 2)[None, None, :, None, None, None]
    last = tl.arange(0, 2)[None, None, None, None, None, :]
    return tl.sum(tl.sum(bits << (8 * first + 16 * last), 5), 2)


@triton.jit
def _store_integers(values, rounded, start, end, size):
    """Store both integers of each value [groups, 128], `size` places apart; returns scales, and
    sums of the values that the integers stand for, [groups, 1].

    rounded: where those of the token begin.
    start, end: the places of the first value, and behind the last one.
    """
    GROUPS: tl.constexpr = values.shape[0]
    sizes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # in the order of numbers, NaN above all
    largest = tl.max(sizes, 1, keep_dims=True)
    largest = tl.maximum(largest, SMALLEST_SIZE).to(tl.float32, bitcast=True)
    sums = values * (_LARGEST / largest) + ROUNDER
    bits = sums.to(tl.int32, bitcast=True)
    group = start // 128 + tl.arange(0, GROUPS)[:, None, None, None]
    word = (
        8 * tl.arange(0, 2)[None, :, None, None]
        + tl.arange(0, 8)[None, None, :, None]
        + 16 * tl.arange(0, 2)[None, None, None, :]
    )
    words = rounded.to(tl.pointer_type(tl.int32), bitcast=True) + group * 32 + word
    inside = group * 128 < end
    tl.store(words, _words_of(bits >> 8), mask=inside)
    tl.store(words + size // 4, _words_of(bits ^ 0x80), mask=inside)
    scale = largest / _LARGEST
    return scale, tl.sum(sums - ROUNDER, 1, keep_dims=True) * scale


@triton.jit
def _store_in_two(values, top, places, size, inside, ROUNDING: tl.constexpr):
    """Store the two numbers of each value, `size` places apart; returns scales. They are
    `scales_of_two` and `in_two` of two_float8.py, in Triton; or, with TOKENS_IN_TWO, `split_in_two`
    of expert_tables.py."""
    exponent = tl.maximum(top, 1e-30).to(tl.int32, bitcast=True) >> 23
    factor = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    scaled = values * tl.where(exponent < 255, factor, float("nan"))
    bits = scaled.to(tl.int32, bitcast=True)
    if ROUNDING == _TOKENS_IN_TWO:
        # 1.5 * 2^(e + 20) of a number with the exponent e, or of the least normal one, 2^-6.
        large = tl.maximum(bits & 0x7F800000, 0x3C800000) + 0x0A400000
        large = large.to(tl.float32, bitcast=True)
        high = (scaled + large) - large
        low = (scaled - high) * _LATTER
    else:
        high = ((bits + 0x80000) & -0x100000).to(tl.float32, bitcast=True)
        low = scaled - high
    tl.store(places, high.to(places.dtype.element_ty), mask=inside)
    tl.store(places + size, low.to(places.dtype.element_ty), mask=inside)
    return tl.where(exponent < 255, scale, float("nan"))


@triton.jit
def store_group_in_two(
    x,
    rounded,
    scales,
    stride,
    size,
    scale_stride,
    tokens,
    is_token,
    group,
    GROUP: tl.constexpr,
):
    """Store some tokens' inputs of one group as two e4m3 numbers each, and their scales."""
    columns = group * GROUP + tl.arange(0, GROUP)
    inside = is_token[:, None] & (columns < size)[None, :]
    rows = tokens.to(tl.int64)[:, None]
    values = tl.load(x + rows * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    top = tl.max(_sizes(values), 1, keep_dims=True)
    places = rounded + rows * 2 * size + columns[None, :]
    scale = _store_in_two(values, top, places, size, inside, _IN_TWO)
    tl.store(scales + group * scale_stride + rows, scale, mask=is_token[:, None])


@triton.jit(do_not_specialize=["scale_stride"])
def _round_kernel(
    x,
    rounded,
    scales,
    stride,
    size,
    scale_stride,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ROUNDING: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    wait_previous(PDL)
    values = tl.load(x + row * stride + columns, mask=columns < size, other=0.0).to(tl.float32)
    store_rounded(values, rounded, scales, scale_stride, row, start, size, size, GROUP, ROUNDING)
