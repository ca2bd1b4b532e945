"""One attention layer of one step on a CPU: write K and V to their slots, attend to blocks in place.

Tokens are taken 16 at a time (a tile). When the block size is a multiple of 16, a tile lies in one
block and is read where it is; otherwise 64 tokens at a time are first copied to a scratch in the
same layout. In words of one fp32 or two bf16 numbers (`pair` = 1 or 2, see cpu_simd.py) a tile is
  K  [head_dim / pair, 16 tokens]     the scores of 16 tokens add up in one vector
  V  [16 tokens / pair, padded_dim]   padded_dim is head_dim rounded up to 16
Softmax runs online over spans of 64 tokens, which begin at multiples of 64 in the sequence. So a
token's result depends on its own sequence alone, to the bit: not on the batch, the chunking of the
prompt, the block size or the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, float32, int32, int64, njit

from octavo.attention.cpu_simd import (
    LANES,
    SPAN,
    TILE_ROWS,
    fetch_add,
    from_float,
    multiply_tile,
    pointer_to,
    softmax_row,
    to_float,
)

SPAN_TOKENS = SPAN * LANES
# The running maximum before the first visible key; finite, so that no NaN arises.
NEVER_SEEN = np.float32(-1e30)

_ADDRESSES = (
    *("query", "key", "value", "output", "cos", "sin", "kv", "counters"),
    *("positions", "slots", "tables", "context_lens", "query_starts", "writes", "items"),
)
_NUMBERS = (
    *("query_stride", "key_stride", "value_stride", "table_stride", "block_stride", "block_size"),
    *("num_heads", "num_kv_heads", "head_dim", "padded_dim", "rotary_half", "window"),
    *("max_rows", "num_writes", "num_items"),
)
STEP = np.dtype(
    [(name, np.int64) for name in _ADDRESSES + _NUMBERS] + [("scale", np.float32)], align=True
)
"""What a kernel call needs. Strides are in elements; `kv` is the layer's place inside block 0."""

_jit = njit(nogil=True, cache=True, error_model="numpy")


