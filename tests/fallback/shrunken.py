"""Configurations of every causal language model of the installed transformers, and of every model
that takes text beside other input, shrunk to some thousand weights."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)


def _has_text_part(model_type: str) -> bool:
    return "text_config" in CONFIG_MAPPING[model_type].sub_configs


MODEL_TYPES = sorted(
    {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *filter(_has_text_part, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES),
    }
)
VOCAB_SIZE = 320
NUM_LAYERS = 3
MAX_POSITIONS = 256
WINDOW = 12

# Fields by the names that configurations have for them; only those that a type has are set.
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), NUM_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp", "ffn_config"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), MAX_POSITIONS),
    **dict.fromkeys(("sliding_window", "attention_window_size"), WINDOW),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 24),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16),
    "is_decoder": True,
    "qk_rope_head_dim": 8,
    "query_pre_attn_scalar": 24,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
    "num_nextn_predict_layers": 0,
    "n_hash_layers": 0,
}
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id")
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "no_rope_layers")

# What one type needs beside that.
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_MLA = {"head_dim": 8, "num_key_value_heads": 4}
BY_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "axk1",
            "deepseek_v3",
            "longcat_flash",
            "youtu",
            "deepseek_v2",
            "glm4_moe_lite",
            "minicpm3",
            "sarvam_mla",
        ),
        _MLA,
    ),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global"], 3]]},
    "mamba2": {"num_heads": 8},
    "bamba": {"mamba_n_heads": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 64},
    **{
        name: {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}  # of 8 pairs of elements
        for name in (
            *("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"),
            *("glm4v_text", "glm_ocr_text", "paddleocr_vl_text"),
        )
    },
    "glm4v_moe_text": {
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
    },
    # Which have no windows, whatever the field says.
    "qwen3_vl_moe_text": {"sliding_window": None},
    "qwen3_omni_moe_text": {
        "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]},
        "sliding_window": None,
    },
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


def shrunken_config(model_type: str, **fields: Any) -> PreTrainedConfig:
    """A configuration of few and small layers, with windows where the type has them."""
    """`fields`: instead of those that are usual here; of the part for text, if it has one."""
    kind = CONFIG_MAPPING[model_type]
    usual = kind()
    text = usual.get_text_config()
    if text is not usual:
        return kind(**_shrunken_parts(kind, usual, text, fields))
    known = set(usual.to_dict()) | set(usual.attribute_map)
    chosen = {name: value for name, value in FIELDS.items() if name in known}
    chosen |= {name: min(2, VOCAB_SIZE) for name in SPECIAL_TOKENS if name in known}
    for name in PER_LAYER:
        values = getattr(usual, name, None)
        own_name = kind.attribute_map.get(name, name)
        is_computed = isinstance(getattr(kind, own_name, None), property)
        if isinstance(values, list | tuple) and not is_computed:
            chosen[name] = _few_of_each(list(values))
    return kind(**{**chosen, **BY_TYPE.get(model_type, {}), **fields})


def _shrunken_parts(
    kind: type[PreTrainedConfig], usual: Any, text: Any, fields: dict[str, Any]
) -> dict[str, Any]:
    """The parts of a model that takes other input than text, too."""
    parts = {name: getattr(usual, name, None) for name in kind.sub_configs}
    shrunken = {
        name: shrunken_config(part.model_type, **(fields if part is text else {})).to_dict()
        for name, part in parts.items()
        if part is not None
    }
    own = {name: value for name, value in FIELDS.items() if name in usual.to_dict()}
    return {**own, **shrunken}


def _few_of_each(values: list[Any]) -> list[Any]:
    """NUM_LAYERS values, of as many kinds as the list has."""
    kinds = list(dict.fromkeys(values))
    return [kinds[i % len(kinds)] for i in range(NUM_LAYERS)]
