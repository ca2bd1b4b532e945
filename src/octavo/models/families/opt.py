"""OPT (arXiv:2205.01068), with the 350m variant's norms after each block and small embeddings."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.layers.config import MLPConfig, NormConfig, PositionTable
from octavo.models.config import LayerConfig, ModelDescription
from octavo.models.families.common import MAX_LAYERS, PLAIN_ACTIVATIONS, plain_attention
from octavo.models.family import Family
from octavo.models.weight_names import WeightNames

POSITION_OFFSET = 2  # the table of positions begins with two rows that are never used
NORM_EPS = 1e-5  # torch's default, which transformers' OPT uses

WEIGHTS = WeightNames(
    model={
        "embedding": "embed_tokens",
        "positions": "embed_positions",
        "project_in": "project_in",
        "norm": "final_layer_norm",
        "project_out": "project_out",
        "head.linear": "lm_head",
    },
    layers="layers",
    layer={
        "attention_norm": "self_attn_layer_norm",
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.output": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
    prefixes=("model.decoder.", "decoder."),
    ignored=("version",),  # of the file format of the original training code
)


def read(config: Fields) -> ModelDescription:
    """Describe an OPTForCausalLM by its config.json."""
    hidden, heads = config.count("hidden_size", 768), config.count("num_attention_heads", 12)
    num_layers = config.count("num_hidden_layers", 12, MAX_LAYERS)
    positions = config.count("max_position_embeddings", 2048)
    is_pre_norm = config.flag("do_layer_norm_before", True)
    has_final_norm = is_pre_norm and not config.flag("_remove_final_layer_norm", False)
    bias = config.flag("enable_bias", True)
    affine = config.flag("layer_norm_elementwise_affine", True)
    norm = NormConfig("layer", hidden, NORM_EPS, affine)
    layer = LayerConfig(
        attention=plain_attention(config, hidden, heads, has_biases=bias),
        mlp=MLPConfig(
            kind="plain",
            hidden_size=hidden,
            intermediate_size=config.count("ffn_dim", 3072),
            activation=config.choice("activation_function", PLAIN_ACTIVATIONS, "relu"),
            bias=bias,
        ),
        norm=norm,
        norm_placement="pre" if is_pre_norm else "post",
    )
    return ModelDescription(
        vocab_size=config.count("vocab_size", 50272),
        hidden_size=hidden,
        embedding_size=config.count("word_embed_proj_dim", hidden),
        max_model_len=positions,
        layers=(layer,) * num_layers,
        positions=PositionTable(positions + POSITION_OFFSET, POSITION_OFFSET),
        final_norm=norm if has_final_norm else None,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    note="OPT 125m to 66b and 350m (its projections and post-norms)",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(2,),
)
