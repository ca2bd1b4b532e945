"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671): a Qwen2 with experts, and a shared one that has a
gate, in all layers or in some."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import (
    LAYER_TYPES,
    count_experts,
    gated_mlp,
    read_experts,
    read_num_layers,
    read_rotary_decoder,
    read_window,
    read_windows,
)
from octavo.models.family import Family

WEIGHTS = replace(
    llama.WEIGHTS,
    layer={
        **llama.WEIGHTS.layer,
        "mlp.router": ("mlp.gate", "mlp.gate.e_score_correction_bias"),
        "mlp.experts": tuple(
            f"mlp.experts.*.{name}" for name in ("gate_proj", "up_proj", "down_proj")
        ),
        "mlp.shared.up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "mlp.shared.down": "mlp.shared_expert.down_proj",
        "mlp.shared_gate": "mlp.shared_expert_gate",
    },
    merged={"mlp.experts": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")},
)


def read(config: Fields) -> ModelDescription:
    """Describe a Qwen2MoeForCausalLM by its config.json."""
    config.refuse("mlp_bias", False)
    shared = gated_mlp(config, config.count("shared_expert_intermediate_size", 5632))
    experts = read_experts(
        config,
        num_experts=count_experts(config, "num_experts", 60),
        top_k=config.count("num_experts_per_tok", 4),
        intermediate_size=config.count("moe_intermediate_size", 1408),
        renormalised=config.flag("norm_topk_prob", False),
        shared=shared,
        shared_gate=True,
    )
    return read_rotary_decoder(
        config,
        windows=_read_windows(config),
        num_kv_heads=16,
        experts=dict.fromkeys(sparse_layers(config), experts),
        qkv_bias=config.flag("qkv_bias", True),
    )


def sparse_layers(config: Fields) -> list[int]:
    """The layers with experts: every decoder_sparse_step-th, but for mlp_only_layers."""
    step = config.count("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(each) is int for each in dense):
        raise config.error("mlp_only_layers", "it must be a list of numbers of layers")
    return [i for i in range(read_num_layers(config)) if i not in dense and (i + 1) % step == 0]


def _read_windows(config: Fields) -> list[int | None]:
    """A window in every other layer before max_window_layers, or as layer_types says."""
    window = read_window(config) if config.flag("use_sliding_window", False) else None
    last = config.count("max_window_layers", 28)
    default = [
        LAYER_TYPES[window is not None and i % 2 == 0 and i < last]
        for i in range(read_num_layers(config))
    ]
    return read_windows(config, default, window)


FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    note="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    read=read,
    weights=WEIGHTS,
)
