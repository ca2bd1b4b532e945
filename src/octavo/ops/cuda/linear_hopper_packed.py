"""GEMM on Hopper of few tokens with W in packed integers of 4 bits, bound by reading W.

As linear_hopper.py: one warp loads tiles of W and x by TMA, STAGES deep, and warpgroups multiply.
These turn words into integers of 8 bits, by three instructions for eight weights, in the registers
of the tensor cores' left operand. Inputs are two such integers each, 256 high + low, which are two
columns of the right operand (Rounding.INTEGERS), written in the order in which words are unpacked.
Sums of a block of 128 inputs are exact; they are multiplied by the scales of weights and inputs,
and added up in float32.

A program has 64 rows of W for each warpgroup; with a gate the first one has gates, and the second
one what they gate. Where there are few programs, two partitions multiply every other stage each,
and add up their sums in the end: a place of the ring belongs to one of them, then, because a
partition that waits at a barrier sees only whether the phase before has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

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

from octavo.ops.cuda.hopper import allocate_tiles, fetch_tile, swizzled_descriptor
from octavo.ops.cuda.linear_gemv_packed import unpacked
from octavo.ops.cuda.linear_hopper_quantized import finish_splits, joined_tiles
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.stored_weights import BLOCK, CHUNK_ROWS, INT4, StoredWeight
from octavo.ops.cuda.tile_sizes import registers_for
from octavo.ops.epilogue import Epilogue
from octavo.ops.quantized import RoundedInputs

BLOCKS = 2  # of 128 inputs in a stage
_LINE_WORDS = 32  # of two rows of a block: 128 bytes, as wide as shared memory
_MOST_REGISTERS = 232  # of a thread
_BLOCK = tl.constexpr(BLOCK)
_BLOCKS = tl.constexpr(BLOCKS)
_ROWS = tl.constexpr(CHUNK_ROWS)  # of a warpgroup
_LINES = tl.constexpr(CHUNK_ROWS // 2)  # of a block of them
_LINE = tl.constexpr(_LINE_WORDS)


@dataclass(frozen=True, slots=True)
class PackedTiles:
    """A configuration of the kernel."""

    tokens: int  # 8, 16 or 32
    warpgroups: int  # that have 64 rows each, one or two; with a gate two
    stages: int  # even with two ways
    ways: int = 1  # partitions that multiply, one or two
    splits: int = 1  # of K
    per_sm: int = 1  # programs that fit on one SM
    early: bool = False  # PDL: the next kernel may start from the beginning


def linear_few_packed(
    x: RoundedInputs,
    stored: StoredWeight,
    bias: Tensor | None,
    out: Tensor,
    epilogue: Epilogue,
    tiles: PackedTiles,
    is_partial: bool,
    workspace: tuple[Tensor, Tensor],
) -> None:
    """Write epilogue(x W^T + b) to out [num_tokens, num_rows].

    Args:
        x: as Rounding.INTEGERS makes it; in_features a multiple of 128.
        stored: of 4 bits, of which a power of two of blocks of 128 inputs share a scale, or all
            inputs; out_features a multiple of 8, with a gate of twice as many as a chunk has.
        out: with is_partial float32 [splits, num_tokens, num_rows], for partial sums; without
            epilogue.
        workspace: see linear.py.
    """
    values, x_scales, _ = x
    (num_tokens, _, size), num_rows = values.shape, out.shape[-1]
    num_blocks = size // BLOCK
    # Where one scale is for all inputs, it is that of all blocks of a stage.
    group_blocks = stored.group // BLOCK or triton.cdiv(num_blocks, BLOCKS) * BLOCKS
    assert takes_integers(stored)
    assert tiles.stages % tiles.ways == 0
    assert not epilogue.is_gated or (tiles.warpgroups == 2 and stored.has_whole_gates)
    rows = CHUNK_ROWS * (1 if epilogue.is_gated else tiles.warpgroups)
    grid = (triton.cdiv(num_tokens, tiles.tokens), triton.cdiv(num_rows, rows), tiles.splits)
    warps = 4 * tiles.warpgroups
    # All partitions have so many registers at first. What the last one leaves is for the others.
    all_warps = warps * tiles.ways + 4
    registers = min(registers_for(all_warps, tiles.per_sm), _MOST_REGISTERS)
    of_second = (registers * all_warps - 24 * 4) // (all_warps - 4) // 8 * 8
    lines = stored.weight.view(-1, _LINE_WORDS)
    of_groups = [BLOCKS, CHUNK_ROWS]
    sums, arrivals = workspace
    linear_packed_kernel[grid](
        swizzled_descriptor(values.view(-1, size), [2 * tiles.tokens, BLOCK], 128),
        swizzled_descriptor(x_scales.flatten(0, 1), [2 * BLOCKS, tiles.tokens], 0),
        swizzled_descriptor(lines, [CHUNK_ROWS // 2, _LINE_WORDS], 128),
        swizzled_descriptor(_by_group(stored.scales, stored), of_groups, 0),
        None
        if stored.zeros is None
        else swizzled_descriptor(_by_group(stored.zeros, stored), of_groups, 0),
        bias,
        out,
        sums,
        arrivals,
        num_tokens,
        num_rows,
        num_blocks,
        tiles.splits,
        group_blocks,
        STAGES=tiles.stages,
        WARPGROUPS=tiles.warpgroups,
        WAYS=tiles.ways,
        REGISTERS=of_second,
        SPLITS=1 if is_partial else tiles.splits,
        PARTIAL=is_partial,
        GROUP_BLOCKS=min(group_blocks, BLOCKS),
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        EARLY=tiles.early,
        num_warps=warps,
        maxnreg=registers,
        **launch_options(values.device),
    )


def takes_integers(stored: StoredWeight) -> bool:
    """Whether the kernel takes W."""
    num_rows, size = stored.shape
    group_blocks = stored.group // BLOCK
    has_blocks = stored.group % BLOCK == 0 and group_blocks & (group_blocks - 1) == 0
    return stored.format == INT4 and size % BLOCK == 0 and num_rows % 8 == 0 and has_blocks


def _by_group(values: Tensor, stored: StoredWeight) -> Tensor:
    """Scales or zero points [groups, rows], of which TMA can fetch some though there be one group:
    that one's stride may be anything."""
    return values.as_strided((stored.num_groups, stored.shape[0]), (stored.shape[0], 1))


