"""Attention of prompts and their chunks on Hopper GPUs, with heads of 64, 128 or 256 elements.

Work items are those of attention_prefill.py, of 128 rows; the kernel there computes whatever this
one does not. As in FlashAttention-3 (Shah et al., 2024, sections 3.1 and 3.2), partitions of a
program load, and two warpgroups compute 64 rows each. A warpgroup multiplies queries by a tile of
keys, and, while it is at the softmax of their scores, the weights of the tile before by its values.
When one of them waits for its products, the other one's are multiplied.

Keys and values come from the blocks by TMA: 64 elements of all tokens of a block at once. To TMA
the cache is a matrix, whose rows are the keys or values of one token and head, and a block is a box
of it. Boxes lie in shared memory one below the other, and together are a tile as wgmma reads it.

There is a program for each SM, which claims one unit after the other: an item for one KV head. Its
next unit's queries and first keys are on their way while it computes one, and their products are
under way when it stores results. (Of heads of 256, one unit's queries find room: the next ones come
once it has all its scores.) Units with the most keys come first, of a few heads at a time,
whose keys then stay in the L2 cache.
"""

from __future__ import annotations

from functools import cache

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

from octavo.ops.cuda.attention_scores import TANH
from octavo.ops.cuda.claims import claimed, make_claims, next_number, tell
from octavo.ops.cuda.devices import num_sms
from octavo.ops.cuda.hopper import (
    copy_async,
    fetch_tile,
    reinterpreted,
    swizzled_descriptor,
    sync_threads,
)
from octavo.ops.cuda.paged import LOWEST, PREFILL_FIELDS
from octavo.ops.cuda.pdl import launch_options

ROWS = 128  # of an item
_OWN_ROWS = tl.constexpr(ROWS // 2)  # of each warpgroup that computes
_COLUMNS = tl.constexpr(64)  # elements of a box: 128 bytes, over which shared memory is swizzled
_SWIZZLE = 128  # bytes
_FIELDS = tl.constexpr(PREFILL_FIELDS)
_LOWEST = tl.constexpr(LOWEST.value)
_LEAST_BOX = 8  # keys: rows of shared memory that are swizzled together
_FEW = tl.constexpr(16)  # rows of queries or values that a single warp has at once
_SLOTS = tl.constexpr(4)  # units that are told before they are begun: two at most
_ALIGNED = 16  # elements and bytes
_MOST_HEADS = 8  # KV heads whose items are computed at the same time
_HEAD_DIMS = (64, 128, 256)
_LEAST_WINDOW = 16_384  # elements of its keys, below which programs wait more than they compute
_ROOM = 32_768  # elements of keys, and as many of values, that find room in shared memory
_QUERIES = 32_768  # elements of queries that do
# Registers of a thread: at launch, of partitions that compute, and of those that load.
_REGISTERS, _COMPUTING_REGISTERS, _LOADING_REGISTERS = 168, 232, 48

# While the tensor cores are busy, a scheduler issues an instruction every three cycles, so their
# number counts. A seventh of them, and of heads of 256 a third, would multiply results because a
# larger score was found. As in FlashAttention-4, weights are relative to the largest score only
# until one of a warp's 16 rows has a score that exceeds it by more than 8, in powers of two; they
# are at most 2^8, and only then are the warp's results multiplied.
_EXCEEDS = tl.constexpr("""{
.reg .pred exceeds;
.reg .f32 first, second;
sub.f32 first, $2, $4;
sub.f32 second, $3, $5;
max.f32 first, first, second;
setp.gt.f32 exceeds, first, 0f41000000;
vote.sync.any.pred exceeds, exceeds, 0xffffffff;
selp.b32 $0, 1, 0, exceeds;
mov.b32 $1, $0;
}""")
_LEAST_LAZY = tl.constexpr(64)  # elements of a head, more than which are worth a test
_TOGETHER = tl.constexpr(32)  # results of a thread that are multiplied after one test


def _multiply(count: int) -> str:
    """So many results of a thread times their rows' factors, unless all of a warp's are 1. A
    thread's first two results are of one of its two rows, the next two of the other one."""
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};\n" for i in range(count))
    return f"""{{
.reg .pred differs;
setp.ne.f32 differs, ${2 * count}, 0f3F800000;
setp.ne.or.f32 differs, ${2 * count + 2}, 0f3F800000, differs;
vote.sync.any.pred differs, differs, 0xffffffff;
@!differs bra done;
{products}done:
}}"""


