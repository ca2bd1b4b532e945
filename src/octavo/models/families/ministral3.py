"""Ministral 3 (Mistral AI, 2025): a Mistral with YaRN, whose queries grow with their position."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.layers.config import QueryScaleConfig
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import read_rotary_decoder, read_window, uniform_windows
from octavo.models.family import Family

BETA = "llama_4_scaling_beta"
DEFAULT_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, BETA: 0.1},
    **{"original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}


def read(config: Fields) -> ModelDescription:
    """Describe a Ministral3ForCausalLM by its config.json."""
    name, old_name = "rope_parameters", "rope_scaling"
    if config.get(name, None) is None:
        moved = {name: config.get(old_name, None), old_name: None}
        config = Fields(config.where, config.values | moved)
    rope = config.part(name, DEFAULT_ROPE)
    # max_position_embeddings is there, too, and not used.
    unknown = {BETA, "max_position_embeddings"}
    known = {key: value for key, value in rope.values.items() if key not in unknown}
    description = read_rotary_decoder(
        Fields(config.where, config.values | {name: known}),
        windows=uniform_windows(config, read_window(config, None)),
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
    )
    if rope.get(BETA) == 0:
        return description
    original = rope.count("original_max_position_embeddings")
    scale = QueryScaleConfig(rope.number(BETA), original)
    layers = [
        replace(layer, attention=replace(layer.attention, query_scale=scale))
        for layer in description.layers
    ]
    return replace(description, layers=tuple(layers))


FAMILY = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    note="Ministral 3 without images",
    read=read,
    weights=llama.WEIGHTS,
    eos_token_ids=(2,),
)
