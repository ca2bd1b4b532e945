"""The layout of K and V in a block, and the kernels that write and locate them.

Tokens are taken 16 at a time (a tile). When the block size is a multiple of 16, a tile lies in one
block and is read where it is; otherwise 64 tokens at a time are first copied to scratch memory
in the same layout. An FP8 KV cache has the elements in the same order, which are widened to scratch
memory, too. In words of one fp32 or two bf16 numbers (`pair` is 1 or 2), a tile is
  K  [head_dim / pair, 16 tokens]     the scores of 16 tokens add up in one vector
  V  [16 tokens / pair, padded_dim]   padded_dim is head_dim rounded up to 16
"""

# mypy: disable-error-code="attr-defined, call-arg, var-annotated, no-untyped-def"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, float32, int64

from octavo.ops.cpu.attention_tiles import SPAN
from octavo.ops.cpu.jit import jit
from octavo.ops.cpu.vectors import (
    LANES,
    from_cached,
    from_float,
    pointer_to,
    size_of,
    to_cached,
    to_float,
)

SPAN_TOKENS = SPAN * LANES

_ADDRESSES = (
    *("query", "key", "value", "output", "cos", "sin", "kv", "counters"),
    *("positions", "slots", "tables", "context_lens", "query_starts", "writes", "items"),
    *("slopes", "sinks", "biases"),
)
_NUMBERS = (
    *("query_stride", "key_stride", "value_stride", "table_stride", "block_stride", "block_size"),
    *(
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "padded_dim",
        "rotary_half",
        "interleaved",
        "window",
    ),
    *("max_rows", "num_writes", "num_items", "changes_scores", "max_distance", "reads_encoder"),
)
_FLOATS = ("scale", "product_scale", "softcap", "key_inverse", "value_inverse", "value_scale")
STEP = np.dtype(
    [(name, np.int64) for name in _ADDRESSES + _NUMBERS] + [(name, np.float32) for name in _FLOATS],
    align=True,
)
"""What a kernel call needs. Strides are in elements; `kv` is the layer's place inside block 0.

`scale` turns what the softmax is given into powers of 2: dot products, or scores where
`changes_scores` is set (attention_scores.py). `softcap`, `slopes`, `sinks` and `biases` are 0 where
there are none; sinks are in powers of 2, and biases [num_heads, max_distance + 1]. Where
`reads_encoder` is set, `context_lens` are those of the encoder inputs, and nothing is written.
The last three are of an FP8 KV cache (KVScales), or 1; the scale of keys is a part of `scale` or of
`product_scale`.
"""


