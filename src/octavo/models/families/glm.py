"""GLM-4 of 2024 (arXiv:2406.12793): biases on Q, K and V; half of each head is rotated, in adjacent
pairs."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription, NormPlacement
from octavo.models.families import phi3
from octavo.models.families.common import check_layer_types, read_rotary_decoder
from octavo.models.family import Family
from octavo.models.weight_names import WeightNames

WEIGHTS = WeightNames(
    model=phi3.WEIGHTS.model,
    layers="layers",
    layer={
        **phi3.WEIGHTS.layer,
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    },
    prefixes=("model.",),
)
EOS_TOKEN_IDS = (151329, 151336, 151338)


def read(config: Fields) -> ModelDescription:
    """Describe a GlmForCausalLM by its config.json."""
    return read_glm(config, "pre")


def read_glm(config: Fields, norm_placement: NormPlacement) -> ModelDescription:
    """Both families of this name."""
    check_layer_types(config)
    return read_rotary_decoder(
        config,
        num_kv_heads=2,
        head_dim=128,
        norm_eps=1.5625e-07,
        norm_placement=norm_placement,
        partial_rotary=0.5,
        interleaved_rotary=True,
        qkv_bias=config.flag("attention_bias", True),
    )


FAMILY = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    note="GLM-4 9B, GLM-Edge",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=EOS_TOKEN_IDS,
)
