"""SmolLM3: a Llama without rotary positions in every fourth layer (arXiv:2501.18795)."""

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
    """Describe a SmolLM3ForCausalLM by its config.json."""
    rotates = _read_rotating_layers(config)
    window = read_window(config, None) if config.flag("use_sliding_window", False) else None
    default = [LAYER_TYPES[window is not None and not rotated] for rotated in rotates]
    bias = config.flag("attention_bias", False)
    return read_rotary_decoder(
        config,
        windows=read_windows(config, default, window),
        num_kv_heads=4,
        rope_theta=2e6,
        rotary_of_layer=[0 if rotated else None for rotated in rotates],
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        tied_embeddings=True,
    )


def _read_rotating_layers(config: Fields) -> list[bool]:
    """no_rope_layers, in which 1 means, despite the name, that a layer has rotary positions."""
    num_layers = read_num_layers(config)
    interval = config.count("no_rope_layer_interval", 4)
    values = config.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(num_layers)])
    if (
        not isinstance(values, list)
        or len(values) != num_layers
        or any(value not in (0, 1) for value in values)
    ):
        raise config.error("no_rope_layers", f"it must be a list of {num_layers} zeros and ones")
    return [value == 1 for value in values]


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    note="SmolLM3 3B; layers without rotary positions",
    read=read,
    weights=llama.WEIGHTS,
    options=frozenset({"no_rope_layers"}),
    eos_token_ids=(128001,),
)
