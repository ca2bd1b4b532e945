"""One attention layer of one step on a CPU: write K and V to blocks, attend to blocks in place.

Softmax runs online over spans of 64 tokens, which begin at multiples of 64 in the sequence. So
results are bit-identical whatever the batch, the chunking of the prompt, the block size and the
number of threads.
"""

# mypy: disable-error-code="attr-defined, call-arg, var-annotated, no-untyped-def"

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
from numba import carray, float32, int32, int64

from octavo.ops.cpu import attention_blocks as cpu_blocks
from octavo.ops.cpu import attention_scores as cpu_scores
from octavo.ops.cpu import attention_tiles as cpu_tiles
from octavo.ops.cpu import vectors as cpu_vectors
from octavo.ops.cpu.attention_blocks import (
    SPAN_TOKENS,
    STEP,
    locate,
    rotate,
    stage,
    widen,
    write_token,
)
from octavo.ops.cpu.attention_scores import change_scores
from octavo.ops.cpu.attention_tiles import (
    SPAN,
    TILE_ROWS,
    multiply_keys,
    multiply_values,
    softmax_row,
)
from octavo.ops.cpu.jit import compile_kernel, digest_of, host_has, inlined, jit
from octavo.ops.cpu.vectors import LANES, fetch_add, from_float, pointer_to, size_of, yield_core

# The running maximum before the first visible key; finite, so that no NaN arises.
NEVER_SEEN = np.float32(-1e30)
Scratch = namedtuple("Scratch", "places staged scores queries sums maxima totals rotated")
"""The memory of one thread; `run_layer` allocates it."""
# Offsets of the counters in bytes, each in its own cache line.
NEXT_WRITE, WRITTEN, NEXT_ITEM = 0, 64, 128


