"""Qwen3-MoE (arXiv:2505.09388): a Qwen3 with experts in all layers or in some."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import qwen2_moe
from octavo.models.families.common import (
    count_experts,
    read_experts,
    read_num_layers,
    read_rotary_decoder,
    read_window,
)
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """Describe a Qwen3MoeForCausalLM by its config.json."""
    config.refuse("mlp_bias", False)
    experts = read_experts(
        config,
        # The second name is that of files which transformers 5 has written.
        num_experts=count_experts(config, config.either("num_experts", "num_local_experts"), 128),
        top_k=config.count("num_experts_per_tok", 8),
        intermediate_size=config.count("moe_intermediate_size", 768),
        renormalised=config.flag("norm_topk_prob", False),
    )
    window = read_window(config) if config.flag("use_sliding_window", False) else None
    bias = config.flag("attention_bias", False)
    return read_rotary_decoder(
        config,
        windows=[window] * read_num_layers(config),
        num_kv_heads=4,
        experts=dict.fromkeys(qwen2_moe.sparse_layers(config), experts),
        head_norms=True,
        qkv_bias=bias,
        output_bias=bias,
    )


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    note="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B",
    read=read,
    weights=qwen2_moe.WEIGHTS,
)
