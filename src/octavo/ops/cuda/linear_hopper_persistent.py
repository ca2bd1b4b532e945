"""GEMM on Hopper with quantized weights and hundreds of tokens: y = x W^T, bound by tensor cores.

linear_hopper_quantized.py's kernel converts a block of 128 inputs of W, and then multiplies it: the
tensor cores rest while it converts, and shared memory holds no more than two blocks of 256 tokens'
inputs. Here W and x have rings of their own (of half blocks of x where whole ones are too large),
and W is converted by halves: while the tensor cores multiply one half, the next one is converted.
No more than one half is being multiplied when the registers of the other are written.

There are no more programs than SMs. Of so many tiles that each program may have equally many of
them, they are computed as a whole; the others are shared: each program computes equally many of
their steps (a step is a tile's block of 128 inputs), so that all SMs are busy to the end. The
programs that end with the same tile add up a share of its tokens each, in the order of the steps:
each leaves its sums of the others' tokens in the workspace, keeps those of its own in registers,
and waits for the other programs of the tile. None waits for one that never begins: there is an SM
for each, which the next kernel gets only when all of them have begun (pdl.py).
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

from octavo.ops.cuda.epilogues_hopper import finish
from octavo.ops.cuda.hopper import fetch_tile, reinterpreted, sync_threads
from octavo.ops.cuda.linear_hopper_quantized import SCALE_RESULT, SCALE_WEIGHTS, line_of
from octavo.ops.cuda.stored_weights import BLOCK, CHUNK_ROWS, FLOAT8, INT4, PIECE

HALF = BLOCK // 2  # inputs that are converted at once

_FLOAT8 = tl.constexpr(FLOAT8)
_INT4 = tl.constexpr(INT4)
_SCALE_RESULT = tl.constexpr(SCALE_RESULT)
_SCALE_WEIGHTS = tl.constexpr(SCALE_WEIGHTS)
_HALF = tl.constexpr(HALF)
_PIECE = tl.constexpr(PIECE)
_CHUNK_ROWS = tl.constexpr(CHUNK_ROWS)
_PIECE_SUMS = tl.constexpr(64 * 128)  # sums of a tile that are added at once
_LOADED = tl.constexpr(4)  # parts of them that are on their way at once


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
def _locate(i, work):
    """Tile and block of the program's step i: first those of whole tiles, then of shared ones."""
    begin, _, num_blocks, num_whole, first_shared = work
    if i < num_whole * num_blocks:
        tile = gl.program_id(0) + i // num_blocks * gl.num_programs(0)
        block = i % num_blocks
    else:
        step = begin + i - num_whole * num_blocks
        tile = first_shared + step // num_blocks
        block = step % num_blocks
    return tile, block


@gluon.jit
def _places(
    i, work, token_tiles, TOKENS: gl.constexpr, ROWS: gl.constexpr, IN_CHUNKS: gl.constexpr
):
    """Where the program's step i loads from: its first token, the line where its rows of W begin in
    memory, and its block.

    ROWS: of W in a tile; with a gate, of gates.
    """
    tile, block = _locate(i, work)
    row = tile // token_tiles * ROWS
    if IN_CHUNKS:
        row = line_of(row, work[2])
    return tile % token_tiles * TOKENS, row, block


