"""One attention layer of one step on a CPU: write K and V to blocks, attend to blocks in place.

Tokens are taken 16 at a time (a tile). When the block size is a multiple of 16, a tile lies in one
block and is read where it is; otherwise 64 tokens at a time are first copied to a scratch in the
same layout. In words of one fp32 or two bf16 numbers (`pair` = 1 or 2, see cpu_simd.py) a tile is
  K  [head_dim / pair, 16 tokens]     the scores of 16 tokens add up in one vector
  V  [16 tokens / pair, padded_dim]   padded_dim is head_dim rounded up to 16
Softmax runs online over spans of 64 tokens, which begin at multiples of 64 in the sequence. So a
token's result depends on its own sequence alone, to the bit: not on the batch, the chunking of the
prompt, the block size or the number of threads.
"""

# mypy: disable-error-code="attr-defined, call-arg, var-annotated, no-untyped-def"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite.binding import get_host_cpu_features
from numba import carray, cfunc, float32, int32, int64, njit, types

from octavo.attention.cpu_simd import (
    LANES,
    SPAN,
    TILE_ROWS,
    fetch_add,
    from_float,
    multiply_keys,
    multiply_values,
    pointer_to,
    size_of,
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
    itemsize = size_of(elements)
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
def _stage(
    step: Any, elements: Any, table: Any, kv_head: int, begin: int, end: int, tiles: Any
) -> None:
    """Copy the tokens [begin, end) of one span to `tiles`: 4 tiles of K, then 4 of V."""
    pair = 4 // size_of(elements)
    dim, padded, size = step.head_dim, step.padded_dim, step.block_size
    for token in range(begin, end):
        place = kv_head * 2 * size + token % size
        home = step.kv + (table[token // size] * step.block_stride + place * padded) * size_of(
            elements
        )
        key = carray(pointer_to(home, elements), dim)
        value = carray(pointer_to(home + size * padded * size_of(elements), elements), dim)
        tile, t = token % SPAN_TOKENS // LANES * LANES * padded, token % LANES
        k_tile, v_tile = tiles[tile:], tiles[SPAN_TOKENS * padded + tile :]
        for i in range(dim):
            k_tile[_k_index(i, t, pair)] = key[i]
        for i in range(dim):
            v_tile[_v_index(i, t, pair, padded)] = value[i]


@_jit
def _locate(
    step: Any, elements: Any, table: Any, kv_head: int, begin: int, end: int, places: Any
) -> None:
    """Addresses of the 4 K tiles of a span of which the tokens [begin, end) are read."""
    size, head_size = step.block_size, step.padded_dim * size_of(elements)
    span = begin // SPAN_TOKENS * SPAN_TOKENS
    first, last = (begin - span) // LANES, (end - 1 - span) // LANES
    for j in range(first, last + 1):
        token = span + j * LANES
        block = step.kv + table[token // size] * step.block_stride * size_of(elements)
        places[j] = block + (kv_head * 2 * size + token % size) * head_size
    for j in range(SPAN):
        if j < first or j > last:
            places[j] = places[first]


@_jit
def _attend(step: Any, words: Any, elements: Any, item: Any, scratch: Any) -> None:
    """Queries [q_begin, q_end) of a sequence, for the query heads of some KV heads."""
    seq, q_begin, q_end, head_begin, head_end = item
    places, staged = scratch[:2]
    size, padded = step.block_size, step.padded_dim
    starts = carray(pointer_to(step.query_starts + 4 * seq, int32), 2)
    context_len = carray(pointer_to(step.context_lens + 4 * seq, int32), 1)[0]
    num_blocks = (context_len + size - 1) // size
    table = carray(pointer_to(step.tables + 4 * seq * step.table_stride, int32), num_blocks)
    first = context_len - (starts[1] - starts[0]) + q_begin  # position of the first query
    token = starts[0] + q_begin
    _begin_rows(step, elements, token, q_end - q_begin, head_begin, head_end, scratch)
    key_end = first + (q_end - q_begin)
    key_begin = max(0, first - step.window + 1)
    in_place = size % LANES == 0
    head_bytes = 2 * size * padded * size_of(elements)
    v_distance = (size if in_place else SPAN_TOKENS) * padded * size_of(elements)
    if in_place:
        _locate(
            step,
            elements,
            table,
            head_begin,
            key_begin,
            min(key_end, (key_begin // SPAN_TOKENS + 1) * SPAN_TOKENS),
            places[SPAN:],
        )
    for span in range(key_begin // SPAN_TOKENS * SPAN_TOKENS, key_end, SPAN_TOKENS):
        span_begin, span_end = max(span, key_begin), min(span + SPAN_TOKENS, key_end)
        for head in range(head_begin, head_end):
            if in_place:
                for j in range(SPAN):
                    places[j] = places[SPAN + j]
                if head + 1 < head_end:
                    for j in range(SPAN):
                        places[SPAN + j] += head_bytes
                elif span_end < key_end:
                    next_end = min(span_end + SPAN_TOKENS, key_end)
                    _locate(step, elements, table, head_begin, span_end, next_end, places[SPAN:])
            else:
                _stage(step, elements, table, head, span_begin, span_end, staged)
                for j in range(SPAN):
                    places[j] = staged.ctypes.data + j * LANES * padded * size_of(elements)
                    places[SPAN + j] = places[j]
            _attend_span(
                step,
                words,
                elements,
                first - span,
                q_end - q_begin,
                head - head_begin,
                v_distance,
                scratch,
            )
    _store_output(step, elements, token, q_end - q_begin, head_begin, head_end, scratch)


@_jit
def _attend_span(
    step: Any,
    words: Any,
    elements: Any,
    first: int,
    num_queries: int,
    head: int,
    v_distance: int,
    scratch: Any,
) -> None:
    """Fold one span of keys of one KV head into its rows; the first query is at `first` in it."""
    places, _, scores, queries, sums, maxima, totals = scratch
    pair = 4 // size_of(elements)
    padded, window = step.padded_dim, step.window
    group = step.num_heads // step.num_kv_heads
    num_rows = num_queries * group
    row_bytes = padded * size_of(elements)
    depth = (step.head_dim + pair - 1) // pair
    row_base = head * num_rows
    s_address = scores.ctypes.data
    for r0 in range(0, num_rows, TILE_ROWS):
        rows = min(TILE_ROWS, num_rows - r0)
        end = min(SPAN_TOKENS, first + (r0 + rows - 1) // group + 1)
        begin = max(0, first + r0 // group - window + 1)
        if end <= 0 or begin >= SPAN_TOKENS:
            continue
        num_tiles = (end + LANES - 1) // LANES
        multiply_keys(
            words, rows, num_tiles, queries.ctypes.data + (row_base + r0) * row_bytes, row_bytes,
            places.ctypes.data, depth, s_address,
        )  # fmt: skip
        for r in range(rows):
            position = first + (r0 + r) // group
            at = row_base + r0 + r
            maxima[at], decay, total = softmax_row(
                words, s_address + r * 4 * SPAN_TOKENS, max(0, position - window + 1),
                position + 1, step.scale, maxima[at],
            )  # fmt: skip
            totals[at] = totals[at] * decay + total
            row = sums[at * padded : (at + 1) * padded]
            for i in range(padded):  # no test of decay: it would be hard to predict
                row[i] *= decay
        for d in range(0, padded, SPAN_TOKENS):
            multiply_values(
                words, rows, min(SPAN, (padded - d) // LANES), s_address,
                places.ctypes.data, v_distance + 4 * d, 4 * padded,
                begin // pair, (end + pair - 1) // pair,
                sums.ctypes.data + 4 * ((row_base + r0) * padded + d), 4 * padded,
            )  # fmt: skip


@_jit
def _begin_rows(
    step: Any,
    elements: Any,
    token: int,
    num_queries: int,
    head_begin: int,
    head_end: int,
    scratch: Any,
) -> None:
    """Rotated queries as rows [kv_heads, num_queries, group, padded_dim]; nothing seen yet."""
    queries, sums, maxima, totals = scratch[3:]
    dim, padded = step.head_dim, step.padded_dim
    group = step.num_heads // step.num_kv_heads
    positions = carray(pointer_to(step.positions + 8 * token, int64), num_queries)
    num_rows = (head_end - head_begin) * num_queries * group
    sums[: num_rows * padded] = 0.0
    maxima[:num_rows] = NEVER_SEEN
    totals[:num_rows] = 0.0
    for r in range(num_rows):
        q = r // group % num_queries
        head = (head_begin + r // (group * num_queries)) * group + r % group
        begin = (token + q) * step.query_stride + head * dim
        source = carray(pointer_to(step.query + begin * size_of(elements), elements), dim)
        row = queries[r * padded : (r + 1) * padded]
        _rotate(step, elements, source, positions[q], row)
        for i in range(dim, dim + dim % (4 // size_of(elements))):
            row[i] = 0


@_jit
def _store_output(
    step: Any,
    elements: Any,
    token: int,
    num_queries: int,
    head_begin: int,
    head_end: int,
    scratch: Any,
) -> None:
    """Normalise the rows into output [num_tokens, num_heads, head_dim]."""
    _, sums, _, totals = scratch[3:]
    dim, padded = step.head_dim, step.padded_dim
    group = step.num_heads // step.num_kv_heads
    for r in range((head_end - head_begin) * num_queries * group):
        q = r // group % num_queries
        head = (head_begin + r // (group * num_queries)) * group + r % group
        place = step.output + ((token + q) * step.num_heads + head) * dim * size_of(elements)
        target = carray(pointer_to(place, elements), dim)
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
    next_write, written, next_item = step.counters, step.counters + 64, step.counters + 128
    num_kv_heads, max_rows, padded = step.num_kv_heads, step.max_rows, step.padded_dim

    rotated = np.empty(step.head_dim, elements.dtype)
    writes = carray(pointer_to(step.writes, int32), (step.num_writes, 2))
    work = fetch_add(next_write, 1)
    while work < step.num_writes:
        begin, end = writes[work]
        for head in range(num_kv_heads):
            for token in range(begin, end):
                _write_token(step, elements, token, head, rotated)
        fetch_add(written, 1)
        work = fetch_add(next_write, 1)
    while fetch_add(written, 0) < step.num_writes:
        pass  # a query may see keys that another thread is still writing

    scratch = (
        np.empty(2 * SPAN, np.int64),  # places: this span's K tiles, and those read next
        np.zeros(0 if step.block_size % LANES == 0 else 2 * SPAN_TOKENS * padded, elements.dtype),
        np.empty(TILE_ROWS * SPAN_TOKENS, np.float32),  # scores, then weights
        np.empty(max_rows * padded, elements.dtype),  # queries
        np.empty(max_rows * padded, np.float32),  # weighted sums of V
        np.empty(max_rows, np.float32),  # maxima of the scores so far
        np.empty(max_rows, np.float32),  # totals of the weights so far
    )
    items = carray(pointer_to(step.items, int32), (step.num_items, 5))
    work = fetch_add(next_item, 1)
    while work < step.num_items:
        _attend(step, words, elements, items[work], scratch)
        work = fetch_add(next_item, 1)


def compile_layer(bf16: bool) -> Any:
    """`run_layer` for one dtype as a C function of the address of a STEP; `.address` is its own."""
    elements: Any = np.dtype(np.uint16 if bf16 else np.float32)
    words: Any = np.dtype(np.float32)
    if bf16:
        words = np.dtype(np.uint32 if get_host_cpu_features().get("avx512bf16") else np.int32)
    signature = types.void(types.intp)

    @cfunc(signature, cache=True, error_model="numpy")
    def layer(address):
        steps = carray(pointer_to(address, STEP), 1)
        run_layer(steps, np.empty(0, words), np.empty(0, elements))

    return layer
