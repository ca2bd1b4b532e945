"""MXFP4 experts on Hopper GPUs: grouped products of FP8 with weights that a table makes e4m3.

Inputs are split beforehand: each row, by a power of two of its own, into an e4m3 number and, 32
times as large, the e4m3 number of what is left, which together have the bits of a bfloat16
(Rounding.TOKENS_IN_TWO). So TMA fetches all that a product takes, and the tensor cores' right
operand has two columns for each token, whose sums are added in the end. Tensor cores add products
of FP8 with some 14 bits: with 2,880 inputs, results are 1.3e-3 from exact ones (as the norm of the
difference; 1.7e-3 by bfloat16's products, whose gates are rounded; 6e-4 if sums of BLOCK inputs are
added in float32, which takes 2% to 13% more time). This grows with the number of inputs.

Programs are as many as fit on the SMs, and each computes one tile after the other: ROWS rows of
each of two matrices (expert_tables.py) times the tokens of a block. One warp claims tiles, the
next one while a tile is computed: some SMs read memory faster than others. One warp fetches
weights, another one inputs, STAGES deep and on into the next tile; a warpgroup turns words into
e4m3, the left operand in registers, by 10 operations for 8 weights and their scale, multiplies and
stores. Most experts have fewer tokens than a tile holds: of its second half, only the quarters that
have tokens are fetched and multiplied. One token has a kernel of its own (experts_one_mx.py).

With tiles of 16 tokens, who routes tokens splits their inputs, too, and each token of a tile is
copied by itself (BY_TOKEN). No kernel then lies between routing and gates. With larger tiles a
kernel splits them in the order of routing.py's lists, so that the tokens of a tile lie together, as
those of down projections always do. Where an expert has about one token (FEW), no more of them are
fetched than there are, four at a time: inputs of 16 tokens are half as many bytes as the weights
that they are multiplied by.

Memory is idle while tokens are routed. So each program has the first weights of one tile on their
way to the L2 cache before (EARLY), of experts that are likely to be among the first of the lists.
And where programs of gates end, those of down projections begin, which have to wait for the last
gates: they fetch more of their first tile to the L2 cache than their stages hold (AHEAD).
"""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import NamedTuple

import torch
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

from octavo.ops.cuda.devices import is_on_hopper, num_sms
from octavo.ops.cuda.epilogues import activate_gated
from octavo.ops.cuda.expert_tables import (
    LOW_FACTOR,
    MAX_SHIFT,
    ROWS,
    ExpertProjection,
    ExpertTables,
    split_in_two,
    to_float8,
)
from octavo.ops.cuda.expert_tiles import EXACT_TOKENS, tokens_per_tile
from octavo.ops.cuda.expert_weights import BLOCK
from octavo.ops.cuda.experts_one_mx import MOST_INPUTS, mix_one_mx, norm_route_and_mix_one_mx
from octavo.ops.cuda.grouped_hopper import store_halves, store_to, targets_of
from octavo.ops.cuda.hopper import (
    copy_async,
    fetch_tile,
    swizzled_descriptor,
    sync_threads,
    tiles_of_rows,
)
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.quantize import round_inputs
from octavo.ops.cuda.routing import BlockLists
from octavo.ops.cuda.routing_in_kernel import routes_in_kernel
from octavo.ops.cuda.tile_sizes import power_of_2, registers_for
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import QuantizedExpertWeights, Routed, RouterWeights, Unrouted
from octavo.ops.quantized import MxFloat4, Rounding
from octavo.routing import RoutingConfig

logger = logging.getLogger(__name__)

NUM_SMS = 132
MAX_TOKENS = 64  # of a tile
MORE = 2  # quarters into which the second half of a tile is cut
LEAST_DIVIDED = 32  # tokens of a tile with such quarters
# How many programs share an SM, by tokens of a tile.
PROGRAMS = {16: 4, 32: 3, 64: 2}
_SHARED_MEMORY = 225_000  # bytes of an SM that programs may fill
_FEW_SHARED_MEMORY = 228_000  # the same where experts have few tokens, or BY_TOKEN: one stage more
_FEW_ROWS = 8  # of inputs that are fetched together then: both numbers of four tokens
TOKENS_BY_TOKEN = 16  # of tiles whose inputs are copied from where each token has its own
# Steps of gates that each program fetches to the L2 cache while tokens are routed, and steps of its
# first tile of down projections. With more, the router's loads take longer, or what was fetched
# does not stay. Microseconds of a layer of gpt-oss-20b with attention on one H100:
#     tokens   0 and 0    1      2      3    0 and 2    4      6    2 and 4
#          8    135.45  134.57 133.96 134.18  135.25                 133.99 (2 and 3)
#         64    226.17         225.00         224.43 223.33 225.20   222.35
EARLY, AHEAD = 2, 4
_MAX_STAGES = 12
_BOUNDED = tl.constexpr(4.0)  # what activations that are limited are multiplied by
_CLAIM_STEPS = tl.constexpr(4)  # steps of a tile's weights that are left when the next is claimed
_ROWS, _BLOCK = tl.constexpr(ROWS), tl.constexpr(BLOCK)
_COPIED = tl.constexpr(8)  # rows of inputs that a warp copies at once: two for each token


