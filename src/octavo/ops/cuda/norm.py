"""RMS norm and layer norm of rows, with the addition to the residual stream that comes before.

One program per row, one pass over memory; computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.communicator import Reduction
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.tile_sizes import power_of_2

MAX_SIZE = 16384  # elements per row, which one program holds in registers
MANY_ROWS = 640  # five per SM: fewer warps each fill it


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight over the last dimension.

    Args:
        x: floating [num_rows, (heads,) size], the last dimension dense. With `residual` it may also
            be [num_splits, num_rows, size], dense: partial sums that are added up (linear.py).
        weight: [size].
        residual: [num_rows, size]. x is added to it in place, and the sum is normed.

    Returns:
        Dense, without the dimension of splits, of the residual's dtype, or of x's.
    """
    return _norm(x, weight, None, eps, residual, is_rms=True)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
) -> Tensor:
    """(x - mean) / std * weight + bias over the last dimension; otherwise as `rms_norm`."""
    return _norm(x, weight, bias, eps, residual, is_rms=False)


def reduce_add_rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, reduction: Reduction
) -> tuple[Tensor, Tensor]:
    """Add up x over the ranks and add it to the residual in place; norm the sum.

    Args:
        x: this rank's partial sum, as `rms_norm` takes it.
        residual: the same on all ranks; None: there is nothing to add to.

    Returns:
        The norm and the sum, both [num_rows, size], the same bits on all ranks.
    """
    parts, residual = _gather(x, residual, reduction)
    return rms_norm(parts, weight, eps, residual), residual


def reduce_add_layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    reduction: Reduction,
) -> tuple[Tensor, Tensor]:
    """The same with a layer norm."""
    parts, residual = _gather(x, residual, reduction)
    return layer_norm(parts, weight, bias, eps, residual), residual


def _gather(x: Tensor, residual: Tensor | None, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """The ranks' partial sums, which the norm's kernel adds up as it does those of splits, and
    what to add them to."""
    if residual is None:
        residual = torch.zeros_like(x)
    if x.dim() == 3:
        x = x.sum(0)
    return reduction.communicator.all_gather(x.to(residual.dtype)), residual


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    is_rms: bool,
) -> Tensor:
    size = x.shape[-1]
    assert size <= MAX_SIZE, f"rows of {size} are longer than {MAX_SIZE}"
    num_splits, heads = 1, 1
    if residual is not None:
        assert residual.is_contiguous()
        num_splits = x.shape[0] if x.dim() == 3 else 1
        out = torch.empty_like(residual)
    else:
        heads = x.shape[1] if x.dim() == 3 else 1
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = out.numel() // size
    if num_rows == 0:
        return out
    block = power_of_2(size)
    _norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        bias,
        out,
        x.stride(0) if num_splits > 1 else 0,
        x.stride(-2) if residual is not None or x.dim() == 2 else x.stride(0),
        x.stride(1) if heads > 1 else 0,
        heads,
        size,
        eps,
        BLOCK=block,
        IS_RMS=is_rms,
        ADDS=residual is not None,
        SPLITS=num_splits,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        num_warps=_num_warps(block, num_rows, num_splits),
        **launch_options(x.device),
    )
    return out


def _num_warps(block: int, num_rows: int, num_splits: int) -> int:
    """More warps for partial sums, fewer where there are many rows.

    Microseconds on one H200 with half as many warps, as many, and twice as many as rows without
    partial sums take: 128 x 5,120 2.95, 2.44, 2.91, in three splits 3.72, 3.97, 3.03; 256 x 4,096
    in two 3.68, 3.21, 2.48; 64 x 1,024 in four 1.41, 1.30, 1.10; 1,940 x 5,120 22.3, 25.2, 28.9.
    """
    few = min(16, max(1, block // 256))
    if num_splits > 1:
        return 2 * few
    return max(1, few // 2) if num_rows > MANY_ROWS else few


@triton.jit(do_not_specialize=["heads", "split_stride"])
def _norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    split_stride,
    row_stride,
    head_stride,
    heads,
    size,
    eps,
    BLOCK: tl.constexpr,
    IS_RMS: tl.constexpr,
    ADDS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    if HAS_WEIGHT:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    wait_previous(PDL)
    start = x + (row // heads) * row_stride + (row % heads) * head_stride
    values = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        more = tl.load(start + split * split_stride + columns, mask=inside, other=0.0)
        values += more.to(tl.float32)
    if ADDS:
        # The sum is rounded before it is normalised: later layers see the same numbers.
        places = residual + row * size + columns
        values += tl.load(places, mask=inside, other=0.0).to(tl.float32)
        total = values.to(residual.dtype.element_ty)
        tl.store(places, total, mask=inside)
        values = total.to(tl.float32)
    if not IS_RMS:
        mean = tl.sum(values, 0) / size
        values = tl.where(inside, values - mean, 0.0)
    values *= tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    if HAS_WEIGHT:
        values *= scale
    if HAS_BIAS:
        values += shift
    tl.store(out + row * size + columns, values.to(out.dtype.element_ty), mask=inside)
