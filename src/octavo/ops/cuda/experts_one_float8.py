"""The FP8 experts of one token on Hopper GPUs: both projections in one kernel.

Each SM has a program, which takes units of 8 gates and as many ups of an expert, those of all
experts first; then 16 outputs, which it adds up over all experts. A warp fetches weights by TMA
into a ring in shared memory, and the tensor cores read them from there as they are. So memory is
busy from the moment at which the experts are known to the end; a kernel for each projection would
begin and end twice. Programs claim units of gates, because some begin later than others and not all
SMs read equally fast.

As in linear_ring.py, a row of weights is taken apart: 8 neighbouring pieces of 128 inputs are rows
of the left operand, and the same pieces of the inputs, two e4m3 numbers of each, are the columns of
the right one. Of the products of a row's pieces with all pieces of the inputs, those of the same
place are added up, in float32. Scales come with the weights: a load takes 2 us while weights are on
their way.

Gates announce themselves to the programs that take outputs, as in experts_one_mx.py. Some warps
make the two numbers of what has come, of four blocks of gates at once. A product needs those of its
expert only when its turn has come.
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

from octavo.ops.cuda.announcing import EMPTY
from octavo.ops.cuda.devices import num_sms
from octavo.ops.cuda.epilogues import activate_gated
from octavo.ops.cuda.expert_weights import BLOCK, ExpertMatrices, Format
from octavo.ops.cuda.hopper import (
    fetch_tile,
    reinterpreted,
    swizzled_descriptor,
    sync_threads,
    tiles_of_rows,
)
from octavo.ops.cuda.one_token import (
    Source,
    allow_next_with,
    empty_other,
    expert_of,
    following,
    own_buffer,
    store_words,
    take_ticket,
    two_buffers,
)
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.routing_in_kernel import (
    announce_logit,
    begin_choice,
    choose_some,
    empty_logits,
    end_choice,
    load_row,
    load_weights,
    logit_shape,
    make_choice,
    norm_row,
    prefetch_weights,
    store_total,
    told,
    told_shares,
)
from octavo.ops.cuda.two_float8 import in_two, scales_of_two
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import Routed, Unrouted

_PIECE = tl.constexpr(BLOCK)  # inputs, and bytes of e4m3
_ROWS = tl.constexpr(8)  # of each of two tiles in a stage
_FOLD = tl.constexpr(8)  # pieces of a block, which is what a tile has of a row
_WORDS = tl.constexpr(BLOCK // 2)  # of two bfloat16 each, of a piece
_BATCH = tl.constexpr(4)  # blocks of gates whose two numbers are made together
_PART = tl.constexpr(16)  # pieces of x that are loaded together
_SCALES = tl.constexpr(32)  # that are fetched for a tile, of which 8 are used
_SLOTS = tl.constexpr(32)  # at least as many as experts of a token
_OUTPUTS = 2 * _ROWS.value  # of a unit
_STAGES = 4
_STAGE_BYTES = 2 * (_ROWS.value * _FOLD.value * BLOCK + 4 * _SCALES.value)
_SHARED_MEMORY = 226_000
_REGISTERS = 96  # of a thread, before partitions get what they need
_TAKING_WARPS, _TAKING_REGISTERS = 4, 128  # of the partition that makes two numbers of inputs
_OWN = 2  # units of gates of each program that it does not claim


class Float8Projection(NamedTuple):
    """A projection of all experts, as the kernel takes it."""

    matrices: ExpertMatrices
    # float32, dense: [experts, num_rows, 1], or [experts, row blocks, pieces] of blocks of 128
    # inputs, with the pieces padded to a multiple of 8: TMA fetches from aligned places.
    scales: Tensor

    @classmethod
    def of(cls, matrices: ExpertMatrices) -> Float8Projection | None:
        """None: the kernel does not know the form."""
        values, scales = matrices.values, matrices.scales
        if matrices.format != Format.FLOAT8 or matrices.size % BLOCK or values.data_ptr() % 16:
            return None
        assert scales is not None
        if matrices.scale_columns:
            if matrices.scale_columns != BLOCK or matrices.scale_rows % _OUTPUTS:
                return None
            padding = -scales.shape[2] % _FOLD.value
            scales = torch.nn.functional.pad(scales, (0, padding)) if padding else scales
        elif matrices.scale_rows > 1:
            scales = scales.repeat_interleave(matrices.scale_rows, 1)[:, : matrices.num_rows]
        return cls(matrices, scales.contiguous())

    @property
    def num_blocks(self) -> int:
        """Blocks of 8 pieces in a row."""
        blocks: int = triton.cdiv(self.matrices.size, _FOLD.value * BLOCK)
        return blocks


def takes_one(dtype: torch.dtype, up: Float8Projection, down: Float8Projection, top_k: int) -> bool:
    """Whether the kernel computes these experts, without biases, for one token of that dtype."""
    if dtype != torch.bfloat16 or top_k > _SLOTS.value:
        return False
    pieces = _parts(up) * _PART.value + _batches(top_k * down.num_blocks) * _BATCH.value * 8
    memory: int = _STAGES * _STAGE_BYTES + pieces * (2 * BLOCK + 4) + 1024
    return memory <= _SHARED_MEMORY


def _parts(up: Float8Projection) -> int:
    """How many parts x is loaded in."""
    parts: int = triton.cdiv(up.matrices.size, _PART.value * BLOCK)
    return parts


def _batches(blocks: int) -> int:
    """How many batches so many blocks of gates are loaded in."""
    batches: int = triton.cdiv(blocks, _BATCH.value)
    return batches


class Exchange(NamedTuple):
    """Through which programs exchange gates and logits, and claim units. Of two buffers that take
    turns, a launch makes the one EMPTY again that it does not use."""

    places: Tensor  # int32 [2, top_k, inner size / 2]: pairs of gates in bfloat16
    tickets: Tensor  # int32 [1]: how many programs have begun, of two launches
    counter: Tensor  # int32 [1]: of claims; 0 between launches
    logits: Tensor | None  # int32 [2, *logit_shape]


@cache
def _exchange(
    device: torch.device, top_k: int, inner: int, num_experts: int, num_programs: int
) -> Exchange:
    """For one stream, and launches with as many programs, which all route, or none (num_experts 0):
    buffers take turns from one launch to the next."""
    tickets, counter = torch.zeros(2, 4, dtype=torch.int32, device=device)
    logits = two_buffers(device, *logit_shape(num_experts)) if num_experts else None
    return Exchange(two_buffers(device, top_k, inner // 2), tickets, counter, logits)


def mix_one_float8(
    x: Tensor, routed: Routed, up: Float8Projection, down: Float8Projection, epilogue: Epilogue
) -> Tensor:
    """See ExpertsKernel.apply_partial, of what `takes_one` says."""
    top_k = routed.ids.shape[1]
    return _launch(Source(x, routed.ids, routed.weights), up, down, top_k, epilogue)


def norm_route_and_mix_one_float8(
    x: Unrouted, up: Float8Projection, down: Float8Projection, epilogue: Epilogue
) -> Tensor:
    """See RoutingExpertsKernel.apply_unrouted, of what `takes_one` says."""
    norm, config = x.norm, x.config
    source = Source.of_norm(x)
    return _launch(source, up, down, config.top_k, epilogue, norm.offset, config.renormalised)


def _launch(
    source: Source,
    up: Float8Projection,
    down: Float8Projection,
    top_k: int,
    epilogue: Epilogue,
    offset: float = 0.0,
    renormalises: bool = False,
) -> Tensor:
    size, inner, device = up.matrices.size, down.matrices.size, source.x.device
    num_programs = num_sms(device)  # With more, some would wait for others that find no room.
    out = torch.empty((1, size), dtype=torch.float32, device=device)
    exchange = _exchange(device, top_k, inner, source.num_experts, num_programs)
    experts_one_float8_kernel[(num_programs,)](
        *source,
        _descriptor(up.matrices),
        _descriptor(down.matrices),
        _scale_descriptor(up.scales),
        _scale_descriptor(down.scales),
        *exchange,
        out,
        size,
        inner,
        up.scales.stride(0),
        down.scales.stride(0),
        up.scales.stride(1),
        down.scales.stride(1),
        OFFSET=offset,
        RENORMALISES=renormalises,
        ALL_EXPERTS=0 if exchange.logits is None else exchange.logits.shape[2],
        UP_BLOCKS=up.num_blocks,
        DOWN_BLOCKS=down.num_blocks,
        PARTS=_parts(up),
        BATCHES=_batches(top_k * down.num_blocks),
        # Rows that share scales of their pieces; 0: each has one.
        SCALE_ROWS=tuple(
            each.matrices.scale_rows if each.matrices.scale_columns else 0 for each in (up, down)
        ),
        STAGES=_STAGES,
        TOP_K=top_k,
        OWN=_OWN,
        EPILOGUE=int(epilogue),
        TAKING_WARPS=_TAKING_WARPS,
        TAKING_REGISTERS=_TAKING_REGISTERS,
        num_warps=4,
        maxnreg=_REGISTERS,
        **launch_options(device),
    )
    return out


def _descriptor(matrices: ExpertMatrices) -> object:
    """The TMA descriptor of 8 pieces of 8 rows."""
    pieces = matrices.values.view(-1, matrices.size // BLOCK, BLOCK)
    return swizzled_descriptor(pieces, [_ROWS.value, _FOLD.value, BLOCK], 128)


def _scale_descriptor(scales: Tensor) -> object:
    """The TMA descriptor of 128 bytes of scales, which are more than a tile has."""
    size = scales.numel()
    row = scales.as_strided((1, size), (size + -size % 4, 1))  # TMA wants steps of 16 bytes
    return swizzled_descriptor(row, [1, _SCALES.value], 0)


@gluon.jit
def _scales_of(row, block, num_scales, SCALE_ROWS: gl.constexpr):
    """Where an expert's scales of 8 rows, or of the pieces of a block, begin."""
    return row // SCALE_ROWS * num_scales + block * _FOLD if SCALE_ROWS > 0 else row


