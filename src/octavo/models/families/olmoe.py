"""OLMoE (arXiv:2409.02060): experts, and norms over all query heads and over all key heads."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import qwen2_moe
from octavo.models.families.common import (
    check_layer_types,
    count_experts,
    read_experts,
    read_num_layers,
    read_rotary_decoder,
)
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """Describe an OlmoeForCausalLM by its config.json."""
    check_layer_types(config)
    experts = read_experts(
        config,
        num_experts=count_experts(config, config.either("num_experts", "num_local_experts"), 64),
        top_k=config.count("num_experts_per_tok", 8),
        intermediate_size=config.count("intermediate_size"),
        renormalised=config.flag("norm_topk_prob", False),
    )
    bias = config.flag("attention_bias", False)
    return read_rotary_decoder(
        config,
        norm_eps=1e-5,
        experts=dict.fromkeys(range(read_num_layers(config)), experts),
        width_norms=True,
        qkv_bias=bias,
        output_bias=bias,
    )


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    note="OLMoE 1B-7B",
    read=read,
    weights=qwen2_moe.WEIGHTS,
    eos_token_ids=(50279,),
)
