"""Command R7B and Command A (arXiv:2504.00698): three of four layers have windows, the others no
positions."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.cohere import read_cohere
from octavo.models.families.common import (
    periodic_layer_types,
    read_num_layers,
    read_window,
    read_windows,
)
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """Describe a Cohere2ForCausalLM by its config.json."""
    period = config.count("sliding_window_pattern", 4)
    default = periodic_layer_types(read_num_layers(config), period)
    windows = read_windows(config, default, read_window(config))
    return read_cohere(
        config,
        windows=windows,
        rotary_of_layer=[None if window is None else 0 for window in windows],
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