@gluon.jit
def split_kernel(
    x,
    halves,
    scales,
    rows,
    size,
    stride,
    TOP_K: gl.constexpr,
    GATHERS: gl.constexpr,
    COLUMNS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A row of the lists in two e4m3 numbers, and what they are to be multiplied by.

    Args:
        x: if GATHERS [num_tokens, size], else [num_tokens * TOP_K, size] in the order of `rows`.
        halves: e4m3 [num_tokens * TOP_K, 2, size].
        scales: float32 [num_tokens * TOP_K].
        COLUMNS: power of 2, at least `size`.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    place = gl.program_id(0).to(gl.int64)
    source = place
    if GATHERS:
        source = (gl.load(rows + place) // TOP_K).to(gl.int64)
    columns = gl.arange(0, COLUMNS, layout=LAYOUT)
    inside = columns < size
    exact = gl.load(x + source * stride + columns, mask=inside, other=0.0).to(gl.float32)
    largest = gl.max(gl.maximum(exact, -exact), 0)
    exponent = gl.floor(gl.log2(gl.maximum(largest, 1e-30))) - 7
    high, low = split_in_two(exact * gl.exp2(-exponent))
    targets = halves + place * 2 * size + columns
    gl.store(targets, high, mask=inside)
    gl.store(targets + size, low, mask=inside)
    gl.store(scales + place, gl.exp2(exponent))


@gluon.jit
def _block_of(lists, tile, row_tiles, TOKENS: gl.constexpr, PARTS: gl.constexpr):
    """The expert of a tile of TOKENS tokens, and where its tokens begin and end in the lists; a
    part without tokens ends where it begins, or before."""
    place = tile // row_tiles
    block = place // PARTS
    expert = gl.load(lists[0] + block, cache_modifier=".cg")
    begin = gl.load(lists[1] + block, cache_modifier=".cg") + place % PARTS * TOKENS
    return expert, begin, gl.load(lists[2] + block, cache_modifier=".cg")


@gluon.jit
def _claim(
    lists,
    num_blocks,
    claims,
    board,
    row_tiles,
    TOKENS: gl.constexpr,
    PARTS: gl.constexpr,
    WAITS: gl.constexpr,
):
    """The partition that finds work: a program's first tile is its own, and others belong to who
    claims them first, since not all SMs read equally fast.

    Each program with a tile claims until there is none, and so the last claim of all is known by
    its number: whoever has it makes `claims` 0 again.

    WAITS: lists are of the kernel before, and may be read by the next one before its own wait.
    """
    if WAITS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_programs = gl.num_programs(0)
    tile = gl.program_id(0)
    # Asked for without waiting for the number of blocks: behind the last one lists hold anything.
    expert, begin, end = _block_of(lists, tile, row_tiles, TOKENS, PARTS)
    num_tiles = gl.load(num_blocks, cache_modifier=".cg") * (PARTS * row_tiles)
    turn = gl.to_tensor(0)
    while tile < num_tiles:
        if begin < end:
            _announce(board, turn, expert, tile % row_tiles, begin, end)
            turn += 1
        mbarrier.wait(board[2].index(0), (turn + 1) & 1)
        tile = num_programs + gl.atomic_add(claims, 1, sem="relaxed", scope="gpu")
        if tile == num_tiles + num_programs - 1:
            gl.store(claims, 0)
        some = gl.minimum(tile, num_tiles - 1)
        expert, begin, end = _block_of(lists, some, row_tiles, TOKENS, PARTS)
    _announce(board, turn, -1, 0, 0, 0)


@gluon.jit
def _announce(board, turn, expert, row_tile, begin, end):
    """Tell the other partitions the next tile, as soon as all have read the one before."""
    fields, written, taken = board
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    i = gl.arange(0, 4, layout=LAYOUT)
    task = gl.where(i == 0, expert, gl.where(i == 1, row_tile, gl.where(i == 2, begin, end)))
    mbarrier.wait(taken.index(0), (turn + 1) & 1)
    fields.store(task)
    sync_threads()
    mbarrier.arrive(written.index(0), count=1)


@gluon.jit
def _task(board, turn):
    """What `_claim` has found: an expert, -1 when there is no more work, the number of the tile
    among those of its rows, and where its tokens begin and end.

    board: shared memory with that, a barrier that `_claim` arrives at when it is there, and one
        that each other partition arrives at when the next tile may be claimed.
    """
    fields, written, _taken = board
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    mbarrier.wait(written.index(0), turn & 1)
    task = fields.load(LAYOUT)
    i = gl.arange(0, 4, layout=LAYOUT)
    sync_threads()
    expert = gl.sum(gl.where(i == 0, task, 0), 0)
    row_tile = gl.sum(gl.where(i == 1, task, 0), 0)
    begin = gl.sum(gl.where(i == 2, task, 0), 0)
    return expert, row_tile, begin, gl.sum(gl.where(i == 3, task, 0), 0)


@gluon.jit
def _num_more(begin, end, FIRST: gl.constexpr, MORE: gl.constexpr):
    """How many quarters of a tile have tokens beyond its first half."""
    QUARTER: gl.constexpr = max(1, FIRST // 2)
    return gl.minimum(gl.maximum(gl.cdiv(end - begin - FIRST, QUARTER), 0), MORE)


@gluon.jit
def _fetch_step(buffers, weights, chunk, bar, stage):
    """Load the weights of a step, of which `bar` has been told."""
    tiles, shift_tiles = buffers[0], buffers[1]
    weight, shifts = weights
    row, shift_row = chunk * tiles.shape[1], chunk * shift_tiles.shape[1]
    fetch_tile(weight, [row, 0], bar, tiles.index(stage))
    fetch_tile(shifts, [shift_row, 0], bar, shift_tiles.index(stage))


@gluon.jit
def _fetch_to_l2(stored, chunk, COUNT: gl.constexpr):
    """Have the weights of COUNT steps on their way to the L2 cache."""
    words, shifts = stored
    _fetch_neighbours_to_l2(words, chunk, 32 * _ROWS, COUNT)
    _fetch_neighbours_to_l2(shifts, chunk, 2 * _ROWS, COUNT)


@gluon.jit
def _fetch_neighbours_to_l2(source, chunk, WORDS: gl.constexpr, COUNT: gl.constexpr):
    """The same of COUNT chunks of WORDS words each, by a single warp."""
    EACH: gl.constexpr = COUNT * WORDS // 32  # of a lane
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {4 * EACH}; mov.b32 $0, 0;",
        "=r,l",
        [source + (chunk.to(gl.int64) * WORDS + lanes * EACH)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _fetch(
    board,
    buffers,
    weights,
    stored,
    row_tiles,
    num_steps,
    num_experts,
    early_tiles,
    WAITS: gl.constexpr,
    EARLY: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """The partition that loads weights.

    stored: pointers to what `weights` are descriptors of.
    early_tiles: how many tiles of an expert have their first weights fetched to the L2 cache before
        the lists are there, EARLY steps of each.
    AHEAD: steps of a program's first tile, behind those that stages hold, that are fetched to the
        L2 cache.
    """
    ready, free = buffers[4], buffers[5]
    weight, shifts = weights
    STAGES: gl.constexpr = buffers[0].shape[0]
    BYTES: gl.constexpr = weight.block_type.nbytes + shifts.block_type.nbytes
    # Late, so that no tile waits for a slow program, and yet before its weights could be loaded.
    claim_step = gl.maximum(num_steps - _CLAIM_STEPS, 0)
    step = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    if EARLY > 0:
        likely = gl.program_id(0) // early_tiles
        if likely < num_experts:
            tile = likely * row_tiles + gl.program_id(0) % early_tiles
            _fetch_to_l2(stored, tile * num_steps, EARLY)
    if WAITS:  # so as not to ask again and again for a tile
        tl.extra.cuda.gdc_wait()
    expert, row_tile, _begin, _end = _task(board, turn)
    while expert >= 0:
        first_chunk = (expert * row_tiles + row_tile) * num_steps
        for k in range(num_steps):
            stage = step % STAGES
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(bar, BYTES)
            _fetch_step(buffers, weights, first_chunk + k, bar, stage)
            if AHEAD > 0:
                is_last = step == STAGES - 1
                if is_last:
                    _fetch_to_l2(stored, first_chunk + STAGES, AHEAD)
            mbarrier.arrive(board[2].index(0), count=1, pred=k == claim_step)
            step += 1
        turn += 1
        expert, row_tile, _begin, _end = _task(board, turn)


@gluon.jit
def _fetch_few(buffers, x, begin, end, k, stage):
    """Load the inputs of a step, of as many tokens as there are, a few at a time."""
    x_tiles, bar = buffers[2], buffers[4].index(stage)
    ROWS: gl.constexpr = x.block_type.shape[0]
    PARTS: gl.constexpr = x_tiles.shape[1] // ROWS
    parts = tiles_of_rows(x_tiles, ROWS)
    count = gl.cdiv(2 * (end - begin), ROWS)
    for i in gl.static_range(1, PARTS + 1):
        if count == i:
            mbarrier.expect(bar, i * x.block_type.nbytes)
    for i in range(count):
        place = parts.index(stage * PARTS + i)
        fetch_tile(x, [2 * begin + i * ROWS, k * _BLOCK], bar, place)


@gluon.jit
def _sources(rows, begin, end, size, TOKENS: gl.constexpr, TOP_K: gl.constexpr):
    """Where the inputs of a tile's tokens begin, of _COPIED rows together; two of each token."""
    ROW: gl.constexpr = gl.SliceLayout(1, _copied_layout())
    slots = gl.arange(0, _COPIED, layout=ROW)
    found = ()
    for i in gl.static_range(2 * TOKENS // _COPIED):
        places = begin + i * (_COPIED // 2) + slots // 2
        tokens = gl.load(rows + places, mask=places < end, other=0) // TOP_K
        found += ((2 * tokens + slots % 2) * size,)  # type: ignore[assignment]
    return found


@gluon.constexpr_function
def _copied_layout() -> gl.BlockedLayout:
    """The layout of _COPIED rows of BLOCK numbers in a warp whose threads copy 16 bytes at once."""
    lanes = BLOCK // 16
    return gl.BlockedLayout([1, 16], [32 // lanes, lanes], [1, 1], [1, 0])


@gluon.jit
def _copy_by_token(buffers, values, sources, count, size, k, stage):
    """Copy the inputs of a step of `count` tokens from where each has its own."""
    x_tiles, bar = buffers[2], buffers[4].index(stage)
    PARTS: gl.constexpr = x_tiles.shape[1] // _COPIED
    LAYOUT: gl.constexpr = _copied_layout()
    parts = tiles_of_rows(x_tiles, _COPIED)
    columns = k * _BLOCK + gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    slots = gl.arange(0, _COPIED, layout=gl.SliceLayout(1, LAYOUT))
    for i in gl.static_range(PARTS):
        if i * _COPIED < 2 * count:
            places = values + (sources[i][:, None] + columns[None, :])
            inside = (i * _COPIED + slots < 2 * count)[:, None] & (columns < size)[None, :]
            copy_async(parts.index(stage * PARTS + i), places, mask=inside)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _fetch_quarters(buffers, x, x_more, begin, more, k, stage, MORE: gl.constexpr):
    """Load the inputs of a step: of all tokens or, with MORE, of the first half and of `more`
    quarters."""
    _tiles, _shift_tiles, x_tiles, more_tiles, ready, _free = buffers
    FIRST: gl.constexpr = x_tiles.shape[1] // 2
    QUARTER: gl.constexpr = more_tiles.shape[1] // 2
    FIRST_BYTES: gl.constexpr = x.block_type.nbytes
    QUARTER_BYTES: gl.constexpr = x_more.block_type.nbytes
    for taken in gl.static_range(MORE + 1):
        if more == taken:
            mbarrier.expect(ready.index(stage), FIRST_BYTES + taken * QUARTER_BYTES)
    fetch_tile(x, [2 * begin, k * _BLOCK], ready.index(stage), x_tiles.index(stage))
    if MORE > 0:
        for i in range(more):
            row = 2 * (begin + FIRST + i * QUARTER)
            place = more_tiles.index(stage * MORE + i)
            fetch_tile(x_more, [row, k * _BLOCK], ready.index(stage), place)


@gluon.jit
def _fetch_inputs(
    board,
    buffers,
    x,
    x_more,
    x_rows,
    kept_scales,
    num_steps,
    TOP_K: gl.constexpr,
    MORE: gl.constexpr,
    FEW: gl.constexpr,
    BY_TOKEN: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads inputs, with BY_TOKEN also their scales.

    x_rows: with BY_TOKEN, inputs and their scales by token, the size of an input, and `rows`.
    kept_scales: with BY_TOKEN, shared memory for scales of the tokens of two tiles, where a tile's
        are before its last inputs are there.
    """
    x_tiles, free = buffers[2], buffers[5]
    STAGES: gl.constexpr = x_tiles.shape[0]
    FIRST: gl.constexpr = x_tiles.shape[1] // 2
    TOKENS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    if PDL:
        tl.extra.cuda.gdc_wait()
    step = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    expert, _row_tile, begin, end = _task(board, turn)
    while expert >= 0:
        mbarrier.arrive(board[2].index(0), count=1)
        more = _num_more(begin, end, FIRST, MORE)
        if BY_TOKEN:
            values, x_scales, size, rows = x_rows
            sources = _sources(rows, begin, end, size, FIRST, TOP_K)
            places = begin + gl.arange(0, FIRST, layout=TOKENS)
            tokens = gl.load(rows + places, mask=places < end, other=0) // TOP_K
            own_scales = gl.load(x_scales + tokens)
        for k in range(num_steps):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), (step // STAGES + 1) & 1)
            if BY_TOKEN:
                if k == num_steps - 1:
                    kept_scales.index(turn & 1).store(own_scales)
                    sync_threads()
                _copy_by_token(buffers, values, sources, end - begin, size, k, stage)
            elif FEW:
                _fetch_few(buffers, x_more, begin, end, k, stage)
            else:
                _fetch_quarters(buffers, x, x_more, begin, more, k, stage, MORE)
            step += 1
        turn += 1
        expert, _row_tile, begin, end = _task(board, turn)


@gluon.jit
def _of_stage(tiles, shift_tiles, stage):
    """The words and shifts of both matrices, as `to_float8` takes them."""
    ROWS: gl.constexpr = tiles.shape[1]
    # A thread loads 16 bytes at once: the words of row r, and of r + 8, of its 4 e4m3 in 16; or the
    # shifts of these rows of both matrices.
    LANES: gl.constexpr = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    WARPS: gl.constexpr = [[16, 0], [32, 0]]
    BOTH: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16]], LANES, WARPS, [], [ROWS, 32]
    )
    ONE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], LANES, WARPS, [], [ROWS, 16]
    )
    SHIFTS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]],
        [[0, 0], [0, 0], [0, 4], [0, 8], [0, 16]],
        [[1, 0], [2, 0]],
        [],
        [ROWS // 16, 32],
    )
    BY_ROW: gl.constexpr = gl.SliceLayout(1, ONE)
    words = tiles.index(stage).load(BOTH).reshape([ROWS, 2, 16]).permute((0, 2, 1))
    shifts = shift_tiles.index(stage).load(SHIFTS).reshape([ROWS // 16, 8, 2, 2])
    first, second = gl.split(words)
    own, second_own = gl.split(shifts.permute((0, 3, 1, 2)).reshape([ROWS, 2]))
    return (
        gl.convert_layout(first, ONE, assert_trivial=True),
        gl.convert_layout(second, ONE, assert_trivial=True),
        gl.convert_layout(own, BY_ROW, assert_trivial=True),
        gl.convert_layout(second_own, BY_ROW, assert_trivial=True),
    )


@gluon.jit
def _of_both(sums):
    """[ROWS, 2 TOKENS], sums of both numbers of each token's inputs -> [ROWS, TOKENS]."""
    high, low = gl.split(sums.reshape([sums.shape[0], sums.shape[1] // 2, 2]))
    return high + low * (1.0 / LOW_FACTOR)


@gluon.jit
def _store_in_two(acc, out, target, row):
    """Write acc [ROWS, TOKENS], outputs from `row` on and below 64, as the down projection takes
    them: e4m3 [places, 2, num_outputs] of _BOUNDED times as much."""
    ROWS: gl.constexpr = acc.shape[0]
    LANES: gl.constexpr = ROWS // 8
    STORE: gl.constexpr = gl.BlockedLayout(
        [8, 1], [LANES, 32 // LANES], [1, gl.num_warps()], [0, 1]
    )
    begin, end, num_outputs = target
    high, low = split_in_two(gl.convert_layout(acc, STORE) * _BOUNDED)
    store_halves(high, low, out, begin, end, row, num_outputs, STORE)


@gluon.jit
def _sums(buffers, step, count, MORE: gl.constexpr, TAKEN: gl.constexpr, BY_TOKEN: gl.constexpr):
    """The step after a tile's last one, and sums of both matrices: of the first half of its tokens,
    and of the TAKEN quarters that are taken of the others."""
    tiles, shift_tiles, x_tiles, more_tiles, ready, free = buffers
    STAGES: gl.constexpr = tiles.shape[0]
    ROWS: gl.constexpr = tiles.shape[1]
    COLUMNS: gl.constexpr = x_tiles.shape[1]
    MORE_COLUMNS: gl.constexpr = more_tiles.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, COLUMNS, 32]
    )
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, MORE_COLUMNS, 32]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, QUARTER, k_width=4)
    part = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    second_part = part
    more = gl.zeros([ROWS, MORE_COLUMNS], gl.float32, QUARTER)
    second_more = more
    last = more
    second_last = more
    for _k in range(count):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        if BY_TOKEN:
            fence_async_shared()  # copies of inputs, unlike those by TMA, need it
        words, second_words, own, second_own = _of_stage(tiles, shift_tiles, stage)
        xs = x_tiles.index(stage).permute((1, 0))
        values = to_float8(words, own, LAYOUT)
        second_values = to_float8(second_words, second_own, LAYOUT)
        part = warpgroup_mma(values, xs, part, is_async=True)
        second_part = warpgroup_mma(second_values, xs, second_part, is_async=True)
        if TAKEN > 0:
            values = gl.convert_layout(values, LEFT, assert_trivial=True)
            second_values = gl.convert_layout(second_values, LEFT, assert_trivial=True)
            xs = more_tiles.index(stage * MORE).permute((1, 0))
            more = warpgroup_mma(values, xs, more, is_async=True)
            second_more = warpgroup_mma(second_values, xs, second_more, is_async=True)
        if TAKEN > 1:
            xs = more_tiles.index(stage * MORE + 1).permute((1, 0))
            last = warpgroup_mma(values, xs, last, is_async=True)
            second_last = warpgroup_mma(second_values, xs, second_last, is_async=True)
        if TAKEN == 0:
            part, second_part = warpgroup_mma_wait(0, deps=[part, second_part])
        elif TAKEN == 1:
            part, second_part, more, second_more = warpgroup_mma_wait(
                0, deps=[part, second_part, more, second_more]
            )
        else:
            part, second_part, more, second_more, last, second_last = warpgroup_mma_wait(
                0, deps=[part, second_part, more, second_more, last, second_last]
            )
        sync_threads()
        mbarrier.arrive(free.index(stage), count=1)
        step += 1  # one by one: of step + count, Triton 3.6 makes a constant
    return step, (part, second_part, more, second_more, last, second_last)


@gluon.jit
def _of_rows(factors, shape, expert, row, LAYOUT: gl.constexpr):
    """What results of a tile's rows are multiplied by, and what is added to them, of both matrices.

    Rows beyond the end read the last one; their results are not stored.
    """
    weight_factors, _x_scales, bias = factors
    _num_outputs, _row_tiles, num_rows, num_first = shape
    first = expert.to(gl.int64) * num_rows
    rows = row + gl.arange(0, _ROWS, layout=LAYOUT)
    own = first + gl.minimum(rows, num_rows - 1)
    second = first + gl.minimum(num_first + rows, num_rows - 1)
    factor = gl.load(weight_factors + own)
    second_factor = gl.load(weight_factors + second)
    shift = gl.zeros([_ROWS], gl.float32, LAYOUT)
    second_shift = shift
    if bias is not None:
        shift = gl.load(bias + own).to(gl.float32)
        second_shift = gl.load(bias + second).to(gl.float32)
    return factor, second_factor, shift, second_shift


@gluon.jit
def _of_tokens(
    lists,
    x_scales,
    target,
    begin,
    end,
    TOKENS: gl.constexpr,
    STORE: gl.constexpr,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    SPLITS: gl.constexpr,
    BY_TOKEN: gl.constexpr,
):
    """What sums of some of a tile's tokens are multiplied by, and where results go: `targets_of`,
    or the first and last place with SPLITS.

    STORE: layout of the results when they are stored.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 2 * TOKENS, 32]
    )
    _out, shares, num_tokens = target
    SUMS: gl.constexpr = _of_both(gl.zeros([_ROWS, 2 * TOKENS], gl.float32, LAYOUT)).type.layout
    if BY_TOKEN:
        scales = 1.0  # see `_finish`
    elif x_scales is None:
        scales = 1.0 / _BOUNDED
    else:
        tokens = begin + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, SUMS))
        scales = gl.load(x_scales + tokens, mask=tokens < end, other=0.0)[None, :]
    targets = (begin, end)
    if not SPLITS:
        targets = targets_of(lists[3], shares, begin, end, num_tokens, TOKENS, TOP_K, GATED, STORE)
    return scales, targets


@gluon.jit
def _as_column(values, LAYOUT: gl.constexpr):
    """Values of rows, for a tensor in LAYOUT, whose threads have them."""
    return gl.convert_layout(values, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]


@gluon.jit
def _finish(
    part,
    second_part,
    of_rows,
    of_tokens,
    tile_scales,
    row,
    out,
    shape,
    STORE: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    SPLITS: gl.constexpr,
    BY_TOKEN: gl.constexpr,
):
    """Store what follows from sums [ROWS, 2 TOKENS] of both matrices, from `row` on.

    Args:
        of_rows, of_tokens: see `_of_rows` and `_of_tokens`.
        tile_scales: with BY_TOKEN, shared memory with scales of the tokens.
    """
    factor, second_factor, shift, second_shift = of_rows
    scales, targets = of_tokens
    num_outputs, _row_tiles, _num_rows, num_first = shape
    acc = _of_both(part)
    second = _of_both(second_part)
    SUMS: gl.constexpr = acc.type.layout
    if BY_TOKEN:
        scales = tile_scales.load(gl.SliceLayout(0, SUMS))[None, :]
    acc = acc * (_as_column(factor, SUMS) * scales) + _as_column(shift, SUMS)
    second = second * (_as_column(second_factor, SUMS) * scales) + _as_column(second_shift, SUMS)
    if GATED:
        acc = activate_gated(acc, second, EPILOGUE)
    if SPLITS:
        _store_in_two(acc, out, (targets[0], targets[1], num_outputs), row)
    else:
        store_to(acc, out, targets, row, num_outputs, GATED, STORE)
        if not GATED:
            store_to(second, out, targets, num_first + row, num_outputs, GATED, STORE)


@gluon.jit
def _compute(
    buffers,
    step,
    count,
    place,
    tile_scales,
    lists,
    factors,
    target,
    shape,
    TOP_K: gl.constexpr,
    MORE: gl.constexpr,
    TAKEN: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    SPLITS: gl.constexpr,
    BY_TOKEN: gl.constexpr,
):
    """A tile of tokens, of which TAKEN quarters follow the first half; the step after its last."""
    x_tiles, more_tiles = buffers[2], buffers[3]
    FIRST: gl.constexpr = x_tiles.shape[1] // 2
    QUARTER: gl.constexpr = more_tiles.shape[1] // 2
    expert, row, begin, end = place
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 2 * FIRST, 32]
    )
    # Neighbouring threads hold neighbouring rows, which are adjacent in `out`.
    STORE: gl.constexpr = gl.BlockedLayout(
        [8, 1], [_ROWS // 8, 256 // _ROWS], [1, gl.num_warps()], [0, 1]
    )
    # They are on their way while the tile is multiplied.
    of_rows = _of_rows(factors, shape, expert, row, gl.SliceLayout(1, LAYOUT))
    of_tokens = ()
    for i in gl.static_range(1 + TAKEN):
        own = _of_tokens(
            lists,
            factors[1],
            target,
            begin + (FIRST + (i - 1) * QUARTER if i > 0 else 0),
            end,
            QUARTER if i > 0 else FIRST,
            STORE,
            TOP_K,
            GATED,
            SPLITS,
            BY_TOKEN,
        )
        of_tokens += (own,)  # type: ignore[assignment]
    step, sums = _sums(buffers, step, count, MORE, TAKEN, BY_TOKEN)
    for i in gl.static_range(1 + TAKEN):
        _finish(
            sums[2 * i],
            sums[2 * i + 1],
            of_rows,
            of_tokens[i],
            tile_scales,
            row,
            target[0],
            shape,
            STORE,
            EPILOGUE,
            GATED,
            SPLITS,
            BY_TOKEN,
        )
    return step


@gluon.jit
def _multiply(
    lists,
    board,
    buffers,
    kept_scales,
    factors,
    target,
    shape,
    num_steps,
    TOP_K: gl.constexpr,
    MORE: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    SPLITS: gl.constexpr,
    BY_TOKEN: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that multiplies."""
    ROWS: gl.constexpr = buffers[0].shape[1]
    FIRST: gl.constexpr = buffers[2].shape[1] // 2
    if PDL:
        tl.extra.cuda.gdc_wait()
    step = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    expert, row_tile, begin, end = _task(board, turn)
    while expert >= 0:
        mbarrier.arrive(board[2].index(0), count=1)
        place = (expert, row_tile * ROWS, begin, end)
        more = _num_more(begin, end, FIRST, MORE)
        tile_scales = kept_scales
        if BY_TOKEN:
            tile_scales = kept_scales.index(turn & 1)
        for taken in gl.static_range(MORE + 1):
            if more == taken:
                step = _compute(
                    buffers,
                    step,
                    num_steps,
                    place,
                    tile_scales,
                    lists,
                    factors,
                    target,
                    shape,
                    TOP_K,
                    MORE,
                    taken,
                    EPILOGUE,
                    GATED,
                    SPLITS,
                    BY_TOKEN,
                )
        turn += 1
        expert, row_tile, begin, end = _task(board, turn)


@gluon.jit(do_not_specialize=["num_tokens"])
def grouped_mx_kernel(
    x,
    x_more,
    weight,
    shifts,
    weight_factors,
    x_scales,
    bias,
    out,
    rows,
    experts,
    begins,
    ends,
    num_blocks,
    claims,
    shares,
    num_tokens,
    num_outputs,
    num_rows,
    num_first,
    num_steps,
    num_experts,
    values,
    size,
    words,
    shift_words,
    early_tiles,
    TOP_K: gl.constexpr,
    PARTS: gl.constexpr,
    MORE: gl.constexpr,
    STAGES: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    SPLITS: gl.constexpr,
    FEW: gl.constexpr,
    BY_TOKEN: gl.constexpr,
    EARLY: gl.constexpr,
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """Gates and ups with the activation, or down projections, of all blocks.

    Lists were written before the kernel that precedes this one, which lets the next kernel start
    after its own wait: they may be read, and weights be loaded, before this kernel's wait. Not so
    with BY_TOKEN, where the kernel that precedes may be the one that writes them.

    Args:
        x, x_more: descriptors of inputs in two numbers, in the order of `rows`: x of two rows for
            each of a tile's tokens or, with MORE, of its first half, and x_more of a quarter, or
            with FEW of as many tokens as are fetched together.
        values, size: with BY_TOKEN, inputs [num_tokens, 2, size] in two numbers; x and x_more then
            tell no more than how they lie in shared memory.
        x_scales: of the same.
        weight, shifts: descriptors of what a tile has in ExpertTables.
        weight_factors: ExpertTables.factors.
        out: if GATED [num_tokens * TOP_K, num_outputs] in the order of `rows`, or Halves.values
            with SPLITS; else [TOP_K, num_tokens, num_outputs].
        rows, experts, begins, ends, num_blocks: BlockLists.
        claims: int32 [1], how many tiles were claimed: 0 between launches. Kernels that may run at
            the same time, gates and down projections, have their own ones.
        shares: [num_tokens, TOP_K], weights of the results if not GATED.
        PARTS: tiles of tokens in a block of the lists.
        MORE: how many quarters of a tile follow what is computed of each tile; 0: none.
        FEW: experts have few tokens, and tiles no quarters.
        BY_TOKEN: there are inputs of each token, which several tiles may take; tiles have no
            quarters.
        words, shift_words, early_tiles, EARLY, AHEAD: see `_fetch`.
    """
    if PDL and not BY_TOKEN:
        tl.extra.cuda.gdc_launch_dependents()
    FIRST: gl.constexpr = x.block_type.shape[0] // 2
    TOKENS: gl.constexpr = FIRST + MORE * (FIRST // 2)
    SLOTS: gl.constexpr = STAGES * max(1, MORE)
    tiles = gl.allocate_shared_memory(weight.dtype, [STAGES, _ROWS, 32], weight.layout)
    shift_tiles = gl.allocate_shared_memory(shifts.dtype, [STAGES, _ROWS // 16, 32], shifts.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * FIRST, _BLOCK], x.layout)
    more_tiles = x_tiles
    if MORE > 0:
        more_tiles = gl.allocate_shared_memory(x.dtype, [SLOTS, FIRST, _BLOCK], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=33 if BY_TOKEN else 2)
        mbarrier.init(free.index(stage), count=1)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields = gl.allocate_shared_memory(gl.int32, [4], FLAT)
    written = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(written.index(0), count=1)
    mbarrier.init(taken.index(0), count=3)
    kept_scales = written
    if BY_TOKEN:
        kept_scales = gl.allocate_shared_memory(gl.float32, [2, FIRST], FLAT)
    fence_async_shared()
    row_tiles = gl.cdiv(num_first, _ROWS)
    lists = (experts, begins, ends, rows)
    buffers = (tiles, shift_tiles, x_tiles, more_tiles, ready, free)
    factors = (weight_factors, x_scales, bias)
    shape = (num_outputs, row_tiles, num_rows, num_first)
    target = (out, shares, num_tokens)
    weights = (weight, shifts)
    board = (fields, written, taken)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    lists,
                    board,
                    buffers,
                    kept_scales,
                    factors,
                    target,
                    shape,
                    num_steps,
                    TOP_K,
                    MORE,
                    EPILOGUE,
                    GATED,
                    SPLITS,
                    BY_TOKEN,
                    PDL,
                ),
            ),
            (
                _fetch_inputs,
                (
                    board,
                    buffers,
                    x,
                    x_more,
                    (values, x_scales, size, rows),
                    kept_scales,
                    num_steps,
                    TOP_K,
                    MORE,
                    FEW,
                    BY_TOKEN,
                    PDL,
                ),
            ),
            (
                _fetch,
                (
                    board,
                    buffers,
                    weights,
                    (words, shift_words),
                    row_tiles,
                    num_steps,
                    num_experts,
                    early_tiles,
                    PDL and BY_TOKEN,
                    EARLY,
                    AHEAD,
                ),
            ),
            (
                _claim,
                (lists, num_blocks, claims, board, row_tiles, TOKENS, PARTS, PDL and BY_TOKEN),
            ),
        ],
        [1, 1, 1],
        [24, 24, 24],
    )


class MxExperts:
    """Owns the experts' weights as ExpertTables."""

    def __init__(self, up: ExpertProjection, down: ExpertProjection) -> None:
        self._up, self._down = up, down

    @classmethod
    def of(
        cls, weights: QuantizedExpertWeights, epilogue: Epilogue, dtype: torch.dtype
    ) -> MxExperts | None:
        """None: other kernels compute such weights, or inputs of this dtype or number."""
        up, down = weights.up, weights.down
        if not (isinstance(up, MxFloat4) and isinstance(down, MxFloat4)):
            return None
        if dtype != torch.bfloat16 or not is_on_hopper(up.device):
            return None
        if max(up.shape[2], down.shape[2]) > MOST_INPUTS:
            return None
        up_tables = ExpertTables.of(up, num_first=up.shape[1] // 2)
        down_tables = ExpertTables.of(down) if up_tables is not None else None
        if up_tables is None or down_tables is None:
            _warn_of_scales()
            return None
        return cls(
            ExpertProjection(up_tables, weights.up_bias, epilogue),
            ExpertProjection(down_tables, weights.down_bias, Epilogue.NONE),
        )

    def rounding(self, num_tokens: int, top_k: int) -> Rounding:
        """See ExpertsKernel.rounding."""
        num_experts = len(self._up.tables.factors)
        is_by_token = tokens_per_tile(num_tokens, num_experts, top_k) == TOKENS_BY_TOKEN
        return Rounding.TOKENS_IN_TWO if num_tokens > 1 and is_by_token else Rounding.NONE

    def routes_inputs(self, num_tokens: int, router: RouterWeights, config: RoutingConfig) -> bool:
        """See RoutingExpertsKernel.routes_inputs."""
        device = self._up.tables.words.device
        return num_tokens == 1 and routes_in_kernel(router, config, num_sms(device))

    def apply_unrouted(self, x: Unrouted) -> Tensor:
        """See RoutingExpertsKernel.apply_unrouted."""
        return norm_route_and_mix_one_mx(x, self._up, self._down)

    def apply_partial(self, x: Tensor, routed: Routed) -> Tensor:
        """See ExpertsKernel.apply_partial; x dense in its last dimension."""
        assert x.stride(1) == 1
        num_tokens, top_k = routed.ids.shape
        if num_tokens == 1:
            return mix_one_mx(x, routed, self._up, self._down)
        rows = routed.lists.rows
        inner: Tensor | Halves
        if self._up.epilogue is Epilogue.CLAMPED_SWIGLU:  # its results are below 64
            inner = Halves(_empty_halves(len(rows), self._down.tables.size, x.device), None)
            target = inner.values
        else:
            inner = target = x.new_empty((len(rows), self._down.tables.size))
        if routed.lists.block_rows == TOKENS_BY_TOKEN:
            values, scales, _ = routed.inputs or round_inputs(x, Rounding.TOKENS_IN_TWO)
            given = Halves(values.view(-1, x.shape[1]), scales, is_by_token=True)
        else:
            given = _split(x, rows, top_k, True)
        _launch(given, self._up, target, routed)
        halves = inner if isinstance(inner, Halves) else _split(inner, rows, top_k, False)
        dtype = torch.float32 if num_tokens <= EXACT_TOKENS else x.dtype
        out = torch.empty((top_k, num_tokens, x.shape[1]), dtype=dtype, device=x.device)
        _launch(halves, self._down, out, routed)
        return out


@cache
def _claims(device: torch.device) -> tuple[Tensor, ...]:
    """See grouped_mx_kernel: of down projections, and of gates and ups. For one stream."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run a step before capturing it"
    return torch.zeros((2, 32), dtype=torch.int32, device=device).unbind()


@cache
def _warn_of_scales() -> None:
    """Once, not for every layer."""
    logger.warning(
        "a slower kernel computes MXFP4 experts: within a row of the weights, scales differ by more"
        " than a factor of 2^%d",
        MAX_SHIFT,
    )


class Halves(NamedTuple):
    """Inputs of a projection, in the order of the lists, or by token."""

    values: Tensor  # e4m3 [2 * rows, size]
    scales: Tensor | None  # float32 of rows; None: values are _BOUNDED times as large
    is_by_token: bool = False


def _empty_halves(num_rows: int, size: int, device: torch.device) -> Tensor:
    return torch.empty((2 * num_rows, size), dtype=torch.float8_e4m3fn, device=device)


def _split(x: Tensor, rows: Tensor, top_k: int, gathers: bool) -> Halves:
    """See split_kernel."""
    size = x.shape[1]
    halves = _empty_halves(len(rows), size, x.device)
    scales = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    columns = power_of_2(size)
    split_kernel[(len(rows),)](
        x,
        halves,
        scales,
        rows,
        size,
        x.stride(0),
        TOP_K=top_k,
        GATHERS=gathers,
        COLUMNS=columns,
        num_warps=max(1, min(8, columns // 256)),
        **launch_options(x.device),
    )
    return Halves(halves, scales)


def _early_tiles(num_programs: int, weight: ExpertTables, num_tokens: int, top_k: int) -> int:
    """How many tiles of each expert are fetched early, of as many of the first experts as the first
    tiles of all programs are likely to be of, if tokens choose evenly."""
    num_experts = len(weight.factors)
    hit = 1 - (1 - top_k / num_experts) ** num_tokens
    likely = min(num_experts, math.ceil(num_programs / weight.num_tiles / hit))
    return min(weight.num_tiles, -(-num_programs // likely))


def _launch(x: Halves, projection: ExpertProjection, out: Tensor, routed: Routed) -> None:
    """One projection of all experts."""
    weight, bias, epilogue = projection
    lists: BlockLists = routed.lists
    num_tokens, top_k = routed.ids.shape
    tokens = min(lists.block_rows, MAX_TOKENS)
    parts = lists.block_rows // tokens
    num_tiles = weight.num_tiles * parts * len(lists.experts)
    per_sm = PROGRAMS[tokens]
    registers = registers_for(8, per_sm)
    stage = ROWS * (128 + 8) + 2 * tokens * BLOCK + 16
    more = MORE if tokens >= LEAST_DIVIDED else 0
    by_token = x.is_by_token
    assert not (by_token and more)
    num_experts = len(weight.factors)
    is_few = not more and not by_token and num_tokens * top_k <= num_experts
    columns = tokens if more else 2 * tokens
    few_rows = _FEW_ROWS if is_few else columns // 2
    memory = _FEW_SHARED_MEMORY if is_few or by_token else _SHARED_MEMORY
    room = memory // per_sm - 2 * ROWS * columns - 1024
    stages = min(_MAX_STAGES, room // stage)
    is_ahead = not (epilogue.is_gated or is_few)
    num_programs = min(num_tiles, NUM_SMS * per_sm)
    early_tiles = _early_tiles(num_programs, weight, num_tokens, top_k)
    grouped_mx_kernel[(num_programs,)](
        swizzled_descriptor(x.values, [columns, BLOCK], 128),
        swizzled_descriptor(x.values, [few_rows, BLOCK], 128),
        swizzled_descriptor(weight.words, [ROWS, 32], 128),
        swizzled_descriptor(weight.shifts, [ROWS // 16, 32], 0),
        weight.factors,
        x.scales,
        bias,
        out,
        *lists[:5],
        _claims(out.device)[epilogue.is_gated],
        routed.weights,
        num_tokens,
        out.shape[-1],
        weight.num_rows,
        weight.num_first,
        weight.num_blocks,
        num_experts,
        x.values if by_token else None,
        x.values.shape[1],
        weight.words,
        weight.shifts,
        early_tiles,
        TOP_K=top_k,
        PARTS=parts,
        MORE=more,
        STAGES=stages,
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        SPLITS=out.dtype == torch.float8_e4m3fn,
        FEW=is_few,
        BY_TOKEN=by_token,
        EARLY=min(EARLY, weight.num_blocks) if by_token else 0,
        AHEAD=max(0, min(AHEAD, weight.num_blocks - stages)) if is_ahead else 0,
        num_warps=4,
        maxnreg=registers,
        **launch_options(out.device),
    )
