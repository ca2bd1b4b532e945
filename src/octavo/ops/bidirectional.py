"""Attention of an encoder: every token of an input sees all of it. Nothing is cached.

On a GPU all inputs of a step are one launch (cuda/attention_encoder.py). On a CPU they are computed
one after the other by torch's own attention, which computes each as if it were alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.base import HeadNorm, LayerSpec, RelativeBias, RotaryTable

# Queries whose relative biases are held at once. The same numbers serve all queries, moved by their
# distance.
BIASED_QUERIES = 256


class BidirectionalAttention:
    """Has of an AttentionBackend what the layers of an encoder call, which is `forward`."""

    score_features = frozenset({"relative_bias"})

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device) -> None:
        for layer in layers:
            assert layer.features <= self.score_features
            assert layer.window is None
        self._layers = {layer.layer_id: layer for layer in layers}
        self._device = device

    def plan(self, lens: Sequence[int], dtype: torch.dtype) -> None:
        """Prepare a step, before the first `forward`.

        Args:
            lens: tokens of each input, at least 1; inputs follow each other.
            dtype: of queries, keys and values.
        """
        raise NotImplementedError

    def forward(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: RotaryTable | None = None,
        head_norms: tuple[HeadNorm, HeadNorm] | None = None,
    ) -> Tensor:
        """See AttentionBackend.forward."""
        assert rotary is None, "no encoder that is served has it"
        assert head_norms is None, "no encoder that is served has them"
        return self.attend(self._layers[layer_id], query, key, value)

    def attend(self, layer: LayerSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key and value as in AttentionBackend.forward -> [num_tokens, heads * head_dim]."""
        raise NotImplementedError


class TorchBidirectional(BidirectionalAttention):
    """One input after the other, by torch's own attention."""

    def plan(self, lens: Sequence[int], dtype: torch.dtype) -> None:
        """See BidirectionalAttention.plan."""
        self._lens = list(lens)
        self._strip: tuple[RelativeBias, Tensor] | None = None  # of the layer before

    def attend(self, layer: LayerSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See BidirectionalAttention.attend."""
        heads = (each.transpose(0, 1) for each in (query, key, value))
        inputs = (torch.split(each, self._lens, dim=1) for each in heads)
        outputs = [self._attend_one(layer, q, k, v) for q, k, v in zip(*inputs, strict=True)]
        return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)

    def _attend_one(self, layer: LayerSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One input: query, key, value [heads, num_tokens, head_dim] -> like query."""
        is_grouped, scale = layer.num_heads != layer.num_kv_heads, layer.scores.scale
        bias, num_tokens = layer.scores.relative_bias, query.shape[1]
        parts = (query,) if bias is None else torch.split(query, BIASED_QUERIES, dim=1)
        outputs = []
        for i, part in enumerate(parts):
            mask = None
            if bias is not None:
                mask = self._biases(bias, i, query.dtype)[None, :, : part.shape[1], :num_tokens]
            outputs.append(
                F.scaled_dot_product_attention(
                    part[None],
                    key[None],
                    value[None],
                    attn_mask=mask,
                    scale=scale,
                    enable_gqa=is_grouped,
                )[0]
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _biases(self, bias: RelativeBias, part: int, dtype: torch.dtype) -> Tensor:
        """Biases of the queries of a part [num_heads, BIASED_QUERIES, keys], from key 0 on."""
        longest = max(self._lens)
        num_before = (longest - 1) // BIASED_QUERIES * BIASED_QUERIES  # keys before the last part
        if self._strip is None or self._strip[0] is not bias:
            # They depend on the distance alone: row i of the strip is row 0, moved by i.
            width, count = num_before + longest, min(longest, BIASED_QUERIES)
            distances = torch.arange(width + count - 1, device=bias.weight.device)
            line = bias.biases(distances - (num_before + count - 1)).to(dtype)
            self._strip = bias, line.unfold(1, width, 1).flip(1)
        return self._strip[1][:, :, num_before - part * BIASED_QUERIES :]
