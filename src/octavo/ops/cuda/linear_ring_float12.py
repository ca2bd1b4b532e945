"""y = x W^T of one token with W in 12 bits (float12.py), by as many programs as there are SMs.

The design is that of linear_ring.py, with a quarter less to read: rings in shared memory, which are
filled before the preceding kernels have ended, and pieces of W's rows that are rows of the tensor
cores' left operand, of which each counts with one of the columns on the right.

Here the left operand is in registers, where weights are unpacked to bfloat16. A warp needs nothing
of the others for that, so its tensor cores multiply 16 rows of its own. A fifth warp loads W: those
that multiply meet once for each block, at the barrier that Triton puts before the wait for it, and
their sums are not added up before the end, when those of all rows are. Unpacked weights are not
multiplied by their large power of two: inputs are by a part of it, which leaves them in the range
of bfloat16, and sums by the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from octavo.float12 import PIECE_INPUTS, PIECE_ROWS
from octavo.ops.cuda.devices import num_sms
from octavo.ops.cuda.epilogues import activate, activate_gated
from octavo.ops.cuda.float12 import (
    EXPONENT,
    MANTISSA,
    PIECE_WORDS,
    UNIT,
    Float12Weight,
)
from octavo.ops.cuda.hopper import (
    fetch_tile,
    reinterpreted,
    swizzled_descriptor,
    sync_threads,
    tiles_of_rows,
)
from octavo.ops.cuda.linear_ring import (
    PART_PIECES,
    first_row,
    most_units,
    next_place,
    norm_tensors,
    normed_row,
    parts_of,
    pause_for,
    ring_memory,
    stream_parts,
    useful_share,
)
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.tile_sizes import SM_REGISTERS, power_of_2
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import DeferredNorm

FOLD = 8  # pieces of x
SIGNS = PIECE_WORDS // 3 * 2  # words of a piece, before those with exponents
INPUT_FACTOR, SUM_FACTOR = 2.0**64, 2.0 ** (UNIT - 64)

_FOLD, _SIGNS = tl.constexpr(FOLD), tl.constexpr(SIGNS)
_PIECE_INPUTS = tl.constexpr(PIECE_INPUTS)
_PIECE_ROWS = tl.constexpr(PIECE_ROWS)
_INPUT_FACTOR, _SUM_FACTOR = tl.constexpr(INPUT_FACTOR), tl.constexpr(SUM_FACTOR)


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

    rows: int  # of W, or of each half, in a block: 8 or 16
    pieces: int  # of each: a multiple of 8
    stages: int  # blocks in shared memory
    pause: int  # nanoseconds after each block that is loaded before the wait


_WARPS = 4  # that multiply
_FEWEST_STAGES, _MOST_STAGES = 2, 13
_SMALL_SUMS = 4096  # bytes of warps' sums that fit beside rings of such memory, and attention
_PAUSE, _PAUSED_BYTES = 150, 8192  # nanoseconds, and for how many bytes
# Registers of each thread in twice four warps: what the warps that load do not need goes to the
# others, which need 72. With more than a 512th of an SM's registers each SM has one such program;
# where two find room, some SMs get two of a product, and all others wait for them.
_REGISTERS, _LOADING_REGISTERS = SM_REGISTERS // 2 // (2 * 32 * _WARPS) + 8, 24
# Rows and pieces. The second one is taken where the first would leave SMs or columns idle.
_TILES = ((8, 16), (16, 8))
_LEAST_GAIN = 1.05


@cache
def choose_float12_ring(
    num_rows: int, size: int, is_gated: bool, num_programs: int
) -> Float12Ring | None:
    """For W [num_rows, size], half of whose rows are gates with `is_gated`. None: programs have so
    many rows that their sums leave no room for a ring."""
    halves = 2 if is_gated else 1

    def share(tile: tuple[int, int]) -> float:
        width = tile[1] * PIECE_INPUTS
        found = useful_share(num_rows // halves, size, tile[0], width, num_programs)
        return found * _LEAST_GAIN if tile == _TILES[0] else found

    rows, pieces = max(_TILES, key=share)
    nbytes = halves * pieces * rows * (4 * PIECE_WORDS // PIECE_ROWS)
    units = most_units(num_rows // halves, rows, num_programs)
    of_sums = 4 * _WARPS * halves * rows * power_of_2(units)
    memory = ring_memory(size, PIECE_INPUTS, is_gated) - max(0, of_sums - _SMALL_SUMS)
    stages = memory // nbytes
    if stages < _FEWEST_STAGES:
        return None
    blocks = units * triton.cdiv(size, pieces * PIECE_INPUTS)
    return Float12Ring(
        rows, pieces, min(stages, _MOST_STAGES, blocks), _PAUSE * nbytes // _PAUSED_BYTES
    )


def takes_one(weight: Float12Weight, epilogue: Epilogue) -> bool:
    """Whether `linear_one_float12` computes with W on its device."""
    num_programs = num_sms(weight.words.device)
    return choose_float12_ring(*weight.shape, epilogue.is_gated, num_programs) is not None


def linear_one_float12(
    x: Tensor | DeferredNorm, weight: Float12Weight, bias: Tensor | None, epilogue: Epilogue
) -> Tensor:
    """`linear_ring_float12` of a W that `takes_one` says, with a program for each SM and the ring
    that is chosen."""
    num_programs = num_sms(weight.words.device)
    ring = choose_float12_ring(*weight.shape, epilogue.is_gated, num_programs)
    assert ring is not None
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
    height = ring.rows // PIECE_ROWS
    num_blocks = triton.cdiv(size, ring.pieces * PIECE_INPUTS)
    _linear_ring_float12_kernel[(num_programs,)](
        x,
        *norm_tensors(norm),
        swizzled_descriptor(weight.words, [height, ring.pieces, _SIGNS.value], 0),
        swizzled_descriptor(weight.words, [height, ring.pieces, _SIGNS.value // 2], 0),
        weight.scales,
        bias,
        out,
        num_rows,
        size,
        0.0 if norm is None else norm.eps,
        OFFSET=0.0 if norm is None else norm.offset,
        STAGES=ring.stages,
        PAUSE=pause_for(ring.pause),
        LOADS=triton.cdiv(num_blocks * ring.pieces, PART_PIECES.value),
        BLOCKS=num_blocks,
        UNITS=power_of_2(most_units(num_rows, ring.rows, num_programs)),
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        LOADING_REGISTERS=_LOADING_REGISTERS,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        **launch_options(x.device),
    )
    return out


@gluon.jit
def _fetch(sources, buffers, ready, stage, group, piece, num_groups, GATED: gl.constexpr):
    """Load a block of W."""
    signs, exponents = sources
    sign_tiles, exponent_tiles = buffers
    HALVES: gl.constexpr = 2 if GATED else 1
    NBYTES: gl.constexpr = signs.block_type.nbytes + exponents.block_type.nbytes
    mbarrier.expect(ready.index(stage), HALVES * NBYTES)
    for half in gl.static_range(HALVES):
        place = stage * HALVES + half
        at = [group + half * num_groups, piece, 0]
        fetch_tile(signs, at, ready.index(stage), sign_tiles.index(place))
        at = [group + half * num_groups, piece, _SIGNS]
        fetch_tile(exponents, at, ready.index(stage), exponent_tiles.index(place))


@gluon.jit
def _produce(
    sources,
    buffers,
    barriers,
    count,
    num_groups,
    PAUSE: gl.constexpr,
    BLOCKS: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads W."""
    ready, free = barriers
    HEIGHT: gl.constexpr = sources[0].block_type.shape[0]
    PIECES: gl.constexpr = sources[0].block_type.shape[1]
    STAGES: gl.constexpr = ready.shape[0]
    group = gl.program_id(0) * HEIGHT
    piece = 0
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), (i // STAGES - 1) & 1, pred=i >= STAGES)
        _fetch(sources, buffers, ready, stage, group, piece, num_groups, GATED)
        group, piece = next_place(group, piece, PIECES, BLOCKS, HEIGHT)
        if PDL and i < STAGES:
            gl.inline_asm_elementwise(PAUSE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def words_layout(each: int, words: int) -> gl.DistributedLinearLayout:
    """Where threads have the words of eight pieces: `each` neighbouring ones of a piece, and of the
    next one, which belongs to the eighth row below in the left operand."""
    columns = [each << i for i in range((words // each).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1 << i] for i in range(each.bit_length() - 1)] + [[1, 0]],
        [[0, column] for column in columns],
        [[2, 0], [4, 0]],
        [],
        [FOLD, words],
    )


@gluon.jit
def _left(tiles, place, LAYOUT: gl.constexpr):
    """The left operand of the eight pieces at that place."""
    sign_tiles, exponent_tiles = tiles
    signs = sign_tiles.index(place).load(words_layout(4, _SIGNS))
    exponents = exponent_tiles.index(place).load(words_layout(2, _SIGNS // 2))
    return unpacked(signs, exponents, LAYOUT)


@gluon.jit
def unpacked(signs, exponents, LAYOUT: gl.constexpr):
    """The left operand that eight pieces are, of whose words threads have those of `words_layout`:
    bfloat16 [rows, inputs of a piece] / 2 ** UNIT, in registers; the rows of a piece are
    neighbours."""
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
    values = values.reshape([_FOLD, _PIECE_ROWS, 4, 2, 2, 2, 2]).permute((0, 1, 3, 5, 6, 2, 4))
    values = values.reshape([_FOLD * _PIECE_ROWS, _PIECE_INPUTS])
    return gl.convert_layout(values, gl.DotOperandLayout(0, LAYOUT, k_width=2), assert_trivial=True)


@gluon.jit
def _added(sums, place: gl.constexpr, left, right):
    """The sums with the product of left and right added to those at `place`."""
    found = ()
    for i in gl.static_range(len(sums)):
        found += (mma_v2(left, right, sums[i]) if i == place else sums[i],)  # type: ignore[assignment]
    return found


@gluon.jit
def of_own_inputs(acc):
    """[rows of eight pieces]: the products of pieces with the pieces of x that they belong to."""
    LAYOUT: gl.constexpr = acc.type.layout
    piece = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT)) // _PIECE_ROWS
    column = gl.arange(0, _FOLD, layout=gl.SliceLayout(0, LAYOUT))
    return gl.sum(gl.where(piece[:, None] == column[None, :], acc, 0.0), 1)


@gluon.jit
def _by_warp(acc):
    """[warps, rows of a piece]: the sums of each warp's such products."""
    WARPS: gl.constexpr = gl.num_warps()
    return gl.sum(of_own_inputs(acc).reshape([WARPS, _FOLD // WARPS, _PIECE_ROWS]), 1)


@gluon.jit
def _consume(
    source,
    norm_weights,
    scales,
    bias,
    out,
    tiles,
    x_parts,
    sums_of_warps,
    barriers,
    num_units,
    num_rows,
    size,
    eps,
    OFFSET: gl.constexpr,
    HEIGHT: gl.constexpr,
    TILES: gl.constexpr,
    BLOCKS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that makes the inputs, multiplies, and writes results."""
    x, residual, total = source
    norm_weight, branch_weight = norm_weights
    ready, free = barriers
    STAGES: gl.constexpr = ready.shape[0]
    LOADS: gl.constexpr = x_parts.shape[0]
    WIDTH: gl.constexpr = _PIECE_INPUTS
    HALVES: gl.constexpr = 2 if GATED else 1
    GROUPS: gl.constexpr = HALVES * HEIGHT
    OF_HALF: gl.constexpr = sums_of_warps.shape[1]
    # A product is not waited for by the next one, if it has sums of its own.
    SUMS: gl.constexpr = 2 if GROUPS == 1 and TILES > 1 else GROUPS
    PARTS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 8]
    )
    INPUTS: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, k_width=2)
    # A thread has the sums of four warps.
    ALL: gl.constexpr = gl.BlockedLayout([1, 4, 1], [4, 1, 8], [gl.num_warps(), 1, 1], [2, 1, 0])
    RESULTS: gl.constexpr = gl.SliceLayout(1, ALL)
    OF_GROUPS: gl.constexpr = [HALVES * OF_HALF, gl.num_warps(), _PIECE_ROWS]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums_of_groups = reinterpreted(sums_of_warps, OF_GROUPS, PLAIN)
    right = tiles_of_rows(x_parts, _FOLD)
    weights = parts_of(norm_weight, size, LOADS, WIDTH, PARTS)
    branch_weights = parts_of(branch_weight, size, LOADS, WIDTH, PARTS)
    own_group = gl.arange(0, OF_HALF, layout=gl.SliceLayout(1, RESULTS))
    place = gl.arange(0, _PIECE_ROWS, layout=gl.SliceLayout(0, RESULTS))
    first = first_row(own_group // HEIGHT, HEIGHT * _PIECE_ROWS)
    rows = (first + own_group % HEIGHT * _PIECE_ROWS)[:, None] + place[None, :]
    is_row = rows < num_rows
    factors = ()
    shifts = ()
    for half in gl.static_range(HALVES):
        of_half = half * num_rows + rows
        factors += (gl.load(scales + of_half, mask=is_row, other=0.0),)  # type: ignore[assignment]
        if HAS_BIAS:
            shifts += (gl.load(bias + of_half, mask=is_row, other=0.0),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
    parts = stream_parts(x, residual, total, branch_weights, size, eps, OFFSET, LOADS, WIDTH, PARTS)
    parts = normed_row(parts, weights, size, eps, OFFSET)
    for i in gl.static_range(LOADS):
        rounded = parts[i].to(gl.bfloat16).to(gl.float32)
        x_parts.index(i).store((rounded * _INPUT_FACTOR).to(gl.bfloat16))
    sync_threads()
    none = gl.zeros([_FOLD * _PIECE_ROWS, _FOLD], gl.float32, LAYOUT)
    stage = 0
    phase = 0
    for unit in range(num_units):
        sums = (none,) * SUMS
        for block in range(BLOCKS):
            mbarrier.wait(ready.index(stage), phase)
            for i in gl.static_range(TILES):
                inputs = right.index(block * TILES + i).permute((1, 0)).load(INPUTS)
                for group in gl.static_range(GROUPS):
                    left = _left(tiles, (stage * GROUPS + group) * TILES + i, LAYOUT)
                    sums = _added(sums, (i * GROUPS + group) % SUMS, left, inputs)
            # Each thread has its words: none waits for the others before the place is free. That
            # they are in registers by then is no promise of PTX, for which this arrival follows
            # asynchronous copies; a warp's instructions for shared memory are carried out in order.
            async_copy.mbarrier_arrive(free.index(stage), increment_count=False)
            is_end = stage == STAGES - 1
            stage = gl.where(is_end, 0, stage + 1)
            phase = gl.where(is_end, 1 - phase, phase)
        if SUMS > GROUPS:
            sums = (sums[0] + sums[1],)
        for half in gl.static_range(HALVES):
            for i in gl.static_range(HEIGHT):
                at = half * OF_HALF + unit * HEIGHT + i
                sums_of_groups.index(at).store(_by_warp(sums[half * HEIGHT + i]))
    sync_threads()
    halves = ()
    for half in gl.static_range(HALVES):
        y = gl.sum(sums_of_warps.index(half).load(ALL), 1)
        y = y * _SUM_FACTOR * factors[half]  # one after the other: their product may overflow
        if HAS_BIAS:
            y += shifts[half].to(gl.float32)
        halves += (y,)  # type: ignore[assignment]
    own = halves[0]  # type: ignore[misc]
    y = activate_gated(own, halves[1], EPILOGUE) if GATED else activate(own, EPILOGUE)  # type: ignore[misc]
    gl.store(out + rows, y.to(out.dtype.element_ty), mask=is_row)


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
    STAGES: gl.constexpr,
    PAUSE: gl.constexpr,
    LOADS: gl.constexpr,
    BLOCKS: gl.constexpr,
    UNITS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_rows].

    Args:
        signs, exponents: descriptors of both kinds of words of W's pieces.
        scales: of each row of W.
        PAUSE: what is done between loads before the wait, in PTX.
        LOADS: parts in which x is loaded.
        BLOCKS: blocks of a row of W.
        UNITS: at least as many as times that a program takes a block's rows.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALVES: gl.constexpr = 2 if GATED else 1
    HEIGHT: gl.constexpr = signs.block_type.shape[0]
    PIECES: gl.constexpr = signs.block_type.shape[1]
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    OF_SIGNS: gl.constexpr = [STAGES * HALVES, HEIGHT, PIECES, _SIGNS]
    OF_EXPONENTS: gl.constexpr = [STAGES * HALVES, HEIGHT, PIECES, _SIGNS // 2]
    sign_blocks = gl.allocate_shared_memory(gl.int32, OF_SIGNS, signs.layout)
    exponent_blocks = gl.allocate_shared_memory(gl.int32, OF_EXPONENTS, exponents.layout)
    NUM_TILES: gl.constexpr = STAGES * HALVES * HEIGHT * PIECES // _FOLD
    tiles = (
        reinterpreted(sign_blocks, [NUM_TILES, _FOLD, _SIGNS], FLAT),
        reinterpreted(exponent_blocks, [NUM_TILES, _FOLD, _SIGNS // 2], FLAT),
    )
    OF_WARPS: gl.constexpr = [HALVES, UNITS * HEIGHT, gl.num_warps(), _PIECE_ROWS]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    sums_of_warps = gl.allocate_shared_memory(gl.float32, OF_WARPS, PLAIN)
    x_parts = gl.allocate_shared_memory(gl.bfloat16, [LOADS, PART_PIECES, _PIECE_INPUTS], WHOLE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(STAGES):
        mbarrier.init(ready.index(each), count=1)
        mbarrier.init(free.index(each), count=32 * gl.num_warps())
    fence_async_shared()
    ROWS: gl.constexpr = HEIGHT * _PIECE_ROWS
    num_units = gl.cdiv(gl.cdiv(num_rows, ROWS) - gl.program_id(0), gl.num_programs(0))
    barriers = (ready, free)
    sources = (signs, exponents)
    buffers = (sign_blocks, exponent_blocks)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    (x, residual, total),
                    (norm_weight, branch_weight),
                    scales,
                    bias,
                    out,
                    tiles,
                    x_parts,
                    sums_of_warps,
                    barriers,
                    num_units,
                    num_rows,
                    size,
                    eps,
                    OFFSET,
                    HEIGHT,
                    PIECES // _FOLD,
                    BLOCKS,
                    EPILOGUE,
                    GATED,
                    HAS_BIAS,
                    PDL,
                ),
            ),
            (
                _produce,
                (
                    sources,
                    buffers,
                    barriers,
                    num_units * BLOCKS,
                    num_rows // _PIECE_ROWS,
                    PAUSE,
                    BLOCKS,
                    GATED,
                    PDL,
                ),
            ),
        ],
        [1],
        [LOADING_REGISTERS],
    )
