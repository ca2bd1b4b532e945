"""MPT (MosaicML, 2023): ALiBi instead of positions, layer norms without a shift, no biases."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.layers.config import AttentionConfig, MLPConfig, NormConfig
from octavo.models.config import LayerConfig, ModelDescription
from octavo.models.families.common import (
    MAX_ALIBI_HEADS,
    MAX_LAYERS,
    alibi_slopes,
    divided_head_dim,
)
from octavo.models.family import Family
from octavo.models.weight_names import WeightNames

WEIGHTS = WeightNames(
    model={"embedding": "wte", "norm": "norm_f", "head.linear": "lm_head"},
    layers="blocks",
    layer={
        "attention_norm": "norm_1",
        "attention.qkv": "attn.Wqkv",
        "attention.output": "attn.out_proj",
        "mlp_norm": "norm_2",
        "mlp.up": "ffn.up_proj",
        "mlp.down": "ffn.down_proj",
    },
    prefixes=("transformer.",),
)
# What transformers has of the original code is what octavo has.
REFUSED = {"expansion_ratio": 4, "no_bias": True, "logit_scale": None, "embedding_fraction": 1.0}
REFUSED_OF_ATTENTION = {
    **{"attn_type": "multihead_attention", "clip_qkv": None, "qk_ln": False, "alibi": True},
    **{"prefix_lm": False, "alibi_bias_max": 8},
}


def read(config: Fields) -> ModelDescription:
    """Describe an MptForCausalLM by its config.json."""
    attention = config.part("attn_config", {})
    for fields, refused in ((config, REFUSED), (attention, REFUSED_OF_ATTENTION)):
        for name, harmless in refused.items():
            fields.refuse(name, harmless)
    hidden = config.count(config.either("d_model", "hidden_size"), 2048)
    heads_field = config.either("n_heads", "num_attention_heads")
    heads = config.count(heads_field, 16, MAX_ALIBI_HEADS)
    num_layers = config.count(config.either("n_layers", "num_hidden_layers"), 24, MAX_LAYERS)
    head_dim = divided_head_dim(config, hidden, heads, heads_field)
    norm = NormConfig("layer", hidden, config.number("layer_norm_epsilon", 1e-5), bias=False)
    layer = LayerConfig(
        attention=AttentionConfig(
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            scale=attention.number("softmax_scale", head_dim**-0.5),
            alibi_slopes=alibi_slopes(heads),
        ),
        mlp=MLPConfig(
            kind="plain", hidden_size=hidden, intermediate_size=4 * hidden, activation="gelu"
        ),
        norm=norm,
    )
    return ModelDescription(
        vocab_size=config.count("vocab_size", 50368),
        hidden_size=hidden,
        max_model_len=config.count("max_seq_len", 2048),
        layers=(layer,) * num_layers,
        final_norm=norm,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    model_type="mpt",
    architecture="MptForCausalLM",
    other_names=("MPTForCausalLM",),
    note="MPT 7B and 30B; ALiBi",
    read=read,
    weights=WEIGHTS,
    options=frozenset({"logit_scale"}),
)