@gluon.jit
def _fetch_weights(sources, buffers, bar, place, stage, block, STAGES: gl.constexpr):
    """Load a stage's words, scales and zero points."""
    weight, scales, zeros = sources
    tiles, scale_tiles, zero_tiles = buffers
    row, second_row, num_blocks, group_blocks = place
    WARPGROUPS: gl.constexpr = scale_tiles.shape[0] // STAGES
    for i in gl.static_range(WARPGROUPS):
        own = second_row if i else row
        line = (own // _ROWS * num_blocks + block) * _LINES
        for j in gl.static_range(_BLOCKS):
            target = tiles.index((stage * _BLOCKS + j) * WARPGROUPS + i)
            fetch_tile(weight, [line + j * _LINES, 0], bar, target)
        source = [block // group_blocks, own]
        fetch_tile(scales, source, bar, scale_tiles.index(stage * WARPGROUPS + i))
        if zeros is not None:
            fetch_tile(zeros, source, bar, zero_tiles.index(stage * WARPGROUPS + i))


@gluon.jit
def _fetch_inputs(x_sources, x_buffers, bar, token, stage, block):
    """Load a stage's inputs and their scales."""
    x, x_scales = x_sources
    x_tiles, x_scale_tiles = x_buffers
    for j in gl.static_range(_BLOCKS):
        target = x_tiles.index(stage * _BLOCKS + j)
        fetch_tile(x, [2 * token, (block + j) * _BLOCK], bar, target)
    fetch_tile(x_scales, [2 * block, token], bar, x_scale_tiles.index(stage))


@gluon.jit
def _produce(loads, EARLY: gl.constexpr, PDL: gl.constexpr):
    """The partition that loads."""
    x_sources, sources, buffers, x_buffers, barriers, place, token, first, count = loads
    x, x_scales = x_sources
    weight, scales, zeros = sources
    ready, free = barriers
    STAGES: gl.constexpr = ready.shape[0]
    WARPGROUPS: gl.constexpr = buffers[1].shape[0] // STAGES
    OF_GROUPS: gl.constexpr = scales.block_type.nbytes + (
        0 if zeros is None else zeros.block_type.nbytes
    )
    OF_INPUTS: gl.constexpr = _BLOCKS * x.block_type.nbytes + x_scales.block_type.nbytes
    BYTES: gl.constexpr = WARPGROUPS * (_BLOCKS * weight.block_type.nbytes + OF_GROUPS) + OF_INPUTS
    ahead = gl.minimum(count, STAGES)
    for i in range(ahead):
        mbarrier.expect(ready.index(i), BYTES)
        _fetch_weights(sources, buffers, ready.index(i), place, i, (first + i) * _BLOCKS, STAGES)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in range(ahead):
        _fetch_inputs(x_sources, x_buffers, ready.index(i), token, i, (first + i) * _BLOCKS)
    for i in range(ahead, count):
        stage = i % STAGES
        bar = ready.index(stage)
        block = (first + i) * _BLOCKS
        mbarrier.wait(free.index(stage), (i // STAGES - 1) & 1)
        mbarrier.expect(bar, BYTES)
        _fetch_weights(sources, buffers, bar, place, stage, block, STAGES)
        _fetch_inputs(x_sources, x_buffers, bar, token, stage, block)
    if PDL and not EARLY:
        # All loads of W are issued: only now may the next kernel's weights compete with ours.
        tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def _words(tiles, place):
    """The words of a block [rows, 16], of which a thread has four neighbours of two rows."""
    WARPGROUPS: gl.constexpr = gl.num_warps() // 4
    ROWS: gl.constexpr = _ROWS * WARPGROUPS
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [4, 0]],
        [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        [[8, 0], [16, 0]] + ([[32, 0]] if WARPGROUPS == 2 else []),
        [],
        [WARPGROUPS * _LINES, _LINE],
    )
    ONE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]] + ([[64, 0]] if WARPGROUPS == 2 else []),
        [],
        [ROWS, 16],
    )
    words = joined_tiles(tiles, WARPGROUPS).index(place).load(LOADED)
    return gl.convert_layout(words.reshape([ROWS, 16]), ONE, assert_trivial=True)