@gluon.jit
def _fetch_weights(
    weight,
    boxes,
    ready,
    stage,
    row,
    block,
    num_blocks,
    GATED: gl.constexpr,
    IN_CHUNKS: gl.constexpr,
):
    """Load W of a step."""
    STAGES: gl.constexpr = ready.shape[0]
    BOXES: gl.constexpr = boxes.shape[0] // STAGES
    WIDTH: gl.constexpr = boxes.shape[len(boxes.shape) - 1]
    first = row
    column = block * WIDTH
    if IN_CHUNKS:
        first = row + block * _CHUNK_ROWS
        column = 0
    bar = ready.index(stage)
    mbarrier.expect(bar, BOXES * weight.block_type.nbytes)
    if GATED:
        fetch_tile(weight, [first // _PIECE, 0, 0, column], bar, boxes.index(stage))
    else:
        for i in gl.static_range(BOXES):
            below = i * boxes.shape[1]
            if IN_CHUNKS:
                below = line_of(below, num_blocks)
            box = boxes.index(stage * BOXES + i)
            fetch_tile(weight, [first + below, column], bar, box)


@gluon.jit
def _produce(
    x,
    x_rest,
    weight,
    buffers,
    work,
    token_tiles,
    REST: gl.constexpr,
    ROWS: gl.constexpr,
    GATED: gl.constexpr,
    IN_CHUNKS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads, a single warp. Divisions would take it as long as the products of a
    step take the others, so it divides once a tile alone."""
    x_tiles, rest_tiles, boxes, x_ready, x_free, ready, free = buffers
    begin, end, num_blocks, num_whole, _ = work
    X_STAGES: gl.constexpr = x_ready.shape[0]
    HALVES: gl.constexpr = x_tiles.shape[0] // X_STAGES
    UNITS: gl.constexpr = 2 // HALVES
    WIDE: gl.constexpr = x_tiles.shape[1]
    X_BYTES: gl.constexpr = x.block_type.nbytes + (x_rest.block_type.nbytes if REST else 0)
    STAGES: gl.constexpr = ready.shape[0]
    TOKENS: gl.constexpr = WIDE + REST
    count = end - begin + num_whole * num_blocks
    token, row, block = _places(0, work, token_tiles, TOKENS, ROWS, IN_CHUNKS)
    for i in range(gl.minimum(count, STAGES)):
        _fetch_weights(weight, boxes, ready, i, row, block, num_blocks, GATED, IN_CHUNKS)
        block += 1
        if block == num_blocks:
            token, row, block = _places(i + 1, work, token_tiles, TOKENS, ROWS, IN_CHUNKS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    token, row, block = _places(0, work, token_tiles, TOKENS, ROWS, IN_CHUNKS)
    for i in range(count):
        if i >= STAGES:
            # Where a stage holds a whole block of x, one barrier frees it and the block of W.
            done = free if HALVES == 1 else x_free
            mbarrier.wait(done.index(i % STAGES), (i // STAGES - 1) & 1)
            _fetch_weights(
                weight, boxes, ready, i % STAGES, row, block, num_blocks, GATED, IN_CHUNKS
            )
        column = block * (2 * _HALF)
        for unit in gl.static_range(UNITS):
            j = i * UNITS + unit
            stage = j % X_STAGES
            mbarrier.wait(x_free.index(stage), (j // X_STAGES + 1) & 1)
            mbarrier.expect(x_ready.index(stage), HALVES * X_BYTES)
            for half in gl.static_range(HALVES):
                place = [token, column + (unit * HALVES + half) * _HALF]
                target = stage * HALVES + half
                fetch_tile(x, place, x_ready.index(stage), x_tiles.index(target))
                if REST:
                    place = [token + WIDE, column + (unit * HALVES + half) * _HALF]
                    fetch_tile(x_rest, place, x_ready.index(stage), rest_tiles.index(target))
        block += 1
        if block == num_blocks:
            token, row, block = _places(i + 1, work, token_tiles, TOKENS, ROWS, IN_CHUNKS)
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
    """Split a tile's sums into gates and ups, of which it has a piece each in turns: they are the
    two rows that a thread has of each instruction."""
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
def _weights(words, factors, zeros, half: gl.constexpr, HOW: gl.constexpr):
    """Half a block of W as DTYPE [rows, HALF], the left operand.

    Args:
        words: of the block; FLOAT8 is still in shared memory.
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
        stored = words.slice(half * _HALF, _HALF, dim=1).load(OPERAND)
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
def _pieces(acc, TOKENS: gl.constexpr):
    """Sums of so many tokens each, as _by_thread has them."""
    if acc.shape[1] == TOKENS:
        found = (_by_thread(acc),)
    else:
        halves = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute((0, 2, 1))
        first, second = gl.split(halves)
        found = _pieces(first, TOKENS) + _pieces(second, TOKENS)
    return found


@gluon.jit
def _by_place(values, ROWS: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """What _by_thread was given."""
    pieces = values.reshape([BM // 8, ROWS // 16, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    return gl.convert_layout(pieces.reshape([ROWS, BM]), LAYOUT)


@gluon.jit
def _scaled(acc, scales, row, num_rows, strides, GATED: gl.constexpr):
    """Sums times the scales of their rows."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows = _own_rows(row, num_rows, acc.shape[0], GATED, BY_ROW)
    total_rows = num_rows * 2 if GATED else num_rows
    sources = scales + (rows // strides[2]) * strides[0]
    factor = gl.load(sources, mask=rows < total_rows, other=0.0)
    return acc * factor.to(gl.float32)[:, None]


@gluon.jit
def _finish_tile(
    acc, outputs, shape, EPILOGUE: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr
):
    bias, out, _, _ = outputs
    if GATED:
        gates, ups = _gates_and_ups(acc)
        finish(gates, ups, bias, out, shape, True, False, EPILOGUE, True, HAS_BIAS)
    else:
        finish(acc, acc, bias, out, shape, True, False, EPILOGUE, False, HAS_BIAS)


@gluon.jit
def _add_parts(
    pieces,
    outputs,
    tile,
    first,
    work,
    per_program,
    shape,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """Leave sums of a shared tile to other programs, and add up what they leave of one's own share.

    Args:
        pieces: sums of TOKENS tokens each (_pieces).
        tile: which one of the shared tiles.
        first: the block with which the program begins.
    """
    _, _, sums, arrivals = outputs
    token, row, num_tokens, num_rows = shape
    num_blocks = work[2]
    NUM: gl.constexpr = len(pieces)
    SIZE: gl.constexpr = ROWS * TOKENS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, TOKENS, 16]
    )
    FLAT: gl.constexpr = _by_thread(gl.zeros([ROWS, TOKENS], gl.float32, LAYOUT)).type.layout
    inner = gl.arange(0, SIZE, layout=FLAT)
    program = gl.program_id(0)
    one = tile * num_blocks // per_program
    other = ((tile + 1) * num_blocks - 1) // per_program
    num_parts = other - one + 1
    # The last program may go on with the next tile: it adds up that one.
    goes_on = (other + 1) * per_program > (tile + 1) * num_blocks
    num_used = gl.minimum(gl.cdiv(num_tokens - token, TOKENS), NUM)
    num_adding = gl.minimum(num_parts - goes_on.to(gl.int32), num_used)
    place = program - one
    begin = num_used
    end = num_used
    if place < num_adding:  # otherwise the program has no share
        begin = place * num_used // num_adding
        end = (place + 1) * num_used // num_adding
    kept = pieces[0]  # the first one of the share: there are no registers for more
    for i in gl.static_range(1, NUM):
        kept = gl.where(begin == i, pieces[i], kept)
    kept = gl.convert_layout(kept, FLAT)
    # A program shares at most two tiles; of one, another program computes the first steps.
    own = 2 * program + (first == 0).to(gl.int32)
    for i in gl.static_range(NUM):
        if (i != begin) & (i < num_used):
            gl.store(sums + (own * NUM + i) * SIZE + inner, gl.convert_layout(pieces[i], FLAT))
    sync_threads()
    seen = gl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") + 1
    if begin < end:
        while seen < num_parts:
            seen = gl.atomic_add(arrivals + tile, 0, sem="acquire", scope="gpu")
    for i in range(begin, end):
        total = gl.zeros([SIZE], gl.float32, FLAT)
        for part in range(one, other + 1, _LOADED):
            loaded = ()
            for j in gl.static_range(_LOADED):
                is_kept = (part + j == program) & (i == begin)
                is_left = (part + j <= other) & (is_kept == 0)
                slot = 2 * (part + j) + (part + j == one).to(gl.int32)
                source = sums + (slot * NUM + i) * SIZE + inner
                values = gl.where(is_kept, kept, 0.0)
                values = gl.load(source, mask=is_left, other=values, cache_modifier=".cg")
                loaded += (values,)  # type: ignore[assignment]
            if (i == begin) & (part == one):
                # The last one to get here has the tile's counter ready for the next product.
                left = gl.atomic_add(arrivals + tile, 1, sem="relaxed", scope="gpu")
                if left == num_parts + num_adding - 1:
                    gl.store(arrivals + tile, 0)
            for j in gl.static_range(_LOADED):
                total += loaded[j]
        acc = _by_place(total, ROWS, TOKENS, LAYOUT)
        share = (token + i * TOKENS, row, num_tokens, num_rows)
        _finish_tile(acc, outputs, share, EPILOGUE, GATED, HAS_BIAS)


@gluon.jit
def _consume(
    buffers,
    factors,
    outputs,
    work,
    per_program,
    sizes,
    strides,
    HOW: gl.constexpr,
    REST: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    x_tiles, rest_tiles, tiles, x_ready, x_free, ready, free = buffers
    scales, zeros = factors
    begin, end, num_blocks, num_whole, first_shared = work
    num_tokens, num_rows, token_tiles = sizes
    X_STAGES: gl.constexpr = x_ready.shape[0]
    HALVES: gl.constexpr = x_tiles.shape[0] // X_STAGES
    UNITS: gl.constexpr = 2 // HALVES
    WIDE: gl.constexpr = x_tiles.shape[1]
    BM: gl.constexpr = WIDE + REST
    STAGES: gl.constexpr = tiles.shape[0]
    ROWS: gl.constexpr = tiles.shape[1]
    LAYOUT: gl.constexpr = HOW[5]
    REST_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, REST or WIDE, 16]
    )
    SCALE: gl.constexpr = HOW[2]
    HAS_ZEROS: gl.constexpr = HOW[3]
    PARTS: gl.constexpr = HOW[4]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, k_width=2)
    REST_OPERAND: gl.constexpr = gl.DotOperandLayout(0, REST_LAYOUT, k_width=2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OPERAND)
    BN: gl.constexpr = ROWS // 2 if GATED else ROWS
    total_rows = num_rows * 2 if GATED else num_rows
    TOKENS: gl.constexpr = _PIECE_SUMS // ROWS
    first_tile = begin // num_blocks
    num_shared = gl.cdiv(end, num_blocks) - first_tile  # of which the program has steps
    done = 0  # steps
    for item in range(num_whole + num_shared):
        shared_tile = first_tile + item - num_whole
        tile = gl.program_id(0) + item * gl.num_programs(0)
        first = 0
        last = num_blocks
        if item >= num_whole:
            tile = first_shared + shared_tile
            first = gl.maximum(begin - shared_tile * num_blocks, 0)
            last = gl.minimum(end - shared_tile * num_blocks, num_blocks)
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
        acc = gl.zeros([ROWS, WIDE], gl.float32, LAYOUT)
        rest = gl.zeros([ROWS, REST or WIDE], gl.float32, REST_LAYOUT)
        ws_before = gl.zeros([ROWS, _HALF], HOW[1], OPERAND)
        for block in range(first, last):
            step = done + block - first
            stage = step % STAGES
            following = gl.minimum(block + 1, num_blocks - 1)
            next_scales = block_scales
            next_zeros = block_zeros
            if SCALE == _SCALE_WEIGHTS:
                next_scales = _of_groups(scales, own, inside, following, strides, PARTS)
            if HAS_ZEROS:
                next_zeros = _of_groups(zeros, own, inside, following, strides, PARTS)
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            words = tiles.index(stage)
            if HOW[0] != _FLOAT8:
                words = words.load(OPERAND)
            for half in gl.static_range(2):
                ws = _weights(words, block_scales, block_zeros, half, HOW)
                unit = step * UNITS + half // HALVES
                x_stage = unit % X_STAGES
                if half % HALVES == 0:
                    mbarrier.wait(x_ready.index(x_stage), (unit // X_STAGES) & 1)
                place = x_stage * HALVES + half % HALVES
                xs = x_tiles.index(place).permute((1, 0))
                acc = warpgroup_mma(ws, xs, acc, is_async=True)
                # The half before is done: its inputs and its registers may be overwritten, which
                # the compiler must not do earlier, and so is told that they are needed here.
                if REST:
                    rest_ws = gl.convert_layout(ws, REST_OPERAND)
                    rest_xs = rest_tiles.index(place).permute((1, 0))
                    rest = warpgroup_mma(rest_ws, rest_xs, rest, is_async=True)
                    acc, rest, ws_before = warpgroup_mma_wait(2, deps=[acc, rest, ws_before])
                else:
                    acc, ws_before = warpgroup_mma_wait(1, deps=[acc, ws_before])
                ws_before = ws
                if half % HALVES == 0:
                    before = (unit + X_STAGES - 1) % X_STAGES
                    is_later = (block > first) | (half > 0)
                    mbarrier.arrive(x_free.index(before), count=1, pred=is_later)
                if (half == 0) & (HALVES == 1):
                    before = (step + STAGES - 1) % STAGES
                    mbarrier.arrive(free.index(before), count=1, pred=block > first)
            block_scales = next_scales
            block_zeros = next_zeros
        if REST:
            rest = warpgroup_mma_wait(0, deps=[rest])
        acc, ws_before = warpgroup_mma_wait(0, deps=[acc, ws_before])
        done += last - first
        mbarrier.arrive(x_free.index((done * UNITS - 1) % X_STAGES), count=1)
        if HALVES == 1:
            mbarrier.arrive(free.index((done - 1) % STAGES), count=1)
        if PDL:
            tl.extra.cuda.gdc_wait()
        if SCALE == _SCALE_RESULT:
            acc = _scaled(acc, scales, row, num_rows, strides, GATED)
            if REST:
                rest = _scaled(rest, scales, row, num_rows, strides, GATED)
        shape = (token, row, num_tokens, num_rows)
        if last - first < num_blocks:
            pieces = _pieces(acc, TOKENS)
            if REST:
                pieces += _pieces(rest, TOKENS)
            _add_parts(
                pieces,
                outputs,
                shared_tile,
                first,
                work,
                per_program,
                shape,
                ROWS,
                TOKENS,
                EPILOGUE,
                GATED,
                HAS_BIAS,
            )
        else:
            _finish_tile(acc, outputs, shape, EPILOGUE, GATED, HAS_BIAS)
            if REST:
                shape = (token + WIDE, row, num_tokens, num_rows)
                _finish_tile(rest, outputs, shape, EPILOGUE, GATED, HAS_BIAS)


@gluon.jit(do_not_specialize=["num_tokens", "num_whole", "num_shared", "per_program"])
def persistent_linear_kernel(
    x,
    x_rest,
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
    num_whole,
    num_shared,
    per_program,
    stride_row,
    stride_group,
    block_rows,
    group_blocks,
    REST: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    HALVES: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    PARTS: gl.constexpr,
    UNPACK_LOW: gl.constexpr,
    UNPACK_HIGH: gl.constexpr,
    TILE: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_tokens, num_rows].

    Arguments are those of linear_hopper_quantized.py's kernel, but for:
        x, x_rest: descriptors of half a block of inputs, for the first tokens of a tile, a power of
            two, and for the REST that follow them.
        sums: float32 workspace for two tiles of each program.
        arrivals: int32, 0 for every shared tile before and after the kernel.
        num_whole: tiles that are computed as a whole.
        num_shared: tiles after them, which programs share.
        per_program: steps of them that a program computes.
        group_blocks: blocks that share scales; 1 if a block has several groups.
        weight: descriptor of W's rows, or of chunks of rows; with a gate of W as [pieces, 2, PIECE,
            inputs], of which a block is a tile.
        ROWS: of W in a tile; with a gate PIECE gates, PIECE rows that they gate, and so on.
        TILE: the layout of a tile of W in shared memory.
        HALVES: of a block of x, in one of X_STAGES. With both, STAGES are as many.
        UNPACK_LOW, UNPACK_HIGH: `unpacking` of both words, for integers.
    """
    WIDTH: gl.constexpr = weight.block_type.shape[len(weight.block_type.shape) - 1]
    BOXES: gl.constexpr = 1 if GATED else ROWS // weight.block_type.shape[0]
    WIDE: gl.constexpr = x.block_type.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, WIDE, 16]
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
    SHAPE: gl.constexpr = [STAGES * BOXES] + list(weight.block_type.shape)  # noqa: RUF005
    boxes = gl.allocate_shared_memory(weight.dtype, SHAPE, weight.layout)
    tiles = reinterpreted(boxes, [STAGES, ROWS, WIDTH], TILE)
    x_tiles = gl.allocate_shared_memory(x.dtype, [X_STAGES * HALVES, WIDE, _HALF], x.layout)
    rest_tiles = x_tiles
    if REST:
        rest_tiles = gl.allocate_shared_memory(
            x.dtype, [X_STAGES * HALVES, REST, _HALF], x_rest.layout
        )
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
    num_shared_steps = num_shared * num_blocks
    begin = gl.minimum(gl.program_id(0) * per_program, num_shared_steps)
    end = gl.minimum(begin + per_program, num_shared_steps)
    own_whole = gl.maximum(gl.cdiv(num_whole - gl.program_id(0), gl.num_programs(0)), 0)
    work = (begin, end, num_blocks, own_whole, num_whole)
    sizes = (num_tokens, num_rows, gl.cdiv(num_tokens, WIDE + REST))
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    (x_tiles, rest_tiles, tiles, x_ready, x_free, ready, free),
                    (scales, zeros),
                    (bias, out, sums, arrivals),
                    work,
                    per_program,
                    sizes,
                    (stride_row, stride_group, block_rows, group_blocks),
                    HOW,
                    REST,
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
                    x_rest,
                    weight,
                    (x_tiles, rest_tiles, boxes, x_ready, x_free, ready, free),
                    work,
                    sizes[2],
                    REST,
                    ROWS // 2 if GATED else ROWS,
                    GATED,
                    FORMAT == _INT4,
                    PDL,
                ),
            ),
        ],
        [1],
        [24],
    )
