"""Mixtral (arXiv:2401.04088): a Mistral with experts."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import llama, qwen2_moe
from octavo.models.families.common import (
    count_experts,
    read_experts,
    read_num_layers,
    read_rotary_decoder,
    read_window,
    uniform_windows,
)
from octavo.models.family import Family

WEIGHTS = replace(
    llama.WEIGHTS,
    layer={
        **llama.WEIGHTS.layer,
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts": tuple(f"block_sparse_moe.experts.*.{name}" for name in ("w1", "w3", "w2")),
    },
    merged={**qwen2_moe.WEIGHTS.merged, "mlp.router": "mlp.gate"},
)


def read(config: Fields) -> ModelDescription:
    """Describe a MixtralForCausalLM by its config.json."""
    config.refuse("attention_bias", False)
    num_layers = read_num_layers(config)
    experts = read_experts(
        config,
        num_experts=count_experts(config, config.either("num_local_experts", "num_experts"), 8),
        top_k=config.count("num_experts_per_tok", 2),
        intermediate_size=config.count("intermediate_size"),
    )
    return read_rotary_decoder(
        config,
        windows=uniform_windows(config, read_window(config, None)),
        num_kv_heads=8,
        norm_eps=1e-5,
        rope_theta=1e6,
        experts=dict.fromkeys(range(num_layers), experts),
    )


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    note="Mixtral 8x7B, 8x22B",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(2,),
)
