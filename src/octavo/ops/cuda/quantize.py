"""Rounds activations to FP8, or makes two such numbers of each, for products of FP8 with FP8, where
no kernel before has done so."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.quantized import FLOAT8_MAX, ROUNDED_GROUP, RoundedInputs, Rounding

TOKENS = 128  # of the largest tiles of products with groups
_AT_ONCE = 8  # groups of a program
_MAX = tl.constexpr(FLOAT8_MAX)


def empty_inputs(
    num_tokens: int, size: int, rounding: Rounding, device: torch.device
) -> RoundedInputs:
    """What a kernel writes. Of groups there are scales for whole tiles of TOKENS, so that the
    kernels that follow may read them."""
    values = torch.empty((num_tokens, size), dtype=torch.float8_e4m3fn, device=device)
    if rounding is Rounding.IN_TWO:
        values = values.new_empty((num_tokens, 2, size))
    shape = num_tokens, 1
    if rounding is Rounding.GROUPS:
        shape = triton.cdiv(size, ROUNDED_GROUP), triton.cdiv(num_tokens, TOKENS) * TOKENS
    return RoundedInputs(values, torch.empty(shape, dtype=torch.float32, device=device))


def round_inputs(x: Tensor, rounding: Rounding) -> RoundedInputs:
    """See ops/quantized.py; rows of x [num_tokens, size] may be strided."""
    num_tokens, size = x.shape
    values, scales = rounded = empty_inputs(num_tokens, size, rounding, x.device)
    if rounding is Rounding.GROUPS:
        num_groups = len(scales)
        _round_groups_kernel[(num_tokens, triton.cdiv(num_groups, _AT_ONCE))](
            x,
            values,
            scales,
            x.stride(0),
            size,
            num_groups,
            scales.stride(0),
            GROUP=ROUNDED_GROUP,
            GROUPS=_AT_ONCE,
            num_warps=4,
            **launch_options(x.device),
        )
    else:
        block = power_of_2(size)
        _round_tokens_kernel[(num_tokens,)](
            x,
            values,
            scales,
            x.stride(0),
            size,
            BLOCK=block,
            IN_TWO=rounding is Rounding.IN_TWO,
            num_warps=max(1, min(16, block // 512)),
            **launch_options(x.device),
        )
    return rounded


@triton.jit
def _sizes(values):
    """Infinity of NaN, too."""
    sizes = tl.abs(values)
    return tl.where(sizes < float("inf"), sizes, float("inf"))


@triton.jit
def to_float8(values, axis: tl.constexpr):
    """float32 values -> what e4m3 is to hold, and its scales along `axis`, which stays."""
    top = tl.max(_sizes(values), axis, keep_dims=True)
    scale = tl.where(top < float("inf"), tl.maximum(top, 1e-12) / _MAX, float("nan"))
    return values / scale, scale


@triton.jit
def store_in_two(values, rounded, scales, row, size, columns, inside):
    """A token's float32 inputs as two numbers each, and their scale: `scales_of_two` and `in_two`
    of two_float8.py, in Triton."""
    top = tl.maximum(tl.max(_sizes(values), 0, keep_dims=True), 1e-30)
    exponent = top.to(tl.int32, bitcast=True) >> 23
    factor = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    scaled = values * tl.where(exponent < 255, factor, float("nan"))
    bits = scaled.to(tl.int32, bitcast=True)
    high = ((bits + 0x80000) & -0x100000).to(tl.float32, bitcast=True)
    places = rounded + row * 2 * size + columns
    tl.store(places, high.to(rounded.dtype.element_ty), mask=inside)
    tl.store(places + size, (scaled - high).to(rounded.dtype.element_ty), mask=inside)
    scale = tl.where(exponent < 255, scale, float("nan"))
    tl.store(scales + row + tl.arange(0, 1), scale)


@triton.jit(do_not_specialize=["scale_stride"])
def _round_groups_kernel(
    x,
    rounded,
    scales,
    stride,
    size,
    num_groups,
    scale_stride,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < size
    wait_previous(PDL)
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0)
    values, scale = to_float8(values.to(tl.float32), 1)
    places = rounded + row * size + columns
    tl.store(places, values.to(rounded.dtype.element_ty), mask=inside)
    targets = scales + groups[:, None].to(tl.int64) * scale_stride + row
    tl.store(targets, scale, mask=(groups < num_groups)[:, None])


@triton.jit
def _round_tokens_kernel(
    x,
    rounded,
    scales,
    stride,
    size,
    BLOCK: tl.constexpr,
    IN_TWO: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    wait_previous(PDL)
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if IN_TWO:
        store_in_two(values, rounded, scales, row, size, columns, inside)
    else:
        values, scale = to_float8(values, 0)
        tl.store(rounded + row * size + columns, values.to(rounded.dtype.element_ty), mask=inside)
        tl.store(scales + row + tl.arange(0, 1), scale)
