"""GLM-4.5 to 4.7 (arXiv:2508.06471): experts chosen by sigmoids and corrections, and a shared one,
in all layers but the first few."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import qwen2_moe
from octavo.models.families.common import (
    MAX_EXPERTS,
    check_layer_types,
    count_experts,
    gated_mlp,
    read_experts,
    read_num_layers,
    read_rotary_decoder,
)
from octavo.models.family import Family
from octavo.routing import Scoring

WEIGHTS = replace(
    qwen2_moe.WEIGHTS,
    layer={
        **qwen2_moe.WEIGHTS.layer,
        "mlp.shared.up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "mlp.shared.down": "mlp.shared_experts.down_proj",
    },
    # The layer that predicts a second token, after the 46 or 92 of the model.
    ignored=(r"layers\.(46|92)\..*",),
)


def read(config: Fields) -> ModelDescription:
    """Describe a Glm4MoeForCausalLM by its config.json."""
    check_layer_types(config)
    num_layers = read_num_layers(config)
    size = config.count("moe_intermediate_size", 1408)
    experts = read_experts(
        config,
        num_experts=count_experts(
            config, config.either("n_routed_experts", "num_local_experts"), 128
        ),
        top_k=config.count("num_experts_per_tok", 8),
        intermediate_size=size,
        scoring=Scoring.SIGMOID,
        correction=True,
        renormalised=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=config.count("n_group", 1),
        top_groups=config.count("topk_group", 1),
        shared=gated_mlp(config, size * config.count("n_shared_experts", 1, MAX_EXPERTS)),
    )
    first = config.get("first_k_dense_replace", 1)
    if type(first) is not int or first < 0:
        raise config.error("first_k_dense_replace", "it must be a number of layers")
    return read_rotary_decoder(
        config,
        num_kv_heads=8,
        norm_eps=1e-5,
        partial_rotary=0.5,
        experts=dict.fromkeys(range(first, num_layers), experts),
        head_norms=config.flag("use_qk_norm", False),
        qkv_bias=config.flag("attention_bias", False),
    )


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    note="GLM-4.5, 4.5-Air, 4.6, 4.7; without predicting a second token",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(151329, 151336, 151338),
)
