"""How each family of models spells its architecture in `config.json`.

A new family is one reader function and one line in `FAMILIES`. Field names are those of
transformers' configuration classes, in their old and new (version 5) spellings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import InvalidRequest, ModelError, shown
from octavo.json_fields import MAX_COUNT, Fields, read_json
from octavo.models.config import ModelConfig
from octavo.models.rope_scaling import read_rotary
from octavo.sampling_params import SamplingParams

DTYPES = ("float32", "bfloat16", "float16")
MAX_LAYERS = 10_000  # a hundred times today's deepest; layers are built before memory is counted
# Of generation_config.json: what it may set for requests that do not.
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Options of other families, or of a model's own code, that change the result and leave no trace in
# the weights, each with the value that turns it off. A wrong answer would be worse than none.
UNSERVED = {
    "is_causal": True,
    "use_bidirectional_attention": False,
    "dual_chunk_attention_config": None,
    "attention_chunk_size": None,
    "use_logn_attn": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "clip_qkv": None,
    "alibi": False,
    "no_rope_layers": None,
    "use_mrope": False,
    "rope_interleave": False,
    "rotary_pct": 1.0,
}
# Their names in config.json, and ours in octavo.layers.activation.
GATED_ACTIVATIONS = {"silu": "silu", "swish": "silu"}
PLAIN_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def read_model_config(directory: Path) -> ModelConfig:
    """Read config.json and generation_config.json; see ModelConfig.from_directory."""
    config = read_json(directory / "config.json")
    model_type = config.get("model_type", None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise config.error("model_type", f"octavo serves {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    architectures = config.names("architectures", [family.architecture])
    if family.architecture not in architectures:
        raise config.error("architectures", f"of {model_type}, octavo serves {family.architecture}")
    quantization = config.get("quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        kind = "unknown method" if method is None else shown(method)
        raise ModelError(
            f"{config.where}: the weights are quantised ({kind}); octavo serves {', '.join(DTYPES)}"
        )
    for name, harmless in UNSERVED.items():
        config.refuse(name, harmless)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else Fields("", {})
    fields = family.read(config)
    return ModelConfig(
        directory=directory,
        architecture=family.architecture,
        family=model_type,
        dtype=_dtype(config),
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        eos_token_ids=_end_tokens(config, generation, family, fields["vocab_size"]),
        sampling_defaults=_sampling_defaults(generation),
        **fields,
    )


def _end_tokens(
    config: Fields, generation: Fields, family: Family, vocab_size: int
) -> tuple[int, ...]:
    """The tokens that end a text; without those that the model has not (-1, say)."""
    ends = generation.token_ids("eos_token_id") or config.token_ids("eos_token_id")
    if "eos_token_id" not in config.values | generation.values and family.eos_token_id is not None:
        ends = (family.eos_token_id,)
    return tuple(token_id for token_id in ends if 0 <= token_id < vocab_size)


def _sampling_defaults(generation: Fields) -> dict[str, Any]:
    """What the model asks for; refused here, not in each request, if it cannot be served."""
    if not generation.flag("do_sample", False):
        return {}
    asked = {name: generation.get(name, None) for name in SAMPLING_DEFAULTS}
    defaults = {name: value for name, value in asked.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise ModelError(f"{generation.where}: {error}") from error
    return defaults


def _dtype(config: Fields) -> str:
    name = "dtype" if config.get("dtype", None) is not None else "torch_dtype"
    value = config.get(name, "float32")
    if value not in DTYPES:
        raise config.error(name, f"octavo serves {', '.join(DTYPES)}")
    return str(value)


def _head_dim(config: Fields, hidden_size: int, num_heads: int) -> int:
    """The size of a head in a family that has no head_dim field."""
    if hidden_size % num_heads:
        raise ModelError(
            f"{config.where}: a hidden size of {hidden_size} does not divide into {num_heads} heads"
        )
    return hidden_size // num_heads


def _read_gpt2(config: Fields) -> dict[str, Any]:
    config.refuse("add_cross_attention", False)
    hidden = config.count(config.either("n_embd", "hidden_size"), 768)
    heads = config.count(config.either("n_head", "num_attention_heads"), 12)
    layers = config.count(config.either("n_layer", "num_hidden_layers"), 12, MAX_LAYERS)
    positions = config.count(config.either("n_positions", "max_position_embeddings"), 1024)
    head_dim = _head_dim(config, hidden, heads)
    scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    return {
        "vocab_size": config.count("vocab_size", 50257),
        "hidden_size": hidden,
        "embedding_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": config.count("n_inner", 4 * hidden),
        "max_model_len": positions,
        "num_learned_positions": positions,
        "layer_windows": (None,) * layers,
        "attention_scales": tuple(scale / (i + 1 if by_layer else 1) for i in range(layers)),
        "activation": config.choice("activation_function", PLAIN_ACTIVATIONS, "gelu_new"),
        "gated_mlp": False,
        "norm": "layer",
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tied_embeddings": config.flag("tie_word_embeddings", True),
    }


def _read_opt(config: Fields) -> dict[str, Any]:
    hidden, heads = config.count("hidden_size", 768), config.count("num_attention_heads", 12)
    layers, positions = (
        config.count("num_hidden_layers", 12, MAX_LAYERS),
        config.count("max_position_embeddings", 2048),
    )
    head_dim = _head_dim(config, hidden, heads)
    norm_before = config.flag("do_layer_norm_before", True)
    bias = config.flag("enable_bias", True)
    offset = 2  # OPT's table of positions begins with two rows that it never uses
    return {
        "vocab_size": config.count("vocab_size", 50272),
        "hidden_size": hidden,
        "embedding_size": config.count("word_embed_proj_dim", hidden),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": config.count("ffn_dim", 3072),
        "max_model_len": positions,
        "num_learned_positions": positions + offset,
        "learned_position_offset": offset,
        "layer_windows": (None,) * layers,
        "attention_scales": (head_dim**-0.5,) * layers,
        "activation": config.choice("activation_function", PLAIN_ACTIVATIONS, "relu"),
        "gated_mlp": False,
        "norm": "layer",
        "norm_eps": 1e-5,  # torch's default, which transformers' OPT uses
        "norm_affine": config.flag("layer_norm_elementwise_affine", True),
        "norm_after": not norm_before,
        "final_norm": norm_before and not config.flag("_remove_final_layer_norm", False),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "tied_embeddings": config.flag("tie_word_embeddings", True),
    }


def _read_llama(config: Fields) -> dict[str, Any]:
    if config.flag("use_sliding_window", True):
        config.refuse("sliding_window", None)
    _check_layer_types(config, None)
    return _read_kin(config)


def _read_kin(
    config: Fields, num_kv_heads: int | None = None, head_dim: int | None = None
) -> dict[str, Any]:
    """What Llama and its kin share; `num_kv_heads` and `head_dim` are the family's defaults."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    layers = config.count("num_hidden_layers", limit=MAX_LAYERS)
    if num_kv_heads is None or "num_key_value_heads" in config.values:  # a null, too, says heads
        num_kv_heads = heads
    kv_heads = config.count("num_key_value_heads", num_kv_heads)
    if heads % kv_heads:
        raise ModelError(
            f"{config.where}: num_key_value_heads is {kv_heads}; it must divide "
            f"num_attention_heads ({heads})"
        )
    if config.get("head_dim", head_dim) is None:
        head_dim = _head_dim(config, hidden, heads)
    else:
        head_dim = config.count("head_dim", head_dim)
    if head_dim % 2:
        raise ModelError(f"{config.where}: rotary embedding needs an even head_dim, not {head_dim}")
    positions = config.count("max_position_embeddings")
    rotary = read_rotary(config, positions)
    extended = int(rotary.factor * rotary.original_max_positions) if rotary.kind == "yarn" else 0
    if extended > MAX_COUNT:
        raise ModelError(f"{config.where}: the extended context has {extended:.3g} positions")
    bias = config.flag("attention_bias", False)
    return {
        "vocab_size": config.count("vocab_size"),
        "hidden_size": hidden,
        "embedding_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": config.count("intermediate_size"),
        "max_model_len": max(positions, extended),
        "layer_windows": (None,) * layers,
        "attention_scales": (head_dim**-0.5,) * layers,
        "activation": config.choice("hidden_act", GATED_ACTIVATIONS, "silu"),
        "gated_mlp": True,
        "norm": "rms",
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": config.flag("mlp_bias", False),
        "rotary": rotary,
        "tied_embeddings": config.flag("tie_word_embeddings", False),
    }