def _places(count: int) -> str:
    """Of results, of the same registers as arguments, and of factors."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


_MULTIPLY = tl.constexpr(_multiply(_TOGETHER.value))
_PLACES = tl.constexpr(_places(_TOGETHER.value))


@cache
def takes(
    dtype: torch.dtype, head_dim: int, group: int, block_size: int, window: int | None
) -> bool:
    """Whether the kernel computes attention over a cache of the queries' own dtype, on a Hopper
    GPU.

    group: query heads per KV head.
    """
    if window is not None and window * head_dim < _LEAST_WINDOW:
        return False
    is_box = block_size >= _LEAST_BOX and block_size & (block_size - 1) == 0
    is_head = head_dim in _HEAD_DIMS
    return dtype in (torch.float16, torch.bfloat16) and is_head and group <= ROWS and is_box


@cache
def _progress(device: torch.device) -> Tensor:
    """How many programs have ended, and how many units were claimed; 0 between launches. For one
    stream."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run a step before capturing it"
    return torch.zeros(2, dtype=torch.int32, device=device)


def attend_on_hopper(
    query: Tensor,
    layer_cache: Tensor,
    table: Tensor,
    items: Tensor,
    output: Tensor,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
    window: int | None,
    tile: int,
    is_causal: bool,
    value_scale: float = 1.0,
) -> None:
    """See prefill_attention, of what `takes` says.

    Args:
        output: [num_tokens, num_heads * head_dim], tokens strided by a multiple of 16 elements.
        scale, cap, sinks: of KernelScores.
        tile: keys at once, 64 or 128.
        value_scale: what results are multiplied by.
    """
    num_heads, head_dim = query.shape[1:]
    num_blocks, num_kv_heads, _, block_size, _ = layer_cache.shape
    block_stride = layer_cache.stride(0)
    assert block_stride % head_dim == 0, "blocks are whole rows of a head apart"
    block_rows = block_stride // head_dim
    num_rows = (num_blocks - 1) * block_rows + 2 * num_kv_heads * block_size
    assert num_rows < 1 << 31, "rows are numbered by int32"
    rows = layer_cache.as_strided((num_rows, head_dim), (head_dim, 1))
    box = [min(block_size, tile), _COLUMNS.value]
    num_items = len(items) // PREFILL_FIELDS
    if not num_items:
        return
    if query.stride(0) % _ALIGNED or query.data_ptr() % _ALIGNED:  # 16 bytes are copied at once
        query = query.contiguous()
    # Each program has a first unit.
    prefill_hopper_kernel[(min(num_sms(query.device), num_items * num_kv_heads),)](
        query,
        swizzled_descriptor(rows, box, _SWIZZLE),
        table,
        items,
        sinks,
        output,
        _progress(query.device),
        query.stride(0),
        table.stride(0),
        block_rows,
        scale if cap is None else cap,
        None if cap is None else scale,
        value_scale,
        num_items,
        ROW_SIZE=output.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=tile,
        STAGES=_ROOM // (tile * head_dim),
        BUFFERS=min(_QUERIES // (ROWS * head_dim), 2),
        HEADS=next(n for n in range(_MOST_HEADS, 0, -1) if num_kv_heads % n == 0),
        WINDOW=window or 0,
        CAUSAL=is_causal,
        COMPUTING_REGISTERS=_COMPUTING_REGISTERS,
        LOADING_REGISTERS=_LOADING_REGISTERS,
        num_warps=4,
        maxnreg=_REGISTERS,
        **launch_options(query.device),
    )


@gluon.jit
def _read_unit(items, number, num_items, NUM_KV_HEADS: gl.constexpr, HEADS: gl.constexpr):
    """Whether there is a unit of this number, its KV head, and the fields of its item: the first
    token, the table row, the first key, the end of the keys, the first token's position, the number
    of tokens, and the end of the sequence's keys."""
    is_there = number < num_items * NUM_KV_HEADS
    some_heads = number // (HEADS * num_items)
    within = number % (HEADS * num_items)
    head = some_heads * HEADS + within % HEADS
    item = items + gl.where(is_there, within // HEADS, 0) * _FIELDS
    return (
        is_there,
        head,
        gl.load(item),
        gl.load(item + 1),
        gl.load(item + 2),
        gl.load(item + 4),
        gl.load(item + 5),
        gl.load(item + 6),
        gl.load(item + 7),
    )


@gluon.jit
def _num_tiles(begin, end, TILE: gl.constexpr):
    """The number of a unit's tiles. An item without tokens has one, too."""
    return gl.maximum(gl.cdiv(end - begin, TILE), 1)


@gluon.jit
def _tell(claims, taken, turn, number):
    """Tell the partition that loads queries the unit of a turn, by a single warp, once it has taken
    the number that was in the same slot."""
    mbarrier.wait(taken.index(turn % _SLOTS), (turn // _SLOTS + 1) & 1)
    tell(claims, turn, number)


@gluon.jit
def _take(claims, taken, turn):
    """Wait for the unit of a turn, and free its slot."""
    number = claimed(claims, turn)
    sync_threads()
    mbarrier.arrive(taken.index(turn % _SLOTS), count=1)
    return number


@gluon.jit
def _box_rows(
    table,
    first,
    written,
    block_rows,
    BLOCK_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    BOXES: gl.constexpr,
):
    """Where the boxes of a tile of keys begin, in rows of the cache, in a lane each; those behind
    the sequence's end are boxes of the null block."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    key = first + lane * BOX
    is_box = (lane < BOXES) & (key < written)
    blocks = gl.load(table + key // BLOCK_SIZE, mask=is_box, other=0)
    return blocks * block_rows + key % BLOCK_SIZE


@gluon.jit
def _fetch_boxes(cache, rows, of_head, boxes, stage, bar, BOXES: gl.constexpr, PARTS: gl.constexpr):
    """Have a tile of keys or values on its way.

    of_head: from a block's first row to the head's first one, of its keys or values.
    """
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    for box in gl.static_range(BOXES):
        row = gl.max(gl.where(lane == box, rows, 0), 0) + of_head
        for part in gl.static_range(PARTS):
            target = boxes.index((stage * PARTS + part) * BOXES + box)
            fetch_tile(cache, [row, part * _COLUMNS], bar, target)


@gluon.jit
def _clear_behind(boxes, stage, first, written, TILE: gl.constexpr, PARTS: gl.constexpr):
    """Make values behind the end of a sequence 0: what was never written may be NaN, which a weight
    of 0 does not remove. By a single warp."""
    FEW: gl.constexpr = boxes.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    own = gl.arange(0, FEW, layout=gl.SliceLayout(1, LAYOUT))
    for i in range((written - first) // FEW, TILE // FEW):
        is_key = first + i * FEW + own < written
        for part in gl.static_range(PARTS):
            few = boxes.index((stage * PARTS + part) * (TILE // FEW) + i)
            values = few.load(LAYOUT)
            few.store(gl.where(is_key[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    sync_threads()


@gluon.jit
def _fetch(
    cache,
    table,
    items,
    num_items,
    progress,
    table_stride,
    block_rows,
    boxes,
    barriers,
    claims,
    taken,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    HEADS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads keys and values, a single warp. It claims units two turns
    ahead, so that it never waits for a number."""
    key_boxes, value_boxes, few_values = boxes
    keys_ready, keys_free, values_ready, values_free, last_ready = barriers
    STAGES: gl.constexpr = keys_ready.shape[0]
    BOX: gl.constexpr = key_boxes.shape[1]
    BOXES: gl.constexpr = TILE // BOX
    PARTS: gl.constexpr = HEAD_DIM // _COLUMNS
    BYTES: gl.constexpr = TILE * HEAD_DIM * 2
    if PDL:
        tl.extra.cuda.gdc_wait()
    num_programs = gl.num_programs(0)
    step = gl.to_tensor(0)
    num_cleared = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    # The program whose first unit is the longest has the shortest second one.
    following = 2 * num_programs - 1 - number
    _tell(claims, taken, turn, number)
    _tell(claims, taken, turn + 1, following)
    unit = _read_unit(items, number, num_items, NUM_KV_HEADS, HEADS)
    is_there, head, _token, row, begin, end, _position, _count, written = unit
    while is_there:
        claimed_next = next_number(progress + 1)
        unit = _read_unit(items, following, num_items, NUM_KV_HEADS, HEADS)
        own_table = table + row.to(gl.int64) * table_stride
        of_keys = head * (2 * BLOCK_SIZE)
        of_values = of_keys + BLOCK_SIZE
        rows = _box_rows(own_table, begin, written, block_rows, BLOCK_SIZE, BOX, BOXES)
        for i in range(_num_tiles(begin, end, TILE)):
            first = begin + i * TILE
            # A tile ahead, so that loading keys never waits for the table.
            next_rows = _box_rows(
                own_table, first + TILE, written, block_rows, BLOCK_SIZE, BOX, BOXES
            )
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(keys_free.index(stage), 1 - phase)
            mbarrier.expect(keys_ready.index(stage), BYTES)
            _fetch_boxes(
                cache, rows, of_keys, key_boxes, stage, keys_ready.index(stage), BOXES, PARTS
            )
            mbarrier.wait(values_free.index(stage), 1 - phase)
            if first + TILE <= written:
                mbarrier.expect(values_ready.index(stage), BYTES)
                _fetch_boxes(
                    cache,
                    rows,
                    of_values,
                    value_boxes,
                    stage,
                    values_ready.index(stage),
                    BOXES,
                    PARTS,
                )
            else:
                mbarrier.expect(last_ready.index(0), BYTES)
                _fetch_boxes(
                    cache, rows, of_values, value_boxes, stage, last_ready.index(0), BOXES, PARTS
                )
                mbarrier.wait(last_ready.index(0), num_cleared & 1)
                num_cleared += 1
                _clear_behind(few_values, stage, first, written, TILE, PARTS)
                mbarrier.arrive(values_ready.index(stage), count=1)
            rows = next_rows
            step += 1
        following = 2 * num_programs + gl.sum(claimed_next, 0)
        _tell(claims, taken, turn + 2, following)
        turn += 1
        is_there, head, _token, row, begin, end, _position, _count, written = unit
    # The last program has the counters ready for the next launch, when all have claimed.
    if gl.atomic_add(progress, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        gl.store(progress, 0)
        gl.store(progress + 1, 0)


@gluon.jit
def _copy_queries(
    query,
    items,
    num_items,
    query_stride,
    boxes,
    fields,
    queries_ready,
    queries_free,
    claims,
    taken,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEADS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads queries, a single warp, and what the others need of a unit."""
    BUFFERS: gl.constexpr = queries_ready.shape[0]
    PARTS: gl.constexpr = HEAD_DIM // _COLUMNS
    COPIES: gl.constexpr = 2 * _OWN_ROWS // _FEW  # of both ways' rows
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    own = gl.arange(0, _FEW, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    if PDL:
        tl.extra.cuda.gdc_wait()
    turn = gl.to_tensor(0)
    is_there = turn == 0
    while is_there:
        number = _take(claims, taken, turn)
        unit = _read_unit(items, number, num_items, NUM_KV_HEADS, HEADS)
        is_there, head, token, _row, begin, end, position, count, _written = unit
        buffer = turn % BUFFERS
        mbarrier.wait(queries_free.index(buffer), (turn // BUFFERS + 1) & 1)
        num_rows = gl.where(is_there, count * GROUP, 0)
        for i in range(gl.where(is_there, COPIES, 0)):
            row = i * _FEW + own
            place = (token + row // GROUP).to(gl.int64) * query_stride
            place += (head * GROUP + row % GROUP) * HEAD_DIM
            inside = (row < num_rows)[:, None] & (column < _COLUMNS)[None, :]
            for part in gl.static_range(PARTS):
                way = 2 * buffer + i // (COPIES // 2)
                target = boxes.index((way * PARTS + part) * (COPIES // 2) + i % (COPIES // 2))
                source = query + place[:, None] + (part * _COLUMNS + column)[None, :]
                copy_async(target, source, mask=inside)
        async_copy.mbarrier_arrive(queries_ready.index(buffer), increment_count=False)
        _put(fields, buffer, 0, is_there.to(gl.int32))
        _put(fields, buffer, 1, head)
        _put(fields, buffer, 2, token)
        _put(fields, buffer, 3, begin)
        _put(fields, buffer, 4, end)
        _put(fields, buffer, 5, position)
        _put(fields, buffer, 6, count)
        sync_threads()
        mbarrier.arrive(queries_ready.index(buffer), count=1)
        turn += 1


@gluon.jit
def _put(fields, buffer, i, value):
    """Leave a number, by a single warp."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    fields.index(buffer * _FIELDS + i).store(gl.zeros([1], gl.int32, ONE) + value)


@gluon.jit
def _got(fields, buffer, i):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(fields.index(buffer * _FIELDS + i).load(ONE), 0)


@gluon.jit
def _next_unit(fields, queries_ready, turn):
    """What `_copy_queries` has found of a turn's unit, when its queries are there."""
    BUFFERS: gl.constexpr = queries_ready.shape[0]
    buffer = turn % BUFFERS
    mbarrier.wait(queries_ready.index(buffer), (turn // BUFFERS) & 1)
    fence_async_shared()  # copies, unlike those by TMA, need it
    return (
        _got(fields, buffer, 0) > 0,
        _got(fields, buffer, 1),
        _got(fields, buffer, 2),
        _got(fields, buffer, 3),
        _got(fields, buffer, 4),
        _got(fields, buffer, 5),
        _got(fields, buffer, 6),
    )


@gluon.jit
def _capped(products, inner):
    """Dot products -> scores without their scale, which waits for the exponent."""
    scores = products
    if inner is not None:
        scores = gl.inline_asm_elementwise(
            TANH, "=f,f", [scores * inner], dtype=gl.float32, is_pure=True, pack=1
        )
    return scores


@gluon.jit
def _masked(scores, first, position, last, WINDOW: gl.constexpr):
    """Scores of a tile, whose first key is `first`, without the keys that a row does not see.

    position, last: of each row, where its query is, and the last key that it may see.
    """
    key = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
    # Else the compiler compares while products are on their way, and packs what it has found into
    # words, because there are not as many predicates.
    is_visible = key[None, :] <= _in_order(last - first)[:, None]
    if WINDOW > 0:
        is_visible = is_visible & (key[None, :] > _in_order(position - WINDOW - first)[:, None])
    return gl.where(is_visible, scores, -float("inf"))


@gluon.jit
def _weights(scores, top, total, scale, IS_LAZY: gl.constexpr):
    """A tile's weights, before they are divided by their sum, in the online softmax: with the score
    that each row's weights are relative to, their sum, and what earlier weights are to be
    multiplied by."""
    found = gl.max(scores, 1) * scale
    new_top = gl.maximum(top, found)
    if IS_LAZY:
        exceeds = gl.inline_asm_elementwise(
            _EXCEEDS, "=r,=r,f,f,f,f", [found, top], dtype=gl.int32, is_pure=True, pack=2
        )
        new_top = gl.where(exceeds > 0, new_top, top)
    weights = gl.exp2(scores * scale - new_top[:, None])
    decay = gl.exp2(top - new_top)
    return weights, new_top, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def _multiplied(acc, factor):
    """Results, each row times its factor, if a warp has one that is not 1."""
    factor, acc = gl.broadcast(factor, acc)
    return gl.inline_asm_elementwise(
        _MULTIPLY, _PLACES, [acc, factor], dtype=gl.float32, is_pure=True, pack=_TOGETHER
    )


@gluon.jit
def _in_order(bits):
    """The same int32 numbers. The compiler computes from them after the waits before this, and has
    computed them before the branches after it."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [bits], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _add_tiles(
    state,
    queries,
    tiles,
    barriers,
    step,
    place,
    start,
    stop,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Add tiles start .. stop - 1 to the rows' online softmax.

    Args:
        state: results without the tile before `start`, that tile's weights, and the scores and
            sums of `_weights`.
        step: number of the unit's first tile, of all that the program has had.
        place: `scale` and `inner` of the kernel, the unit's first key, and `position` and `last` of
            `_masked`.
    """
    key_tiles, value_tiles = tiles
    keys_ready, keys_free, values_ready, values_free, _last_ready = barriers
    acc, weights, top, total = state
    scale, inner, begin, position, last = place
    STAGES: gl.constexpr = keys_ready.shape[0]
    TILE: gl.constexpr = key_tiles.shape[1]
    IS_LAZY: gl.constexpr = key_tiles.shape[2] > _LEAST_LAZY
    LEFT: gl.constexpr = weights.type.layout
    SUMS: gl.constexpr = acc.type.layout
    none = _no_scores(TILE)
    for i in range(start, stop):
        stage = (step + i) % STAGES
        before = (step + i - 1) % STAGES
        mbarrier.wait(keys_ready.index(stage), ((step + i) // STAGES) & 1)
        keys = key_tiles.index(stage).permute((1, 0))
        scores = warpgroup_mma(queries, keys, none, use_acc=False, is_async=True)
        mbarrier.wait(values_ready.index(before), ((step + i - 1) // STAGES) & 1)
        acc = warpgroup_mma(weights, value_tiles.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        sync_threads()
        mbarrier.arrive(keys_free.index(stage), count=1)
        scores = _capped(scores, inner)
        if MASKED:
            scores = _masked(scores, begin + i * TILE, position, last, WINDOW)
        found, top, total, decay = _weights(scores, top, total, scale, IS_LAZY)
        # The compiler would wait for the products first, and have nothing multiplied while weights
        # are computed. It moves nothing across this wait, which has ended.
        found = _in_order(found.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
        mbarrier.wait(values_ready.index(before), ((step + i - 1) // STAGES) & 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        sync_threads()
        mbarrier.arrive(values_free.index(before), count=1)
        weights = gl.convert_layout(found.to(weights.dtype), LEFT)
        decay = gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
        acc = _multiplied(acc, decay) if IS_LAZY else acc * decay
    return acc, weights, top, total


@gluon.jit
def _no_scores(TILE: gl.constexpr):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16]
    )
    return gl.zeros([_OWN_ROWS, TILE], gl.float32, SCORES)


@gluon.jit
def _attend(
    shared,
    way: gl.constexpr,
    ROW_SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """A partition that computes; `shared` is what both have."""
    output, sinks, query_tiles, fields, tiles, query_barriers, barriers, numbers = shared
    scale, inner, value_scale = numbers
    key_tiles, value_tiles = tiles
    keys_ready, keys_free, values_ready, values_free, _last_ready = barriers
    queries_ready, queries_free = query_barriers
    STAGES: gl.constexpr = keys_ready.shape[0]
    BUFFERS: gl.constexpr = queries_ready.shape[0]
    TILE: gl.constexpr = key_tiles.shape[1]
    HEAD_DIM: gl.constexpr = key_tiles.shape[2]
    DTYPE: gl.constexpr = key_tiles.dtype
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, k_width=2)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    none = _no_scores(TILE)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, none.type.layout)
    own = way * _OWN_ROWS + gl.arange(0, _OWN_ROWS, layout=BY_ROW)
    step = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    # A program has a first unit.
    _there, head, token, begin, end, position, count = _next_unit(fields, queries_ready, turn)
    is_there = turn == 0
    mbarrier.wait(keys_ready.index(0), 0)
    keys = key_tiles.index(0).permute((1, 0))
    scores = warpgroup_mma(query_tiles.index(way), keys, none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    sync_threads()
    mbarrier.arrive(keys_free.index(0), count=1)
    while is_there:
        buffer = turn % BUFFERS
        queries = query_tiles.index(2 * buffer + way)
        num_tiles = _num_tiles(begin, end, TILE)
        positions = position + own // GROUP
        last = positions
        seen_by_all = position + 1
        if not CAUSAL:
            last = gl.zeros_like(own) + (end - 1)
            seen_by_all = end
        top = gl.full([_OWN_ROWS], _LOWEST, gl.float32, BY_ROW)
        total = gl.zeros([_OWN_ROWS], gl.float32, BY_ROW)
        if sinks is not None:
            top = gl.maximum(gl.load(sinks + head * GROUP + own % GROUP), _LOWEST)
            total = total + 1.0
        stop = gl.minimum((seen_by_all - begin) // TILE, num_tiles)
        scores = _capped(scores, inner)
        if (stop < 1) | (WINDOW > 0):
            scores = _masked(scores, begin, positions, last, WINDOW)
        found, top, total, _decay = _weights(scores, top, total, scale, False)
        acc = gl.zeros([_OWN_ROWS, HEAD_DIM], gl.float32, SUMS)
        state = (acc, gl.convert_layout(found.to(DTYPE), LEFT), top, total)
        place = (scale, inner, begin, positions, last)
        start = gl.to_tensor(1)
        if WINDOW > 0:
            # Up to the first key that is in the window of all rows.
            inside = gl.maximum(position + count - WINDOW - begin, 0)
            behind = gl.minimum(gl.cdiv(inside, TILE), num_tiles)
            state = _add_tiles(
                state, queries, tiles, barriers, step, place, start, behind, True, WINDOW
            )
            start = gl.maximum(start, behind)
        state = _add_tiles(state, queries, tiles, barriers, step, place, start, stop, False, WINDOW)
        start = gl.maximum(start, stop)
        state = _add_tiles(
            state, queries, tiles, barriers, step, place, start, num_tiles, True, WINDOW
        )
        acc, weights, top, total = state
        sync_threads()
        mbarrier.arrive(queries_free.index(buffer), count=1)
        # With the last values, the next unit's queries are multiplied by its first keys; if there
        # is none, by anything.
        step += num_tiles
        turn += 1
        last_stage = (step - 1) % STAGES
        mbarrier.wait(values_ready.index(last_stage), ((step - 1) // STAGES) & 1)
        acc = warpgroup_mma(weights, value_tiles.index(last_stage), acc, is_async=True)
        unit = _next_unit(fields, queries_ready, turn)
        next_there, next_head, next_token, next_begin, next_end, next_position, next_count = unit
        stage = step % STAGES
        mbarrier.wait(keys_ready.index(stage), (step // STAGES) & 1, pred=next_there)
        queries = query_tiles.index(2 * (turn % BUFFERS) + way)
        keys = key_tiles.index(stage).permute((1, 0))
        scores = warpgroup_mma(queries, keys, none, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        sync_threads()
        mbarrier.arrive(values_free.index(last_stage), count=1)
        total = gl.where(total == 0.0, 1.0, total)  # of rows behind the last token
        acc = acc * gl.convert_layout(value_scale / total, gl.SliceLayout(1, SUMS))[:, None]
        result = gl.convert_layout(acc.to(DTYPE), STORE)
        row = way * _OWN_ROWS + gl.arange(0, _OWN_ROWS, layout=gl.SliceLayout(1, STORE))
        column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, STORE))
        target = (token + row // GROUP).to(gl.int64) * ROW_SIZE
        target += (head * GROUP + row % GROUP) * HEAD_DIM
        inside = (row < count * GROUP)[:, None] & (column < HEAD_DIM)[None, :]
        gl.store(output + target[:, None] + column[None, :], result, mask=inside)
        scores = warpgroup_mma_wait(0, deps=[scores])
        sync_threads()
        mbarrier.arrive(keys_free.index(stage), count=1, pred=next_there)
        is_there = next_there
        head = next_head
        token = next_token
        begin = next_begin
        end = next_end
        position = next_position
        count = next_count


@gluon.jit(do_not_specialize=["table_stride", "num_items"])
def prefill_hopper_kernel(
    query,
    cache,
    table,
    items,
    sinks,
    output,
    progress,
    query_stride,
    table_stride,
    block_rows,
    scale,
    inner,
    value_scale,
    num_items,
    ROW_SIZE: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    HEADS: gl.constexpr,
    WINDOW: gl.constexpr,
    CAUSAL: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    """See the top of this file, and `prefill_attention`.

    Args:
        cache: descriptor of boxes of [num_rows, HEAD_DIM]: of each block `block_rows` rows, of
            which the first ones are keys and values of the layer's heads.
        progress: see _progress.
        scale, inner: of scores to powers of 2, and of products to the argument of tanh; None: there
            is no cap.
        value_scale: what results are multiplied by.
        ROW_SIZE: elements from one token's results to the next one's.
        STAGES: tiles of keys, and of values, that are loaded ahead.
        BUFFERS: units whose queries are.
        HEADS: KV heads whose items are computed at the same time.
    """
    BOX: gl.constexpr = cache.block_type.shape[0]
    NUM: gl.constexpr = STAGES * (HEAD_DIM // _COLUMNS) * (TILE // BOX)
    FEW: gl.constexpr = min(BOX, _FEW)
    WHOLE: gl.constexpr = cache.layout
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    key_boxes = gl.allocate_shared_memory(cache.dtype, [NUM, BOX, _COLUMNS], WHOLE)
    value_boxes = gl.allocate_shared_memory(cache.dtype, [NUM, BOX, _COLUMNS], WHOLE)
    few_values = reinterpreted(value_boxes, [NUM * BOX // FEW, FEW, _COLUMNS], WHOLE)
    key_tiles = reinterpreted(key_boxes, [STAGES, TILE, HEAD_DIM], WHOLE)
    value_tiles = reinterpreted(value_boxes, [STAGES, TILE, HEAD_DIM], WHOLE)
    QUERIES: gl.constexpr = 2 * BUFFERS
    FEW_QUERIES: gl.constexpr = QUERIES * HEAD_DIM * _OWN_ROWS // (_COLUMNS * _FEW)
    few_queries = gl.allocate_shared_memory(cache.dtype, [FEW_QUERIES, _FEW, _COLUMNS], WHOLE)
    query_tiles = reinterpreted(few_queries, [QUERIES, _OWN_ROWS, HEAD_DIM], WHOLE)
    fields = gl.allocate_shared_memory(gl.int32, [BUFFERS * _FIELDS, 1], FLAT)
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    last_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    queries_ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    queries_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(values_free.index(stage), count=2)
    mbarrier.init(last_ready.index(0), count=1)
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(queries_ready.index(buffer), count=32 + 1)
        mbarrier.init(queries_free.index(buffer), count=2)
    claims = make_claims(_SLOTS)
    for slot in gl.static_range(_SLOTS):
        mbarrier.init(taken.index(slot), count=1)
    fence_async_shared()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tiles = (key_tiles, value_tiles)
    query_barriers = (queries_ready, queries_free)
    barriers = (keys_ready, keys_free, values_ready, values_free, last_ready)
    numbers = (scale, inner, value_scale)
    shared = (output, sinks, query_tiles, fields, tiles, query_barriers, barriers, numbers)
    gl.warp_specialize(
        [
            (_attend, (shared, 0, ROW_SIZE, GROUP, WINDOW, CAUSAL)),
            (_attend, (shared, 1, ROW_SIZE, GROUP, WINDOW, CAUSAL)),
            (
                _fetch,
                (
                    cache,
                    table,
                    items,
                    num_items,
                    progress,
                    table_stride,
                    block_rows,
                    (key_boxes, value_boxes, few_values),
                    barriers,
                    claims,
                    taken,
                    NUM_KV_HEADS,
                    HEAD_DIM,
                    BLOCK_SIZE,
                    TILE,
                    HEADS,
                    PDL,
                ),
            ),
            (
                _copy_queries,
                (
                    query,
                    items,
                    num_items,
                    query_stride,
                    few_queries,
                    fields,
                    queries_ready,
                    queries_free,
                    claims,
                    taken,
                    NUM_KV_HEADS,
                    GROUP,
                    HEAD_DIM,
                    HEADS,
                    PDL,
                ),
            ),
        ],
        [4, 1, 1],
        [COMPUTING_REGISTERS, LOADING_REGISTERS, LOADING_REGISTERS],
    )
