"""Command R7B and Command A (arXiv:2504.00698): three of four layers have windows, the others no
positions."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.cohere import read_cohere
from octavo.models.families.common import (
    periodic_layer_types,
    read_layer_types,
    read_num_layers,
    read_window,
    windows_of,
)
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """From config.json of a Cohere2ForCausalLM."""
    period = config.count("sliding_window_pattern", 4)
    layer_types = read_layer_types(config, periodic_layer_types(read_num_layers(config), period))
    return read_cohere(
        config,
        windows=windows_of(config, layer_types, read_window(config)),
        rotary_of_layer=[0 if kind == "sliding_attention" else None for kind in layer_types],
    )


FAMILY = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    note="Command R7B, Command A; windows, layers without rotary positions",
    read=read,
    weights=llama.WEIGHTS,
    options=frozenset({"logit_scale"}),
    eos_token_ids=(255001,),
)
