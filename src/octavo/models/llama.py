"""Llama 1 to 3 and its kin: Mistral (sliding window), Qwen2 (biases), Qwen3 (norms on Q and K).

Sources: arXiv:2302.13971, arXiv:2310.06825, arXiv:2407.10671, arXiv:2505.09388. What differs
between them is in the config; one layer serves all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.layers.activation import GATED_ACTIVATIONS
from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.linear import Linear, MergedLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import rotary_table
from octavo.models.base import (
    CausalLM,
    WeightTargets,
    attention_layers,
    each_wanting,
    layer_targets,
    merged_qkv,
    merged_targets,
    module_targets,
    split_heads,
)
from octavo.models.config import ModelConfig
from octavo.ops import AttentionBackend, LayerSpec, RotaryTable

PREFIXES = ("model.",)
# Old checkpoints carry the rotary frequencies, which follow from the config.
IGNORED = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


class LlamaLayer(nn.Module):
    """Attention and a gated feed-forward block, each after a norm."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.spec = spec
        self.input_norm = RMSNorm(hidden, config.norm_eps)
        self.qkv = merged_qkv(config)
        self.query_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.head_norms = (
            (self.query_norm, self.key_norm) if self.query_norm and self.key_norm else None
        )
        self.output = Linear(config.num_heads * config.head_dim, hidden, config.output_bias)
        self.post_norm = RMSNorm(hidden, config.norm_eps)
        self.gate_up = MergedLinear(hidden, (inner, inner), config.mlp_bias)
        self.activation = GATED_ACTIVATIONS[config.activation]
        self.down = Linear(inner, hidden, config.mlp_bias)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        attention: AttentionBackend,
        rotary: RotaryTable,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [num_tokens, hidden_size], still to be added to the residual; same out, but only
        the `wanted` tokens.

        On a GPU hidden may come and go in parts (Linear.forward_parts).
        """
        hidden, residual = self.input_norm.forward(hidden, residual)
        query, key, value = split_heads(self.qkv.forward(hidden), self.spec)
        attended = attention.forward(self.spec.layer_id, query, key, value, rotary, self.head_norms)
        if wanted is not None:
            attended, residual = attended[wanted], residual[wanted]
        hidden = self.output.forward_parts(attended)
        hidden, residual = self.post_norm.forward(hidden, residual)
        inner = self.gate_up.forward_activated(hidden, self.activation)
        return self.down.forward_parts(inner), residual

    def weight_targets(self) -> WeightTargets:
        targets = {
            **module_targets("input_layernorm", self.input_norm),
            **merged_targets([f"self_attn.{part}_proj" for part in "qkv"], self.qkv),
            **module_targets("self_attn.o_proj", self.output),
            **module_targets("post_attention_layernorm", self.post_norm),
            **merged_targets(["mlp.gate_proj", "mlp.up_proj"], self.gate_up),
            **module_targets("mlp.down_proj", self.down),
        }
        if self.query_norm is not None and self.key_norm is not None:
            targets |= module_targets("self_attn.q_norm", self.query_norm)
            targets |= module_targets("self_attn.k_norm", self.key_norm)
        return targets


class Model(CausalLM):
    """Owns the weights and the rotary table."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        assert config.rotary is not None
        self.attention_layers = attention_layers(config)
        self.rotary = rotary_table(config.rotary, config.head_dim, config.max_model_len, device)
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, spec) for spec in self.attention_layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = LMHead(config.hidden_size, config.vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """See CausalLM.forward; the backend applies the rotary embedding, from its own plan."""
        hidden, residual = self.embedding.forward(input_ids), None
        for layer, tokens in each_wanting(self.layers, wanted):
            hidden, residual = layer.forward(hidden, residual, attention, self.rotary, tokens)
        return self.norm.forward(hidden, residual)[0]

    def weight_targets(self) -> WeightTargets:
        """See CausalLM.weight_targets."""
        targets = {
            "embed_tokens.weight": self.embedding.weight,
            **module_targets("norm", self.norm),
            **module_targets("lm_head", self.head.linear),
        }
        targets |= layer_targets("layers", self.layers)
        return targets
