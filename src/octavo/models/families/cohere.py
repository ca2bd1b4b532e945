"""Command R (Cohere, 2024): layer norms without a shift, parallel blocks, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.json_fields import Fields
from octavo.layers.config import NormConfig
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import check_layer_types, read_rotary_decoder
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """Describe a CohereForCausalLM by its config.json."""
    config.refuse("use_qk_norm", False)
    check_layer_types(config)
    return read_cohere(config, rope_theta=5e5)


def read_cohere(config: Fields, **options: Any) -> ModelDescription:
    """Both families of this name; `options` as `read_rotary_decoder` takes them."""
    hidden, bias = config.count("hidden_size"), config.flag("attention_bias", False)
    norm = NormConfig("layer", hidden, config.number("layer_norm_eps", 1e-5), bias=False)
    description = read_rotary_decoder(
        config,
        norm=norm,
        norm_placement="parallel",
        interleaved_rotary=True,
        qkv_bias=bias,
        output_bias=bias,
        tied_embeddings=True,
        **options,
    )
    logit_scale = config.number("logit_scale", 0.0625)
    return replace(description, final_norm=replace(norm, multiplier=logit_scale))


FAMILY = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    note="Command R, Aya 23, Aya Expanse; no norms of heads (Command R+)",
    read=read,
    weights=llama.WEIGHTS,
    options=frozenset({"logit_scale"}),
    eos_token_ids=(255001,),
)
