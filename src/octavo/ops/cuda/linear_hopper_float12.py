"""GEMM on Hopper of few tokens with W in 12 bits, bound by reading W.

As linear_hopper.py: one warp loads tiles of W and x by TMA, STAGES deep, and warpgroups multiply.
These turn pieces of W (float12.py) into bfloat16 in the registers of the tensor cores' left
operand, by four to five instructions for two weights. The powers of two of rows multiply the sums.

A tile has 64 rows of the left operand for each warpgroup. With FOLD > 1 they are FOLD times fewer
rows of W, with FOLD pieces of inputs each below each other; the right operand has the inputs of
these pieces beside each other, and the diagonal of the products counts. So there are more programs
of fewer rows, without sums that programs would have to add up. HEIGHT tiles of a program share
inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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

from octavo.ops.cuda.float12 import PIECE_INPUTS, PIECE_ROWS, PIECE_WORDS, Float12Weight
from octavo.ops.cuda.linear import _workspace
from octavo.ops.cuda.linear_hopper import _fetch_tile, swizzled_descriptor
from octavo.ops.cuda.linear_hopper_quantized import finish_splits, tiles_of_rows
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.epilogue import Epilogue

_MOST_TOKENS = 64
_NUM_SMS = 132
_SHARED_MEMORY = 222_000  # bytes per SM that tiles may fill
_MANY_ROWS = 4 * 64 * _NUM_SMS  # so many keep all SMs busy to the end, as those of a vocabulary
_REGISTERS = 65536  # per SM
_MOST_REGISTERS = 255  # of a thread
_SIGN_WORDS, _EXPONENT_WORDS = 128, 64  # of a piece
_TILE_PIECES = 8  # of a warpgroup

_INPUTS = tl.constexpr(PIECE_INPUTS)
_ROWS = tl.constexpr(PIECE_ROWS)
_WORDS = tl.constexpr(PIECE_WORDS)
_SIGNS = tl.constexpr(_SIGN_WORDS)
_EXPONENTS = tl.constexpr(_EXPONENT_WORDS)
_PIECES = tl.constexpr(_TILE_PIECES)


@dataclass(frozen=True, slots=True)
class Float12Tiles:
    """A configuration of the kernel."""

    tokens: int  # 8, 16, 32, 64 or 128
    warpgroups: int  # that multiply: 1, 2 or 4
    stages: int
    blocks: int = 2  # in a stage, of 64 inputs, with `fold` of so many times more
    height: int = 1  # tiles of `warpgroups` times 64 rows that share inputs
    fold: int = 1  # pieces of inputs that share a tile's rows: 1, 2 or 4
    splits: int = 1  # of K
    per_sm: int = 1  # programs that fit on one SM
    early: bool = False  # PDL: the next kernel may start from the beginning

    @property
    def tile_rows(self) -> int:
        """Rows of W in a tile; of a gated W, gates and what they gate."""
        return PIECE_ROWS * _TILE_PIECES * self.warpgroups // self.fold


def choose_float12_tiles(
    num_tokens: int, num_rows: int, size: int, epilogue: Epilogue
) -> Float12Tiles | None:
    """The tiles of a product; None: with so many tokens the kernel has none.

    Args:
        num_rows: results per token; W has twice as many rows if the epilogue is gated.
        size: columns of W, a multiple of 64.
    """
    if num_tokens > _MOST_TOKENS:
        return None
    tokens = max(8, triton.next_power_of_2(num_tokens))
    if epilogue.is_gated:
        return _fitting_tiles(Float12Tiles(tokens, 2, 0, per_sm=2, early=True), size)
    if num_rows > _MANY_ROWS:
        # A program reads x for all of its rows: the more tokens, the more rows it should have.
        if tokens < _MOST_TOKENS:
            many = Float12Tiles(tokens, 1, 0, height=2, per_sm=2, early=True)
        else:
            many = Float12Tiles(tokens, 1, 0, blocks=1, height=4, per_sm=2, early=True)
        return _fitting_tiles(many, size)
    num_tiles = triton.cdiv(num_rows, 64)
    splits = max(1, min(4, _NUM_SMS // num_tiles, size // 512))
    per_sm = 1 if num_tiles * splits <= _NUM_SMS else 2
    few = Float12Tiles(tokens, 1, 0, splits=splits, per_sm=per_sm, early=per_sm > 1)
    if splits == 1 and num_tiles <= _NUM_SMS:
        few = replace(few, blocks=1, fold=2, per_sm=2, early=True)
    return _fitting_tiles(few, size)


def _fitting_tiles(tiles: Float12Tiles, size: int) -> Float12Tiles:
    """With as many stages as are of use and fit in shared memory."""
    words = 4 * PIECE_WORDS * _TILE_PIECES * tiles.warpgroups * tiles.height
    inputs = 2 * PIECE_INPUTS * tiles.tokens * tiles.fold
    most = _SHARED_MEMORY // tiles.per_sm // (tiles.blocks * (words + inputs))
    steps = triton.cdiv(size, PIECE_INPUTS * tiles.fold * tiles.blocks * tiles.splits)
    return replace(tiles, stages=max(2, min(16, most, steps)))


def linear_few_float12(
    x: Tensor,
    weight: Float12Weight,
    bias: Tensor | None,
    out: Tensor,
    epilogue: Epilogue,
    tiles: Float12Tiles,
    is_partial: bool,
) -> None:
    """Write epilogue(x W^T + b) to out [num_tokens, num_rows].

    Args:
        x: bfloat16 [num_tokens, in_features]; rows aligned to 16 bytes.
        weight: with a gate of a multiple of 16 rows.
        out: with is_partial float32 [splits, num_tokens, num_rows], for partial sums; without
            epilogue.
    """
    (num_tokens, size), num_rows = x.shape, out.shape[-1]
    halves = 2 if epilogue.is_gated else 1
    assert weight.shape == (halves * num_rows, size)
    assert not epilogue.is_gated or num_rows % PIECE_ROWS == 0
    rows = tiles.tile_rows // halves
    grid = (
        triton.cdiv(num_tokens, tiles.tokens),
        triton.cdiv(num_rows, rows * tiles.height),
        tiles.splits,
    )
    warps = 4 * tiles.warpgroups
    registers = _REGISTERS // (32 * (warps + 4) * tiles.per_sm) // 8 * 8
    # Boxes hold what neighbours in W and in shared memory alike.
    is_plain = halves * tiles.fold == 1
    pieces = rows // PIECE_ROWS * (tiles.height if is_plain else 1)
    words = weight.words.view(len(weight.words), -1)
    sums, arrivals = _workspace(x.device)
    linear_float12_kernel[grid](
        swizzled_descriptor(x, [tiles.tokens, PIECE_INPUTS], 128),
        swizzled_descriptor(words, [pieces, _SIGN_WORDS], 0),
        swizzled_descriptor(words, [pieces, _EXPONENT_WORDS], 0),
        weight.scales,
        bias,
        out,
        sums,
        arrivals,
        num_tokens,
        num_rows,
        size // PIECE_INPUTS,
        tiles.splits,
        STAGES=tiles.stages,
        BLOCKS=tiles.blocks,
        HEIGHT=tiles.height,
        FOLD=tiles.fold,
        SPLITS=1 if is_partial else tiles.splits,
        PARTIAL=is_partial,
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        EARLY=tiles.early,
        num_warps=warps,
        maxnreg=min(registers, _MOST_REGISTERS),
        **launch_options(x.device),
    )


def _unpacking() -> str:
    """PTX: two words with exponents and twice two with signs and mantissas -> registers of
    bfloat16, of halves of 32 inputs, their steps of 16, and octets of these."""
    lines = [".reg .b32 s, e, r, m, x, u", "mov.b32 m, 0x807F807F", "mov.b32 x, 0x07800780"]
    lines.append("mov.b32 u, 0x77807780")  # 2 ** UNIT
    for half in range(2):
        for step in range(2):
            for octet in range(2):
                signs, exponents = f"${8 + 2 * step + half}", f"${12 + half}"
                if octet:
                    lines.append(f"shf.l.wrap.b32 s, {signs}, {signs}, 8")
                    signs = "s"
                if shift := 4 * (2 * step + octet):
                    lines.append(f"shf.l.wrap.b32 e, {exponents}, {exponents}, {shift}")
                    exponents = "e"
                lines.append(f"and.b32 r, {exponents}, x")
                lines.append(f"lop3.b32 r, {signs}, m, r, 0xEA")
                lines.append(f"mul.rn.bf16x2 ${4 * half + 2 * step + octet}, r, u")
    return "{" + ";\n".join(lines) + ";}"


_UNPACK = tl.constexpr(_unpacking())


@gluon.jit
def _allocate(descriptor, COUNT: gl.constexpr):
    """So many tiles in shared memory, as the descriptor fetches them."""
    SHAPE: gl.constexpr = descriptor.block_type.shape
    return gl.allocate_shared_memory(
        descriptor.dtype, [COUNT, SHAPE[0], SHAPE[1]], descriptor.layout
    )


@gluon.jit
def _fetch_weights(
    sources,
    buffers,
    bar,
    row,
    num_rows,
    stage,
    step,
    BLOCKS: gl.constexpr,
    FOLD: gl.constexpr,
    GATED: gl.constexpr,
):
    """Load a stage's words: by block, tile, piece of inputs, and half of a gated W."""
    signs, exponents = sources
    sign_tiles, exponent_tiles = buffers
    STAGES: gl.constexpr = bar.shape[0]
    BOXES: gl.constexpr = sign_tiles.shape[0] // (STAGES * BLOCKS)
    PIECES: gl.constexpr = signs.block_type.shape[0]
    HALVES: gl.constexpr = 2 if GATED else 1
    for j in gl.static_range(BLOCKS):
        for i in gl.static_range(BOXES):
            place = (stage * BLOCKS + j) * BOXES + i
            first = (row + i % HALVES * num_rows) // _ROWS + i // (FOLD * HALVES) * PIECES
            word = ((step * BLOCKS + j) * FOLD + i // HALVES % FOLD) * _WORDS
            _fetch_tile(signs, [first, word], bar.index(stage), sign_tiles.index(place))
            source = [first, word + _SIGNS]
            _fetch_tile(exponents, source, bar.index(stage), exponent_tiles.index(place))


@gluon.jit
def _fetch_inputs(x, x_tiles, bar, token, stage, step):
    """Load a stage's inputs."""
    PIECES: gl.constexpr = x_tiles.shape[0] // bar.shape[0]
    for j in gl.static_range(PIECES):
        source = [token, (step * PIECES + j) * _INPUTS]
        _fetch_tile(x, source, bar.index(stage), x_tiles.index(stage * PIECES + j))


@gluon.jit
def _produce(
    loads,
    BLOCKS: gl.constexpr,
    FOLD: gl.constexpr,
    GATED: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads."""
    x, sources, x_tiles, buffers, barriers, token, row, num_rows, first, count = loads
    ready, free = barriers
    STAGES: gl.constexpr = ready.shape[0]
    OF_WORDS: gl.constexpr = buffers[0].shape[0] * sources[0].block_type.nbytes * 3 // 2
    BYTES: gl.constexpr = (OF_WORDS + x_tiles.shape[0] * x.block_type.nbytes) // STAGES
    ahead = gl.minimum(count, STAGES)
    for i in range(ahead):
        mbarrier.expect(ready.index(i), BYTES)
        _fetch_weights(sources, buffers, ready, row, num_rows, i, first + i, BLOCKS, FOLD, GATED)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in range(ahead):
        _fetch_inputs(x, x_tiles, ready, token, i, first + i)
    for i in range(ahead, count):
        stage = i % STAGES
        step = first + i
        mbarrier.wait(free.index(stage), (i // STAGES - 1) & 1)
        mbarrier.expect(ready.index(stage), BYTES)
        _fetch_weights(sources, buffers, ready, row, num_rows, stage, step, BLOCKS, FOLD, GATED)
        _fetch_inputs(x, x_tiles, ready, token, stage, step)
    if PDL and not EARLY:
        # All loads of W are issued: only now may the next kernel's weights compete with ours.
        tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def _left(buffers, place, LAYOUT: gl.constexpr):
    """The left operand, bfloat16 [rows, 64], of the tile at that place."""
    WARPGROUPS: gl.constexpr = gl.num_warps() // 4
    PIECES: gl.constexpr = _PIECES * WARPGROUPS
    # Each warp has two neighbouring pieces, of which each thread has its words.
    WARPS: gl.constexpr = (
        [[2, 0], [4, 0]]
        if WARPGROUPS == 1
        else [[2, 0], [4, 0], [8, 0]]
        if WARPGROUPS == 2
        else [[2, 0], [4, 0], [8, 0], [16, 0]]
    )
    OF_SIGNS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        WARPS,
        [],
        [PIECES, _SIGNS],
    )
    OF_EXPONENTS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [1, 0]],
        [[0, 2], [0, 4], [0, 8], [0, 16], [0, 32]],
        WARPS,
        [],
        [PIECES, _EXPONENTS],
    )
    sign_tiles, exponent_tiles = buffers
    signs = tiles_of_rows(sign_tiles, PIECES).index(place).load(OF_SIGNS)
    exponents = tiles_of_rows(exponent_tiles, PIECES).index(place).load(OF_EXPONENTS)
    even, odd = gl.split(signs.reshape([PIECES, _EXPONENTS, 2]))
    even = gl.convert_layout(even, OF_EXPONENTS, assert_trivial=True)
    odd = gl.convert_layout(odd, OF_EXPONENTS, assert_trivial=True)
    parts = gl.inline_asm_elementwise(
        _UNPACK,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r",
        [even, odd, exponents],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )
    first = gl.join(gl.join(parts[0], parts[1]), gl.join(parts[2], parts[3]))
    second = gl.join(gl.join(parts[4], parts[5]), gl.join(parts[6], parts[7]))
    values = gl.join(first, second)
    # Row and column of the thread, place in the register; octet, step, half.
    values = values.reshape([PIECES, 8, 4, 2, 2, 2, 2]).permute((0, 1, 6, 5, 4, 2, 3))
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, k_width=2)
    return gl.convert_layout(
        values.reshape([PIECES * _ROWS, _INPUTS]), OPERAND, assert_trivial=True
    )


@gluon.jit
def _consume(
    buffers,
    x_tiles,
    barriers,
    count,
    LAYOUT: gl.constexpr,
    BLOCKS: gl.constexpr,
    HEIGHT: gl.constexpr,
    FOLD: gl.constexpr,
):
    """The sums [rows, FOLD tokens] of each tile."""
    ready, free = barriers
    STAGES: gl.constexpr = ready.shape[0]
    COLUMNS: gl.constexpr = FOLD * x_tiles.shape[1]
    inputs = tiles_of_rows(x_tiles, COLUMNS)
    nothing = gl.zeros([16 * gl.num_warps(), COLUMNS], gl.float32, LAYOUT)
    sums = (nothing,) * HEIGHT
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        added = ()
        for tile in gl.static_range(HEIGHT):
            acc = sums[tile]
            for j in gl.static_range(BLOCKS):
                # A block is unpacked while the one before it is multiplied.
                place = stage * BLOCKS + j
                left = _left(buffers, place * HEIGHT + tile, LAYOUT)
                right = inputs.index(place).permute((1, 0))
                acc = warpgroup_mma(left, right, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
            added += (acc,)  # type: ignore[assignment]
        if HEIGHT == 1:
            sums = (warpgroup_mma_wait(0, deps=added),)
        else:
            sums = warpgroup_mma_wait(0, deps=added)
        mbarrier.arrive(free.index(stage), count=1)
    return sums


@gluon.jit
def _diagonal(acc, FOLD: gl.constexpr):
    """Sums [FOLD rows, FOLD tokens] -> [rows, tokens], of inputs times their own weights."""
    ROWS: gl.constexpr = acc.shape[0] // FOLD
    TOKENS: gl.constexpr = acc.shape[1] // FOLD
    rows = gl.arange(0, FOLD * ROWS, layout=gl.SliceLayout(1, acc.type.layout))
    columns = gl.arange(0, FOLD * TOKENS, layout=gl.SliceLayout(0, acc.type.layout))
    own = gl.where(rows[:, None] // ROWS == columns[None, :] // TOKENS, acc, 0.0)
    return gl.sum(gl.sum(own.reshape([FOLD, ROWS, FOLD, TOKENS]), 2), 0)


@gluon.jit(do_not_specialize=["num_tokens", "num_pieces", "num_splits"])
def linear_float12_kernel(
    x,
    signs,
    exponents,
    scales,
    bias,
    out,
    sums,
    arrivals,
    num_tokens,
    num_rows,
    num_pieces,
    num_splits,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    HEIGHT: gl.constexpr,
    FOLD: gl.constexpr,
    SPLITS: gl.constexpr,
    PARTIAL: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_tokens, num_rows].

    Args:
        x: descriptor of [num_tokens, in_features], of blocks of 64 inputs.
        signs, exponents: descriptors of both kinds of the words of pieces [rows / 8, words].
        scales: of rows of W.
        out: with PARTIAL float32 [num_splits, num_tokens, num_rows].
        sums: float32 workspace, for SPLITS > 1.
        arrivals: int32, 0 for every tile before and after the kernel.
        num_pieces: in_features / 64.
    """
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    ROWS: gl.constexpr = 16 * gl.num_warps()  # of the left operand
    OWN: gl.constexpr = ROWS // FOLD // (2 if GATED else 1)
    BM: gl.constexpr = x.block_type.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, FOLD * BM, 16]
    )
    token = gl.program_id(0) * BM
    tile = gl.program_id(1) * HEIGHT
    split = gl.program_id(2)
    num_steps = gl.cdiv(num_pieces, BLOCKS * FOLD)
    per_split = gl.cdiv(num_steps, num_splits)
    first = split * per_split
    count = gl.minimum(first + per_split, num_steps) - first

    BOXES: gl.constexpr = ROWS * HEIGHT // (8 * signs.block_type.shape[0])
    sign_tiles = _allocate(signs, STAGES * BLOCKS * BOXES)
    exponent_tiles = _allocate(exponents, STAGES * BLOCKS * BOXES)
    x_tiles = _allocate(x, STAGES * BLOCKS * FOLD)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    sources = (signs, exponents)
    buffers = (sign_tiles, exponent_tiles)
    barriers = (ready, free)
    loads = (
        x, sources, x_tiles, buffers, barriers, token, tile * OWN, num_rows, first, count
    )  # fmt: skip

    # Asked for before the products that they belong to.
    places = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    factors = ()
    for i in gl.static_range(HEIGHT):
        rows = (tile + i) * OWN + places % OWN
        half = places // OWN % 2 if GATED else 0
        factor = gl.load(scales + half * num_rows + rows, mask=rows < num_rows, other=0.0)
        factors += (factor,)  # type: ignore[assignment]
    of_tiles = gl.warp_specialize(
        [
            (_consume, (buffers, x_tiles, barriers, count, LAYOUT, BLOCKS, HEIGHT, FOLD)),
            (_produce, (loads, BLOCKS, FOLD, GATED, EARLY, PDL)),
        ],
        [1],
        [24],
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in gl.static_range(HEIGHT):
        acc = of_tiles[i] * factors[i][:, None]
        if FOLD > 1:
            acc = _diagonal(acc, FOLD)
        result = (tile + i, split, token, (tile + i) * OWN, num_tokens, num_rows)
        finish_splits(
            acc, bias, out, sums, arrivals, result, SPLITS, PARTIAL, EPILOGUE, GATED, HAS_BIAS
        )
