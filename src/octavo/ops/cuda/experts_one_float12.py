"""The experts of one token, with weights in 12 bits (float12.py): two kernels.

As in experts_one.py, a program loads all that it multiplies at once, to registers, and the second
kernel, which starts while the first one ends, loads weights before it waits for it. Here tensor
cores multiply, as in linear_ring_float12.py: a program has 8 rows, eight pieces of which are rows
of the left operand, and the same pieces of the inputs are the columns of the right one. In down
projections the pieces of all of the token's experts follow each other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from octavo.float12 import MOST_DOWN_INPUTS, MOST_GATE_INPUTS, PIECE_INPUTS, PIECE_ROWS
from octavo.ops.cuda.epilogues import activate_gated
from octavo.ops.cuda.float12 import PIECE_WORDS, Float12Weight
from octavo.ops.cuda.hopper import sync_threads
from octavo.ops.cuda.linear_ring_float12 import (
    FOLD,
    INPUT_FACTOR,
    SIGNS,
    SUM_FACTOR,
    of_own_inputs,
    unpacked,
    words_layout,
)
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.tile_sizes import MOST_REGISTERS
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import Routed

_FOLD, _WORDS, _SIGNS = tl.constexpr(FOLD), tl.constexpr(PIECE_WORDS), tl.constexpr(SIGNS)
_ROWS, _INPUTS = tl.constexpr(PIECE_ROWS), tl.constexpr(PIECE_INPUTS)
_INPUT_FACTOR, _SUM_FACTOR = tl.constexpr(INPUT_FACTOR), tl.constexpr(SUM_FACTOR)

_WARPS = 4


def mix_one_float12(
    x: Tensor,
    routed: Routed,
    up: Float12Weight,
    down: Float12Weight,
    epilogue: Epilogue,
) -> Tensor:
    """See ExpertsKernel.apply_partial, of x bfloat16 [1, size], dense.

    up, down: those of all experts, one below the other: of each expert, whole pieces of gates and
        then of ups; and its down projection. With as many inputs as one token may have
        (float12.copied_expert_tokens).
    """
    top_k, size = routed.ids.shape[1], x.shape[1]
    inner_size = down.shape[1]
    assert size <= MOST_GATE_INPUTS
    assert top_k * inner_size <= MOST_DOWN_INPUTS
    inner = x.new_empty((top_k, inner_size))
    options = launch_options(x.device)
    pieces = size // PIECE_INPUTS
    tiles = triton.cdiv(pieces, FOLD)
    _gate_up_float12_kernel[(inner_size // PIECE_ROWS, top_k)](
        x,
        up.words,
        up.scales,
        inner,
        routed.ids,
        inner_size,
        PIECES=pieces,
        TILES=tiles,
        EPILOGUE=int(epilogue),
        num_warps=_WARPS,
        maxnreg=_registers(2 * tiles),
        **options,
    )
    out = x.new_empty((1, size))
    pieces = inner_size // PIECE_INPUTS
    tiles = triton.cdiv(top_k * pieces, FOLD)
    _down_float12_kernel[(size // PIECE_ROWS,)](
        inner,
        down.words,
        down.scales,
        out,
        routed.ids,
        routed.weights,
        size,
        TOP_K=top_k,
        PIECES=pieces,
        TILES=tiles,
        num_warps=_WARPS,
        maxnreg=_registers(tiles),
        **options,
    )
    return out


def _registers(tiles: int) -> int:
    """Registers of a thread that loads the words of `tiles` times eight pieces at once, each of
    which takes 12; gates and ups have two times so many."""
    return min(MOST_REGISTERS, (12 * tiles + 80) // 8 * 8)


@gluon.jit
def _load(words, places, is_piece, first: gl.constexpr, LAYOUT: gl.constexpr):
    """The words of eight pieces at these places, from the word `first` of a piece on; zeros where
    there is none."""
    NUM: gl.constexpr = LAYOUT.shape[1]
    word = gl.arange(0, NUM, layout=gl.SliceLayout(0, LAYOUT))
    pointers = words + places[:, None] * _WORDS + (first + word)[None, :]
    return gl.load(pointers, mask=is_piece[:, None] & (word >= 0)[None, :], other=0)


@gluon.jit
def _row_pieces(words, first, tile, PIECES: gl.constexpr):
    """Both kinds of words of eight neighbouring pieces of rows that begin with piece `first`."""
    SIGN_LAYOUT: gl.constexpr = words_layout(4, _SIGNS)
    EXPONENT_LAYOUT: gl.constexpr = words_layout(2, _SIGNS // 2)
    piece = tile * _FOLD + gl.arange(0, _FOLD, layout=gl.SliceLayout(1, SIGN_LAYOUT))
    signs = _load(words, first + piece, piece < PIECES, 0, SIGN_LAYOUT)
    piece = tile * _FOLD + gl.arange(0, _FOLD, layout=gl.SliceLayout(1, EXPONENT_LAYOUT))
    exponents = _load(words, first + piece, piece < PIECES, _SIGNS, EXPONENT_LAYOUT)
    return signs, exponents


@gluon.jit
def _store_inputs(x, x_tiles, tile, NUM: gl.constexpr):
    """Write eight pieces of inputs to shared memory; from piece NUM on, zeros."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    piece = tile * _FOLD + gl.arange(0, _FOLD, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, _INPUTS, layout=gl.SliceLayout(0, LAYOUT))
    inside = (piece < NUM)[:, None] & (column >= 0)[None, :]
    values = gl.load(x + piece[:, None] * _INPUTS + column[None, :], mask=inside, other=0.0)
    x_tiles.index(tile).store((values.to(gl.float32) * _INPUT_FACTOR).to(gl.bfloat16))


