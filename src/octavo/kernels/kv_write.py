"""Head norms, rotary embedding, and the writing of new K and V into blocks, in one kernel.

Judge: `ReferenceBackend`, and RMSNorm and RotaryTable in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.pdl import allow_next, launch_options, wait_previous

HEADS_TILE = 8  # heads of one program


@dataclass(frozen=True, slots=True)
class NewTokens:
    """A step's tokens on the device, and one layer's part of the cache."""

    tokens: Tensor  # int32 [num_tokens * 2]: table row and position; position -1: padding
    table: Tensor  # int32 [num_rows, max_blocks]
    layer_cache: Tensor  # [num_blocks, num_kv_heads, 2, block_size, head_dim], blocks strided


@triton.jit
def _store_head(
    x,
    head,
    dim,
    inside,
    is_query,
    kv,
    rotated,
    token,
    block,
    offset,
    block_stride,
    cache,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """x [heads, elements] of one token: into the query's buffer, or into K or V of its slot."""
    if is_query:
        row = rotated + token.to(tl.int64) * (NUM_HEADS * HEAD_DIM)
        tl.store(row + head[:, None] * HEAD_DIM + dim[None, :], x, mask=inside)
    else:
        place = (head * 2 + kv) * (BLOCK_SIZE * HEAD_DIM) + offset * HEAD_DIM
        row = cache + block.to(tl.int64) * block_stride
        tl.store(row + place[:, None] + dim[None, :], x, mask=inside)


