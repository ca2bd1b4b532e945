"""GEMM on Hopper with quantized weights: y = x W^T, of few tokens bound by reading W.

As linear_hopper.py: one warp loads tiles of W and x by TMA, and the other warps multiply them.
Here those load a tile of W into registers, in the order in which tensor cores take their left
operand, and dequantize it there to x's dtype. Values are exact in 16 bits; scales multiply the
float32 sums of a block of 128 inputs, or, if tokens are many and registers few, the weights
(SCALE). A scale per output multiplies the result. A gate's two halves are one tile.

Where inputs are float8, too, with a scale for each token and block of 128 inputs, tensor cores take
both operands from shared memory as they are, and the sums of a block are scaled when they are added
up.

With up to 16 tokens each warp multiplies for itself (mma): many small programs hide how long each
of them waits. With more tokens, the warps of a group multiply together (wgmma), while they
dequantize the next tile.

Integers come packed for this (stored_weights.py): a thread's two neighbouring words hold the pairs
of inputs that it needs, so that one logical operation makes two numbers of them, by placing the
bits in the mantissa of 128.0 (bfloat16) or 1024.0 (float16).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.ops.cuda.epilogues_hopper import finish
from octavo.ops.cuda.hopper import reinterpreted, sync_threads, tiles_of_rows
from octavo.ops.cuda.linear_hopper import produce
from octavo.ops.cuda.stored_weights import BLOCK, CHUNK_ROWS, FLOAT8, INT4

SCALE_RESULT, SCALE_SUMS, SCALE_WEIGHTS = 0, 1, 2  # SCALE

_FLOAT8 = tl.constexpr(FLOAT8)
_INT4 = tl.constexpr(INT4)
_SCALE_RESULT = tl.constexpr(SCALE_RESULT)
_SCALE_SUMS = tl.constexpr(SCALE_SUMS)
_SCALE_WEIGHTS = tl.constexpr(SCALE_WEIGHTS)
_BLOCK = tl.constexpr(BLOCK)
_CHUNK_ROWS = tl.constexpr(CHUNK_ROWS)

# Two words -> eight pairs of numbers q - 8: (128 + q) - 136 in bfloat16.
_UNPACK_INT4 = """{
    .reg .b32 t, m, h, z;
    mov.b32 m, 0x000F000F;
    mov.b32 h, 0x43004300;
    mov.b32 z, 0x43084308;
    lop3.b32 $0, $8, m, h, 0xEA;
    shr.u32 t, $8, 4;
    lop3.b32 $1, t, m, h, 0xEA;
    shr.u32 t, $8, 8;
    lop3.b32 $2, t, m, h, 0xEA;
    shr.u32 t, $8, 12;
    lop3.b32 $3, t, m, h, 0xEA;
    lop3.b32 $4, $9, m, h, 0xEA;
    shr.u32 t, $9, 4;
    lop3.b32 $5, t, m, h, 0xEA;
    shr.u32 t, $9, 8;
    lop3.b32 $6, t, m, h, 0xEA;
    shr.u32 t, $9, 12;
    lop3.b32 $7, t, m, h, 0xEA;
    sub.rn.bf16x2 $0, $0, z;
    sub.rn.bf16x2 $1, $1, z;
    sub.rn.bf16x2 $2, $2, z;
    sub.rn.bf16x2 $3, $3, z;
    sub.rn.bf16x2 $4, $4, z;
    sub.rn.bf16x2 $5, $5, z;
    sub.rn.bf16x2 $6, $6, z;
    sub.rn.bf16x2 $7, $7, z;
    }"""
# Two words -> four pairs of q - 128: the low seven bits plus 128, minus 128 or, without the highest
# bit, 256.
_UNPACK_INT8 = """{
    .reg .b32 t, l, s, h, a, b;
    mov.b32 l, 0x007F007F;
    mov.b32 s, 0x00800080;
    mov.b32 h, 0x43004300;
    lop3.b32 a, $4, l, h, 0xEA;
    lop3.b32 b, $4, s, h, 0xEA;
    sub.rn.bf16x2 $0, a, b;
    shr.u32 t, $4, 8;
    lop3.b32 a, t, l, h, 0xEA;
    lop3.b32 b, t, s, h, 0xEA;
    sub.rn.bf16x2 $1, a, b;
    lop3.b32 a, $5, l, h, 0xEA;
    lop3.b32 b, $5, s, h, 0xEA;
    sub.rn.bf16x2 $2, a, b;
    shr.u32 t, $5, 8;
    lop3.b32 a, t, l, h, 0xEA;
    lop3.b32 b, t, s, h, 0xEA;
    sub.rn.bf16x2 $3, a, b;
    }"""


def _in_float16(assembly: str) -> str:
    """The same with 1024.0 in place of 128.0, whose mantissa has more bits."""
    for bfloat, half in (
        ("0x43004300", "0x64006400"),
        ("0x43084308", "0x64086408"),
        ("bf16x2", "f16x2"),
    ):
        assembly = assembly.replace(bfloat, half)
    return assembly


_INT4_TO_BFLOAT16 = tl.constexpr(_UNPACK_INT4)
_INT4_TO_FLOAT16 = tl.constexpr(_in_float16(_UNPACK_INT4))
_INT8_TO_BFLOAT16 = tl.constexpr(_UNPACK_INT8)
_INT8_TO_FLOAT16 = tl.constexpr(_in_float16(_UNPACK_INT8))


@gluon.jit
def interleave(pieces):
    """Planes [rows, n], as a tuple, side by side: [rows, n * len(pieces)]."""
    if len(pieces) == 8:
        first = gl.join(gl.join(pieces[0], pieces[4]), gl.join(pieces[2], pieces[6]))
        second = gl.join(gl.join(pieces[1], pieces[5]), gl.join(pieces[3], pieces[7]))
        joined = gl.join(first, second).permute((0, 2, 3, 4, 1))
    else:
        joined = gl.join(gl.join(pieces[0], pieces[2]), gl.join(pieces[1], pieces[3]))
        joined = joined.permute((0, 2, 3, 1))
    return joined.reshape([pieces[0].shape[0], pieces[0].shape[1] * len(pieces)])


@gluon.jit
def _integers(stored, FORMAT: gl.constexpr, DTYPE: gl.constexpr):
    """Words [rows, n] -> planes of integers minus half of their range, each [rows, n], of DTYPE."""
    if FORMAT == _INT4 and gl.bfloat16 == DTYPE:
        pieces = gl.inline_asm_elementwise(
            _INT4_TO_BFLOAT16,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [stored],
            dtype=(gl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    elif FORMAT == _INT4:
        pieces = gl.inline_asm_elementwise(
            _INT4_TO_FLOAT16,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [stored],
            dtype=(gl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
    elif gl.bfloat16 == DTYPE:
        pieces = gl.inline_asm_elementwise(
            _INT8_TO_BFLOAT16,
            "=&r,=&r,=&r,=&r,r,r",
            [stored],
            dtype=(gl.bfloat16,) * 4,
            is_pure=True,
            pack=2,
        )
    else:
        pieces = gl.inline_asm_elementwise(
            _INT8_TO_FLOAT16,
            "=&r,=&r,=&r,=&r,r,r",
            [stored],
            dtype=(gl.float16,) * 4,
            is_pure=True,
            pack=2,
        )
    return pieces


@gluon.jit
def _weights(stored, scales, zeros, group, HOW: gl.constexpr):
    """A tile as it is stored, in registers, as DTYPE [rows, 128], the left operand.

    Minus zero points, and with SCALE_WEIGHTS times scales; `group` is the first of the tile's
    PARTS groups.
    """
    FORMAT: gl.constexpr = HOW[0]
    DTYPE: gl.constexpr = HOW[1]
    SCALE: gl.constexpr = HOW[2]
    HAS_ZEROS: gl.constexpr = HOW[3]
    PARTS: gl.constexpr = HOW[4]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, HOW[5], k_width=HOW[6])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OPERAND)
    if FORMAT == _FLOAT8:
        values = stored.to(gl.float16).to(gl.float32)
        if SCALE == _SCALE_WEIGHTS:
            values = values * scales.index(group).load(BY_ROW)[:, None]
        values = values.to(DTYPE)
    else:
        planes = _integers(stored, FORMAT, DTYPE)
        NUM: gl.constexpr = 8 if FORMAT == _INT4 else 4
        done = ()
        for i in gl.static_range(NUM):
            values = planes[i]
            if HAS_ZEROS:
                values = values - zeros.index(group + i * PARTS // NUM).load(BY_ROW)[:, None]
            if SCALE == _SCALE_WEIGHTS:
                factor = scales.index(group + i * PARTS // NUM).load(BY_ROW)
                values = values * factor.to(DTYPE)[:, None]
            done += (values,)  # type: ignore[assignment]
        values = gl.convert_layout(interleave(done), OPERAND)
    return values


@gluon.jit
def _add(acc, product, scales, group, SCALE: gl.constexpr, LAYOUT: gl.constexpr):
    """The sums with a block's product; otherwise than for SCALE_SUMS, that has them already."""
    if SCALE == _SCALE_SUMS:
        return acc + product * scales.index(group).load(gl.SliceLayout(1, LAYOUT))[:, None]
    return product


