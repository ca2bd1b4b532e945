"""Writes a benchmark's model as a GGUF file, which OpenVINO GenAI reads without an exporter.

It supports only what the benchmarks need: Llama and Qwen3, matrices in float16, and a vocabulary of
placeholder names, since all prompts are token ids.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
TENSOR_TYPES = {"float32": 0, "float16": 1}
FILE_TYPE_F16 = 1
NORMAL_TOKEN, CONTROL_TOKEN = 1, 3
ALIGNMENT = 32

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model: Path, file: Path) -> None:
    """Write the model in directory `model`, which is in Hugging Face format, to `file`."""
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    tensors = dict(_tensor(name, weight, config) for name, weight in weights.items())
    metadata = [_field(name, value) for name, value in _metadata(config).items()]
    index, offset = b"", 0
    for name, array in tensors.items():
        shape = b"".join(struct.pack("<Q", size) for size in reversed(array.shape))
        kind = TENSOR_TYPES[array.dtype.name]
        index += _string(name) + struct.pack("<I", array.ndim) + shape
        index += struct.pack("<IQ", kind, offset)
        offset += array.nbytes + -array.nbytes % ALIGNMENT
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + b"".join(metadata)
    head += index
    partial = file.with_suffix(".partial")
    with partial.open("wb") as out:
        out.write(head + bytes(-len(head) % ALIGNMENT))
        for array in tensors.values():
            out.write(array.tobytes() + bytes(-array.nbytes % ALIGNMENT))
    partial.rename(file)


def _tensor(name: str, weight: torch.Tensor, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    name = name.removesuffix(".weight")
    prefix = ""
    if name.startswith("model.layers."):
        _, _, layer, name = name.split(".", 3)
        prefix = f"blk.{layer}."
    if config["model_type"] == "llama" and name in ("self_attn.q_proj", "self_attn.k_proj"):
        # For Llama, GGUF interleaves the two halves that the rotary embedding rotates.
        heads = config["num_attention_heads" if ".q_" in name else "num_key_value_heads"]
        halves = weight.view(heads, 2, -1, weight.shape[1])
        weight = halves.transpose(1, 2).reshape(weight.shape)
    kind = torch.float16 if weight.dim() == 2 else torch.float32
    return f"{prefix}{NAMES[name]}.weight", weight.to(kind).contiguous().numpy()


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    arch = config["model_type"]
    tokens = [f"t{i}" for i in range(config["vocab_size"])]
    special = {config["bos_token_id"], config["eos_token_id"]}
    kinds = [CONTROL_TOKEN if i in special else NORMAL_TOKEN for i in range(len(tokens))]
    theta = config.get("rope_parameters", config)["rope_theta"]
    return {
        "general.architecture": arch,
        "general.name": "benchmark",
        "general.file_type": FILE_TYPE_F16,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(theta),
        f"{arch}.rope.dimension_count": config["head_dim"],
        f"{arch}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,  # OpenVINO refuses a model without control tokens
        "tokenizer.ggml.merges": ["t 1"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.add_bos_token": False,
    }


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _field(name: str, value: Any) -> bytes:
    head = _string(name)
    match value:
        case bool():
            return head + struct.pack("<I?", BOOL, value)
        case int():
            return head + struct.pack("<II", UINT32, value)
        case float():
            return head + struct.pack("<If", FLOAT32, value)
        case str():
            return head + struct.pack("<I", STRING) + _string(value)
        case [str(), *_]:
            items = b"".join(_string(item) for item in value)
            return head + struct.pack("<IIQ", ARRAY, STRING, len(value)) + items
        case _:
            items = struct.pack(f"<{len(value)}i", *value)
            return head + struct.pack("<IIQ", ARRAY, INT32, len(value)) + items