@gluon.jit
def _fetch_stage(
    source,
    ring,
    stage,
    phase,
    unit,
    expert,
    row,
    second_row,
    block,
    SCALE_ROWS: gl.constexpr,
):
    """Load a block of 8 rows of an expert, and of another 8, and their scales; tell their unit."""
    weight, scales, num_rows, stride, num_scales = source
    tiles, _left, scale_tiles, _numbers, _units, ready, _free = ring
    _tell_unit(ring, stage, phase, unit)
    bar = ready.index(stage)
    mbarrier.expect(bar, 2 * (weight.block_type.nbytes + scales.block_type.nbytes))
    first = expert * num_rows
    fetch_tile(weight, [first + row, block * _FOLD, 0], bar, tiles.index(2 * stage))
    fetch_tile(weight, [first + second_row, block * _FOLD, 0], bar, tiles.index(2 * stage + 1))
    first = expert * stride
    own = first + _scales_of(row, block, num_scales, SCALE_ROWS)
    fetch_tile(scales, [0, own], bar, scale_tiles.index(2 * stage))
    own = first + _scales_of(second_row, block, num_scales, SCALE_ROWS)
    fetch_tile(scales, [0, own], bar, scale_tiles.index(2 * stage + 1))


@gluon.jit
def _tell_unit(ring, stage, phase, unit):
    """Wait for a stage, and write a unit's number to it, by a single warp."""
    _tiles, _left, _scale_tiles, _numbers, units, _ready, free = ring
    mbarrier.wait(free.index(stage), 1 - phase)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    units.index(stage).store(gl.zeros([1], gl.int32, ONE) + unit)
    sync_threads()


