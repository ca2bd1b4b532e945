"""RMS norm and layer norm of rows, with the addition to the residual stream that comes before.

One program per row, one pass over memory; computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.communicator import Reduction
from octavo.ops.cuda.all_reduce import (
    Exchange,
    complete_row,
    exchange_for,
    is_owner,
    send_complete_row,
    sum_of_own_row,
    sum_over_ranks,
)
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.quantize import empty_inputs, store_rounded
from octavo.ops.cuda.tile_sizes import power_of_2, registers_for
from octavo.ops.norm import MAX_TWINS, Affine, reduced
from octavo.ops.quantized import Rounding

MAX_SIZE = 32768  # elements per row; one program holds up to half of that in registers alone
MANY_ROWS = 640  # five per SM: fewer warps each fill it
FEW_ROWS = 16  # whose loads the next kernel would delay
MANY_SPLITS = 8


def norm(
    x: Tensor,
    affine: Affine | None,
    eps: float,
    residual: Tensor | None,
    is_rms: bool,
    *,
    second: Tensor | None = None,
    branch: Affine | None = None,
    branches: tuple[Affine, Affine] | None = None,
    factor: float = 1.0,
    twins: Sequence[Affine] = (),
    reduction: Reduction | None = None,
    rounding: Rounding = Rounding.NONE,
) -> list[Tensor]:
    """See ops/norm.py. With a residual, x may also be [num_splits, num_rows, size], dense: partial
    sums that are added up (linear.py). `second` has the same forms as x, and is dense."""
    exchange = None
    if reduction is not None:
        assert residual is not None
        if branches is not None:  # an exchange is of one row
            assert second is not None
            x, second = (_complete(each).to(residual.dtype) for each in (x, second))
            x, second = reduced(x, second, True, reduction)
        else:
            exchange = exchange_for(reduction, len(residual))
            if exchange is None:
                total = _complete(x) if second is None else _complete(x) + _complete(second)
                x, second = reduction.communicator.all_gather(total.to(residual.dtype)), None
    form = _Form(branch, branches, factor, twins)
    return _launch(x, affine, eps, residual, is_rms, second, form, exchange, rounding)


class _Form(NamedTuple):
    """See ops/norm.py."""

    branch: Affine | None
    branches: tuple[Affine, Affine] | None
    factor: float
    twins: Sequence[Affine]


def _complete(x: Tensor) -> Tensor:
    """The sum of its splits."""
    return x.sum(0) if x.dim() == 3 else x


def _launch(
    x: Tensor,
    affine: Affine | None,
    eps: float,
    residual: Tensor | None,
    is_rms: bool,
    second: Tensor | None,
    form: _Form,
    exchange: Exchange | None,
    rounding: Rounding,
) -> list[Tensor]:
    size = x.shape[-1]
    assert size <= MAX_SIZE, f"rows of {size} are longer than {MAX_SIZE}"
    num_splits, second_splits, heads = 1, 0, 1
    if residual is not None:
        assert residual.is_contiguous()
        num_splits = x.shape[0] if x.dim() == 3 else 1
        shape, dtype = residual.shape, residual.dtype
    else:
        heads = x.shape[1] if x.dim() == 3 else 1
        shape, dtype = x.shape, x.dtype
    if second is not None:
        assert second.is_contiguous()
        second_splits = second.shape[0] if second.dim() == 3 else 1
    twins = form.twins
    affines = [each for each in (affine, *twins) if each is not None]
    num_rows = shape.numel() // size
    if rounding is Rounding.NONE:
        results = [torch.empty(shape, dtype=dtype, device=x.device) for _ in affines]
    else:
        assert affine is not None
        assert not twins
        assert heads == 1
        results = [*empty_inputs(num_rows, size, rounding, x.device)[:2]]
    if num_rows == 0:
        return results
    block = power_of_2(size)
    block = max(block, rounding.group)
    all_splits = num_splits + second_splits
    num_warps = _num_warps(block, num_rows, all_splits, exchange is not None)
    weight, bias = affine or Affine(None)
    branch_weight, branch_bias = form.branch or Affine(None)
    first_weight, second_weight = (each.weight for each in form.branches or (Affine(None),) * 2)
    of_twins: list[Tensor | None] = []
    for twin, result in zip(twins, results[len(results) - len(twins) :], strict=True):
        of_twins += (*twin, result)
    of_twins += [None] * (3 * (MAX_TWINS - len(twins)))
    _norm_kernel[(num_rows,)](
        x,
        second,
        residual,
        first_weight,
        second_weight,
        branch_weight,
        branch_bias,
        weight,
        bias,
        None if affine is None else results[0],
        *of_twins,
        None if rounding is Rounding.NONE else results[1],
        None if exchange is None else exchange.peers,
        x.stride(0) if num_splits > 1 else 0,
        x.stride(-2) if residual is not None or x.dim() == 2 else x.stride(0),
        x.stride(1) if heads > 1 else 0,
        heads,
        num_rows * size,
        0 if exchange is None else exchange.slot_rows,
        size,
        0 if rounding is Rounding.NONE else results[1].stride(0),
        eps,
        form.factor,
        BLOCK=block,
        IS_RMS=is_rms,
        ADDS=residual is not None,
        SPLITS=num_splits,
        SECOND_SPLITS=second_splits,
        NORMS_BRANCH=form.branch is not None,
        NORMS_BOTH=form.branches is not None,
        RANK=0 if exchange is None else exchange.rank,
        RANKS=1 if exchange is None else exchange.size,
        TWO_SHOT=exchange is not None and exchange.two_shot,
        SENT=None if exchange is None else _ELEMENTS[exchange.dtype],
        GROUP=rounding.group or block,
        DTYPE=_ELEMENTS[dtype],
        ROUNDING=int(rounding),
        LATE=_is_late(num_rows, num_splits) and exchange is None,
        num_warps=num_warps,
        # As many as there are: ptxas would keep to 32, and load some splits after adding others.
        maxnreg=registers_for(num_warps) if all_splits > 1 else None,
        **launch_options(x.device),
    )
    return results


def _is_late(num_rows: int, num_splits: int) -> bool:
    """Whether the next kernel, which fetches its weights first, starts once this one's loads are
    under way, and not at once.

    With one row that is faster (batch 1: Llama 3 8B 4.02 ms instead of 4.20, Gemma 3 4B 2.46
    instead of 2.47), with 64 it is slower (1%). A layer of Llama 3 8B in FP8 without its attention
    takes 69 us instead of 72 with 8 rows, 77 instead of 79 with 16, and 82.6 instead of 82.0 with
    32. Only one row of partial sums, which products of packed integers leave, is slower so: a layer
    in int4 takes 49.1 us instead of 46.6.
    """
    return num_rows <= FEW_ROWS and (num_rows > 1 or num_splits == 1)


def _num_warps(block: int, num_rows: int, num_splits: int, exchanges: bool) -> int:
    """More warps for partial sums, most for those of many experts, fewer where there are many rows.

    Microseconds on one H200 with half as many warps, as many, and twice as many as rows without
    partial sums take: 128 x 5,120 2.95, 2.44, 2.91, in three splits 3.72, 3.97, 3.03; 256 x 4,096
    in two 3.68, 3.21, 2.48; 64 x 1,024 in four 1.41, 1.30, 1.10; 1,940 x 5,120 22.3, 25.2, 28.9.
    With 32 warps in place of 16 for rows of 2,048 in eight parts, a layer of Qwen3-30B-A3B takes
    1.0, 0.9, 0.9, 0.2 and 0.0% less for 4, 8, 16, 64 and 256 tokens.

    Rows that are exchanged with other ranks take as many as there can be. Over four H200s, 256 x
    8,192 take 28.3, 27.6 and 26.8 us with 8, 16 and 32 warps, and 2,048 180, 162 and 160.
    """
    if exchanges:
        return min(32, max(1, block // 32))
    few = min(16, max(1, block // 256))
    if num_splits >= MANY_SPLITS:
        return min(32, 4 * few)
    if num_splits > 1:
        return 2 * few
    return max(1, few // 2) if num_rows > MANY_ROWS else few


@triton.jit
def _sum_of_splits(start, stride, inside, columns, SPLITS: tl.constexpr):
    """The sum of the splits in their order; all are loaded before the first ones are added."""
    far = tl.cast(stride, tl.int64)  # of eight experts of 75,000 tokens, the last is beyond int32
    parts = (tl.load(start + columns, mask=inside, other=0.0),)
    for split in tl.static_range(1, SPLITS):
        part = tl.load(start + split * far + columns, mask=inside, other=0.0)
        parts += (part,)  # type: ignore[assignment]
    values = parts[0].to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        values += parts[split].to(tl.float32)
    return values


@triton.jit
def _standardised(values, inside, size, eps, IS_RMS: tl.constexpr):
    if not IS_RMS:
        mean = tl.sum(values, 0) / size
        values = tl.where(inside, values - mean, 0.0)
    return values * tl.rsqrt(tl.sum(values * values, 0) / size + eps)


@triton.jit
def _normed_branch(
    values,
    scale,
    shift,
    inside,
    size,
    eps,
    IS_RMS: tl.constexpr,
    NORMS_BRANCH: tl.constexpr,
):
    if NORMS_BRANCH:
        values = _standardised(values, inside, size, eps, IS_RMS) * scale + shift
    return values


@triton.jit
def _scale_and_shift(weight, bias, inside, columns):
    """1 and 0 for what is None; loaded before the preceding kernel has ended (pdl.py)."""
    scale = 1.0
    shift = 0.0
    if weight is not None:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return scale, shift


_ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=["heads", "slot_rows", "scale_stride"])
def _norm_kernel(
    x,
    second,
    residual,
    first_weight,
    second_weight,
    branch_weight,
    branch_bias,
    weight,
    bias,
    out,
    twin_weight,
    twin_bias,
    twin_out,
    third_weight,
    third_bias,
    third_out,
    scales,
    peers,
    split_stride,
    row_stride,
    head_stride,
    heads,
    second_stride,
    slot_rows,
    size,
    scale_stride,
    eps,
    factor,
    BLOCK: tl.constexpr,
    IS_RMS: tl.constexpr,
    ADDS: tl.constexpr,
    SPLITS: tl.constexpr,
    SECOND_SPLITS: tl.constexpr,
    NORMS_BRANCH: tl.constexpr,
    NORMS_BOTH: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    SENT: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    ROUNDING: tl.constexpr,
    LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """scales: of each GROUP elements, if the result is rounded (ROUNDING): from DTYPE, as if it had
    been stored before.

    LATE: see _is_late.
    """
    if not LATE:
        allow_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    scale, shift = _scale_and_shift(weight, bias, inside, columns)
    branch_scale, branch_shift = _scale_and_shift(branch_weight, branch_bias, inside, columns)
    twin_scale, twin_shift = _scale_and_shift(twin_weight, twin_bias, inside, columns)
    third_scale, third_shift = _scale_and_shift(third_weight, third_bias, inside, columns)
    first_scale, _ = _scale_and_shift(first_weight, None, inside, columns)
    second_scale, _ = _scale_and_shift(second_weight, None, inside, columns)
    wait_previous(PDL)
    residual_row = 0.0
    if ADDS and not TWO_SHOT:  # asked for before the sums over the row, for which threads wait
        places = residual + row * size + columns
        residual_row = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    start = x + (row // heads) * row_stride + (row % heads) * head_stride
    values = _sum_of_splits(start, split_stride, inside, columns, SPLITS)
    if SECOND_SPLITS > 0:
        start = second + row * size
        other = _sum_of_splits(start, second_stride, inside, columns, SECOND_SPLITS)
        if NORMS_BOTH:
            values = _standardised(values, inside, size, eps, IS_RMS) * first_scale
            other = _standardised(other, inside, size, eps, IS_RMS) * second_scale
        values += other
    if LATE:
        allow_next(PDL)
    if TWO_SHOT:
        # The branch is normed and added to the residual stream by the row's owner alone.
        if is_owner(row, RANK, RANKS):
            values = sum_of_own_row(
                values, peers, row, columns, inside, size, slot_rows, RANK, RANKS, SENT
            )
            values = _normed_branch(
                values, branch_scale, branch_shift, inside, size, eps, IS_RMS, NORMS_BRANCH
            )
            places = residual + row * size + columns
            values = (values + tl.load(places, mask=inside, other=0.0).to(tl.float32)) * factor
            total = send_complete_row(
                values.to(SENT), peers, row, columns, inside, size, slot_rows, RANK, RANKS
            )
        else:
            total = complete_row(
                values, peers, row, columns, inside, size, slot_rows, RANK, RANKS, SENT
            )
        tl.store(residual + row * size + columns, total, mask=inside)
        values = total.to(tl.float32)
    else:
        if RANKS > 1:
            values = sum_over_ranks(
                values, peers, row, columns, inside, size, slot_rows, RANK, RANKS, SENT
            )
        values = _normed_branch(
            values, branch_scale, branch_shift, inside, size, eps, IS_RMS, NORMS_BRANCH
        )
        if ADDS:
            # The sum is rounded before it is normalised: later layers see the same numbers.
            total = ((values + residual_row) * factor).to(residual.dtype.element_ty)
            tl.store(residual + row * size + columns, total, mask=inside)
            values = total.to(tl.float32)
    if out is not None:
        values = _standardised(values, inside, size, eps, IS_RMS)
        normed = (values * scale + shift).to(DTYPE)
        if scales is not None:
            normed = normed.to(tl.float32)
            store_rounded(normed, out, scales, scale_stride, row, 0, size, size, GROUP, ROUNDING)
        else:
            tl.store(out + row * size + columns, normed, mask=inside)
        if twin_out is not None:
            normed = values * twin_scale + twin_shift
            places = twin_out + row * size + columns
            tl.store(places, normed.to(twin_out.dtype.element_ty), mask=inside)
        if third_out is not None:
            normed = values * third_scale + third_shift
            places = third_out + row * size + columns
            tl.store(places, normed.to(third_out.dtype.element_ty), mask=inside)