@jit
def _k_index(element: int, token: int, pair: int) -> int:
    return ((element // pair) * LANES + token) * pair + element % pair


@jit
def _v_index(element: int, token: int, pair: int, padded_dim: int) -> int:
    return ((token // pair) * padded_dim + element) * pair + token % pair


@jit
def rotate(step: Any, elements: Any, general: Any, source: Any, position: int, target: Any) -> None:
    """Copy one head [head_dim], rotated to its position."""
    half = step.rotary_half
    if half > 0:
        cos = carray(pointer_to(step.cos + 4 * half * position, float32), half)
        sin = carray(pointer_to(step.sin + 4 * half * position, float32), half)
        if len(general) > 0 and step.interleaved:
            for i in range(half):
                x1, x2 = to_float(source[2 * i]), to_float(source[2 * i + 1])
                target[2 * i] = from_float(x1 * cos[i] - x2 * sin[i], elements)
                target[2 * i + 1] = from_float(x2 * cos[i] + x1 * sin[i], elements)
        else:
            for i in range(half):
                x1, x2 = to_float(source[i]), to_float(source[half + i])
                target[i] = from_float(x1 * cos[i] - x2 * sin[i], elements)
                target[half + i] = from_float(x2 * cos[i] + x1 * sin[i], elements)
    for i in range(2 * half, step.head_dim):
        target[i] = source[i]


@jit
def write_token(
    step: Any, elements: Any, cached: Any, general: Any, token: int, head: int, rotated: Any
) -> None:
    """Write one token's K (rotated) and V of one KV head to its slot."""
    itemsize, cached_size = size_of(elements), size_of(cached)
    pair = 4 // itemsize
    dim, padded, size = step.head_dim, step.padded_dim, step.block_size
    slot = carray(pointer_to(step.slots, int64), token + 1)[token]
    position = carray(pointer_to(step.positions, int64), token + 1)[token]
    block, offset = slot // size, slot % size
    home = step.kv + (block * step.block_stride + head * 2 * size * padded) * cached_size
    k_block = carray(pointer_to(home, cached), size * padded)
    v_block = carray(pointer_to(home + size * padded * cached_size, cached), size * padded)
    k_from = step.key + (token * step.key_stride + head * dim) * itemsize
    v_from = step.value + (token * step.value_stride + head * dim) * itemsize
    source = carray(pointer_to(k_from, elements), dim)
    rotate(step, elements, general, source, position, rotated)
    value = carray(pointer_to(v_from, elements), dim)
    if size % LANES:
        k_block, v_block = k_block[offset * padded :], v_block[offset * padded :]
        for i in range(dim):
            k_block[i] = to_cached(rotated[i], step.key_inverse, cached)
            v_block[i] = to_cached(value[i], step.value_inverse, cached)
        return
    tile, t = offset // LANES * LANES * padded, offset % LANES
    k_tile, v_tile = k_block[tile:], v_block[tile:]
    for i in range(dim):
        k_tile[_k_index(i, t, pair)] = to_cached(rotated[i], step.key_inverse, cached)
    for i in range(dim, dim + dim % pair):
        k_tile[_k_index(i, t, pair)] = 0
    for i in range(dim):
        v_tile[_v_index(i, t, pair, padded)] = to_cached(value[i], step.value_inverse, cached)
    if pair == 2 and t % 2 == 0:
        # The other halves of these words are not written yet: they may hold another sequence's NaN.
        for i in range(dim):
            v_tile[_v_index(i, t + 1, pair, padded)] = 0


@jit
def stage(
    step: Any,
    elements: Any,
    cached: Any,
    table: Any,
    kv_head: int,
    begin: int,
    end: int,
    tiles: Any,
) -> None:
    """Copy the tokens [begin, end) of one span to `tiles`: 4 tiles of K, then 4 of V."""
    pair = 4 // size_of(elements)
    dim, padded, size = step.head_dim, step.padded_dim, step.block_size
    if pair == 2:
        # The first and the last pair may have a half outside. Its weight is 0, which does not
        # remove a NaN of the sequence that was staged here before.
        for token in (begin // 2 * 2, (end - 1) // 2 * 2 + 1):
            tile, t = token % SPAN_TOKENS // LANES * LANES * padded, token % LANES
            v_tile = tiles[SPAN_TOKENS * padded + tile :]
            for i in range(dim):
                v_tile[_v_index(i, t, pair, padded)] = 0
    for token in range(begin, end):
        place = kv_head * 2 * size + token % size
        home = step.kv + (table[token // size] * step.block_stride + place * padded) * size_of(
            cached
        )
        key = carray(pointer_to(home, cached), dim)
        value = carray(pointer_to(home + size * padded * size_of(cached), cached), dim)
        tile, t = token % SPAN_TOKENS // LANES * LANES * padded, token % LANES
        k_tile, v_tile = tiles[tile:], tiles[SPAN_TOKENS * padded + tile :]
        for i in range(dim):
            k_tile[_k_index(i, t, pair)] = from_cached(key[i], elements)
        for i in range(dim):
            v_tile[_v_index(i, t, pair, padded)] = from_cached(value[i], elements)


@jit
def widen(
    step: Any, elements: Any, cached: Any, first: int, end: int, places: Any, tiles: Any
) -> None:
    """Widen cached tiles [first, end) of K, at `places`, and of V to `tiles`, in the same layout: 4
    tiles of K, then 4 of V. From here on `places` has their addresses there."""
    count = LANES * step.padded_dim
    for j in range(first, end):
        for side in range(2):
            home = places[j] + side * step.block_size * step.padded_dim * size_of(cached)
            source = carray(pointer_to(home, cached), count)
            target = tiles[(side * SPAN + j) * count :]
            for i in range(count):
                target[i] = from_cached(source[i], elements)
    for j in range(SPAN):
        places[j] = tiles.ctypes.data + j * count * size_of(elements)


@jit
def locate(
    step: Any, cached: Any, table: Any, kv_head: int, begin: int, end: int, places: Any
) -> None:
    """Addresses of the 4 K tiles of a span of which the tokens [begin, end) are read."""
    size, head_size = step.block_size, step.padded_dim * size_of(cached)
    span = begin // SPAN_TOKENS * SPAN_TOKENS
    first, last = (begin - span) // LANES, (end - 1 - span) // LANES
    for j in range(first, last + 1):
        token = span + j * LANES
        block = step.kv + table[token // size] * step.block_stride * size_of(cached)
        places[j] = block + (kv_head * 2 * size + token % size) * head_size
    for j in range(SPAN):
        if j < first or j > last:
            places[j] = places[first]
