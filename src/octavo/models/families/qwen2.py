"""Qwen2 (arXiv:2407.10671): a Llama with biases on Q, K and V, and windows in some layers."""

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
    """Describe a Qwen2ForCausalLM by its config.json."""
    config.refuse("attention_bias", True)
    config.refuse("mlp_bias", False)
    windows = read_qwen_windows(config)
    return read_rotary_decoder(config, windows=windows, num_kv_heads=32, qkv_bias=True)


def read_qwen_windows(config: Fields) -> list[int | None]:
    """A window for every layer from max_window_layers on, or as layer_types says."""
    num_layers = read_num_layers(config)
    window = read_window(config) if config.flag("use_sliding_window", False) else None
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise config.error("max_window_layers", "it must be an integer")
    if window is None and "sliding_attention" in config.names("layer_types", []):
        raise config.error("layer_types", "use_sliding_window and sliding_window set no window")
    default = [LAYER_TYPES[window is not None and i >= first] for i in range(num_layers)]
    return read_windows(config, default, window)


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    note="Qwen2, Qwen2.5; full attention, or sliding windows in some layers",
    read=read,
    weights=llama.WEIGHTS,
)
