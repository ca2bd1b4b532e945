"""GPT-2 (Radford et al., 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.layers.activation import ACTIVATIONS
from octavo.layers.embedding import Embedding, LMHead, PositionEmbedding
from octavo.layers.linear import Linear
from octavo.layers.norm import LayerNorm
from octavo.models.base import (
    CausalLM,
    WeightTargets,
    attention_layers,
    each_wanting,
    layer_targets,
    merged_qkv,
    module_targets,
    split_heads,
    transposed_targets,
)
from octavo.models.config import ModelConfig
from octavo.ops import AttentionBackend, LayerSpec

# The original checkpoint was saved from the body alone, without a prefix.
PREFIXES = ("transformer.",)
IGNORED = (r"h\.\d+\.attn\.(bias|masked_bias)",)  # the causal mask


class GPT2Layer(nn.Module):
    """Attention and a feed-forward block, each after a norm."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.spec = spec
        self.input_norm = LayerNorm(hidden, config.norm_eps)
        self.qkv = merged_qkv(config)
        self.output = Linear(hidden, hidden, config.output_bias)
        self.post_norm = LayerNorm(hidden, config.norm_eps)
        self.up = Linear(hidden, inner, config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]
        self.down = Linear(inner, hidden, config.mlp_bias)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        attention: AttentionBackend,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [num_tokens, hidden_size], still to be added to the residual; same out, but only
        the `wanted` tokens.

        On a GPU hidden may come and go in parts (Linear.forward_parts).
        """
        hidden, residual = self.input_norm.forward(hidden, residual)
        query, key, value = split_heads(self.qkv.forward(hidden), self.spec)
        attended = attention.forward(self.spec.layer_id, query, key, value)
        if wanted is not None:
            attended, residual = attended[wanted], residual[wanted]
        hidden = self.output.forward_parts(attended)
        hidden, residual = self.post_norm.forward(hidden, residual)
        inner = self.up.forward_activated(hidden, self.activation)
        return self.down.forward_parts(inner), residual

    def weight_targets(self) -> WeightTargets:
        return {
            **module_targets("ln_1", self.input_norm),
            **transposed_targets("attn.c_attn", self.qkv),
            **transposed_targets("attn.c_proj", self.output),
            **module_targets("ln_2", self.post_norm),
            **transposed_targets("mlp.c_fc", self.up),
            **transposed_targets("mlp.c_proj", self.down),
        }


class Model(CausalLM):
    """Owns the weights."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.attention_layers = attention_layers(config)
        self.embedding = Embedding(config.vocab_size, hidden)
        self.positions = PositionEmbedding(config.num_learned_positions, hidden)
        self.layers = nn.ModuleList(GPT2Layer(config, spec) for spec in self.attention_layers)
        self.norm = LayerNorm(hidden, config.norm_eps)
        self.head = LMHead(hidden, config.vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """See CausalLM.forward."""
        hidden = self.embedding.forward(input_ids).add_(self.positions.forward(positions))
        residual = None
        for layer, tokens in each_wanting(self.layers, wanted):
            hidden, residual = layer.forward(hidden, residual, attention, tokens)
        return self.norm.forward(hidden, residual)[0]

    def weight_targets(self) -> WeightTargets:
        """See CausalLM.weight_targets."""
        targets = {
            "wte.weight": self.embedding.weight,
            "wpe.weight": self.positions.weight,
            **module_targets("ln_f", self.norm),
            **module_targets("lm_head", self.head.linear),
        }
        targets |= layer_targets("h", self.layers)
        return targets
