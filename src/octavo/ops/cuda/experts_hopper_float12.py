"""The experts' projections on Hopper GPUs with weights in 12 bits (float12.py): few tokens.

The design is that of experts_hopper.py: one kernel computes gates, ups and down projections, and
each of its programs claims one tile after the other. A tile has two matrices of ROWS rows of an
expert's weights. One warp loads their words by TMA, a warpgroup copies the tokens' inputs, and two
others turn words into bfloat16, in the registers of the tensor cores' left operand, and multiply.
Inputs are bfloat16 as they are, and so is what gates and ups give.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.float12 import MOST_OF_EXPERT, PIECE_INPUTS, PIECE_ROWS
from octavo.ops.cuda.claims import claim, claimed
from octavo.ops.cuda.devices import num_sms
from octavo.ops.cuda.epilogues import activate_gated
from octavo.ops.cuda.expert_tiles import (
    GATHERING_REGISTERS,
    GATHERING_WARPS,
    HOPPER_REGISTERS,
    hopper_stages,
    tokens_of_hopper,
)
from octavo.ops.cuda.experts_hopper import ROWS
from octavo.ops.cuda.float12 import Float12Weight
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
    store_to,
    targets_of,
)
from octavo.ops.cuda.hopper import allocate_tiles, copy_async, swizzled_descriptor, sync_threads
from octavo.ops.cuda.linear_hopper_float12 import fetch_words, left_operand
from octavo.ops.cuda.linear_ring_float12 import SIGNS
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.routing import BlockLists
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import Routed

_WARPS = 8  # that multiply

_INPUTS = tl.constexpr(PIECE_INPUTS)
_PIECE_ROWS = tl.constexpr(PIECE_ROWS)


def mix_few_float12(
    x: Tensor,
    routed: Routed,
    up: Float12Weight,
    down: Float12Weight,
    out: Tensor,
    epilogue: Epilogue,
    progress: Tensor,
) -> None:
    """See ExpertsKernel.apply_partial, into out [top_k, num_tokens, size].

    Args:
        x: bfloat16 [num_tokens, size], dense in its last dimension, aligned to 16 bytes.
        routed: with BlockLists of blocks of up to MOST_OF_EXPERT tokens.
        up, down: those of all experts, one below the other: of each expert, whole pieces of gates
            and then of ups; and its down projection.
        progress: int32 [blocks + 2]: zeros, also afterwards.
    """
    lists: BlockLists = routed.lists
    assert lists.block_rows <= MOST_OF_EXPERT
    num_tokens, top_k = routed.ids.shape
    tokens = tokens_of_hopper(num_tokens, lists.block_rows)
    num_blocks = len(lists.experts)
    num_inner, size = down.shape[1], x.shape[1]
    inner = x.new_empty((num_tokens * top_k, num_inner))
    num_programs = min(triton.cdiv(num_inner, ROWS) * num_blocks, num_sms(out.device))
    grouped_float12_kernel[(num_programs,)](
        x,
        x.stride(0),
        inner,
        out,
        *_descriptors(up),
        up.scales,
        *_descriptors(down),
        down.scales,
        lists.rows,
        lists.experts,
        lists.begins,
        lists.ends,
        lists.num_blocks,
        routed.weights,
        progress,
        num_tokens,
        num_inner,
        size,
        TOP_K=top_k,
        TOKENS=tokens,
        STAGES=hopper_stages(PIECE_INPUTS * (3 * ROWS + 2 * tokens), tokens),
        EPILOGUE=int(epilogue),
        X_LAYOUT=gl.NVMMASharedLayout.get_default_for([tokens, PIECE_INPUTS], gl.bfloat16),
        GATHERING_WARPS=GATHERING_WARPS,
        GATHERING_REGISTERS=GATHERING_REGISTERS,
        num_warps=_WARPS,
        maxnreg=HOPPER_REGISTERS,
        **launch_options(out.device),
    )


def _descriptors(weight: Float12Weight) -> tuple[object, object]:
    """TMA descriptors of all experts' rows: of the words with signs, and with exponents."""
    words = weight.words.view(len(weight.words), -1)
    pieces = ROWS // PIECE_ROWS
    return (
        swizzled_descriptor(words, [pieces, SIGNS], 0),
        swizzled_descriptor(words, [pieces, SIGNS // 2], 0),
    )


@gluon.jit
def _fetch(
    sources, lists, buffers, claims, counter, work, state, shape, num_steps, GATED: gl.constexpr
):
    """Load the words of a projection, and claim tiles; the state after its last one."""
    tile, count, step = state
    num_tiles, before = work
    tiles, ready, free = buffers
    num_outputs, row_tiles, per_expert = shape
    STAGES: gl.constexpr = ready.shape[0]
    PIECES: gl.constexpr = sources[0].block_type.shape[0]
    BYTES: gl.constexpr = 2 * (sources[0].block_type.nbytes + sources[1].block_type.nbytes)
    tile -= before
    expert, _, _ = first_block(lists, tile, num_tiles, row_tiles, GATED)
    while tile < num_tiles:
        first = expert * (per_expert // _PIECE_ROWS)
        piece, up_piece = rows_of(tile, row_tiles, num_outputs // _PIECE_ROWS, PIECES, GATED)
        firsts = (first + piece, first + up_piece)
        for k in range(num_steps):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(ready.index(stage), BYTES)
            fetch_words(sources, tiles, ready, firsts, stage, k, 1, 1)
            step += 1
        tile = claim(claims, count, counter) - before
        count += 1
        expert, _, _ = next_block(lists, tile, num_tiles, row_tiles)
    return tile + before, count, step


@gluon.jit
def _fetch_all(
    sources, lists, num_blocks, counter, buffers, claims, shapes, num_steps, PDL: gl.constexpr
):
    """The partition that loads weights."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    num = gl.load(num_blocks, cache_modifier=".cg")
    gates, downs = count_tiles(num, shapes)
    state = _fetch(
        sources[0],
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
        sources[1], lists, buffers, claims, counter, downs, state, shapes[1], num_steps[1], False
    )


@gluon.jit
def _gather(
    x,
    stride,
    lists,
    done,
    gate_tiles,
    buffers,
    claims,
    work,
    state,
    row_tiles,
    num_steps,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
):
    """Copy the inputs of a projection to shared memory; the state after its last tile."""
    x_tiles, ready, free = buffers
    STAGES: gl.constexpr = x_tiles.shape[0]
    TOKENS: gl.constexpr = x_tiles.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    columns = gl.arange(0, _INPUTS, layout=gl.SliceLayout(0, LAYOUT))
    slots = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, LAYOUT))
    tile, count, step = state
    num_tiles, before = work
    tile -= before
    _, begin, end = first_block(lists, tile, num_tiles, row_tiles, GATED)
    while tile < num_tiles:
        source = sources_of(lists[3], begin + slots, end, TOP_K, GATED)
        places = x + source.to(gl.int64)[:, None] * stride + columns[None, :]
        inside = (begin + slots < end)[:, None] & (columns >= 0)[None, :]
        if not GATED:
            await_gates(done + tile // row_tiles, gate_tiles)
        for k in range(num_steps):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
            copy_async(x_tiles.index(stage), places + k * _INPUTS, mask=inside)
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            step += 1
        tile = claimed(claims, count) - before
        count += 1
        _, begin, end = next_block(lists, tile, num_tiles, row_tiles)
    return tile + before, count, step


@gluon.jit
def _gather_all(
    x,
    stride,
    inner,
    lists,
    num_blocks,
    progress,
    buffers,
    claims,
    shapes,
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
        x, stride, lists, done, gate_tiles, buffers, claims, gates, first_state(), gate_tiles,
        num_steps[0], TOP_K, True,
    )  # fmt: skip
    _gather(
        inner, shapes[0][0], lists, done, gate_tiles, buffers, claims, downs, state, down_tiles,
        num_steps[1], TOP_K, False,
    )  # fmt: skip
    reset_progress(progress, num)


@gluon.jit
def _multiply(
    lists,
    stored,
    buffers,
    claims,
    work,
    state,
    scales,
    out,
    shares,
    shape,
    num_tokens,
    num_steps,
    TOP_K: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
):
    """Multiply and store a projection; the state after its last tile."""
    tile, count, step = state
    num_tiles, before = work
    tiles, x_tiles, ready, free = buffers
    num_outputs, row_tiles, per_expert = shape
    STAGES: gl.constexpr = x_tiles.shape[0]
    TOKENS: gl.constexpr = x_tiles.shape[1]
    ROWS: gl.constexpr = 16 * gl.num_warps()
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, TOKENS, 16]
    )
    # Neighbouring threads hold neighbouring rows, which are adjacent in `out`.
    OWN: gl.constexpr = min(8, TOKENS // 2)  # rows that a thread stores
    STORE: gl.constexpr = gl.BlockedLayout(
        [OWN, 1], [ROWS // OWN, 32 * OWN // ROWS], [1, gl.num_warps()], [0, 1]
    )
    tile -= before
    expert, begin, end = first_block(lists, tile, num_tiles, row_tiles, GATED)
    zeros = gl.zeros([ROWS, TOKENS], gl.float32, LAYOUT)
    own_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    while tile < num_tiles:
        row, up_row = rows_of(tile, row_tiles, num_outputs, ROWS, GATED)
        # Rows beyond the end take the last one's scale; their results are not stored.
        of_expert = scales + expert.to(gl.int64) * per_expert
        scale = gl.load(of_expert + gl.minimum(row + own_rows, per_expert - 1))
        up_scale = gl.load(of_expert + gl.minimum(up_row + own_rows, per_expert - 1))
        targets = targets_of(lists[3], shares, begin, end, num_tokens, TOKENS, TOP_K, GATED, STORE)
        acc = zeros
        up = zeros
        for _ in range(num_steps):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            fence_async_shared()  # copies of inputs, unlike those by TMA, need it
            inputs = x_tiles.index(stage).permute((1, 0))
            left = left_operand(tiles, 2 * stage, LAYOUT)
            acc = warpgroup_mma(left, inputs, acc, is_async=True)
            left = left_operand(tiles, 2 * stage + 1, LAYOUT)
            up = warpgroup_mma(left, inputs, up, is_async=True)
            acc, up = warpgroup_mma_wait(0, deps=[acc, up])
            sync_threads()
            mbarrier.arrive(free.index(stage), count=1)
            step += 1
        following = claimed(claims, count) - before
        count += 1
        next_expert, next_begin, next_end = next_block(lists, following, num_tiles, row_tiles)
        acc = acc * scale[:, None]
        up = up * up_scale[:, None]
        if GATED:
            acc = activate_gated(acc, up, EPILOGUE)
            store_to(acc, out, targets, row, num_outputs, GATED, STORE)
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
    scales,
    inner,
    out,
    shares,
    shapes,
    num_tokens,
    num_steps,
    TOP_K: gl.constexpr,
    EPILOGUE: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that multiplies."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    num = gl.load(num_blocks, cache_modifier=".cg")
    gates, downs = count_tiles(num, shapes)
    state = _multiply(
        lists, stored, buffers, claims, gates, first_state(), scales[0], inner, shares, shapes[0],
        num_tokens, num_steps[0], TOP_K, EPILOGUE, True,
    )  # fmt: skip
    _multiply(
        lists, stored, buffers, claims, downs, state, scales[1], out, shares, shapes[1], num_tokens,
        num_steps[1], TOP_K, 0, False,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens"])
def grouped_float12_kernel(
    x,
    stride,
    inner,
    out,
    up_signs,
    up_exponents,
    up_scales,
    down_signs,
    down_exponents,
    down_scales,
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
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    EPILOGUE: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    GATHERING_WARPS: gl.constexpr,
    GATHERING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Gates and ups with the activation, and then down projections, of all blocks.

    All programs have to fit on the SMs together: down projections wait for the gates of others,
    which were claimed before.

    Args:
        x: [num_tokens, size], with rows of `stride`.
        inner: [num_tokens * TOP_K, num_inner], results of the activation in the order of `rows`.
        out: [TOP_K, num_tokens, size].
        up_signs, up_exponents, down_signs, down_exponents: descriptors of both kinds of words of
            all experts' rows, one below the other; `..._scales` of rows.
        rows, experts, begins, ends, num_blocks: BlockLists.
        shares: [num_tokens, TOP_K], weights of the results.
        progress: how many programs wait for none any more; how many tiles were claimed; and of
            each block, how many tiles of gates are in `inner`: 0 between launches.
        X_LAYOUT: of the inputs of a step in shared memory.
    """
    ROWS: gl.constexpr = up_signs.block_type.shape[0] * _PIECE_ROWS
    tiles = (allocate_tiles(up_signs, 2 * STAGES), allocate_tiles(up_exponents, 2 * STAGES))
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, _INPUTS], X_LAYOUT)
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
    shapes = shapes_of(num_inner, size, ROWS)
    num_steps = (size // _INPUTS, num_inner // _INPUTS)
    gl.warp_specialize(
        [
            (
                _multiply_all,
                (
                    lists,
                    num_blocks,
                    stored,
                    (tiles, x_tiles, ready, free),
                    claims,
                    (up_scales, down_scales),
                    inner,
                    out,
                    shares,
                    shapes,
                    num_tokens,
                    num_steps,
                    TOP_K,
                    EPILOGUE,
                    PDL,
                ),
            ),
            (
                _gather_all,
                (
                    x,
                    stride,
                    inner,
                    lists,
                    num_blocks,
                    progress,
                    (x_tiles, ready, free),
                    claims,
                    shapes,
                    num_steps,
                    TOP_K,
                    PDL,
                ),
            ),
            (
                _fetch_all,
                (
                    ((up_signs, up_exponents), (down_signs, down_exponents)),
                    lists,
                    num_blocks,
                    progress + 1,
                    (tiles, ready, free),
                    claims,
                    shapes,
                    num_steps,
                    PDL,
                ),
            ),
            (announce_all, (num_blocks, progress + 2, stored, claims, shapes[0][1], PDL)),
        ],
        [GATHERING_WARPS, 1, 1],
        [GATHERING_REGISTERS, 24, 24],
    )
