"""GEMV, y = x W^T of one token: each weight is read and used once, so tensor cores do not help.

A program holds a few rows of W and accumulates in registers. Programs are small and many: while
some wait for memory, others compute. The first columns of W are loaded before the preceding kernels
have ended (pdl.py): as many as registers hold, because the memory would be idle until then.

It may norm x itself, with the addition to the residual stream before, as norm.py does: then no
kernel for that comes between two products, during which the memory would be idle, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.epilogues import activate, activate_gated
from octavo.ops.cuda.pdl import allow_next, fetch_to_l2, launch_options, wait_previous
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import DeferredNorm


@dataclass(frozen=True, slots=True)
class Programs:
    """What a program of the kernel takes."""

    rows: int  # of W, or of each half
    columns: int  # of W, at once
    ahead: int  # how many such blocks it loads before the preceding kernels have ended
    per_sm: int  # programs of this kind whose registers fit on one SM
    warps: int = 4


# Measured on 2026-11-22 on one H200, Triton 3.6, bfloat16 (benchmarks/tune_linear.py): of some 40
# kinds, those that were fastest for shapes of Llama 3, Gemma 3 and Qwen3; of several that are as
# good, the first is taken. The best kind that loads one block ahead takes 11% longer, on average.
_PLAIN = (
    Programs(2, 1024, 3, per_sm=9),
    Programs(2, 1024, 2, per_sm=10),
    Programs(4, 1024, 2, per_sm=6),
    Programs(4, 512, 2, per_sm=9),
)
_GATED = (Programs(1, 1024, 3, per_sm=9), Programs(1, 512, 5, per_sm=10))  # by padding alone
# For weights in e4m3 (2026-11-23): the fastest of some 16 kinds for shapes of Llama 3 8B.
_PLAIN_FLOAT8 = (Programs(8, 1024, 2, per_sm=4), Programs(4, 2048, 2, per_sm=4))
_GATED_FLOAT8 = Programs(1, 1024, 4, per_sm=9)
# For products that norm their input (2026-11-23), by whether they are gated: the fastest for Llama
# 3 8B, and for Gemma 3 4B. And (2026-11-24) the fastest of six kinds for gpt-oss-20b's queries,
# keys and values, whose inputs no number of columns divides.
_NORMING = (Programs(4, 2048, 2, per_sm=3, warps=8), Programs(2, 2048, 2, per_sm=3, warps=8))
_NORMING_NARROW = (Programs(16, 512, 2, per_sm=2, warps=8), Programs(8, 512, 2, per_sm=2, warps=8))
_NORMING_RAGGED = Programs(4, 1024, 3, per_sm=4)
_NORMING_FLOAT8 = Programs(8, 1024, 2, per_sm=3)
_FEW_ROWS = 8192
MAX_ROWS = 8  # that a program takes
_NUM_SMS = 132
_LESS_PADDING = 0.3  # what it counts that columns do not reach beyond the end of a row


@cache
def choose_programs(num_rows: int, size: int, is_gated: bool, is_float8: bool = False) -> Programs:
    """The kind of program for W [num_rows or 2 * num_rows, size].

    What counts is how full the last wave of programs is: a few programs too many for the SMs, and
    most of them are idle for the time of a wave. The choice takes 2% longer than the best one for
    each of the shapes measured, on average.
    """
    if size <= 1024:
        return Programs(4 if num_rows == 4096 else 8, min(512, power_of_2(size)), 1, per_sm=6)

    def score(programs: Programs) -> float:
        waves = -(-num_rows // programs.rows) / (_NUM_SMS * programs.per_sm)
        padding = -size % programs.columns / size
        return waves / math.ceil(waves) - _LESS_PADDING * padding

    if is_float8:
        return _GATED_FLOAT8 if is_gated else max(_PLAIN_FLOAT8, key=score)
    if is_gated:  # twice the rows: there are many waves
        return _GATED[0] if -size % _GATED[0].columns < 0.1 * size else _GATED[1]
    return max(_PLAIN, key=score)


def pays_to_norm(num_rows: int, size: int, norms_branch: bool, is_float8: bool = False) -> bool:
    """Whether a GEMV with W [num_rows, size] norms its input itself in less time than a kernel.

    Each program norms all of it, in as many instructions as some rows of W take: programs that are
    many lose by that what the kernel would have taken. docs/experiments.md has the times.
    """
    is_light = not norms_branch and not is_float8 and size % _NORMING[False].columns == 0
    return is_light or num_rows <= _FEW_ROWS


def norming_programs(size: int, is_gated: bool, is_float8: bool) -> Programs:
    """The kind of program that norms its input."""
    if is_float8:
        return _NORMING_FLOAT8
    wide, narrow = _NORMING[is_gated], _NORMING_NARROW[is_gated]
    if size % wide.columns == 0:
        return wide
    return narrow if is_gated or size % narrow.columns == 0 else _NORMING_RAGGED


class Scales(NamedTuple):
    """What e4m3 weights are multiplied by: those of row r and column c by
    values[r // rows, c // columns]."""

    values: Tensor  # float32, dense
    rows: int
    columns: int  # 0: all of them


def linear_one(
    x: Tensor | DeferredNorm,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Epilogue,
    programs: Programs | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """epilogue(x W^T + b) of x [1, size]: [1, num_rows].

    x: or what its norm is computed from.
    scales: of a weight in e4m3; those of columns belong to at least as many rows as a program has.
    """
    norm = x if isinstance(x, DeferredNorm) else None
    x = x.x if isinstance(x, DeferredNorm) else x
    assert x.stride(1) == 1
    num_rows, size = weight.shape[0] // 2 if epilogue.is_gated else weight.shape[0], x.shape[1]
    if programs is None:
        is_gated, is_float8 = epilogue.is_gated, scales is not None
        if norm is None:
            programs = choose_programs(num_rows, size, is_gated, is_float8)
        else:
            programs = norming_programs(size, is_gated, is_float8)
    out = x.new_empty((1, num_rows), dtype=x.dtype if norm is None else norm.dtype)
    num_programs = triton.cdiv(num_rows, programs.rows)
    writes = norm is not None and norm.total is not None
    _linear_one_kernel[(num_programs + writes,)](
        x,
        None if norm is None else norm.weight,
        None if norm is None else norm.residual,
        None if norm is None else norm.total,
        None if norm is None else norm.branch_weight,
        weight,
        None if scales is None else scales.values,
        bias,
        out,
        num_rows,
        size,
        1 if scales is None else scales.rows,
        0 if scales is None else scales.values.stride(0),
        0.0 if norm is None else norm.eps,
        OFFSET=0.0 if norm is None else norm.offset,
        ROWS=programs.rows,
        BLOCK=programs.columns,
        BLOCKS=triton.cdiv(size, programs.columns),
        AHEAD=min(programs.ahead, triton.cdiv(size, programs.columns)),
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        SCALE_COLUMNS=0 if scales is None else scales.columns,
        num_warps=programs.warps,
        **launch_options(x.device),
    )
    return out


@triton.jit
def _added(piece, before, branch_weight, branch_factor, places, inside, OFFSET: tl.constexpr):
    """The residual stream `before` after a piece of x is added to it, or the norm of x."""
    values = piece.to(tl.float32)
    if branch_weight is not None:
        scale = tl.load(branch_weight + places, mask=inside, other=0.0).to(tl.float32)
        values *= branch_factor * (scale + OFFSET)
    # The sum is rounded before it is normalised: later layers see the same numbers.
    return (values + before.to(tl.float32)).to(before.dtype)


@triton.jit
def _stream(
    x,
    residual,
    branch_weight,
    size,
    eps,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """What is normalised, in BLOCKS blocks."""
    columns = tl.arange(0, BLOCK)
    pieces = ()
    befores = ()
    # All that the preceding kernels wrote is asked for before a sum, for which threads wait.
    for i in tl.static_range(BLOCKS):
        places = i * BLOCK + columns
        piece = tl.load(x + places, mask=places < size, other=0.0)
        pieces += (piece,)  # type: ignore[assignment]
        if residual is not None:
            before = tl.load(residual + places, mask=places < size, other=0.0)
            befores += (before,)  # type: ignore[assignment]
    branch_factor = 1.0
    if branch_weight is not None:
        squares = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(BLOCKS):
            squares += pieces[i].to(tl.float32) * pieces[i].to(tl.float32)
        branch_factor = tl.rsqrt(tl.sum(squares, 0) / size + eps)
    stream = ()
    for i in tl.static_range(BLOCKS):
        places = i * BLOCK + columns
        piece = pieces[i]
        if residual is not None:
            piece = _added(
                piece, befores[i], branch_weight, branch_factor, places, places < size, OFFSET
            )
        stream += (piece,)  # type: ignore[assignment]
    return stream


@triton.jit
def _normed(values, norm_weight, squares, places, inside, OFFSET: tl.constexpr):
    """The norm of `values` without the factor that is the same for all of it, and `squares` with
    theirs added; float32."""
    values = values.to(tl.float32)
    squares += values * values
    weight = tl.load(norm_weight + places, mask=inside, other=0.0).to(tl.float32)
    values *= weight + OFFSET
    return values, squares


@triton.jit
def _scaled(values, scales, places, inside, SCALE_COLUMNS: tl.constexpr):
    """[1, columns]: values times scales of a row's columns."""
    if SCALE_COLUMNS > 0:
        values *= tl.load(scales + places // SCALE_COLUMNS, mask=inside, other=0.0)
    return values[None, :]


@triton.jit
def _linear_one_kernel(
    x,
    norm_weight,
    residual,
    total,
    branch_weight,
    weight,
    scales,
    bias,
    out,
    num_rows,
    size,
    block_rows,
    scale_stride,
    eps,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    AHEAD: tl.constexpr,
    EPILOGUE: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    columns = tl.arange(0, BLOCK)
    program = tl.program_id(0)
    if total is not None:
        if program == 0:  # the stream's next values, which the others would wait for if they wrote
            if PDL:  # for all; each fetching by itself would take longer than the product
                fetch_to_l2(norm_weight + tl.zeros([1], tl.int32), size)
                if branch_weight is not None:
                    fetch_to_l2(branch_weight + tl.zeros([1], tl.int32), size)
            wait_previous(PDL)
            stream = _stream(x, residual, branch_weight, size, eps, BLOCKS, BLOCK, OFFSET)
            for i in tl.static_range(BLOCKS):
                here = i * BLOCK + columns
                tl.store(total + here, stream[i], mask=here < size)
            return
        program -= 1
    rows = program * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    rows = tl.minimum(rows, num_rows - 1)
    places = weight + rows.to(tl.int64)[:, None] * size + columns[None, :]
    up_places = places + tl.cast(num_rows, tl.int64) * size
    pieces = ()
    up_pieces = ()
    for i in tl.static_range(AHEAD):
        inside = (columns < size - i * BLOCK)[None, :]
        piece = tl.load(places + i * BLOCK, mask=inside, other=0.0)
        pieces += (piece,)  # type: ignore[assignment]
        if GATED:
            up_piece = tl.load(up_places + i * BLOCK, mask=inside, other=0.0)
            up_pieces += (up_piece,)  # type: ignore[assignment]
    factor = 1.0
    up_factor = 1.0
    if scales is not None and SCALE_COLUMNS == 0:
        factor = tl.load(scales + rows // block_rows * scale_stride)
        if GATED:
            up_factor = tl.load(scales + (num_rows + rows) // block_rows * scale_stride)
    row_scales = scales
    up_scales = scales
    if SCALE_COLUMNS > 0:
        row = program * ROWS
        row_scales += row // block_rows * scale_stride
        up_scales += (num_rows + row) // block_rows * scale_stride
    wait_previous(PDL)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    up_acc = acc
    squares = tl.zeros([BLOCK], tl.float32)
    stream = ()
    if norm_weight is not None:
        stream = _stream(x, residual, branch_weight, size, eps, BLOCKS, BLOCK, OFFSET)
    for i in tl.static_range(BLOCKS if norm_weight is not None else AHEAD):
        here = i * BLOCK + columns
        inside = here < size
        if norm_weight is not None:
            values, squares = _normed(stream[i], norm_weight, squares, here, inside, OFFSET)
        else:
            values = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        if i < AHEAD:
            piece = pieces[i]
        else:
            piece = tl.load(places + i * BLOCK, mask=inside[None, :], other=0.0)
        acc += piece.to(tl.float32) * _scaled(values, row_scales, here, inside, SCALE_COLUMNS)
        if GATED:
            if i < AHEAD:
                up_piece = up_pieces[i]
            else:
                up_piece = tl.load(up_places + i * BLOCK, mask=inside[None, :], other=0.0)
            scaled = _scaled(values, up_scales, here, inside, SCALE_COLUMNS)
            up_acc += up_piece.to(tl.float32) * scaled
    if norm_weight is None:
        for start in range(AHEAD * BLOCK, size, BLOCK):
            here = start + columns
            inside = here < size
            piece = tl.load(places + start, mask=inside[None, :], other=0.0)
            values = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
            acc += piece.to(tl.float32) * _scaled(values, row_scales, here, inside, SCALE_COLUMNS)
            if GATED:
                up_piece = tl.load(up_places + start, mask=inside[None, :], other=0.0)
                scaled = _scaled(values, up_scales, here, inside, SCALE_COLUMNS)
                up_acc += up_piece.to(tl.float32) * scaled
    square_sum = 0.0
    up = 0.0
    if norm_weight is None:
        y = tl.sum(acc, 1)
        if GATED:
            up = tl.sum(up_acc, 1)
    else:  # all sums at once: threads wait for each other in each
        tile = tl.broadcast_to(squares[None, :], [ROWS, BLOCK])
        if GATED:
            sums = tl.sum(tl.join(tl.join(acc, up_acc), tl.join(tile, tile)), 1)
            products, both = tl.split(sums)
            y, up = tl.split(products)
            square_sum, _ = tl.split(both)
        else:
            y, square_sum = tl.split(tl.sum(tl.join(acc, tile), 1))
        norm_factor = tl.rsqrt(square_sum / size + eps)
        y *= norm_factor
        up *= norm_factor
    y *= factor
    if HAS_BIAS:
        y += tl.load(bias + rows).to(tl.float32)
    if GATED:
        up *= up_factor
        if HAS_BIAS:
            up += tl.load(bias + num_rows + rows).to(tl.float32)
        y = activate_gated(y, up, EPILOGUE)
    else:
        y = activate(y, EPILOGUE)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=is_row)
