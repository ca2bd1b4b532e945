"""Ministral (Mistral AI, 2024): a Mistral with windows in some layers."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import (
    LAYER_TYPES,
    read_num_layers,
    read_rotary_decoder,
    read_window,
    read_windows,
)
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """Describe a MinistralForCausalLM by its config.json."""
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    window = read_window(config)
    default = [LAYER_TYPES[window is not None]] * read_num_layers(config)
    windows = read_windows(config, default, window)
    return read_rotary_decoder(config, windows=windows, num_kv_heads=8)


FAMILY = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    note="Ministral 8B; sliding windows in some layers",
    read=read,
    weights=llama.WEIGHTS,
    eos_token_ids=(2,),
)
