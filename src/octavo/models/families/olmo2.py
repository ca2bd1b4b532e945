"""OLMo 2 (arXiv:2501.00656): norms of the blocks' results and over all query heads or key heads."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import exaone4
from octavo.models.families.common import check_layer_types, read_rotary_decoder
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """Describe an Olmo2ForCausalLM by its config.json."""
    check_layer_types(config)
    bias = config.flag("attention_bias", False)
    return read_rotary_decoder(
        config,
        norm_eps=1e-5,
        norm_placement="branch",
        width_norms=True,
        qkv_bias=bias,
        output_bias=bias,
    )


FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    note="OLMo 2 1B to 32B",
    read=read,
    weights=exaone4.WEIGHTS,
    eos_token_ids=(50279,),
)
