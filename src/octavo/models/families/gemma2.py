"""Gemma 2 (arXiv:2408.00118): norms around each block, windows in every other layer, soft-capped
scores and logits."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import LAYER_TYPES, read_num_layers, read_window, read_windows
from octavo.models.families.gemma import read_gemma
from octavo.models.family import Family

WEIGHTS = replace(
    llama.WEIGHTS,
    layer={
        **llama.WEIGHTS.layer,
        "attention_branch_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "branch_norm": "post_feedforward_layernorm",
    },
)
SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def read(config: Fields) -> ModelDescription:
    """Describe a Gemma2ForCausalLM by its config.json."""
    config = config.with_defaults(SOFTCAPS)
    default = [LAYER_TYPES[i % 2 == 0] for i in range(read_num_layers(config))]
    description = read_gemma(
        config,
        windows=read_windows(config, default, read_window(config)),
        num_kv_heads=4,
        norm_placement="around",
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=read_softcap(config, "attn_logit_softcapping"),
        activation_field="hidden_activation",
    )
    return replace(description, logits_softcap=read_softcap(config, "final_logit_softcapping"))


def read_softcap(config: Fields, name: str) -> float | None:
    """A softcap that a null turns off."""
    return None if config.get(name, None) is None else config.number(name)


FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    note="Gemma 2 2B, 9B, 27B; windows in every other layer, soft caps",
    read=read,
    weights=WEIGHTS,
    options=frozenset({*SOFTCAPS, "query_pre_attn_scalar"}),
    eos_token_ids=(1,),
)
