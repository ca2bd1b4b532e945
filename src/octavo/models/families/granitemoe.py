"""Granite 3 with experts (1B-A400M, 3B-A800M): a Granite whose checkpoints merge all experts."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import granite
from octavo.models.families.common import count_experts, read_experts, read_num_layers
from octavo.models.family import Family

WEIGHTS = replace(
    granite.FAMILY.weights,
    layer={
        **granite.FAMILY.weights.layer,
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.experts": (
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.output_linear.weight",
        ),
    },
    merged={
        "mlp.router": "block_sparse_moe.router",
        "mlp.experts": (
            "block_sparse_moe.experts.gate_up_proj",
            "block_sparse_moe.experts.down_proj",
        ),
    },
)


def read(config: Fields) -> ModelDescription:
    """Describe a GraniteMoeForCausalLM by its config.json."""
    experts = read_experts(
        config,
        num_experts=count_experts(config, "num_local_experts", 8),
        top_k=config.count("num_experts_per_tok", 2),
        intermediate_size=config.count("intermediate_size"),
    )
    return granite.read_granite(config, dict.fromkeys(range(read_num_layers(config)), experts))


FAMILY = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    note="Granite 3.x 1B-A400M, 3B-A800M; multipliers",
    read=read,
    weights=WEIGHTS,
    options=granite.OPTIONS,
    eos_token_ids=(2,),
)
