"""The MXFP4 experts of one token on Hopper GPUs: both projections in one kernel, and before them
the norm and the router, where experts are chosen by their logits alone (routing_in_kernel.py).

Each SM has a program, which takes units one after the other: 8 rows of each of two matrices
(expert_tables.py), gates and ups of all experts first and then down projections. A program has two
teams, which take turns: a warp that fetches weights by TMA into a ring in shared memory, eight
warps that multiply, and a warp that makes results of their sums. So memory is busy from the moment
at which the experts are known to the end; a kernel for each projection would begin and end twice.

The warps of a team share the inputs of a unit. Each turns its words into e4m3, as
experts_mx_hopper.py does, and multiplies them by two e4m3 numbers for each input. A product of
tensor cores has 16 columns here, two for each of eight warps: a warp's own two have the inputs that
belong to its words, and what its rows make of the others is dropped.

Gates announce themselves to the teams that take down projections, as attention's partial results
do (attention_decode.py): a place holds EMPTY until its results have come. All down projections of a
team are of one slot of the token's experts, so that it takes its gates in once. Of two buffers that
take turns, a launch makes the one EMPTY again that it does not use; which one that is follows from
a counter of tickets, of which each program takes one. Programs wait for each other and must all run
at once: one for each SM does, as it takes more than half of the shared memory. Two on an SM would
not always do, because an SM that still has programs of another kernel does not enlarge its shared
memory.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.ops.cuda.announcing import EMPTY
from octavo.ops.cuda.devices import num_sms
from octavo.ops.cuda.epilogues import activate_gated
from octavo.ops.cuda.expert_tables import (
    LOW_FACTOR,
    ROWS,
    ExpertProjection,
    ExpertTables,
    split_in_two,
    to_float8,
)
from octavo.ops.cuda.expert_weights import BLOCK
from octavo.ops.cuda.hopper import fetch_tile, prefetch, recast, swizzled_descriptor, sync_threads
from octavo.ops.cuda.one_token import (
    Source,
    allow_next_with,
    empty_other,
    expert_of,
    following,
    own_buffer,
    store_words,
    take_ticket,
    told_ticket,
    two_buffers,
)
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.routing_in_kernel import (
    announce_logit,
    choose,
    empty_logits,
    load_weights,
    logit_shape,
    make_choice,
    norm_row,
    prefetch_weights,
    store_total,
    told,
    told_shares,
)
from octavo.ops.cuda.two_float8 import scales_of_two
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import Routed, Unrouted

MOST_INPUTS = 24 << 10  # of a matrix, whose e4m3 numbers both teams keep in shared memory
_BLOCK = tl.constexpr(BLOCK)
_OCTET = 8  # rows of each matrix in a unit
_ROWS = tl.constexpr(_OCTET)
_TILE_OCTETS = tl.constexpr(ROWS // _OCTET)
_WARPS = 8  # that multiply, of a team
_TEAMS = tl.constexpr(2)
_COLUMNS = tl.constexpr(2 * _WARPS)  # of the right operand
# Blocks of each warp in a stage, and stages of a team.
_MOST_ROUNDS, _STAGES = 3, 2
_REGISTERS = 96  # of a thread, before partitions get what they need
_PARTS = tl.constexpr(2)  # units of a team whose sums may wait
_BOUNDED = tl.constexpr(4.0)  # what activations below 64 are multiplied by


class Exchange(NamedTuple):
    """Through which gates come to the down projections, and logits to all programs."""

    places: Tensor  # int32 [2, top_k, blocks * 64]: two numbers of 16 bits, or four of 8, each
    tickets: Tensor  # int32 [1]: how many programs have begun, of two launches
    logits: Tensor | None  # int32 [2, *logit_shape]


@cache
def _exchange(
    device: torch.device, top_k: int, blocks: int, num_experts: int, num_programs: int
) -> Exchange:
    """For one stream, and launches with as many programs, which all route, or none (num_experts 0):
    buffers take turns from one launch to the next."""
    tickets = torch.zeros(1, dtype=torch.int32, device=device)
    logits = two_buffers(device, *logit_shape(num_experts)) if num_experts else None
    return Exchange(two_buffers(device, top_k, blocks * BLOCK // 2), tickets, logits)


def mix_one_mx(x: Tensor, routed: Routed, up: ExpertProjection, down: ExpertProjection) -> Tensor:
    """See ExpertsKernel.apply_partial, of bfloat16 x [1, size]."""
    return _launch(Source(x, routed.ids, routed.weights), up, down, routed.ids.shape[1])


def norm_route_and_mix_one_mx(x: Unrouted, up: ExpertProjection, down: ExpertProjection) -> Tensor:
    """See RoutingExpertsKernel.apply_unrouted, of one token in bfloat16."""
    return _launch(
        Source.of_norm(x), up, down, x.config.top_k, x.norm.offset, x.config.renormalised
    )


def _launch(
    source: Source,
    up: ExpertProjection,
    down: ExpertProjection,
    top_k: int,
    offset: float = 0.0,
    renormalises: bool = False,
) -> Tensor:
    gates, downs, device = up.tables, down.tables, source.x.device
    num_programs = num_sms(device)  # With more, some would wait for others that find no room.
    assert top_k <= _TEAMS.value * num_programs, "each slot has a team at least"
    out = torch.empty((top_k, 1, gates.size), dtype=torch.float32, device=device)
    exchange = _exchange(device, top_k, downs.num_blocks, source.num_experts, num_programs)
    up_rounds, down_rounds = (triton.cdiv(each.num_blocks, _WARPS) for each in (gates, downs))
    experts_one_kernel[(num_programs,)](
        *source,
        *_descriptors(gates),
        *_descriptors(downs),
        gates.factors,
        downs.factors,
        up.bias,
        down.bias,
        *exchange,
        out,
        gates.size,
        gates.num_rows,
        downs.num_rows,
        gates.num_first,
        downs.num_first,
        gates.num_tiles,
        downs.num_tiles,
        triton.cdiv(gates.num_first, _OCTET),
        triton.cdiv(downs.num_first, _OCTET),
        OFFSET=offset,
        RENORMALISES=renormalises,
        ALL_EXPERTS=0 if exchange.logits is None else exchange.logits.shape[2],
        UP_ROUNDS=up_rounds,
        DOWN_ROUNDS=down_rounds,
        SLOTS=min(_MOST_ROUNDS, max(up_rounds, down_rounds)),
        STAGES=_STAGES,
        TOP_K=top_k,
        EPILOGUE=int(up.epilogue),
        BOUNDED=up.epilogue is Epilogue.CLAMPED_SWIGLU,  # its results are below 64
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        **launch_options(device),
    )
    return out


def _descriptors(tables: ExpertTables) -> tuple[TensorDescriptor, TensorDescriptor]:
    """TMA descriptors: of eight rows of both matrices in eight blocks, and of the shifts of 16."""
    blocks = tables.num_blocks
    words = tables.words.view(-1, blocks, ROWS, 32)
    shifts = tables.shifts.view(-1, blocks, ROWS // 16, 32)
    return (
        swizzled_descriptor(words, [1, _WARPS, _OCTET, 32], 128),
        swizzled_descriptor(shifts, [1, _WARPS, 1, 32], 0),
    )


@gluon.jit
def _chosen(
    source,
    launch,
    TOP_K: gl.constexpr,
    CHOOSES: gl.constexpr,
    RENORMALISES: gl.constexpr,
    ALL_EXPERTS: gl.constexpr,
):
    """The token's experts: as given, or chosen by the partition that CHOOSES, and told.

    source: ids, weights, and what is needed to choose experts: places of logits, the number of
        experts, what weights are multiplied by, and what partitions tell each other by.
    """
    ids, _weights, places, num_experts, _scale, choice = source
    experts = ()
    if ids is not None:
        for i in gl.static_range(TOP_K):
            experts += (gl.load(ids + i, cache_modifier=".cg"),)  # type: ignore[assignment]
    elif CHOOSES:
        experts = choose(
            choice, places, own_buffer(launch), num_experts, ALL_EXPERTS, TOP_K, RENORMALISES
        )
    else:
        experts = told(choice, TOP_K)
    return experts


@gluon.jit
def _keep_shares(source, own_shares, TOP_K: gl.constexpr, RENORMALISES: gl.constexpr):
    """Write the weights of the experts' results to shared memory, for this warp alone."""
    ids, weights, _places, _num_experts, scale, choice = source
    shares = ()
    if ids is not None:
        for i in gl.static_range(TOP_K):
            shares += (gl.load(weights + i, cache_modifier=".cg"),)  # type: ignore[assignment]
    else:
        shares = told_shares(choice, scale, TOP_K, RENORMALISES)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(TOP_K):
        own_shares.index(i).store(gl.zeros([1], gl.float32, ONE) + shares[i])
    sync_threads()