@gluon.jit
def _by_row(acc):
    """[rows of a piece]: the sums of products of pieces with their own inputs."""
    return gl.sum(of_own_inputs(acc).reshape([_FOLD, _ROWS]), 0)


@gluon.jit
def _gate_up_float12_kernel(
    x,
    words,
    scales,
    out,
    ids,
    num_rows,
    PIECES: gl.constexpr,
    TILES: gl.constexpr,
    EPILOGUE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Eight gates and ups of one of the token's experts, into out [TOP_K, num_rows].

    Args:
        words, scales: of W, 2 * num_rows rows for each expert.
        PIECES: of a row; TILES: times eight of them, all of which are loaded at once.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 8]
    )
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, k_width=2)
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [TILES, _FOLD, _INPUTS], WHOLE)
    slot = gl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # not before: it reads `ids`, too
    expert = gl.load(ids + slot).to(gl.int64)
    first_row = expert * (2 * num_rows) + gl.program_id(0) * _ROWS
    own = first_row // _ROWS * PIECES
    up = (first_row + num_rows) // _ROWS * PIECES
    loaded = ()
    for i in gl.static_range(TILES):
        pair = (_row_pieces(words, own, i, PIECES), _row_pieces(words, up, i, PIECES))
        loaded += (pair,)  # type: ignore[assignment]
    for i in gl.static_range(TILES):
        _store_inputs(x, x_tiles, i, PIECES)
    sync_threads()
    sums = gl.zeros([_FOLD * _ROWS, _FOLD], gl.float32, LAYOUT)
    up_sums = sums
    for i in gl.static_range(TILES):
        inputs = x_tiles.index(i).permute((1, 0)).load(RIGHT)
        sums = mma_v2(unpacked(*loaded[i][0], LAYOUT), inputs, sums)
        up_sums = mma_v2(unpacked(*loaded[i][1], LAYOUT), inputs, up_sums)
    gate = _by_row(sums)
    rows = gl.arange(0, _ROWS, layout=gate.type.layout)
    gate = gate * _SUM_FACTOR * gl.load(scales + first_row + rows)
    value = _by_row(up_sums) * _SUM_FACTOR * gl.load(scales + first_row + num_rows + rows)
    value = activate_gated(gate, value, EPILOGUE)
    target = out + slot * num_rows + gl.program_id(0) * _ROWS + rows
    gl.store(target, value.to(out.dtype.element_ty))