@triton.jit
def _write_kernel(
    query,
    key,
    value,
    rotated,
    cache,
    table,
    tokens,
    cos,
    sin,
    query_weight,
    key_weight,
    query_eps,
    key_eps,
    query_stride,
    kv_stride,
    table_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,  # 0: the query is used as it is
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_HALF: tl.constexpr,  # 0: nothing is rotated
    HAS_NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # elements a load, a power of two
    REST: tl.constexpr,  # elements past the rotated ones, rounded up to a power of two
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one token, TILE heads of query, key or value."""
    allow_next(PDL)
    token = tl.program_id(0)
    part = tl.program_id(1)
    QUERY_PARTS: tl.constexpr = (NUM_HEADS + TILE - 1) // TILE
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + TILE - 1) // TILE
    wait_previous(PDL)
    row = tl.load(tokens + token * 2)
    position = tl.load(tokens + token * 2 + 1)
    if position >= 0:
        is_query = part < QUERY_PARTS
        is_value = part >= QUERY_PARTS + KV_PARTS
        first = part
        count = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
        source = query + token.to(tl.int64) * query_stride
        weight = query_weight
        eps = query_eps
        if not is_query:
            first = part - QUERY_PARTS
            source = key + token.to(tl.int64) * kv_stride
            weight = key_weight
            eps = key_eps
        if is_value:
            first = part - QUERY_PARTS - KV_PARTS
            source = value + token.to(tl.int64) * kv_stride
        head = first * TILE + tl.arange(0, TILE)
        block = position
        if not is_query:
            block = tl.load(table + row.to(tl.int64) * table_stride + position // BLOCK_SIZE)
        offset = position % BLOCK_SIZE
        kv = is_value.to(tl.int32)

        # An element and the one that it is rotated with are in the same thread: two loads.
        PAIRED: tl.constexpr = ROTARY_HALF if ROTARY_HALF > 0 else HEAD_DIM // 2
        lane = tl.arange(0, HALF)
        inside = (head[:, None] < count) & (lane[None, :] < PAIRED)
        low = source + head[:, None] * HEAD_DIM + lane[None, :]
        x1 = tl.load(low, mask=inside, other=0.0)
        x2 = tl.load(low + PAIRED, mask=inside, other=0.0)
        dtype = x1.dtype
        if REST > 0:
            tail = 2 * PAIRED + tl.arange(0, REST)
            in_tail = (head[:, None] < count) & (tail[None, :] < HEAD_DIM)
            x3 = tl.load(source + head[:, None] * HEAD_DIM + tail[None, :], mask=in_tail, other=0.0)
        if not is_value:
            if HAS_NORM:
                squares = tl.sum(x1.to(tl.float32) * x1.to(tl.float32), 1)
                squares += tl.sum(x2.to(tl.float32) * x2.to(tl.float32), 1)
                if REST > 0:
                    squares += tl.sum(x3.to(tl.float32) * x3.to(tl.float32), 1)
                factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
                w1 = tl.load(weight + lane, mask=lane < PAIRED, other=0.0).to(tl.float32)
                w2 = tl.load(weight + PAIRED + lane, mask=lane < PAIRED, other=0.0).to(tl.float32)
                x1 = (x1.to(tl.float32) * factor * w1[None, :]).to(dtype)
                x2 = (x2.to(tl.float32) * factor * w2[None, :]).to(dtype)
                if REST > 0:
                    w3 = tl.load(weight + tail, mask=tail < HEAD_DIM, other=0.0).to(tl.float32)
                    x3 = (x3.to(tl.float32) * factor * w3[None, :]).to(dtype)
            if ROTARY_HALF > 0:
                angle = position.to(tl.int64) * ROTARY_HALF + lane
                c = tl.load(cos + angle, mask=lane < PAIRED, other=0.0)[None, :]
                s = tl.load(sin + angle, mask=lane < PAIRED, other=0.0)[None, :]
                y1 = x1.to(tl.float32) * c - x2.to(tl.float32) * s
                y2 = x2.to(tl.float32) * c + x1.to(tl.float32) * s
                x1 = y1.to(dtype)
                x2 = y2.to(dtype)
        _store_head(
            x1, head, lane, inside, is_query, kv, rotated, token, block, offset, block_stride,
            cache, NUM_HEADS, BLOCK_SIZE, HEAD_DIM,
        )  # fmt: skip
        _store_head(
            x2, head, PAIRED + lane, inside, is_query, kv, rotated, token, block, offset,
            block_stride, cache, NUM_HEADS, BLOCK_SIZE, HEAD_DIM,
        )  # fmt: skip
        if REST > 0:
            _store_head(
                x3, head, tail, in_tail, is_query, kv, rotated, token, block, offset, block_stride,
                cache, NUM_HEADS, BLOCK_SIZE, HEAD_DIM,
            )  # fmt: skip


def write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    new: NewTokens,
    rotary: tuple[Tensor, Tensor] | None,
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None,
) -> Tensor:
    """Write K and V of new tokens into their slots; return the query, normalised and rotated.

    query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim],
    tokens strided alike in key and value. rotary: cos and sin, float32 [max_positions, half].
    norms: (weight [head_dim], eps) of query and key. Without both the query comes back as it is;
    otherwise it is a new dense tensor, in which the rows of padding are left unwritten.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    assert key.stride() == value.stride() or num_tokens == 1, "K and V are strided alike"
    changes = rotary is not None or norms is not None
    rotated = query.new_empty(query.shape) if changes else query
    cos, sin = rotary if rotary is not None else (query, query)
    (query_weight, query_eps), (key_weight, key_eps) = norms or ((query, 0.0), (key, 0.0))
    half = int(cos.shape[1]) if rotary is not None else 0
    paired = half or head_dim // 2
    rest = head_dim - 2 * paired
    parts = (triton.cdiv(num_heads, HEADS_TILE) if changes else 0) + 2 * triton.cdiv(
        num_kv_heads, HEADS_TILE
    )
    cache = new.layer_cache
    _write_kernel[(num_tokens, parts)](
        query,
        key,
        value,
        rotated,
        cache,
        new.table,
        new.tokens,
        cos,
        sin,
        query_weight,
        key_weight,
        float(query_eps),
        float(key_eps),
        query.stride(0),
        key.stride(0),
        new.table.stride(0),
        cache.stride(0),
        NUM_HEADS=num_heads if changes else 0,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_HALF=half,
        HAS_NORM=norms is not None,
        BLOCK_SIZE=cache.shape[3],
        HALF=triton.next_power_of_2(max(paired, 1)),
        REST=triton.next_power_of_2(rest) if rest else 0,
        TILE=HEADS_TILE,
        num_warps=2,
        **launch_options(query.device),
    )
    return rotated
