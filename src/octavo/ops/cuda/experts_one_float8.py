"""The FP8 experts of one token on Hopper GPUs: both projections in one kernel.

Each SM has a program, which takes its units one after the other: 8 rows of gates and as many ups of
an expert, those of all experts first; then 16 outputs, which it adds up over all experts. A warp
fetches weights by TMA into a ring in shared memory, and the tensor cores read them from there as
they are. So memory is busy from the moment at which the experts are known to the end; a kernel for
each projection would begin and end twice.

As in linear_ring.py, a row of weights is taken apart: 8 neighbouring pieces of 128 inputs are rows
of the left operand, and the same pieces of the inputs, two e4m3 numbers of each, are the columns of
the right one. Of the products of a row's pieces with all pieces of the inputs, those of the same
place are added up, in float32, and with a scale for each piece where weights have one.

Gates announce themselves to the programs that take outputs, as in experts_one_mx.py. Four warps
wait for those of one expert after the other, and make the two numbers of them; an output needs an
expert's gates only when it comes to that expert. A load takes 2 us while weights are on their way,
so scales are loaded before, those of all of a program's units.
"""

from __future__ import annotations

from functools import cache

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

from octavo.ops.cuda.claims import claimed, make_claims, tell
from octavo.ops.cuda.expert_weights import BLOCK, ExpertMatrices, Format
from octavo.ops.cuda.experts_one_mx import (
    EMPTY,
    _begin,
    _exchange,
    _expert_of,
    _following,
    _lowest,
    _own_buffer,
    _store_words,
)
from octavo.ops.cuda.linear_hopper import (
    _activate_gated,
    _barrier,
    _fetch_tile,
    swizzled_descriptor,
)
from octavo.ops.cuda.linear_hopper_quantized import _IS_PUBLIC
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.tile_sizes import num_sms
from octavo.ops.cuda.two_float8 import in_two, scales_of_two
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import Routed

