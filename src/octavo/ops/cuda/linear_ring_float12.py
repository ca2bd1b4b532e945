"""y = x W^T of one token with W in 12 bits (float12.py), by as many programs as there are SMs.

The design is that of linear_ring.py, with a quarter less to read: rings in shared memory, which are
filled before the preceding kernels have ended, and pieces of W's rows that are rows of the tensor
cores' left operand, of which each counts with one of the columns on the right.

Here the left operand is in registers, where weights are unpacked to bfloat16. A warp needs nothing
of the others for that, so its tensor cores multiply 16 rows of its own. The words of the next block
are on their way from shared memory meanwhile, and a block's place is free as soon as registers have
its words. Unpacked weights are not multiplied by their large power of two: inputs are by a part of
it, which leaves them in the range of bfloat16, and sums by the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from octavo.float12 import PIECE_INPUTS, PIECE_ROWS
from octavo.ops.cuda.float12 import (
    EXPONENT,
    MANTISSA,
    PIECE_WORDS,
    UNIT,
    Float12Weight,
)
from octavo.ops.cuda.linear_hopper import (
    _activate,
    _activate_gated,
    _barrier,
    _fetch_tile,
    swizzled_descriptor,
)
from octavo.ops.cuda.linear_hopper_quantized import reinterpreted, tiles_of_rows
from octavo.ops.cuda.linear_ring import _PIECE_ROWS as _PART_PIECES
from octavo.ops.cuda.linear_ring import (
    _first_row,
    _following,
    _inputs,
    _parts,
    most_units,
    norm_tensors,
    pause_for,
    ring_memory,
    useful_share,
)
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.tile_sizes import num_sms
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import DeferredNorm

_TILE_ROWS = tl.constexpr(64)  # of the left operand
_PIECE_INPUTS = tl.constexpr(PIECE_INPUTS)
_PIECE_ROWS = tl.constexpr(PIECE_ROWS)
_SIGNS = tl.constexpr(PIECE_WORDS // 3 * 2)  # words of a piece, before those with exponents
_INPUT_FACTOR = tl.constexpr(2.0**64)
_SUM_FACTOR = tl.constexpr(2.0 ** (UNIT - 64))


def _assembly() -> str:
    """PTX: words $4 and $5 with signs, and $6, which is $7, with their exponents, -> two bfloat16
    in each of $0 to $3, of which 2 c and 2 c + 1 are those of word c."""
    lines = [".reg .b32 s, e;"]
    for word in range(2):
        for i in range(2):
            signs, exponents = f"${4 + word}", "$6"
            if i > 0:
                lines.append(f"shf.l.wrap.b32 s, {signs}, {signs}, {8 * i};")
                signs = "s"
            if 2 * word + i > 0:
                lines.append(f"shf.l.wrap.b32 e, $6, $6, {4 * (2 * word + i)};")
                exponents = "e"
            lines += [
                f"and.b32 e, {exponents}, {EXPONENT:#x};",
                f"lop3.b32 ${2 * word + i}, {signs}, {MANTISSA:#x}, e, 0xEA;",
            ]
    return "{" + "\n".join(lines) + "}"


_TO_BFLOAT16 = tl.constexpr(_assembly())


@dataclass(frozen=True, slots=True)
class Float12Ring:
    """What a program of the kernel takes."""

    rows: int  # of W, or of each half, in a block: 8, or 4
    pieces: int  # of each: 8 or 16, at least 64 / rows
    stages: int  # blocks in shared memory
    pause: int  # nanoseconds after each block that is loaded before the wait


_MOST_STAGES = 13
_PAUSE, _PAUSED_BYTES = 150, 8192  # nanoseconds, and for how many bytes
# Rows and pieces. Blocks of the first tile are the largest, so that least is spent on waiting for
# them: others are taken only where they leave SMs or columns idle less often.
_TILES = ((8, 16), (8, 8), (4, 16))
_LEAST_GAIN = 1.05


@cache
def choose_float12_ring(num_rows: int, size: int, is_gated: bool, num_programs: int) -> Float12Ring:
    """For W [num_rows, size], half of whose rows are gates with `is_gated`."""
    halves = 2 if is_gated else 1

    def share(tile: tuple[int, int]) -> float:
        width = tile[1] * PIECE_INPUTS
        found = useful_share(num_rows // halves, size, tile[0], width, num_programs)
        return found * _LEAST_GAIN if tile == _TILES[0] else found

    rows, pieces = max(_TILES, key=share)
    nbytes = halves * pieces * rows * (4 * PIECE_WORDS // PIECE_ROWS)
    stages = ring_memory(size, PIECE_INPUTS, is_gated) // nbytes
    blocks = most_units(num_rows // halves, rows, num_programs)
    blocks *= triton.cdiv(size, pieces * PIECE_INPUTS)
    return Float12Ring(
        rows, pieces, min(stages, _MOST_STAGES, blocks), _PAUSE * nbytes // _PAUSED_BYTES
    )


def linear_one_float12(
    x: Tensor | DeferredNorm, weight: Float12Weight, bias: Tensor | None, epilogue: Epilogue
) -> Tensor:
    """`linear_ring_float12` with a program for each SM, and the ring that is chosen for W."""
    num_programs = num_sms(weight.words.device)
    ring = choose_float12_ring(*weight.shape, epilogue.is_gated, num_programs)
    return linear_ring_float12(x, weight, bias, epilogue, ring, num_programs)


def linear_ring_float12(
    x: Tensor | DeferredNorm,
    weight: Float12Weight,
    bias: Tensor | None,
    epilogue: Epilogue,
    ring: Float12Ring,
    num_programs: int,
) -> Tensor:
    """epilogue(x W^T + b) of x [1, size] in bfloat16: [1, num_rows].

    x: or what its norm is computed from.
    """
    norm = x if isinstance(x, DeferredNorm) else None
    x = x.x if isinstance(x, DeferredNorm) else x
    assert x.stride(1) == 1
    num_rows, size = weight.shape
    if epilogue.is_gated:
        num_rows //= 2
        assert num_rows % PIECE_ROWS == 0
    out = x.new_empty((1, num_rows), dtype=x.dtype if norm is None else norm.dtype)
    words = _SIGNS.value * ring.rows // PIECE_ROWS
    _linear_ring_float12_kernel[(num_programs,)](
        x,
        *norm_tensors(norm),
        swizzled_descriptor(weight.words, [1, ring.pieces, words], 0),
        swizzled_descriptor(weight.words, [1, ring.pieces, words // 2], 0),
        weight.scales,
        bias,
        out,
        num_rows,
        size,
        0.0 if norm is None else norm.eps,
        OFFSET=0.0 if norm is None else norm.offset,
        ROWS=ring.rows,
        STAGES=ring.stages,
        PAUSE=pause_for(ring.pause),
        LOADS=triton.cdiv(size, _PART_PIECES.value * PIECE_INPUTS),
        BLOCKS=triton.cdiv(size, ring.pieces * PIECE_INPUTS),
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        num_warps=4,
        **launch_options(x.device),
    )
    return out


@gluon.jit
def _fetch(signs, exponents, buffers, stage, row, piece, num_rows, GATED: gl.constexpr):
    """Load a block of W."""
    sign_tiles, exponent_tiles, ready = buffers
    HALVES: gl.constexpr = 2 if GATED else 1
    NBYTES: gl.constexpr = signs.block_type.nbytes + exponents.block_type.nbytes
    WORDS: gl.constexpr = signs.block_type.shape[2]
    mbarrier.expect(ready.index(stage), HALVES * NBYTES)
    for half in gl.static_range(HALVES):
        own = row + half * num_rows
        group = own // _PIECE_ROWS
        # Of a piece, a program of four rows takes the words of its first or its last 16 threads.
        place = own % _PIECE_ROWS * (_SIGNS // _PIECE_ROWS) if WORDS < _SIGNS else 0
        at = [group, piece, place]
        _fetch_tile(signs, at, ready.index(stage), sign_tiles.index(stage * HALVES + half))
        at = [group, piece, _SIGNS + place // 2]
        _fetch_tile(exponents, at, ready.index(stage), exponent_tiles.index(stage * HALVES + half))


@gluon.constexpr_function
def _layout(each: int, words: int, fold: int) -> gl.DistributedLinearLayout:
    """Where threads have the words of `fold` pieces: `each` neighbouring ones of a piece, and of
    one that belongs to the eighth row below in the left operand."""
    columns = [each << i for i in range((words // each).bit_length() - 1)]
    below = fold // 8  # pieces in eight rows
    return gl.DistributedLinearLayout(
        [[0, 1 << i] for i in range(each.bit_length() - 1)] + [[below, 0]],
        [[0, column] for column in columns] + [[1, 0]] * (below - 1),
        [[2 * below, 0], [4 * below, 0]],
        [],
        [fold, words],
    )


@gluon.jit
def _load(sign_tiles, exponent_tiles, stage, HALVES: gl.constexpr, FOLD: gl.constexpr):
    """A stage's words: for each half, for each FOLD pieces, those with signs and exponents."""
    PIECES: gl.constexpr = sign_tiles.shape[1]
    WORDS: gl.constexpr = sign_tiles.shape[2]
    SIGNS: gl.constexpr = _layout(4, WORDS, FOLD)
    EXPONENTS: gl.constexpr = _layout(2, WORDS // 2, FOLD)
    found = ()
    for half in gl.static_range(HALVES):
        of_signs = sign_tiles.index(stage * HALVES + half)
        of_exponents = exponent_tiles.index(stage * HALVES + half)
        for start in gl.static_range(0, PIECES, FOLD):
            found += (
                of_signs.slice(start, FOLD).load(SIGNS),
                of_exponents.slice(start, FOLD).load(EXPONENTS),
            )  # type: ignore[assignment]
    return found


@gluon.jit
def _unpacked(signs, exponents, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Words of pieces [FOLD, words] -> bfloat16 [FOLD * ROWS, inputs of a piece] / 2 ** UNIT, the
    tensor cores' left operand in registers; the rows of a piece are neighbours."""
    parts = gl.inline_asm_elementwise(
        _TO_BFLOAT16,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [signs, gl.join(exponents, exponents).reshape(signs.shape)],
        dtype=(gl.bfloat16,) * 4,
        is_pure=True,
        pack=2,
    )
    values = gl.join(gl.join(parts[0], parts[2]), gl.join(parts[1], parts[3]))
    # [piece, row, thread of the row, two words, place in the register, word of two, half of 16]
    values = values.reshape([signs.shape[0], ROWS, 4, 2, 2, 2, 2]).permute((0, 1, 3, 5, 6, 2, 4))
    values = values.reshape([_TILE_ROWS, _PIECE_INPUTS])
    return gl.convert_layout(values, gl.DotOperandLayout(0, LAYOUT, k_width=2), assert_trivial=True)


@gluon.jit
def _by_row(acc, ROWS: gl.constexpr):
    """[ROWS]: the sums of the products of pieces with the pieces of x that they belong to."""
    LAYOUT: gl.constexpr = acc.type.layout
    FOLD: gl.constexpr = acc.shape[1]
    piece = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT)) // ROWS
    column = gl.arange(0, FOLD, layout=gl.SliceLayout(0, LAYOUT))
    # Two sums: the lanes that one would go over, of columns and of pieces of four rows, are not
    # neighbours in a warp, and then Triton 3.6 adds up wrong ones.
    own = gl.sum(gl.where(piece[:, None] == column[None, :], acc, 0.0), 1)
    return gl.sum(own.reshape([FOLD, ROWS]), 0)


