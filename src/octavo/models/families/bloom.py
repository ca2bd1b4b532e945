"""BLOOM (arXiv:2211.05100): ALiBi instead of positions, a norm of the embeddings."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.layers.config import MLPConfig, NormConfig
from octavo.models.config import LayerConfig, ModelDescription
from octavo.models.families.common import (
    MAX_ALIBI_HEADS,
    MAX_LAYERS,
    alibi_slopes,
    plain_attention,
)
from octavo.models.family import Family
from octavo.models.weight_names import WeightNames

WEIGHTS = WeightNames(
    model={
        "embedding": "word_embeddings",
        "embedding_norm": "word_embeddings_layernorm",
        "norm": "ln_f",
        "head.linear": "lm_head",
    },
    layers="h",
    layer={
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attention.query_key_value",
        "attention.output": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    prefixes=("transformer.",),
    qkv_by_head=True,
)


def read(config: Fields) -> ModelDescription:
    """Describe a BloomForCausalLM by its config.json."""
    config.refuse("apply_residual_connection_post_layernorm", False)
    hidden = config.count(config.either("hidden_size", "n_embed"), 64)
    heads_field = config.either("n_head", "num_attention_heads")
    heads = config.count(heads_field, 8, MAX_ALIBI_HEADS)
    num_layers = config.count(config.either("n_layer", "num_hidden_layers"), 2, MAX_LAYERS)
    attention = plain_attention(config, hidden, heads, heads_field)
    norm = NormConfig("layer", hidden, config.number("layer_norm_epsilon", 1e-5))
    layer = LayerConfig(
        attention=replace(attention, alibi_slopes=alibi_slopes(heads)),
        mlp=MLPConfig(
            kind="plain",
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            activation="gelu_tanh",
            bias=True,
        ),
        norm=norm,
    )
    return ModelDescription(
        vocab_size=config.count("vocab_size", 250880),
        hidden_size=hidden,
        embedding_norm=norm,
        max_model_len=config.count("seq_length", 2048),
        layers=(layer,) * num_layers,
        final_norm=norm,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    note="BLOOM and BLOOMZ, 560M to 176B; ALiBi",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(2,),
)
