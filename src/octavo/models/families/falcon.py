"""Falcon (arXiv:2311.16867): layer norms, few KV heads, both blocks of a layer in parallel."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.layers.config import MLPConfig, NormConfig
from octavo.models.config import ModelDescription, NormPlacement
from octavo.models.families.common import PLAIN_ACTIVATIONS, read_rotary_decoder
from octavo.models.family import Family
from octavo.models.weight_names import WeightNames

WEIGHTS = WeightNames(
    model={"embedding": "word_embeddings", "norm": "ln_f", "head.linear": "lm_head"},
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
    aliases={"ln_attn": "input_layernorm", "ln_mlp": "post_attention_layernorm"},
    qkv_by_head=True,
)


def read(config: Fields) -> ModelDescription:
    """Describe a FalconForCausalLM by its config.json."""
    config = config.with_defaults({"max_position_embeddings": 2048})
    hidden, bias = config.count("hidden_size"), config.flag("bias", False)
    placement = _read_placement(config)
    num_kv_heads = _read_num_kv_heads(config)
    return read_rotary_decoder(
        Fields(config.where, config.values | {"num_key_value_heads": num_kv_heads}),
        norm=NormConfig("layer", hidden, config.number("layer_norm_epsilon", 1e-5)),
        norm_placement=placement,
        qkv_bias=bias,
        output_bias=bias,
        mlp=MLPConfig(
            kind="plain",
            hidden_size=hidden,
            intermediate_size=config.count("ffn_hidden_size", 4 * hidden),
            activation=config.choice("activation", PLAIN_ACTIVATIONS, "gelu"),
            bias=bias,
        ),
        tied_embeddings=True,
    )


def _read_num_kv_heads(config: Fields) -> int:
    num_heads = config.count("num_attention_heads")
    if config.flag("new_decoder_architecture", False):
        return config.count("num_kv_heads", num_heads)
    return 1 if config.flag("multi_query", True) else num_heads


def _read_placement(config: Fields) -> NormPlacement:
    """The new architecture has a norm for each block, unless it says that it has one for both."""
    is_new = config.flag("new_decoder_architecture", False)
    if not config.flag("parallel_attn", True):
        if is_new:
            raise config.error("parallel_attn", "new_decoder_architecture has parallel blocks")
        return "pre"
    num_norms = config.count("num_ln_in_parallel_attn", 2 if is_new else 1)
    if num_norms > 1 + is_new:
        raise config.error("num_ln_in_parallel_attn", f"it must be at most {1 + is_new}")
    return "twin" if num_norms == 2 else "parallel"


FAMILY = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    note="Falcon 7B, 11B, 40B, 180B; rotary positions",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(11,),
)