@gluon.jit
def _of_rows(tiles, stage, LAYOUT: gl.constexpr):
    """Scales or zero points of the groups of a stage: of each, float32 [rows]."""
    WARPGROUPS: gl.constexpr = gl.num_warps() // 4
    GROUPS: gl.constexpr = tiles.shape[1]
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 8], [1, 0]],
        [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 16], [0, 32]] + ([[GROUPS, 0]] if WARPGROUPS == 2 else []),
        [],
        [WARPGROUPS * GROUPS, _ROWS],
    )
    values = joined_tiles(tiles, WARPGROUPS).index(stage).load(LOADED).to(gl.float32)
    values = values.reshape([WARPGROUPS, GROUPS, _ROWS]).permute((0, 2, 1))
    columns = gl.split(values.reshape([WARPGROUPS * _ROWS, GROUPS]))
    found = ()
    for i in gl.static_range(GROUPS):
        one = gl.convert_layout(columns[i], gl.SliceLayout(1, LAYOUT), assert_trivial=True)
        found += (one,)  # type: ignore[assignment]
    return found


@gluon.jit
def _of_tokens(tiles, stage, LAYOUT: gl.constexpr):
    """Scales and totals of a stage's blocks of inputs, float32 [tokens] each."""
    TOKENS: gl.constexpr = tiles.shape[2]
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 4]]
        + ([[0, 8]] if TOKENS > 8 else [])
        + ([[0, 16]] if TOKENS > 16 else [])
        + [[1, 0], [2, 0]],
        [[0, 1], [0, 2], [0, 0], [0, 0], [0, 0]],
        [[0, 0], [0, 0]] + ([[0, 0]] if gl.num_warps() == 8 else []),
        [],
        [2 * _BLOCKS, TOKENS],
    )
    values = tiles.index(stage).load(LOADED).reshape([_BLOCKS, 2, TOKENS]).permute((2, 0, 1))
    scales, totals = gl.split(values)
    scales = gl.split(scales)
    totals = gl.split(totals)
    found = ()
    for i in gl.static_range(_BLOCKS):
        scale = gl.convert_layout(scales[i], gl.SliceLayout(0, LAYOUT), assert_trivial=True)
        total = gl.convert_layout(totals[i], gl.SliceLayout(0, LAYOUT), assert_trivial=True)
        found += ((scale, total),)  # type: ignore[assignment]
    return found


