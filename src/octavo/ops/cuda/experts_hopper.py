"""The experts' projections on Hopper GPUs: grouped products of few tokens, bound by memory.

One kernel computes both of them. Its programs are one for each SM, and each claims one tile after
the other (claims.py): two matrices of ROWS rows of an expert's weights (gates and the ups that
belong to them, or neighbouring rows of the down projection), times the tokens of one block of
routing.py's lists. One warp loads weights by TMA, STAGES deep and on into the next tile; a
warpgroup copies the tokens' inputs; two others multiply by wgmma and store; one more warp counts
what they have stored.

Tiles of down projections follow those of the gates, and memory does not rest in between: their
weights are loaded as those of one more tile. Their inputs wait until all gates of the block are
there, which are counted in memory, and which are there long before, but for the last ones.

FP8 weights go from shared memory to the tensor cores as they are. An FP8 product needs FP8 on both
sides: inputs are scaled by a power of two, and split into two e4m3 numbers that add up to what a
bfloat16 holds (4 bits of its 8 each), so that no weight has to be converted, and no input is
rounded beyond 2^-17 of the largest one. Both numbers of a token are columns of the same product,
which reads weights once. The tensor cores add products of FP8 with some 14 bits; sums of 128 inputs
are added in float32.

Inputs are split once, and then copied by each tile that reads them. Those of the layer come split,
from the kernel that routes them, and share a scale by _GROUP steps. Those of the down projections
are split when a tile of gates is stored, whose ROWS are the inputs of a step, which has scales of
its own.

While a tile is stored, nothing is multiplied, and soon nothing loaded: what a tile needs of the
lists is loaded before the tile that precedes it is stored.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.float7 import PIECE_ROWS, UNIT
from octavo.ops.cuda.claims import claim, claimed
from octavo.ops.cuda.epilogues import activate_gated
from octavo.ops.cuda.expert_weights import BLOCK
from octavo.ops.cuda.float7 import allocate, descriptors_of, fetch_rows, left_operand
from octavo.ops.cuda.grouped_hopper import (
    announce_all,
    await_gates,
    count_tiles,
    first_block,
    first_state,
    hand_over,
    make_grouped_claims,
    next_block,
    reset_progress,
    rows_of,
    shapes_of,
    sources_of,
    store_halves,
    store_to,
    targets_of,
)
from octavo.ops.cuda.hopper import copy_async, sync_threads
from octavo.ops.cuda.two_float8 import in_two, scales_of_two
from octavo.ops.quantized import Rounding

ROWS = BLOCK  # of each of two matrices in a tile: outputs of gates are the inputs of a step
_BLOCK = tl.constexpr(BLOCK)  # inputs at once
_ROWS = tl.constexpr(ROWS)
_PIECE_ROWS, _UNIT = tl.constexpr(PIECE_ROWS), tl.constexpr(UNIT)
_GROUP = tl.constexpr(Rounding.IN_TWO.group // BLOCK)  # steps whose inputs share a scale


@gluon.jit
def _fetch(
    sources, lists, buffers, claims, counter, work, state, shape, num_steps, GATED: gl.constexpr
):
    """Load the weights of a projection, and claim tiles; the state after its last one."""
    tile, count, step = state
    num_tiles, before = work
    tiles, ready, free = buffers
    num_outputs, row_tiles, per_expert = shape
    STAGES: gl.constexpr = ready.shape[0]
    IN_BITS: gl.constexpr = 8 if len(sources) == 1 else 7
    BYTES: gl.constexpr = 2 * _ROWS * _BLOCK * IN_BITS // 8
    tile -= before
    expert, _, _ = first_block(lists, tile, num_tiles, row_tiles, GATED)
    while tile < num_tiles:
        if GATED:
            row = expert * per_expert + tile % row_tiles * _ROWS
            up_row = row + num_outputs
        else:
            row = expert * per_expert + tile % row_tiles * (2 * _ROWS)
            up_row = row + _ROWS
        for k in range(num_steps):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(ready.index(stage), BYTES)
            fetch_rows(sources, tiles, ready.index(stage), row, 2 * stage, k)
            fetch_rows(sources, tiles, ready.index(stage), up_row, 2 * stage + 1, k)
            step += 1
        tile = claim(claims, count, counter) - before
        count += 1
        expert, _, _ = next_block(lists, tile, num_tiles, row_tiles)
    return tile + before, count, step


@gluon.jit
def _fetch_to_l2(
    values, shape, line_bytes, num_experts, LINE_ROWS: gl.constexpr, AHEAD: gl.constexpr
):
    """Have AHEAD bytes of each line of this program's first tile on their way to the L2 cache while
    the lists are made: as if each expert had one block, which is nearly so with many tokens.

    LINE_ROWS: rows of W that a line of memory holds.
    """
    num_outputs, row_tiles, per_expert = shape
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    LINES: gl.constexpr = _ROWS // LINE_ROWS
    tile = gl.program_id(0)
    expert = gl.minimum(tile // row_tiles, num_experts - 1)
    first = tile % row_tiles * LINES
    for start in gl.static_range(0, 2 * LINES, 32):
        lines = start + gl.arange(0, 32, layout=LANES)
        half = lines // LINES
        lines = gl.minimum(first + lines % LINES, num_outputs // LINE_ROWS - 1)
        lines += half * (num_outputs // LINE_ROWS) + expert * (per_expert // LINE_ROWS)
        gl.inline_asm_elementwise(
            f"cp.async.bulk.prefetch.L2.global [$1], {AHEAD}; mov.b32 $0, 0;",
            "=r,l",
            [values + lines.to(gl.int64) * line_bytes],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _fetch_all(
    weights,
    values,
    num_experts,
    lists,
    num_blocks,
    counter,
    buffers,
    claims,
    shapes,
    num_steps,
    line_bytes,
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads weights."""
    if AHEAD > 0:
        LINE_ROWS: gl.constexpr = 1 if len(weights[0]) == 1 else _PIECE_ROWS
        _fetch_to_l2(values, shapes[0], line_bytes, num_experts, LINE_ROWS, AHEAD)
    if PDL:
        tl.extra.cuda.gdc_wait()
    num = gl.load(num_blocks, cache_modifier=".cg")
    gates, downs = count_tiles(num, shapes)
    state = _fetch(
        weights[0],
        lists,
        buffers,
        claims,
        counter,
        gates,
        first_state(),
        shapes[0],
        num_steps[0],
        True,
    )
    _fetch(
        weights[1], lists, buffers, claims, counter, downs, state, shapes[1], num_steps[1], False
    )


