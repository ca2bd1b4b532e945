"""Gemma (arXiv:2403.08295): a Llama with GELU, scaled embeddings, and norms whose scales are stored
minus 1. What its successors share with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.json_fields import Fields
from octavo.layers.config import EmbeddingScale, NormConfig
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import check_layer_types, read_rotary_decoder
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """Describe a GemmaForCausalLM by its config.json."""
    check_layer_types(config)
    if config.get("hidden_act", None) == "gelu":  # the first checkpoints, which mean its tanh form
        config = Fields(config.where, config.values | {"hidden_act": "gelu_pytorch_tanh"})
    return read_gemma(config, num_kv_heads=16, activation_field="hidden_act")


def read_gemma(config: Fields, **options: Any) -> ModelDescription:
    """All families of this name; `options` as `read_rotary_decoder` takes them."""
    hidden, bias = config.count("hidden_size"), config.flag("attention_bias", False)
    description = read_rotary_decoder(
        config,
        head_dim=256,
        norm=NormConfig("rms", hidden, config.number("rms_norm_eps", 1e-6), offset=1.0),
        qkv_bias=bias,
        output_bias=bias,
        activation="gelu_pytorch_tanh",
        tied_embeddings=True,
        **options,
    )
    return replace(description, embedding_scale=EmbeddingScale(hidden**0.5, is_rounded=True))


FAMILY = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    note="Gemma 2B and 7B, CodeGemma",
    read=read,
    weights=llama.WEIGHTS,
    eos_token_ids=(1,),
)