@inlined
def _attend(
    step: Any, words: Any, elements: Any, cached: Any, general: Any, item: Any, scratch: Any
) -> None:
    """Queries [q_begin, q_end) of a sequence, for the query heads of some KV heads."""
    seq, q_begin, q_end, head_begin, head_end = item
    places, staged = scratch.places, scratch.staged
    size, padded = step.block_size, step.padded_dim
    starts = carray(pointer_to(step.query_starts + 4 * seq, int32), 2)
    context_len = carray(pointer_to(step.context_lens + 4 * seq, int32), 1)[0]
    num_blocks = (context_len + size - 1) // size
    table = carray(pointer_to(step.tables + 4 * seq * step.table_stride, int32), num_blocks)
    first = context_len - (starts[1] - starts[0]) + q_begin  # position of the first query
    token = starts[0] + q_begin
    pace = 1  # positions from one query to the next
    if len(general) > 0 and step.reads_encoder:
        first, pace = context_len - 1, 0  # all queries see all keys
    elif starts[1] - starts[0] == 1:
        for head in range(head_begin, head_end):
            write_token(step, elements, cached, general, token, head, scratch.rotated)
    else:
        while fetch_add(step.counters + WRITTEN, 0) < step.num_writes:
            yield_core()  # another thread is still writing keys that these queries may see
    _begin_rows(step, elements, general, token, q_end - q_begin, head_begin, head_end, scratch)
    key_end = first + (q_end - q_begin - 1) * pace + 1
    key_begin = max(0, first - step.window + 1)
    in_place = size % LANES == 0
    is_widened = size_of(cached) < size_of(elements)
    head_bytes = 2 * size * padded * size_of(cached)
    is_staged = is_widened or not in_place
    v_distance = (SPAN_TOKENS if is_staged else size) * padded * size_of(elements)
    if in_place:
        locate(
            step,
            cached,
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
                    locate(step, cached, table, head_begin, span_end, next_end, places[SPAN:])
                if is_widened:
                    first_tile = (span_begin - span) // LANES
                    end_tile = (span_end - span + LANES - 1) // LANES
                    widen(step, elements, cached, first_tile, end_tile, places, staged)
            else:
                stage(step, elements, cached, table, head, span_begin, span_end, staged)
                for j in range(SPAN):
                    places[j] = staged.ctypes.data + j * LANES * padded * size_of(elements)
                    places[SPAN + j] = places[j]
            _attend_span(
                step,
                words,
                elements,
                general,
                first - span,
                pace,
                q_end - q_begin,
                head,
                head_begin,
                v_distance,
                scratch,
            )
    _store_output(step, elements, token, q_end - q_begin, head_begin, head_end, scratch)


@inlined
def _attend_span(
    step: Any,
    words: Any,
    elements: Any,
    general: Any,
    first: int,
    pace: int,
    num_queries: int,
    head: int,
    head_begin: int,
    v_distance: int,
    scratch: Any,
) -> None:
    """Fold one span of keys of one KV head into its rows; the first query is at `first` in it, and
    each other one `pace` behind the one before.

    Rows begin with those of the KV head `head_begin`.
    """
    places, queries, sums = scratch.places, scratch.queries, scratch.sums
    maxima, totals = scratch.maxima, scratch.totals
    pair = 4 // size_of(elements)
    padded, window = step.padded_dim, step.window
    group = step.num_heads // step.num_kv_heads
    num_rows = num_queries * group
    row_bytes = padded * size_of(elements)
    depth = (step.head_dim + pair - 1) // pair
    row_base = (head - head_begin) * num_rows
    first_head = head * group
    s_address = scratch.scores.ctypes.data
    for r0 in range(0, num_rows, TILE_ROWS):
        rows = min(TILE_ROWS, num_rows - r0)
        end = min(SPAN_TOKENS, first + (r0 + rows - 1) // group * pace + 1)
        begin = max(0, first + r0 // group * pace - window + 1)
        if end <= 0 or begin >= SPAN_TOKENS:
            continue
        num_tiles = (end + LANES - 1) // LANES
        multiply_keys(
            words, rows, num_tiles, queries.ctypes.data + (row_base + r0) * row_bytes, row_bytes,
            places.ctypes.data, 4 * LANES, 4 * LANES, depth, s_address,
        )  # fmt: skip
        if len(general) > 0 and step.changes_scores:
            for r in range(rows):
                row_head = first_head + (r0 + r) % group
                row_position = first + (r0 + r) // group * pace
                change_scores(step, scratch.scores, r * SPAN_TOKENS, row_head, row_position)
        for r in range(rows):
            position = first + (r0 + r) // group * pace
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


@jit
def _begin_rows(
    step: Any,
    elements: Any,
    general: Any,
    token: int,
    num_queries: int,
    head_begin: int,
    head_end: int,
    scratch: Any,
) -> None:
    """Store rotated queries as rows [kv_heads, num_queries, group, padded_dim]; reset softmax.

    A sink is the first score that joins a row's softmax, without a value.
    """
    dim, padded = step.head_dim, step.padded_dim
    group = step.num_heads // step.num_kv_heads
    positions = carray(pointer_to(step.positions + 8 * token, int64), num_queries)
    num_rows = (head_end - head_begin) * num_queries * group
    scratch.sums[: num_rows * padded] = 0.0
    scratch.maxima[:num_rows] = NEVER_SEEN
    scratch.totals[:num_rows] = 0.0
    for r in range(num_rows):
        q = r // group % num_queries
        head = (head_begin + r // (group * num_queries)) * group + r % group
        begin = (token + q) * step.query_stride + head * dim
        source = carray(pointer_to(step.query + begin * size_of(elements), elements), dim)
        row = scratch.queries[r * padded : (r + 1) * padded]
        rotate(step, elements, general, source, positions[q], row)
        for i in range(dim, dim + dim % (4 // size_of(elements))):
            row[i] = 0
    if len(general) > 0 and step.sinks != 0:
        sinks = carray(pointer_to(step.sinks, float32), step.num_heads)
        for r in range(num_rows):
            head = (head_begin + r // (group * num_queries)) * group + r % group
            scratch.maxima[r] = max(sinks[head], NEVER_SEEN)
            scratch.totals[r] = 1.0


@jit
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
    dim, padded = step.head_dim, step.padded_dim
    group = step.num_heads // step.num_kv_heads
    for r in range((head_end - head_begin) * num_queries * group):
        q = r // group % num_queries
        head = (head_begin + r // (group * num_queries)) * group + r % group
        place = step.output + ((token + q) * step.num_heads + head) * dim * size_of(elements)
        target = carray(pointer_to(place, elements), dim)
        row = scratch.sums[r * padded : (r + 1) * padded]
        inverse = step.value_scale / scratch.totals[r]
        for i in range(dim):
            target[i] = from_float(row[i] * inverse, elements)


@inlined
def run_layer(steps: Any, words: Any, elements: Any, cached: Any, general: Any) -> None:
    """Compute work items of a layer until none is left; any number of threads may run this.

    `words`, `elements` and `cached` are empty arrays: the dtypes of the first two choose the
    arithmetic (attention_tiles.py), that of the last is the cache's, bytes if it holds e4m3.
    `general` is a tuple, whose length is known to the compiler: empty where
    scores are multiples of dot products, without sinks, and rotary pairs are not interleaved. Even
    branches that are never taken would cost a short decode a fifth of its time.
    """
    step = steps[0]
    next_write, next_item = step.counters + NEXT_WRITE, step.counters + NEXT_ITEM
    num_kv_heads, max_rows, padded = step.num_kv_heads, step.max_rows, step.padded_dim

    is_staged = step.block_size % LANES != 0 or size_of(cached) < size_of(elements)
    scratch = Scratch(
        places=np.empty(2 * SPAN, np.int64),  # a span's tiles of K, and those read next
        staged=np.zeros(2 * SPAN_TOKENS * padded if is_staged else 0, elements.dtype),
        scores=np.empty(TILE_ROWS * SPAN_TOKENS, np.float32),  # then weights
        queries=np.empty(max_rows * padded, elements.dtype),
        sums=np.empty(max_rows * padded, np.float32),  # weighted sums of V
        maxima=np.empty(max_rows, np.float32),  # maxima of the scores so far
        totals=np.empty(max_rows, np.float32),  # sums of the weights so far
        rotated=np.empty(step.head_dim, elements.dtype),
    )
    writes = carray(pointer_to(step.writes, int32), (step.num_writes, 2))
    work = fetch_add(next_write, 1)
    while work < step.num_writes:
        begin, end = writes[work]
        for head in range(num_kv_heads):
            for token in range(begin, end):
                write_token(step, elements, cached, general, token, head, scratch.rotated)
        fetch_add(step.counters + WRITTEN, 1)
        work = fetch_add(next_write, 1)

    items = carray(pointer_to(step.items, int32), (step.num_items, 5))
    work = fetch_add(next_item, 1)
    while work < step.num_items:
        _attend(step, words, elements, cached, general, items[work], scratch)
        work = fetch_add(next_item, 1)


def compile_layer(bf16: bool, is_fp8: bool, is_general: bool) -> Any:
    """`run_layer` for one dtype, and perhaps an FP8 KV cache, as a C function of the address of a
    STEP."""
    general = (1,) if is_general else ()
    elements: Any = np.dtype(np.uint16 if bf16 else np.float32)
    cached: Any = np.dtype(np.uint8) if is_fp8 else elements
    words: Any = np.dtype(np.float32)
    if bf16:
        words = np.dtype(np.uint32 if host_has("avx512bf16") else np.int32)
    sources = digest_of(cpu_blocks, cpu_scores, cpu_tiles, cpu_vectors)

    def layer(address):
        sources  # noqa: B018 (makes it a part of the key under which the kernel is kept)
        steps = carray(pointer_to(address, STEP), 1)
        run_layer(steps, np.empty(0, words), np.empty(0, elements), np.empty(0, cached), general)

    return compile_kernel(layer)
