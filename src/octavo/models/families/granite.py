"""Granite 3 (arXiv:2405.04324): a Llama with multipliers.

What each block returns is multiplied by m before it is added to the residual stream. octavo keeps
the residual stream divided by m instead, for which nothing has to be computed: RMS norms, which are
all that reads it, do not see a factor, if eps is divided by m squared. (In float16, whose range is
small, hidden states are that much larger; the checkpoints are bfloat16.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from octavo.json_fields import Fields
from octavo.layers.config import EmbeddingScale, ExpertsConfig, NormConfig
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import check_layer_types, read_rotary_decoder
from octavo.models.family import Family

OPTIONS = frozenset(
    {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
)


def read(config: Fields) -> ModelDescription:
    """Describe a GraniteForCausalLM by its config.json."""
    return read_granite(config)


def read_granite(
    config: Fields, experts: Mapping[int, ExpertsConfig] | None = None
) -> ModelDescription:
    """Describe a Granite model; experts: those of some layers, by number; None: of no layer."""
    check_layer_types(config)
    multiplier = config.number("residual_multiplier", 1.0)
    eps = config.number("rms_norm_eps", 1e-6) / multiplier**2
    norm = NormConfig("rms", config.count("hidden_size"), eps)
    bias = config.flag("attention_bias", False)
    description = read_rotary_decoder(
        config,
        norm=norm,
        scale=config.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        experts=experts,
    )
    embedding_scale = config.number("embedding_multiplier", 1.0) / multiplier
    return replace(
        description,
        embedding_scale=EmbeddingScale(embedding_scale),
        final_norm=replace(norm, multiplier=1 / config.number("logits_scaling", 1.0)),
    )


FAMILY = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    note="Granite 3.x dense; multipliers",
    read=read,
    weights=llama.WEIGHTS,
    options=OPTIONS,
    eos_token_ids=(2,),
)
