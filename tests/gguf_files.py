"""Writes models in Hugging Face format as GGUF files, as llama.cpp's convert_hf_to_gguf does.

Metadata and tensors are written by the gguf package's GGUFWriter, tensors are named by its name
map, and quantized by its quantizers. It has none for K-quants: theirs are random blocks, and the
model in Hugging Face format gets the values that they stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedConfig

import model_zoo

gguf = pytest.importorskip("gguf")
Kind = gguf.GGMLQuantizationType

ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "granite")},
    **{name: name for name in ("olmo2", "smollm3", "seed_oss", "cohere2")},
    **{"gemma3_text": "gemma3", "cohere": "command-r", "qwen3_moe": "qwen3moe"},
    **{"mixtral": "llama", "olmoe": "olmoe", "gpt_oss": "gpt-oss"},
}
TURNED = ("llama", "granite", "smollm3")
MERGED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias)?")  # gpt-oss
SPLIT_TYPES = (Kind.F32, Kind.F16, Kind.BF16)
# Where the float16 scales of a block are, in bytes, and their sizes for values of about 1.
SCALES = {
    Kind.Q4_K: {0: 0.0025, 2: 0.018},
    Kind.Q5_K: {0: 0.0012, 2: 0.018},
    Kind.Q6_K: {208: 0.0008},
}
# How model_zoo's models are changed so that GGUF can say them, and K-quants have room.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
OVERRIDES: Mapping[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False},
    "smollm3": {"no_rope_layer_interval": 4},
    "phi3": {
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            **{"factor": 4.0, "short_factor": [1.0, 1.2, 1.5, 2.0]},
            "long_factor": [2.0, 5.0, 30.0, 40.0],
        }
    },
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "cohere2": {"sliding_window_pattern": 4},
    "qwen3_moe": {"mlp_only_layers": [], "moe_intermediate_size": 32},
    "mixtral": {"sliding_window": None},
}

Choose = Callable[[str, tuple[int, ...]], Kind]


def everywhere(kind: Kind) -> Choose:
    """This type for matrices, and values for the others and for odd sizes."""
    block = gguf.GGML_QUANT_SIZES[kind][0]

    def choose(name: str, shape: tuple[int, ...]) -> Kind:
        is_matrix = len(shape) > 1 and name.endswith(".weight")
        return kind if is_matrix and shape[-1] % block == 0 else Kind.F32

    return choose


def with_experts(kind: Kind, other: Kind) -> Choose:
    """This type for experts, and another one for the other matrices."""
    experts, others = everywhere(kind), everywhere(other)
    return lambda name, shape: (experts if "_exps." in name else others)(name, shape)


def write_pair(
    name: str, directory: Path, choose: Choose, metadata: Mapping[str, Any] = {}, **overrides: Any
) -> Path:
    """A model of the zoo, as `model.gguf` in the directory; the model with the same values is in
    Hugging Face format in its subdirectory `hf`."""
    source = directory / "hf"
    fields = {**SIZES, **OVERRIDES.get(name, {}), **overrides}
    model_zoo.write_model(name, source, **fields)
    return convert(source, directory / "model.gguf", choose, metadata)


def convert(source: Path, path: Path, choose: Choose, metadata: Mapping[str, Any] = {}) -> Path:
    """Write the model in `source` to `path`, and its dequantized values back to `source`.

    metadata: is added, or replaces what is written otherwise.
    """
    config = transformers.AutoConfig.from_pretrained(source)
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(None, arch)
    values = {**_metadata(config, arch), **tokenizer_metadata(source), **metadata}
    for key, value in values.items():
        if value is not None:
            add_value(writer, key, value)
    number = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors = load_file(source / "model.safetensors")
    experts: dict[tuple[str, Kind], dict[int, NDArray[Any]]] = {}
    for name, part in [each for item in tensors.items() for each in _parts(*item)]:
        module, _, ending = re.sub(r"experts\.\d+", "experts", name).rpartition(".")
        stored = f"{names.get_name(module)}.{ending}"
        assert not stored.startswith("None"), name
        turned = arch in TURNED and ("q_proj" in name or "k_proj" in name)
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        array = (_turned(part, heads) if turned else part).float().numpy()
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        kind = choose(stored, array.shape)
        data, exact = quantized(array, kind)
        number = re.search(r"\.experts\.(\d+)\.", name)
        if number is not None:
            experts.setdefault((stored, kind), {})[int(number[1])] = data
        else:
            writer.add_tensor(stored, data, raw_dtype=kind)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            exact = exact - 1
        back = torch.from_numpy(np.array(exact, np.float32))
        part.copy_(_straight(back, heads) if turned else back)
    for (stored, kind), matrices in experts.items():
        stacked = np.stack([matrices[expert] for expert in range(len(matrices))])
        writer.add_tensor(stored, stacked, raw_dtype=kind)
    for name, array in _rotary_factors(config, arch).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    return path


def _parts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """What the converter makes of a tensor, under names that the name map knows; views of it."""
    if name.endswith(".sinks"):
        return [(f"{name}.weight", tensor)]
    match = MERGED.fullmatch(name)
    if match is None:
        return [(name, tensor)]
    ending = "bias" if match[3] else "weight"
    rows = tensor if match[3] else tensor.mT  # [experts, outputs, inputs]
    if match[2] == "down":
        return [(f"{match[1]}.down_proj.{ending}", rows)]
    return [
        (f"{match[1]}.{kind}_proj.{ending}", rows[:, i::2]) for i, kind in enumerate(("gate", "up"))
    ]


def quantized(array: NDArray[np.float32], kind: Kind) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """The stored data, and the values that it stands for."""
    if kind in SCALES:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*array.shape[:-1], array.shape[-1] // block, size)
        data = np.random.default_rng(array.size).integers(0, 256, shape, dtype=np.uint8)
        for offset, scale in SCALES[kind].items():
            scale = np.float16(scale * array.std())
            data[..., offset : offset + 2] = np.frombuffer(scale.tobytes(), np.uint8)
        data = data.reshape(*array.shape[:-1], -1)
    else:
        data = gguf.quantize(np.ascontiguousarray(array), kind)
    return data, gguf.dequantize(data, kind).reshape(array.shape)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Under the type that llama.cpp gives such values."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _turned(weight: Tensor, heads: int) -> Tensor:
    """Rows i and i + dim / 2 of each head beside each other."""
    halves = weight.view(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _straight(weight: Tensor, heads: int) -> Tensor:
    """The opposite."""
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _metadata(config: PreTrainedConfig, arch: str) -> dict[str, Any]:
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    local: dict[str, Any] = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * (rope.get("partial_rotary_factor") or 1)),
        "vocab_size": config.vocab_size,
    }
    if arch in ("command-r", "cohere2"):
        values["attention.layer_norm_epsilon"] = config.layer_norm_eps
        values["logit_scale"] = config.logit_scale
    else:
        values["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if arch in ("gemma2", "gemma3", "phi3", "cohere2", "gpt-oss"):
        values["attention.sliding_window"] = config.sliding_window
    if arch == "gemma2":
        values["attn_logit_softcapping"] = config.attn_logit_softcapping
    if arch in ("gemma2", "gemma3"):
        values["final_logit_softcapping"] = config.final_logit_softcapping
    if arch == "gemma3":
        is_local = [kind == "sliding_attention" for kind in config.layer_types]
        values["attention.sliding_window_pattern"] = is_local
        values["rope.freq_base_swa"] = float(local["rope_theta"])
    if arch == "granite":
        values["attention.scale"] = config.attention_multiplier
        values["embedding_scale"] = config.embedding_multiplier
        values["residual_scale"] = config.residual_multiplier
        values["logit_scale"] = config.logits_scaling
    if hasattr(config, "num_experts_per_tok"):
        values["expert_count"] = config.num_experts
        values["expert_used_count"] = config.num_experts_per_tok
    if arch == "qwen3moe":
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    if arch == "gpt-oss":
        values["expert_feed_forward_length"] = config.intermediate_size
    if rope.get("rope_type") in ("linear", "yarn"):
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = rope["factor"]
    if "original_max_position_embeddings" in rope:
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope.get("rope_type") == "longrope":
        compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"]
        values["rope.scaling.attn_factor"] = float(compute(config, torch.device("cpu"))[1])
    return {f"{arch}.{key}": value for key, value in values.items()}


def _rotary_factors(config: PreTrainedConfig, arch: str) -> dict[str, NDArray[np.float32]]:
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
        }
    if rope.get("rope_type") == "llama3":
        # As convert_hf_to_gguf computes them, by transformers' own frequencies.
        compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
        scaled, _ = compute(config, torch.device("cpu"))
        dim = 2 * len(scaled)
        plain = rope["rope_theta"] ** -(torch.arange(0, dim, 2).float() / dim)
        return {"rope_freqs.weight": (plain / scaled).numpy()}
    return {}


def tokenizer_metadata(source: Path) -> dict[str, Any]:
    """Of byte-level BPE, from tokenizer.json."""
    fields = json.loads((source / "tokenizer.json").read_text())
    vocabulary = Tokenizer.from_file(str(source / "tokenizer.json")).get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {each["content"] for each in fields["added_tokens"] if each["special"]}
    merges = [
        each if isinstance(each, str) else " ".join(each) for each in fields["model"]["merges"]
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": model_zoo.BOS_ID,
        "tokenizer.ggml.eos_token_id": model_zoo.EOS_ID,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": model_zoo.CHAT_TEMPLATE,
    }
