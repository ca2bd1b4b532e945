"""Writes a model as a GGUF file, which octavo serves, and which OpenVINO GenAI reads without an
exporter.

It supports only what the benchmarks need: Llama and Qwen3 in one safetensors file, matrices in
float16 or in int8 with a scale for each 32 inputs (Q8_0), and a vocabulary of placeholder names,
since all prompts are token ids. To compare the file with the model that it was written from:

    python benchmarks/gguf_file.py demo demo.gguf --int8
    octavo bench throughput --model demo.gguf
    octavo bench throughput --model demo --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from octavo.models.hub import resolve_model

ARCHITECTURES = ("llama", "qwen3")


def write_gguf(model: Path, file: Path, has_int8: bool = False) -> None:
    """Write the model in directory `model`, which is in Hugging Face format, to `file`; has_int8:
    with all matrices in Q8_0. Raises ValueError for a model of another architecture."""
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] not in ARCHITECTURES:
        raise ValueError(f"{model}: model_type is not one of {', '.join(ARCHITECTURES)}")
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    weights = load_file(model / "model.safetensors")
    partial = file.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, config["model_type"])
    _add_metadata(writer, config)
    q8_0, file_types = gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType
    writer.add_file_type(file_types.MOSTLY_Q8_0 if has_int8 else file_types.MOSTLY_F16)
    [architecture] = [
        number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == config["model_type"]
    ]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, weight in weights.items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        array = _stored(name, weight, config)
        if has_int8 and array.ndim == 2:
            packed = gguf.quants.quantize(array.astype(np.float32), q8_0)
            writer.add_tensor(stored, packed, raw_dtype=q8_0)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(file)


def _stored(name: str, weight: torch.Tensor, config: dict[str, Any]) -> NDArray[np.generic]:
    heads = {
        "q_proj.weight": config["num_attention_heads"],
        "k_proj.weight": config["num_key_value_heads"],
    }.get(name.rpartition("self_attn.")[2])
    if config["model_type"] == "llama" and heads is not None:
        # For Llama, GGUF interleaves the two halves that the rotary embedding rotates.
        halves = weight.view(heads, 2, -1, weight.shape[1])
        weight = halves.transpose(1, 2).reshape(weight.shape)
    kind = torch.float16 if weight.dim() == 2 else torch.float32
    array: NDArray[np.generic] = weight.to(kind).contiguous().numpy()
    return array


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    # The merge below has three tokens, which must be in the vocabulary.
    tokens = ["t", "1", *(f"t{i}" for i in range(1, config["vocab_size"] - 1))]
    special = {config.get("bos_token_id"), config.get("eos_token_id")}
    # OpenVINO refuses a model without control tokens.
    types = [
        gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL
        for i in range(len(tokens))
    ]
    writer.add_name("benchmark")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["t 1"])
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    if config.get("eos_token_id") is not None:
        writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="a directory in Hugging Face format, demo, or a hub id")
    parser.add_argument("file", type=Path, help="the GGUF file to write")
    parser.add_argument("--int8", action="store_true", help="all matrices in Q8_0")
    arguments = parser.parse_args()
    write_gguf(resolve_model(arguments.model), arguments.file, arguments.int8)


if __name__ == "__main__":
    main()
