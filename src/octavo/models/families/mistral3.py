"""Mistral Small 3.1 and later, Devstral and Ministral 3: their text part, which is all that octavo
serves."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import gemma3, ministral3, mistral
from octavo.models.family import Family

TEXT_FAMILIES = {"mistral": mistral.FAMILY, "ministral3": ministral3.FAMILY}


def read(config: Fields) -> ModelDescription:
    """Describe a Mistral3ForConditionalGeneration by its text_config."""
    family: Family = config.choice("model_type", TEXT_FAMILIES, "mistral")
    return family.read(config)


FAMILY = replace(
    mistral.FAMILY,
    model_type="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    note="Mistral Small 3.1 and 3.2, Devstral, Ministral 3 3B, 8B, 14B: text, without images",
    read=read,
    weights=replace(
        mistral.FAMILY.weights,
        prefixes=gemma3.WEIGHTS.prefixes,
        ignored=gemma3.WEIGHTS.ignored,
    ),
    text_config="text_config",
    own_head="lm_head.weight",
)
