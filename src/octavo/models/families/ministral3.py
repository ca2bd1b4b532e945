"""Ministral 3 (Mistral AI, 2025): a Mistral with YaRN, whose queries grow with their position.

Beyond the original context a query is multiplied by 1 + beta ln(1 + floor(position / original)),
which octavo does not compute: the model is limited to the original context, in which it is 1.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import read_rotary_decoder, read_window, uniform_windows
from octavo.models.family import Family

BETA = "llama_4_scaling_beta"
DEFAULT_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, BETA: 0.1},
    **{"original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}


def read(config: Fields) -> ModelDescription:
    """From config.json of a Ministral3ForCausalLM."""
    rope = config.part("rope_parameters", DEFAULT_ROPE)
    # max_position_embeddings is there, too, and not used.
    unknown = {BETA, "max_position_embeddings"}
    known = {name: value for name, value in rope.values.items() if name not in unknown}
    description = read_rotary_decoder(
        Fields(config.where, config.values | {"rope_parameters": known}),
        windows=uniform_windows(config, read_window(config, None)),
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
    )
    if rope.get(BETA) == 0:
        return description
    rope.number(BETA)
    original = rope.count("original_max_position_embeddings")
    return replace(description, max_model_len=min(original, description.max_model_len))


FAMILY = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    note="Ministral 3 within its original context (16,384 tokens)",
    read=read,
    weights=llama.WEIGHTS,
    eos_token_ids=(2,),
)
