"""Qwen2 (arXiv:2407.10671): a Llama with biases on Q, K and V, and windows in some layers."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import read_gated_decoder, read_num_layers, read_window
from octavo.models.family import Family

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def read(config: Fields) -> ModelDescription:
    """From config.json of a Qwen2ForCausalLM."""
    config.refuse("attention_bias", True)
    config.refuse("mlp_bias", False)
    windows = read_windows(config)
    return read_gated_decoder(config, windows=windows, num_kv_heads=32, qkv_bias=True)


def read_windows(config: Fields) -> list[int | None]:
    """A window for every layer from max_window_layers on, or as layer_types says."""
    num_layers = read_num_layers(config)
    window = read_window(config) if config.flag("use_sliding_window", False) else None
    if config.get("layer_types", None) is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise config.error("max_window_layers", "it must be an integer")
        return [window if i >= first else None for i in range(num_layers)]
    layer_types = config.names("layer_types", [])
    if len(layer_types) != num_layers or not set(layer_types) <= _LAYER_TYPES:
        expected = f"it must name {num_layers} layers, each {sorted(_LAYER_TYPES)}"
        raise config.error("layer_types", expected)
    if window is None and "sliding_attention" in layer_types:
        raise config.error("layer_types", "use_sliding_window and sliding_window set no window")
    return [window if kind == "sliding_attention" else None for kind in layer_types]


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    note="Qwen2, Qwen2.5; full attention, or sliding windows in some layers",
    read=read,
    weights=llama.WEIGHTS,
)
