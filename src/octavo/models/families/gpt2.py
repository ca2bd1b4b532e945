"""GPT-2 (Radford et al., 2019)."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.layers.config import MLPConfig, NormConfig, PositionTable
from octavo.models.config import LayerConfig, ModelDescription
from octavo.models.families.common import MAX_LAYERS, PLAIN_ACTIVATIONS, plain_attention
from octavo.models.family import Family
from octavo.models.weight_names import WeightNames

WEIGHTS = WeightNames(
    model={
        "embedding": "wte",
        "positions": "wpe",
        "norm": "ln_f",
        "head.linear": "lm_head",
    },
    layers="h",
    layer={
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    prefixes=("transformer.",),  # the original checkpoint was saved from the body alone
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),  # the causal mask
    transposed=True,
)


def read(config: Fields) -> ModelDescription:
    """Describe a GPT2LMHeadModel by its config.json."""
    config.refuse("add_cross_attention", False)
    hidden = config.count(config.either("n_embd", "hidden_size"), 768)
    heads_field = config.either("n_head", "num_attention_heads")
    heads = config.count(heads_field, 12)
    num_layers = config.count(config.either("n_layer", "num_hidden_layers"), 12, MAX_LAYERS)
    positions = config.count(config.either("n_positions", "max_position_embeddings"), 1024)
    attention = plain_attention(config, hidden, heads, heads_field)
    scale = attention.scale if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    norm = NormConfig("layer", hidden, config.number("layer_norm_epsilon", 1e-5))
    mlp = MLPConfig(
        kind="plain",
        hidden_size=hidden,
        intermediate_size=config.count("n_inner", 4 * hidden),
        activation=config.choice("activation_function", PLAIN_ACTIVATIONS, "gelu_new"),
        bias=True,
    )
    layers = [
        LayerConfig(
            attention=replace(attention, scale=scale / (i + 1 if by_layer else 1)),
            mlp=mlp,
            norm=norm,
        )
        for i in range(num_layers)
    ]
    return ModelDescription(
        vocab_size=config.count("vocab_size", 50257),
        hidden_size=hidden,
        max_model_len=positions,
        layers=tuple(layers),
        positions=PositionTable(positions),
        final_norm=norm,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    note="GPT-2, DistilGPT2 and fine-tunes; learned positions",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(50256,),
)