@gluon.jit
def _told_unit(ring, stage, phase):
    """The unit of a stage, once it has come."""
    _tiles, _left, _scale_tiles, _numbers, units, ready, _free = ring
    mbarrier.wait(ready.index(stage), phase)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(units.index(stage).load(ONE), 0)


@gluon.jit
def _given_experts(ids, TOP_K: gl.constexpr):
    """The token's experts, for a single warp, by one load: with one for each, all programs read the
    same line many times."""
    slot = gl.arange(0, _SLOTS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    found = gl.load(ids + slot, mask=slot < TOP_K, other=0, cache_modifier=".cg")
    experts = ()
    for i in gl.static_range(TOP_K):
        experts += (gl.max(gl.where(slot == i, found, 0), 0),)  # type: ignore[assignment]
    return experts


@gluon.jit
def _told_shares(source, TOP_K: gl.constexpr, RENORMALISES: gl.constexpr):
    """The weights of the chosen experts' results, once they are told; none if they are given."""
    ids, _weights, _places, _num_experts, scale, choice = source
    shares = ()
    if ids is None:
        told(choice, TOP_K)
        shares = told_shares(choice, scale, TOP_K, RENORMALISES)
    return shares


@gluon.jit
def _shares_of(source, shares, slot):
    """The shares of experts in `slot`, a tensor; `shares` are those that routing found."""
    ids, weights, _places, _num_experts, _scale, _choice = source
    if ids is None:
        found = expert_of(shares, slot) + gl.zeros_like(slot).to(gl.float32)
    else:
        found = gl.load(weights + slot, cache_modifier=".cg")
    return found


@gluon.jit
def _claim(counter, last):
    """The next number of a counter, in one lane; the others have 0. After `last` comes 0 again.

    Nothing waits for it before it is used, as with an addition, which would be one for all lanes.
    """
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            setp.eq.s32 first, $2, 0;
            mov.b32 $0, 0;
            @first atom.relaxed.gpu.global.inc.u32 $0, [$1], $3;
        }
        """,
        "=&r,l,r,r",
        [counter + gl.zeros_like(lanes), lanes, gl.zeros_like(lanes) + last],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _fetch_unit(
    up,
    ring,
    stage,
    phase,
    unit,
    experts,
    inner,
    UP_BLOCKS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
):
    """Load a unit of gates and ups; the next stage and phase."""
    STAGES: gl.constexpr = ring[5].shape[0]
    octets = inner // _ROWS
    expert = expert_of(experts, unit // octets)
    row = unit % octets * _ROWS
    for block in range(UP_BLOCKS):
        _fetch_stage(up, ring, stage, phase, unit, expert, row, row + inner, block, SCALE_ROWS)
        stage, phase = following(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _fetch(
    source,
    launch,
    up,
    down,
    ring,
    counter,
    near,
    size,
    inner,
    UP_BLOCKS: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    TOP_K: gl.constexpr,
    RENORMALISES: gl.constexpr,
    ALL_EXPERTS: gl.constexpr,
    OWN: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads weights, a single warp. It claims units of gates, a unit ahead."""
    ready = ring[5]
    STAGES: gl.constexpr = ready.shape[0]
    octets = inner // _ROWS
    num_gates = TOP_K * octets
    num_programs = gl.num_programs(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Each program claims once in vain.
    last_claim = gl.maximum(num_gates - OWN * num_programs, 0) + num_programs - 1
    claim = _claim(counter, last_claim)
    turn = gl.to_tensor(0)
    unit = gl.program_id(0)
    ids, _weights, places, num_experts, _scale, choice = source
    if ids is None:
        state = begin_choice(places, own_buffer(launch), num_experts, ALL_EXPERTS)
        experts, state = choose_some(choice, state, 0, 1)
        # The best expert's weights are asked for before the others are chosen.
        while (turn < OWN) & (unit < octets):
            stage, phase = _fetch_unit(
                up, ring, stage, phase, unit, experts, inner, UP_BLOCKS, SCALE_ROWS[0]
            )
            turn += 1
            unit += num_programs
        others, state = choose_some(choice, state, 1, TOP_K)
        end_choice(choice, state, num_experts, TOP_K, RENORMALISES)
        experts = experts + others
    else:
        experts = _given_experts(ids, TOP_K)
    # Not before: a layer takes longer if the next product's ring fills up while experts are chosen.
    allow_next_with(own_buffer(launch), PDL)
    if turn >= OWN:
        unit = OWN * num_programs + gl.sum(claim, 0)
        if unit < num_gates:
            claim = _claim(counter, last_claim)
    while unit < num_gates:
        stage, phase = _fetch_unit(
            up, ring, stage, phase, unit, experts, inner, UP_BLOCKS, SCALE_ROWS[0]
        )
        turn += 1
        unit += num_programs
        if turn >= OWN:
            unit = OWN * num_programs + gl.sum(claim, 0)
            if unit < num_gates:
                claim = _claim(counter, last_claim)
    mbarrier.arrive(near.index(0), count=1)
    _tell_unit(ring, stage, phase, -1)
    mbarrier.arrive(ready.index(stage), count=1)
    stage, phase = following(stage, phase, STAGES)
    for unit in range(gl.program_id(0), size // (2 * _ROWS), num_programs):
        row = unit * (2 * _ROWS)
        second_row = row + _ROWS
        for slot in range(TOP_K):
            expert = expert_of(experts, slot)
            for block in range(DOWN_BLOCKS):
                _fetch_stage(
                    down, ring, stage, phase, unit, expert, row, second_row, block, SCALE_ROWS[1]
                )
                stage, phase = following(stage, phase, STAGES)


@gluon.jit
def _take_turns(
    source,
    norm_weight,
    router_weight,
    num_hit,
    places,
    tickets,
    launch,
    size,
    inner,
    TOP_K: gl.constexpr,
    ALL_EXPERTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that finds which of both buffers the launch uses, and makes the other one
    EMPTY, a single warp."""
    ids, _weights, logits, num_experts, _scale, _choice = source
    if ids is None:
        prefetch_weights(norm_weight, router_weight, num_experts, size)
    take_ticket(tickets, launch)
    if PDL:
        tl.extra.cuda.gdc_wait()
    buffer = own_buffer(launch)
    empty_other(places, buffer, TOP_K * (inner // 2))
    if ids is None:
        expert = gl.program_id(0)
        empty_logits(logits, buffer, expert, num_experts, ALL_EXPERTS)
        if expert == 0:
            gl.atomic_add(num_hit, gl.to_tensor(TOP_K).to(gl.int64), sem="relaxed", scope="gpu")


@gluon.jit
def _load_words(source, start, block, num_words):
    """Pairs of bfloat16 of some blocks of a row of `num_words`, int32 [BATCH, 8, 64]; as they are
    now.

    start, block: of each block, where its row begins and its number in it, [BATCH]; below 0: none.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [1, 4, 8], [_BATCH, WARPS // _BATCH, 1], [2, 1, 0]
    )
    piece = gl.arange(0, _FOLD, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, _WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    own = block[:, None, None] * (_FOLD * _WORDS) + piece[None, :, None] * _WORDS
    own = own + word[None, None, :]
    is_own = (own >= 0) & (own < num_words)
    return gl.load(source + (start[:, None, None] + own), mask=is_own, other=0, volatile=True)


@gluon.jit
def _values_of(words):
    """The numbers of pairs of bfloat16, float32 [BATCH * 8, 128]."""
    low = (words << 16).to(gl.float32, bitcast=True)
    high = (words & -65536).to(gl.float32, bitcast=True)
    return gl.join(low, high).reshape([_BATCH * _FOLD, _PIECE])


@gluon.jit
def _store_in_two(values, tiles):
    """Write pieces [n, 128] as two e4m3 numbers each: those of a piece are neighbouring rows; what
    products with each piece are to be multiplied by, [n]."""
    factor, scale = scales_of_two(gl.max(gl.abs(values), 1))
    high, low = in_two(values * factor[:, None])
    both = gl.join(high, low).permute((0, 2, 1))
    tiles.store(both.reshape([2 * values.shape[0], _PIECE]))
    return scale


@gluon.jit
def _give(given, i):
    """Tell that inputs have been written, as number i."""
    fence_async_shared()
    sync_threads()
    mbarrier.arrive(given.index(i), count=1)


@gluon.jit
def _give_x(
    norm,
    norm_weight,
    router,
    total,
    source,
    launch,
    inputs,
    given,
    size,
    OFFSET: gl.constexpr,
    PARTS: gl.constexpr,
    ALL_EXPERTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Make two e4m3 numbers of each element of x; or of its norm, and announce a logit."""
    BY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    tiles, scales = inputs
    x, _residual, _eps = norm
    router_weight, router_bias = router
    ids, _weights, logits, num_experts, _scale, _choice = source
    stream = ()
    if PDL:
        tl.extra.cuda.gdc_wait()
    if ids is None:
        expert = gl.program_id(0)
        weights = load_weights(
            norm_weight,
            router_weight,
            router_bias,
            expert,
            num_experts,
            size,
            PARTS,
            _PART,
            _PIECE,
            BY,
        )
        parts, stream, logit = norm_row(norm, weights, size, OFFSET, PARTS, _PART, _PIECE, BY)
        announce_logit(logit, logits, own_buffer(launch), expert, num_experts, ALL_EXPERTS)
    else:
        parts = load_row(x, size, PARTS, _PART, _PIECE, BY)
    for i in gl.static_range(PARTS):
        scales.index(i).store(_store_in_two(parts[i].to(gl.float32), tiles.index(i)))
    _give(given, 0)
    if ids is None:
        store_total(total, stream, size, PARTS, _PART, _PIECE, BY)


@gluon.jit
def _take_in(
    norm,
    norm_weight,
    router,
    total,
    source,
    places,
    launch,
    x_inputs,
    inputs,
    given,
    near,
    size,
    inner,
    OFFSET: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,
    BATCHES: gl.constexpr,
    TOP_K: gl.constexpr,
    RENORMALISES: gl.constexpr,
    ALL_EXPERTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that makes two e4m3 numbers of each input: of x, or its norm, and then of each
    expert's gates, times its share."""
    _give_x(
        norm,
        norm_weight,
        router,
        total,
        source,
        launch,
        x_inputs,
        given,
        size,
        OFFSET,
        PARTS,
        ALL_EXPERTS,
        PDL,
    )
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [1, 4, 8], [_BATCH, WARPS // _BATCH, 1], [2, 1, 0]
    )
    BLOCKS: gl.constexpr = TOP_K * DOWN_BLOCKS
    tiles, scales = inputs
    in_batch = gl.arange(0, _BATCH, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    num_words = inner // 2
    places = places + own_buffer(launch) * (TOP_K * num_words)
    shares = _told_shares(source, TOP_K, RENORMALISES)
    mbarrier.wait(near.index(0), 0)
    for batch in range(BATCHES):
        block = batch * _BATCH + in_batch
        slot = gl.minimum(block, BLOCKS - 1) // DOWN_BLOCKS
        share = _shares_of(source, shares, slot)
        own_block = gl.where(block < BLOCKS, block % DOWN_BLOCKS, -1)
        words = _load_words(places, slot * num_words, own_block, num_words)
        while gl.min(gl.min(gl.min(words, 2), 1), 0) == EMPTY:
            words = _load_words(places, slot * num_words, own_block, num_words)
        scale = _store_in_two(_values_of(words), tiles.index(batch)).reshape([_BATCH, _FOLD])
        share = gl.convert_layout(share, gl.SliceLayout(1, scale.type.layout))
        scales.index(batch).store((scale * share[:, None]).reshape([_BATCH * _FOLD]))
        _give(given, 1 + batch)


@gluon.jit
def _multiply_stages(
    ring, stage, phase, blocks, pieces, block, SCALE_ROWS: gl.constexpr, COUNT: gl.constexpr
):
    """Products of both tiles of COUNT stages with as many blocks of inputs, times all scales, added
    up: [8 rows, 8 pieces, 16] each; the next stage and phase.

    blocks, pieces: the inputs, and scales of their pieces, in shared memory, from `block` on.
    """
    _tiles, left, _scale_tiles, numbers, _units, ready, free = ring
    STAGES: gl.constexpr = ready.shape[0]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 2 * _FOLD, 32]
    )
    SHAPE: gl.constexpr = [_ROWS, _FOLD, 2 * _FOLD]
    none = gl.zeros([_ROWS * _FOLD, 2 * _FOLD], gl.float32, SUMS)
    like = none.reshape(SHAPE)
    products = ()
    factors = ()
    used = ()
    for i in gl.static_range(COUNT):
        mbarrier.wait(ready.index(stage), phase)
        right = blocks.index(block + i).permute((1, 0))
        products += (warpgroup_mma(left.index(2 * stage), right, none, is_async=True),)  # type: ignore[assignment]
        products += (warpgroup_mma(left.index(2 * stage + 1), right, none, is_async=True),)  # type: ignore[assignment]
        x_scale = _of_pieces(pieces.index(block + i), like)
        place = 2 * stage * (_SCALES // 8)
        factors += (x_scale * _scale(numbers.index(place), like, SCALE_ROWS),)  # type: ignore[assignment]
        place += _SCALES // 8
        factors += (x_scale * _scale(numbers.index(place), like, SCALE_ROWS),)  # type: ignore[assignment]
        used += (stage,)  # type: ignore[assignment]
        stage, phase = following(stage, phase, STAGES)
    products = warpgroup_mma_wait(0, deps=products)
    sync_threads()
    for i in gl.static_range(COUNT):
        mbarrier.arrive(free.index(used[i]), count=1)
    first = like
    second = like
    for i in gl.static_range(COUNT):
        first = first + products[2 * i].reshape(SHAPE) * factors[2 * i]
        second = second + products[2 * i + 1].reshape(SHAPE) * factors[2 * i + 1]
    return first, second, stage, phase


@gluon.jit
def _scale(numbers, like, SCALE_ROWS: gl.constexpr):
    """A tile's scales, of 8 in shared memory."""
    scale = _of_pieces(numbers, like) if SCALE_ROWS > 0 else _of_rows(numbers, like)
    return scale


@gluon.jit
def _no_sums():
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 2 * _FOLD, 32]
    )
    none = gl.zeros([_ROWS * _FOLD, 2 * _FOLD], gl.float32, SUMS)
    return none.reshape([_ROWS, _FOLD, 2 * _FOLD])


@gluon.jit
def _of_pieces(numbers, like):
    """A number for each of 8 pieces, in shared memory, for a tensor of sums."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, like.type.layout))
    return numbers.load(LAYOUT)[None, :, None]


@gluon.jit
def _of_rows(numbers, like):
    """A number for each of 8 rows, in shared memory, for a tensor of sums."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout))
    return numbers.load(LAYOUT)[:, None, None]


@gluon.jit
def _totals(sums):
    """[8]: the products of rows' pieces with the pieces of the inputs that they belong to."""
    LAYOUT: gl.constexpr = sums.type.layout
    piece = gl.arange(0, _FOLD, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    column = gl.arange(0, 2 * _FOLD, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    own = gl.where(piece[None, :, None] == column[None, None, :] // 2, sums, 0.0)
    return gl.sum(gl.sum(own, 2), 1)


@gluon.jit
def _announce(result, places):
    """Store 8 gates to their places."""
    bits = result.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    first, second = gl.split(bits.reshape([_ROWS // 2, 2]))
    store_words(first | (second << 16), places)


@gluon.jit
def _by_block(inputs):
    """Inputs, and scales of their pieces, of blocks."""
    tiles, scales = inputs
    blocks = tiles_of_rows(tiles, 2 * _FOLD)
    SHAPE: gl.constexpr = [blocks.shape[0], _FOLD]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return blocks, reinterpreted(scales, SHAPE, FLAT)


@gluon.jit
def _multiply(
    out,
    places,
    launch,
    ring,
    x_inputs,
    inputs,
    given,
    size,
    inner,
    UP_BLOCKS: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    TOP_K: gl.constexpr,
    EPILOGUE: gl.constexpr,
):
    """The partition that multiplies, and stores gates and outputs."""
    STAGES: gl.constexpr = ring[5].shape[0]
    free = ring[6]
    x_blocks, x_pieces = _by_block(x_inputs)
    blocks, pieces = _by_block(inputs)
    # Two stages at once take less time than one after the other.
    GATE_BLOCKS: gl.constexpr = TOP_K * DOWN_BLOCKS
    UP_COUNT: gl.constexpr = 1 if UP_BLOCKS % 2 else 2
    DOWN_COUNT: gl.constexpr = 1 if GATE_BLOCKS % 2 else 2
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    mbarrier.wait(given.index(0), 0)
    places = places + own_buffer(launch) * (TOP_K * (inner // 2))
    unit = _told_unit(ring, stage, phase)
    while unit >= 0:
        gates = _no_sums()
        ups = _no_sums()
        for block in range(0, UP_BLOCKS, UP_COUNT):
            gate, up, stage, phase = _multiply_stages(
                ring, stage, phase, x_blocks, x_pieces, block, SCALE_ROWS[0], UP_COUNT
            )
            gates += gate
            ups += up
        result = activate_gated(_totals(gates), _totals(ups), EPILOGUE)
        _announce(result, places + unit * (_ROWS // 2))
        unit = _told_unit(ring, stage, phase)
    sync_threads()
    mbarrier.arrive(free.index(stage), count=1)
    stage, phase = following(stage, phase, STAGES)
    for unit in range(gl.program_id(0), size // (2 * _ROWS), gl.num_programs(0)):
        sums = _no_sums()
        second_sums = _no_sums()
        for block in range(0, GATE_BLOCKS, DOWN_COUNT):
            mbarrier.wait(given.index(1 + block // _BATCH), 0)
            first, second, stage, phase = _multiply_stages(
                ring, stage, phase, blocks, pieces, block, SCALE_ROWS[1], DOWN_COUNT
            )
            sums += first
            second_sums += second
        result = _totals(sums)
        rows = unit * (2 * _ROWS) + gl.arange(0, _ROWS, layout=result.type.layout)
        gl.store(out + rows, result)
        gl.store(out + _ROWS + rows, _totals(second_sums))


@gluon.jit
def experts_one_float8_kernel(
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
    up,
    down,
    up_scales,
    down_scales,
    places,
    tickets,
    counter,
    logits,
    out,
    size,
    inner,
    up_stride,
    down_stride,
    up_num_scales,
    down_num_scales,
    OFFSET: gl.constexpr,
    RENORMALISES: gl.constexpr,
    ALL_EXPERTS: gl.constexpr,
    UP_BLOCKS: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,
    BATCHES: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    TOP_K: gl.constexpr,
    OWN: gl.constexpr,
    EPILOGUE: gl.constexpr,
    TAKING_WARPS: gl.constexpr,
    TAKING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The sum of a token's experts, weighted by `shares`, into out float32 [size].

    Args:
        x: [size].
        ids, shares: as in Routed; None: the kernel norms x and routes it, by what follows.
        residual, total, norm_weight, eps, OFFSET: as in DeferredNorm.
        router_weight, router_bias: as in RouterWeights.
        num_hit: see make_router_kernel.
        num_experts, scale, RENORMALISES: as in RoutingConfig.
        up, down: descriptors of rows [pieces, 128], of an expert's 2 `inner` gates and ups with
            `size` inputs, and of its `size` outputs with `inner` inputs.
        up_scales, down_scales: descriptors of Float8Projection's scales, in one row.
        places, tickets, counter, logits: of Exchange; ALL_EXPERTS the last dimension of logits.
        up_stride, down_stride: from an expert's scales to the next one's.
        up_num_scales, down_num_scales: from the scales of a row of blocks to the next one's.
        UP_BLOCKS, DOWN_BLOCKS: blocks of 8 pieces, of a row.
        PARTS, BATCHES: parts of x, and batches of blocks of all experts' gates.
        SCALE_ROWS: rows of a block with scales, for up and down; 0: each row has a scale.
        OWN: units of gates of each program that it does not claim.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    DTYPE: gl.constexpr = gl.float8e4nv
    tiles = gl.allocate_shared_memory(DTYPE, [2 * STAGES, _ROWS, _FOLD, _PIECE], up.layout)
    scale_tiles = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, _SCALES], up_scales.layout)
    x_tiles = gl.allocate_shared_memory(DTYPE, [PARTS, 2 * _PART, _PIECE], WHOLE)
    x_scales = gl.allocate_shared_memory(gl.float32, [PARTS, _PART], FLAT)
    gate_tiles = gl.allocate_shared_memory(DTYPE, [BATCHES, 2 * _BATCH * _FOLD, _PIECE], WHOLE)
    gate_scales = gl.allocate_shared_memory(gl.float32, [BATCHES, _BATCH * _FOLD], FLAT)
    LEFT: gl.constexpr = [2 * STAGES, _ROWS * _FOLD, _PIECE]
    NUMBERS: gl.constexpr = [2 * STAGES * _SCALES // 8, 8]
    left = reinterpreted(tiles, LEFT, WHOLE)
    numbers = reinterpreted(scale_tiles, NUMBERS, FLAT)
    units = gl.allocate_shared_memory(gl.int32, [STAGES, 1], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [1 + BATCHES, 1], mbarrier.MBarrierLayout())
    near = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    is_told = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    buffer = gl.allocate_shared_memory(gl.int32, [1], FLAT)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    for i in gl.static_range(1 + BATCHES):
        mbarrier.init(given.index(i), count=1)
    mbarrier.init(near.index(0), count=1)
    mbarrier.init(is_told.index(0), count=1)
    choice = ()
    if ids is None:
        choice = make_choice(TOP_K)
    fence_async_shared()
    ring = (tiles, left, scale_tiles, numbers, units, ready, free)
    launch = (buffer, is_told)
    x_inputs = (x_tiles, x_scales)
    inputs = (gate_tiles, gate_scales)
    source = (ids, shares, logits, num_experts, scale, choice)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out,
                    places,
                    launch,
                    ring,
                    x_inputs,
                    inputs,
                    given,
                    size,
                    inner,
                    UP_BLOCKS,
                    DOWN_BLOCKS,
                    SCALE_ROWS,
                    TOP_K,
                    EPILOGUE,
                ),
            ),
            (
                _take_in,
                (
                    (x, residual, eps),
                    norm_weight,
                    (router_weight, router_bias),
                    total,
                    source,
                    places,
                    launch,
                    x_inputs,
                    inputs,
                    given,
                    near,
                    size,
                    inner,
                    OFFSET,
                    DOWN_BLOCKS,
                    PARTS,
                    BATCHES,
                    TOP_K,
                    RENORMALISES,
                    ALL_EXPERTS,
                    PDL,
                ),
            ),
            (
                _fetch,
                (
                    source,
                    launch,
                    (up, up_scales, 2 * inner, up_stride, up_num_scales),
                    (down, down_scales, size, down_stride, down_num_scales),
                    ring,
                    counter,
                    near,
                    size,
                    inner,
                    UP_BLOCKS,
                    DOWN_BLOCKS,
                    SCALE_ROWS,
                    TOP_K,
                    RENORMALISES,
                    ALL_EXPERTS,
                    OWN,
                    PDL,
                ),
            ),
            (
                _take_turns,
                (
                    source,
                    norm_weight,
                    router_weight,
                    num_hit,
                    places,
                    tickets,
                    launch,
                    size,
                    inner,
                    TOP_K,
                    ALL_EXPERTS,
                    PDL,
                ),
            ),
        ],
        [TAKING_WARPS, 1, 1],
        [TAKING_REGISTERS, 48, 48],
    )