@gluon.jit
def joined_tiles(tiles, COUNT: gl.constexpr):
    """Shared memory [n, rows, columns] as [n / COUNT, COUNT * rows, columns]."""
    return tiles_of_rows(tiles, COUNT * tiles.shape[1])


@gluon.jit
def line_of(row, num_blocks):
    """Where a row of W in chunks is (stored_weights.py), of the first block of inputs: each other
    block is CHUNK_ROWS lines further down."""
    return row // _CHUNK_ROWS * (num_blocks * _CHUNK_ROWS) + row % _CHUNK_ROWS


@gluon.jit
def stacked_rows(row, up_row, ROWS: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """Which rows of W a tile has: of gates, and then the same rows of what they gate."""
    rows = gl.arange(0, ROWS, layout=LAYOUT)
    if GATED:
        return gl.where(rows < ROWS // 2, row + rows, up_row + rows - ROWS // 2)
    return row + rows


@gluon.jit
def _stage(source, target, places, first, GATED: gl.constexpr):
    """Copy scales, or zero points, of a program's rows and groups to shared memory."""
    row, up_row, num_rows, num_groups, stride_row, stride_group, block_rows = places
    AT_ONCE: gl.constexpr = min(target.shape[0], 32)
    CHUNKS: gl.constexpr = target.shape[0] // AT_ONCE
    ROWS: gl.constexpr = target.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = min(ROWS // 32, WARPS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS // WIDE, WIDE], [1, 0])
    rows = stacked_rows(row, up_row, ROWS, GATED, gl.SliceLayout(0, LAYOUT))
    by_row = (rows // block_rows) * stride_row
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    chunks = reinterpreted(target, [CHUNKS, AT_ONCE, ROWS], FLAT)
    for i in range(CHUNKS):
        groups = first + i * AT_ONCE + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, LAYOUT))
        inside = (groups < num_groups)[:, None] & (rows < num_rows)[None, :]
        offsets = (groups * stride_group)[:, None] + by_row[None, :]
        values = gl.load(source + offsets, mask=inside, other=0.0)
        chunks.index(i).store(values.to(target.dtype))


@gluon.jit
def _add_blocks(
    buffers,
    factors,
    first_group,
    x_scales,
    first,
    count,
    GROUP_BLOCKS: gl.constexpr,
    LAYOUT: gl.constexpr,
    PDL: gl.constexpr,
):
    """The sums, of float8 inputs."""
    x_tiles, tiles, ready, free = buffers
    source, stride, token = x_scales
    STAGES: gl.constexpr = x_tiles.shape[0]
    ROWS: gl.constexpr = tiles.shape[1]
    BM: gl.constexpr = x_tiles.shape[1]
    tokens = token + gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))
    sources = source + first * stride + tokens
    nothing = gl.zeros([ROWS, BM], gl.float32, LAYOUT)
    acc = nothing
    if PDL:
        tl.extra.cuda.gdc_wait()
    scale = gl.load(sources)
    for i in range(count):
        stage = i % STAGES
        group = (first + i) // GROUP_BLOCKS - first_group
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        xs = x_tiles.index(stage).permute((1, 0))
        part = warpgroup_mma(tiles.index(stage), xs, nothing, use_acc=False, is_async=True)
        next_scale = gl.load(sources + gl.minimum(i + 1, count - 1) * stride)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(free.index(stage), count=1)
        acc = _add(acc, part * scale[None, :], factors[2], group, _SCALE_SUMS, LAYOUT)
        scale = next_scale
    return acc


