"""Gemma 3 with images (arXiv:2503.19786): its text part, which is all that octavo serves."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.families import gemma3_text

WEIGHTS = replace(
    gemma3_text.FAMILY.weights,
    prefixes=("language_model.model.", "model.language_model.", "language_model.", "model."),
    ignored=(r"vision_tower\..*", r"multi_modal_projector\..*"),
)

FAMILY = replace(
    gemma3_text.FAMILY,
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    note="Gemma 3 4B, 12B, 27B: text, without images",
    weights=WEIGHTS,
    text_config="text_config",
    options=gemma3_text.FAMILY.options - {"final_logit_softcapping"},  # transformers ignores it
    own_head="lm_head.weight",
)
