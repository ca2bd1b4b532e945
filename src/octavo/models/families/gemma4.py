"""Gemma 4 with images, video and sound: its text part, which is all that octavo serves."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.families import gemma4_text

_OTHER_INPUTS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
WEIGHTS = replace(
    gemma4_text.FAMILY.weights,
    prefixes=("model.language_model.", "model."),
    ignored=(*gemma4_text.WEIGHTS.ignored, *(rf"{name}\..*" for name in _OTHER_INPUTS)),
)

FAMILY = replace(
    gemma4_text.FAMILY,
    model_type="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    note="Gemma 4 E2B, E4B, 26B-A4B, 31B: text, without images and sound",
    weights=WEIGHTS,
    text_config="text_config",
    own_head="lm_head.weight",
)
