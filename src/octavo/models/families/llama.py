"""Llama 1 to 3 (arXiv:2302.13971, arXiv:2407.21783), and the weight names of models after it."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families.common import check_layer_types, read_rotary_decoder
from octavo.models.family import Family
from octavo.models.weight_names import WeightNames

WEIGHTS = WeightNames(
    model={"embedding": "embed_tokens", "norm": "norm", "head.linear": "lm_head"},
    layers="layers",
    layer={
        "attention_norm": "input_layernorm",
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "attention.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": "mlp.down_proj",
    },
    prefixes=("model.",),
)


def read(config: Fields) -> ModelDescription:
    """Describe a LlamaForCausalLM by its config.json."""
    if config.flag("use_sliding_window", True):
        config.refuse("sliding_window", None)
    check_layer_types(config)
    bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    return read_rotary_decoder(config, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    note="Llama 1, 2, 3.x, TinyLlama, SmolLM; rope default, linear, dynamic, llama3, yarn",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(2,),
)
