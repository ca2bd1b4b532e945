"""Phi-3.5-MoE (arXiv:2404.14219): layer norms, LongRoPE, and experts that SparseMixer chooses."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.layers.config import NormConfig
from octavo.models.config import ModelDescription
from octavo.models.families import mixtral
from octavo.models.families.common import (
    count_experts,
    read_experts,
    read_num_layers,
    read_rotary_decoder,
    read_window,
    uniform_windows,
)
from octavo.models.family import Family
from octavo.routing import Scoring

WEIGHTS = replace(mixtral.WEIGHTS, merged={**mixtral.WEIGHTS.merged, "mlp.router": "mlp.router"})


def read(config: Fields) -> ModelDescription:
    """Describe a PhimoeForCausalLM by its config.json."""
    num_layers = read_num_layers(config)
    config.refuse("num_experts_per_tok", 2)  # SparseMixer chooses two, whatever it says
    experts = read_experts(
        config,
        num_experts=count_experts(config, "num_local_experts", 16),
        top_k=2,
        intermediate_size=config.count("intermediate_size"),
        scoring=Scoring.SPARSEMIXER,
        jitter=_read_jitter(config),
        renormalised=False,
    )
    bias = config.flag("attention_bias", False)
    description = read_rotary_decoder(
        _with_attention_factor(config),
        windows=uniform_windows(config, read_window(config, None)),
        num_kv_heads=8,
        norm=NormConfig("layer", config.count("hidden_size"), config.number("rms_norm_eps", 1e-5)),
        rope_theta=1e6,
        experts=dict.fromkeys(range(num_layers), experts),
        qkv_bias=bias,
        output_bias=bias,
    )
    return replace(description, head_bias=config.flag("lm_head_bias", False))


def _read_jitter(config: Fields) -> float:
    """The jitter; with 0 both experts have the weight 1, since none is as near as the best one."""
    name, default = "router_jitter_noise", 0.01
    is_zero = not isinstance(config.get(name, default), bool) and config.get(name, default) == 0
    return 0.0 if is_zero else config.number(name, default)


def _with_attention_factor(config: Fields) -> Fields:
    """The family's short_mscale and long_mscale as the attention_factor of other families."""
    values = dict(config.values)
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name, None)
        if not isinstance(rope, dict) or "short_mscale" not in rope:
            continue
        fields = Fields(f"{config.where}: {name}", rope)
        factor = fields.number("short_mscale")
        if fields.number("long_mscale") != factor:
            raise fields.error("long_mscale", "octavo serves one factor, that of short_mscale")
        rest = {key: rope[key] for key in rope.keys() - {"short_mscale", "long_mscale"}}
        values[name] = rest | {"attention_factor": factor}
    return Fields(config.where, values)


FAMILY = Family(
    model_type="phimoe",
    architecture="PhimoeForCausalLM",
    other_names=("PhiMoEForCausalLM",),
    note="Phi-3.5-MoE; LongRoPE by max_model_len",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(2,),
)
