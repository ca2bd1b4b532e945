"""y = x W^T of one token with W in packed integers of 4 bits, by as many programs as there are SMs.

As linear_ring.py: rows of W pass through a ring in shared memory, which is filled before the
preceding kernels have ended, and of a block's rows FOLD neighbouring pieces are rows of the tensor
cores' left operand. As in linear_hopper_packed.py, three instructions make eight weights integers
of 8 bits in the registers of that operand, and inputs are two such integers each, with a scale for
each piece of 128. So sums of a piece are exact, and multiplied by the scales of its group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
from octavo.ops.cuda.linear_hopper_packed import (
    LINE,
    _both,
    _by_group,
    _columns,
    _left,
    packed_descriptor,
)
from octavo.ops.cuda.linear_hopper_quantized import _IS_PUBLIC
from octavo.ops.cuda.linear_ring import _first_row, _inputs, _parts
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.quantize import _LARGEST, _ROUNDER, _SMALLEST
from octavo.ops.cuda.stored_weights import BLOCK, INT4, StoredWeight
from octavo.ops.cuda.tile_sizes import num_sms
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import DeferredNorm

ROWS, FOLD = 8, 8  # of a block: rows of W, or of each half, and pieces of each
_ROWS, _FOLD = tl.constexpr(ROWS), tl.constexpr(FOLD)
_LINES = tl.constexpr(FOLD * BLOCK // 8 // LINE)  # of a row in a block
_LINE = tl.constexpr(LINE)
_PIECE = tl.constexpr(BLOCK)
_PIECE_ROWS = tl.constexpr(16)  # pieces of x that are loaded at once
# Bytes, and bytes of gates and ups, as in linear_ring.py.
_MEMORY, _GATED_MEMORY = 94 << 10, 103 << 10
_PAUSE, _PAUSED_BYTES = 150, 8 << 10  # nanoseconds, and for how many bytes
_MOST_STAGES = 12
_FEWEST_ROWS, _MOST_INPUTS = 1024, 20480


@dataclass(frozen=True, slots=True)
class PackedRing:
    """What a program of the kernel takes."""

    blocks: int  # of FOLD pieces of ROWS rows, or of each half, in a stage
    stages: int  # in shared memory
    pause: int  # nanoseconds after each stage that is loaded before the wait


def takes_packed_ring(stored: StoredWeight) -> bool:
    """Whether the kernel takes W, and its programs have enough to do."""
    num_rows, size = stored.shape
    has_lines = size % (2 * BLOCK) == 0 and num_rows % 8 == 0
    is_served = stored.format == INT4 and stored.group == BLOCK and has_lines
    return is_served and num_rows >= _FEWEST_ROWS and size <= _MOST_INPUTS


@cache
def choose_packed_ring(size: int, is_gated: bool, has_zeros: bool) -> PackedRing:
    """For rows of so many inputs, half of which are gates with `is_gated`."""
    num_blocks = triton.cdiv(size, FOLD * BLOCK)
    most = 2 if is_gated else 4
    blocks = min(  # so that the fewest have no inputs
        (each for each in (4, 2, 1) if each <= most),
        key=lambda each: triton.cdiv(num_blocks, each) * each,
    )
    halves = 2 if is_gated else 1
    memory = _GATED_MEMORY if is_gated else _MEMORY
    part = _PIECE_ROWS.value * BLOCK
    memory -= (2 * part + 8 * _PIECE_ROWS.value) * triton.cdiv(size, part)
    words = blocks * halves * ROWS * FOLD * BLOCK // 2
    of_groups = blocks * halves * ROWS * FOLD * (4 if has_zeros else 2)
    stages = min(memory // (words + of_groups), _MOST_STAGES)
    return PackedRing(blocks, stages, _PAUSE * words // _PAUSED_BYTES)


def linear_by_packed_ring(
    x: Tensor | DeferredNorm, stored: StoredWeight, bias: Tensor | None, epilogue: Epilogue
) -> Tensor:
    """`linear_ring_packed` with a program for each SM, and the ring that is chosen for W."""
    ring = choose_packed_ring(stored.shape[1], epilogue.is_gated, stored.zeros is not None)
    return linear_ring_packed(x, stored, bias, epilogue, ring, num_sms(stored.weight.device))


def linear_ring_packed(
    x: Tensor | DeferredNorm,
    stored: StoredWeight,
    bias: Tensor | None,
    epilogue: Epilogue,
    ring: PackedRing,
    num_programs: int,
) -> Tensor:
    """epilogue(x W^T + b) of x [1, size]: [1, num_rows].

    x: bfloat16 or float16, or what its norm is computed from.
    stored: of 4 bits with a scale for each 128 inputs; size a multiple of 256, rows of 8.
    """
    norm = x if isinstance(x, DeferredNorm) else None
    x = x.x if isinstance(x, DeferredNorm) else x
    assert x.stride(1) == 1
    num_rows, size = stored.shape
    num_rows //= 2 if epilogue.is_gated else 1
    out = x.new_empty((1, num_rows))
    words = stored.weight.view(stored.shape[0], -1, LINE)
    of_groups = [ring.blocks * FOLD, ROWS]
    _linear_ring_packed_kernel[(num_programs,)](
        x,
        None if norm is None else norm.weight,
        None if norm is None else norm.residual,
        None if norm is None else norm.total,
        None if norm is None else norm.branch_weight,
        packed_descriptor(words, [ROWS, ring.blocks * _LINES.value, LINE], 128),
        packed_descriptor(_by_group(stored.scales, stored), of_groups, 0),
        None
        if stored.zeros is None
        else packed_descriptor(_by_group(stored.zeros, stored), of_groups, 0),
        bias,
        out,
        num_rows,
        size,
        0.0 if norm is None else norm.eps,
        OFFSET=0.0 if norm is None else norm.offset,
        STAGES=ring.stages,
        BLOCKS=ring.blocks,
        STEPS=triton.cdiv(size, ring.blocks * FOLD * BLOCK),
        PAUSE=f"nanosleep.u32 {ring.pause}; mov.b32 $0, 0;",
        LOADS=triton.cdiv(triton.cdiv(size, ring.blocks * FOLD * BLOCK) * ring.blocks, 2),
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        num_warps=4,
        **launch_options(x.device),
    )
    return out


@gluon.jit
def _fetch(sources, buffers, ready, stage, row, step, num_rows, GATED: gl.constexpr):
    """Load a stage."""
    weight, scales, zeros = sources
    tiles, scale_tiles, zero_tiles = buffers
    HALVES: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = (
        weight.block_type.nbytes
        + scales.block_type.nbytes
        + (0 if zeros is None else zeros.block_type.nbytes)
    )
    LINES: gl.constexpr = weight.block_type.shape[1]
    GROUPS: gl.constexpr = scales.block_type.shape[0]
    bar = ready.index(stage)
    mbarrier.expect(bar, HALVES * BYTES)
    for half in gl.static_range(HALVES):
        own = row + half * num_rows
        target = stage * HALVES + half
        _fetch_tile(weight, [own, step * LINES, 0], bar, tiles.index(target))
        _fetch_tile(scales, [step * GROUPS, own], bar, scale_tiles.index(target))
        if zeros is not None:
            _fetch_tile(zeros, [step * GROUPS, own], bar, zero_tiles.index(target))


@gluon.jit
def _following(row, step, STEPS: gl.constexpr):
    """Where the program's next stage is."""
    is_last = step == STEPS - 1
    return gl.where(is_last, row + gl.num_programs(0) * _ROWS, row), gl.where(is_last, 0, step + 1)


