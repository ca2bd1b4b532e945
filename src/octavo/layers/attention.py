"""Attention with its projections; the backend reads and writes the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.layers.config import AttentionConfig
from octavo.layers.linear import make_linear
from octavo.layers.norm import make_norm
from octavo.ops import AttentionBackend, LayerSpec, RotaryTable, ScoreFunction


class Attention(nn.Module):
    """Owns the projections around one layer's attention, and the norms of heads, if any."""

    def __init__(self, config: AttentionConfig, layer_id: int, rotary: RotaryTable | None) -> None:
        super().__init__()
        self.spec = LayerSpec(
            layer_id=layer_id,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scores=ScoreFunction(config.scale),
            window=config.window,
        )
        self.rotary = rotary
        self.qkv = make_linear(config.qkv)
        self.head_norms = None
        if config.head_norm is not None:
            self.query_norm = make_norm(config.head_norm)
            self.key_norm = make_norm(config.head_norm)
            self.head_norms = self.query_norm, self.key_norm
        self.output = make_linear(config.output)

    def forward(self, hidden: Tensor, backend: AttentionBackend) -> Tensor:
        """hidden [num_tokens, hidden_size] -> what `output` takes, [num_tokens, all heads].

        The backend normalises and rotates query and key, and writes K and V to the cache.
        """
        spec = self.spec
        heads = self.qkv.forward(hidden).view(hidden.shape[0], -1, spec.head_dim)
        num_kv_heads = spec.num_kv_heads
        query, key, value = torch.split(heads, [spec.num_heads, num_kv_heads, num_kv_heads], dim=1)
        return backend.forward(spec.layer_id, query, key, value, self.rotary, self.head_norms)
