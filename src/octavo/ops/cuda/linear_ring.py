"""y = x W^T of one token with weights of 16 or 8 bits, by as many programs as there are SMs.

A program's rows of W pass through a ring in shared memory. It is filled before the preceding
kernels have ended (pdl.py), and two such kernels fit on an SM beside the programs of attention: the
memory is busy with the weights of the next two products while a kernel of few bytes runs, and while
one product ends and the next one begins.

The tensor cores read W from the ring as it is, so that weights take no registers and hardly any
instructions. A product of theirs has 64 rows and at least 8 columns, where one token has one. So a
block of W is taken apart: of each row, FOLD neighbouring pieces of 128 bytes are rows of the left
operand, and the same pieces of x are the columns of the right one. Of the products of a row's
pieces with all pieces of x, those of the same place are added up.

Weights in e4m3 are multiplied by inputs that are two e4m3 numbers each (two_float8.py): both are
columns of the same product. Tensor cores add products of such numbers with some 14 bits; sums of
512 inputs are added in float32.
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

from octavo.ops.cuda.devices import num_sms
from octavo.ops.cuda.epilogues import activate, activate_gated
from octavo.ops.cuda.hopper import fetch_tile, reinterpreted, sync_threads
from octavo.ops.cuda.linear_gemv import Scales
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.cuda.two_float8 import MOST_ADDED, in_two, scales_of_two
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import DeferredNorm

_PIECE = tl.constexpr(128)  # bytes: as wide as shared memory
PART_PIECES = tl.constexpr(16)  # pieces of x that are loaded at once


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
# A ring that fills up while experts read their weights takes from them what it reads.
_MEMORY_BESIDE_EXPERTS = 44 << 10
# A block is asked for while the next one is multiplied, which must be there: a single stage would
# wait for good, unless there is a single block.
_FEWEST_STAGES, _MOST_STAGES = 2, 10
_PAUSE, _PAUSED_PIECES = 150, 64  # nanoseconds, and for how many pieces
_TILES = ((8, 8), (4, 16))  # rows and pieces
# Products of 8 bits have half as many bytes in as many blocks: larger ones come first, except of
# gates and ups, which have two each.
_TILES_FLOAT8 = ((16, 8), *_TILES)
_FEWEST_ROWS, _MOST_INPUTS = 1024, 20480
_ELEMENTS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def takes_ring(num_rows: int, size: int, is_float8: bool = False) -> bool:
    """Whether the kernel takes W [num_rows, size], and its programs have enough to do."""
    return size % _width(is_float8) == 0 and num_rows >= _FEWEST_ROWS and size <= _MOST_INPUTS


def _width(is_float8: bool) -> int:
    """Inputs of a piece."""
    width: int = _PIECE.value if is_float8 else _PIECE.value // 2
    return width


@cache
def choose_ring(
    num_rows: int,
    size: int,
    is_gated: bool,
    num_programs: int,
    is_float8: bool = False,
    follows_experts: bool = False,
) -> Ring:
    """The ring for W [num_rows, size], half of whose rows are gates with `is_gated`."""
    halves = 2 if is_gated else 1
    piece = _width(is_float8)

    def share(tile: tuple[int, int]) -> float:
        return useful_share(num_rows // halves, size, tile[0], tile[1] * piece, num_programs)

    memory = ring_memory(size, piece, is_gated, follows_experts)

    def stages_of(tile: tuple[int, int]) -> int:
        found: int = memory // (tile[0] * tile[1] * _PIECE.value * halves)
        return found

    tiles = _TILES_FLOAT8 if is_float8 and not is_gated else _TILES
    fitting = [tile for tile in tiles if stages_of(tile) >= _FEWEST_STAGES]
    rows, fold = max(fitting or _TILES, key=share)
    stages = max(_FEWEST_STAGES, stages_of((rows, fold)))
    blocks = most_units(num_rows // halves, rows, num_programs) * triton.cdiv(size, fold * piece)
    pause = _PAUSE * halves * rows * fold // _PAUSED_PIECES
    return Ring(rows, fold, min(stages, _MOST_STAGES, blocks), pause)


def useful_share(num_rows: int, size: int, rows: int, width: int, num_programs: int) -> float:
    """The share of SMs that have work to the end, times the share of columns that are no padding,
    with blocks of `rows` rows and `width` columns."""
    units, blocks = triton.cdiv(num_rows, rows), triton.cdiv(size, width)
    waves = triton.cdiv(units, num_programs)
    share: float = units / (waves * num_programs) * size / (blocks * width)
    return share


def ring_memory(size: int, piece: int, is_gated: bool, follows_experts: bool = False) -> int:
    """Bytes that are left for blocks of W beside `size` inputs, with so many in a piece."""
    part = PART_PIECES.value * piece
    of_inputs: int = 2 * part * triton.cdiv(size, part)  # each in 16 bits, or in two times 8
    memory = _GATED_MEMORY if is_gated else _MEMORY
    if follows_experts:
        memory = _MEMORY_BESIDE_EXPERTS
    return memory - of_inputs


def most_units(num_rows: int, rows: int, num_programs: int) -> int:
    """How often a program takes `rows` rows of W, or of each half, at most."""
    units: int = triton.cdiv(triton.cdiv(num_rows, rows), num_programs)
    return units


def linear_by_ring(
    x: Tensor | DeferredNorm,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Epilogue,
    scales: Scales | None = None,
    follows_experts: bool = False,
) -> Tensor:
    """`linear_ring` with a program for each SM, and the ring that is chosen for W."""
    num_programs, is_gated = num_sms(weight.device), epilogue.is_gated
    is_float8 = scales is not None
    ring = choose_ring(*weight.shape, is_gated, num_programs, is_float8, follows_experts)
    return linear_ring(x, weight, bias, epilogue, ring, num_programs, scales)


def linear_ring(
    x: Tensor | DeferredNorm,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Epilogue,
    ring: Ring,
    num_programs: int,
    scales: Scales | None = None,
) -> Tensor:
    """epilogue(x W^T + b) of x [1, size]: [1, num_rows].

    x: or what its norm is computed from.
    weight: bfloat16 or float16, or e4m3 with `scales`; dense, aligned to 16 bytes; size a multiple
        of a piece.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    norm = x if isinstance(x, DeferredNorm) else None
    x = x.x if isinstance(x, DeferredNorm) else x
    assert x.stride(1) == 1
    num_rows, size = weight.shape[0] // 2 if epilogue.is_gated else weight.shape[0], x.shape[1]
    out = x.new_empty((1, num_rows), dtype=x.dtype if norm is None else norm.dtype)
    width = _width(scales is not None)
    block = [ring.rows, ring.fold, width]
    layout = gl.NVMMASharedLayout.get_default_for(block, _ELEMENTS[weight.dtype])
    pieces = weight.view(len(weight), size // width, width)
    num_blocks = triton.cdiv(size, ring.fold * width)
    has_groups = scales is not None and scales.columns > 0
    span = num_blocks
    if scales is not None:
        span = 1 if has_groups else min(span, MOST_ADDED // width)
    _linear_ring_kernel[(num_programs,)](
        x,
        *norm_tensors(norm),
        TensorDescriptor.from_tensor(pieces, block, layout),
        None if scales is None else scales.values,
        bias,
        out,
        num_rows,
        size,
        None if scales is None else scales.rows,
        None if scales is None else scales.values.stride(0),
        0.0 if norm is None else norm.eps,
        OFFSET=0.0 if norm is None else norm.offset,
        STAGES=ring.stages,
        PAUSE=pause_for(ring.pause),
        LOADS=triton.cdiv(size, PART_PIECES.value * width),
        UNITS=power_of_2(most_units(num_rows, ring.rows, num_programs)),
        BLOCKS=num_blocks,
        SPAN=span,
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        HAS_GROUPS=has_groups,
        num_warps=4,
        **launch_options(x.device),
    )
    return out


def norm_tensors(norm: DeferredNorm | None) -> tuple[Tensor | None, ...]:
    """What the kernel takes beside x: the norm's weight, the residual stream and the total, and the
    weight of the norm before."""
    if norm is None:
        return None, None, None, None
    return norm.weight, norm.residual, norm.total, norm.branch_weight


def pause_for(nanoseconds: int) -> str:
    """PTX that waits for about so long."""
    return f"nanosleep.u32 {nanoseconds}; mov.b32 $0, 0;"


@gluon.jit
def _fetch(weight, tiles, ready, stage, row, piece, num_rows, GATED: gl.constexpr):
    """Load a block of W."""
    HALVES: gl.constexpr = 2 if GATED else 1
    mbarrier.expect(ready.index(stage), HALVES * weight.block_type.nbytes)
    fetch_tile(weight, [row, piece, 0], ready.index(stage), tiles.index(stage * HALVES))
    if GATED:
        up = [row + num_rows, piece, 0]
        fetch_tile(weight, up, ready.index(stage), tiles.index(stage * HALVES + 1))


@gluon.jit
def next_place(row, piece, FOLD: gl.constexpr, BLOCKS: gl.constexpr, ROWS: gl.constexpr):
    """Where the program's next block of W is."""
    is_last = piece == (BLOCKS - 1) * FOLD
    row = gl.where(is_last, row + gl.num_programs(0) * ROWS, row)
    return row, gl.where(is_last, 0, piece + FOLD)


@gluon.jit
def parts_of(source, size, LOADS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """A row in LOADS parts, as of _place; none of None."""
    found = ()
    if source is not None:
        for i in gl.static_range(LOADS):
            place = _place(i, WIDTH, LAYOUT)
            # Volatile: the compiler keeps the order of loads.
            part = gl.load(source + place, mask=place < size, other=0.0, volatile=True)
            found += (part,)  # type: ignore[assignment]
    return found


@gluon.jit
def _place(i: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the pieces of the i-th part of a row are."""
    row = i * PART_PIECES + gl.arange(0, PART_PIECES, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    return row[:, None] * WIDTH + column[None, :]


@gluon.jit
def _row_squares(parts):
    """[PART_PIECES]: the sums of the squares of a part's pieces, over all parts. No warp waits for
    another one."""
    squares = parts[0].to(gl.float32) * parts[0].to(gl.float32)
    for i in gl.static_range(1, len(parts)):
        squares += parts[i].to(gl.float32) * parts[i].to(gl.float32)
    return gl.sum(squares, 1)


@gluon.jit
def _rms_factor(row_squares, size, eps):
    """What the RMS norm multiplies a row by, of its `_row_squares`."""
    return gl.rsqrt(gl.sum(row_squares, 0) / size + eps)


@gluon.jit
def _times(parts, factor, weights, OFFSET: gl.constexpr):
    """A row in float32, times `factor` and the weights of a norm."""
    done = ()
    for i in gl.static_range(len(parts)):
        values = parts[i].to(gl.float32) * factor * (weights[i].to(gl.float32) + OFFSET)
        done += (values,)  # type: ignore[assignment]
    return done


@gluon.jit
def normed_row(parts, weights, size, eps, OFFSET: gl.constexpr):
    """The RMS norm of a row; the row itself if the norm has no weights, that is, there is none."""
    if len(weights) > 0:
        parts = _times(parts, _rms_factor(_row_squares(parts), size, eps), weights, OFFSET)
    return parts


@gluon.jit
def stream_parts(
    x,
    residual,
    total,
    branch_weights,
    size,
    eps,
    OFFSET: gl.constexpr,
    LOADS: gl.constexpr,
    WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """The parts of x, or of what it or its norm is added to, as of DeferredNorm."""
    # What is used last is asked for first: all is, then, before a sum, for which threads wait.
    before = parts_of(residual, size, LOADS, WIDTH, LAYOUT)
    parts = parts_of(x, size, LOADS, WIDTH, LAYOUT)
    parts = normed_row(parts, branch_weights, size, eps, OFFSET)
    if residual is not None:
        sums = ()
        for i in gl.static_range(LOADS):
            # The sum is rounded before it is normalised: later layers see the same numbers.
            value = (parts[i].to(gl.float32) + before[i].to(gl.float32)).to(before[i].dtype)
            sums += (value,)  # type: ignore[assignment]
        parts = sums
        if gl.program_id(0) == 0:
            for i in gl.static_range(LOADS):
                place = _place(i, WIDTH, LAYOUT)
                gl.store(total + place, parts[i], mask=place < size)
    return parts


@gluon.jit
def _largest(parts, FOLD: gl.constexpr):
    """[PART_PIECES]: the largest of the sizes of each piece and of those that are the same column,
    which are FOLD apart. All of them are in one warp, so that none waits for another one."""
    sizes = gl.abs(parts[0].to(gl.float32))
    for i in gl.static_range(1, len(parts)):
        sizes = gl.maximum(sizes, gl.abs(parts[i].to(gl.float32)))
    of_pieces = gl.max(sizes, 1)
    by_column = of_pieces.reshape([PART_PIECES // FOLD, FOLD])
    by_column = gl.maximum(by_column, gl.max(by_column, 0)[None, :])
    return gl.convert_layout(by_column.reshape([PART_PIECES]), of_pieces.type.layout)


@gluon.jit
def _store_in_two(part, factors, target):
    """Write the two numbers of each input of a part, times a factor for each piece: those of a
    piece are neighbouring rows."""
    high, low = in_two(part.to(gl.float32) * factors[:, None])
    both = gl.join(high, low).permute((0, 2, 1))
    target.store(both.reshape([2 * part.shape[0], part.shape[1]]))


@gluon.jit
def first_row(unit, ROWS: gl.constexpr):
    """The first of the rows that a program takes together."""
    return (gl.program_id(0) + unit * gl.num_programs(0)) * ROWS


@gluon.jit
def _row_scales(
    scales,
    first,
    num_rows,
    block_rows,
    stride,
    UNITS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """The scales of the rows that the program takes, float32 [UNITS * ROWS]; first: where W, or its
    half, begins."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place = gl.arange(0, UNITS * ROWS, layout=LAYOUT)
    rows = gl.minimum(first_row(place // ROWS, ROWS) + place % ROWS, num_rows - 1)
    return gl.load(scales + (first + rows) // block_rows * stride)


@gluon.jit
def _by_row(acc, factors, FOLD: gl.constexpr):
    """[rows]: the sums of the products of pieces with the pieces of x that they belong to, times
    what columns are to be multiplied by, if that is given."""
    LAYOUT: gl.constexpr = acc.type.layout
    EACH: gl.constexpr = acc.shape[1] // FOLD  # numbers of an input
    piece = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT)) % FOLD
    column = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT)) // EACH
    if factors is not None:
        acc = acc * factors[None, :]
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
    scales,
    bias,
    out,
    num_rows,
    size,
    block_rows,
    scale_stride,
    eps,
    OFFSET: gl.constexpr,
    STAGES: gl.constexpr,
    PAUSE: gl.constexpr,
    LOADS: gl.constexpr,
    UNITS: gl.constexpr,
    BLOCKS: gl.constexpr,
    SPAN: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_GROUPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_rows].

    Args:
        weight: descriptor of W [num_rows or 2 * num_rows, pieces, inputs of a piece].
        scales: of a weight in e4m3, for each `block_rows` rows.
        PAUSE: what is done between loads before the wait, in PTX.
        LOADS: parts in which x is loaded.
        UNITS: at least as many as times that a program takes ROWS rows.
        BLOCKS: blocks of a row of W.
        SPAN: those of them that tensor cores add up.
        HAS_GROUPS: whether each piece has scales of its own.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALVES: gl.constexpr = 2 if GATED else 1
    ROWS: gl.constexpr = weight.block_type.shape[0]
    FOLD: gl.constexpr = weight.block_type.shape[1]
    WIDTH: gl.constexpr = weight.block_type.shape[2]
    DTYPE: gl.constexpr = weight.dtype
    BITS: gl.constexpr = 8 * _PIECE // WIDTH
    EACH: gl.constexpr = 1 if scales is None else 2  # numbers of an input
    LANES: gl.constexpr = WIDTH // 8
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(_PIECE, BITS, 2)
    PARTS: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[gl.num_warps(), 1],
        instr_shape=[16, EACH * FOLD, 256 // BITS],
    )
    tiles = gl.allocate_shared_memory(DTYPE, [STAGES * HALVES, ROWS, FOLD, WIDTH], weight.layout)
    x_parts = gl.allocate_shared_memory(DTYPE, [LOADS, EACH * PART_PIECES, WIDTH], WHOLE)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if scales is not None:
        row_squares = gl.allocate_shared_memory(gl.float32, [PART_PIECES], FLAT)
        column_scales = gl.allocate_shared_memory(gl.float32, [EACH * PART_PIECES], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    LEFT: gl.constexpr = [STAGES * HALVES, ROWS * FOLD, WIDTH]
    RIGHT: gl.constexpr = [LOADS * PART_PIECES // FOLD, EACH * FOLD, WIDTH]
    left = reinterpreted(tiles, LEFT, WHOLE)
    right = reinterpreted(x_parts, RIGHT, WHOLE)
    for each in gl.static_range(STAGES):
        mbarrier.init(ready.index(each), count=1)
    fence_async_shared()
    num_units = gl.cdiv(gl.cdiv(num_rows, ROWS) - gl.program_id(0), gl.num_programs(0))
    HAS_ROW_SCALES: gl.constexpr = scales is not None and not HAS_GROUPS
    if HAS_ROW_SCALES:  # loaded when products are there, they would be waited for in each unit
        scale_halves = gl.allocate_shared_memory(gl.float32, [HALVES, UNITS * ROWS], FLAT)
        scale_rows = reinterpreted(scale_halves, [HALVES * UNITS, ROWS], FLAT)
        own_scales = _row_scales(scales, 0, num_rows, block_rows, scale_stride, UNITS, ROWS)
        up_scales = own_scales
        if GATED:
            up_scales = _row_scales(
                scales, num_rows, num_rows, block_rows, scale_stride, UNITS, ROWS
            )
    count = num_units * BLOCKS
    row = gl.program_id(0) * ROWS
    piece = 0
    for stage in range(gl.minimum(count, STAGES)):
        _fetch(weight, tiles, ready, stage, row, piece, num_rows, GATED)
        row, piece = next_place(row, piece, FOLD, BLOCKS, ROWS)
        if PDL:
            gl.inline_asm_elementwise(PAUSE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    weights = parts_of(norm_weight, size, LOADS, WIDTH, PARTS)
    branch_weights = parts_of(branch_weight, size, LOADS, WIDTH, PARTS)
    if HAS_ROW_SCALES:
        scale_halves.index(0).store(own_scales)
        if GATED:
            scale_halves.index(1).store(up_scales)
    if PDL:
        tl.extra.cuda.gdc_wait()
    parts = stream_parts(x, residual, total, branch_weights, size, eps, OFFSET, LOADS, WIDTH, PARTS)
    if scales is None:
        parts = normed_row(parts, weights, size, eps, OFFSET)
        for i in gl.static_range(LOADS):
            x_parts.index(i).store(parts[i].to(DTYPE))
    else:
        # What takes all of the row, results are multiplied by: warps wait for each other only once.
        if norm_weight is not None:
            row_squares.store(_row_squares(parts))
            parts = _times(parts, 1.0, weights, OFFSET)
        piece_factors, piece_scales = scales_of_two(_largest(parts, FOLD))
        for i in gl.static_range(LOADS):
            _store_in_two(parts[i], piece_factors, x_parts.index(i))
        column_scales.store(gl.join(piece_scales, piece_scales).reshape([EACH * PART_PIECES]))
    fence_async_shared()
    sync_threads()
    column_factors = None
    if scales is not None:
        of_columns = reinterpreted(column_scales, [PART_PIECES // FOLD, EACH * FOLD], FLAT)
        column_factors = of_columns.index(0).load(gl.SliceLayout(0, SUMS))
        if norm_weight is not None:
            ALL: gl.constexpr = gl.BlockedLayout([PART_PIECES], [32], [gl.num_warps()], [0])
            column_factors *= _rms_factor(row_squares.load(ALL), size, eps)
    none = gl.zeros([ROWS * FOLD, EACH * FOLD], gl.float32, SUMS)
    sum_row = gl.arange(0, ROWS * FOLD, layout=gl.SliceLayout(1, SUMS))
    missing = count - STAGES  # blocks that are not asked for
    stage = 0
    phase = 0
    before = STAGES - 1
    for unit in range(num_units):
        if HAS_GROUPS:
            own_rows = gl.minimum(first_row(unit, ROWS) + sum_row // FOLD, num_rows - 1)
            own_scales = scales + own_rows // block_rows * scale_stride
            up_scales = scales + (num_rows + own_rows) // block_rows * scale_stride
        sums = none
        up_sums = none
        for start in range(0, BLOCKS, SPAN):
            acc = none
            up = none
            if HAS_GROUPS:  # asked for before the products that they belong to
                group = gl.minimum(start * FOLD + sum_row % FOLD, size // WIDTH - 1)
                scale = gl.load(own_scales + group)
                up_scale = gl.load(up_scales + group) if GATED else scale
            for block in range(start, gl.minimum(start + SPAN, BLOCKS)):
                mbarrier.wait(ready.index(stage), phase)
                inputs = right.index(block).permute((1, 0))
                acc = warpgroup_mma(left.index(stage * HALVES), inputs, acc, is_async=True)
                if GATED:
                    up = warpgroup_mma(left.index(stage * HALVES + 1), inputs, up, is_async=True)
                    acc, up = warpgroup_mma_wait(2, deps=[acc, up])
                else:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                if (missing > 0) & (unit + block > 0):
                    sync_threads()  # All warps are done with the block before: its place is free.
                    _fetch(weight, tiles, ready, before, row, piece, num_rows, GATED)
                    row, piece = next_place(row, piece, FOLD, BLOCKS, ROWS)
                    missing -= 1
                before = stage
                is_end = stage == STAGES - 1
                stage = gl.where(is_end, 0, stage + 1)
                phase = gl.where(is_end, 1 - phase, phase)
            if GATED:
                acc, up = warpgroup_mma_wait(0, deps=[acc, up])
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            if HAS_GROUPS:
                acc = acc * scale[:, None]
                up = up * up_scale[:, None]
            sums = acc if SPAN == BLOCKS else sums + acc
            up_sums = up if SPAN == BLOCKS else up_sums + up
        y = _by_row(sums, column_factors, FOLD)
        if HAS_ROW_SCALES:
            y *= scale_rows.index(unit).load(y.type.layout)
        rows = first_row(unit, ROWS) + gl.arange(0, ROWS, layout=y.type.layout)
        if HAS_BIAS:
            y += gl.load(bias + rows, mask=rows < num_rows, other=0.0).to(gl.float32)
        if GATED:
            ups = _by_row(up_sums, column_factors, FOLD)
            if HAS_ROW_SCALES:
                ups *= scale_rows.index(UNITS + unit).load(y.type.layout)
            if HAS_BIAS:
                shift = gl.load(bias + num_rows + rows, mask=rows < num_rows, other=0.0)
                ups += shift.to(gl.float32)
            y = activate_gated(y, ups, EPILOGUE)
        else:
            y = activate(y, EPILOGUE)
        gl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < num_rows)
