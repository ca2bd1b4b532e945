"""Phi-3 and Phi-4 (arXiv:2404.14219): a Llama with merged projections in its checkpoints, windows,
partial rotary embeddings and LongRoPE.

LongRoPE has frequencies for sequences within the original context and others beyond it. A model
limited to its original context uses the former, any other the latter for sequences of all lengths,
as vLLM does: keys are cached as rotated. transformers switches when a sequence outgrows the
original context and computes all its keys again.
"""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families.common import read_rotary_decoder, read_window, uniform_windows
from octavo.models.family import Family
from octavo.models.weight_names import WeightNames

WEIGHTS = WeightNames(
    model={"embedding": "embed_tokens", "norm": "norm", "head.linear": "lm_head"},
    layers="layers",
    layer={
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attn.qkv_proj",
        "attention.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.gate_up_proj",
        "mlp.down": "mlp.down_proj",
    },
    prefixes=("model.",),
)
ORIGINAL_POSITIONS = "original_max_position_embeddings"


def read(config: Fields) -> ModelDescription:
    """Describe a Phi3ForCausalLM by its config.json."""
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    config = Fields(
        config.where, config.values | {ORIGINAL_POSITIONS: config.count(ORIGINAL_POSITIONS, 4096)}
    )
    return read_rotary_decoder(
        config,
        windows=uniform_windows(config, read_window(config, None)),
        norm_eps=1e-5,
        partial_rotary=1.0,
    )


FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    note="Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4 mini; LongRoPE by max_model_len",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(32000,),
)
