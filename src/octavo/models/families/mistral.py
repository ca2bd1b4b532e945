"""Mistral (arXiv:2310.06825): a Llama with a sliding window in all layers."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import read_rotary_decoder, read_window, uniform_windows
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """Describe a MistralForCausalLM by its config.json."""
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    windows = uniform_windows(config, read_window(config))
    return read_rotary_decoder(config, windows=windows, num_kv_heads=8)


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    note="Mistral 7B; sliding window",
    read=read,
    weights=llama.WEIGHTS,
    eos_token_ids=(2,),
)
