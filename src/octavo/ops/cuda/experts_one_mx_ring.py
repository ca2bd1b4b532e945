"""The MXFP4 experts of one token on Hopper GPUs, both projections in one kernel.

As many programs as the GPU runs at once take units one after the other: 8 rows of each of two
matrices (expert_tables.py), gates and ups first and then down projections. TMA fetches all words of
the next units to shared memory while one is multiplied, so memory is busy from the moment at which
the experts are known to the end. As in experts_one_mx.py, warps share the inputs of a unit, words
become float16 by a table, and all columns of the right operand are the same token. A warp has the
same inputs of each unit, which it keeps in registers.

Gates announce themselves to the programs that take down projections, as attention's partial results
do: a place holds EMPTY, a pattern that no program leaves there, until its two results have come. Of
two buffers that take turns, one is made EMPTY again by the launch that uses the other one. Which
one a launch uses follows from a counter of all programs' starts.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
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

from octavo.ops.cuda.expert_tables import ROWS, TO_FLOAT8, ExpertProjection, ExpertTables
from octavo.ops.cuda.expert_weights import BLOCK
from octavo.ops.cuda.linear_hopper import _activate_gated, _barrier, _fetch_tile
from octavo.ops.cuda.linear_hopper_quantized import _IS_PUBLIC
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.tile_sizes import num_sms
from octavo.ops.cuda.two_float8 import scales_of_two
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import Routed

EMPTY = tl.constexpr(-2147483648)  # minus zero and zeros
_BLOCK = tl.constexpr(BLOCK)
_OCTET = 8  # rows of each matrix in a unit
_ROWS = tl.constexpr(_OCTET)
_TILE_OCTETS = tl.constexpr(ROWS // _OCTET)
_WARPS = 8
_COLUMNS = tl.constexpr(2 * _WARPS)  # of the right operand: two numbers for each warp
_CONSUMERS = tl.constexpr(2)  # partitions that multiply
_REGISTERS = 96  # of a thread, before partitions get what they need
_STAGES = 4  # even: each belongs to one consumer
_PARTS = 4  # units whose sums wait for being stored
_LOW = tl.constexpr(32.0)  # how much larger the second number is kept
_BOUNDED = tl.constexpr(4.0)  # what activations below 64 are multiplied by


class Exchange(NamedTuple):
    """Through which gates come to the down projections."""

    places: Tensor  # int32 [2, top_k, blocks * 64]: two numbers of 16 bits, or four of 8, each
    tickets: Tensor  # int32 [1]: how many programs have begun, of two launches


@cache
def _exchange(device: torch.device, top_k: int, blocks: int, num_programs: int) -> Exchange:
    """For one stream, and launches with as many programs."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run a step before capturing it"
    places = torch.full((2, top_k, blocks * BLOCK // 2), EMPTY.value, dtype=torch.int32, device=device)
    return Exchange(places, torch.zeros(1, dtype=torch.int32, device=device))


def mix_one_mx_ring(
    x: Tensor,
    routed: Routed,
    up: ExpertProjection,
    down: ExpertProjection,
    num_programs: int | None = None,
) -> Tensor:
    """See ExpertsKernel.apply_partial, of bfloat16 x [1, size]."""
    top_k = routed.ids.shape[1]
    if num_programs is None:
        num_programs = num_sms(x.device)
    out = torch.empty((top_k, 1, x.shape[1]), dtype=torch.float32, device=x.device)
    up_octets = triton.cdiv(up.tables.num_first, _OCTET)
    down_octets = triton.cdiv(down.tables.num_first, _OCTET)
    exchange = _exchange(x.device, top_k, down.tables.num_blocks, num_programs)
    experts_one_ring_kernel[(num_programs,)](
        x,
        *_descriptors(up.tables),
        *_descriptors(down.tables),
        up.tables.factors,
        down.tables.factors,
        up.bias,
        down.bias,
        *exchange,
        out,
        routed.ids,
        routed.weights,
        up.tables.size,
        up.tables.num_rows,
        down.tables.num_rows,
        up.tables.num_first,
        down.tables.num_first,
        up.tables.num_tiles,
        down.tables.num_tiles,
        up_octets,
        down_octets,
        UP_ROUNDS=triton.cdiv(up.tables.num_blocks, _WARPS),
        DOWN_ROUNDS=triton.cdiv(down.tables.num_blocks, _WARPS),
        STAGES=_STAGES,
        PARTS=_PARTS,
        TOP_K=top_k,
        EPILOGUE=int(up.epilogue),
        BOUNDED=up.epilogue is Epilogue.CLAMPED_SWIGLU,  # below 64
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        **launch_options(x.device),
    )
    return out


def _descriptors(tables: ExpertTables) -> tuple[object, object]:
    """For TMA: what eight blocks have of eight rows of both matrices, and the shifts of 16."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    blocks = tables.num_blocks
    words = tables.words.view(-1, blocks, ROWS, 32)
    shifts = tables.shifts.view(-1, blocks, ROWS // 16, 32)
    layouts = (gl.NVMMASharedLayout(each, 32, rank=4) for each in (128, 0))
    return (
        TensorDescriptor.from_tensor(words, [1, _WARPS, _OCTET, 32], next(layouts)),
        TensorDescriptor.from_tensor(shifts, [1, _WARPS, 1, 32], next(layouts)),
    )


@gluon.jit
def _expert_of(experts, slot):
    """The expert of a slot, of the experts of all."""
    expert = experts[0]
    for i in gl.static_range(1, len(experts)):
        expert = gl.where(slot == i, experts[i], expert)
    return expert


@gluon.jit
def _place_of(unit, experts, octets, num_tiles):
    """A unit's tile among those of all experts, its octet of rows there, and its expert's slot."""
    slot = unit // octets
    octet = unit % octets
    tile = _expert_of(experts, slot) * num_tiles + octet // _TILE_OCTETS
    return tile, octet % _TILE_OCTETS, slot


@gluon.jit
def _fetch(
    words,
    shifts,
    tile,
    octet,
    buffers,
    stage,
    ROUNDS: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Have a unit's words and shifts on their way to a stage."""
    tiles, shift_tiles, ready, _free = buffers
    WARPS: gl.constexpr = words.block_type.shape[1]
    BYTES: gl.constexpr = words.block_type.nbytes + shifts.block_type.nbytes
    bar = ready.index(stage)
    mbarrier.expect(bar, ROUNDS * BYTES)
    for i in gl.static_range(ROUNDS):
        place = stage * SLOTS + i
        _fetch_tile(words, [tile, i * WARPS, octet * _ROWS, 0], bar, tiles.index(place))
        _fetch_tile(shifts, [tile, i * WARPS, octet // 2, 0], bar, shift_tiles.index(place))


@gluon.jit
def _fetch_units(
    ids,
    up,
    down,
    buffers,
    UP_ROUNDS: gl.constexpr,
    DOWN_ROUNDS: gl.constexpr,
    TOP_K: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads weights."""
    up_words, up_shifts, up_octets, up_tiles = up
    down_words, down_shifts, down_octets, down_tiles = down
    free = buffers[3]
    STAGES: gl.constexpr = free.shape[0]
    SLOTS: gl.constexpr = buffers[0].shape[0] // STAGES
    if PDL:
        tl.extra.cuda.gdc_wait()
    experts = _load_ids(ids, TOP_K)
    num_gates = TOP_K * up_octets
    turn = gl.to_tensor(0)
    for unit in range(gl.program_id(0), num_gates, gl.num_programs(0)):
        tile, octet, _slot = _place_of(unit, experts, up_octets, up_tiles)
        mbarrier.wait(free.index(turn % STAGES), (turn // STAGES + 1) & 1)
        stage = turn % STAGES
        _fetch(up_words, up_shifts, tile, octet, buffers, stage, UP_ROUNDS, SLOTS)
        turn += 1
    first = _first_down(num_gates)
    for unit in range(first, TOP_K * down_octets, gl.num_programs(0)):
        tile, octet, _slot = _place_of(unit, experts, down_octets, down_tiles)
        mbarrier.wait(free.index(turn % STAGES), (turn // STAGES + 1) & 1)
        stage = turn % STAGES
        _fetch(down_words, down_shifts, tile, octet, buffers, stage, DOWN_ROUNDS, SLOTS)
        turn += 1


@gluon.jit
def _load_ids(ids, TOP_K: gl.constexpr):
    experts = ()
    for i in gl.static_range(TOP_K):
        experts += (gl.load(ids + i, cache_modifier=".cg"),)  # type: ignore[assignment]
    return experts


@gluon.jit
def _first_down(num_gates):
    """The program's first unit of down projections: units of both are counted together."""
    own_gates = gl.cdiv(num_gates - gl.program_id(0), gl.num_programs(0))
    return gl.program_id(0) + own_gates * gl.num_programs(0) - num_gates


@gluon.jit
def _in_two(values):
    bits = values.to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.maximum(bits, 0x3C800000) + 0x0A400000
    large = bits.to(gl.float32, bitcast=True)
    high = (values + large) - large
    return high.to(gl.float8e4nv), ((values - high) * _LOW).to(gl.float8e4nv)


@gluon.jit
def _to_float8(words, shifts, LAYOUT: gl.constexpr):
    WORDS: gl.constexpr = words.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, k_width=4)
    none = gl.zeros(words.shape, gl.int32, WORDS)
    parts = gl.inline_asm_elementwise(
        TO_FLOAT8,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [words, none + shifts[:, None]],
        dtype=(gl.float8e4nv,) * 8,
        is_pure=True,
        pack=4,
    )
    first = gl.join(gl.join(parts[0], parts[4]), gl.join(parts[2], parts[6]))
    second = gl.join(gl.join(parts[1], parts[5]), gl.join(parts[3], parts[7]))
    values = gl.join(first, second)  # [ROWS, 16, c / 2, c % 2, h]
    values = values.permute((0, 2, 3, 4, 1)).reshape([words.shape[0], _BLOCK])
    return gl.convert_layout(values, OPERAND, assert_trivial=True)


@gluon.jit
def _unit_sums(
    buffers, x_tiles, stage, is_second, LAYOUT: gl.constexpr, ROUNDS: gl.constexpr
):
    """The sums of a unit in each warp, [WARPS, 16, 4], of which one of four is not zero: of 8 rows
    of both matrices."""
    tiles, shift_tiles, ready, _free = buffers
    WARPS: gl.constexpr = gl.num_warps()
    SLOTS: gl.constexpr = tiles.shape[0] // ready.shape[0]
    OF_WARPS: gl.constexpr = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 16]],
        [[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        OF_WARPS,
        [],
        [1, WARPS, 8, 32],
    )
    SHIFTS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2]],
        [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 0, 16]],
        OF_WARPS,
        [],
        [1, WARPS, 1, 32],
    )
    acc = gl.zeros([16 * WARPS, _COLUMNS], gl.float32, LAYOUT)
    for i in gl.static_range(ROUNDS):
        words = tiles.index(stage * SLOTS + i).load(LOADED).reshape([WARPS, 8, 2, 16])
        words = words.permute((0, 2, 1, 3)).reshape([16 * WARPS, 16])
        shifts = shift_tiles.index(stage * SLOTS + i).load(SHIFTS)
        first, second = gl.split(shifts.reshape([WARPS, 8, 2, 2]))
        own = gl.where(is_second, second, first).permute((0, 2, 1)).reshape([16 * WARPS])
        own = gl.convert_layout(own, gl.SliceLayout(1, words.type.layout), assert_trivial=True)
        values = _to_float8(words, own, LAYOUT)
        acc = warpgroup_mma(values, x_tiles.index(i).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    row = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    own = gl.where(row[:, None] // 16 == column[None, :] // 2, acc, 0.0)
    high, low = gl.split(own.reshape([WARPS, 16, WARPS // 4, 4, 2]))
    return gl.sum(high + low * (1.0 / _LOW), 2)


@gluon.jit
def _leave(sums, scale, buffers, board, stage, slot, phase):
    """Give a unit's sums to the partition that stores results, and its stage back."""
    parts, given, taken = board
    mbarrier.wait(taken.index(slot), phase)
    parts.index(slot).store(sums * scale)
    _barrier()
    mbarrier.arrive(buffers[3].index(stage), count=1)
    mbarrier.arrive(given.index(slot), count=1)


@gluon.jit
def _multiply(
    x,
    size,
    places,
    buffers,
    x_tiles,
    board,
    launch,
    up_octets,
    down_octets,
    UP_ROUNDS: gl.constexpr,
    DOWN_ROUNDS: gl.constexpr,
    TOP_K: gl.constexpr,
    BOUNDED: gl.constexpr,
    CONSUMER: gl.constexpr,
    PDL: gl.constexpr,
):
    """A partition that multiplies: every other unit."""
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, _COLUMNS, 32]
    )
    ready = buffers[2]
    STAGES: gl.constexpr = ready.shape[0]
    PARTS: gl.constexpr = board[1].shape[0]
    SHAPE: gl.constexpr = [x_tiles.shape[0], _COLUMNS, _BLOCK // 4]
    AS_WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    if _IS_PUBLIC:
        x_words = x_tiles.reinterpret(gl.int32, SHAPE, AS_WORDS)
    else:
        x_words = x_tiles._reinterpret(gl.int32, SHAPE, AS_WORDS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    scale = _store_in_two(_load_inputs(x, size, UP_ROUNDS), x_tiles)
    num_gates = TOP_K * up_octets
    turn = gl.to_tensor(CONSUMER)
    num_programs = gl.num_programs(0)
    first = gl.program_id(0) + CONSUMER * num_programs
    for unit in range(first, num_gates, _CONSUMERS * num_programs):
        stage = turn % STAGES
        slot = turn % PARTS
        is_second = unit % up_octets % 2 == 1
        mbarrier.wait(ready.index(stage), (turn // STAGES) & 1)
        sums = _unit_sums(buffers, x_tiles, stage, is_second, SUMS, UP_ROUNDS)
        _leave(sums, _by_warp(scale, sums), buffers, board, stage, slot, (turn // PARTS + 1) & 1)
        turn += _CONSUMERS
    words_each = gl.cdiv(up_octets * _ROWS, _BLOCK) * (_BLOCK // 2)
    places = places + _own_buffer(launch) * (TOP_K * words_each)
    first = gl.program_id(0) + turn * num_programs - num_gates
    for unit in range(first, TOP_K * down_octets, _CONSUMERS * num_programs):
        stage = turn % STAGES
        slot = turn % PARTS
        own_places = places + unit // down_octets * words_each
        is_second = unit % down_octets % 2 == 1
        found = _load_gates(own_places, up_octets * _ROWS, DOWN_ROUNDS, BOUNDED)
        lowest = _lowest(found)
        while lowest == EMPTY:
            found = _load_gates(own_places, up_octets * _ROWS, DOWN_ROUNDS, BOUNDED)
            lowest = _lowest(found)
        if BOUNDED:
            for i in gl.static_range(DOWN_ROUNDS):
                x_words.index(i).store(found[i])
            fence_async_shared()
            _barrier()
        else:
            scale = _store_in_two(_pairs(found), x_tiles)
        mbarrier.wait(ready.index(stage), (turn // STAGES) & 1)
        sums = _unit_sums(buffers, x_tiles, stage, is_second, SUMS, DOWN_ROUNDS)
        own_scale = 1.0 / _BOUNDED if BOUNDED else _by_warp(scale, sums)
        _leave(sums, own_scale, buffers, board, stage, slot, (turn // PARTS + 1) & 1)
        turn += _CONSUMERS


@gluon.jit
def _by_warp(values, like):
    """Values of warps for a tensor [WARPS, 16, 4]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout))
    return gl.convert_layout(values, LAYOUT)[:, None, None]


@gluon.jit
def _load_inputs(x, size, ROUNDS: gl.constexpr):
    """x [size] as ROUNDS times [WARPS, BLOCK]."""
    WARPS: gl.constexpr = gl.num_warps()
    LOADED: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    blocks = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LOADED))
    inner = gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, LOADED))
    columns = blocks[:, None] * _BLOCK + inner[None, :]
    found = ()
    for i in gl.static_range(ROUNDS):
        own = i * (WARPS * _BLOCK) + columns
        found += (gl.load(x + own, mask=own < size, other=0.0),)  # type: ignore[assignment]
    return found


@gluon.jit
def _store_in_two(values, x_tiles):
    """Write [WARPS, BLOCK] each as two e4m3 numbers, times a power of two for each warp; what sums
    are to be multiplied by, [WARPS]."""
    largest = gl.abs(values[0].to(gl.float32))
    for i in gl.static_range(1, len(values)):
        largest = gl.maximum(largest, gl.abs(values[i].to(gl.float32)))
    factor, scale = scales_of_two(gl.max(largest, 1))
    for i in gl.static_range(len(values)):
        high, low = _in_two(values[i].to(gl.float32) * factor[:, None])
        both = gl.join(high, low).permute((0, 2, 1)).reshape([_COLUMNS, _BLOCK])
        x_tiles.index(i).store(both)
    fence_async_shared()
    _barrier()
    return scale


@gluon.jit
def _load_gates(places, num_gates, ROUNDS: gl.constexpr, BOUNDED: gl.constexpr):
    """A slot's places, as they are now: [2 WARPS, 32] of four e4m3 each, or [WARPS, 64] of pairs."""
    WARPS: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = 2 if BOUNDED else 1
    WIDTH: gl.constexpr = _BLOCK // (2 * EACH)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 2], [EACH, 32 // EACH], [WARPS, 1], [1, 0])
    row = gl.arange(0, EACH * WARPS, layout=gl.SliceLayout(1, LOADED))
    word = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LOADED))
    column = (row // EACH)[:, None] * _BLOCK + (word * (2 * EACH))[None, :]
    place = row[:, None] * WIDTH + word[None, :]
    found = ()
    for i in gl.static_range(ROUNDS):
        own = places + i * (WARPS * _BLOCK // 2) + place
        is_gate = i * (WARPS * _BLOCK) + column < num_gates
        found += (gl.load(own, mask=is_gate, other=0, volatile=True),)  # type: ignore[assignment]
    return found


@gluon.jit
def _lowest(found):
    lowest = found[0]
    for i in gl.static_range(1, len(found)):
        lowest = gl.minimum(lowest, found[i])
    return gl.min(gl.min(lowest, 1), 0)


@gluon.jit
def _pairs(words):
    """Words [WARPS, 64] of two bfloat16 each as [WARPS, BLOCK]."""
    found = ()
    for i in gl.static_range(len(words)):
        first, second = gl.inline_asm_elementwise(
            "mov.b32 $0, $2; mov.b32 $1, $3;",
            "=r,=r,r,r",
            [words[i]],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )
        # Of two words that follow each other, the first has the first two numbers of four.
        values = gl.join(first, second).reshape([words[i].shape[0], _BLOCK // 4, 2, 2])
        values = values.permute((0, 1, 3, 2)).reshape([words[i].shape[0], _BLOCK])
        found += (values,)  # type: ignore[assignment]
    return found


@gluon.jit
def _load_rows(source, unit, octets, num_rows, num_first, LAYOUT: gl.constexpr):
    """Factors and biases of 8 rows of both matrices; of any, if there is no such unit.

    Volatile: the compiler does not move loads behind what follows.
    """
    factors, bias, experts = source
    unit = gl.minimum(unit, len(experts) * octets - 1)
    expert = _expert_of(experts, unit // octets)
    rows = unit % octets * _ROWS + gl.arange(0, _ROWS, layout=LAYOUT)
    own = expert.to(gl.int64) * num_rows + gl.minimum(rows, num_rows - 1)
    second = expert.to(gl.int64) * num_rows + gl.minimum(num_first + rows, num_rows - 1)
    factor = gl.load(factors + own, volatile=True)
    second_factor = gl.load(factors + second, volatile=True)
    shift = gl.zeros([_ROWS], gl.float32, LAYOUT)
    second_shift = shift
    if bias is not None:
        shift = gl.load(bias + own, volatile=True).to(gl.float32)
        second_shift = gl.load(bias + second, volatile=True).to(gl.float32)
    return factor, second_factor, shift, second_shift


@gluon.jit
def _added(board, turn):
    """What all warps' sums of a unit add up to, of 8 rows of both matrices."""
    parts, given, taken = board
    PARTS: gl.constexpr = parts.shape[0]
    slot = turn % PARTS
    mbarrier.wait(given.index(slot), (turn // PARTS) & 1)
    WARPS: gl.constexpr = parts.shape[1]
    ALL: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 8, 0], [4, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0]],
        [],
        [],
        [WARPS, 16, 4],
    )
    found = parts.index(slot).load(ALL)
    _barrier()
    mbarrier.arrive(taken.index(slot), count=1)
    total = gl.sum(gl.sum(found, 2), 0).reshape([2, 8]).permute((1, 0))
    return gl.split(total)


@gluon.jit
def _begin(places, tickets, launch, words_all):
    """Which of both buffers the launch uses: tell it to the other partitions, and empty the other
    one."""
    numbers, told = launch
    num_programs = gl.num_programs(0)
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    none = gl.zeros_like(lanes)
    first = lanes == 0
    before = gl.atomic_add(tickets + none, none + 1, mask=first, sem="relaxed", scope="gpu")
    ticket = gl.sum(gl.where(first, before, 0), 0)
    own = (ticket >= num_programs).to(gl.int32)
    if ticket == 2 * num_programs - 1:  # All programs of both launches have begun.
        gl.store(tickets, 0)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers.store(gl.zeros([1], gl.int32, ONE) + own)
    _barrier()
    mbarrier.arrive(told.index(0), count=1)
    others = places + (1 - own) * words_all
    for start in range(gl.program_id(0) * 32, words_all, num_programs * 32):
        gl.store(others + start + lanes, none + EMPTY, mask=start + lanes < words_all)
    return own


@gluon.jit
def _announce(result, places, row, BOUNDED: gl.constexpr):
    """Store 8 gates of a slot, from `row` on, to its places."""
    # A thread has all numbers of a word.
    WIDE: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    if BOUNDED:
        high, low = _in_two(result * _BOUNDED)
        own = places + row // _BLOCK * (_BLOCK // 2) + row % _BLOCK // 4
        _store_words(_words_of_octets(gl.convert_layout(high, WIDE)), own)
        _store_words(_words_of_octets(gl.convert_layout(low, WIDE)), own + _BLOCK // 4)
    else:
        bits = gl.convert_layout(result, WIDE).to(gl.bfloat16).to(gl.int16, bitcast=True)
        first, second = gl.split((bits.to(gl.int32) & 0xFFFF).reshape([_ROWS // 2, 2]))
        _store_words(first | (second << 16), places + row // 2)


@gluon.jit
def _words_of_octets(values):
    """e4m3 [8] as int32 [2]."""
    octets = values.to(gl.int8, bitcast=True).to(gl.int32) & 0xFF
    first, second = gl.split(octets.reshape([2, 2, 2]))
    first, second = gl.split(first | (second << 8))
    return first | (second << 16)


@gluon.jit
def _store_words(words, places):
    words = gl.where(words == EMPTY, 0, words)
    gl.store(places + gl.arange(0, words.shape[0], layout=words.type.layout), words)


@gluon.jit
def _own_buffer(launch):
    """Which of both buffers the launch uses, once `_begin` has told it."""
    numbers, told = launch
    mbarrier.wait(told.index(0), 0)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(numbers.load(ONE), 0)


@gluon.jit
def _fetch_rows(factors, bias, experts, first, step, octets, num_rows, num_first):
    """Have factors and biases of the first 32 of some units on their way to the L2 cache."""
    unit = first + step * gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    unit = gl.minimum(unit, len(experts) * octets - 1)
    row = unit % octets * _ROWS
    expert = _expert_of(experts, unit // octets + gl.zeros_like(unit))
    own = expert.to(gl.int64) * num_rows + row
    second = expert.to(gl.int64) * num_rows + gl.minimum(num_first + row, num_rows - 1)
    _prefetch(factors + own)
    _prefetch(factors + second)
    if bias is not None:
        _prefetch(bias + own)
        _prefetch(bias + second)


@gluon.jit
def _prefetch(places):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [places],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _finish(
    factors,
    biases,
    out,
    places,
    tickets,
    ids,
    shares,
    board,
    launch,
    up,
    down,
    TOP_K: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BOUNDED: gl.constexpr,
    CONSUMER: gl.constexpr,
    PDL: gl.constexpr,
):
    """A partition that makes results of one consumer's sums, and stores them: a single warp.

    What it needs of a unit's rows is asked for one unit ahead.
    """
    up_factors, down_factors = factors
    up_bias, down_bias = biases
    up_octets, up_rows, up_first = up
    down_octets, down_rows, down_first = down
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    if PDL:
        tl.extra.cuda.gdc_wait()
    experts = _load_ids(ids, TOP_K)
    num_gates = TOP_K * up_octets
    num_downs = TOP_K * down_octets
    step = _CONSUMERS * gl.num_programs(0)
    first_gate = gl.program_id(0) + CONSUMER * gl.num_programs(0)
    first_down = first_gate + gl.cdiv(gl.maximum(num_gates - first_gate, 0), step) * step - num_gates
    of_gates = (up_factors, up_bias, experts)
    of_downs = (down_factors, down_bias, experts)
    factor, second_factor, shift, second_shift = _load_rows(
        of_gates, first_gate, up_octets, up_rows, up_first, OUT
    )
    _fetch_rows(up_factors, up_bias, experts, first_gate, step, up_octets, up_rows, up_first)
    _fetch_rows(
        down_factors, down_bias, experts, first_down, step, down_octets, down_rows, down_first
    )
    words_each = gl.cdiv(up_octets * _ROWS, _BLOCK) * (_BLOCK // 2)
    if CONSUMER == 0:
        buffer = _begin(places, tickets, launch, TOP_K * words_each)
    else:
        buffer = _own_buffer(launch)
    own_places = places + buffer * (TOP_K * words_each)
    turn = gl.to_tensor(CONSUMER)
    in_octet = gl.arange(0, _ROWS, layout=OUT)
    for unit in range(first_gate, num_gates, step):
        next_factor, next_second_factor, next_shift, next_second_shift = _load_rows(
            of_gates, unit + step, up_octets, up_rows, up_first, OUT
        )
        row = unit % up_octets * _ROWS
        first, second = _added(board, turn)
        gates = gl.convert_layout(first, OUT) * factor + shift
        ups = gl.convert_layout(second, OUT) * second_factor + second_shift
        result = gl.where(row + in_octet < up_first, _activate_gated(gates, ups, EPILOGUE), 0.0)
        _announce(result, own_places + unit // up_octets * words_each, row, BOUNDED)
        factor = next_factor
        second_factor = next_second_factor
        shift = next_shift
        second_shift = next_second_shift
        turn += _CONSUMERS
    factor, second_factor, shift, second_shift = _load_rows(
        of_downs, first_down, down_octets, down_rows, down_first, OUT
    )
    for unit in range(first_down, num_downs, step):
        next_factor, next_second_factor, next_shift, next_second_shift = _load_rows(
            of_downs, unit + step, down_octets, down_rows, down_first, OUT
        )
        slot = unit // down_octets
        row = unit % down_octets * _ROWS
        share = gl.load(shares + slot, cache_modifier=".cg")
        first, second = _added(board, turn)
        result = (gl.convert_layout(first, OUT) * factor + shift) * share
        second_result = (gl.convert_layout(second, OUT) * second_factor + second_shift) * share
        target = out + slot * down_rows
        rows = row + in_octet
        gl.store(target + rows, result, mask=rows < down_first)
        rows = down_first + rows
        gl.store(target + rows, second_result, mask=rows < down_rows)
        factor = next_factor
        second_factor = next_second_factor
        shift = next_shift
        second_shift = next_second_shift
        turn += _CONSUMERS


@gluon.jit
def experts_one_ring_kernel(
    x,
    up_words,
    up_shifts,
    down_words,
    down_shifts,
    up_factors,
    down_factors,
    up_bias,
    down_bias,
    places,
    tickets,
    out,
    ids,
    shares,
    size,
    up_rows,
    down_rows,
    up_first,
    down_first,
    up_tiles,
    down_tiles,
    up_octets,
    down_octets,
    UP_ROUNDS: gl.constexpr,
    DOWN_ROUNDS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    TOP_K: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BOUNDED: gl.constexpr,
    PDL: gl.constexpr,
):
    """All of a token's experts, weighted, into out float32 [TOP_K, size].

    Args:
        x: bfloat16 [size].
        up_words, up_shifts, down_words, down_shifts: descriptors of ExpertTables.
        places, tickets: of Exchange.
        up_octets, down_octets: units of an expert.
        UP_ROUNDS, DOWN_ROUNDS: blocks of a warp.
        PARTS: units whose sums wait for being stored.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ROUNDS: gl.constexpr = max(UP_ROUNDS, DOWN_ROUNDS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    MEMORY: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    tiles = gl.allocate_shared_memory(
        up_words.dtype, [STAGES * ROUNDS, 1, WARPS, _ROWS, 32], up_words.layout
    )
    shift_tiles = gl.allocate_shared_memory(
        up_shifts.dtype, [STAGES * ROUNDS, 1, WARPS, 1, 32], up_shifts.layout
    )
    parts = gl.allocate_shared_memory(gl.float32, [PARTS, WARPS, 16, 4], MEMORY)
    numbers = gl.allocate_shared_memory(gl.int32, [1], FLAT)
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    X_SHAPE: gl.constexpr = [ROUNDS, _COLUMNS, _BLOCK]
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, X_SHAPE, X_LAYOUT)
    second_x_tiles = gl.allocate_shared_memory(gl.float8e4nv, X_SHAPE, X_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    for slot in gl.static_range(PARTS):
        mbarrier.init(given.index(slot), count=1)
        mbarrier.init(taken.index(slot), count=1)
    mbarrier.init(told.index(0), count=1)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    buffers = (tiles, shift_tiles, ready, free)
    board = (parts, given, taken)
    launch = (numbers, told)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x,
                    size,
                    places,
                    buffers,
                    x_tiles,
                    board,
                    launch,
                    up_octets,
                    down_octets,
                    UP_ROUNDS,
                    DOWN_ROUNDS,
                    TOP_K,
                    BOUNDED,
                    0,
                    PDL,
                ),
            ),
            (
                _multiply,
                (
                    x,
                    size,
                    places,
                    buffers,
                    second_x_tiles,
                    board,
                    launch,
                    up_octets,
                    down_octets,
                    UP_ROUNDS,
                    DOWN_ROUNDS,
                    TOP_K,
                    BOUNDED,
                    1,
                    PDL,
                ),
            ),
            (
                _fetch_units,
                (
                    ids,
                    (up_words, up_shifts, up_octets, up_tiles),
                    (down_words, down_shifts, down_octets, down_tiles),
                    buffers,
                    UP_ROUNDS,
                    DOWN_ROUNDS,
                    TOP_K,
                    PDL,
                ),
            ),
            (
                _finish,
                (
                    (up_factors, down_factors),
                    (up_bias, down_bias),
                    out,
                    places,
                    tickets,
                    ids,
                    shares,
                    board,
                    launch,
                    (up_octets, up_rows, up_first),
                    (down_octets, down_rows, down_first),
                    TOP_K,
                    EPILOGUE,
                    BOUNDED,
                    0,
                    PDL,
                ),
            ),
            (
                _finish,
                (
                    (up_factors, down_factors),
                    (up_bias, down_bias),
                    out,
                    places,
                    tickets,
                    ids,
                    shares,
                    board,
                    launch,
                    (up_octets, up_rows, up_first),
                    (down_octets, down_rows, down_first),
                    TOP_K,
                    EPILOGUE,
                    BOUNDED,
                    1,
                    PDL,
                ),
            ),
        ],
        [8, 1, 1, 1],
        [112, 24, 24, 24],
    )
