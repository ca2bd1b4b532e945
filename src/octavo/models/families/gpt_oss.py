"""gpt-oss (arXiv:2508.10925): experts with biases and clamped activations, attention sinks, and a
window in every other layer.

The published checkpoints have their experts in MXFP4. Where a device has no kernels for that, they
are dequantized when they are loaded and take four times as much memory.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import (
    LAYER_TYPES,
    count_experts,
    read_experts,
    read_num_layers,
    read_rotary_decoder,
    read_window,
    read_windows,
)
from octavo.models.family import Family

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ALPHA, LIMIT = 1.702, 7.0  # of the one activation that kernels have
WEIGHTS = replace(
    llama.WEIGHTS,
    layer={
        **llama.WEIGHTS.layer,
        "attention.sinks": "self_attn.sinks",
        "mlp.router": "mlp.router",
        "mlp.experts": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    },
)


def read(config: Fields) -> ModelDescription:
    """Describe a GptOssForCausalLM by its config.json."""
    config.refuse("swiglu_alpha", ALPHA)
    config.refuse("swiglu_limit", LIMIT)
    if all(config.get(name, None) is None for name in ("rope_parameters", "rope_scaling")):
        config = Fields(config.where, config.values | {"rope_parameters": YARN})
    num_layers = read_num_layers(config)
    experts = read_experts(
        config,
        # The first name is that of the published files.
        num_experts=count_experts(config, config.either("num_local_experts", "num_experts"), 128),
        top_k=config.count("num_experts_per_tok", 4),
        intermediate_size=config.count("intermediate_size"),
        activation=config.choice("hidden_act", {"silu": "clamped_swiglu"}, "silu"),
        bias=True,
        alternating=True,
        transposed=True,
        router_bias=True,
    )
    default = [LAYER_TYPES[i % 2 == 0] for i in range(num_layers)]
    bias = config.flag("attention_bias", True)
    return read_rotary_decoder(
        config,
        windows=read_windows(config, default, read_window(config, 128)),
        num_kv_heads=8,
        head_dim=64,
        norm_eps=1e-5,
        rope_theta=150000.0,
        experts=dict.fromkeys(range(num_layers), experts),
        sinks=True,
        qkv_bias=bias,
        output_bias=bias,
    )


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    note="gpt-oss 20b and 120b; experts in MXFP4",
    read=read,
    weights=WEIGHTS,
)
