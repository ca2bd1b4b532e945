"""OLMo 3 (Ai2, 2025): an OLMo 2 with windows in three of four layers, which have a rotary embedding
of their own."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import exaone4
from octavo.models.families.common import (
    LAYER_TYPES,
    periodic_layer_types,
    read_heads,
    read_num_layers,
    read_rotary_decoder,
    read_window,
    read_windows,
)
from octavo.models.family import Family
from octavo.models.rope_scaling import read_rotaries

ROPE_THETAS = {kind: ("rope_theta", 5e5) for kind in LAYER_TYPES}


def read(config: Fields) -> ModelDescription:
    """Describe an Olmo3ForCausalLM by its config.json."""
    default = periodic_layer_types(read_num_layers(config), 4)
    windows = read_windows(config, default, read_window(config))
    positions = config.count("max_position_embeddings")
    if config.get("rope_parameters", None) is None:
        # Which other base layers with windows have depends on the version of transformers.
        config.refuse("rope_theta", 5e5)
    bias = config.flag("attention_bias", False)
    return read_rotary_decoder(
        config,
        windows=windows,
        norm_eps=1e-5,
        norm_placement="branch",
        rotaries=read_rotaries(config, read_heads(config).head_dim, positions, ROPE_THETAS),
        rotary_of_layer=[int(window is not None) for window in windows],
        width_norms=True,
        qkv_bias=bias,
        output_bias=bias,
    )


FAMILY = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    note="OLMo 3 7B and 32B; windows",
    read=read,
    weights=exaone4.WEIGHTS,
    eos_token_ids=(50279,),
)
