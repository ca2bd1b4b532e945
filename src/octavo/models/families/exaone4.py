"""EXAONE 4.0 (arXiv:2507.11407): norms of the blocks' results and of heads, and windows in three of
four layers of the large model, whose other layers have no positions."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import (
    periodic_layer_types,
    read_num_layers,
    read_rotary_decoder,
    read_window,
    read_windows,
)
from octavo.models.family import Family

# Norms of the blocks' results, as in OLMo 2.
WEIGHTS = replace(
    llama.WEIGHTS,
    layer={
        **llama.WEIGHTS.layer,
        "attention_norm": "post_attention_layernorm",
        "mlp_norm": "post_feedforward_layernorm",
    },
)


def read(config: Fields) -> ModelDescription:
    """Describe an Exaone4ForCausalLM by its config.json."""
    num_layers, window = read_num_layers(config), read_window(config)
    default = ["full_attention"] * num_layers
    if window is not None and config.get("layer_types", None) is None:
        default = periodic_layer_types(num_layers, config.count("sliding_window_pattern", 4))
    windows = read_windows(config, default, window)
    rotates = [window is None or each is not None for each in windows]
    return read_rotary_decoder(
        config,
        windows=windows,
        num_kv_heads=32,
        norm_eps=1e-5,
        norm_placement="branch",
        rotary_of_layer=[0 if rotated else None for rotated in rotates],
        head_norms=True,
    )


FAMILY = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    note="EXAONE 4.0 1.2B and 32B; windows, layers without rotary positions",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(2,),
)
