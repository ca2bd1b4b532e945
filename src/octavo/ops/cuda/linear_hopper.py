"""Skinny GEMM on Hopper: y = x W^T of few tokens with a large weight, bound by reading W.

A program owns `BN` rows of W (with a gate: the same rows of both halves) and a split of K. One warp
loads tiles of W and x by TMA, STAGES deep; the other warps multiply them by wgmma. The loading warp
starts on W before the preceding kernels have ended (pdl.py), because W depends on none of them. By
default rows of W fill the 64 rows of a wgmma and the tokens are its columns, so that few tokens
cost little; swapped, the tokens fill the 64 rows, and BN may be less than 64. Tokens that are
multiplied by float8 weights without being rounded have two columns each (two_float8.py).

A long K may be cut into SPLITS splits, whose float32 partial sums are added in a fixed order: by
the program of a tile that finishes last, or by the kernel that reads them next (`PARTIAL`).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.float7 import PIECE_INPUTS, PIECE_ROWS
from octavo.ops.cuda.epilogues_hopper import finish, finish_in_two, over_rows, over_tokens
from octavo.ops.cuda.float7 import (
    PIECE_WORDS,
    allocate,
    descriptors_of,
    fetch_rows,
    left_halves,
    left_operand,
)
from octavo.ops.cuda.hopper import fetch_tile, sync_threads

_PIECE_BYTES = tl.constexpr(4 * PIECE_WORDS)
_PIECE_ROWS, _PIECE_INPUTS = tl.constexpr(PIECE_ROWS), tl.constexpr(PIECE_INPUTS)


@gluon.jit
def _fetch_weights(
    sources,
    tiles,
    ready,
    stage,
    row,
    second_row,
    step,
    BLOCKS: gl.constexpr,
    HALVES: gl.constexpr,
    DOWN: gl.constexpr,
):
    bar = ready.index(stage)
    fetch_rows(sources, tiles, bar, row, stage * HALVES, step, BLOCKS, DOWN)
    if HALVES == 2:
        fetch_rows(sources, tiles, bar, second_row, stage * 2 + 1, step, BLOCKS, DOWN)


@gluon.jit
def produce(
    x,
    sources,
    buffers,
    token,
    row,
    second_row,
    first,
    count,
    HALVES: gl.constexpr,
    DOWN: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads.

    sources: the descriptor of W, or those of its words in 7 bits (float7.py).
    HALVES: tiles of W in a stage, from `row` and from `second_row` on.
    DOWN: how many rows further down those of the next step are; 0: they are the next columns.
    """
    x_tiles, tiles, ready, free = buffers
    STAGES: gl.constexpr = x_tiles.shape[0]
    BK: gl.constexpr = x_tiles.shape[2]
    BLOCKS: gl.constexpr = BK // _PIECE_INPUTS
    OF_ROWS: gl.constexpr = (
        sources[0].block_type.nbytes
        if len(sources) == 1
        else BLOCKS * sources[0].block_type.shape[0] * _PIECE_BYTES
    )
    BYTES: gl.constexpr = OF_ROWS * HALVES + x.block_type.nbytes
    ahead = gl.minimum(count, STAGES)
    for i in range(ahead):
        mbarrier.expect(ready.index(i), BYTES)
        _fetch_weights(sources, tiles, ready, i, row, second_row, first + i, BLOCKS, HALVES, DOWN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in range(ahead):
        fetch_tile(x, [token, (first + i) * BK], ready.index(i), x_tiles.index(i))
    for i in range(ahead, count):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), (i // STAGES - 1) & 1)
        mbarrier.expect(ready.index(stage), BYTES)
        _fetch_weights(
            sources, tiles, ready, stage, row, second_row, first + i, BLOCKS, HALVES, DOWN
        )
        fetch_tile(x, [token, (first + i) * BK], ready.index(stage), x_tiles.index(stage))
    if PDL and not EARLY:
        # All loads of W are issued: only now may the next kernel's weights compete with ours.
        tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def _consume(
    buffers,
    first,
    end,
    BN: gl.constexpr,
    LAYOUT: gl.constexpr,
    SWAP: gl.constexpr,
    GATED: gl.constexpr,
):
    """The sums of some stages, of gates and of what they gate."""
    if len(buffers[1]) == 1:
        acc, up = _consume_rows(buffers, first, end, BN, LAYOUT, SWAP, GATED)
    else:
        acc, up = _consume_words(buffers, first, end, BN, LAYOUT, GATED)
    return acc, up


@gluon.jit
def _consume_rows(
    buffers,
    first,
    end,
    BN: gl.constexpr,
    LAYOUT: gl.constexpr,
    SWAP: gl.constexpr,
    GATED: gl.constexpr,
):
    """As _consume, of W as it is."""
    x_tiles, stored, ready, free = buffers
    tiles = stored[0]
    STAGES: gl.constexpr = x_tiles.shape[0]
    HALVES: gl.constexpr = 2 if GATED else 1
    BM: gl.constexpr = x_tiles.shape[1]
    acc = gl.zeros([BM, BN] if SWAP else [BN, BM], gl.float32, LAYOUT)
    up = acc
    for i in range(first, end):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        xs = x_tiles.index(stage)
        ws = tiles.index(stage * HALVES)
        if SWAP:
            acc = warpgroup_mma(xs, ws.permute((1, 0)), acc, is_async=True)
        else:
            acc = warpgroup_mma(ws, xs.permute((1, 0)), acc, is_async=True)
        if GATED:
            us = tiles.index(stage * 2 + 1)
            if SWAP:
                up = warpgroup_mma(xs, us.permute((1, 0)), up, is_async=True)
            else:
                up = warpgroup_mma(us, xs.permute((1, 0)), up, is_async=True)
            acc, up = warpgroup_mma_wait(2, deps=[acc, up])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        # The products of the previous stage are done: it may be loaded again.
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
    if GATED:
        acc, up = warpgroup_mma_wait(0, deps=[acc, up])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, up


@gluon.jit
def _consume_words(
    buffers, first, end, BN: gl.constexpr, LAYOUT: gl.constexpr, GATED: gl.constexpr
):
    """As _consume, of W in 7 bits: a block of inputs is unpacked while the one before it is
    multiplied."""
    x_tiles, tiles, ready, free = buffers
    STAGES: gl.constexpr = x_tiles.shape[0]
    HALVES: gl.constexpr = 2 if GATED else 1
    BM: gl.constexpr = x_tiles.shape[1]
    BLOCKS: gl.constexpr = x_tiles.shape[2] // _PIECE_INPUTS
    # A product reads its registers while it is under way: those of a loop's next turn are the same.
    UNDER_WAY: gl.constexpr = 1 if BLOCKS * HALVES > 1 else 0
    acc = gl.zeros([BN, BM], gl.float32, LAYOUT)
    up = acc
    for i in range(first, end):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        for j in gl.static_range(BLOCKS):
            xs = x_tiles.index(stage).slice(j * _PIECE_INPUTS, _PIECE_INPUTS, dim=1)
            left = left_operand(tiles, stage * HALVES * BLOCKS + j, LAYOUT)
            acc = warpgroup_mma(left, xs.permute((1, 0)), acc, is_async=True)
            acc, up = warpgroup_mma_wait(UNDER_WAY, deps=[acc, up])
            if j == 0:
                # The products of the previous stage are done: it may be loaded again.
                mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
            if GATED:
                left = left_operand(tiles, (stage * 2 + 1) * BLOCKS + j, LAYOUT)
                up = warpgroup_mma(left, xs.permute((1, 0)), up, is_async=True)
                acc, up = warpgroup_mma_wait(1, deps=[acc, up])
    return warpgroup_mma_wait(0, deps=[acc, up])


@gluon.jit
def _scales_of_parts(source, stride, first, num_groups, PARTS: gl.constexpr):
    """Those of PARTS groups, from the `first` on; in place of those that there are not, any."""
    scales = ()
    for part in gl.static_range(PARTS):
        group = gl.minimum(first + part, num_groups - 1)
        scales += (gl.load(source + group * stride),)  # type: ignore[assignment]
    return scales


@gluon.jit
def _consume_parts(
    buffers,
    count,
    x_scales,
    BN: gl.constexpr,
    LAYOUT: gl.constexpr,
    NUMBERS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """The sums of float8 products times the scales of inputs, of which a stage has several: those
    of a part are scaled while the next one is multiplied."""
    x_tiles, tiles, ready, free = buffers
    STAGES: gl.constexpr = x_tiles.shape[0]
    BM: gl.constexpr = x_tiles.shape[1]
    SCALES: gl.constexpr = x_tiles.shape[2] // GROUP
    IN_WORDS: gl.constexpr = len(tiles) > 1
    PART: gl.constexpr = min(GROUP, _PIECE_INPUTS) if IN_WORDS else GROUP
    PARTS: gl.constexpr = x_tiles.shape[2] // PART
    nothing = gl.zeros([BN, BM], gl.float32, LAYOUT)
    sums = nothing
    source, stride, first_token, num_tokens, first, num_groups = x_scales
    columns = gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))
    source += gl.minimum(first_token + columns // NUMBERS, num_tokens - 1)
    mbarrier.wait(ready.index(0), 0)  # The preceding kernel has ended, then.
    scales = _scales_of_parts(source, stride, first * SCALES, num_groups, SCALES)
    for i in range(count):
        stage = i % STAGES
        group = (first + i + 1) * SCALES
        next_scales = _scales_of_parts(source, stride, group, num_groups, SCALES)
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        product = nothing
        for part in gl.static_range(PARTS + 1):
            following = nothing
            if part < PARTS:
                xs = x_tiles.index(stage).slice(part * PART, PART, dim=1).permute((1, 0))
                if not IN_WORDS:
                    ws = tiles[0].index(stage).slice(part * PART, PART, dim=1)
                    following = warpgroup_mma(ws, xs, nothing, use_acc=False, is_async=True)
                else:
                    place = (stage * PARTS + part) * PART // _PIECE_INPUTS
                    if PART == _PIECE_INPUTS:
                        left = left_operand(tiles, place, LAYOUT)
                    elif part % 2 == 0:
                        halves = left_halves(tiles, place, LAYOUT)
                        left = halves[0]
                    else:
                        left = halves[1]
                    following = warpgroup_mma(left, xs, nothing, use_acc=False, is_async=True)
            if part > 0:
                product = warpgroup_mma_wait(1 if part < PARTS else 0, deps=[product])
                sums = sums + product * scales[(part - 1) * PART // GROUP][None, :]
            product = following
        mbarrier.arrive(free.index(stage), count=1)
        scales = next_scales
    return sums


@gluon.jit
def _consume_groups(
    buffers,
    count,
    x_scales,
    BN: gl.constexpr,
    LAYOUT: gl.constexpr,
    GATED: gl.constexpr,
    NUMBERS: gl.constexpr,
    SPAN: gl.constexpr,
):
    """The sums of float8 products times the scales of inputs, of which SPAN stages share one."""
    x_tiles, _, ready, _ = buffers
    BM: gl.constexpr = x_tiles.shape[1]
    sums = gl.zeros([BN, BM], gl.float32, LAYOUT)
    up_sums = sums
    source, stride, first_token, num_tokens, first, _ = x_scales
    columns = gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))
    source += gl.minimum(first_token + columns // NUMBERS, num_tokens - 1)
    mbarrier.wait(ready.index(0), 0)  # The preceding kernel has ended, then.
    for group in range(first // SPAN, gl.cdiv(first + count, SPAN)):
        scale = gl.load(source + group * stride)
        start = gl.maximum(group * SPAN - first, 0)
        end = gl.minimum((group + 1) * SPAN - first, count)
        acc, up = _consume(buffers, start, end, BN, LAYOUT, False, GATED)
        sums = sums + acc * scale[None, :]
        up_sums = up_sums + up * scale[None, :]
    return sums, up_sums


@gluon.jit
def _sums(
    buffers,
    count,
    x_scales,
    BN: gl.constexpr,
    LAYOUT: gl.constexpr,
    SWAP: gl.constexpr,
    GATED: gl.constexpr,
    NUMBERS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """What the program's stages add up to, of gates and of what they gate."""
    BK: gl.constexpr = buffers[0].shape[2]
    if GROUP >= BK:
        acc, up = _consume_groups(buffers, count, x_scales, BN, LAYOUT, GATED, NUMBERS, GROUP // BK)
    elif GROUP > 0:
        acc = _consume_parts(buffers, count, x_scales, BN, LAYOUT, NUMBERS, GROUP)
        up = acc
    else:
        acc, up = _consume(buffers, 0, count, BN, LAYOUT, SWAP, GATED)
    return acc, up


@gluon.jit
def _pairs_added(acc):
    """[rows, tokens], of two columns for each token."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1] // 2
    return gl.sum(acc.reshape([ROWS, TOKENS, 2]), 2)


@gluon.jit(do_not_specialize=["num_tokens", "num_splits", "x_stride", "out_stride"])
def linear_kernel(
    x,
    weight,
    weight_pairs,
    weight_singles,
    x_scales,
    scales,
    bias,
    out,
    out_scales,
    sums,
    arrivals,
    num_tokens,
    num_rows,
    size,
    num_splits,
    x_stride,
    out_stride,
    block_rows,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    PARTIAL: gl.constexpr,
    SWAP: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_SCALES: gl.constexpr,
    NUMBERS: gl.constexpr,
    GROUP: gl.constexpr,
    ROUNDS: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_tokens, num_rows].

    Args:
        x, weight: descriptors of [num_tokens, size] and of W [num_rows or 2 * num_rows, size], or
            of its words in 7 bits (float7.py), with `weight_pairs` and `weight_singles`. Then
            results are those of W / 2 ** UNIT.
        x_scales, scales: float32, with HAS_SCALES: of each token, and of each `block_rows` rows of
            W. Both operands are float8 then.
        NUMBERS: rows of x that are a token's, one or, with a GROUP, two, which are added up.
        GROUP: inputs of a token that share a scale, a multiple of a stage's or, where nothing is
            gated, a part of them; 0: all. Then x_scales are [groups, x_stride], of tokens. Not with
            SWAP.
        out: with PARTIAL [num_splits, num_tokens, num_rows]; with ROUNDS float8 [num_tokens, 2,
            num_rows], and out_scales [tiles, out_stride], of tokens.
        sums: float32 workspace, for SPLITS > 1.
        arrivals: int32, 0 for every tile before and after the kernel.
    """
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    sources = descriptors_of(weight, weight_pairs, weight_singles)
    LINES: gl.constexpr = weight.block_type.shape[0]
    BN: gl.constexpr = LINES if len(sources) == 1 else LINES * _PIECE_ROWS
    BM: gl.constexpr = x.block_type.shape[0]
    BK: gl.constexpr = x.block_type.shape[1]
    COLUMNS: gl.constexpr = BN if SWAP else BM
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[gl.num_warps(), 1],
        instr_shape=[16, COLUMNS, 32 if HAS_SCALES else 16],
    )
    x_row = gl.program_id(0) * BM
    TOKENS: gl.constexpr = BM // NUMBERS
    token = gl.program_id(0) * TOKENS
    tile = gl.program_id(1)
    split = gl.program_id(2)
    row = tile * BN
    num_columns = gl.cdiv(size, BK)
    per_split = gl.cdiv(num_columns, num_splits)
    first = split * per_split
    count = gl.minimum(first + per_split, num_columns) - first

    HALVES: gl.constexpr = 2 if GATED else 1
    tiles = allocate(sources, STAGES * HALVES, BK // _PIECE_INPUTS)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    buffers = (x_tiles, tiles, ready, free)
    up_row = row + num_rows
    if GROUP > 0:  # asked for before the products that they belong to
        rows = row + gl.arange(0, BN, layout=gl.SliceLayout(1, LAYOUT))
        scale = gl.load(scales + rows // block_rows, mask=rows < num_rows, other=0.0)
        up_scale = scale
        if GATED:
            up_scales = scales + (rows + num_rows) // block_rows
            up_scale = gl.load(up_scales, mask=rows < num_rows, other=0.0)
    of_tokens = (x_scales, x_stride, token, num_tokens, first, gl.cdiv(size, max(GROUP, 1)))
    acc, up = gl.warp_specialize(
        [
            (_sums, (buffers, count, of_tokens, BN, LAYOUT, SWAP, GATED, NUMBERS, GROUP)),
            (
                produce,
                (x, sources, buffers, x_row, row, up_row, first, count, HALVES, 0, EARLY, PDL),
            ),
        ],
        [1],
        [24],
    )
    if GROUP > 0:
        acc = acc * scale[:, None]
        up = up * up_scale[:, None]
    if NUMBERS == 2:
        acc = _pairs_added(acc)
        up = _pairs_added(up)
    OF_SUMS: gl.constexpr = acc.type.layout
    if PDL:
        tl.extra.cuda.gdc_wait()
    ROW_AXIS: gl.constexpr = 0 if SWAP else 1
    if HAS_SCALES and GROUP == 0:
        rows = row + gl.arange(0, BN, layout=gl.SliceLayout(ROW_AXIS, OF_SUMS))
        tokens = token + gl.arange(0, TOKENS, layout=gl.SliceLayout(1 - ROW_AXIS, OF_SUMS))
        factor = gl.load(x_scales + tokens, mask=tokens < num_tokens, other=0.0)
        by_token = over_rows(factor, SWAP)
        factor = gl.load(scales + rows // block_rows, mask=rows < num_rows, other=0.0)
        acc = acc * by_token * over_tokens(factor, SWAP)
        if GATED:
            up_rows = rows + num_rows
            factor = gl.load(scales + up_rows // block_rows, mask=rows < num_rows, other=0.0)
            up = up * by_token * over_tokens(factor, SWAP)
    if SPLITS == 1:
        if PARTIAL:
            out += split.to(gl.int64) * num_tokens * num_rows
        shape = (token, row, num_tokens, num_rows)
        if ROUNDS:
            finish_in_two(
                acc, up, bias, out, out_scales, out_stride, shape, EPILOGUE, GATED, HAS_BIAS
            )
        else:
            finish(acc, up, bias, out, shape, split == 0, SWAP, EPILOGUE, GATED, HAS_BIAS)
    else:
        rows = gl.arange(0, BN, layout=gl.SliceLayout(ROW_AXIS, OF_SUMS))
        tokens = gl.arange(0, TOKENS, layout=gl.SliceLayout(1 - ROW_AXIS, OF_SUMS))
        inner = (
            tokens[:, None] * BN + rows[None, :]
            if SWAP
            else rows[:, None] * TOKENS + tokens[None, :]
        )
        SIZE: gl.constexpr = TOKENS * BN
        slot = tile * gl.num_programs(0) + gl.program_id(0)
        base = sums + slot.to(gl.int64) * (SPLITS * SIZE * (2 if GATED else 1)) + inner
        gl.store(base + split * SIZE, acc)
        if GATED:
            gl.store(base + (SPLITS + split) * SIZE, up)
        sync_threads()
        seen = gl.atomic_add(arrivals + slot, 1, sem="acq_rel", scope="gpu")
        if seen == SPLITS - 1:
            acc = gl.load(base)
            for i in gl.static_range(1, SPLITS):
                acc += gl.load(base + i * SIZE)
            if GATED:
                up = gl.load(base + SPLITS * SIZE)
                for i in gl.static_range(1, SPLITS):
                    up += gl.load(base + (SPLITS + i) * SIZE)
            shape = (token, row, num_tokens, num_rows)
            finish(acc, up, bias, out, shape, True, SWAP, EPILOGUE, GATED, HAS_BIAS)
            gl.store(arrivals + slot, 0)
