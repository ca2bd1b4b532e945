"""The experts' projections on Hopper GPUs: grouped products of few tokens, bound by memory.

Programs are as many as fit on the SMs, and each computes one tile after the other: two matrices of
ROWS rows of an expert's weights (gates and the ups that belong to them, or neighbouring rows of the
down projection), times the tokens of one block of routing.py's lists. One warp loads weights by
TMA, STAGES deep and on into the next tile; a warpgroup gathers the tokens' inputs; another one
multiplies by wgmma and stores.

FP8 weights go from shared memory to the tensor cores as they are. An FP8 product needs FP8 on both
sides: each 128 inputs of a token are scaled by a power of two, and split into two
e4m3 numbers that add up to what a bfloat16 holds (4 bits of its 8 each), so that no weight has to
be converted, and no input is rounded beyond 2^-17 of the largest one. Both numbers of a token are
columns of the same product, which reads weights once. The tensor cores add products of FP8 with
some 14 bits; sums of 128 inputs are added in float32.

While a tile is stored, nothing is multiplied, and soon nothing loaded: what a tile needs of the
lists is loaded before the tile that precedes it is done.
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

from octavo.ops.cuda.expert_weights import BLOCK
from octavo.ops.cuda.linear_hopper import _activate_gated, _barrier, _fetch_tile
from octavo.ops.cuda.two_float8 import scales_of_two

_BLOCK = tl.constexpr(BLOCK)  # inputs at once


@gluon.jit
def _block_of(lists, tile, row_tiles):
    """Of a tile: its expert, and where its tokens begin and end."""
    block = tile // row_tiles
    expert = gl.load(lists[0] + block, cache_modifier=".cg")
    begin = gl.load(lists[1] + block, cache_modifier=".cg")
    end = gl.load(lists[2] + block, cache_modifier=".cg")
    return expert, begin, end


@gluon.jit
def _next_block(lists, tile, end, row_tiles):
    """`_block_of` this program's next tile: asked for before the steps of `tile`."""
    return _block_of(lists, gl.minimum(tile + gl.num_programs(0), end - 1), row_tiles)


@gluon.jit
def _fetch(
    weight, lists, num_blocks, buffers, shape, num_steps, GATED: gl.constexpr, PDL: gl.constexpr
):
    """The partition that loads weights."""
    tiles, up_tiles, ready, free = buffers
    num_outputs, row_tiles, per_expert = shape
    STAGES: gl.constexpr = tiles.shape[0]
    ROWS: gl.constexpr = tiles.shape[1]
    WIDTH: gl.constexpr = tiles.shape[2]
    BYTES: gl.constexpr = 2 * weight.block_type.nbytes
    if PDL:
        tl.extra.cuda.gdc_wait()
    next_expert, _, _ = _block_of(lists, gl.program_id(0), row_tiles)
    num_tiles = gl.load(num_blocks, cache_modifier=".cg") * row_tiles
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert = next_expert
        next_expert, _, _ = _next_block(lists, tile, num_tiles, row_tiles)
        if GATED:
            row = expert * per_expert + tile % row_tiles * ROWS
            up_row = row + num_outputs
        else:
            row = expert * per_expert + tile % row_tiles * (2 * ROWS)
            up_row = row + ROWS
        for k in range(num_steps):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(ready.index(stage), BYTES)
            _fetch_tile(weight, [row, k * WIDTH], ready.index(stage), tiles.index(stage))
            _fetch_tile(weight, [up_row, k * WIDTH], ready.index(stage), up_tiles.index(stage))
            step += 1


@gluon.jit
def _in_two(values):
    """Inputs [TOKENS, BLOCK] as two e4m3 numbers each, and the scale of each token.

    They are split in float16, which holds those of a bfloat16, in fewer instructions than float32.
    """
    exact = values.to(gl.float32)
    factors, scales = scales_of_two(gl.max(gl.abs(exact), 1))
    halves = (exact * factors[:, None]).to(gl.float16)
    high = halves.to(gl.float8e4nv)
    low = (halves - high.to(gl.float16)).to(gl.float8e4nv)
    return high, low, scales


@gluon.jit
def _sources(rows, places, end, TOP_K: gl.constexpr, GATED: gl.constexpr):
    """Where in x the inputs of some places in the lists are."""
    if GATED:
        return gl.load(rows + places, mask=places < end, other=0) // TOP_K
    return places


