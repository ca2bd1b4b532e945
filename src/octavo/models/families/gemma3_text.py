"""Gemma 3 for text (arXiv:2503.19786): norms around each block and of heads; windows in five of six
layers, which have a rotary embedding of their own."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import gemma2
from octavo.models.families.common import (
    periodic_layer_types,
    read_heads,
    read_num_layers,
    read_window,
    read_windows,
)
from octavo.models.families.gemma import read_gemma
from octavo.models.family import Family
from octavo.models.rope_scaling import read_rotaries

# transformers' defaults, on which published files rely.
DEFAULTS = {
    **{"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216},
    **{"num_hidden_layers": 26, "num_attention_heads": 8, "max_position_embeddings": 131072},
}
# What older files call the base of each rotary embedding, and its default; as in LAYER_TYPES.
ROPE_THETAS = {
    "full_attention": ("rope_theta", 1e6),
    "sliding_attention": ("rope_local_base_freq", 1e4),
}


def read(config: Fields) -> ModelDescription:
    """Describe a Gemma3ForCausalLM by its config.json."""
    config = config.with_defaults(DEFAULTS)
    period = config.count("sliding_window_pattern", 6)
    default = periodic_layer_types(read_num_layers(config), period)
    windows = read_windows(config, default, read_window(config))
    head_dim = read_heads(config, num_kv_heads=4, head_dim=256).head_dim
    positions = config.count("max_position_embeddings")
    description = read_gemma(
        config,
        windows=windows,
        num_kv_heads=4,
        norm_placement="around",
        rotaries=read_rotaries(config, head_dim, positions, ROPE_THETAS),
        rotary_of_layer=[int(window is not None) for window in windows],
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        head_norms=True,
        activation_field="hidden_activation",
    )
    softcap = gemma2.read_softcap(config, "final_logit_softcapping")
    return replace(description, logits_softcap=softcap)


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    note="Gemma 3 270M and 1B; windows, two rotary embeddings",
    read=read,
    weights=gemma2.WEIGHTS,
    options=frozenset({"final_logit_softcapping", "query_pre_attn_scalar"}),
    eos_token_ids=(1,),
)