_PIECE = tl.constexpr(BLOCK)  # inputs, and bytes of e4m3
_ROWS = tl.constexpr(8)  # of each of two tiles in a stage
_FOLD = tl.constexpr(8)  # pieces of each row
_WORDS = tl.constexpr(BLOCK // 2)  # of two bfloat16 each, of a piece
_SCALES = tl.constexpr(32)  # that are fetched for a tile, of which 8 are used
_SLOTS = tl.constexpr(32)  # at least as many as experts of a token
_CLAIMS = tl.constexpr(16)  # more than stages
_OUTPUTS = 2 * _ROWS.value  # of a unit
_STAGES = 5
_STAGE_BYTES = 2 * _ROWS.value * _FOLD.value * BLOCK + 2 * 4 * _SCALES.value
_INPUT_BYTES = 2 * _FOLD.value * BLOCK  # of a block of 8 pieces
_SHARED_MEMORY = 226_000
_REGISTERS = 96  # of a thread, before partitions get what they need
_MOST_AT_ONCE = 16  # blocks of gates that are asked for together
_OWN = 2


def takes_one(
    x: Tensor, up: ExpertMatrices, down: ExpertMatrices, top_k: int, *, has_bias: bool
) -> bool:
    """Whether the kernel computes these experts for x [1, size]."""
    if has_bias or x.dtype != torch.bfloat16 or top_k > _SLOTS.value:
        return False
    for each in (up, down):
        if each.format != Format.FLOAT8 or each.size % BLOCK:
            return False
        if each.scale_columns not in (0, BLOCK):
            return False
        if each.scale_rows % _OUTPUTS and (each.scale_rows > 1 or each.scale_columns):
            return False
    return _memory(up, down, top_k) <= _SHARED_MEMORY


def _blocks(matrices: ExpertMatrices) -> int:
    """Of 8 pieces, of a row."""
    return triton.cdiv(matrices.size, _FOLD.value * BLOCK)


def _memory(up: ExpertMatrices, down: ExpertMatrices, top_k: int) -> int:
    """Bytes of shared memory."""
    inputs = (_blocks(up) + top_k * _blocks(down)) * _INPUT_BYTES
    return _STAGES * _STAGE_BYTES + inputs + 2048


@cache
def _counter(device: torch.device) -> Tensor:
    """Of claims; 0 between kernels. For one stream."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run a step before capturing it"
    return torch.zeros(1, dtype=torch.int32, device=device)


def mix_one_float8(
    x: Tensor, routed: Routed, up: ExpertMatrices, down: ExpertMatrices, epilogue: Epilogue
) -> Tensor:
    """See ExpertsKernel.apply_partial, of what `takes_one` says."""
    assert up.scales is not None
    assert down.scales is not None
    top_k, size = routed.ids.shape[1], x.shape[1]
    num_programs = num_sms(x.device)  # With more, some would wait for others that find no room.
    out = x.new_empty((1, size))
    experts_one_float8_kernel[(num_programs,)](
        x.view(torch.int32),
        _descriptor(up),
        _descriptor(down),
        _scale_descriptor(up.scales),
        _scale_descriptor(down.scales),
        *_exchange(x.device, top_k, down.size // BLOCK, num_programs),
        _counter(x.device),
        out,
        routed.ids,
        routed.weights,
        size,
        down.size,
        up.scales.stride(0),
        down.scales.stride(0),
        up.scales.shape[2],
        down.scales.shape[2],
        UP_BLOCKS=_blocks(up),
        DOWN_BLOCKS=_blocks(down),
        SCALE_ROWS=(up.scale_rows, down.scale_rows),
        SCALE_COLUMNS=(up.scale_columns, down.scale_columns),
        STAGES=_STAGES,
        TOP_K=top_k,
        AT_ONCE=top_k * _blocks(down) <= _MOST_AT_ONCE,
        OWN=_OWN,
        EPILOGUE=int(epilogue),
        num_warps=4,
        maxnreg=_REGISTERS,
        **launch_options(x.device),
    )
    return out


def _descriptor(matrices: ExpertMatrices) -> object:
    """For TMA: what 8 pieces have of 8 rows."""
    pieces = matrices.values.view(-1, matrices.size // BLOCK, BLOCK)
    return swizzled_descriptor(pieces, [_ROWS.value, _FOLD.value, BLOCK], 128)


def _scale_descriptor(scales: Tensor) -> object:
    """For TMA: 128 bytes of scales, more than a tile has."""
    size = scales.numel()
    row = scales.as_strided((1, size), (size + -size % 4, 1))  # TMA wants steps of 16 bytes
    return swizzled_descriptor(row, [1, _SCALES.value], 0)


@gluon.jit
def _scales_of(row, block, num_scales, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr):
    """Where an expert's scales of 8 rows, or of the pieces of a block, begin."""
    place = row // SCALE_ROWS * num_scales
    if SCALE_COLUMNS > 0:
        place += block * _FOLD
    return place


@gluon.jit
def _fetch_stage(
    source,
    ring,
    stage,
    phase,
    expert,
    row,
    second_row,
    block,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
):
    """Load a block of 8 rows of an expert, and of another 8, and their scales."""
    weight, scales, num_rows, stride, num_scales = source
    tiles, _left, scale_tiles, _numbers, ready, free = ring
    mbarrier.wait(free.index(stage), 1 - phase)
    bar = ready.index(stage)
    mbarrier.expect(bar, 2 * (weight.block_type.nbytes + scales.block_type.nbytes))
    first = expert * num_rows
    _fetch_tile(weight, [first + row, block * _FOLD, 0], bar, tiles.index(2 * stage))
    _fetch_tile(weight, [first + second_row, block * _FOLD, 0], bar, tiles.index(2 * stage + 1))
    first = expert * stride
    own = first + _scales_of(row, block, num_scales, SCALE_ROWS, SCALE_COLUMNS)
    _fetch_tile(scales, [0, own], bar, scale_tiles.index(2 * stage))
    own = first + _scales_of(second_row, block, num_scales, SCALE_ROWS, SCALE_COLUMNS)
    _fetch_tile(scales, [0, own], bar, scale_tiles.index(2 * stage + 1))


@gluon.jit
def _load_experts(ids, TOP_K: gl.constexpr):
    """By one load: with one for each expert, all programs read the same line many times."""
    slot = gl.arange(0, _SLOTS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    found = gl.load(ids + slot, mask=slot < TOP_K, other=0, cache_modifier=".cg")
    experts = ()
    for i in gl.static_range(TOP_K):
        experts += (gl.max(gl.where(slot == i, found, 0), 0),)  # type: ignore[assignment]
    return experts


@gluon.jit
def _claim(counter):
    """The next number of a counter, in one lane; the others have 0."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    none = gl.zeros_like(lanes)
    first = lanes == 0
    before = gl.atomic_add(counter + none, none + 1, mask=first, sem="relaxed", scope="gpu")
    return gl.where(first, before, 0)


@gluon.jit
def _fetch(
    ids,
    up,
    down,
    ring,
    claims,
    counter,
    near,
    size,
    inner,
    UP_BLOCKS: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    TOP_K: gl.constexpr,
    OWN: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads weights, a single warp: of units of gates that it claims."""
    STAGES: gl.constexpr = ring[4].shape[0]
    octets = inner // _ROWS
    num_gates = TOP_K * octets
    num_programs = gl.num_programs(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    experts = _load_experts(ids, TOP_K)
    claim = _claim(counter)
    # Each program claims once in vain: who has the last claim of all makes the counter 0 again.
    last_claim = gl.maximum(num_gates - OWN * num_programs, 0) + num_programs - 1
    turn = gl.to_tensor(0)
    unit = gl.program_id(0)
    while unit < num_gates:
        tell(claims, turn, unit)
        expert = _expert_of(experts, unit // octets)
        row = unit % octets * _ROWS
        for block in range(UP_BLOCKS):
            _fetch_stage(
                up,
                ring,
                stage,
                phase,
                expert,
                row,
                row + inner,
                block,
                SCALE_ROWS[0],
                SCALE_COLUMNS[0],
            )
            stage, phase = _following(stage, phase, STAGES)
        turn += 1
        unit += num_programs
        if turn >= OWN:
            number = gl.sum(claim, 0)
            unit = OWN * num_programs + number
            if unit < num_gates:
                claim = _claim(counter)
            if number == last_claim:
                gl.store(counter, 0)
    if (turn < OWN) & (gl.sum(claim, 0) == last_claim):
        gl.store(counter, 0)
    tell(claims, turn, num_gates)
    mbarrier.arrive(near.index(0), count=1)
    for unit in range(gl.program_id(0), size // (2 * _ROWS), num_programs):
        row = unit * (2 * _ROWS)
        for slot in range(TOP_K):
            expert = _expert_of(experts, slot)
            for block in range(DOWN_BLOCKS):
                _fetch_stage(
                    down,
                    ring,
                    stage,
                    phase,
                    expert,
                    row,
                    row + _ROWS,
                    block,
                    SCALE_ROWS[1],
                    SCALE_COLUMNS[1],
                )
                stage, phase = _following(stage, phase, STAGES)


@gluon.jit
def _take_turns(places, tickets, launch, inner, TOP_K: gl.constexpr, PDL: gl.constexpr):
    """The partition that finds which of both buffers of gates the launch uses, a single warp."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    _begin(places, tickets, launch, TOP_K * (inner // 2))


@gluon.jit
def _load_words(source, num_words, BLOCKS: gl.constexpr):
    """Pairs of bfloat16, int32 [8, 64] for each block; as they are now."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    piece = gl.arange(0, _FOLD, layout=gl.SliceLayout(1, LOADED))
    word = gl.arange(0, _WORDS, layout=gl.SliceLayout(0, LOADED))
    found = ()
    for i in gl.static_range(BLOCKS):
        own = i * (_FOLD * _WORDS) + piece[:, None] * _WORDS + word[None, :]
        found += (gl.load(source + own, mask=own < num_words, other=0, volatile=True),)  # type: ignore[assignment]
    return found


@gluon.jit
def _give(words, share, inputs, first, scales, given, i):
    """Write pairs of bfloat16 as two e4m3 numbers each, from block `first` of the inputs on, and
    what products with each piece are to be multiplied by, times `share`."""
    x_tiles, x_scales = inputs, scales
    blocks = ()
    for block in gl.static_range(len(words)):
        low = (words[block] << 16).to(gl.float32, bitcast=True)
        high = (words[block] & -65536).to(gl.float32, bitcast=True)
        values = gl.join(low, high).reshape([_FOLD, _PIECE])
        blocks += (values,)  # type: ignore[assignment]
    largest = gl.abs(blocks[0])
    for block in gl.static_range(1, len(words)):
        largest = gl.maximum(largest, gl.abs(blocks[block]))
    factor, scale = scales_of_two(gl.max(largest, 1))
    for block in gl.static_range(len(words)):
        high, low = in_two(blocks[block] * factor[:, None])
        both = gl.join(high, low).permute((0, 2, 1)).reshape([2 * _FOLD, _PIECE])
        x_tiles.index(first + block).store(both)
    x_scales.index(i).store(scale * share)
    fence_async_shared()
    _barrier()
    mbarrier.arrive(given.index(i), count=1)


@gluon.jit
def _load_gates(
    found, places, num_words, BLOCKS: gl.constexpr, TOP_K: gl.constexpr, FROM: gl.constexpr
):
    """The places of all slots from FROM on, as they are now; of others what was found."""
    kept = ()
    for slot in gl.static_range(TOP_K):
        if slot < FROM:
            for i in gl.static_range(BLOCKS):
                kept += (found[slot * BLOCKS + i],)  # type: ignore[assignment]
        else:
            words = _load_words(places + slot * num_words, num_words, BLOCKS)
            for i in gl.static_range(BLOCKS):
                kept += (words[i],)  # type: ignore[assignment]
    return kept


@gluon.jit
def _of_slot(found, SLOT: gl.constexpr, BLOCKS: gl.constexpr):
    own = ()
    for i in gl.static_range(BLOCKS):
        own += (found[SLOT * BLOCKS + i],)  # type: ignore[assignment]
    return own


@gluon.jit
def _take_in(
    x,
    shares,
    places,
    launch,
    inputs,
    scales,
    given,
    near,
    size,
    inner,
    UP_BLOCKS: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    TOP_K: gl.constexpr,
    AT_ONCE: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that makes two e4m3 numbers of each input: of x, then of each expert's
    gates, times its share."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    _give(_load_words(x, size // 2, UP_BLOCKS), 1.0, inputs, 0, scales, given, 0)
    lane = gl.arange(0, _SLOTS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    own_shares = gl.load(shares + lane, mask=lane < TOP_K, other=0.0, cache_modifier=".cg")
    num_words = inner // 2
    places = places + _own_buffer(launch) * (TOP_K * num_words)
    mbarrier.wait(near.index(0), 0)
    if AT_ONCE:
        found = _load_gates((), places, num_words, DOWN_BLOCKS, TOP_K, 0)
        for slot in gl.static_range(TOP_K):
            while _lowest(_of_slot(found, slot, DOWN_BLOCKS)) == EMPTY:
                found = _load_gates(found, places, num_words, DOWN_BLOCKS, TOP_K, slot)
            share = gl.sum(gl.where(lane == slot, own_shares, 0.0), 0)
            own = _of_slot(found, slot, DOWN_BLOCKS)
            _give(own, share, inputs, UP_BLOCKS + slot * DOWN_BLOCKS, scales, given, 1 + slot)
    else:
        for slot in range(TOP_K):
            share = gl.sum(gl.where(lane == slot, own_shares, 0.0), 0)
            found = _load_words(places + slot * num_words, num_words, DOWN_BLOCKS)
            while _lowest(found) == EMPTY:
                found = _load_words(places + slot * num_words, num_words, DOWN_BLOCKS)
            _give(found, share, inputs, UP_BLOCKS + slot * DOWN_BLOCKS, scales, given, 1 + slot)


@gluon.jit
def _multiply_stage(
    ring, stage, phase, inputs, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr
):
    """Products of both tiles of a stage with a block of inputs, times their scales: [8 rows, 8
    pieces, 16] each."""
    _tiles, left, _scale_tiles, numbers, ready, free = ring
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 2 * _FOLD, 32]
    )
    SHAPE: gl.constexpr = [_ROWS, _FOLD, 2 * _FOLD]
    none = gl.zeros([_ROWS * _FOLD, 2 * _FOLD], gl.float32, SUMS)
    mbarrier.wait(ready.index(stage), phase)
    right = inputs.permute((1, 0))
    first = warpgroup_mma(left.index(2 * stage), right, none, is_async=True)
    second = warpgroup_mma(left.index(2 * stage + 1), right, none, is_async=True)
    like = none.reshape(SHAPE)
    place = 2 * stage * (_SCALES // 8)
    factor = _scale(numbers.index(place), like, SCALE_ROWS, SCALE_COLUMNS)
    second_factor = _scale(numbers.index(place + _SCALES // 8), like, SCALE_ROWS, SCALE_COLUMNS)
    first, second = warpgroup_mma_wait(0, deps=[first, second])
    _barrier()
    mbarrier.arrive(free.index(stage), count=1)
    return first.reshape(SHAPE) * factor, second.reshape(SHAPE) * second_factor


@gluon.jit
def _scale(numbers, like, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr):
    """A tile's scales, of 8 in shared memory."""
    if SCALE_COLUMNS > 0:
        scale = _of_pieces(numbers, like)
    elif SCALE_ROWS == 1:
        scale = _of_rows(numbers, like)
    else:  # The first one is that of all rows.
        LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout))
        found = numbers.load(LAYOUT)
        first = gl.arange(0, _ROWS, layout=LAYOUT) == 0
        scale = gl.sum(gl.where(first, found, 0.0), 0)
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
    _store_words(first | (second << 16), places)


@gluon.jit
def _multiply(
    out,
    places,
    launch,
    ring,
    claims,
    inputs,
    scales,
    given,
    size,
    inner,
    UP_BLOCKS: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    TOP_K: gl.constexpr,
    EPILOGUE: gl.constexpr,
):
    """The partition that multiplies, and stores gates and outputs."""
    STAGES: gl.constexpr = ring[4].shape[0]
    num_gates = TOP_K * (inner // _ROWS)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    mbarrier.wait(given.index(0), 0)
    places = places + _own_buffer(launch) * (num_gates * (_ROWS // 2))
    turn = gl.to_tensor(0)
    unit = claimed(claims, turn)
    while unit < num_gates:
        gates = _no_sums()
        ups = _no_sums()
        for block in range(UP_BLOCKS):
            gate, up = _multiply_stage(
                ring, stage, phase, inputs.index(block), SCALE_ROWS[0], SCALE_COLUMNS[0]
            )
            stage, phase = _following(stage, phase, STAGES)
            gates += gate
            ups += up
        x_scale = _of_pieces(scales.index(0), gates)
        result = _activate_gated(_totals(gates * x_scale), _totals(ups * x_scale), EPILOGUE)
        _announce(result, places + unit * (_ROWS // 2))
        turn += 1
        unit = claimed(claims, turn)
    for unit in range(gl.program_id(0), size // (2 * _ROWS), gl.num_programs(0)):
        sums = _no_sums()
        second_sums = _no_sums()
        for slot in range(TOP_K):
            mbarrier.wait(given.index(1 + slot), 0)
            x_scale = _of_pieces(scales.index(1 + slot), sums)
            for block in range(DOWN_BLOCKS):
                place = UP_BLOCKS + slot * DOWN_BLOCKS + block
                first, second = _multiply_stage(
                    ring, stage, phase, inputs.index(place), SCALE_ROWS[1], SCALE_COLUMNS[1]
                )
                stage, phase = _following(stage, phase, STAGES)
                sums += first * x_scale
                second_sums += second * x_scale
        result = _totals(sums)
        rows = unit * (2 * _ROWS) + gl.arange(0, _ROWS, layout=result.type.layout)
        gl.store(out + rows, result.to(out.dtype.element_ty))
        gl.store(out + _ROWS + rows, _totals(second_sums).to(out.dtype.element_ty))


@gluon.jit
def experts_one_float8_kernel(
    x,
    up,
    down,
    up_scales,
    down_scales,
    places,
    tickets,
    counter,
    out,
    ids,
    shares,
    size,
    inner,
    up_stride,
    down_stride,
    up_num_scales,
    down_num_scales,
    UP_BLOCKS: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    TOP_K: gl.constexpr,
    AT_ONCE: gl.constexpr,
    OWN: gl.constexpr,
    EPILOGUE: gl.constexpr,
    PDL: gl.constexpr,
):
    """The sum of a token's experts, weighted by `shares`, into out bfloat16 [size].

    Args:
        x: int32 [size / 2], pairs of bfloat16.
        up, down: descriptors of rows [pieces, 128], of an expert's 2 `inner` gates and ups with
            `size` inputs, and of its `size` outputs with `inner` inputs.
        up_scales, down_scales: descriptors of ExpertMatrices' scales, in one row.
        places, tickets: of experts_one_mx.py's Exchange; gates are pairs of bfloat16.
        counter: of claims, 0.
        up_stride, down_stride: from an expert's scales to the next one's.
        up_num_scales, down_num_scales: scales of a row, or of a row of blocks.
        UP_BLOCKS, DOWN_BLOCKS: blocks of 8 pieces, of a row.
        SCALE_ROWS, SCALE_COLUMNS: of ExpertMatrices, for up and down.
        AT_ONCE: whether the gates of all experts are asked for at once.
        OWN: units of gates of each program that it does not claim.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    INPUTS: gl.constexpr = UP_BLOCKS + TOP_K * DOWN_BLOCKS
    tiles = gl.allocate_shared_memory(up.dtype, [2 * STAGES, _ROWS, _FOLD, _PIECE], up.layout)
    inputs = gl.allocate_shared_memory(gl.float8e4nv, [INPUTS, 2 * _FOLD, _PIECE], WHOLE)
    scale_tiles = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, _SCALES], up_scales.layout)
    scales = gl.allocate_shared_memory(gl.float32, [1 + TOP_K, _FOLD], FLAT)
    LEFT: gl.constexpr = [2 * STAGES, _ROWS * _FOLD, _PIECE]
    NUMBERS: gl.constexpr = [2 * STAGES * _SCALES // 8, 8]
    if _IS_PUBLIC:
        left = tiles.reinterpret(gl.float8e4nv, LEFT, WHOLE)
        numbers = scale_tiles.reinterpret(gl.float32, NUMBERS, FLAT)
    else:
        left = tiles._reinterpret(gl.float8e4nv, LEFT, WHOLE)
        numbers = scale_tiles._reinterpret(gl.float32, NUMBERS, FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [1 + TOP_K, 1], mbarrier.MBarrierLayout())
    near = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    buffer = gl.allocate_shared_memory(gl.int32, [1], FLAT)
    claims = make_claims(_CLAIMS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    for i in gl.static_range(1 + TOP_K):
        mbarrier.init(given.index(i), count=1)
    mbarrier.init(near.index(0), count=1)
    mbarrier.init(told.index(0), count=1)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    ring = (tiles, left, scale_tiles, numbers, ready, free)
    launch = (buffer, told)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out,
                    places,
                    launch,
                    ring,
                    claims,
                    inputs,
                    scales,
                    given,
                    size,
                    inner,
                    UP_BLOCKS,
                    DOWN_BLOCKS,
                    SCALE_ROWS,
                    SCALE_COLUMNS,
                    TOP_K,
                    EPILOGUE,
                ),
            ),
            (
                _take_in,
                (
                    x,
                    shares,
                    places,
                    launch,
                    inputs,
                    scales,
                    given,
                    near,
                    size,
                    inner,
                    UP_BLOCKS,
                    DOWN_BLOCKS,
                    TOP_K,
                    AT_ONCE,
                    PDL,
                ),
            ),
            (
                _fetch,
                (
                    ids,
                    (up, up_scales, 2 * inner, up_stride, up_num_scales),
                    (down, down_scales, size, down_stride, down_num_scales),
                    ring,
                    claims,
                    counter,
                    near,
                    size,
                    inner,
                    UP_BLOCKS,
                    DOWN_BLOCKS,
                    SCALE_ROWS,
                    SCALE_COLUMNS,
                    TOP_K,
                    OWN,
                    PDL,
                ),
            ),
            (
                _take_turns,
                (
                    places,
                    tickets,
                    launch,
                    inner,
                    TOP_K,
                    PDL,
                ),
            ),
        ],
        [4, 1, 1],
        [128, 48, 48],
    )
