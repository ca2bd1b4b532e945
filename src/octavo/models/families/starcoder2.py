"""StarCoder2 (arXiv:2402.19173): layer norms, rotary positions, plain MLPs, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.layers.config import MLPConfig, NormConfig
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import (
    PLAIN_ACTIVATIONS,
    read_rotary_decoder,
    read_window,
    uniform_windows,
)
from octavo.models.family import Family

WEIGHTS = replace(
    llama.WEIGHTS,
    layer={**llama.WEIGHTS.layer, "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
)


def read(config: Fields) -> ModelDescription:
    """Describe a Starcoder2ForCausalLM by its config.json."""
    hidden, bias = config.count("hidden_size"), config.flag("use_bias", True)
    return read_rotary_decoder(
        config,
        windows=uniform_windows(config, read_window(config, None)),
        num_kv_heads=2,
        norm=NormConfig("layer", hidden, config.number("norm_epsilon", 1e-5)),
        qkv_bias=bias,
        output_bias=bias,
        mlp=MLPConfig(
            kind="plain",
            hidden_size=hidden,
            intermediate_size=config.count("intermediate_size"),
            activation=config.choice("hidden_act", PLAIN_ACTIVATIONS, "gelu_pytorch_tanh"),
            bias=bias,
        ),
        tied_embeddings=True,
    )


FAMILY = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    note="StarCoder2 3B to 15B; sliding window",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(50256,),
)
