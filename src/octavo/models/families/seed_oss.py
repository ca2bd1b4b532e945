"""Seed-OSS (ByteDance, 2025): a Llama with biases on Q, K and V and heads of their own size."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import check_layer_types, read_rotary_decoder
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """Describe a SeedOssForCausalLM by its config.json."""
    check_layer_types(config)
    return read_rotary_decoder(
        config,
        num_kv_heads=8,
        head_dim=128,
        qkv_bias=config.flag("attention_bias", True),
        output_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )


FAMILY = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    note="Seed-OSS 36B",
    read=read,
    weights=llama.WEIGHTS,
    eos_token_ids=(2,),
)
