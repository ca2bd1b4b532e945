"""GEMM on Hopper with quantized weights and hundreds of tokens: y = x W^T, bound by tensor cores.

linear_hopper_quantized.py's kernel converts a block of 128 inputs of W, and then multiplies it: the
tensor cores rest while it converts, and shared memory holds no more than two blocks of 256 tokens'
inputs. Here W and x have rings of their own, x's in halves of a block, and W is converted by halves
too: while the tensor cores multiply one half, the next one is converted. No more than one half is
being multiplied when the registers of the other are written.

There are no more programs than SMs. Each computes equally many steps (a step is a tile's block of
128 inputs), tile after tile, so that all SMs are busy to the end, however many tiles there are.
Where a tile's steps belong to several programs, each leaves its sums in the workspace, and the one
that finishes last adds them up, in the order of their steps.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.ops.cuda.linear_hopper import _barrier, _fetch_tile, _finish
from octavo.ops.cuda.linear_hopper_quantized import _IS_PUBLIC, SCALE_RESULT, SCALE_WEIGHTS
from octavo.ops.cuda.stored_weights import BLOCK, FLOAT8, INT4

HALF = BLOCK // 2  # inputs that are converted at once
PIECE = 8  # rows of gates that are fetched at once, and of what they gate

_FLOAT8 = tl.constexpr(FLOAT8)
_INT4 = tl.constexpr(INT4)
_SCALE_RESULT = tl.constexpr(SCALE_RESULT)
_SCALE_WEIGHTS = tl.constexpr(SCALE_WEIGHTS)
_HALF = tl.constexpr(HALF)
_PIECE = tl.constexpr(PIECE)


def unpacking(bits: int, word: int, is_float16: bool) -> str:
    """PTX: of two neighbouring words (stored_weights.py), one's pairs of integers minus half of
    their range.

    As linear_hopper_quantized.py has it for both words: bits are placed in the mantissa of 128.0
    (bfloat16) or 1024.0 (float16), and what is not wanted of the sum is subtracted.
    """
    kind = "f16x2" if is_float16 else "bf16x2"
    one, zero = ("0x64006400", "0x64086408") if is_float16 else ("0x43004300", "0x43084308")
    num_pairs = 16 // bits
    source = f"${num_pairs + word}"
    lines = [".reg .b32 t, m, s, h, z, a, b;", f"mov.b32 h, {one};"]
    if bits == 4:
        lines += ["mov.b32 m, 0x000F000F;", f"mov.b32 z, {zero};"]
    else:
        lines += ["mov.b32 m, 0x007F007F;", "mov.b32 s, 0x00800080;"]
    for pair in range(num_pairs):
        moved = source
        if pair:
            lines.append(f"shr.u32 t, {source}, {bits * pair};")
            moved = "t"
        lines.append(f"lop3.b32 a, {moved}, m, h, 0xEA;")
        if bits == 8:
            lines.append(f"lop3.b32 b, {moved}, s, h, 0xEA;")
        lines.append(f"sub.rn.{kind} ${pair}, a, {'z' if bits == 4 else 'b'};")
    return "{" + "\n".join(lines) + "}"


@gluon.jit
def _fetch_weights(weight, tiles, ready, i, places, GATED: gl.constexpr):
    """Load W of the program's step i."""
    begin, num_blocks, token_tiles, num_rows = places
    STAGES: gl.constexpr = ready.shape[0]
    PIECES: gl.constexpr = tiles.shape[0] // STAGES
    ROWS: gl.constexpr = tiles.shape[1]
    WIDTH: gl.constexpr = tiles.shape[2]
    stage = i % STAGES
    tile = (begin + i) // num_blocks // token_tiles
    column = (begin + i) % num_blocks * WIDTH
    mbarrier.expect(ready.index(stage), PIECES * weight.block_type.nbytes)
    for piece in gl.static_range(PIECES):
        if GATED:
            row = tile * (PIECES // 2 * ROWS) + piece // 2 * ROWS + piece % 2 * num_rows
        else:
            row = tile * (PIECES * ROWS) + piece * ROWS
        place = tiles.index(stage * PIECES + piece)
        _fetch_tile(weight, [row, column], ready.index(stage), place)


@gluon.jit
def _produce(x, weight, buffers, count, places, GATED: gl.constexpr, PDL: gl.constexpr):
    x_tiles, pieces, x_ready, x_free, ready, free = buffers
    begin, num_blocks, token_tiles, _ = places
    X_STAGES: gl.constexpr = x_tiles.shape[0]
    BM: gl.constexpr = x_tiles.shape[1]
    STAGES: gl.constexpr = ready.shape[0]
    for i in range(gl.minimum(count, STAGES)):
        _fetch_weights(weight, pieces, ready, i, places, GATED)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in range(count):
        if i >= STAGES:
            mbarrier.wait(free.index(i % STAGES), (i // STAGES - 1) & 1)
            _fetch_weights(weight, pieces, ready, i, places, GATED)
        token = (begin + i) // num_blocks % token_tiles * BM
        column = (begin + i) % num_blocks * (2 * _HALF)
        for half in gl.static_range(2):
            stage = (2 * i + half) % X_STAGES
            mbarrier.wait(x_free.index(stage), ((2 * i + half) // X_STAGES + 1) & 1)
            mbarrier.expect(x_ready.index(stage), x.block_type.nbytes)
            place = [token, column + half * _HALF]
            _fetch_tile(x, place, x_ready.index(stage), x_tiles.index(stage))
    if PDL:
        # All loads are issued: only now may the next kernel's weights compete with ours.
        tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def _of_groups(source, rows, inside, block, strides, PARTS: gl.constexpr):
    """Scales or zero points of rows, for the PARTS groups of a block of inputs."""
    stride_row, stride_group, block_rows, group_blocks = strides
    places = source + (rows // block_rows) * stride_row
    first = block // group_blocks * PARTS
    found = ()
    for part in gl.static_range(PARTS):
        values = gl.load(places + (first + part) * stride_group, mask=inside, other=0.0)
        found += (values,)  # type: ignore[assignment]
    return found


@gluon.jit
def _own_rows(row, num_rows, ROWS: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """Which rows of W a tile has."""
    rows = gl.arange(0, ROWS, layout=LAYOUT)
    if GATED:
        rows = rows // (2 * _PIECE) * _PIECE + rows % _PIECE + rows // _PIECE % 2 * num_rows
    return row + rows


@gluon.jit
def _gates_and_ups(acc):
    """Of a tile that has them in turns, a piece each: a thread's two rows of an instruction."""
    ROWS: gl.constexpr = acc.shape[0] // 2
    turns = acc.reshape([ROWS // _PIECE, 2, _PIECE, acc.shape[1]]).permute((0, 2, 3, 1))
    return gl.split(turns.reshape([ROWS, acc.shape[1], 2]))


@gluon.jit
def _side_by_side(planes):
    """Planes [rows, n], as a tuple of four or two, side by side: [rows, HALF]."""
    if len(planes) == 4:
        joined = gl.join(gl.join(planes[0], planes[2]), gl.join(planes[1], planes[3]))
        joined = joined.permute((0, 2, 3, 1))
    else:
        joined = gl.join(planes[0], planes[1]).permute((0, 2, 1))
    return joined.reshape([planes[0].shape[0], planes[0].shape[1] * len(planes)])


@gluon.jit
def _weights(tile, words, factors, zeros, half: gl.constexpr, HOW: gl.constexpr):
    """Half a block of W as DTYPE [rows, HALF], the left operand.

    Args:
        tile: in shared memory, of which FLOAT8 is loaded here.
        words: of integers, already loaded.
        factors, zeros: of the block's groups; factors only with SCALE_WEIGHTS.
        half: which one.
    """
    FORMAT: gl.constexpr = HOW[0]
    DTYPE: gl.constexpr = HOW[1]
    SCALE: gl.constexpr = HOW[2]
    HAS_ZEROS: gl.constexpr = HOW[3]
    PARTS: gl.constexpr = HOW[4]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, HOW[5], k_width=2)
    if FORMAT == _FLOAT8:
        stored = tile.slice(half * _HALF, _HALF, dim=1).load(OPERAND)
        values = stored.to(gl.float16).to(gl.float32)
        if SCALE == _SCALE_WEIGHTS:
            values = values * factors[0].to(gl.float32)[:, None]
        values = values.to(DTYPE)
    else:
        NUM: gl.constexpr = 4 if FORMAT == _INT4 else 2  # planes
        if gl.bfloat16 == DTYPE:
            planes = gl.inline_asm_elementwise(
                HOW[6 + half],
                "=&r,=&r,=&r,=&r,r,r" if FORMAT == _INT4 else "=&r,=&r,r,r",
                [words],
                dtype=(gl.bfloat16,) * (4 if FORMAT == _INT4 else 2),
                is_pure=True,
                pack=2,
            )
        else:
            planes = gl.inline_asm_elementwise(
                HOW[6 + half],
                "=&r,=&r,=&r,=&r,r,r" if FORMAT == _INT4 else "=&r,=&r,r,r",
                [words],
                dtype=(gl.float16,) * (4 if FORMAT == _INT4 else 2),
                is_pure=True,
                pack=2,
            )
        done = ()
        for i in gl.static_range(NUM):
            values = planes[i]
            if HAS_ZEROS:
                zero = zeros[(half * NUM + i) * PARTS // (2 * NUM)]
                values = values - zero.to(DTYPE)[:, None]
            if SCALE == _SCALE_WEIGHTS:
                factor = factors[(half * NUM + i) * PARTS // (2 * NUM)]
                values = values * factor.to(DTYPE)[:, None]
            done += (values,)  # type: ignore[assignment]
        values = gl.convert_layout(_side_by_side(done), OPERAND)
    return values


@gluon.jit
def _by_thread(acc):
    """Sums [rows, tokens] in a row, in such an order that a thread has four neighbours, and the
    threads of a warp what lies side by side."""
    ROWS: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    pieces = acc.reshape([ROWS // 16, 2, 8, BM // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return pieces.reshape([ROWS * BM])


@gluon.jit
def _by_place(values, ROWS: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """What _by_thread was given."""
    pieces = values.reshape([BM // 8, ROWS // 16, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(pieces.reshape([ROWS, BM]), LAYOUT)


@gluon.jit
def _consume(
    buffers,
    factors,
    outputs,
    begin,
    end,
    sizes,
    strides,
    HOW: gl.constexpr,
    LAYOUT: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    x_tiles, tiles, x_ready, x_free, ready, free = buffers
    scales, zeros = factors
    bias, out, sums, arrivals = outputs
    num_tokens, num_rows, num_blocks, token_tiles, per_program = sizes
    X_STAGES: gl.constexpr = x_tiles.shape[0]
    BM: gl.constexpr = x_tiles.shape[1]
    STAGES: gl.constexpr = tiles.shape[0]
    ROWS: gl.constexpr = tiles.shape[1]
    SIZE: gl.constexpr = ROWS * BM
    SCALE: gl.constexpr = HOW[2]
    HAS_ZEROS: gl.constexpr = HOW[3]
    PARTS: gl.constexpr = HOW[4]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, k_width=2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OPERAND)
    BN: gl.constexpr = ROWS // 2 if GATED else ROWS
    total_rows = num_rows * 2 if GATED else num_rows
    for tile in range(begin // num_blocks, gl.cdiv(end, num_blocks)):
        first = gl.maximum(begin - tile * num_blocks, 0)
        last = gl.minimum(end - tile * num_blocks, num_blocks)
        row = tile // token_tiles * BN
        token = tile % token_tiles * BM
        own = _own_rows(row, num_rows, ROWS, GATED, BY_ROW)
        inside = own < total_rows
        block_scales = ()
        block_zeros = ()
        if SCALE == _SCALE_WEIGHTS:
            block_scales = _of_groups(scales, own, inside, first, strides, PARTS)
        if HAS_ZEROS:
            block_zeros = _of_groups(zeros, own, inside, first, strides, PARTS)
        acc = gl.zeros([ROWS, BM], gl.float32, LAYOUT)
        ws_before = gl.zeros([ROWS, _HALF], HOW[1], OPERAND)
        for block in range(first, last):
            i = tile * num_blocks + block - begin
            stage = i % STAGES
            following = gl.minimum(block + 1, num_blocks - 1)
            next_scales = block_scales
            next_zeros = block_zeros
            if SCALE == _SCALE_WEIGHTS:
                next_scales = _of_groups(scales, own, inside, following, strides, PARTS)
            if HAS_ZEROS:
                next_zeros = _of_groups(zeros, own, inside, following, strides, PARTS)
            mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
            words = tiles.index(stage)
            if HOW[0] != _FLOAT8:
                words = tiles.index(stage).load(OPERAND)
            for half in gl.static_range(2):
                ws = _weights(tiles.index(stage), words, block_scales, block_zeros, half, HOW)
                j = 2 * i + half
                x_stage = j % X_STAGES
                mbarrier.wait(x_ready.index(x_stage), (j // X_STAGES) & 1)
                xs = x_tiles.index(x_stage).permute((1, 0))
                acc = warpgroup_mma(ws, xs, acc, is_async=True)
                # The half before is done: its inputs and its registers may be overwritten, which
                # the compiler must not do earlier, and so is told that they are needed here.
                acc, ws_before = warpgroup_mma_wait(1, deps=[acc, ws_before])
                ws_before = ws
                before = (j + X_STAGES - 1) % X_STAGES
                is_later = (block > first) | (half > 0)
                mbarrier.arrive(x_free.index(before), count=1, pred=is_later)
            mbarrier.arrive(free.index(stage), count=1)
            block_scales = next_scales
            block_zeros = next_zeros
        acc, ws_before = warpgroup_mma_wait(0, deps=[acc, ws_before])
        end_stage = (2 * (tile * num_blocks + last - begin) - 1) % X_STAGES
        mbarrier.arrive(x_free.index(end_stage), count=1)
        if PDL:
            tl.extra.cuda.gdc_wait()
        if SCALE == _SCALE_RESULT:
            of_row = _own_rows(row, num_rows, ROWS, GATED, gl.SliceLayout(1, LAYOUT))
            sources = scales + (of_row // strides[2]) * strides[0]
            factor = gl.load(sources, mask=of_row < total_rows, other=0.0)
            acc = acc * factor.to(gl.float32)[:, None]
        # The programs that have steps of this tile.
        one = tile * num_blocks // per_program
        other = ((tile + 1) * num_blocks - 1) // per_program
        is_last = True
        if other > one:
            # Of two tiles that a program shares with others, one's first steps are another's.
            slot = 2 * gl.program_id(0) + (first == 0).to(gl.int32)
            own_sums = _by_thread(acc)
            inner = gl.arange(0, SIZE, layout=own_sums.type.layout)
            gl.store(sums + slot * SIZE + inner, own_sums)
            _barrier()
            seen = gl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
            is_last = seen == other - one
            if is_last:
                total = gl.load(sums + (2 * one + 1) * SIZE + inner, cache_modifier=".cg")
                for each in range(one + 1, other + 1):
                    total += gl.load(sums + 2 * each * SIZE + inner, cache_modifier=".cg")
                acc = _by_place(total, ROWS, BM, LAYOUT)
                gl.store(arrivals + tile, 0)
        if is_last:
            shape = (token, row, num_tokens, num_rows)
            if GATED:
                gates, ups = _gates_and_ups(acc)
                _finish(gates, ups, bias, out, shape, True, False, EPILOGUE, True, HAS_BIAS)
            else:
                _finish(acc, acc, bias, out, shape, True, False, EPILOGUE, False, HAS_BIAS)


@gluon.jit(do_not_specialize=["num_tokens", "num_steps", "per_program"])
def persistent_linear_kernel(
    x,
    weight,
    scales,
    zeros,
    bias,
    out,
    sums,
    arrivals,
    num_tokens,
    num_rows,
    num_blocks,
    num_steps,
    per_program,
    stride_row,
    stride_group,
    block_rows,
    group_blocks,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    PARTS: gl.constexpr,
    UNPACK_LOW: gl.constexpr,
    UNPACK_HIGH: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_tokens, num_rows].

    Arguments are those of linear_hopper_quantized.py's kernel, but for:
        sums: float32 workspace for two tiles of each program.
        num_steps: of all tiles.
        per_program: steps of a program.
        group_blocks: blocks that share scales; 1 if a block has several groups.
        ROWS: of W in a tile, which is one block of the descriptor; with a gate PIECE gates, PIECE
            rows that they gate, and so on.
        UNPACK_LOW, UNPACK_HIGH: `unpacking` of both words, for integers.
    """
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    PIECES: gl.constexpr = ROWS // weight.block_type.shape[0]
    BM: gl.constexpr = x.block_type.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BM, 16]
    )
    HOW: gl.constexpr = (
        FORMAT,
        x.dtype,
        SCALE,
        HAS_ZEROS,
        PARTS,
        LAYOUT,
        UNPACK_LOW,
        UNPACK_HIGH,
    )
    pieces = gl.allocate_shared_memory(
        weight.dtype, [STAGES * PIECES, ROWS // PIECES, WIDTH], weight.layout
    )
    tiles = pieces
    if GATED:
        if _IS_PUBLIC:
            tiles = pieces.reinterpret(weight.dtype, [STAGES, ROWS, WIDTH], weight.layout)
        else:
            tiles = pieces._reinterpret(weight.dtype, [STAGES, ROWS, WIDTH], weight.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [X_STAGES, BM, _HALF], x.layout)
    x_ready = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(X_STAGES):
        mbarrier.init(x_ready.index(stage), count=1)
        mbarrier.init(x_free.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    token_tiles = gl.cdiv(num_tokens, BM)
    begin = gl.program_id(0) * per_program
    end = gl.minimum(begin + per_program, num_steps)
    sizes = (num_tokens, num_rows, num_blocks, token_tiles, per_program)
    places = (begin, num_blocks, token_tiles, num_rows)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    (x_tiles, tiles, x_ready, x_free, ready, free),
                    (scales, zeros),
                    (bias, out, sums, arrivals),
                    begin,
                    end,
                    sizes,
                    (stride_row, stride_group, block_rows, group_blocks),
                    HOW,
                    LAYOUT,
                    EPILOGUE,
                    GATED,
                    HAS_BIAS,
                    PDL,
                ),
            ),
            (
                _produce,
                (
                    x,
                    weight,
                    (x_tiles, pieces, x_ready, x_free, ready, free),
                    end - begin,
                    places,
                    GATED,
                    PDL,
                ),
            ),
        ],
        [1],
        [24],
    )