@gluon.jit
def _scales_of(scales, unit, num_rows, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Those of a unit's rows, for each row of the left operand."""
    row = gl.arange(0, _TILE_ROWS, layout=gl.SliceLayout(1, LAYOUT)) % ROWS
    return gl.load(scales + gl.minimum(_first_row(unit, ROWS) + row, num_rows - 1))


@gluon.jit
def _linear_ring_float12_kernel(
    x,
    norm_weight,
    residual,
    total,
    branch_weight,
    signs,
    exponents,
    scales,
    bias,
    out,
    num_rows,
    size,
    eps,
    OFFSET: gl.constexpr,
    ROWS: gl.constexpr,
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
        signs, exponents: descriptors of both kinds of words of W's pieces.
        scales: of each row of W.
        ROWS: of W, or of each half, in a block.
        PAUSE: what is done between loads before the wait, in PTX.
        LOADS: parts in which x is loaded.
        BLOCKS: blocks of a row of W.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALVES: gl.constexpr = 2 if GATED else 1
    FOLD: gl.constexpr = _TILE_ROWS // ROWS
    PIECES: gl.constexpr = signs.block_type.shape[1]
    TILES: gl.constexpr = PIECES // FOLD  # of the left operand, in a block of each half
    SIGNS: gl.constexpr = signs.block_type.shape[2]
    WIDTH: gl.constexpr = _PIECE_INPUTS
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PARTS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 8]
    )
    INPUTS: gl.constexpr = gl.DotOperandLayout(1, SUMS, k_width=2)
    sign_blocks = gl.allocate_shared_memory(
        gl.int32, [STAGES * HALVES, 1, PIECES, SIGNS], signs.layout
    )
    exponent_blocks = gl.allocate_shared_memory(
        gl.int32, [STAGES * HALVES, 1, PIECES, SIGNS // 2], exponents.layout
    )
    x_parts = gl.allocate_shared_memory(gl.bfloat16, [LOADS, _PART_PIECES, WIDTH], WHOLE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    FLAT: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    sign_tiles = reinterpreted(sign_blocks, [STAGES * HALVES, PIECES, SIGNS], FLAT)
    exponent_tiles = reinterpreted(exponent_blocks, [STAGES * HALVES, PIECES, SIGNS // 2], FLAT)
    right = tiles_of_rows(x_parts, FOLD)
    for each in gl.static_range(STAGES):
        mbarrier.init(ready.index(each), count=1)
    fence_async_shared()
    buffers = (sign_blocks, exponent_blocks, ready)
    num_units = gl.cdiv(gl.cdiv(num_rows, ROWS) - gl.program_id(0), gl.num_programs(0))
    count = num_units * BLOCKS
    row = gl.program_id(0) * ROWS
    piece = 0
    for stage in range(gl.minimum(count, STAGES)):
        _fetch(signs, exponents, buffers, stage, row, piece, num_rows, GATED)
        row, piece = _following(row, piece, PIECES, BLOCKS, ROWS)
        if PDL:
            gl.inline_asm_elementwise(PAUSE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    weights = _parts(norm_weight, size, LOADS, WIDTH, PARTS)
    branch_weights = _parts(branch_weight, size, LOADS, WIDTH, PARTS)
    scale = _scales_of(scales, 0, num_rows, ROWS, SUMS)
    up_scale = scale
    if GATED:
        up_scale = _scales_of(scales + num_rows, 0, num_rows, ROWS, SUMS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    parts = _inputs(
        x, residual, total, weights, branch_weights, size, eps, OFFSET, LOADS, WIDTH, PARTS
    )
    for i in gl.static_range(LOADS):
        rounded = parts[i].to(gl.bfloat16).to(gl.float32)
        x_parts.index(i).store((rounded * _INPUT_FACTOR).to(gl.bfloat16))
    _barrier()
    none = gl.zeros([_TILE_ROWS, FOLD], gl.float32, SUMS)
    missing = count - STAGES  # blocks that are not asked for
    following = 1  # block, of all of the program
    stage = 0
    phase = 0
    mbarrier.wait(ready.index(0), 0, pred=count > 0)
    words = _load(sign_tiles, exponent_tiles, 0, HALVES, FOLD)
    for unit in range(num_units):
        next_scale = _scales_of(scales, unit + 1, num_rows, ROWS, SUMS)
        next_up_scale = next_scale
        if GATED:
            next_up_scale = _scales_of(scales + num_rows, unit + 1, num_rows, ROWS, SUMS)
        acc = none
        other = none
        for block in range(BLOCKS):
            if missing > 0:
                _barrier()  # All warps have this block's words: its place is free.
                _fetch(signs, exponents, buffers, stage, row, piece, num_rows, GATED)
                row, piece = _following(row, piece, PIECES, BLOCKS, ROWS)
                missing -= 1
            is_end = stage == STAGES - 1
            stage = gl.where(is_end, 0, stage + 1)
            phase = gl.where(is_end, 1 - phase, phase)
            mbarrier.wait(ready.index(stage), phase, pred=following < count)
            following += 1
            next_words = _load(sign_tiles, exponent_tiles, stage, HALVES, FOLD)
            for i in gl.static_range(TILES):
                inputs = right.index(block * TILES + i).permute((1, 0)).load(INPUTS)
                left = _unpacked(words[2 * i], words[2 * i + 1], ROWS, SUMS)
                if GATED:
                    acc = mma_v2(left, inputs, acc)
                    left = _unpacked(words[2 * (TILES + i)], words[2 * (TILES + i) + 1], ROWS, SUMS)
                    other = mma_v2(left, inputs, other)
                elif i % 2 == 0:
                    acc = mma_v2(left, inputs, acc)
                else:
                    other = mma_v2(left, inputs, other)
            words = next_words
        if not GATED and TILES > 1:
            acc += other
        y = _by_row(acc * _SUM_FACTOR * scale[:, None], ROWS)
        rows = _first_row(unit, ROWS) + gl.arange(0, ROWS, layout=y.type.layout)
        if HAS_BIAS:
            y += gl.load(bias + rows, mask=rows < num_rows, other=0.0).to(gl.float32)
        if GATED:
            ups = _by_row(other * _SUM_FACTOR * up_scale[:, None], ROWS)
            if HAS_BIAS:
                shift = gl.load(bias + num_rows + rows, mask=rows < num_rows, other=0.0)
                ups += shift.to(gl.float32)
            y = _activate_gated(y, ups, EPILOGUE)
        else:
            y = _activate(y, EPILOGUE)
        gl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < num_rows)
        scale = next_scale
        up_scale = next_up_scale
