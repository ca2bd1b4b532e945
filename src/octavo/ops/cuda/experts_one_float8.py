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

from octavo.ops.cuda.expert_weights import BLOCK, ExpertMatrices, Format
from octavo.ops.cuda.experts_one_mx import (
    EMPTY,
    _begin,
    _exchange,
    _expert_of,
    _following,
    _load_ids,
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
_CHUNK = tl.constexpr(128)  # scales that a warp loads together
_OUTPUTS = 2 * _ROWS.value  # of a unit
_STAGES = 7
_STAGE_BYTES = 2 * _ROWS.value * _FOLD.value * BLOCK
_INPUT_BYTES = 2 * _FOLD.value * BLOCK  # of a block of 8 pieces
_SHARED_MEMORY = 226_000
_REGISTERS = 96  # of a thread, before partitions get what they need


def takes_one(
    x: Tensor, up: ExpertMatrices, down: ExpertMatrices, top_k: int, *, has_bias: bool
) -> bool:
    """Whether the kernel computes these experts for x [1, size]."""
    if has_bias or x.dtype != torch.bfloat16:
        return False
    for each in (up, down):
        if each.format != Format.FLOAT8 or each.size % BLOCK or each.num_rows % _OUTPUTS:
            return False
        if each.scale_columns and each.scale_rows % _OUTPUTS:
            return False
    return _memory(up, down, top_k, num_sms(x.device)) <= _SHARED_MEMORY


def _blocks(matrices: ExpertMatrices) -> int:
    """Of 8 pieces, of a row."""
    return triton.cdiv(matrices.size, _FOLD.value * BLOCK)


def _chunks(up: ExpertMatrices, down: ExpertMatrices, top_k: int, programs: int) -> tuple[int, int]:
    """Scales that a program needs at most, of each projection."""
    gates = triton.cdiv(top_k * (down.size // _ROWS.value), programs)
    outputs = triton.cdiv(down.num_rows // _OUTPUTS, programs)
    of_gates = 2 * _ROWS.value * (_blocks(up) if up.scale_columns else 1)
    of_outputs = top_k * _ROWS.value * (_blocks(down) if down.scale_columns else 2)
    chunk = _CHUNK.value
    return triton.cdiv(gates * of_gates, chunk), triton.cdiv(outputs * of_outputs, chunk)


def _memory(up: ExpertMatrices, down: ExpertMatrices, top_k: int, programs: int) -> int:
    """Bytes of shared memory."""
    inputs = (_blocks(up) + top_k * _blocks(down)) * _INPUT_BYTES
    scales = 4 * _CHUNK.value * sum(_chunks(up, down, top_k, programs))
    return _STAGES * _STAGE_BYTES + inputs + scales + 1024


def mix_one_float8(
    x: Tensor, routed: Routed, up: ExpertMatrices, down: ExpertMatrices, epilogue: Epilogue
) -> Tensor:
    """See ExpertsKernel.apply_partial, of what `takes_one` says."""
    assert up.scales is not None
    assert down.scales is not None
    top_k, size = routed.ids.shape[1], x.shape[1]
    num_programs = num_sms(x.device)  # With more, some would wait for others that find no room.
    up_chunks, down_chunks = _chunks(up, down, top_k, num_programs)
    out = x.new_empty((1, size))
    experts_one_float8_kernel[(num_programs,)](
        x.view(torch.int32),
        _descriptor(up),
        _descriptor(down),
        up.scales,
        down.scales,
        *_exchange(x.device, top_k, down.size // BLOCK, num_programs),
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
        UP_CHUNKS=up_chunks,
        DOWN_CHUNKS=down_chunks,
        SCALE_ROWS=(up.scale_rows, down.scale_rows),
        SCALE_COLUMNS=(up.scale_columns, down.scale_columns),
        STAGES=_STAGES,
        TOP_K=top_k,
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


@gluon.jit
def _units_of(num_gates):
    """A program's first units of gates and of outputs: both are counted together, so that who has
    fewer of the ones is the first to get others."""
    step = gl.num_programs(0)
    own_gates = gl.cdiv(num_gates - gl.program_id(0), step)
    return gl.program_id(0), gl.program_id(0) + own_gates * step - num_gates


@gluon.jit
def _fetch_stage(weight, ring, stage, phase, row, second_row, block):
    """Load a block of 8 rows, and of another 8."""
    tiles, _left, ready, free = ring
    mbarrier.wait(free.index(stage), 1 - phase)
    bar = ready.index(stage)
    mbarrier.expect(bar, 2 * weight.block_type.nbytes)
    _fetch_tile(weight, [row, block * _FOLD, 0], bar, tiles.index(2 * stage))
    _fetch_tile(weight, [second_row, block * _FOLD, 0], bar, tiles.index(2 * stage + 1))


@gluon.jit
def _fetch(
    ids,
    up,
    down,
    ring,
    size,
    inner,
    UP_BLOCKS: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    TOP_K: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads weights."""
    STAGES: gl.constexpr = ring[2].shape[0]
    octets = inner // _ROWS
    num_gates = TOP_K * octets
    first, first_output = _units_of(num_gates)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    experts = _load_ids(ids, TOP_K)
    for unit in range(first, num_gates, gl.num_programs(0)):
        row = _expert_of(experts, unit // octets) * (2 * inner) + unit % octets * _ROWS
        for block in range(UP_BLOCKS):
            _fetch_stage(up, ring, stage, phase, row, row + inner, block)
            stage, phase = _following(stage, phase, STAGES)
    for unit in range(first_output, size // (2 * _ROWS), gl.num_programs(0)):
        for slot in range(TOP_K):
            row = _expert_of(experts, slot) * size + unit * (2 * _ROWS)
            for block in range(DOWN_BLOCKS):
                _fetch_stage(down, ring, stage, phase, row, row + _ROWS, block)
                stage, phase = _following(stage, phase, STAGES)


@gluon.jit
def _prepare(
    ids,
    shares,
    up_scales,
    down_scales,
    table,
    has_scales,
    places,
    tickets,
    launch,
    size,
    inner,
    UP_BLOCKS: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    UP_CHUNKS: gl.constexpr,
    DOWN_CHUNKS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    TOP_K: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads the scales of all of a program's units, a single warp.

    Of a unit of gates: those of 8 gates and of 8 ups, or of all pieces of each; of a unit of
    outputs, for each expert and times its share: those of 16 rows, or of all pieces.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    octets = inner // _ROWS
    num_gates = TOP_K * octets
    first, first_output = _units_of(num_gates)
    lanes = gl.arange(0, _CHUNK, layout=LAYOUT)
    if PDL:
        tl.extra.cuda.gdc_wait()
    experts = _load_ids(ids, TOP_K)
    pointer, stride, num_scales = up_scales
    HALF: gl.constexpr = _ROWS * UP_BLOCKS if SCALE_COLUMNS[0] > 0 else _ROWS
    found = ()
    for chunk in gl.static_range(UP_CHUNKS):
        index = chunk * _CHUNK + lanes
        unit = first + index // (2 * HALF) * gl.num_programs(0)
        unit = gl.minimum(unit, num_gates - 1)
        row = unit % octets * _ROWS + index // HALF % 2 * inner
        expert = _expert_of(experts, unit // octets).to(gl.int64)
        place = _scale_of(row, index % HALF, num_scales, SCALE_ROWS[0], SCALE_COLUMNS[0])
        scale = gl.load(pointer + expert * stride + place)
        found += (scale,)  # type: ignore[assignment]
    pointer, stride, num_scales = down_scales
    EACH: gl.constexpr = _ROWS * DOWN_BLOCKS if SCALE_COLUMNS[1] > 0 else 2 * _ROWS
    for chunk in gl.static_range(DOWN_CHUNKS):
        index = chunk * _CHUNK + lanes
        unit = first_output + index // (TOP_K * EACH) * gl.num_programs(0)
        unit = gl.minimum(unit, size // (2 * _ROWS) - 1)
        slot = index // EACH % TOP_K
        expert = _expert_of(experts, slot).to(gl.int64)
        place = _scale_of(
            unit * (2 * _ROWS), index % EACH, num_scales, SCALE_ROWS[1], SCALE_COLUMNS[1]
        )
        share = gl.load(shares + slot, cache_modifier=".cg")
        scale = gl.load(pointer + expert * stride + place)
        found += (scale * share,)  # type: ignore[assignment]
    for chunk in gl.static_range(UP_CHUNKS + DOWN_CHUNKS):
        table.index(chunk).store(found[chunk])
    _barrier()
    mbarrier.arrive(has_scales.index(0), count=1)
    _begin(places, tickets, launch, TOP_K * (inner // 2))


@gluon.jit
def _scale_of(row, i, num_scales, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr):
    """Where, of an expert's scales, that of row `row + i` is, or that of a row's piece i."""
    if SCALE_COLUMNS > 0:
        place = row // SCALE_ROWS * num_scales
        place += gl.minimum(i * _PIECE // SCALE_COLUMNS, num_scales - 1)
    else:
        place = (row + i) // SCALE_ROWS
    return place


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
def _give(words, inputs, first, scales, given, i):
    """Write pairs of bfloat16 as two e4m3 numbers each, from block `first` of the inputs on, and
    what products with each piece are to be multiplied by."""
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
    x_scales.index(i).store(scale)
    fence_async_shared()
    _barrier()
    mbarrier.arrive(given.index(i), count=1)


@gluon.jit
def _take_in(
    x,
    places,
    launch,
    inputs,
    scales,
    given,
    size,
    inner,
    UP_BLOCKS: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    TOP_K: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that makes two e4m3 numbers of each input: of x, then of each expert's
    gates."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    _give(_load_words(x, size // 2, UP_BLOCKS), inputs, 0, scales, given, 0)
    num_words = inner // 2
    places = places + _own_buffer(launch) * (TOP_K * num_words)
    for slot in range(TOP_K):
        found = _load_words(places + slot * num_words, num_words, DOWN_BLOCKS)
        while _lowest(found) == EMPTY:
            found = _load_words(places + slot * num_words, num_words, DOWN_BLOCKS)
        _give(found, inputs, UP_BLOCKS + slot * DOWN_BLOCKS, scales, given, 1 + slot)


@gluon.jit
def _multiply_stage(ring, stage, phase, inputs):
    """Products of both tiles of a stage with a block of inputs, [8 rows, 8 pieces, 16] each."""
    _tiles, left, ready, free = ring
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 2 * _FOLD, 32]
    )
    none = gl.zeros([_ROWS * _FOLD, 2 * _FOLD], gl.float32, SUMS)
    mbarrier.wait(ready.index(stage), phase)
    right = inputs.permute((1, 0))
    first = warpgroup_mma(left.index(2 * stage), right, none, is_async=True)
    second = warpgroup_mma(left.index(2 * stage + 1), right, none, is_async=True)
    first, second = warpgroup_mma_wait(0, deps=[first, second])
    _barrier()
    mbarrier.arrive(free.index(stage), count=1)
    SHAPE: gl.constexpr = [_ROWS, _FOLD, 2 * _FOLD]
    return first.reshape(SHAPE), second.reshape(SHAPE)


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
    inputs,
    scales,
    given,
    table,
    has_scales,
    size,
    inner,
    UP_BLOCKS: gl.constexpr,
    DOWN_BLOCKS: gl.constexpr,
    FIRST: gl.constexpr,
    UP_GROUPS: gl.constexpr,
    DOWN_GROUPS: gl.constexpr,
    TOP_K: gl.constexpr,
    EPILOGUE: gl.constexpr,
):
    """The partition that multiplies, and stores gates and outputs.

    table: eight scales each, those of outputs from FIRST on.
    UP_GROUPS, DOWN_GROUPS: whether pieces of a row have scales, not rows.
    """
    STAGES: gl.constexpr = ring[2].shape[0]
    octets = inner // _ROWS
    num_gates = TOP_K * octets
    first_gate, first_output = _units_of(num_gates)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    mbarrier.wait(given.index(0), 0)
    mbarrier.wait(has_scales.index(0), 0)
    places = places + _own_buffer(launch) * (num_gates * (_ROWS // 2))
    entry = gl.to_tensor(0)
    for unit in range(first_gate, num_gates, gl.num_programs(0)):
        gates = _no_sums()
        ups = _no_sums()
        for block in range(UP_BLOCKS):
            gate, up = _multiply_stage(ring, stage, phase, inputs.index(block))
            stage, phase = _following(stage, phase, STAGES)
            if UP_GROUPS:
                gates += gate * _of_pieces(table.index(entry + block), gate)
                ups += up * _of_pieces(table.index(entry + UP_BLOCKS + block), up)
            else:
                gates += gate
                ups += up
        x_scale = _of_pieces(scales.index(0), gates)
        gates = gates * x_scale
        ups = ups * x_scale
        if not UP_GROUPS:
            gates = gates * _of_rows(table.index(entry), gates)
            ups = ups * _of_rows(table.index(entry + 1), ups)
        entry += 2 * UP_BLOCKS if UP_GROUPS else 2
        result = _activate_gated(_totals(gates), _totals(ups), EPILOGUE)
        _announce(result, places + unit * (_ROWS // 2))
    entry = gl.to_tensor(FIRST)
    for unit in range(first_output, size // (2 * _ROWS), gl.num_programs(0)):
        sums = _no_sums()
        second_sums = _no_sums()
        for slot in range(TOP_K):
            mbarrier.wait(given.index(1 + slot), 0)
            x_scale = _of_pieces(scales.index(1 + slot), sums)
            factor = x_scale
            second_factor = x_scale
            if not DOWN_GROUPS:
                factor = x_scale * _of_rows(table.index(entry), sums)
                second_factor = x_scale * _of_rows(table.index(entry + 1), sums)
            for block in range(DOWN_BLOCKS):
                place = UP_BLOCKS + slot * DOWN_BLOCKS + block
                first, second = _multiply_stage(ring, stage, phase, inputs.index(place))
                stage, phase = _following(stage, phase, STAGES)
                if DOWN_GROUPS:
                    factor = x_scale * _of_pieces(table.index(entry + block), sums)
                    second_factor = factor
                sums += first * factor
                second_sums += second * second_factor
            entry += DOWN_BLOCKS if DOWN_GROUPS else 2
        result = _totals(sums)
        rows = unit * (2 * _ROWS) + gl.arange(0, _ROWS, layout=result.type.layout)
        gl.store(out + rows, result.to(out.dtype.element_ty))
        gl.store(out + _ROWS + rows, _totals(second_sums).to(out.dtype.element_ty))


@gluon.jit(do_not_specialize=["up_stride", "down_stride"])
def experts_one_float8_kernel(
    x,
    up,
    down,
    up_scales,
    down_scales,
    places,
    tickets,
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
    UP_CHUNKS: gl.constexpr,
    DOWN_CHUNKS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    TOP_K: gl.constexpr,
    EPILOGUE: gl.constexpr,
    PDL: gl.constexpr,
):
    """The sum of a token's experts, weighted by `shares`, into out bfloat16 [size].

    Args:
        x: int32 [size / 2], pairs of bfloat16.
        up, down: descriptors of rows [pieces, 128], of an expert's 2 `inner` gates and ups with
            `size` inputs, and of its `size` outputs with `inner` inputs.
        up_scales, down_scales: of ExpertMatrices.
        places, tickets: of experts_one_mx.py's Exchange; gates are pairs of bfloat16.
        up_stride, down_stride: from an expert's scales to the next one's.
        up_num_scales, down_num_scales: scales of a row, or of a row of blocks.
        UP_BLOCKS, DOWN_BLOCKS: blocks of 8 pieces, of a row.
        UP_CHUNKS, DOWN_CHUNKS: of a program's scales.
        SCALE_ROWS, SCALE_COLUMNS: of ExpertMatrices, for up and down.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WHOLE: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    INPUTS: gl.constexpr = UP_BLOCKS + TOP_K * DOWN_BLOCKS
    CHUNKS: gl.constexpr = UP_CHUNKS + DOWN_CHUNKS
    tiles = gl.allocate_shared_memory(up.dtype, [2 * STAGES, _ROWS, _FOLD, _PIECE], up.layout)
    inputs = gl.allocate_shared_memory(gl.float8e4nv, [INPUTS, 2 * _FOLD, _PIECE], WHOLE)
    scales = gl.allocate_shared_memory(gl.float32, [1 + TOP_K, _FOLD], FLAT)
    table = gl.allocate_shared_memory(gl.float32, [CHUNKS, _CHUNK], FLAT)
    LEFT: gl.constexpr = [2 * STAGES, _ROWS * _FOLD, _PIECE]
    ENTRIES: gl.constexpr = [CHUNKS * _CHUNK // 8, 8]
    if _IS_PUBLIC:
        left = tiles.reinterpret(gl.float8e4nv, LEFT, WHOLE)
        entries = table.reinterpret(gl.float32, ENTRIES, FLAT)
    else:
        left = tiles._reinterpret(gl.float8e4nv, LEFT, WHOLE)
        entries = table._reinterpret(gl.float32, ENTRIES, FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [1 + TOP_K, 1], mbarrier.MBarrierLayout())
    has_scales = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    numbers = gl.allocate_shared_memory(gl.int32, [1], FLAT)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    for i in gl.static_range(1 + TOP_K):
        mbarrier.init(given.index(i), count=1)
    mbarrier.init(has_scales.index(0), count=1)
    mbarrier.init(told.index(0), count=1)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    ring = (tiles, left, ready, free)
    launch = (numbers, told)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out,
                    places,
                    launch,
                    ring,
                    inputs,
                    scales,
                    given,
                    entries,
                    has_scales,
                    size,
                    inner,
                    UP_BLOCKS,
                    DOWN_BLOCKS,
                    UP_CHUNKS * _CHUNK // 8,
                    SCALE_COLUMNS[0] > 0,
                    SCALE_COLUMNS[1] > 0,
                    TOP_K,
                    EPILOGUE,
                ),
            ),
            (
                _take_in,
                (
                    x,
                    places,
                    launch,
                    inputs,
                    scales,
                    given,
                    size,
                    inner,
                    UP_BLOCKS,
                    DOWN_BLOCKS,
                    TOP_K,
                    PDL,
                ),
            ),
            (
                _fetch,
                (
                    ids,
                    up,
                    down,
                    ring,
                    size,
                    inner,
                    UP_BLOCKS,
                    DOWN_BLOCKS,
                    TOP_K,
                    PDL,
                ),
            ),
            (
                _prepare,
                (
                    ids,
                    shares,
                    (up_scales, up_stride, up_num_scales),
                    (down_scales, down_stride, down_num_scales),
                    table,
                    has_scales,
                    places,
                    tickets,
                    launch,
                    size,
                    inner,
                    UP_BLOCKS,
                    DOWN_BLOCKS,
                    UP_CHUNKS,
                    DOWN_CHUNKS,
                    SCALE_ROWS,
                    SCALE_COLUMNS,
                    TOP_K,
                    PDL,
                ),
            ),
        ],
        [4, 1, 1],
        [112, 32, 64],
    )
