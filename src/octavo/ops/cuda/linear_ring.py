"""y = x W^T of one token with weights of 16 bits, by as many programs as there are SMs.

A program's rows of W pass through a ring in shared memory. It is filled before the preceding
kernels have ended (pdl.py), and two such kernels fit on an SM beside the programs of attention: the
memory is busy with the weights of the next two products while a kernel of few bytes runs, and while
one product ends and the next one begins.

The tensor cores read W from the ring as it is, so that weights take no registers and hardly any
instructions. A product of theirs has 64 rows and at least 8 columns, where one token has one. So a
block of W is taken apart: of each row, FOLD neighbouring pieces of 64 inputs are rows of the left
operand, and the same pieces of x are the columns of the right one. Of the products of a row's
pieces with all pieces of x, those of the same place are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.ops.cuda.linear_hopper import _activate, _activate_gated, _barrier, _fetch_tile
from octavo.ops.cuda.linear_hopper_quantized import _IS_PUBLIC
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import DeferredNorm

_WIDTH = tl.constexpr(64)  # inputs of a piece: 128 bytes, as wide as shared memory
_PIECE_ROWS = tl.constexpr(16)  # pieces of x that are loaded at once: 16 bytes of each thread
_PART = _PIECE_ROWS.value * _WIDTH.value


@dataclass(frozen=True, slots=True)
class Ring:
    """What a program of the kernel takes."""

    rows: int  # of W, or of each half, in a block
    fold: int  # pieces of each: 8 or 16
    stages: int  # blocks in shared memory
    pause: int  # nanoseconds after each block that is loaded before the wait


# Bytes, and bytes of gates and ups, which are on their way during attention: with an output
# projection's they fit on an SM beside a program of attention (35 KB).
_MEMORY, _GATED_MEMORY = 94 << 10, 103 << 10
_MOST_STAGES = 10
_PAUSE = 150  # nanoseconds for each tile
_TILES = ((8, 8), (4, 16))  # rows and pieces
_FEWEST_ROWS, _MOST_INPUTS = 1024, 20480


def takes_ring(num_rows: int, size: int) -> bool:
    """Whether the kernel takes W [num_rows, size], and its programs have enough to do."""
    return size % _WIDTH.value == 0 and num_rows >= _FEWEST_ROWS and size <= _MOST_INPUTS


@cache
def choose_ring(num_rows: int, size: int, is_gated: bool, num_programs: int) -> Ring:
    """For W [num_rows, size], half of whose rows are gates with `is_gated`."""
    halves = 2 if is_gated else 1

    def share(tile: tuple[int, int]) -> float:
        """Of SMs that have work to the end, times that of columns that are no padding."""
        rows, fold = tile
        units, width = triton.cdiv(num_rows // halves, rows), fold * _WIDTH.value
        waves = triton.cdiv(units, num_programs)
        busy: float = units / (waves * num_programs) * size / (triton.cdiv(size, width) * width)
        return busy

    rows, fold = max(_TILES, key=share)
    memory = (_GATED_MEMORY if is_gated else _MEMORY) - 2 * _PART * triton.cdiv(size, _PART)
    stages = memory // (2 * rows * fold * _WIDTH.value * halves)
    return Ring(rows, fold, min(stages, _MOST_STAGES), _PAUSE * halves)


def linear_ring(
    x: Tensor | DeferredNorm,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Epilogue,
    ring: Ring,
    num_programs: int,
) -> Tensor:
    """epilogue(x W^T + b) of x [1, size]: [1, num_rows].

    x: or what its norm is computed from.
    weight: bfloat16 or float16, dense, aligned to 16 bytes; size a multiple of 64.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    norm = x if isinstance(x, DeferredNorm) else None
    x = x.x if isinstance(x, DeferredNorm) else x
    assert x.stride(1) == 1
    num_rows, size = weight.shape[0] // 2 if epilogue.is_gated else weight.shape[0], x.shape[1]
    out = x.new_empty((1, num_rows))
    elements = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    block = [ring.rows, ring.fold, _WIDTH.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, elements)
    pieces = weight.view(len(weight), size // _WIDTH.value, _WIDTH.value)
    _linear_ring_kernel[(num_programs,)](
        x,
        None if norm is None else norm.weight,
        None if norm is None else norm.residual,
        None if norm is None else norm.total,
        None if norm is None else norm.branch_weight,
        TensorDescriptor.from_tensor(pieces, block, layout),
        bias,
        out,
        num_rows,
        size,
        0.0 if norm is None else norm.eps,
        OFFSET=0.0 if norm is None else norm.offset,
        STAGES=ring.stages,
        PAUSE=f"nanosleep.u32 {ring.pause}; mov.b32 $0, 0;",
        LOADS=triton.cdiv(size, _PART),
        BLOCKS=triton.cdiv(size, ring.fold * _WIDTH.value),
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        num_warps=4,
        **launch_options(x.device),
    )
    return out


@gluon.jit
def _fetch(weight, tiles, ready, stage, row, piece, num_rows, GATED: gl.constexpr):
    """Load a block of W."""
    HALVES: gl.constexpr = 2 if GATED else 1
    mbarrier.expect(ready.index(stage), HALVES * weight.block_type.nbytes)
    _fetch_tile(weight, [row, piece, 0], ready.index(stage), tiles.index(stage * HALVES))
    if GATED:
        up = [row + num_rows, piece, 0]
        _fetch_tile(weight, up, ready.index(stage), tiles.index(stage * HALVES + 1))


@gluon.jit
def _following(row, piece, FOLD: gl.constexpr, BLOCKS: gl.constexpr, ROWS: gl.constexpr):
    """Where the program's next block of W is."""
    is_last = piece == (BLOCKS - 1) * FOLD
    row = gl.where(is_last, row + gl.num_programs(0) * ROWS, row)
    return row, gl.where(is_last, 0, piece + FOLD)


@gluon.jit
def _parts(source, size, LOADS: gl.constexpr, LAYOUT: gl.constexpr):
    """A row in LOADS parts, as of _place; none of None."""
    found = ()
    if source is not None:
        for i in gl.static_range(LOADS):
            place = _place(i, LAYOUT)
            # Volatile: the compiler keeps the order of loads.
            part = gl.load(source + place, mask=place < size, other=0.0, volatile=True)
            found += (part,)  # type: ignore[assignment]
    return found


@gluon.jit
def _place(i: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the pieces of the i-th part of a row are."""
    row = i * _PIECE_ROWS + gl.arange(0, _PIECE_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, _WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    return row[:, None] * _WIDTH + column[None, :]


@gluon.jit
def _rms_factor(parts, size, eps):
    """What the RMS norm multiplies a row by."""
    squares = parts[0].to(gl.float32) * parts[0].to(gl.float32)
    for i in gl.static_range(1, len(parts)):
        squares += parts[i].to(gl.float32) * parts[i].to(gl.float32)
    return gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / size + eps)


@gluon.jit
def _times(parts, factor, weights, OFFSET: gl.constexpr):
    """A row in float32, times `factor` and the weights of a norm."""
    done = ()
    for i in gl.static_range(len(parts)):
        values = parts[i].to(gl.float32) * factor * (weights[i].to(gl.float32) + OFFSET)
        done += (values,)  # type: ignore[assignment]
    return done


@gluon.jit
def _inputs(
    x,
    residual,
    total,
    weights,
    branch_weights,
    size,
    eps,
    OFFSET: gl.constexpr,
    LOADS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """The parts of x, or with `weights` of its norm, as of DeferredNorm."""
    # What is used last is asked for first: all is, then, before a sum, for which threads wait.
    before = _parts(residual, size, LOADS, LAYOUT)
    parts = _parts(x, size, LOADS, LAYOUT)
    if len(branch_weights) > 0:
        parts = _times(parts, _rms_factor(parts, size, eps), branch_weights, OFFSET)
    if residual is not None:
        sums = ()
        for i in gl.static_range(LOADS):
            # The sum is rounded before it is normalised: later layers see the same numbers.
            value = (parts[i].to(gl.float32) + before[i].to(gl.float32)).to(before[i].dtype)
            sums += (value,)  # type: ignore[assignment]
        parts = sums
        if gl.program_id(0) == 0:
            for i in gl.static_range(LOADS):
                place = _place(i, LAYOUT)
                gl.store(total + place, parts[i], mask=place < size)
    if len(weights) > 0:
        parts = _times(parts, _rms_factor(parts, size, eps), weights, OFFSET)
    return parts


@gluon.jit
def _by_row(acc, FOLD: gl.constexpr):
    """[rows]: the sums of the products of pieces with the pieces of x that they belong to."""
    LAYOUT: gl.constexpr = acc.type.layout
    piece = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT)) % FOLD
    column = gl.arange(0, FOLD, layout=gl.SliceLayout(0, LAYOUT))
    own = gl.sum(gl.where(piece[:, None] == column[None, :], acc, 0.0), 1)
    return gl.sum(own.reshape([acc.shape[0] // FOLD, FOLD]), 1)


@gluon.jit
def _linear_ring_kernel(
    x,
    norm_weight,
    residual,
    total,
    branch_weight,
    weight,
    bias,
    out,
    num_rows,
    size,
    eps,
    OFFSET: gl.constexpr,
    STAGES: gl.constexpr,
    PAUSE: gl.constexpr,
    LOADS: gl.constexpr,
    BLOCKS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_rows].

    Args:
        weight: descriptor of W [num_rows or 2 * num_rows, pieces, 64].
        PAUSE: what is done between loads before the wait, in PTX.
        LOADS: parts in which x is loaded.
        BLOCKS: blocks of a row of W.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALVES: gl.constexpr = 2 if GATED else 1
    ROWS: gl.constexpr = weight.block_type.shape[0]
    FOLD: gl.constexpr = weight.block_type.shape[1]
    DTYPE: gl.constexpr = weight.dtype
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(2 * _WIDTH, 16, 2)
    PARTS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, FOLD, 16]
    )
    tiles = gl.allocate_shared_memory(DTYPE, [STAGES * HALVES, ROWS, FOLD, _WIDTH], weight.layout)
    x_parts = gl.allocate_shared_memory(DTYPE, [LOADS, _PIECE_ROWS, _WIDTH], WHOLE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if _IS_PUBLIC:
        left = tiles.reinterpret(DTYPE, [STAGES * HALVES, ROWS * FOLD, _WIDTH], WHOLE)
        right = x_parts.reinterpret(DTYPE, [LOADS * _PIECE_ROWS // FOLD, FOLD, _WIDTH], WHOLE)
    else:
        left = tiles._reinterpret(DTYPE, [STAGES * HALVES, ROWS * FOLD, _WIDTH], WHOLE)
        right = x_parts._reinterpret(DTYPE, [LOADS * _PIECE_ROWS // FOLD, FOLD, _WIDTH], WHOLE)
    for each in gl.static_range(STAGES):
        mbarrier.init(ready.index(each), count=1)
    fence_async_shared()
    num_units = gl.cdiv(gl.cdiv(num_rows, ROWS) - gl.program_id(0), gl.num_programs(0))
    count = num_units * BLOCKS
    row = gl.program_id(0) * ROWS
    piece = 0
    for stage in range(gl.minimum(count, STAGES)):
        _fetch(weight, tiles, ready, stage, row, piece, num_rows, GATED)
        row, piece = _following(row, piece, FOLD, BLOCKS, ROWS)
        if PDL:
            gl.inline_asm_elementwise(PAUSE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    weights = _parts(norm_weight, size, LOADS, PARTS)
    branch_weights = _parts(branch_weight, size, LOADS, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    parts = _inputs(x, residual, total, weights, branch_weights, size, eps, OFFSET, LOADS, PARTS)
    for i in gl.static_range(LOADS):
        x_parts.index(i).store(parts[i].to(DTYPE))
    fence_async_shared()
    _barrier()
    missing = count - STAGES  # blocks that are not asked for
    stage = 0
    phase = 0
    before = STAGES - 1
    for unit in range(num_units):
        acc = gl.zeros([ROWS * FOLD, FOLD], gl.float32, SUMS)
        up = acc
        for block in range(BLOCKS):
            mbarrier.wait(ready.index(stage), phase)
            inputs = right.index(block).permute((1, 0))
            acc = warpgroup_mma(left.index(stage * HALVES), inputs, acc, is_async=True)
            if GATED:
                up = warpgroup_mma(left.index(stage * HALVES + 1), inputs, up, is_async=True)
                acc, up = warpgroup_mma_wait(2, deps=[acc, up])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
            if (missing > 0) & (unit + block > 0):
                _barrier()  # All warps are done with the block before: its place is free.
                _fetch(weight, tiles, ready, before, row, piece, num_rows, GATED)
                row, piece = _following(row, piece, FOLD, BLOCKS, ROWS)
                missing -= 1
            before = stage
            is_end = stage == STAGES - 1
            stage = gl.where(is_end, 0, stage + 1)
            phase = gl.where(is_end, 1 - phase, phase)
        if GATED:
            acc, up = warpgroup_mma_wait(0, deps=[acc, up])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        y = _by_row(acc, FOLD)
        first = (gl.program_id(0) + unit * gl.num_programs(0)) * ROWS
        rows = first + gl.arange(0, ROWS, layout=y.type.layout)
        if HAS_BIAS:
            y += gl.load(bias + rows, mask=rows < num_rows, other=0.0).to(gl.float32)
        if GATED:
            ups = _by_row(up, FOLD)
            if HAS_BIAS:
                shift = gl.load(bias + num_rows + rows, mask=rows < num_rows, other=0.0)
                ups += shift.to(gl.float32)
            y = _activate_gated(y, ups, EPILOGUE)
        else:
            y = _activate(y, EPILOGUE)
        gl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < num_rows)