@gluon.jit
def _words(tiles, place, BLOCKS: gl.constexpr):
    """The words of a stage: of each block [rows * pieces, 16]."""
    LINES: gl.constexpr = _LINES * BLOCKS  # of a row
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [LINES, 0]]
        + ([[_LINES, 0]] if BLOCKS > 1 else [])
        + ([[2 * _LINES, 0]] if BLOCKS > 2 else []),
        [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        [[2 * LINES, 0], [4 * LINES, 0]],
        [],
        [_ROWS * LINES, _LINE],
    )
    ONE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [_ROWS * _FOLD, 16],
    )
    words = tiles.index(place).load(LOADED).reshape([_ROWS, BLOCKS, _FOLD, 16])
    words = _columns(words.permute((0, 2, 3, 1)).reshape([_ROWS * _FOLD * 16, BLOCKS]))
    found = ()
    for i in gl.static_range(BLOCKS):
        one = words[i].reshape([_ROWS * _FOLD, 16])
        found += (gl.convert_layout(one, ONE, assert_trivial=True),)  # type: ignore[assignment]
    return found


@gluon.jit
def _of_groups(tiles, place, LAYOUT: gl.constexpr):
    """Scales or zero points of a stage: of each block, float32 [rows * pieces]."""
    BLOCKS: gl.constexpr = tiles.shape[1] // _FOLD
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1]] + ([[8, 0]] if BLOCKS > 1 else []) + ([[16, 0]] if BLOCKS > 2 else []),
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[0, 2], [0, 4]],
        [],
        [BLOCKS * _FOLD, _ROWS],
    )
    values = tiles.index(place).load(LOADED).to(gl.float32).reshape([BLOCKS, _FOLD, _ROWS])
    values = _columns(values.permute((2, 1, 0)).reshape([_ROWS * _FOLD, BLOCKS]))
    found = ()
    for i in gl.static_range(BLOCKS):
        one = gl.convert_layout(values[i], gl.SliceLayout(1, LAYOUT), assert_trivial=True)
        found += (one,)  # type: ignore[assignment]
    return found


