"""OPT (arXiv:2205.01068), with the 350m variant's norms after each block and small embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.layers.activation import ACTIVATIONS
from octavo.layers.embedding import Embedding, LMHead, PositionEmbedding
from octavo.layers.linear import Linear
from octavo.layers.norm import LayerNorm, add_parts
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
from octavo.ops import AttentionBackend, LayerSpec

PREFIXES = ("model.decoder.", "decoder.")
IGNORED = ("version",)  # of the file format that Meta trained with


class OPTLayer(nn.Module):
    """Attention and a feed-forward block; the norms come before each block, or after it."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.spec = spec
        self.norm_after = config.norm_after
        self.attention_norm = LayerNorm(hidden, config.norm_eps, config.norm_affine)
        self.qkv = merged_qkv(config)
        self.output = Linear(hidden, hidden, config.output_bias)
        self.up_norm = LayerNorm(hidden, config.norm_eps, config.norm_affine)
        self.up = Linear(hidden, inner, config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]
        self.down = Linear(inner, hidden, config.mlp_bias)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        attention: AttentionBackend,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [num_tokens, hidden_size], still to be added to the residual; same out, but only
        the `wanted` tokens.

        With norms after the blocks nothing is pending between layers: residual is None. On a GPU
        hidden may come and go in parts (Linear.forward_parts).
        """
        if self.norm_after:
            residual = hidden
        else:
            hidden, residual = self.attention_norm.forward(hidden, residual)
        query, key, value = split_heads(self.qkv.forward(hidden), self.spec)
        attended = attention.forward(self.spec.layer_id, query, key, value)
        if wanted is not None:
            attended, residual = attended[wanted], residual[wanted]
        hidden = self.output.forward_parts(attended)
        if self.norm_after:
            hidden, _ = self.attention_norm.forward(hidden, residual)
            hidden, _ = self.up_norm.forward(self._feed_forward(hidden), hidden)
            return hidden, None
        hidden, residual = self.up_norm.forward(hidden, residual)
        return self._feed_forward(hidden), residual

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        return self.down.forward_parts(self.up.forward_activated(hidden, self.activation))

    def weight_targets(self) -> WeightTargets:
        return {
            **module_targets("self_attn_layer_norm", self.attention_norm),
            **merged_targets([f"self_attn.{part}_proj" for part in "qkv"], self.qkv),
            **module_targets("self_attn.out_proj", self.output),
            **module_targets("final_layer_norm", self.up_norm),
            **module_targets("fc1", self.up),
            **module_targets("fc2", self.down),
        }


class Model(CausalLM):
    """Owns the weights."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        hidden, embedding = config.hidden_size, config.embedding_size
        projected = embedding != hidden
        self.attention_layers = attention_layers(config)
        self.embedding = Embedding(config.vocab_size, embedding)
        self.positions = PositionEmbedding(
            config.num_learned_positions, hidden, config.learned_position_offset
        )
        self.project_in = Linear(embedding, hidden, bias=False) if projected else None
        self.layers = nn.ModuleList(OPTLayer(config, spec) for spec in self.attention_layers)
        self.norm = (
            LayerNorm(hidden, config.norm_eps, config.norm_affine) if config.final_norm else None
        )
        self.project_out = Linear(hidden, embedding, bias=False) if projected else None
        self.head = LMHead(embedding, config.vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """See CausalLM.forward."""
        hidden, residual = self.embedding.forward(input_ids), None
        if self.project_in is not None:
            hidden = self.project_in.forward(hidden)
        hidden = hidden.add_(self.positions.forward(positions))
        for layer, tokens in each_wanting(self.layers, wanted):
            hidden, residual = layer.forward(hidden, residual, attention, tokens)
        if self.norm is not None:
            return self.norm.forward(hidden, residual)[0]
        return hidden if residual is None else add_parts(residual, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM.logits."""
        if self.project_out is not None:
            hidden = self.project_out.forward(hidden)
        return super().logits(hidden)

    def weight_targets(self) -> WeightTargets:
        """See CausalLM.weight_targets."""
        targets = {
            "embed_tokens.weight": self.embedding.weight,
            "embed_positions.weight": self.positions.weight,
            **module_targets("lm_head", self.head.linear),
        }
        if self.norm is not None:
            targets |= module_targets("final_layer_norm", self.norm)
        if self.project_in is not None and self.project_out is not None:
            targets |= module_targets("project_in", self.project_in)
            targets |= module_targets("project_out", self.project_out)
        targets |= layer_targets("layers", self.layers)
        return targets