@gluon.jit
def _left(words, LAYOUT: gl.constexpr):
    """Words [rows, 16] -> 16 (q - 8), int8 [rows, 128], the left operand."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, k_width=4)
    return gl.convert_layout(unpacked(words), OPERAND, assert_trivial=True)


@gluon.jit
def _both(sums):
    """[rows, 2 tokens], of both numbers of each token's inputs -> float32 [rows, tokens]."""
    high, low = gl.split(sums.reshape([sums.shape[0], sums.shape[1] // 2, 2]))
    return (high * 256 + low).to(gl.float32)


@gluon.jit
def _scaled(products, of_tokens, factor, shift):
    """What a block adds to the sums, 16 times.

    Args:
        products: of integers.
        of_tokens: scales and totals of the inputs.
        factor, shift: scales of W, and its zero points, if there are any.
    """
    scale, total = of_tokens
    values = _both(products) * scale[None, :]
    if shift is not None:
        values = values - shift[:, None] * (total * 16.0)[None, :]
    return values * factor[:, None]


@gluon.jit
def _sums(
    buffers,
    x_buffers,
    barriers,
    count,
    way,
    WAYS: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
):
    """What one of WAYS partitions adds up, 16 times."""
    tiles, scale_tiles, zero_tiles = buffers
    x_tiles, x_scale_tiles = x_buffers
    ready, free = barriers
    STAGES: gl.constexpr = ready.shape[0]
    COLUMNS: gl.constexpr = x_tiles.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, COLUMNS, 32]
    )
    nothing = gl.zeros([16 * gl.num_warps(), COLUMNS], gl.int32, LAYOUT)
    acc = _both(nothing)
    ADDED: gl.constexpr = acc.type.layout
    for i in range(way, count, WAYS):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        factors = _of_rows(scale_tiles, stage, ADDED)
        shifts = _of_rows(zero_tiles, stage, ADDED) if HAS_ZEROS else ()
        of_tokens = _of_tokens(x_scale_tiles, stage, ADDED)
        parts = ()
        for j in gl.static_range(_BLOCKS + 1):
            # A block is unpacked while the one before it is multiplied.
            if j < _BLOCKS:
                left = _left(_words(tiles, stage * _BLOCKS + j), LAYOUT)
                right = x_tiles.index(stage * _BLOCKS + j).permute((1, 0))
                part = warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)
                parts += (part,)  # type: ignore[assignment]
            if j > 0:
                done = warpgroup_mma_wait(1 if j < _BLOCKS else 0, deps=[parts[j - 1]])
                factor = factors[(j - 1) // GROUP_BLOCKS]
                shift = shifts[(j - 1) // GROUP_BLOCKS] if HAS_ZEROS else None
                acc = acc + _scaled(done, of_tokens[j - 1], factor, shift)
        mbarrier.arrive(free.index(stage), count=1)
    return acc


@gluon.jit
def _first_sums(
    buffers,
    x_buffers,
    barriers,
    count,
    WAYS: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
):
    return (_sums(buffers, x_buffers, barriers, count, 0, WAYS, GROUP_BLOCKS, HAS_ZEROS),)


@gluon.jit
def _second_sums(
    buffers,
    x_buffers,
    barriers,
    second,
    count,
    GROUP_BLOCKS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
):
    """Write the sums of the second partition that multiplies to shared memory."""
    second.store(_sums(buffers, x_buffers, barriers, count, 1, 2, GROUP_BLOCKS, HAS_ZEROS))


@gluon.jit(do_not_specialize=["num_tokens", "num_splits"])
def linear_packed_kernel(
    x,
    x_scales,
    weight,
    scales,
    zeros,
    bias,
    out,
    sums,
    arrivals,
    num_tokens,
    num_rows,
    num_blocks,
    num_splits,
    group_blocks,
    STAGES: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    WAYS: gl.constexpr,
    REGISTERS: gl.constexpr,
    SPLITS: gl.constexpr,
    PARTIAL: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_tokens, num_rows].

    Args:
        x, x_scales: descriptors of what Rounding.INTEGERS makes of inputs: int8 [2 num_tokens,
            in_features], and float32 [2 num_blocks, at least num_tokens].
        weight: descriptor of the words of pack_integers, by lines of two rows of a block.
        scales, zeros: descriptors of [groups, num_rows or 2 num_rows]; zeros may be None.
        out: with PARTIAL float32 [num_splits, num_tokens, num_rows].
        sums: float32 workspace, for SPLITS > 1.
        arrivals: int32, 0 for every tile before and after the kernel.
        num_blocks: of 128 inputs.
        group_blocks: how many of them share scales.
        WAYS: how many partitions multiply; the second one has REGISTERS.
        GROUP_BLOCKS: how many of the blocks of a stage share scales.
    """
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    HAS_ZEROS: gl.constexpr = zeros is not None
    ROWS: gl.constexpr = _ROWS * WARPGROUPS
    BM: gl.constexpr = x.block_type.shape[0] // 2
    token = gl.program_id(0) * BM
    tile = gl.program_id(1)
    split = gl.program_id(2)
    row = tile * (_ROWS if GATED else ROWS)
    second_row = row + (num_rows if GATED else _ROWS)
    num_steps = gl.cdiv(num_blocks, _BLOCKS)
    per_split = gl.cdiv(num_steps, num_splits)
    first = split * per_split
    count = gl.minimum(first + per_split, num_steps) - first

    tiles = allocate_tiles(weight, STAGES * _BLOCKS * WARPGROUPS)
    scale_tiles = allocate_tiles(scales, STAGES * WARPGROUPS)
    zero_tiles = allocate_tiles(zeros, STAGES * WARPGROUPS) if HAS_ZEROS else scale_tiles
    x_tiles = allocate_tiles(x, STAGES * _BLOCKS)
    x_scale_tiles = allocate_tiles(x_scales, STAGES)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    x_sources = (x, x_scales)
    sources = (weight, scales, zeros)
    buffers = (tiles, scale_tiles, zero_tiles)
    x_buffers = (x_tiles, x_scale_tiles)
    barriers = (ready, free)
    place = (row, second_row, num_blocks, group_blocks)
    loads = (x_sources, sources, buffers, x_buffers, barriers, place, token, first, count)
    if WAYS == 2:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        second = gl.allocate_shared_memory(gl.float32, [ROWS, BM], FLAT)
        (acc,) = gl.warp_specialize(
            [
                (
                    _first_sums,
                    (buffers, x_buffers, barriers, count, 2, GROUP_BLOCKS, HAS_ZEROS),
                ),
                (
                    _second_sums,
                    (buffers, x_buffers, barriers, second, count, GROUP_BLOCKS, HAS_ZEROS),
                ),
                (_produce, (loads, EARLY, PDL)),
            ],
            [4 * WARPGROUPS, 1],
            [REGISTERS, 24],
        )
        acc = acc + second.load(acc.type.layout)
    else:
        (acc,) = gl.warp_specialize(
            [
                (
                    _first_sums,
                    (buffers, x_buffers, barriers, count, 1, GROUP_BLOCKS, HAS_ZEROS),
                ),
                (_produce, (loads, EARLY, PDL)),
            ],
            [1],
            [24],
        )
    acc = acc * 0.0625
    if PDL:
        tl.extra.cuda.gdc_wait()
    result = (tile, split, token, row, num_tokens, num_rows)
    finish_splits(
        acc, bias, out, sums, arrivals, result, SPLITS, PARTIAL, EPILOGUE, GATED, HAS_BIAS
    )