@gluon.jit
def _units_of(down_octets, TOP_K: gl.constexpr, TEAM: gl.constexpr):
    """A team's first unit of gates, and how far they are from each other; and the same of its down
    projections, before that where they end. All of them are of one slot, so that gates are taken in
    once; those who have a unit of gates less have the first of them."""
    num_teams = _TEAMS * gl.num_programs(0)
    team = gl.program_id(0) + TEAM * gl.num_programs(0)
    each = num_teams // TOP_K  # teams of a slot; others have none
    slot = team % TOP_K
    first = gl.where(
        team < each * TOP_K,
        slot * down_octets + each - 1 - team // TOP_K,
        TOP_K * down_octets,
    )
    end = gl.minimum(slot + 1, TOP_K) * down_octets
    return team, num_teams, first, end, each


@gluon.jit
def _fetch_units(
    source,
    experts,
    ring,
    stage,
    phase,
    units,
    slot,
    octet,
    ROUNDS: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Load the words and shifts of a team's units of one projection; the next stage and phase.

    units: the first one, where they end, and how far they are from each other.
    slot, octet: of the first unit.
    """
    first, end, step = units
    words, shifts, octets, num_tiles = source
    tiles, shift_tiles, ready, free = ring
    STAGES: gl.constexpr = ready.shape[0]
    WARPS: gl.constexpr = words.block_type.shape[1]
    BYTES: gl.constexpr = words.block_type.nbytes + shifts.block_type.nbytes
    for unit in range(first, end, step):
        tile = expert_of(experts, slot) * num_tiles + octet // _TILE_OCTETS
        octet = octet % _TILE_OCTETS
        for begin in gl.static_range(0, ROUNDS, SLOTS):
            mbarrier.wait(free.index(stage), 1 - phase)
            bar = ready.index(stage)
            mbarrier.expect(bar, min(SLOTS, ROUNDS - begin) * BYTES)
            for i in gl.static_range(min(SLOTS, ROUNDS - begin)):
                place = stage * SLOTS + i
                block = (begin + i) * WARPS
                fetch_tile(words, [tile, block, octet * _ROWS, 0], bar, tiles.index(place))
                fetch_tile(shifts, [tile, block, octet // 2, 0], bar, shift_tiles.index(place))
            stage, phase = following(stage, phase, STAGES)
        slot = (unit + step) // octets
        octet = (unit + step) % octets
    return stage, phase


@gluon.jit
def _fetch(
    source,
    inputs,
    launch,
    up,
    down,
    ring,
    UP_ROUNDS: gl.constexpr,
    DOWN_ROUNDS: gl.constexpr,
    SLOTS: gl.constexpr,
    TOP_K: gl.constexpr,
    RENORMALISES: gl.constexpr,
    ALL_EXPERTS: gl.constexpr,
    TEAM: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads a team's weights."""
    first, step, first_down, end_down, down_step = _units_of(down[2], TOP_K, TEAM)
    units = (first, TOP_K * up[2], step)
    down_units = (first_down, end_down, down_step)
    # The next loads depend on ids, and what can be is done before they are there.
    slot, octet = first // up[2], first % up[2]
    down_slot, down_octet = first_down // down[2], first_down % down[2]
    if inputs[3] is not None and TEAM == 1:
        prefetch_weights(inputs[3], inputs[5], inputs[7], inputs[9])
    if PDL:
        tl.extra.cuda.gdc_wait()
    experts = _chosen(source, launch, TOP_K, TEAM == 0, RENORMALISES, ALL_EXPERTS)
    none = gl.to_tensor(0)
    stage, phase = _fetch_units(up, experts, ring, none, none, units, slot, octet, UP_ROUNDS, SLOTS)
    _fetch_units(
        down,
        experts,
        ring,
        stage,
        phase,
        down_units,
        down_slot,
        down_octet,
        DOWN_ROUNDS,
        SLOTS,
    )


@gluon.jit
def _multiply_unit(
    ring,
    stage,
    phase,
    x_tiles,
    is_second,
    LAYOUT: gl.constexpr,
    ROUNDS: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """The sums of a unit in each warp, [WARPS, 16, 4], of which one of four is not zero: of 8 rows
    of both matrices. The unit's last stage is not given back.

    is_second: whether the rows are the second half of those that shifts lie together of.
    """
    tiles, shift_tiles, ready, free = ring
    STAGES: gl.constexpr = ready.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    OF_WARPS: gl.constexpr = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    # As _of_stage of experts_mx_hopper.py, but of row r, and of the same row of the other matrix.
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
    for begin in gl.static_range(0, ROUNDS, SLOTS):
        if begin > 0:
            acc = warpgroup_mma_wait(0, deps=[acc])
            sync_threads()
            mbarrier.arrive(free.index(stage), count=1)
            stage, phase = following(stage, phase, STAGES)
        mbarrier.wait(ready.index(stage), phase)
        for i in gl.static_range(min(SLOTS, ROUNDS - begin)):
            words = tiles.index(stage * SLOTS + i).load(LOADED).reshape([WARPS, 8, 2, 16])
            words = words.permute((0, 2, 1, 3)).reshape([16 * WARPS, 16])
            shifts = shift_tiles.index(stage * SLOTS + i).load(SHIFTS)
            first, second = gl.split(shifts.reshape([WARPS, 8, 2, 2]))
            own = gl.where(is_second, second, first).permute((0, 2, 1)).reshape([16 * WARPS])
            own = gl.convert_layout(own, gl.SliceLayout(1, words.type.layout), assert_trivial=True)
            inputs = x_tiles.index(begin + i).permute((1, 0))
            acc = warpgroup_mma(to_float8(words, own, LAYOUT), inputs, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    warp = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, LAYOUT)) // 16
    of_warp = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, LAYOUT)) // 2
    own = gl.where(warp[:, None] == of_warp[None, :], acc, 0.0)
    high, low = gl.split(own.reshape([WARPS, 16, WARPS // 4, 4, 2]))
    return gl.sum(high + low * (1.0 / LOW_FACTOR), 2), stage, phase


@gluon.jit
def _leave(sums, scale, board, free, stage, turn):
    """Give a unit's sums to the partition that makes results of them, and its last stage back."""
    parts, given, taken = board
    slot = turn % _PARTS
    mbarrier.wait(taken.index(slot), (turn // _PARTS + 1) & 1)
    parts.index(slot).store(sums * scale)
    sync_threads()
    mbarrier.arrive(free.index(stage), count=1)
    mbarrier.arrive(given.index(slot), count=1)


@gluon.jit
def _multiply(
    source,
    size,
    places,
    ring,
    x_tiles,
    board,
    launch,
    up_octets,
    down_octets,
    UP_ROUNDS: gl.constexpr,
    DOWN_ROUNDS: gl.constexpr,
    SLOTS: gl.constexpr,
    TOP_K: gl.constexpr,
    BOUNDED: gl.constexpr,
    OFFSET: gl.constexpr,
    ALL_EXPERTS: gl.constexpr,
    TEAM: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that multiplies a team's units.

    source: x, and what is needed to norm it: the residual stream, where its next values are
        written, the norm's weights and eps; and the router's weights and bias, places of logits and
        the number of experts.
    """
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, _COLUMNS, 32]
    )
    STAGES: gl.constexpr = ring[2].shape[0]
    SHAPE: gl.constexpr = [x_tiles.shape[0], _COLUMNS, _BLOCK // 4]
    AS_WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    x_words = recast(x_tiles, gl.int32, SHAPE, AS_WORDS)
    free = ring[3]
    num_gates = TOP_K * up_octets
    first, step, first_down, end_down, down_step = _units_of(down_octets, TOP_K, TEAM)
    scale = _prepare_inputs(
        source, size, x_tiles, launch, UP_ROUNDS, OFFSET, ALL_EXPERTS, TEAM, PDL
    )
    turn = gl.to_tensor(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    inner = up_octets * _ROWS
    words_each = gl.cdiv(inner, _BLOCK) * (_BLOCK // 2)
    slot = gl.minimum(first_down // down_octets, TOP_K - 1)
    found = _no_gates(DOWN_ROUNDS, BOUNDED)
    for unit in range(first, num_gates, step):
        is_second = unit % up_octets % 2 == 1
        if unit + step >= num_gates:  # Gates are asked for one unit ahead.
            own_places = places + (own_buffer(launch) * TOP_K + slot) * words_each
            found = _load_gates(own_places, inner, DOWN_ROUNDS, BOUNDED)
        sums, stage, phase = _multiply_unit(
            ring, stage, phase, x_tiles, is_second, SUMS, UP_ROUNDS, SLOTS
        )
        _leave(sums, _by_warp(scale, sums), board, free, stage, turn)
        stage, phase = following(stage, phase, STAGES)
        turn += 1
    own_places = places + (own_buffer(launch) * TOP_K + slot) * words_each
    while _lowest(found) == EMPTY:
        found = _load_gates(own_places, inner, DOWN_ROUNDS, BOUNDED)
    if BOUNDED:
        for i in gl.static_range(DOWN_ROUNDS):
            x_words.index(i).store(found[i])
        fence_async_shared()
        sync_threads()
    else:
        down_scale = _store_in_two(_pairs(found), x_tiles)
    for unit in range(first_down, end_down, down_step):
        is_second = unit % down_octets % 2 == 1
        sums, stage, phase = _multiply_unit(
            ring, stage, phase, x_tiles, is_second, SUMS, DOWN_ROUNDS, SLOTS
        )
        own_scale = 1.0 / _BOUNDED if BOUNDED else _by_warp(down_scale, sums)
        _leave(sums, own_scale, board, free, stage, turn)
        stage, phase = following(stage, phase, STAGES)
        turn += 1


@gluon.jit
def _by_warp(values, like):
    """Values of warps for a tensor [WARPS, 16, 4]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout))
    return gl.convert_layout(values, LAYOUT)[:, None, None]


@gluon.jit
def _prepare_inputs(
    source,
    size,
    x_tiles,
    launch,
    ROUNDS: gl.constexpr,
    OFFSET: gl.constexpr,
    ALL_EXPERTS: gl.constexpr,
    TEAM: gl.constexpr,
    PDL: gl.constexpr,
):
    """Write the inputs, perhaps after their norm, in two e4m3 numbers each; as `_store_in_two`. One
    team's partition has the router's logit, too."""
    x, residual, total, norm_weight, eps, router, bias, num_experts, places, _size = source
    WARPS: gl.constexpr = gl.num_warps()
    BY: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    if norm_weight is None:
        if PDL:
            tl.extra.cuda.gdc_wait()
        parts = _load_inputs(x, size, ROUNDS)
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        own_router = router if TEAM == 0 else None
        expert, buffer = told_ticket(launch)
        weights = load_weights(
            norm_weight, own_router, bias, expert, num_experts, size, ROUNDS, WARPS, _BLOCK, BY
        )
        norm = (x, residual, eps)
        parts, stream, logit = norm_row(norm, weights, size, OFFSET, ROUNDS, WARPS, _BLOCK, BY)
        if TEAM == 0:
            announce_logit(logit, places, buffer, expert, num_experts, ALL_EXPERTS)
            store_total(total, stream, size, ROUNDS, WARPS, _BLOCK, BY)
    return _store_in_two(parts, x_tiles)


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
        high, low = split_in_two(values[i].to(gl.float32) * factor[:, None])
        both = gl.join(high, low).permute((0, 2, 1)).reshape([_COLUMNS, _BLOCK])
        x_tiles.index(i).store(both)
    fence_async_shared()
    sync_threads()
    return scale


@gluon.jit
def _gate_words(BOUNDED: gl.constexpr):
    """The places and the gates of the words of a slot that each warp takes first: [2 WARPS, 32]
    with four e4m3 each, or [WARPS, 64] with pairs."""
    WARPS: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = 2 if BOUNDED else 1
    WIDTH: gl.constexpr = _BLOCK // (2 * EACH)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 2], [EACH, 32 // EACH], [WARPS, 1], [1, 0])
    row = gl.arange(0, EACH * WARPS, layout=gl.SliceLayout(1, LOADED))
    word = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LOADED))
    gate = (row // EACH)[:, None] * _BLOCK + (word * (2 * EACH))[None, :]
    return row[:, None] * WIDTH + word[None, :], gate


@gluon.jit
def _load_gates(places, num_gates, ROUNDS: gl.constexpr, BOUNDED: gl.constexpr):
    """A slot's places, as they are now."""
    WARPS: gl.constexpr = gl.num_warps()
    place, gate = _gate_words(BOUNDED)
    found = ()
    for i in gl.static_range(ROUNDS):
        own = places + i * (WARPS * _BLOCK // 2) + place
        is_gate = i * (WARPS * _BLOCK) + gate < num_gates
        found += (gl.load(own, mask=is_gate, other=0, volatile=True),)  # type: ignore[assignment]
    return found


@gluon.jit
def _no_gates(ROUNDS: gl.constexpr, BOUNDED: gl.constexpr):
    """What `_load_gates` returns where nothing has come."""
    place, _gate = _gate_words(BOUNDED)
    found = ()
    for _i in gl.static_range(ROUNDS):
        found += (gl.zeros_like(place) + EMPTY,)  # type: ignore[assignment]
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
        # Two words that follow each other hold four numbers, the first word the first two.
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
    expert = expert_of(experts, unit // octets)
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
    slot = turn % _PARTS
    mbarrier.wait(given.index(slot), (turn // _PARTS) & 1)
    WARPS: gl.constexpr = parts.shape[1]
    ALL: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 8, 0], [4, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0]],
        [],
        [],
        [WARPS, 16, 4],
    )
    found = parts.index(slot).load(ALL)
    sync_threads()
    mbarrier.arrive(taken.index(slot), count=1)
    total = gl.sum(gl.sum(found, 2), 0).reshape([2, 8]).permute((1, 0))
    return gl.split(total)


@gluon.jit
def _announce(result, places, row, BOUNDED: gl.constexpr):
    """Store 8 gates of a slot, from `row` on, to its places."""
    # A thread has all numbers of a word.
    WIDE: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    if BOUNDED:
        high, low = split_in_two(result * _BOUNDED)
        own = places + row // _BLOCK * (_BLOCK // 2) + row % _BLOCK // 4
        store_words(_words_of_octets(gl.convert_layout(high, WIDE)), own)
        store_words(_words_of_octets(gl.convert_layout(low, WIDE)), own + _BLOCK // 4)
    else:
        bits = gl.convert_layout(result, WIDE).to(gl.bfloat16).to(gl.int16, bitcast=True)
        first, second = gl.split((bits.to(gl.int32) & 0xFFFF).reshape([_ROWS // 2, 2]))
        store_words(first | (second << 16), places + row // 2)


@gluon.jit
def _words_of_octets(values):
    """e4m3 [8] as int32 [2]."""
    octets = values.to(gl.int8, bitcast=True).to(gl.int32) & 0xFF
    first, second = gl.split(octets.reshape([2, 2, 2]))
    first, second = gl.split(first | (second << 8))
    return first | (second << 16)


@gluon.jit
def _fetch_rows(factors, bias, experts, first, step, octets, num_rows, num_first):
    """Have factors and biases of the first 32 of some units on their way to the L2 cache."""
    unit = first + step * gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    unit = gl.minimum(unit, len(experts) * octets - 1)
    row = unit % octets * _ROWS
    expert = expert_of(experts, unit // octets + gl.zeros_like(unit))
    own = expert.to(gl.int64) * num_rows + row
    second = expert.to(gl.int64) * num_rows + gl.minimum(num_first + row, num_rows - 1)
    prefetch(factors + own)
    prefetch(factors + second)
    if bias is not None:
        prefetch(bias + own)
        prefetch(bias + second)


@gluon.jit
def _finish(
    factors,
    biases,
    out,
    places,
    tickets,
    source,
    num_hit,
    own_shares,
    board,
    launch,
    up,
    down,
    TOP_K: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BOUNDED: gl.constexpr,
    RENORMALISES: gl.constexpr,
    ALL_EXPERTS: gl.constexpr,
    TEAM: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that makes results of a team's sums, and stores them: a single warp.

    What it needs of a unit's rows is asked for one unit ahead.
    """
    up_factors, down_factors = factors
    up_bias, down_bias = biases
    up_octets, up_rows, up_first = up
    down_octets, down_rows, down_first = down
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_gates = TOP_K * up_octets
    words_each = gl.cdiv(up_octets * _ROWS, _BLOCK) * (_BLOCK // 2)
    ids, _weights, logits, num_experts, _scale, _choice = source
    if TEAM == 0:
        allow_next_with(take_ticket(tickets, launch), PDL)
    if PDL:
        tl.extra.cuda.gdc_wait()
    number, buffer = told_ticket(launch)
    if TEAM == 0:
        empty_other(places, buffer, TOP_K * words_each)
        if ids is None:
            empty_logits(logits, buffer, number, num_experts, ALL_EXPERTS)
            if number == 0:
                count = gl.to_tensor(TOP_K).to(gl.int64)
                gl.atomic_add(num_hit, count, sem="relaxed", scope="gpu")
    experts = _chosen(source, launch, TOP_K, False, RENORMALISES, ALL_EXPERTS)
    first_gate, step, first_down, end_down, down_step = _units_of(down_octets, TOP_K, TEAM)
    of_gates = (up_factors, up_bias, experts)
    of_downs = (down_factors, down_bias, experts)
    factor, second_factor, shift, second_shift = _load_rows(
        of_gates, first_gate, up_octets, up_rows, up_first, OUT
    )
    _fetch_rows(up_factors, up_bias, experts, first_gate, step, up_octets, up_rows, up_first)
    _fetch_rows(
        down_factors, down_bias, experts, first_down, down_step, down_octets, down_rows, down_first
    )
    _keep_shares(source, own_shares, TOP_K, RENORMALISES)
    own_places = places + buffer * (TOP_K * words_each)
    turn = gl.to_tensor(0)
    in_octet = gl.arange(0, _ROWS, layout=OUT)
    for unit in range(first_gate, num_gates, step):
        next_factor, next_second_factor, next_shift, next_second_shift = _load_rows(
            of_gates, unit + step, up_octets, up_rows, up_first, OUT
        )
        row = unit % up_octets * _ROWS
        first, second = _added(board, turn)
        gates = gl.convert_layout(first, OUT) * factor + shift
        ups = gl.convert_layout(second, OUT) * second_factor + second_shift
        result = gl.where(row + in_octet < up_first, activate_gated(gates, ups, EPILOGUE), 0.0)
        _announce(result, own_places + unit // up_octets * words_each, row, BOUNDED)
        factor = next_factor
        second_factor = next_second_factor
        shift = next_shift
        second_shift = next_second_shift
        turn += 1
    factor, second_factor, shift, second_shift = _load_rows(
        of_downs, first_down, down_octets, down_rows, down_first, OUT
    )
    for unit in range(first_down, end_down, down_step):
        next_factor, next_second_factor, next_shift, next_second_shift = _load_rows(
            of_downs, unit + down_step, down_octets, down_rows, down_first, OUT
        )
        slot = unit // down_octets
        row = unit % down_octets * _ROWS
        first, second = _added(board, turn)
        share = own_shares.index(slot).load(OUT)
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
        turn += 1


@gluon.jit
def _make_team(
    words,
    shifts,
    WARPS: gl.constexpr,
    ROUNDS: gl.constexpr,
    SLOTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Shared memory of a team: its ring, inputs, and the sums of its units."""
    MEMORY: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    INPUTS: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    PLACES: gl.constexpr = STAGES * SLOTS
    tiles = gl.allocate_shared_memory(words.dtype, [PLACES, 1, WARPS, _ROWS, 32], words.layout)
    shift_tiles = gl.allocate_shared_memory(shifts.dtype, [PLACES, 1, WARPS, 1, 32], shifts.layout)
    x_tiles = gl.allocate_shared_memory(gl.float8e4nv, [ROUNDS, _COLUMNS, _BLOCK], INPUTS)
    parts = gl.allocate_shared_memory(gl.float32, [_PARTS, WARPS, 16, 4], MEMORY)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [_PARTS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [_PARTS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    for slot in gl.static_range(_PARTS):
        mbarrier.init(given.index(slot), count=1)
        mbarrier.init(taken.index(slot), count=1)
    return (tiles, shift_tiles, ready, free), x_tiles, (parts, given, taken)


@gluon.jit
def experts_one_kernel(
    x,
    ids,
    shares,
    residual,
    total,
    norm_weight,
    router_weight,
    router_bias,
    num_hit,
    num_experts,
    eps,
    scale,
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
    logits,
    out,
    size,
    up_rows,
    down_rows,
    up_first,
    down_first,
    up_tiles,
    down_tiles,
    up_octets,
    down_octets,
    OFFSET: gl.constexpr,
    RENORMALISES: gl.constexpr,
    ALL_EXPERTS: gl.constexpr,
    UP_ROUNDS: gl.constexpr,
    DOWN_ROUNDS: gl.constexpr,
    SLOTS: gl.constexpr,
    STAGES: gl.constexpr,
    TOP_K: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BOUNDED: gl.constexpr,
    PDL: gl.constexpr,
):
    """All of a token's experts, weighted by `shares`, into out float32 [TOP_K, down_rows].

    Args:
        x: bfloat16 [size].
        ids, shares: as in Routed; None: the kernel norms x and routes it, by what follows.
        residual, total, norm_weight, eps, OFFSET: as in DeferredNorm.
        router_weight, router_bias: as in RouterWeights.
        num_hit: see make_router_kernel.
        num_experts, scale, RENORMALISES: as in RoutingConfig.
        up_words, up_shifts, down_words, down_shifts: descriptors of ExpertTables.
        places, tickets, logits: of Exchange; ALL_EXPERTS: the last dimension of logits.
        up_first, down_first: rows of the first matrix.
        up_tiles, down_tiles, up_octets, down_octets: tiles and units of an expert.
        UP_ROUNDS, DOWN_ROUNDS: blocks of each warp in a unit.
        SLOTS: blocks of each warp in a stage.
        BOUNDED: whether gates are below 64: they are exchanged as two e4m3 numbers, else in
            bfloat16.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ROUNDS: gl.constexpr = max(UP_ROUNDS, DOWN_ROUNDS)
    ring, x_tiles, board = _make_team(up_words, up_shifts, WARPS, ROUNDS, SLOTS, STAGES)
    second_ring, second_x_tiles, second_board = _make_team(
        up_words, up_shifts, WARPS, ROUNDS, SLOTS, STAGES
    )
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [1], FLAT)
    is_told = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(is_told.index(0), count=1)
    choice = ()
    if ids is None:
        choice = make_choice(TOP_K)
    fence_async_shared()
    launch = (numbers, is_told)
    inputs = (
        x,
        residual,
        total,
        norm_weight,
        eps,
        router_weight,
        router_bias,
        num_experts,
        logits,
        size,
    )
    source = (ids, shares, logits, num_experts, scale, choice)
    own_shares = gl.allocate_shared_memory(gl.float32, [TOP_K, 1], FLAT)
    second_shares = gl.allocate_shared_memory(gl.float32, [TOP_K, 1], FLAT)
    up = (up_words, up_shifts, up_octets, up_tiles)
    down = (down_words, down_shifts, down_octets, down_tiles)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    inputs,
                    size,
                    places,
                    ring,
                    x_tiles,
                    board,
                    launch,
                    up_octets,
                    down_octets,
                    UP_ROUNDS,
                    DOWN_ROUNDS,
                    SLOTS,
                    TOP_K,
                    BOUNDED,
                    OFFSET,
                    ALL_EXPERTS,
                    0,
                    PDL,
                ),
            ),
            (
                _multiply,
                (
                    inputs,
                    size,
                    places,
                    second_ring,
                    second_x_tiles,
                    second_board,
                    launch,
                    up_octets,
                    down_octets,
                    UP_ROUNDS,
                    DOWN_ROUNDS,
                    SLOTS,
                    TOP_K,
                    BOUNDED,
                    OFFSET,
                    ALL_EXPERTS,
                    1,
                    PDL,
                ),
            ),
            (
                _fetch,
                (
                    source,
                    inputs,
                    launch,
                    up,
                    down,
                    ring,
                    UP_ROUNDS,
                    DOWN_ROUNDS,
                    SLOTS,
                    TOP_K,
                    RENORMALISES,
                    ALL_EXPERTS,
                    0,
                    PDL,
                ),
            ),
            (
                _fetch,
                (
                    source,
                    inputs,
                    launch,
                    up,
                    down,
                    second_ring,
                    UP_ROUNDS,
                    DOWN_ROUNDS,
                    SLOTS,
                    TOP_K,
                    RENORMALISES,
                    ALL_EXPERTS,
                    1,
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
                    source,
                    num_hit,
                    own_shares,
                    board,
                    launch,
                    (up_octets, up_rows, up_first),
                    (down_octets, down_rows, down_first),
                    TOP_K,
                    EPILOGUE,
                    BOUNDED,
                    RENORMALISES,
                    ALL_EXPERTS,
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
                    source,
                    num_hit,
                    second_shares,
                    second_board,
                    launch,
                    (up_octets, up_rows, up_first),
                    (down_octets, down_rows, down_first),
                    TOP_K,
                    EPILOGUE,
                    BOUNDED,
                    RENORMALISES,
                    ALL_EXPERTS,
                    1,
                    PDL,
                ),
            ),
        ],
        [8, 1, 1, 1, 1],
        [112, 48, 48, 48, 48],
    )
