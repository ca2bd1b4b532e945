"""The trained model as a Hugging Face directory, with a manifest that shows whether it is whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from octavo.demo import MANIFEST
from octavo_demo.corpus import EOS, IM_END, PAD
from octavo_demo.model import Llama
from octavo_demo.tokenizer import save_tokenizer

TEMPERATURE = 0.6  # for requests that do not set it


def export(model: Llama, tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": p.detach().to("cpu", torch.bfloat16).contiguous()
        for name, p in model.named_parameters()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tokenizer, directory, model.shape.max_length)
    vocabulary = tokenizer.get_vocab()
    eos, stop, pad = (vocabulary[token] for token in (EOS, IM_END, PAD))
    _write(directory / "config.json", _config(model, eos, pad))
    _write(directory / "generation_config.json", _generation_config(eos, stop, pad))
    write_manifest(directory)


def _config(model: Llama, eos: int, pad: int) -> dict[str, Any]:
    shape = model.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_length,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
    }


def _generation_config(eos: int, stop: int, pad: int) -> dict[str, Any]:
    """What ends a text, and how tokens are drawn for requests that do not say.

    At a temperature of 1 so small a model too often leaves what it knows in mid-sentence; much
    lower, its stories repeat names.
    """
    return {
        "eos_token_id": [eos, stop],
        "pad_token_id": pad,
        "do_sample": True,
        "temperature": TEMPERATURE,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_manifest(directory: Path) -> None:
    """Size and SHA-256 of each file of the directory."""
    files = sorted(path for path in directory.iterdir() if path.name != MANIFEST)
    entries = {
        path.name: {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }
    _write(directory / MANIFEST, entries)
