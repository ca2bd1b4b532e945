"""One step of one attention layer on a CPU: write K and V to their slots, attend to the blocks in place.

Tokens are taken 16 at a time (a tile). When the block size is a multiple of 16 a tile lies in one block and is read
where it is; otherwise 64 tokens at a time are first copied to a scratch in the same layout. Inside a tile, in words of
one fp32 or two bf16 numbers (`PAIR` = 1 or 2, see cpu_simd.py):
  K  [head_dim / PAIR, 16 tokens]     scores of 16 tokens add up in one vector
  V  [16 tokens / PAIR, padded_dim]   padded_dim is head_dim rounded up to 16
Softmax runs online over spans of 64 tokens that begin at multiples of 64 in the sequence. So a token's result depends on
its own sequence alone, to the bit: not on the batch, the chunking of the prompt, the block size or the threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

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
NEVER_SEEN = np.float32(
    -1e30
)  # the running maximum before the first visible key; finite, so that no NaN arises

_ADDRESSES = (
    "query",
    "key",
    "value",
    "output",
    "cos",
    "sin",
    "positions",
    "slots",
    "tables",
    "context_lens",
)
_ADDRESSES += ("query_starts", "writes", "items", "kv", "counters")
_NUMBERS = (
    "query_stride",
    "key_stride",
    "value_stride",
    "table_stride",
    "block_stride",
    "block_size",
    "num_heads",
)
_NUMBERS += (
    "num_kv_heads",
    "head_dim",
    "padded_dim",
    "rotary_half",
    "window",
    "max_rows",
    "num_writes",
    "num_items",
)
STEP = np.dtype([(name, np.int64) for name in _ADDRESSES + _NUMBERS] + [("scale", np.float64)])
"""What a kernel call needs. Addresses are bytes; strides are elements. `kv` points at the layer inside block 0."""


@njit(inline="always")
def _k_index(element: int, token: int, pair: int) -> int:
    return ((element // pair) * LANES + token) * pair + element % pair


@njit(inline="always")
def _v_index(element: int, token: int, pair: int, padded_dim: int) -> int:
    return ((token // pair) * padded_dim + element) * pair + token % pair


@njit(nogil=True, cache=True)
def _rotate(step: Any, source: Any, begin: int, position: int, target: Any) -> None:
    """Copy one head's vector to `target` (float32 [head_dim]), rotated to its position."""
    half = step.rotary_half
    for i in range(step.head_dim):
        target[i] = to_float(source[begin + i])
    if half > 0:
        cos = carray(pointer_to(step.cos, target), (position + 1) * half)
        sin = carray(pointer_to(step.sin, target), (position + 1) * half)
        at = position * half
        for i in range(half):
            x1, x2 = target[i], target[half + i]
            target[i] = x1 * cos[at + i] - x2 * sin[at + i]
            target[half + i] = x2 * cos[at + i] + x1 * sin[at + i]


@njit(nogil=True, cache=True)
def _write_token(step: Any, elements: Any, token: int, head: int, vector: Any) -> None:
    """Rotate and write one token's K and V of one KV head to its slot."""
    pair = 4 // elements.itemsize
    dim, padded = step.head_dim, step.padded_dim
    slot = carray(pointer_to(step.slots, np.empty(0, np.int64)), token + 1)[token]
    position = carray(pointer_to(step.positions, np.empty(0, np.int64)), token + 1)[token]
    block, offset = slot // step.block_size, slot % step.block_size
    k_begin = head * 2 * step.block_size * padded
    v_begin = k_begin + step.block_size * padded
    home = step.kv + block * step.block_stride * elements.itemsize
    kv = carray(pointer_to(home, elements), step.num_kv_heads * 2 * step.block_size * padded)

    key = carray(pointer_to(step.key, elements), (token + 1) * step.key_stride)
    value = carray(pointer_to(step.value, elements), (token + 1) * step.value_stride)
    _rotate(step, key, token * step.key_stride + head * dim, position, vector)
    v_from = token * step.value_stride + head * dim
    if step.block_size % LANES:
        for i in range(dim):
            kv[k_begin + offset * padded + i] = from_float(vector[i], elements)
            kv[v_begin + offset * padded + i] = value[v_from + i]
        return
    tile, t = offset // LANES * LANES * padded, offset % LANES
    for i in range(dim):
        kv[k_begin + tile + _k_index(i, t, pair)] = from_float(vector[i], elements)
        kv[v_begin + tile + _v_index(i, t, pair, padded)] = value[v_from + i]
    if dim % pair:
        kv[k_begin + tile + _k_index(dim, t, pair)] = 0
    if t % pair == 0 and pair == 2:
        # The other half of these words is not written yet, and might hold another sequence's NaN.
        for i in range(dim):
            kv[v_begin + tile + _v_index(i, t + 1, pair, padded)] = 0