@_jit
def _k_index(element: int, token: int, pair: int) -> int:
    return ((element // pair) * LANES + token) * pair + element % pair


@_jit
def _v_index(element: int, token: int, pair: int, padded_dim: int) -> int:
    return ((token // pair) * padded_dim + element) * pair + token % pair


@_jit
def _rotate(step: Any, elements: Any, source: Any, position: int, target: Any) -> None:
    """Copy one head [head_dim], rotated to its position."""
    half = step.rotary_half
    if half > 0:
        cos = carray(pointer_to(step.cos + 4 * half * position, float32), half)
        sin = carray(pointer_to(step.sin + 4 * half * position, float32), half)
        for i in range(half):
            x1, x2 = to_float(source[i]), to_float(source[half + i])
            target[i] = from_float(x1 * cos[i] - x2 * sin[i], elements)
            target[half + i] = from_float(x2 * cos[i] + x1 * sin[i], elements)
    for i in range(2 * half, step.head_dim):
        target[i] = source[i]


@_jit
def _write_token(step: Any, elements: Any, token: int, head: int, rotated: Any) -> None:
    """Write one token's K (rotated) and V of one KV head to its slot."""
    itemsize = elements.itemsize
    pair = 4 // itemsize
    dim, padded, size = step.head_dim, step.padded_dim, step.block_size
    slot = carray(pointer_to(step.slots, int64), token + 1)[token]
    position = carray(pointer_to(step.positions, int64), token + 1)[token]
    block, offset = slot // size, slot % size
    home = step.kv + (block * step.block_stride + head * 2 * size * padded) * itemsize
    k_block = carray(pointer_to(home, elements), size * padded)
    v_block = carray(pointer_to(home + size * padded * itemsize, elements), size * padded)
    k_from = step.key + (token * step.key_stride + head * dim) * itemsize
    v_from = step.value + (token * step.value_stride + head * dim) * itemsize
    _rotate(step, elements, carray(pointer_to(k_from, elements), dim), position, rotated)
    value = carray(pointer_to(v_from, elements), dim)
    if size % LANES:
        k_block, v_block = k_block[offset * padded :], v_block[offset * padded :]
        for i in range(dim):
            k_block[i], v_block[i] = rotated[i], value[i]
        return
    tile, t = offset // LANES * LANES * padded, offset % LANES
    k_tile, v_tile = k_block[tile:], v_block[tile:]
    for i in range(dim):
        k_tile[_k_index(i, t, pair)] = rotated[i]
    for i in range(dim, dim + dim % pair):
        k_tile[_k_index(i, t, pair)] = 0
    for i in range(dim):
        v_tile[_v_index(i, t, pair, padded)] = value[i]
    if pair == 2 and t % 2 == 0:
        # These words' other halves are not written yet, and might hold another sequence's NaN.
        for i in range(dim):
            v_tile[_v_index(i, t + 1, pair, padded)] = 0


@_jit
def _load_queries(
    step: Any, elements: Any, first_token: int, num_queries: int, kv_head: int, rows: Any
) -> None:
    """The query heads of one KV head, rotated: rows [num_queries * group, padded_dim]."""
    dim, padded = step.head_dim, step.padded_dim
    group = step.num_heads // step.num_kv_heads
    positions = carray(pointer_to(step.positions + 8 * first_token, int64), num_queries)
    for q in range(num_queries):
        for g in range(group):
            begin = (first_token + q) * step.query_stride + (kv_head * group + g) * dim
            source = step.query + begin * elements.itemsize
            row = rows[(q * group + g) * padded :]
            _rotate(step, elements, carray(pointer_to(source, elements), dim), positions[q], row)
            for i in range(dim, dim + dim % (4 // elements.itemsize)):
                row[i] = 0


@_jit
def _stage(
    step: Any, elements: Any, table: Any, kv_head: int, begin: int, end: int, tiles: Any
) -> None:
    """Copy the tokens [begin, end) of one span to `tiles`: 4 tiles of K, then 4 of V."""
    pair = 4 // elements.itemsize
    dim, padded, size = step.head_dim, step.padded_dim, step.block_size
    for token in range(begin, end):
        place = kv_head * 2 * size + token % size
        home = step.kv + (table[token // size] * step.block_stride + place * padded) * elements.itemsize
        key = carray(pointer_to(home, elements), dim)
        value = carray(pointer_to(home + size * padded * elements.itemsize, elements), dim)
        tile, t = token % SPAN_TOKENS // LANES * LANES * padded, token % LANES
        k_tile, v_tile = tiles[tile:], tiles[SPAN_TOKENS * padded + tile :]
        for i in range(dim):
            k_tile[_k_index(i, t, pair)] = key[i]
        for i in range(dim):
            v_tile[_v_index(i, t, pair, padded)] = value[i]


@_jit
def _locate(
    step: Any, table: Any, kv_head: int, begin: int, end: int, itemsize: int, places: Any
) -> None:
    """Addresses of the 4 K tiles of a span of which the tokens [begin, end) are read."""
    size, padded = step.block_size, step.padded_dim
    span = begin // SPAN_TOKENS * SPAN_TOKENS
    first, last = (begin - span) // LANES, (end - 1 - span) // LANES
    for j in range(first, last + 1):
        token = span + j * LANES
        place = kv_head * 2 * size + token % size
        places[j] = step.kv + (table[token // size] * step.block_stride + place * padded) * itemsize
    for j in range(SPAN):
        if j < first or j > last:
            places[j] = places[first]


@_jit
def _attend(
    step: Any,
    words: Any,
    elements: Any,
    seq: int,
    q_begin: int,
    q_end: int,
    kv_head: int,
    scratch: Any,
) -> None:
    """Queries [q_begin, q_end) of one sequence and the query heads of one KV head."""
    queries, scores, sums, maxima, totals, tiles, places = scratch
    itemsize = elements.itemsize
    pair = 4 // itemsize
    padded, size, window = step.padded_dim, step.block_size, step.window
    group = step.num_heads // step.num_kv_heads
    starts = carray(pointer_to(step.query_starts + 4 * seq, int32), 2)
    context_len = carray(pointer_to(step.context_lens + 4 * seq, int32), 1)[0]
    num_blocks = (context_len + size - 1) // size
    table = carray(pointer_to(step.tables + 4 * seq * step.table_stride, int32), num_blocks)
    first = context_len - (starts[1] - starts[0]) + q_begin  # position of the first query
    num_rows = (q_end - q_begin) * group
    _load_queries(step, elements, starts[0] + q_begin, q_end - q_begin, kv_head, queries)
    sums[: num_rows * padded] = 0.0
    maxima[:num_rows] = NEVER_SEEN
    totals[:num_rows] = 0.0

    key_end = first + (q_end - q_begin)
    key_begin = max(0, first - window + 1)
    depth = (step.head_dim + pair - 1) // pair
    q_address, s_address, c_address = queries.ctypes.data, scores.ctypes.data, sums.ctypes.data
    v_distance = (SPAN_TOKENS if size % LANES else size) * padded * itemsize
    for span in range(key_begin // SPAN_TOKENS * SPAN_TOKENS, key_end, SPAN_TOKENS):
        span_begin, span_end = max(span, key_begin), min(span + SPAN_TOKENS, key_end)
        if size % LANES:
            _stage(step, elements, table, kv_head, span_begin, span_end, tiles)
            for j in range(SPAN):
                places[j] = tiles.ctypes.data + j * LANES * padded * itemsize
        else:
            _locate(step, table, kv_head, span_begin, span_end, itemsize, places)
        for r0 in range(0, num_rows, TILE_ROWS):
            rows = min(TILE_ROWS, num_rows - r0)
            end = min(SPAN_TOKENS, first + (r0 + rows - 1) // group + 1 - span)
            begin = max(0, first + r0 // group - window + 1 - span)
            if end <= 0 or begin >= SPAN_TOKENS:
                continue
            num_tiles = (end + LANES - 1) // LANES
            multiply_tile(
                words, rows, num_tiles, q_address + r0 * padded * itemsize, padded * itemsize,
                places[0], places[1], places[2], places[3],
                4 * LANES, depth, s_address, 4 * SPAN_TOKENS, False,
            )  # fmt: skip
            for r in range(r0, r0 + rows):
                position = first + r // group - span
                maxima[r], decay, total = softmax_row(
                    words, s_address + (r - r0) * 4 * SPAN_TOKENS, max(0, position - window + 1),
                    position + 1, step.scale, maxima[r],
                )  # fmt: skip
                totals[r] = totals[r] * decay + total
                if decay != 1.0:
                    row = sums[r * padded : (r + 1) * padded]
                    for i in range(padded):
                        row[i] *= decay
            for j in range(begin // LANES, num_tiles):
                w_begin = max(0, begin - j * LANES) // pair
                w_end = (min(LANES, end - j * LANES) + pair - 1) // pair
                weights = s_address + 4 * (j * LANES // pair + w_begin)
                v_tile = places[j] + v_distance + 4 * w_begin * padded
                for d in range(0, padded, SPAN_TOKENS):
                    v = v_tile + 4 * d
                    multiply_tile(
                        words, rows, min(SPAN, (padded - d) // LANES), weights, 4 * SPAN_TOKENS,
                        v, v + 4 * LANES, v + 8 * LANES, v + 12 * LANES,
                        4 * padded, w_end - w_begin, c_address + 4 * (r0 * padded + d), 4 * padded,
                        True,
                    )  # fmt: skip
    _store_output(step, elements, starts[0] + q_begin, kv_head, num_rows, sums, totals)


@_jit
def _store_output(
    step: Any, elements: Any, first_token: int, kv_head: int, num_rows: int, sums: Any, totals: Any
) -> None:
    """Normalise rows of sums [num_rows, padded_dim] into output [num_tokens, num_heads, head_dim]."""
    dim, padded, heads = step.head_dim, step.padded_dim, step.num_heads
    group = heads // step.num_kv_heads
    for r in range(num_rows):
        place = ((first_token + r // group) * heads + kv_head * group + r % group) * dim
        target = carray(pointer_to(step.output + place * elements.itemsize, elements), dim)
        row = sums[r * padded : (r + 1) * padded]
        inverse = np.float32(1.0) / totals[r]
        for i in range(dim):
            target[i] = from_float(row[i] * inverse, elements)


@_jit
def run_layer(steps: Any, words: Any, elements: Any) -> None:
    """Take work on a layer until none is left; any number of threads may run this at once.

    `words` and `elements` are empty arrays: their dtypes choose the arithmetic (cpu_simd.py).
    """
    step = steps[0]
    num_kv_heads, max_rows, padded = step.num_kv_heads, step.max_rows, step.padded_dim
    rotated = np.empty(step.head_dim, elements.dtype)
    scratch = (
        np.empty(max_rows * padded, elements.dtype),
        np.empty(TILE_ROWS * SPAN_TOKENS, np.float32),
        np.empty(max_rows * padded, np.float32),
        np.empty(max_rows, np.float32),
        np.empty(max_rows, np.float32),
        np.zeros(2 * SPAN_TOKENS * padded if step.block_size % LANES else 1, elements.dtype),
        np.zeros(SPAN, np.int64),
    )
    next_write, written, next_item = step.counters, step.counters + 64, step.counters + 128

    writes = carray(pointer_to(step.writes, int32), (step.num_writes, 2))
    num_writes = step.num_writes * num_kv_heads
    work = fetch_add(next_write, 1)
    while work < num_writes:
        begin, end = writes[work // num_kv_heads]
        for token in range(begin, end):
            _write_token(step, elements, token, work % num_kv_heads, rotated)
        fetch_add(written, 1)
        work = fetch_add(next_write, 1)
    while fetch_add(written, 0) < num_writes:
        pass  # a query may see keys that another thread is still writing

    items = carray(pointer_to(step.items, int32), (step.num_items, 3))
    num_items = step.num_items * num_kv_heads
    work = fetch_add(next_item, 1)
    while work < num_items:
        seq, q_begin, q_end = items[work // num_kv_heads]
        _attend(step, words, elements, seq, q_begin, q_end, work % num_kv_heads, scratch)
        work = fetch_add(next_item, 1)
