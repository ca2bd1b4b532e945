"""Rounds activations to FP8 for products of FP8 with FP8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.quantized import FLOAT8_MAX

_MAX = tl.constexpr(FLOAT8_MAX)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [num_tokens, size] -> e4m3 of the same shape, and float32 scales [num_tokens, 1].

    The largest value of each row becomes FLOAT8_MAX. A row with a value that is not finite becomes
    NaN.
    """
    num_tokens, size = x.shape
    rounded = torch.empty((num_tokens, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)
    block = power_of_2(size)
    _quantize_rows_kernel[(num_tokens,)](
        x,
        rounded,
        scales,
        x.stride(0),
        size,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **launch_options(x.device),
    )
    return rounded, scales


@triton.jit
def _quantize_rows_kernel(x, rounded, scales, stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    allow_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    wait_previous(PDL)
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    is_finite = tl.abs(values) < float("inf")  # not so for NaN
    values = tl.where(is_finite, values, 0.0)
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / _MAX
    values = values / scale
    scale = tl.where(tl.min(is_finite.to(tl.int32), 0) == 1, scale, float("nan"))
    tl.store(rounded + row * size + columns, values.to(rounded.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)
