"""Qwen3 (arXiv:2505.09388), dense: norms on query and key heads instead of Qwen2's biases."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import llama, qwen2
from octavo.models.families.common import read_rotary_decoder
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """Describe a Qwen3ForCausalLM by its config.json."""
    config.refuse("mlp_bias", False)
    bias = config.flag("attention_bias", False)
    return read_rotary_decoder(
        config,
        windows=qwen2.read_qwen_windows(config),
        num_kv_heads=32,
        head_dim=128,
        head_norms=True,
        qkv_bias=bias,
        output_bias=bias,
    )


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    note="Qwen3 (dense); query and key norms",
    read=read,
    weights=llama.WEIGHTS,
)