@gluon.jit
def _expert_places(
    ids, tile, group, num_groups, TOP_K: gl.constexpr, PIECES: gl.constexpr, LAYOUT: gl.constexpr
):
    """Where eight pieces of the rows of the token's experts are, and which of them exist."""
    piece = tile * _FOLD + gl.arange(0, _FOLD, layout=gl.SliceLayout(1, LAYOUT))
    is_piece = piece < TOP_K * PIECES
    expert = gl.load(ids + piece // PIECES, mask=is_piece, other=0, cache_modifier=".cg")
    return (expert.to(gl.int64) * num_groups + group) * PIECES + piece % PIECES, is_piece


@gluon.jit
def _expert_pieces(words, ids, tile, group, num_groups, TOP_K: gl.constexpr, PIECES: gl.constexpr):
    """Both kinds of words of such pieces."""
    SIGN_LAYOUT: gl.constexpr = words_layout(4, _SIGNS)
    EXPONENT_LAYOUT: gl.constexpr = words_layout(2, _SIGNS // 2)
    places, is_piece = _expert_places(ids, tile, group, num_groups, TOP_K, PIECES, SIGN_LAYOUT)
    signs = _load(words, places, is_piece, 0, SIGN_LAYOUT)
    places, is_piece = _expert_places(ids, tile, group, num_groups, TOP_K, PIECES, EXPONENT_LAYOUT)
    exponents = _load(words, places, is_piece, _SIGNS, EXPONENT_LAYOUT)
    return signs, exponents


@gluon.jit
def _expert_factors(
    scales,
    ids,
    shares,
    tile,
    group,
    num_rows,
    TOP_K: gl.constexpr,
    PIECES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """What sums of such pieces' rows are multiplied by: the row's scale, and the expert's share."""
    row = gl.arange(0, _FOLD * _ROWS, layout=gl.SliceLayout(1, LAYOUT))
    piece = tile * _FOLD + row // _ROWS
    is_piece = piece < TOP_K * PIECES
    slot = piece // PIECES
    expert = gl.load(ids + slot, mask=is_piece, other=0, cache_modifier=".cg")
    share = gl.load(shares + slot, mask=is_piece, other=0.0, cache_modifier=".cg")
    own = expert.to(gl.int64) * num_rows + group * _ROWS + row % _ROWS
    return gl.load(scales + own, mask=is_piece, other=0.0) * share


@gluon.jit
def _down_float12_kernel(
    x,
    words,
    scales,
    out,
    ids,
    shares,
    num_rows,
    TOP_K: gl.constexpr,
    PIECES: gl.constexpr,
    TILES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Eight rows of the weighted sum of the token's experts, into out [num_rows]; x [TOP_K, size].

    `ids` and `shares` were written before the preceding kernel let this one start; they are read
    past the SM's own cache, which may have older values.

    Args:
        words, scales: of W, num_rows rows for each expert.
        PIECES: of a row; TILES: times eight of those of all experts, all of which are loaded at
            once.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 8]
    )
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, k_width=2)
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [TILES, _FOLD, _INPUTS], WHOLE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    group = gl.program_id(0)
    num_groups = num_rows // _ROWS
    loaded = ()
    factors = ()
    for i in gl.static_range(TILES):
        pieces = _expert_pieces(words, ids, i, group, num_groups, TOP_K, PIECES)
        loaded += (pieces,)  # type: ignore[assignment]
    for i in gl.static_range(TILES):
        factor = _expert_factors(scales, ids, shares, i, group, num_rows, TOP_K, PIECES, LAYOUT)
        factors += (factor,)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in gl.static_range(TILES):
        _store_inputs(x, x_tiles, i, TOP_K * PIECES)
    sync_threads()
    none = gl.zeros([_FOLD * _ROWS, _FOLD], gl.float32, LAYOUT)
    sums = none
    for i in gl.static_range(TILES):
        inputs = x_tiles.index(i).permute((1, 0)).load(RIGHT)
        products = mma_v2(unpacked(*loaded[i], LAYOUT), inputs, none)
        # One after the other: the product of both factors may overflow.
        sums = sums + products * _SUM_FACTOR * factors[i][:, None]
    y = _by_row(sums)
    rows = group * _ROWS + gl.arange(0, _ROWS, layout=y.type.layout)
    gl.store(out + rows, y.to(out.dtype.element_ty))
