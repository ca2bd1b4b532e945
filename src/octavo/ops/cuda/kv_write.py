"""Head norms, rotary embedding, and the writing of new K and V into blocks, in one kernel.

For the tokens of prompts; the decode kernel does the same for its own.
Reference: `ReferenceBackend`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.base import KVScales, RotaryTable
from octavo.ops.cuda.paged import scale_arguments, stored
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.rotary import load_heads, normed_values
from octavo.ops.cuda.tile_sizes import power_of_2

_HEADS_TILE = 8  # heads per program


@dataclass(frozen=True, slots=True)
class HeadChanges:
    """Norms of heads, and rotary embedding of query and key; None: not applied."""

    rotary: RotaryTable | None = None
    query_norm: tuple[Tensor, float] | None = None  # weight [head_dim] and eps of an RMS norm
    key_norm: tuple[Tensor, float] | None = None
    value_eps: float | None = None  # of an RMS norm without a scale

    @property
    def of_query(self) -> bool:
        """Whether there are any of the query."""
        return self.rotary is not None or self.query_norm is not None

    @property
    def rotary_half(self) -> int:
        return 0 if self.rotary is None else self.rotary.rotary_dim // 2

    @property
    def interleaved(self) -> bool:
        return self.rotary is not None and self.rotary.interleaved

    def arguments(self, unused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float]:
        """cos, sin, and of queries and keys both weights and both eps as a kernel takes them."""
        rotary = self.rotary
        cos, sin = (unused, unused) if rotary is None else (rotary.cos, rotary.sin)
        query_weight, query_eps = self.query_norm or (unused, 0.0)
        key_weight, key_eps = self.key_norm or (unused, 0.0)
        return cos, sin, query_weight, key_weight, float(query_eps), float(key_eps)


@triton.jit(do_not_specialize=["table_stride"])
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
    value_eps,
    key_inverse,  # these two: KVScales
    value_inverse,
    query_stride,
    kv_stride,
    table_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one token, TILE heads of the query, or of key and value."""
    allow_next(PDL)
    wait_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(tokens + token * 2).to(tl.int64)
    position = tl.load(tokens + token * 2 + 1)
    dim = tl.arange(0, DIM_PAD)
    if position >= 0:
        if part < QUERY_PARTS:
            head = part * TILE + tl.arange(0, TILE)
            x = load_heads(
                query + token * query_stride, head, head < NUM_HEADS, position, cos, sin,
                query_weight, query_eps, HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, HAS_NORM,
            )  # fmt: skip
            inside = (head < NUM_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
            query_place = rotated + token * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM
            tl.store(query_place + dim[None, :], x, mask=inside)
        else:
            head = (part - QUERY_PARTS) * TILE + tl.arange(0, TILE)
            inside = (head < NUM_KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
            k = load_heads(
                key + token * kv_stride, head, head < NUM_KV_HEADS, position, cos, sin,
                key_weight, key_eps, HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, HAS_NORM,
            )  # fmt: skip
            v = tl.load(
                value + token * kv_stride + head[:, None] * HEAD_DIM + dim[None, :],
                mask=inside,
                other=0.0,
            )
            v = normed_values(v, value_eps, HEAD_DIM)
            block = tl.load(table + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
            slot = cache + block * block_stride + position % BLOCK_SIZE * HEAD_DIM
            key_place = slot + head[:, None] * (2 * BLOCK_SIZE * HEAD_DIM) + dim[None, :]
            tl.store(key_place, stored(k, key_inverse), mask=inside)
            v = stored(v, value_inverse)
            tl.store(key_place + BLOCK_SIZE * HEAD_DIM, v, mask=inside)


def write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: Tensor,
    table: Tensor,
    layer_cache: Tensor,
    changes: HeadChanges,
    kv_scales: KVScales | None = None,
) -> Tensor:
    """Write K and V of new tokens into their slots; return the query with its changes.

    Args:
        query, key, value: [num_tokens, num_heads or num_kv_heads, head_dim]; tokens strided, in
            the same way in key and value.
        tokens: int32 [num_tokens * 2], each table row and position; position -1: not this token.
        table: int32 [num_rows, max_blocks].
        layer_cache: [num_blocks, num_kv_heads, 2, block_size, head_dim], blocks strided.
        kv_scales: if the cache is e4m3.

    Returns:
        The query as it is where there are no changes; otherwise a new dense tensor, unwritten
        for tokens at position -1.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    assert key.stride(0) == value.stride(0) or len(key) == 1, "K and V have the same strides"
    rotated = query.new_empty(query.shape) if changes.of_query else query
    query_parts = -(-num_heads // _HEADS_TILE) if changes.of_query else 0
    kv_parts = -(-num_kv_heads // _HEADS_TILE)
    _write_kernel[(num_tokens, query_parts + kv_parts)](
        query,
        key,
        value,
        rotated,
        layer_cache,
        table,
        tokens,
        *changes.arguments(query),
        changes.value_eps,
        *scale_arguments(kv_scales)[:2],
        query.stride(0),
        key.stride(0),
        table.stride(0),
        layer_cache.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=power_of_2(head_dim),
        BLOCK_SIZE=layer_cache.shape[3],
        ROTARY_HALF=changes.rotary_half,
        INTERLEAVED=changes.interleaved,
        HAS_NORM=changes.query_norm is not None,
        QUERY_PARTS=query_parts,
        TILE=_HEADS_TILE,
        num_warps=4,
        **launch_options(query.device),
    )
    return rotated
