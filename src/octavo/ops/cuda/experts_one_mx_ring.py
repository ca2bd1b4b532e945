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
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from octavo.ops.cuda.expert_tables import ROWS, ExpertProjection, ExpertTables
from octavo.ops.cuda.expert_weights import BLOCK
from octavo.ops.cuda.experts_one_mx import _regrouped, _to_float16
from octavo.ops.cuda.linear_hopper import _activate_gated, _barrier, _fetch_tile
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.tile_sizes import num_sms, power_of_2
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import Routed

EMPTY = tl.constexpr(-2147483648)  # of two float16, zero and minus zero
_BLOCK = tl.constexpr(BLOCK)
_TOKENS = tl.constexpr(8)  # columns of the right operand
_OCTET = 8  # rows of each matrix in a unit
_ROWS = tl.constexpr(_OCTET)
_TILE_OCTETS = tl.constexpr(ROWS // _OCTET)
_WARPS = 8
_MOST_ROUNDS = 3  # blocks of a warp, whose inputs are in registers
_PROGRAMS = 2  # on an SM
_REGISTERS = 80  # of a thread, before partitions get what they need
_STAGES = 3
_PARTS = 2  # units whose sums wait for being stored
_BOUND = tl.constexpr(512.0)  # what results below 64 are multiplied by to be float16


class Exchange(NamedTuple):
    """Through which gates come to the down projections."""

    places: Tensor  # int32 [2, top_k, octets * 4]: two float16 each
    tickets: Tensor  # int32 [1]: how many programs have begun, of two launches


@cache
def _exchange(device: torch.device, top_k: int, octets: int, num_programs: int) -> Exchange:
    """For one stream, and launches with as many programs."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run a step before capturing it"
    places = torch.full((2, top_k, octets * 4), EMPTY.value, dtype=torch.int32, device=device)
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
        num_programs = _PROGRAMS * num_sms(x.device)
    out = torch.empty((top_k, 1, x.shape[1]), dtype=torch.float32, device=x.device)
    up_octets = triton.cdiv(up.tables.num_first, _OCTET)
    down_octets = triton.cdiv(down.tables.num_first, _OCTET)
    blocks = power_of_2(max(up.tables.num_blocks, down.tables.num_blocks, _WARPS))
    exchange = _exchange(x.device, top_k, up_octets, num_programs)
    experts_one_ring_kernel[(num_programs,)](
        x,
        *_descriptors(up.tables, blocks),
        *_descriptors(down.tables, blocks),
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


def _descriptors(tables: ExpertTables, most_blocks: int) -> tuple[object, object]:
    """For TMA: what all blocks have of eight rows of both matrices, and the shifts of 16."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    blocks = tables.num_blocks
    words = tables.words.view(-1, blocks, ROWS, 32)
    shifts = tables.shifts.view(-1, blocks, ROWS // 16, 32)
    layouts = (gl.NVMMASharedLayout(each, 32, rank=4) for each in (128, 0))
    return (
        TensorDescriptor.from_tensor(words, [1, most_blocks, _OCTET, 32], next(layouts)),
        TensorDescriptor.from_tensor(shifts, [1, most_blocks, 1, 32], next(layouts)),
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
def _fetch(words, shifts, tile, octet, buffers, stage):
    """Have a unit's words and shifts on their way to a stage."""
    tiles, shift_tiles, ready, _free = buffers
    mbarrier.expect(ready.index(stage), words.block_type.nbytes + shifts.block_type.nbytes)
    _fetch_tile(words, [tile, 0, octet * _ROWS, 0], ready.index(stage), tiles.index(stage))
    _fetch_tile(shifts, [tile, 0, octet // 2, 0], ready.index(stage), shift_tiles.index(stage))


@gluon.jit
def _fetch_units(ids, up, down, buffers, TOP_K: gl.constexpr, PDL: gl.constexpr):
    """The partition that loads weights."""
    up_words, up_shifts, up_octets, up_tiles = up
    down_words, down_shifts, down_octets, down_tiles = down
    free = buffers[3]
    STAGES: gl.constexpr = free.shape[0]
    if PDL:
        tl.extra.cuda.gdc_wait()
    experts = _load_ids(ids, TOP_K)
    num_gates = TOP_K * up_octets
    turn = gl.to_tensor(0)
    for unit in range(gl.program_id(0), num_gates, gl.num_programs(0)):
        tile, octet, _slot = _place_of(unit, experts, up_octets, up_tiles)
        mbarrier.wait(free.index(turn % STAGES), (turn // STAGES + 1) & 1)
        _fetch(up_words, up_shifts, tile, octet, buffers, turn % STAGES)
        turn += 1
    first = _first_down(num_gates)
    for unit in range(first, TOP_K * down_octets, gl.num_programs(0)):
        tile, octet, _slot = _place_of(unit, experts, down_octets, down_tiles)
        mbarrier.wait(free.index(turn % STAGES), (turn // STAGES + 1) & 1)
        _fetch(down_words, down_shifts, tile, octet, buffers, turn % STAGES)
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
def _unit_sums(
    buffers, stage, is_second, rights, LAYOUT: gl.constexpr, ROUNDS: gl.constexpr
):
    """The sums of a unit in each warp, [WARPS, 16, 8]: of 8 rows of both matrices."""
    tiles, shift_tiles, _ready, _free = buffers
    WARPS: gl.constexpr = gl.num_warps()
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, k_width=2)
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
    acc = gl.zeros([WARPS, 16, _TOKENS], gl.float32, LAYOUT)
    other = acc
    for i in gl.static_range(ROUNDS):
        own_tiles = tiles.index(stage).slice(i * WARPS, WARPS, 1)
        words = own_tiles.load(LOADED).reshape([WARPS, 8, 2, 16])
        words = words.permute((0, 2, 1, 3)).reshape([WARPS, 16, 16])
        shifts = shift_tiles.index(stage).slice(i * WARPS, WARPS, 1).load(SHIFTS)
        first, second = gl.split((shifts >> 1).reshape([WARPS, 8, 2, 2]))
        own = gl.where(is_second, second, first).permute((0, 2, 1)).reshape([WARPS, 16])
        own = gl.convert_layout(own, gl.SliceLayout(2, words.type.layout), assert_trivial=True)
        lefts = _to_float16(words, own)
        for k in gl.static_range(_BLOCK // 32):
            left = gl.convert_layout(lefts[2 * k], LEFT, assert_trivial=True)
            acc = mma_v2(left, rights[i * (_BLOCK // 16) + 2 * k], acc)
            left = gl.convert_layout(lefts[2 * k + 1], LEFT, assert_trivial=True)
            other = mma_v2(left, rights[i * (_BLOCK // 16) + 2 * k + 1], other)
    return acc + other


@gluon.jit
def _leave(sums, factor, buffers, board, stage, slot, phase):
    """Give a unit's sums to the partition that stores results, and its stage back."""
    parts, given, taken = board
    WARPS: gl.constexpr = gl.num_warps()
    # All columns are the same.
    own, _ = gl.split((sums * factor).reshape([WARPS, 16, 4, 2]))
    mbarrier.wait(taken.index(slot), phase)
    parts.index(slot).store(own)
    _barrier()
    mbarrier.arrive(buffers[3].index(stage), count=1)
    mbarrier.arrive(given.index(slot), count=1)


@gluon.jit
def _multiply(
    x,
    size,
    places,
    buffers,
    board,
    launch,
    up_octets,
    down_octets,
    UP_ROUNDS: gl.constexpr,
    DOWN_ROUNDS: gl.constexpr,
    TOP_K: gl.constexpr,
    BOUNDED: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that multiplies."""
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    ready = buffers[2]
    STAGES: gl.constexpr = ready.shape[0]
    PARTS: gl.constexpr = board[1].shape[0]
    if PDL:
        tl.extra.cuda.gdc_wait()
    values, scale = _in_float16(_load_inputs(x, size, UP_ROUNDS), SUMS)
    rights = _as_operands(values, SUMS)
    num_gates = TOP_K * up_octets
    turn = gl.to_tensor(0)
    for unit in range(gl.program_id(0), num_gates, gl.num_programs(0)):
        stage = turn % STAGES
        slot = turn % PARTS
        is_second = unit % up_octets % 2 == 1
        mbarrier.wait(ready.index(stage), (turn // STAGES) & 1)
        sums = _unit_sums(buffers, stage, is_second, rights, SUMS, UP_ROUNDS)
        _leave(sums, scale, buffers, board, stage, slot, (turn // PARTS + 1) & 1)
        turn += 1
    numbers, told = launch
    mbarrier.wait(told.index(0), 0)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    words_each = up_octets * (_ROWS // 2)
    places = places + gl.max(numbers.load(ONE), 0) * (TOP_K * words_each)
    for unit in range(_first_down(num_gates), TOP_K * down_octets, gl.num_programs(0)):
        stage = turn % STAGES
        slot = turn % PARTS
        own_places = places + unit // down_octets * words_each
        is_second = unit % down_octets % 2 == 1
        found = _load_gates(own_places, words_each, DOWN_ROUNDS)
        lowest = _lowest(found)
        while lowest == EMPTY:
            found = _load_gates(own_places, words_each, DOWN_ROUNDS)
            lowest = _lowest(found)
        if BOUNDED:
            own_rights = _as_operands(_pairs(found, gl.float16), SUMS)
            own_scale = 1.0 / _BOUND
        else:
            own_values, own_scale = _in_float16(_pairs(found, gl.bfloat16), SUMS)
            own_rights = _as_operands(own_values, SUMS)
        mbarrier.wait(ready.index(stage), (turn // STAGES) & 1)
        sums = _unit_sums(buffers, stage, is_second, own_rights, SUMS, DOWN_ROUNDS)
        _leave(sums, own_scale, buffers, board, stage, slot, (turn // PARTS + 1) & 1)
        turn += 1


@gluon.jit
def _load_inputs(x, size, ROUNDS: gl.constexpr):
    """Of x [size] what the operands of each warp's blocks are made of."""
    WARPS: gl.constexpr = gl.num_warps()
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    blocks = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))
    inner = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))
    columns = blocks[:, None, None] * _BLOCK + inner[None, None, :]
    columns = columns + gl.zeros([WARPS, _TOKENS, 16], gl.int32, LOADED)
    found = ()
    for i in gl.static_range(ROUNDS):
        for k in gl.static_range(_BLOCK // 16):
            own = i * (WARPS * _BLOCK) + k * 16 + columns
            found += (gl.load(x + own, mask=own < size, other=0.0),)  # type: ignore[assignment]
    return found


@gluon.jit
def _in_float16(values, LAYOUT: gl.constexpr):
    """bfloat16 in float16, divided by a power of two in each warp, which is the second result."""
    largest = gl.abs(values[0].to(gl.float32))
    for i in gl.static_range(1, len(values)):
        largest = gl.maximum(largest, gl.abs(values[i].to(gl.float32)))
    most = gl.max(gl.max(largest, 2), 1)
    exponent = gl.floor(gl.log2(gl.maximum(most, 1e-30))) - 14
    factor = gl.exp2(-exponent)[:, None, None]
    found = ()
    for i in gl.static_range(len(values)):
        found += ((values[i].to(gl.float32) * factor).to(gl.float16),)  # type: ignore[assignment]
    BY_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    return found, gl.convert_layout(gl.exp2(exponent), BY_WARP)[:, None, None]


@gluon.jit
def _as_operands(values, LAYOUT: gl.constexpr):
    """[WARPS, 8, 16] each as right operands, in an order of `_to_float16`."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, k_width=2)
    rights = ()
    for i in gl.static_range(len(values)):
        own = _regrouped(values[i]).permute((0, 2, 1))
        rights += (gl.convert_layout(own, RIGHT, assert_trivial=True),)  # type: ignore[assignment]
    return rights


@gluon.jit
def _load_gates(places, num_words, ROUNDS: gl.constexpr):
    """A slot's places of each warp's blocks, as they are now."""
    WARPS: gl.constexpr = gl.num_warps()
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    blocks = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))
    inner = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))
    columns = blocks[:, None, None] * (_BLOCK // 2) + inner[None, None, :]
    columns = columns + gl.zeros([WARPS, _TOKENS, 8], gl.int32, LOADED)
    given = ()
    for i in gl.static_range(ROUNDS):
        for k in gl.static_range(_BLOCK // 16):
            own = i * (WARPS * _BLOCK // 2) + k * 8 + columns
            words = gl.load(places + own, mask=own < num_words, other=0, volatile=True)
            given += (words,)  # type: ignore[assignment]
    return given


@gluon.jit
def _lowest(given):
    lowest = given[0]
    for i in gl.static_range(1, len(given)):
        lowest = gl.minimum(lowest, given[i])
    return gl.min(gl.min(gl.min(lowest, 2), 1), 0)


@gluon.jit
def _pairs(words, DTYPE: gl.constexpr):
    """Words [WARPS, 8, 8] of two numbers each as numbers [WARPS, 8, 16]."""
    WARPS: gl.constexpr = gl.num_warps()
    found = ()
    for i in gl.static_range(len(words)):
        first, second = gl.inline_asm_elementwise(
            "mov.b32 $0, $2; mov.b32 $1, $3;",
            "=r,=r,r,r",
            [words[i]],
            dtype=(gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )
        # Of two words that follow each other, the first has the first two numbers of four.
        values = gl.join(first, second).reshape([WARPS, _TOKENS, 4, 2, 2])
        values = values.permute((0, 1, 2, 4, 3)).reshape([WARPS, _TOKENS, 16])
        found += (values.to(DTYPE, bitcast=True),)  # type: ignore[assignment]
    return found


@gluon.jit
def _load_rows(factors, bias, expert, first_row, num_rows, num_first, LAYOUT: gl.constexpr):
    """Factors and biases of 8 rows of both matrices."""
    rows = first_row + gl.arange(0, _ROWS, layout=LAYOUT)
    own = expert.to(gl.int64) * num_rows + gl.minimum(rows, num_rows - 1)
    second = expert.to(gl.int64) * num_rows + gl.minimum(num_first + rows, num_rows - 1)
    factor = gl.load(factors + own)
    second_factor = gl.load(factors + second)
    shift = gl.zeros([_ROWS], gl.float32, LAYOUT)
    second_shift = shift
    if bias is not None:
        shift = gl.load(bias + own).to(gl.float32)
        second_shift = gl.load(bias + second).to(gl.float32)
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
        [[0, 1, 0], [0, 8, 0]],
        [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [],
        [],
        [WARPS, 16, 1],
    )
    found = parts.index(slot).slice(0, 1, 2).load(ALL)
    _barrier()
    mbarrier.arrive(taken.index(slot), count=1)
    total = gl.sum(found.reshape([WARPS, 16]), 0).reshape([2, 8]).permute((1, 0))
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
    PDL: gl.constexpr,
):
    """The partition that makes results of sums, and stores them: a single warp."""
    up_factors, down_factors = factors
    up_bias, down_bias = biases
    up_octets, up_rows, up_first = up
    down_octets, down_rows, down_first = down
    # A thread has both halves of a word of two gates.
    OUT: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    if PDL:
        tl.extra.cuda.gdc_wait()
    experts = _load_ids(ids, TOP_K)
    num_gates = TOP_K * up_octets
    num_downs = TOP_K * down_octets
    words_each = up_octets * (_ROWS // 2)
    own_places = places + _begin(places, tickets, launch, TOP_K * words_each) * (TOP_K * words_each)
    turn = gl.to_tensor(0)
    in_octet = gl.arange(0, _ROWS, layout=OUT)
    for unit in range(gl.program_id(0), num_gates, gl.num_programs(0)):
        expert = _expert_of(experts, unit // up_octets)
        row = unit % up_octets * _ROWS
        factor, second_factor, shift, second_shift = _load_rows(
            up_factors, up_bias, expert, row, up_rows, up_first, OUT
        )
        first, second = _added(board, turn)
        gates = gl.convert_layout(first, OUT) * factor + shift
        ups = gl.convert_layout(second, OUT) * second_factor + second_shift
        result = gl.where(row + in_octet < up_first, _activate_gated(gates, ups, EPILOGUE), 0.0)
        narrow = (result * _BOUND).to(gl.float16) if BOUNDED else result.to(gl.bfloat16)
        bits = narrow.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        low, high = gl.split(bits.reshape([_ROWS // 2, 2]))
        both = low | (high << 16)
        both = gl.where(both == EMPTY, 0, both)
        target = unit * (_ROWS // 2) + gl.arange(0, _ROWS // 2, layout=both.type.layout)
        gl.store(own_places + target, both)
        turn += 1
    for unit in range(_first_down(num_gates), num_downs, gl.num_programs(0)):
        slot = unit // down_octets
        expert = _expert_of(experts, slot)
        row = unit % down_octets * _ROWS
        factor, second_factor, shift, second_shift = _load_rows(
            down_factors, down_bias, expert, row, down_rows, down_first, OUT
        )
        share = gl.load(shares + slot, cache_modifier=".cg")
        first, second = _added(board, turn)
        result = (gl.convert_layout(first, OUT) * factor + shift) * share
        second_result = (gl.convert_layout(second, OUT) * second_factor + second_shift) * share
        target = out + slot * down_rows
        rows = row + in_octet
        gl.store(target + rows, result, mask=rows < down_first)
        rows = down_first + rows
        gl.store(target + rows, second_result, mask=rows < down_rows)
        turn += 1


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
    BLOCKS: gl.constexpr = up_words.block_type.shape[1]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    MEMORY: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    tiles = gl.allocate_shared_memory(
        up_words.dtype, [STAGES, 1, BLOCKS, _ROWS, 32], up_words.layout
    )
    shift_tiles = gl.allocate_shared_memory(
        up_shifts.dtype, [STAGES, 1, BLOCKS, 1, 32], up_shifts.layout
    )
    parts = gl.allocate_shared_memory(gl.float32, [PARTS, WARPS, 16, 4], MEMORY)
    numbers = gl.allocate_shared_memory(gl.int32, [1], FLAT)
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
                    board,
                    launch,
                    up_octets,
                    down_octets,
                    UP_ROUNDS,
                    DOWN_ROUNDS,
                    TOP_K,
                    BOUNDED,
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
                    PDL,
                ),
            ),
        ],
        [1, 1],
        [24, 24],
    )