@gluon.jit
def _gather(
    halves,
    lists,
    done,
    gate_tiles,
    buffers,
    claims,
    work,
    state,
    row_tiles,
    size,
    num_steps,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
):
    """Copy the inputs of a projection, in two numbers each, to shared memory; the state after its
    last tile.

    halves: the numbers, their scales, and how far those of a group are from those of the next one.
    """
    values, scales, scale_stride = halves
    x_tiles, x_scales, ready, free = buffers
    rows = lists[3]
    STAGES: gl.constexpr = x_tiles.shape[0]
    TOKENS: gl.constexpr = x_tiles.shape[1] // 2
    COLUMNS: gl.constexpr = x_tiles.shape[2]
    LANES: gl.constexpr = COLUMNS // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 16], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    SCALES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    numbers = gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(1, LAYOUT))
    slots = numbers % TOKENS
    scale_slots = gl.arange(0, TOKENS, layout=SCALES)
    tile, count, step = state
    num_tiles, before = work
    tile -= before
    _, begin, end = first_block(lists, tile, num_tiles, row_tiles, GATED)
    while tile < num_tiles:
        source = sources_of(rows, begin + slots, end, TOP_K, GATED)
        scale_source = sources_of(rows, begin + scale_slots, end, TOP_K, GATED)
        number = (2 * source + numbers // TOKENS).to(gl.int64)
        places = values + number[:, None] * size + columns[None, :]
        is_row = (begin + slots < end)[:, None]
        block = tile // row_tiles
        if GATED:
            scale_places = scales + scale_source
        else:
            scale_places = scales + block * num_steps * TOKENS + scale_slots
        if not GATED:
            await_gates(done + block, gate_tiles)
        for k in range(num_steps):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
            group = k // _GROUP if GATED else k
            inside = is_row & (columns < size - k * COLUMNS)[None, :]
            copy_async(x_tiles.index(stage), places + k * COLUMNS, mask=inside)
            copy_async(x_scales.index(stage), scale_places + group * scale_stride)
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            step += 1
        tile = claimed(claims, count) - before
        count += 1
        _, begin, end = next_block(lists, tile, num_tiles, row_tiles)
    return tile + before, count, step


@gluon.jit
def _gather_all(
    halves,
    inner,
    lists,
    num_blocks,
    progress,
    buffers,
    claims,
    shapes,
    size,
    num_steps,
    TOP_K: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads inputs."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    done = progress + 2
    num = gl.load(num_blocks, cache_modifier=".cg")
    gate_tiles, down_tiles = shapes[0][1], shapes[1][1]
    gates, downs = count_tiles(num, shapes)
    state = _gather(
        halves, lists, done, gate_tiles, buffers, claims, gates, first_state(),
        gate_tiles, size, num_steps[0], TOP_K, True,
    )  # fmt: skip
    _gather(
        inner, lists, done, gate_tiles, buffers, claims, downs, state,
        down_tiles, num_steps[1] * _BLOCK, num_steps[1], TOP_K, False,
    )  # fmt: skip
    reset_progress(progress, num)


@gluon.jit
def _store_in_two(acc, out, tile, begin, end, row_tiles, num_outputs, STORE: gl.constexpr):
    """Write acc [ROWS, TOKENS], a tile of gates, as two e4m3 numbers each, and their scales; zeros
    where it goes beyond the end."""
    values, scales, _ = out
    LAYOUT: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    row = tile % row_tiles * ROWS
    outputs = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    acc = gl.where((outputs < num_outputs)[:, None], acc, 0.0)
    factors, of_tokens = scales_of_two(gl.max(gl.abs(acc), 0))
    high, low = in_two(gl.convert_layout(acc * factors[None, :], STORE))
    store_halves(high, low, values, begin, end, row, row_tiles * ROWS, STORE)
    slots = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(scales + tile * TOKENS + slots, of_tokens)


@gluon.jit
def _left(tiles, place, LAYOUT: gl.constexpr):
    """The left operand at that place: in shared memory as it is, or unpacked in registers."""
    return tiles[0].index(place) if len(tiles) == 1 else left_operand(tiles, place, LAYOUT)


@gluon.jit
def _product(left, x_tiles, stage, none):
    """Begin to multiply weights and inputs."""
    xs = x_tiles.index(stage).permute((1, 0))
    return warpgroup_mma(left, xs, none, use_acc=False, is_async=True)


@gluon.jit
def _added(sums, part, of_token, own, SCALE_COLUMNS: gl.constexpr):
    """sums plus those of a step, part [ROWS, 2 TOKENS]: of all tokens' first numbers, and then of
    the second ones."""
    halves = part.reshape([part.shape[0], 2, part.shape[1] // 2]).permute((0, 2, 1))
    high, low = gl.split(halves)
    scales = of_token[None, :]
    if SCALE_COLUMNS > 0:
        scales = scales * own[:, None]
    return sums + gl.convert_layout(high + low, sums.type.layout, assert_trivial=True) * scales


@gluon.jit
def _add_steps(
    acc,
    up,
    buffers,
    step,
    own_scales,
    up_scales,
    k,
    SCALE_COLUMNS: gl.constexpr,
    COUNT: gl.constexpr,
):
    """acc and up plus the sums of COUNT steps, of which k is the first, and the step after them:
    those of one matrix are added while the other is multiplied, or unpacked."""
    tiles, x_tiles, x_scales, ready, free = buffers
    STAGES: gl.constexpr = x_tiles.shape[0]
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    BOTH: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 2 * TOKENS, 32]
    )
    BY_TOKEN: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    # Unpacked weights are in registers, of which two products at once would take too many.
    IN_WORDS: gl.constexpr = len(tiles) > 1
    stage = step % STAGES
    none = gl.zeros([ROWS, 2 * TOKENS], gl.float32, BOTH)
    up_part = none
    of_token = gl.zeros([TOKENS], gl.float32, BY_TOKEN)
    own = 1.0
    up_own = 1.0
    next_up_own = 1.0
    for i in gl.static_range(COUNT):
        before = stage
        stage = step % STAGES
        if SCALE_COLUMNS > 0:
            column = (k + i) * _BLOCK // SCALE_COLUMNS
            own = gl.load(own_scales + column)
            next_up_own = gl.load(up_scales + column)
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        fence_async_shared()  # copies of inputs, unlike those by TMA, need it
        left = _left(tiles, 2 * stage, BOTH)
        part = none
        if not IN_WORDS:
            part = _product(left, x_tiles, stage, none)
        if i > 0:
            up_part = warpgroup_mma_wait(0 if IN_WORDS else 1, deps=[up_part])
            sync_threads()
            mbarrier.arrive(free.index(before), count=1)
            up = _added(up, up_part, of_token, up_own, SCALE_COLUMNS)
        if IN_WORDS:
            part = _product(left, x_tiles, stage, none)
        left = _left(tiles, 2 * stage + 1, BOTH)
        of_token = x_scales.index(stage).load(BY_TOKEN)
        if not IN_WORDS:
            up_part = _product(left, x_tiles, stage, none)
        part = warpgroup_mma_wait(0 if IN_WORDS else 1, deps=[part])
        acc = _added(acc, part, of_token, own, SCALE_COLUMNS)
        if IN_WORDS:
            up_part = _product(left, x_tiles, stage, none)
        up_own = next_up_own
        step += 1
    up_part = warpgroup_mma_wait(0, deps=[up_part])
    sync_threads()
    mbarrier.arrive(free.index(stage), count=1)
    up = _added(up, up_part, of_token, up_own, SCALE_COLUMNS)
    return acc, up, step


@gluon.jit
def _multiply(
    lists,
    stored,
    buffers,
    claims,
    work,
    state,
    factors,
    out,
    shares,
    shape,
    num_tokens,
    num_steps,
    TOP_K: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
):
    """Multiply and store a projection; the state after its last tile."""
    tile, count, step = state
    num_tiles, before = work
    weight_scales, bias, scale_stride, num_scales = factors
    num_outputs, row_tiles, per_expert = shape
    ROWS: gl.constexpr = 16 * gl.num_warps()
    TOKENS: gl.constexpr = buffers[1].shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, TOKENS, 32]
    )
    BY_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    # Neighbouring threads hold neighbouring rows, which are adjacent in `out`.
    OWN: gl.constexpr = min(8, TOKENS // 2)  # rows that a thread stores
    STORE: gl.constexpr = gl.BlockedLayout(
        [OWN, 1], [ROWS // OWN, 32 * OWN // ROWS], [1, gl.num_warps()], [0, 1]
    )
    tile -= before
    expert, begin, end = first_block(lists, tile, num_tiles, row_tiles, GATED)
    zeros = gl.zeros([ROWS, TOKENS], gl.float32, LAYOUT)
    while tile < num_tiles:
        row, up_row = rows_of(tile, row_tiles, num_outputs, ROWS, GATED)
        # Rows beyond the end read the last one; their results are not stored.
        last = per_expert - 1
        rows = gl.minimum(row + gl.arange(0, ROWS, layout=BY_ROW), last)
        up_rows = gl.minimum(up_row + gl.arange(0, ROWS, layout=BY_ROW), last)
        acc = zeros
        up = zeros
        first_scale = weight_scales + expert.to(gl.int64) * scale_stride
        own_scales = first_scale + rows // SCALE_ROWS * num_scales
        up_scales = first_scale + up_rows // SCALE_ROWS * num_scales
        if SCALE_COLUMNS == 0:
            own = gl.load(own_scales)
            up_own = gl.load(up_scales)
        if not GATED:
            targets = targets_of(
                lists[3], shares, begin, end, num_tokens, TOKENS, TOP_K, GATED, STORE
            )
        for k in range(0, num_steps - 1, 2):
            acc, up, step = _add_steps(
                acc, up, buffers, step, own_scales, up_scales, k, SCALE_COLUMNS, 2
            )
        if num_steps % 2 > 0:
            acc, up, step = _add_steps(
                acc, up, buffers, step, own_scales, up_scales, num_steps - 1, SCALE_COLUMNS, 1
            )
        following = claimed(claims, count) - before
        count += 1
        next_expert, next_begin, next_end = next_block(lists, following, num_tiles, row_tiles)
        if SCALE_COLUMNS == 0:
            FACTOR: gl.constexpr = 1.0 if len(buffers[0]) == 1 else 2.0**_UNIT
            acc = acc * (own * FACTOR)[:, None]
            up = up * (up_own * FACTOR)[:, None]
        if bias is not None:
            places = bias + expert.to(gl.int64) * per_expert
            acc = acc + gl.load(places + rows).to(gl.float32)[:, None]
            up = up + gl.load(places + up_rows).to(gl.float32)[:, None]
        if GATED:
            acc = activate_gated(acc, up, EPILOGUE)
            _store_in_two(acc, out, tile, begin, end, row_tiles, num_outputs, STORE)
            hand_over(stored, count - 1)
        else:
            store_to(acc, out, targets, row, num_outputs, GATED, STORE)
            store_to(up, out, targets, up_row, num_outputs, GATED, STORE)
        tile, expert, begin, end = following, next_expert, next_begin, next_end
    return tile + before, count, step


@gluon.jit
def _multiply_all(
    lists,
    num_blocks,
    stored,
    buffers,
    claims,
    factors,
    inner,
    out,
    shares,
    shapes,
    num_tokens,
    num_steps,
    TOP_K: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that multiplies."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    num = gl.load(num_blocks, cache_modifier=".cg")
    gates, downs = count_tiles(num, shapes)
    state = _multiply(
        lists, stored, buffers, claims, gates, first_state(), factors[0], inner, shares, shapes[0],
        num_tokens, num_steps[0], TOP_K, SCALE_ROWS[0], SCALE_COLUMNS[0], EPILOGUE, True,
    )  # fmt: skip
    _multiply(
        lists, stored, buffers, claims, downs, state, factors[1], out, shares, shapes[1],
        num_tokens, num_steps[1], TOP_K, SCALE_ROWS[1], SCALE_COLUMNS[1], 0, False,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=["num_tokens", "factor_stride", "up_scale_stride", "down_scale_stride"]
)
def grouped_kernel(
    x,
    x_factors,
    factor_stride,
    inner,
    inner_scales,
    out,
    up,
    up_pairs,
    up_singles,
    up_values,
    up_scales,
    up_bias,
    down,
    down_pairs,
    down_singles,
    down_scales,
    down_bias,
    rows,
    experts,
    begins,
    ends,
    num_blocks,
    shares,
    progress,
    num_tokens,
    num_inner,
    size,
    num_experts,
    up_scale_stride,
    up_num_scales,
    down_scale_stride,
    down_num_scales,
    line_bytes,
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    AHEAD: gl.constexpr,
    GATHERING_WARPS: gl.constexpr,
    GATHERING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Gates and ups with the activation, and then down projections, of all blocks.

    All programs have to fit on the SMs together: down projections wait for the gates of others,
    which were claimed before.

    Args:
        x, x_factors: RoundedInputs in two numbers, [num_tokens, 2, size], and scales of tokens for
            each _GROUP steps, with rows of `factor_stride`.
        inner: [num_tokens * TOP_K, 2, inputs of all steps of the down projection], results of the
            activation in the order of `rows`.
        inner_scales: [max_blocks, steps of the down projection, TOKENS].
        out: [TOP_K, num_tokens, size].
        up, down: descriptors of ExpertMatrices.values, all experts' rows one below the other; or
            of their words in 7 bits (float7.py), with `..._pairs` and `..._singles`.
        up_values: what `up` describes, in lines of `line_bytes`: rows, or pieces of rows.
        up_scales, down_scales: of ExpertMatrices; `..._stride` from an expert's to the next one's,
            `..._num_scales` of a row, or of a row of blocks.
        rows, experts, begins, ends, num_blocks: BlockLists.
        shares: [num_tokens, TOP_K], weights of the results.
        progress: how many programs wait for none any more; how many tiles were claimed; and of
            each block, how many tiles of gates are in `inner`: 0 between launches.
        SCALE_ROWS, SCALE_COLUMNS: of both projections.
        AHEAD: see _fetch_to_l2.
        X_LAYOUT: of the inputs of a step in shared memory.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ups = descriptors_of(up, up_pairs, up_singles)
    downs = descriptors_of(down, down_pairs, down_singles)
    tiles = allocate(ups, 2 * STAGES)
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 2 * TOKENS, _BLOCK], X_LAYOUT)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1 + 32 * GATHERING_WARPS)
        mbarrier.init(free.index(stage), count=1)
    claims, stored = make_grouped_claims(STAGES)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    lists = (experts, begins, ends, rows)
    counter = progress + 1
    shapes = shapes_of(num_inner, size, _ROWS)
    num_steps = (gl.cdiv(size, _BLOCK), gl.cdiv(num_inner, _BLOCK))
    gl.warp_specialize(
        [
            (
                _multiply_all,
                (
                    lists,
                    num_blocks,
                    stored,
                    (tiles, x_tiles, x_scales, ready, free),
                    claims,
                    (
                        (up_scales, up_bias, up_scale_stride, up_num_scales),
                        (down_scales, down_bias, down_scale_stride, down_num_scales),
                    ),
                    (inner, inner_scales, TOKENS),
                    out,
                    shares,
                    shapes,
                    num_tokens,
                    num_steps,
                    TOP_K,
                    SCALE_ROWS,
                    SCALE_COLUMNS,
                    EPILOGUE,
                    PDL,
                ),
            ),
            (
                _gather_all,
                (
                    (x, x_factors, factor_stride),
                    (inner, inner_scales, TOKENS),
                    lists,
                    num_blocks,
                    progress,
                    (x_tiles, x_scales, ready, free),
                    claims,
                    shapes,
                    size,
                    num_steps,
                    TOP_K,
                    PDL,
                ),
            ),
            (
                _fetch_all,
                (
                    (ups, downs),
                    up_values,
                    num_experts,
                    lists,
                    num_blocks,
                    counter,
                    (tiles, ready, free),
                    claims,
                    shapes,
                    num_steps,
                    line_bytes,
                    AHEAD,
                    PDL,
                ),
            ),
            (announce_all, (num_blocks, progress + 2, stored, claims, shapes[0][1], PDL)),
        ],
        [GATHERING_WARPS, 1, 1],
        [GATHERING_REGISTERS, 24, 24],
    )
