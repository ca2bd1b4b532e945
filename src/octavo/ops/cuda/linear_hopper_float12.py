"""GEMM on Hopper of few tokens with W in 12 bits (float12.py), bound by reading W.

As linear_hopper.py: one warp loads tiles of W and x by TMA, STAGES deep, and warpgroups multiply.
These turn pieces of W into bfloat16 in the registers of the tensor cores' left operand, by four to
five instructions for two weights. The powers of two of rows multiply the sums.

A tile has 64 rows of the left operand for each warpgroup. With FOLD > 1 they are FOLD times fewer
rows of W, with FOLD pieces of inputs each below each other; the right operand has the inputs of
these pieces beside each other, and the diagonal of the products counts. So even a W of few rows
keeps all SMs busy, without sums that programs would have to add up. A program may have HEIGHT
tiles, which share inputs. If W has gates, half of a tile's rows are gates, and half are what these
gate; of two tiles, one has gates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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

from octavo.float12 import MANY_ROWS, PIECE_INPUTS, PIECE_ROWS
from octavo.ops.cuda.devices import num_sms
from octavo.ops.cuda.epilogues_hopper import finish
from octavo.ops.cuda.float12 import EXPONENT, MANTISSA, PIECE_WORDS, Float12Weight
from octavo.ops.cuda.hopper import allocate_tiles, fetch_tile, swizzled_descriptor, tiles_of_rows
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.tile_sizes import registers_for
from octavo.ops.epilogue import Epilogue

_SHARED_MEMORY = 222_000  # bytes per SM that tiles may fill
_MOST_STAGES = 16
_SIGN_WORDS, _EXPONENT_WORDS = 128, 64  # of a piece
_TILE_PIECES = 8  # of a warpgroup
_FEWEST_STAGES = 4
_FEW_TOKENS = 16

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
    warpgroups: int = 1  # that multiply: 1 or 2
    blocks: int = 2  # in a stage, of 64 inputs, with `fold` of so many times more
    fold: int = 1  # pieces of inputs that share a tile's rows: 1, 2 or 4
    height: int = 1  # tiles that share inputs; 1 with a fold
    per_sm: int = 2  # programs that fit on one SM

    @property
    def rows(self) -> int:
        """Rows of W that a program multiplies."""
        return PIECE_ROWS * _TILE_PIECES * self.warpgroups * self.height // self.fold

    @property
    def stage_bytes(self) -> int:
        words = 4 * PIECE_WORDS * _TILE_PIECES * self.warpgroups * self.height
        return self.blocks * (words + 2 * PIECE_INPUTS * self.tokens * self.fold)

    def steps(self, size: int) -> int:
        """Stages' worth of so many inputs."""
        return -(-size // (PIECE_INPUTS * self.blocks * self.fold))

    def stages(self, size: int) -> int:
        """How many stages fit in shared memory, and are of use for so many inputs."""
        most = _SHARED_MEMORY // self.per_sm // self.stage_bytes
        return max(2, min(_MOST_STAGES, most, self.steps(size)))


@cache
def choose_float12_tiles(num_tokens: int, num_rows: int, size: int, num_sms: int) -> Float12Tiles:
    """The tiles for up to 128 tokens times W [num_rows, size].

    Measured on an H100 (2026-11-26 and 27) with the heads and projections of seven models.
    """
    tokens = max(8, triton.next_power_of_2(num_tokens))
    if num_rows >= MANY_ROWS and tokens > _FEW_TOKENS:
        # A program reads x for all of its rows: the more tokens, the more rows it should have.
        if tokens <= 64:
            return Float12Tiles(tokens, warpgroups=2)
        return Float12Tiles(tokens, warpgroups=2, blocks=1, height=2, per_sm=1)
    num_tiles = triton.cdiv(num_rows, 64)
    choose = _folds_of_few if tokens <= _FEW_TOKENS else _folds_of_more
    fold, per_sm = choose(num_tiles, num_sms)
    tiles = Float12Tiles(tokens, fold=fold, per_sm=per_sm)
    in_flight = min(_FEWEST_STAGES, tiles.steps(size))
    return tiles if tiles.stages(size) >= in_flight else replace(tiles, blocks=1)


def _folds_of_few(num_tiles: int, num_sms: int) -> tuple[int, int]:
    """The fold, and programs on an SM, for up to 16 tokens: two, or three where two would leave
    places empty, or the last of them would be alone."""
    if num_sms < num_tiles <= 1.4 * num_sms:
        return 2, 3
    if 2 * num_sms < num_tiles <= 3 * num_sms:
        return 1, 3
    return next((fold for fold in (4, 2) if fold * num_tiles <= 2 * num_sms), 1), 2


def _folds_of_more(num_tiles: int, num_sms: int) -> tuple[int, int]:
    """The same for 17 to 64 tokens, which need more memory beside a fold: one program, if there are
    no more."""
    if 2 * num_sms < num_tiles <= 3 * num_sms:
        return 1, 3
    if num_tiles > num_sms:
        return 1, 2
    if 2 * num_tiles <= num_sms:
        return 2, 1
    return (2, 2) if num_tiles < 0.75 * num_sms else (1, 1)


def takes_gates(num_rows: int) -> bool:
    """Whether W [num_rows, size] may have gates: ups begin with a piece of their own."""
    return num_rows % (2 * PIECE_ROWS) == 0


def linear_float12(
    x: Tensor,
    weight: Float12Weight,
    bias: Tensor | None,
    epilogue: Epilogue = Epilogue.NONE,
    tiles: Float12Tiles | None = None,
) -> Tensor:
    """epilogue(x W^T + b): bfloat16 [num_tokens, out_features], half as wide if it is gated.

    Args:
        x: bfloat16 [num_tokens, in_features] of up to 128 tokens; rows aligned to 16 bytes.
        weight: with gates, one that takes_gates.
        bias: [out_features].
        tiles: by default those that `choose_float12_tiles` names.
    """
    (num_tokens, size), (num_rows, _) = x.shape, weight.shape
    if tiles is None:
        tiles = choose_float12_tiles(num_tokens, num_rows, size, num_sms(x.device))
    assert num_tokens <= tiles.tokens
    assert size == weight.shape[1]
    halves = 1
    assert tiles.height == 1 or tiles.fold == 1
    if epilogue.is_gated:
        assert tiles.height <= 2
        assert takes_gates(num_rows)
        halves, num_rows = 2, num_rows // 2
    out = x.new_empty((num_tokens, num_rows))
    warps = 4 * tiles.warpgroups
    # In a box, which W and shared memory have in the same order.
    pieces = tiles.rows // PIECE_ROWS // halves
    words = weight.words.view(len(weight.words), -1)
    linear_float12_kernel[(triton.cdiv(halves * num_rows, tiles.rows),)](
        swizzled_descriptor(x, [tiles.tokens, PIECE_INPUTS], 128),
        swizzled_descriptor(words, [pieces, _SIGN_WORDS], 0),
        swizzled_descriptor(words, [pieces, _EXPONENT_WORDS], 0),
        weight.scales,
        bias,
        out,
        num_tokens,
        num_rows,
        tiles.steps(size),
        STAGES=tiles.stages(size),
        BLOCKS=tiles.blocks,
        FOLD=tiles.fold,
        HEIGHT=tiles.height,
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        num_warps=warps,
        maxnreg=registers_for(warps + 4, tiles.per_sm),
        **launch_options(x.device),
    )
    return out


def _unpacking() -> str:
    """PTX: two words with exponents and twice two with signs and mantissas -> registers of
    bfloat16, of halves of 32 inputs, their steps of 16, and octets of these."""
    lines = [f".reg .b32 s, e, r, m, x, u; mov.b32 m, {MANTISSA:#x}; mov.b32 x, {EXPONENT:#x}"]
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
def fetch_words(
    sources, buffers, bar, firsts, stage, step, BLOCKS: gl.constexpr, FOLD: gl.constexpr
):
    """Load a stage's words, by block and by piece of inputs, of a program's pieces, from each of
    `firsts` on."""
    signs, exponents = sources
    sign_tiles, exponent_tiles = buffers
    HALVES: gl.constexpr = len(firsts)
    for j in gl.static_range(BLOCKS * FOLD):
        word = (step * (BLOCKS * FOLD) + j) * _WORDS
        for half in gl.static_range(HALVES):
            place = (stage * (BLOCKS * FOLD) + j) * HALVES + half
            at = [firsts[half], word]
            fetch_tile(signs, at, bar.index(stage), sign_tiles.index(place))
            at = [firsts[half], word + _SIGNS]
            fetch_tile(exponents, at, bar.index(stage), exponent_tiles.index(place))


@gluon.jit
def _fetch_inputs(x, x_tiles, bar, stage, step, PIECES: gl.constexpr):
    """Load a stage's inputs."""
    for j in gl.static_range(PIECES):
        source = [0, (step * PIECES + j) * _INPUTS]
        fetch_tile(x, source, bar.index(stage), x_tiles.index(stage * PIECES + j))


@gluon.jit
def _produce(loads, BLOCKS: gl.constexpr, FOLD: gl.constexpr, PDL: gl.constexpr):
    """The partition that loads."""
    x, sources, x_tiles, buffers, barriers, firsts, count = loads
    ready, free = barriers
    STAGES: gl.constexpr = ready.shape[0]
    OF_WORDS: gl.constexpr = sources[0].block_type.nbytes + sources[1].block_type.nbytes
    BYTES: gl.constexpr = BLOCKS * FOLD * (len(firsts) * OF_WORDS + x.block_type.nbytes)
    ahead = gl.minimum(count, STAGES)
    for i in range(ahead):
        mbarrier.expect(ready.index(i), BYTES)
        fetch_words(sources, buffers, ready, firsts, i, i, BLOCKS, FOLD)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in range(ahead):
        _fetch_inputs(x, x_tiles, ready, i, i, BLOCKS * FOLD)
    for i in range(ahead, count):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), (i // STAGES - 1) & 1)
        mbarrier.expect(ready.index(stage), BYTES)
        fetch_words(sources, buffers, ready, firsts, stage, i, BLOCKS, FOLD)
        _fetch_inputs(x, x_tiles, ready, stage, i, BLOCKS * FOLD)


@gluon.jit
def left_operand(buffers, place, LAYOUT: gl.constexpr):
    """The left operand, bfloat16 [rows, 64], of the tile at that place."""
    PIECES: gl.constexpr = _PIECES * (gl.num_warps() // 4)
    # Each warp has two neighbouring pieces, of which each thread has its words.
    WARPS: gl.constexpr = [[2, 0], [4, 0]] if gl.num_warps() == 4 else [[2, 0], [4, 0], [8, 0]]
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
    FOLD: gl.constexpr,
    HEIGHT: gl.constexpr,
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
                left = left_operand(buffers, place * HEIGHT + tile, LAYOUT)
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


@gluon.jit
def _halves(acc):
    """Sums [rows, tokens] -> those of gates and of what they gate."""
    ROWS: gl.constexpr = acc.shape[0] // 2
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [8, 4, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    pairs = acc.reshape([2, ROWS, acc.shape[1]]).permute((1, 2, 0))
    return gl.split(gl.convert_layout(pairs, PAIRS))


@gluon.jit(do_not_specialize=["num_tokens", "num_steps"])
def linear_float12_kernel(
    x,
    signs,
    exponents,
    scales,
    bias,
    out,
    num_tokens,
    num_rows,
    num_steps,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    FOLD: gl.constexpr,
    HEIGHT: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_tokens, num_rows]; with GATED, W has twice as many rows.

    Args:
        x: descriptor of [num_tokens, in_features], of blocks of 64 inputs.
        signs, exponents: descriptors of both kinds of the words of pieces [rows / 8, words].
        scales: of rows of W.
        num_steps: stages' worth of inputs.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    ROWS: gl.constexpr = 16 * gl.num_warps()  # of the left operand
    HALVES: gl.constexpr = 2 if GATED else 1
    OWN: gl.constexpr = ROWS * HEIGHT // FOLD // HALVES  # results of a token
    OF_TILE: gl.constexpr = min(OWN, ROWS // FOLD)
    BM: gl.constexpr = x.block_type.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, FOLD * BM, 16]
    )
    first = gl.program_id(0) * OWN
    sign_tiles = allocate_tiles(signs, STAGES * BLOCKS * FOLD * HALVES)
    exponent_tiles = allocate_tiles(exponents, STAGES * BLOCKS * FOLD * HALVES)
    x_tiles = allocate_tiles(x, STAGES * BLOCKS * FOLD)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    sources = (signs, exponents)
    buffers = (sign_tiles, exponent_tiles)
    barriers = (ready, free)
    firsts = (first // _ROWS,)
    if GATED:
        firsts += ((num_rows + first) // _ROWS,)  # type: ignore[assignment]
    loads = (x, sources, x_tiles, buffers, barriers, firsts, num_steps)

    # Asked for before the products that they belong to.
    places = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    factors = ()
    for i in gl.static_range(HEIGHT):
        place = i * (ROWS // FOLD) + places % (ROWS // FOLD)
        rows = first + place % OWN
        of_half = scales + place // OWN * num_rows
        factors += (gl.load(of_half + rows, mask=rows < num_rows, other=0.0),)  # type: ignore[assignment]
    of_tiles = gl.warp_specialize(
        [
            (_consume, (buffers, x_tiles, barriers, num_steps, LAYOUT, BLOCKS, FOLD, HEIGHT)),
            (_produce, (loads, BLOCKS, FOLD, PDL)),
        ],
        [1],
        [24],
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in gl.static_range(1 if GATED else HEIGHT):
        acc = of_tiles[i] * factors[i][:, None]
        if FOLD > 1:
            acc = _diagonal(acc, FOLD)
        up = acc
        if GATED and HEIGHT == 2:
            up = of_tiles[1] * factors[1][:, None]  # type: ignore[misc]
        elif GATED:
            acc, up = _halves(acc)
        shape = (0, first + i * OF_TILE, num_tokens, num_rows)
        finish(acc, up, bias, out, shape, True, False, EPILOGUE, GATED, HAS_BIAS)
