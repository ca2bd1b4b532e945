"""A scattered cache for the attention kernels, and their reference in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Paged:
    """K and V of sequences, each [tokens, num_kv_heads, head_dim], in blocks of a NaN cache."""

    keys: list[Tensor]
    values: list[Tensor]
    layer_cache: Tensor  # [num_blocks, num_kv_heads, 2, block_size, head_dim], blocks strided
    table: Tensor  # int32 [num_seqs, max_blocks]

    def slot(self, seq: int, token: int) -> Tensor:
        """[num_kv_heads, 2, head_dim] as the cache holds it."""
        block_size = self.layer_cache.shape[3]
        block = int(self.table[seq, token // block_size])
        return self.layer_cache[block, :, :, token % block_size]


def make_paged(
    cached: list[int],
    capacity: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Paged:
    """Sequences of `capacity` random tokens, of which the first `cached` are in the cache."""
    blocks = -(-capacity // block_size)
    shape = (len(cached) * blocks + 1, 2, num_kv_heads, 2, block_size, head_dim)
    cache = torch.full(shape, float("nan"), dtype=dtype, device=device)[:, 1]
    table = (torch.randperm(len(cached) * blocks) + 1).view(len(cached), blocks)
    kv = torch.randn(2, len(cached), capacity, num_kv_heads, head_dim, device=device).to(dtype)
    for seq, count in enumerate(cached):
        token = torch.arange(count)
        slots = table[seq, token // block_size].to(device), (token % block_size).to(device)
        for side in range(2):
            cache[:, :, side][slots[0], :, slots[1]] = kv[side, seq, :count]
    return Paged(list(kv[0]), list(kv[1]), cache, table.int().to(device))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: int,
    window: int | None,
    cap: float | None = None,
) -> Tensor:
    """query [q, num_heads, dim] at positions first.., over key, value [k, num_kv_heads, dim]."""
    group = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double(), value.double()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * query.shape[-1] ** -0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    positions = first + torch.arange(len(q), device=q.device)
    distance = positions[:, None] - torch.arange(len(k), device=q.device)
    hidden = (distance < 0) | (distance >= (window or 1 << 30))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def distance(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|; NaN where an element was not written."""
    return float((got.double() - expected).norm() / expected.norm())


BOUND = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