@gluon.jit
def _gather(
    x,
    lists,
    num_blocks,
    buffers,
    shape,
    size,
    stride,
    num_steps,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    AT_ONCE: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads inputs, as two e4m3 numbers and a scale.

    It has the inputs of AT_ONCE steps under way together, so as not to wait for each of them.
    """
    x_tiles, x_scales, ready, free = buffers
    row_tiles, rows = shape[1], lists[3]
    STAGES: gl.constexpr = x_tiles.shape[0]
    TOKENS: gl.constexpr = x_tiles.shape[1] // 2
    COLUMNS: gl.constexpr = x_tiles.shape[2]
    LANES: gl.constexpr = COLUMNS // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    if PDL and GATED:
        tl.extra.cuda.gdc_wait()
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    slots = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, LAYOUT))
    _, begin, end = _block_of(lists, gl.program_id(0), row_tiles)
    num_tiles = gl.load(num_blocks, cache_modifier=".cg") * row_tiles
    # Behind the last block the lists hold anything: a program without tiles has no rows.
    begin = gl.where(gl.program_id(0) < num_tiles, begin, 0)
    end = gl.where(gl.program_id(0) < num_tiles, end, 0)
    source = _sources(rows, begin + slots, end, TOP_K, GATED)
    _, next_begin, next_end = _next_block(lists, gl.program_id(0), num_tiles, row_tiles)
    if PDL and not GATED:
        tl.extra.cuda.gdc_wait()
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        x_rows = x + source.to(gl.int64)[:, None] * stride + columns[None, :]
        is_row = (begin + slots < end)[:, None]
        begin, end = next_begin, next_end
        source = _sources(rows, begin + slots, end, TOP_K, GATED)
        _, next_begin, next_end = _next_block(
            lists, tile + gl.num_programs(0), num_tiles, row_tiles
        )
        for start in range(0, num_steps, AT_ONCE):
            loaded = ()
            for i in gl.static_range(AT_ONCE):
                first = (start + i) * COLUMNS
                inside = is_row & (columns < size - first)[None, :]
                values = gl.load(x_rows + first, mask=inside, other=0.0)
                loaded += (values,)  # type: ignore[assignment]
            for i in gl.static_range(AT_ONCE):
                if start + i < num_steps:
                    stage = (step + i) % STAGES
                    parity = ((step + i) // STAGES + 1) & 1
                    high, low, scales = _in_two(loaded[i])
                    mbarrier.wait(free.index(stage), parity)
                    x_tiles.index(stage).slice(0, TOKENS).store(high)
                    x_tiles.index(stage).slice(TOKENS, TOKENS).store(low)
                    x_scales.index(stage).store(scales)
                    fence_async_shared()
                    _barrier()
                    mbarrier.arrive(ready.index(stage), count=1)
            step += gl.minimum(AT_ONCE, num_steps - start)


@gluon.jit
def _targets(
    rows,
    shares,
    begin,
    end,
    num_tokens,
    TOKENS: gl.constexpr,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    STORE: gl.constexpr,
):
    """Of the tokens of some places in the lists: the rows that results go to, -1 for none, and what
    they are multiplied by. Asked for before a tile is multiplied, so as not to wait afterwards."""
    places = begin + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, STORE))
    is_row = places < end
    share = 1.0
    target = places
    if not GATED:
        assigned = gl.load(rows + places, mask=is_row, other=0)
        share = gl.load(shares + assigned, mask=is_row, other=0.0)
        target = assigned % TOP_K * num_tokens + assigned // TOP_K
    return gl.where(is_row, target, -1), share


@gluon.jit
def _store_to(acc, out, targets, row, num_outputs, GATED: gl.constexpr, STORE: gl.constexpr):
    """Write acc [ROWS, TOKENS], outputs from `row` on, to what `_targets` says."""
    target, share = targets
    values = gl.convert_layout(acc, STORE)
    if not GATED:
        values = values * share[None, :]
    outputs = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, STORE))
    places = out + target.to(gl.int64)[None, :] * num_outputs + outputs[:, None]
    inside = (target >= 0)[None, :] & (outputs < num_outputs)[:, None]
    gl.store(places, values.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _store(acc, out, rows, shares, target, row, TOP_K: gl.constexpr, GATED: gl.constexpr):
    """Write acc [ROWS, TOKENS], outputs from `row` on, for the tokens of some places in the lists.

    target: first and last place, and numbers of tokens and outputs.
    """
    begin, end, num_tokens, num_outputs = target
    ROWS: gl.constexpr = acc.shape[0]
    # Neighbouring threads hold neighbouring rows, which are adjacent in `out`.
    STORE: gl.constexpr = gl.BlockedLayout(
        [8, 1], [ROWS // 8, 256 // ROWS], [1, gl.num_warps()], [0, 1]
    )
    targets = _targets(rows, shares, begin, end, num_tokens, acc.shape[1], TOP_K, GATED, STORE)
    _store_to(acc, out, targets, row, num_outputs, GATED, STORE)


@gluon.jit
def _of_both(sums, LAYOUT: gl.constexpr):
    """[ROWS, 2 TOKENS], sums of all tokens' first numbers and then of the second ones -> [ROWS,
    TOKENS]."""
    halves = sums.reshape([sums.shape[0], 2, sums.shape[1] // 2]).permute((0, 2, 1))
    high, low = gl.split(halves)
    return gl.convert_layout(high + low, LAYOUT, assert_trivial=True)


@gluon.jit
def _multiply(
    lists,
    num_blocks,
    buffers,
    factors,
    out,
    shares,
    shape,
    num_tokens,
    num_steps,
    scale_stride,
    num_scales,
    TOP_K: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that multiplies."""
    tiles, up_tiles, x_tiles, x_scales, ready, free = buffers
    weight_scales, bias = factors
    num_outputs, row_tiles, per_expert = shape
    STAGES: gl.constexpr = tiles.shape[0]
    ROWS: gl.constexpr = tiles.shape[1]
    TOKENS: gl.constexpr = x_tiles.shape[1] // 2
    COLUMNS: gl.constexpr = x_tiles.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, TOKENS, 32]
    )
    BOTH: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 2 * TOKENS, 32]
    )
    BY_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    STORE: gl.constexpr = gl.BlockedLayout(  # as in `_store`
        [8, 1], [ROWS // 8, 256 // ROWS], [1, gl.num_warps()], [0, 1]
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
        if GATED:  # not before: the next kernel reads the lists without waiting for this one
            tl.extra.cuda.gdc_launch_dependents()
    next_expert, next_begin, next_end = _block_of(lists, gl.program_id(0), row_tiles)
    num_tiles = gl.load(num_blocks, cache_modifier=".cg") * row_tiles
    zeros = gl.zeros([ROWS, TOKENS], gl.float32, LAYOUT)
    none = gl.zeros([ROWS, 2 * TOKENS], gl.float32, BOTH)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, begin, end = next_expert, next_begin, next_end
        next_expert, next_begin, next_end = _next_block(lists, tile, num_tiles, row_tiles)
        row = tile % row_tiles * (ROWS if GATED else 2 * ROWS)
        up_row = row + (num_outputs if GATED else ROWS)
        # Rows beyond the end read the last one; their results are not stored.
        last = per_expert - 1
        rows = gl.minimum(row + gl.arange(0, ROWS, layout=BY_ROW), last)
        up_rows = gl.minimum(up_row + gl.arange(0, ROWS, layout=BY_ROW), last)
        acc = zeros
        up = zeros
        first_scale = weight_scales + expert.to(gl.int64) * scale_stride
        own_scales = first_scale + rows // SCALE_ROWS * num_scales
        up_scales = first_scale + up_rows // SCALE_ROWS * num_scales
        own = gl.load(own_scales)
        up_own = gl.load(up_scales)
        targets = _targets(lists[3], shares, begin, end, num_tokens, TOKENS, TOP_K, GATED, STORE)
        for k in range(num_steps):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            xs = x_tiles.index(stage).permute((1, 0))
            part = warpgroup_mma(tiles.index(stage), xs, none, use_acc=False, is_async=True)
            up_part = warpgroup_mma(up_tiles.index(stage), xs, none, use_acc=False, is_async=True)
            of_token = x_scales.index(stage).load(gl.SliceLayout(0, LAYOUT))[None, :]
            if SCALE_COLUMNS > 0:
                following = gl.minimum(k + 1, num_steps - 1) * COLUMNS // SCALE_COLUMNS
                next_own = gl.load(own_scales + following)
                up_next_own = gl.load(up_scales + following)
            part, up_part = warpgroup_mma_wait(0, deps=[part, up_part])
            _barrier()
            mbarrier.arrive(free.index(stage), count=1)
            part = _of_both(part, LAYOUT)
            up_part = _of_both(up_part, LAYOUT)
            if SCALE_COLUMNS > 0:
                acc = acc + part * (of_token * own[:, None])
                up = up + up_part * (of_token * up_own[:, None])
                own = next_own
                up_own = up_next_own
            else:
                acc = acc + part * of_token
                up = up + up_part * of_token
            step += 1
        if SCALE_COLUMNS == 0:
            acc = acc * own[:, None]
            up = up * up_own[:, None]
        if bias is not None:
            places = bias + expert.to(gl.int64) * per_expert
            acc = acc + gl.load(places + rows).to(gl.float32)[:, None]
            up = up + gl.load(places + up_rows).to(gl.float32)[:, None]
        if GATED:
            acc = _activate_gated(acc, up, EPILOGUE)
        _store_to(acc, out, targets, row, num_outputs, GATED, STORE)
        if not GATED:
            _store_to(up, out, targets, up_row, num_outputs, GATED, STORE)


@gluon.jit(do_not_specialize=["num_tokens", "scale_stride"])
def grouped_kernel(
    x,
    weight,
    weight_scales,
    bias,
    out,
    rows,
    experts,
    begins,
    ends,
    num_blocks,
    shares,
    num_tokens,
    num_outputs,
    size,
    stride,
    scale_stride,
    num_scales,
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    AT_ONCE: gl.constexpr,
    GATHERING_WARPS: gl.constexpr,
    GATHERING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Gates and ups with the activation, or down projections, of all blocks.

    The lists are older than the kernel before the down projection, which let it start after its own
    wait, so that it loads weights at once.

    Arguments are those of experts.py's kernel, but for:
        weight: the descriptor of ExpertMatrices.values, all experts' rows one below the other.
        shares: weights of the results, if not GATED.
        X_LAYOUT: of the inputs of a step in shared memory.
    """
    if PDL and not GATED:
        tl.extra.cuda.gdc_launch_dependents()
    ROWS: gl.constexpr = weight.block_type.shape[0]
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(weight.dtype, [STAGES, ROWS, WIDTH], weight.layout)
    up_tiles = gl.allocate_shared_memory(weight.dtype, [STAGES, ROWS, WIDTH], weight.layout)
    x_tiles = gl.allocate_shared_memory(weight.dtype, [STAGES, 2 * TOKENS, _BLOCK], X_LAYOUT)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=2)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    PER_TILE: gl.constexpr = ROWS if GATED else 2 * ROWS
    row_tiles = gl.cdiv(num_outputs, PER_TILE)
    per_expert = 2 * num_outputs if GATED else num_outputs
    num_steps = gl.cdiv(size, _BLOCK)
    lists = (experts, begins, ends, rows)
    shape = (num_outputs, row_tiles, per_expert)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    lists,
                    num_blocks,
                    (tiles, up_tiles, x_tiles, x_scales, ready, free),
                    (weight_scales, bias),
                    out,
                    shares,
                    shape,
                    num_tokens,
                    num_steps,
                    scale_stride,
                    num_scales,
                    TOP_K,
                    SCALE_ROWS,
                    SCALE_COLUMNS,
                    EPILOGUE,
                    GATED,
                    PDL,
                ),
            ),
            (
                _gather,
                (
                    x,
                    lists,
                    num_blocks,
                    (x_tiles, x_scales, ready, free),
                    shape,
                    size,
                    stride,
                    num_steps,
                    TOP_K,
                    GATED,
                    AT_ONCE,
                    PDL,
                ),
            ),
            (
                _fetch,
                (
                    weight,
                    lists,
                    num_blocks,
                    (tiles, up_tiles, ready, free),
                    shape,
                    num_steps,
                    GATED,
                    PDL and GATED,
                ),
            ),
        ],
        [GATHERING_WARPS, 1],
        [GATHERING_REGISTERS, 24],
    )
