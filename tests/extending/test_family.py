"""docs/extending.md, "A model": one module with a reader and the weights' names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from toys import Register

import model_zoo
from octavo import LLM, SamplingParams
from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families.common import read_rotary_decoder
from octavo.models.family import Family
from octavo.models.registry import FAMILIES, read_model_config
from octavo.models.weight_names import WeightNames

PROMPT = model_zoo.random_token_ids(40)


def read(config: Fields) -> ModelDescription:
    """Every other layer has a window and other rotary frequencies."""
    description = read_rotary_decoder(config)
    (rotary,) = description.rotaries
    even = description.layers[0]
    odd = replace(even, attention=replace(even.attention, rotary=1, window=8))
    layers = tuple(odd if i % 2 else even for i in range(description.num_layers))
    rotaries = rotary, replace(rotary, theta=100.0)
    return replace(description, layers=layers, rotaries=rotaries)


FAMILY = Family(
    model_type="novel",
    architecture="NovelForCausalLM",
    note="only here",
    read=read,
    weights=WeightNames(
        model={"embedding": "wte", "norm": "ln", "head.linear": "out"},
        layers="blocks",
        layer={
            "attention_norm": "ln1",
            "attention.qkv": "qkv",
            "attention.output": "o",
            "mlp_norm": "ln2",
            "mlp.up": ("gate", "up"),
            "mlp.down": "down",
        },
        prefixes=("novel.",),
    ),
)
RENAMED = {
    "model.embed_tokens": "novel.wte",
    "model.norm": "novel.ln",
    "lm_head": "out",
    "model.layers": "novel.blocks",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    "self_attn.o_proj": "o",
    "mlp.down_proj": "down",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
}


def write_novel_model(directory: Path) -> Path:
    """The zoo's Llama under other names, with Q, K and V merged."""
    llama = model_zoo.model_directory("llama")
    fields = json.loads((llama / "config.json").read_text())
    fields |= {"model_type": "novel", "architectures": ["NovelForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(fields))
    tensors = load_file(llama / "model.safetensors")
    for layer in range(fields["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn"
        parts = [tensors.pop(f"{name}.{part}_proj.weight") for part in "qkv"]
        tensors[f"model.layers.{layer}.qkv.weight"] = torch.cat(parts)
    renamed = {}
    for name, tensor in tensors.items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    save_file(renamed, directory / "model.safetensors")
    return directory


def expected_tokens(num_tokens: int) -> list[int]:
    """Greedy tokens of transformers' Llama, with a window and frequencies put into its layer 1."""
    reference = model_zoo.load_reference(model_zoo.model_directory("llama"))
    novel = reference.model.layers[1].self_attn
    frequencies = 100.0 ** -(torch.arange(0, novel.head_dim, 2) / novel.head_dim)

    def other_positions(
        module: torch.nn.Module, args: tuple[()], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        positions = torch.arange(kwargs["hidden_states"].shape[1])
        angles = torch.outer(positions, frequencies).repeat(1, 2)[None]
        ago = positions[:, None] - positions[None, :]
        mask = torch.zeros(ago.shape).masked_fill((ago < 0) | (ago >= 8), float("-inf"))
        changes = {
            "position_embeddings": (angles.cos(), angles.sin()),
            "attention_mask": mask[None, None],
        }
        return args, kwargs | changes

    tokens = list(PROMPT)
    with novel.register_forward_pre_hook(other_positions, with_kwargs=True), torch.inference_mode():
        for _ in range(num_tokens):
            logits = reference(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


def test_a_family_is_one_module(tmp_path: Path, register: Register) -> None:
    register(FAMILIES, "novel", FAMILY)
    directory = write_novel_model(tmp_path)
    assert read_model_config(directory).layer_windows == (None, 8, None)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(directory, num_blocks=100, block_size=4, dtype="float32") as llm:
        [output] = llm.generate(PROMPT, params, use_tqdm=False)
        [again] = llm.generate(PROMPT, params, use_tqdm=False)  # from the prefix cache
    assert output.outputs[0].token_ids == expected_tokens(20)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    assert again.num_cached_tokens > 0