@gluon.jit
def _consume(
    buffers,
    factors,
    places,
    x_scales,
    first,
    count,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,
    LAYOUT: gl.constexpr,
    GATED: gl.constexpr,
    BY_WARP: gl.constexpr,
    PDL: gl.constexpr,
):
    x_tiles, tiles, ready, free = buffers
    scales, zeros, staged, staged_zeros = factors
    STAGES: gl.constexpr = x_tiles.shape[0]
    ROWS: gl.constexpr = tiles.shape[1]
    BM: gl.constexpr = x_tiles.shape[1]
    DTYPE: gl.constexpr = x_tiles.dtype
    KEEP: gl.constexpr = SCALE != _SCALE_SUMS
    first_group = first // GROUP_BLOCKS * PARTS
    if SCALE != _SCALE_RESULT:
        _stage(scales, staged, places, first_group, GATED)
    if HAS_ZEROS:
        _stage(zeros, staged_zeros, places, first_group, GATED)
    sync_threads()
    # With mma of single warps both operands may have a block's inputs in another order: then four
    # values of 8 bits are loaded at once.
    K_WIDTH: gl.constexpr = 4 if BY_WARP and FORMAT == _FLOAT8 else 2
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, k_width=K_WIDTH)
    HOW: gl.constexpr = (FORMAT, DTYPE, SCALE, HAS_ZEROS, PARTS, LAYOUT, K_WIDTH)
    nothing = gl.zeros([ROWS, BM], gl.float32, LAYOUT)
    acc = nothing
    if gl.float8e4nv == DTYPE:
        acc = _add_blocks(
            buffers, factors, first_group, x_scales, first, count, GROUP_BLOCKS, LAYOUT, PDL
        )
    elif BY_WARP:
        RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, k_width=K_WIDTH)
        for i in range(count):
            stage = i % STAGES
            mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
            xs = x_tiles.index(stage).permute((1, 0)).load(RIGHT)
            stored = tiles.index(stage).load(LEFT)
            mbarrier.arrive(free.index(stage), count=1)
            group = (first + i) // GROUP_BLOCKS * PARTS - first_group
            ws = _weights(stored, staged, staged_zeros, group, HOW)
            product = mma_v2(ws, xs, acc if KEEP else nothing)
            acc = _add(acc, product, staged, group, SCALE, LAYOUT)
    else:
        group = 0
        mbarrier.wait(ready.index(0), 0)
        stored = tiles.index(0).load(LEFT)
        ws = _weights(stored, staged, staged_zeros, group, HOW)
        for i in range(count):
            stage = i % STAGES
            xs = x_tiles.index(stage).permute((1, 0))
            product = warpgroup_mma(ws, xs, acc, use_acc=KEEP, is_async=True)
            after = gl.minimum(i + 1, count - 1)
            next_stage = after % STAGES
            next_group = (first + after) // GROUP_BLOCKS * PARTS - first_group
            mbarrier.wait(ready.index(next_stage), (after // STAGES) & 1)
            stored = tiles.index(next_stage).load(LEFT)
            following = _weights(stored, staged, staged_zeros, next_group, HOW)
            product, ws = warpgroup_mma_wait(0, deps=[product, ws])
            acc = _add(acc, product, staged, group, SCALE, LAYOUT)
            ws = following
            mbarrier.arrive(free.index(stage), count=1)
            group = next_group
    return (acc,)


@gluon.jit
def _halves(acc):
    """Sums of gates, and of what they gate, of a tile that has them one below the other."""
    ROWS: gl.constexpr = acc.shape[0] // 2
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = min(32, ROWS // 8)
    PAIRS: gl.constexpr = gl.BlockedLayout(
        [8, 1, 2], [LANES, 32 // LANES, 1], [1, WARPS, 1], [2, 0, 1]
    )
    pairs = acc.reshape([2, ROWS, acc.shape[1]]).permute((1, 2, 0))
    return gl.split(gl.convert_layout(pairs, PAIRS))


@gluon.jit
def finish_splits(
    acc,
    bias,
    out,
    sums,
    arrivals,
    place,
    SPLITS: gl.constexpr,
    PARTIAL: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """Store a program's sums [rows, tokens], with a gate one half below the other: as partial sums,
    or as results, which the program of a tile computes that finishes last of SPLITS.

    place: the program's tile, split, first token and row, and how many tokens and rows there are.
    """
    tile, split, token, row, num_tokens, num_rows = place
    ROWS: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    LAYOUT: gl.constexpr = acc.type.layout
    is_last = True
    if SPLITS > 1:
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        tokens = gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))
        inner = rows[:, None] * BM + tokens[None, :]
        SIZE: gl.constexpr = BM * ROWS
        slot = tile * gl.num_programs(0) + gl.program_id(0)
        base = sums + slot.to(gl.int64) * (SPLITS * SIZE) + inner
        gl.store(base + split * SIZE, acc)
        sync_threads()
        seen = gl.atomic_add(arrivals + slot, 1, sem="acq_rel", scope="gpu")
        is_last = seen == SPLITS - 1
        if is_last:
            acc = gl.load(base)
            for i in gl.static_range(1, SPLITS):
                acc += gl.load(base + i * SIZE)
            gl.store(arrivals + slot, 0)
    if is_last:
        if PARTIAL:
            out += split.to(gl.int64) * num_tokens * num_rows
        shape = (token, row, num_tokens, num_rows)
        adds_bias = True
        if PARTIAL:
            adds_bias = split == 0
        if GATED:
            gates, ups = _halves(acc)
            finish(gates, ups, bias, out, shape, adds_bias, False, EPILOGUE, True, HAS_BIAS)
        else:
            finish(acc, acc, bias, out, shape, adds_bias, False, EPILOGUE, False, HAS_BIAS)


@gluon.jit(do_not_specialize=["num_tokens", "num_splits"])
def quantized_linear_kernel(
    x,
    weight,
    x_scales,
    scales,
    zeros,
    bias,
    out,
    sums,
    arrivals,
    num_tokens,
    num_rows,
    num_blocks,
    num_splits,
    num_groups,
    x_stride,
    stride_row,
    stride_group,
    block_rows,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    PARTIAL: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,
    GROUPS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BY_WARP: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_tokens, num_rows].

    Args:
        x, weight: descriptors of a block of inputs of x [num_tokens, in_features], of 16 bits, or
            float8 if W is, with scales for blocks; and of W as it is stored, float8 [num_rows or
            2 * num_rows, in_features] or words as of pack_integers, of 4 bits as lines of a row's
            words of a block. Tiles have one box of W, or two.
        x_scales: of float8 x, float32 [blocks, x_stride], for whole tiles of tokens.
        scales: of row r and group g at (r // block_rows) * stride_row + g * stride_group.
        zeros: minus half of the integers' range, at the same places.
        out: with PARTIAL float32 [num_splits, num_tokens, num_rows].
        sums: float32 workspace, for SPLITS > 1.
        arrivals: int32, 0 for every tile before and after the kernel.
        num_blocks: of 128 inputs.
        GROUP_BLOCKS: how many of them share scales; 1 if a block has several groups.
        PARTS: how many groups a block has; 1 if several blocks share scales.
        GROUPS: at least how many groups a split has; a power of 2.
        BY_WARP: mma of single warps in place of wgmma.
    """
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    HALVES: gl.constexpr = 2 if GATED else 1
    ROWS: gl.constexpr = 16 * gl.num_warps()
    BN: gl.constexpr = ROWS // HALVES  # results per token
    BOXES: gl.constexpr = ROWS // weight.block_type.shape[0]
    DOWN: gl.constexpr = _CHUNK_ROWS if FORMAT == _INT4 else 0
    BM: gl.constexpr = x.block_type.shape[0]
    LAYOUT: gl.constexpr = (
        gl.NVMMADistributedLayout(
            version=[2, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, 8]
        )
        if BY_WARP
        else gl.NVMMADistributedLayout(
            version=[3, 0],
            warps_per_cta=[gl.num_warps(), 1],
            instr_shape=[16, BM, 32 if gl.float8e4nv == x.dtype else 16],
        )
    )
    token = gl.program_id(0) * BM
    tile = gl.program_id(1)
    split = gl.program_id(2)
    row = tile * BN
    up_row = row + num_rows
    total_rows = num_rows * HALVES
    per_split = gl.cdiv(num_blocks, num_splits)
    first = split * per_split
    count = gl.minimum(first + per_split, num_blocks) - first

    first_row = row
    second_row = up_row if GATED else row + weight.block_type.shape[0]
    if FORMAT == _INT4:
        first_row = line_of(first_row, num_blocks)
        second_row = line_of(second_row, num_blocks)
    BOX: gl.constexpr = [STAGES * BOXES, weight.block_type.shape[0], weight.block_type.shape[1]]
    tiles = gl.allocate_shared_memory(weight.dtype, BOX, weight.layout)
    stacked = joined_tiles(tiles, BOXES)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BM, _BLOCK], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # What multiplies integers is rounded to their 16 bits.
    IS_ROUNDED: gl.constexpr = SCALE == _SCALE_WEIGHTS and FORMAT != _FLOAT8
    FACTOR: gl.constexpr = x.dtype if IS_ROUNDED else gl.float32
    staged = gl.allocate_shared_memory(FACTOR, [GROUPS, ROWS], FLAT)
    staged_zeros = staged
    if HAS_ZEROS:
        staged_zeros = gl.allocate_shared_memory(x.dtype, [GROUPS, ROWS], FLAT)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    buffers = (x_tiles, (tiles,), ready, free)
    factors = (scales, zeros, staged, staged_zeros)
    places = (row, up_row, total_rows, num_groups, stride_row, stride_group, block_rows)
    (acc,) = gl.warp_specialize(
        [
            (
                _consume,
                (
                    (x_tiles, stacked, ready, free),
                    factors,
                    places,
                    (x_scales, x_stride, token),
                    first,
                    count,
                    FORMAT,
                    SCALE,
                    HAS_ZEROS,
                    GROUP_BLOCKS,
                    PARTS,
                    LAYOUT,
                    GATED,
                    BY_WARP,
                    PDL,
                ),
            ),
            (
                produce,
                (
                    x,
                    (weight,),
                    buffers,
                    token,
                    first_row,
                    second_row,
                    first,
                    count,
                    BOXES,
                    DOWN,
                    EARLY,
                    PDL,
                ),
            ),
        ],
        [1],
        [24],
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    if SCALE == _SCALE_RESULT:
        rows = stacked_rows(row, up_row, ROWS, GATED, gl.SliceLayout(1, LAYOUT))
        sources = scales + (rows // block_rows) * stride_row
        acc = acc * gl.load(sources, mask=rows < total_rows, other=0.0).to(gl.float32)[:, None]
    place = (tile, split, token, row, num_tokens, num_rows)
    finish_splits(acc, bias, out, sums, arrivals, place, SPLITS, PARTIAL, EPILOGUE, GATED, HAS_BIAS)