@njit(nogil=True, cache=True)
def _load_queries(
    step: Any, elements: Any, first_token: int, num_queries: int, kv_head: int, rows: Any
) -> None:
    """The query heads of one KV head, rotated: row = query * group + head; rows [num_rows, padded_dim] elements."""
    int64s = np.empty(0, np.int64)
    dim, padded = step.head_dim, step.padded_dim
    group = step.num_heads // step.num_kv_heads
    positions = carray(pointer_to(step.positions, int64s), first_token + num_queries)
    query = carray(
        pointer_to(step.query, elements), (first_token + num_queries) * step.query_stride
    )
    vector = np.empty(dim, np.float32)
    for q in range(num_queries):
        token = first_token + q
        for g in range(group):
            begin = token * step.query_stride + (kv_head * group + g) * dim
            _rotate(step, query, begin, positions[token], vector)
            row = (q * group + g) * padded
            for i in range(dim):
                rows[row + i] = from_float(vector[i], elements)
            for i in range(dim, padded):
                rows[row + i] = 0


@njit(nogil=True, cache=True)
def _stage(
    step: Any, elements: Any, table: Any, kv_head: int, begin: int, end: int, tiles: Any
) -> None:
    """Copy tokens [begin, end) of one span to `tiles`: 4 tiles of K, then 4 of V, in tile layout."""
    pair = 4 // elements.itemsize
    dim, padded, size = step.head_dim, step.padded_dim, step.block_size
    tile_size = LANES * padded
    for token in range(begin, end):
        home = step.kv + table[token // size] * step.block_stride * elements.itemsize
        kv = carray(pointer_to(home, elements), step.num_kv_heads * 2 * size * padded)
        k_from = (kv_head * 2 * size + token % size) * padded
        v_from = k_from + size * padded
        in_span = token % SPAN_TOKENS
        k_to, t = in_span // LANES * tile_size, token % LANES
        v_to = k_to + SPAN * tile_size
        for i in range(dim):
            tiles[k_to + _k_index(i, t, pair)] = kv[k_from + i]
            tiles[v_to + _v_index(i, t, pair, padded)] = kv[v_from + i]


@njit(nogil=True, cache=True)
def _attend(  # noqa: PLR0915
    step: Any,
    words: Any,
    elements: Any,
    seq: int,
    q_begin: int,
    q_end: int,
    kv_head: int,
    scratch: Any,
) -> None:
    """Queries [q_begin, q_end) of one sequence, and the query heads of one KV head, over their context."""
    queries, scores, sums, maxima, totals, tiles, places = scratch
    pair, itemsize = 4 // elements.itemsize, elements.itemsize
    padded, size = step.padded_dim, step.block_size
    group = step.num_heads // step.num_kv_heads
    int32s = np.empty(0, np.int32)
    starts = carray(pointer_to(step.query_starts, int32s), seq + 2)
    context_len = carray(pointer_to(step.context_lens, int32s), seq + 1)[seq]
    table = carray(
        pointer_to(step.tables + 4 * seq * step.table_stride, int32s),
        (context_len + size - 1) // size,
    )
    first = context_len - (starts[seq + 1] - starts[seq]) + q_begin  # position of the first query
    num_rows = (q_end - q_begin) * group
    _load_queries(step, elements, starts[seq] + q_begin, q_end - q_begin, kv_head, queries)
    for i in range(num_rows * padded):
        sums[i] = 0.0
    for r in range(num_rows):
        maxima[r] = NEVER_SEEN
        totals[r] = 0.0

    key_end = first + (q_end - q_begin)
    key_begin = max(0, first - step.window + 1)
    depth = (step.head_dim + pair - 1) // pair
    q_address, s_address, c_address = queries.ctypes.data, scores.ctypes.data, sums.ctypes.data
    tile_bytes = LANES * padded * itemsize
    for span in range(key_begin // SPAN_TOKENS * SPAN_TOKENS, key_end, SPAN_TOKENS):
        # Where the span's tiles of K are; V's follow at a constant distance.
        begin_tile = max(0, key_begin - span) // LANES
        end_tile = min(SPAN, (key_end - span + LANES - 1) // LANES)
        if size % LANES:
            _stage(
                step,
                elements,
                table,
                kv_head,
                max(span, key_begin),
                min(span + SPAN_TOKENS, key_end),
                tiles,
            )
            v_distance = SPAN * tile_bytes
            for j in range(SPAN):
                places[j] = tiles.ctypes.data + j * tile_bytes
        else:
            v_distance = size * padded * itemsize
            for j in range(begin_tile, end_tile):
                token = span + j * LANES
                home = step.kv + table[token // size] * step.block_stride * itemsize
                places[j] = home + kv_head * 2 * v_distance + token % size // LANES * tile_bytes
            for j in range(begin_tile):
                places[j] = places[begin_tile]
        for r0 in range(0, num_rows, TILE_ROWS):
            rows = min(TILE_ROWS, num_rows - r0)
            end = min(SPAN_TOKENS, first + (r0 + rows - 1) // group + 1 - span)
            begin = max(0, first + r0 // group - step.window + 1 - span)
            if end <= 0 or begin >= SPAN_TOKENS:
                continue
            num_tiles = (end + LANES - 1) // LANES
            multiply_tile(
                words, rows, num_tiles, q_address + r0 * padded * itemsize, padded * itemsize,
                places[0], places[1], places[2], places[3], 4 * LANES, depth, s_address, 4 * SPAN_TOKENS, False,
            )  # fmt: skip
            for r in range(r0, r0 + rows):
                position = first + r // group - span
                maxima[r], decay, total = softmax_row(
                    words, s_address + (r - r0) * 4 * SPAN_TOKENS,
                    max(0, position - step.window + 1), min(SPAN_TOKENS, position + 1),
                    np.float32(step.scale), maxima[r],
                )  # fmt: skip
                totals[r] = totals[r] * decay + total
                if decay != 1.0:
                    for i in range(r * padded, (r + 1) * padded):
                        sums[i] *= decay
            for j in range(begin // LANES, num_tiles):
                w_begin = max(0, begin - j * LANES) // pair
                w_end = (min(LANES, end - j * LANES) + pair - 1) // pair
                weights = s_address + 4 * (j * LANES // pair + w_begin)
                v_tile = places[j] + v_distance + 4 * w_begin * padded
                for d in range(0, padded, SPAN_TOKENS):
                    v = v_tile + 4 * d
                    multiply_tile(
                        words, rows, min(SPAN, (padded - d) // LANES), weights, 4 * SPAN_TOKENS,
                        v, v + 4 * LANES, v + 8 * LANES, v + 12 * LANES, 4 * padded, w_end - w_begin,
                        c_address + 4 * (r0 * padded + d), 4 * padded, True,
                    )  # fmt: skip
    _store_output(step, elements, starts[seq] + q_begin, kv_head, num_rows, sums, totals)


@njit(nogil=True, cache=True)
def _store_output(
    step: Any, elements: Any, first_token: int, kv_head: int, num_rows: int, sums: Any, totals: Any
) -> None:
    """Normalise: output [num_tokens, num_heads, head_dim]."""
    dim, padded = step.head_dim, step.padded_dim
    group = step.num_heads // step.num_kv_heads
    last_token = first_token + num_rows // group
    output = carray(pointer_to(step.output, elements), (last_token + 1) * step.num_heads * dim)
    for r in range(num_rows):
        token, head = first_token + r // group, kv_head * group + r % group
        to = (token * step.num_heads + head) * dim
        inverse = np.float32(1.0) / totals[r]
        for i in range(dim):
            output[to + i] = from_float(sums[r * padded + i] * inverse, elements)


@njit(nogil=True, cache=True)
def run_layer(steps: Any, words: Any, elements: Any) -> None:
    """Work on one layer until none is left; any number of threads may run this on the same step at once."""
    step = steps[0]
    int32s = np.empty(0, np.int32)
    num_kv_heads = step.num_kv_heads
    vector = np.empty(step.head_dim, np.float32)
    max_rows, padded = step.max_rows, step.padded_dim
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

    writes = carray(pointer_to(step.writes, int32s), (step.num_writes, 2))
    num_writes = step.num_writes * num_kv_heads
    work = fetch_add(next_write, 1)
    while work < num_writes:
        for token in range(writes[work // num_kv_heads, 0], writes[work // num_kv_heads, 1]):
            _write_token(step, elements, token, work % num_kv_heads, vector)
        fetch_add(written, 1)
        work = fetch_add(next_write, 1)
    while (
        fetch_add(written, 0) < num_writes
    ):  # a query may see keys that another thread is still writing
        pass

    items = carray(pointer_to(step.items, int32s), (step.num_items, 3))
    num_items = step.num_items * num_kv_heads
    work = fetch_add(next_item, 1)
    while work < num_items:
        item = work // num_kv_heads
        _attend(
            step,
            words,
            elements,
            items[item, 0],
            items[item, 1],
            items[item, 2],
            work % num_kv_heads,
            scratch,
        )
        work = fetch_add(next_item, 1)
