"""Attention of an encoder: every token of an input sees all of it. Nothing is cached.

On a GPU all inputs of a step are one launch (cuda/attention_encoder.py). On a CPU they are computed
one after the other by torch's own attention, which computes each as if it were alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.base import HeadNorms, LayerSpec, RelativeBias, RotaryTable


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
        head_norms: HeadNorms | None = None,
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
        self._line: tuple[RelativeBias, Tensor] | None = None  # of the layer before

    def attend(self, layer: LayerSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See BidirectionalAttention.attend."""
        heads = (each.transpose(0, 1) for each in (query, key, value))
        inputs = (torch.split(each, self._lens, dim=1) for each in heads)
        outputs = [self._attend_one(layer, q, k, v) for q, k, v in zip(*inputs, strict=True)]
        return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)

    def _attend_one(self, layer: LayerSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One input: query, key, value [heads, num_tokens, head_dim] -> like query."""
        bias, mask = layer.scores.relative_bias, None
        if bias is not None:
            query = query.flip(1)
            mask = self._biases(bias, query.shape[1], query.dtype)[None]
        output = F.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            attn_mask=mask,
            scale=layer.scores.scale,
            enable_gqa=layer.num_heads != layer.num_kv_heads,
        )[0]
        return output if bias is None else output.flip(1)

    def _biases(self, bias: RelativeBias, num_tokens: int, dtype: torch.dtype) -> Tensor:
        """Biases of an input's queries, from the last to the first: [num_heads, num_tokens, keys].

        Biases depend on the distance alone, so in this order the row of each query is that of the
        query before it, moved by one: all rows lie in a line of two rows' length. Held one by one,
        those of a long input would take gigabytes.
        """
        longest = max(self._lens)
        if self._line is None or self._line[0] is not bias:
            distances = torch.arange(1 - longest, longest, device=bias.weight.device)
            self._line = bias, bias.biases(distances).to(dtype).contiguous()
        line = self._line[1][:, longest - num_tokens : longest + num_tokens - 1]
        return line.unfold(1, num_tokens, 1)