def _read_mistral(config: Fields) -> dict[str, Any]:
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    fields = _read_kin(config, num_kv_heads=8)
    # The family's default is a window of 4,096; a null turns it off.
    window = config.values.get("sliding_window", 4096)
    if window is not None:
        window = config.count("sliding_window", 4096)
        fields["layer_windows"] = (window,) * fields["num_layers"]
    _check_layer_types(config, window)
    return fields


def _read_qwen2(config: Fields) -> dict[str, Any]:
    config.refuse("attention_bias", True)
    config.refuse("mlp_bias", False)
    fields = _read_kin(config, num_kv_heads=32)
    fields["layer_windows"] = _qwen_windows(config, fields["num_layers"])
    return fields | {"qkv_bias": True, "output_bias": False}


def _read_qwen3(config: Fields) -> dict[str, Any]:
    config.refuse("mlp_bias", False)
    fields = _read_kin(config, num_kv_heads=32, head_dim=128)
    fields["layer_windows"] = _qwen_windows(config, fields["num_layers"])
    return fields | {"qk_norm": True}


def _check_layer_types(config: Fields, window: int | None) -> None:
    """All layers must be of the kind that the family's window, or its lack, makes them."""
    expected = "full_attention" if window is None else "sliding_attention"
    if set(config.names("layer_types", [expected])) != {expected}:
        raise config.error("layer_types", f"every layer of this family is {expected}")


def _qwen_windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    """A window for every layer from max_window_layers on, or as layer_types says."""
    # Where windows are on, the family's default is one of 4,096; a null turns it off.
    window = config.values.get("sliding_window", 4096)
    if not config.flag("use_sliding_window", False):
        window = None
    if window is not None:
        window = config.count("sliding_window", 4096)
    if config.get("layer_types", None) is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise config.error("max_window_layers", "it must be an integer")
        return tuple(window if i >= first else None for i in range(num_layers))
    layer_types = config.names("layer_types", [])
    known = {"full_attention", "sliding_attention"}
    if len(layer_types) != num_layers or not set(layer_types) <= known:
        raise config.error("layer_types", f"it must name {num_layers} layers, each {sorted(known)}")
    if window is None and "sliding_attention" in layer_types:
        raise config.error("layer_types", "use_sliding_window and sliding_window set no window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type: the class that octavo serves, and the reader of its config.json."""

    architecture: str
    read: Callable[[Fields], dict[str, Any]]
    eos_token_id: int | None = None  # where config.json does not speak of it


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", _read_gpt2, eos_token_id=50256),
    "opt": Family("OPTForCausalLM", _read_opt, eos_token_id=2),
    "llama": Family("LlamaForCausalLM", _read_llama, eos_token_id=2),
    "mistral": Family("MistralForCausalLM", _read_mistral, eos_token_id=2),
    "qwen2": Family("Qwen2ForCausalLM", _read_qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _read_qwen3),
}
