"""GLM-4 of 2025 (0414, arXiv:2406.12793): norms around each block."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import glm
from octavo.models.family import Family

WEIGHTS = replace(
    glm.WEIGHTS,
    layer={
        **glm.WEIGHTS.layer,
        "attention_branch_norm": "post_self_attn_layernorm",
        "branch_norm": "post_mlp_layernorm",
    },
)


def read(config: Fields) -> ModelDescription:
    """Describe a Glm4ForCausalLM by its config.json."""
    return glm.read_glm(config, "around")


FAMILY = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    note="GLM-4 0414 9B and 32B, GLM-Z1",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=glm.EOS_TOKEN_IDS,
)