@gluon.jit
def _of_pieces(tiles, step, LAYOUT: gl.constexpr):
    """Scales or totals of the pieces of x in a stage, float32 [rows * pieces] of each block."""
    BLOCKS: gl.constexpr = tiles.shape[1] // _FOLD
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        ([[8]] if BLOCKS > 1 else []) + ([[16]] if BLOCKS > 2 else []),
        [[0], [0], [1], [2], [4]],
        [[0], [0]],
        [],
        [BLOCKS * _FOLD],
    )
    none = gl.zeros([_ROWS * _FOLD], gl.float32, gl.SliceLayout(1, LAYOUT))
    by_row = none.reshape([_ROWS, _FOLD])
    OF_PIECE: gl.constexpr = gl.SliceLayout(0, by_row.type.layout)
    values = tiles.index(step).load(LOADED).reshape([BLOCKS, _FOLD])
    values = _columns(values.permute((1, 0)))
    found = ()
    for i in gl.static_range(BLOCKS):
        one = gl.convert_layout(values[i], OF_PIECE, assert_trivial=True)
        spread = (by_row + one[None, :]).reshape([_ROWS * _FOLD])
        spread = gl.convert_layout(spread, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
        found += (spread,)  # type: ignore[assignment]
    return found


@gluon.jit
def _store_integers(part, target, scale_target, total_target):
    """Write both integers of each input of a part [pieces, 128], those of a piece as neighbouring
    rows, in the order that words are unpacked in; and the scales and totals of pieces."""
    exact = part.to(gl.float32)
    sizes = exact.to(gl.int32, bitcast=True) & 0x7FFFFFFF  # in the order of numbers, NaN above all
    largest = gl.maximum(gl.max(sizes, 1), _SMALLEST).to(gl.float32, bitcast=True)
    sums = exact * (_LARGEST / largest)[:, None] + _ROUNDER
    bits = sums.to(gl.int32, bitcast=True)
    both = gl.join((bits >> 8).to(gl.int8), (bits ^ 0x80).to(gl.int8))
    PIECES: gl.constexpr = part.shape[0]
    places = both.reshape([PIECES, 2, 2, 2, 4, 2, 2, 2]).permute((0, 7, 1, 5, 3, 4, 6, 2))
    target.store(places.reshape([2 * PIECES, _PIECE]))
    scales = largest / _LARGEST
    scale_target.store(scales)
    total_target.store(gl.sum(sums - _ROUNDER, 1) * scales)


@gluon.jit
def _by_row(acc):
    """[rows]: what rows of W add up to, of [rows * pieces]."""
    return gl.sum(acc.reshape([_ROWS, _FOLD]), 1)


@gluon.jit
def _linear_ring_packed_kernel(
    x,
    norm_weight,
    residual,
    total,
    branch_weight,
    weight,
    scales,
    zeros,
    bias,
    out,
    num_rows,
    size,
    eps,
    OFFSET: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    STEPS: gl.constexpr,
    PAUSE: gl.constexpr,
    LOADS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_rows].

    Args:
        weight: descriptor of words [num_rows or 2 * num_rows, lines, words of a line].
        scales, zeros: descriptors of [pieces, num_rows or 2 * num_rows]; zeros may be None.
        BLOCKS: of a stage.
        STEPS: stages of a row.
        PAUSE: what is done between loads before the wait, in PTX.
        LOADS: parts in which x is loaded.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALVES: gl.constexpr = 2 if GATED else 1
    M: gl.constexpr = _ROWS * _FOLD
    PARTS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 32], [8, 0]],
        [[0, 4], [0, 8], [0, 16], [0, 64], [1, 0]],
        [[2, 0], [4, 0]],
        [],
        [_PIECE_ROWS, _PIECE],
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 2 * _FOLD, 32]
    )
    OF_WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    OF_X: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LINES: gl.constexpr = _LINES * BLOCKS
    tiles = gl.allocate_shared_memory(
        gl.int32, [STAGES * HALVES, _ROWS, LINES, _LINE], weight.layout
    )
    scale_tiles = gl.allocate_shared_memory(
        scales.dtype, [STAGES * HALVES, BLOCKS * _FOLD, _ROWS], scales.layout
    )
    zero_tiles = scale_tiles
    if zeros is not None:
        zero_tiles = gl.allocate_shared_memory(
            zeros.dtype, [STAGES * HALVES, BLOCKS * _FOLD, _ROWS], zeros.layout
        )
    x_parts = gl.allocate_shared_memory(gl.int8, [LOADS, 2 * _PIECE_ROWS, _PIECE], OF_X)
    x_scales = gl.allocate_shared_memory(gl.float32, [LOADS, _PIECE_ROWS], FLAT)
    x_totals = gl.allocate_shared_memory(gl.float32, [LOADS, _PIECE_ROWS], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    LEFT: gl.constexpr = [STAGES * HALVES, _ROWS * LINES, _LINE]
    RIGHT: gl.constexpr = [LOADS * _PIECE_ROWS // _FOLD, 2 * _FOLD, _PIECE]
    OF_STEPS: gl.constexpr = [LOADS * _PIECE_ROWS // (BLOCKS * _FOLD), BLOCKS * _FOLD]
    if _IS_PUBLIC:
        left = tiles.reinterpret(gl.int32, LEFT, OF_WORDS)
        right = x_parts.reinterpret(gl.int8, RIGHT, OF_X)
        piece_scales = x_scales.reinterpret(gl.float32, OF_STEPS, FLAT)
        piece_totals = x_totals.reinterpret(gl.float32, OF_STEPS, FLAT)
    else:
        left = tiles._reinterpret(gl.int32, LEFT, OF_WORDS)
        right = x_parts._reinterpret(gl.int8, RIGHT, OF_X)
        piece_scales = x_scales._reinterpret(gl.float32, OF_STEPS, FLAT)
        piece_totals = x_totals._reinterpret(gl.float32, OF_STEPS, FLAT)
    for each in gl.static_range(STAGES):
        mbarrier.init(ready.index(each), count=1)
    fence_async_shared()
    sources = (weight, scales, zeros)
    buffers = (tiles, scale_tiles, zero_tiles)
    num_units = gl.cdiv(gl.cdiv(num_rows, _ROWS) - gl.program_id(0), gl.num_programs(0))
    count = num_units * STEPS
    row = gl.program_id(0) * _ROWS
    step = 0
    for stage in range(gl.minimum(count, STAGES)):
        _fetch(sources, buffers, ready, stage, row, step, num_rows, GATED)
        row, step = _following(row, step, STEPS)
        if PDL:
            gl.inline_asm_elementwise(PAUSE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    weights = _parts(norm_weight, size, LOADS, _PIECE, PARTS)
    branch_weights = _parts(branch_weight, size, LOADS, _PIECE, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    parts = _inputs(
        x, residual, total, weights, branch_weights, size, eps, OFFSET, LOADS, _PIECE, PARTS
    )
    for i in gl.static_range(LOADS):
        _store_integers(parts[i], x_parts.index(i), x_scales.index(i), x_totals.index(i))
    fence_async_shared()
    _barrier()
    nothing = gl.zeros([M, 2 * _FOLD], gl.int32, SUMS)
    none = _both(nothing)
    ADDED: gl.constexpr = none.type.layout
    piece = gl.arange(0, M, layout=gl.SliceLayout(1, ADDED)) % _FOLD
    column = gl.arange(0, _FOLD, layout=gl.SliceLayout(0, ADDED))
    is_own = piece[:, None] == column[None, :]
    no_shift = gl.zeros([M], gl.float32, gl.SliceLayout(1, ADDED))
    missing = count - STAGES  # stages that are not asked for
    stage = 0
    phase = 0
    for unit in range(num_units):
        sums = none
        up_sums = none
        shift = no_shift
        up_shift = no_shift
        for own_step in range(STEPS):
            mbarrier.wait(ready.index(stage), phase)
            words = _words(left, stage * HALVES, BLOCKS)
            factors = _of_groups(scale_tiles, stage * HALVES, ADDED)
            of_x = _of_pieces(piece_scales, own_step, ADDED)
            if GATED:
                words += _words(left, stage * HALVES + 1, BLOCKS)
                factors += _of_groups(scale_tiles, stage * HALVES + 1, ADDED)
            if zeros is not None:
                totals = _of_pieces(piece_totals, own_step, ADDED)
                shifts = _of_groups(zero_tiles, stage * HALVES, ADDED)
                if GATED:
                    shifts += _of_groups(zero_tiles, stage * HALVES + 1, ADDED)
            products = ()
            for j in gl.static_range(HALVES * BLOCKS + 1):
                # A block is unpacked while the one before it is multiplied.
                if j < HALVES * BLOCKS:
                    inputs = right.index(own_step * BLOCKS + j % BLOCKS).permute((1, 0))
                    (unpacked,) = _left(words[j], SUMS, 1)
                    product = warpgroup_mma(
                        unpacked, inputs, nothing, use_acc=False, is_async=True
                    )
                    products += (product,)  # type: ignore[assignment]
                if j > 0:
                    done = _both(
                        warpgroup_mma_wait(
                            1 if j < HALVES * BLOCKS else 0, deps=[products[j - 1]]
                        )
                    )
                    factor = factors[j - 1] * of_x[(j - 1) % BLOCKS]
                    added = gl.where(is_own, done * factor[:, None], 0.0)
                    if j - 1 < BLOCKS:
                        sums = sums + added
                    else:
                        up_sums = up_sums + added
                    if zeros is not None:
                        moved = factors[j - 1] * shifts[j - 1] * totals[(j - 1) % BLOCKS]
                        if j - 1 < BLOCKS:
                            shift = shift + moved
                        else:
                            up_shift = up_shift + moved
            if missing > 0:
                _barrier()  # All warps are done with the stage: its place is free.
                _fetch(sources, buffers, ready, stage, row, step, num_rows, GATED)
                row, step = _following(row, step, STEPS)
                missing -= 1
            is_end = stage == STAGES - 1
            stage = gl.where(is_end, 0, stage + 1)
            phase = gl.where(is_end, 1 - phase, phase)
        # Weights are 16 times too large.
        y = _by_row(gl.sum(sums, 1) * 0.0625 - shift)
        rows = _first_row(unit, _ROWS) + gl.arange(0, _ROWS, layout=y.type.layout)
        if HAS_BIAS:
            y += gl.load(bias + rows, mask=rows < num_rows, other=0.0).to(gl.float32)
        if GATED:
            ups = _by_row(gl.sum(up_sums, 1) * 0.0625 - up_shift)
            if HAS_BIAS:
                up_bias = gl.load(bias + num_rows + rows, mask=rows < num_rows, other=0.0)
                ups += up_bias.to(gl.float32)
            y = _activate_gated(y, ups, EPILOGUE)
        else:
            y = _activate(y, EPILOGUE)
        gl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < num_rows)
