"""What docs/extending.md says of a family: one module with a reader and the weights' names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_harness import DenseHarness
from safetensors.torch import load_file, save_file

import model_zoo
from octavo.json_fields import Fields
from octavo.models import registry
from octavo.models.config import ModelDescription
from octavo.models.families.common import read_gated_decoder
from octavo.models.family import Family, WeightNames
from octavo.models.loader import load_model
from octavo.models.registry import read_model_config

PROMPT = model_zoo.random_token_ids(40)
CPU = torch.device("cpu")


def read(config: Fields) -> ModelDescription:
    """Every other layer has a window and other rotary frequencies."""
    description = read_gated_decoder(config)
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


def test_a_family_is_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, "novel", FAMILY)
    config = read_model_config(write_novel_model(tmp_path))
    assert config.layer_windows == (None, 8, None)
    model = load_model(config, torch.float32, CPU)
    got = DenseHarness(model, len(PROMPT)).run({0: PROMPT})[0]

    reference = model_zoo.load_reference(model_zoo.model_directory("llama"))
    novel = reference.model.layers[1].self_attn
    frequencies = 100.0 ** -(torch.arange(0, novel.head_dim, 2) / novel.head_dim)
    positions = torch.arange(len(PROMPT))
    angles = torch.outer(positions, frequencies).repeat(1, 2)[None]
    ago = positions[:, None] - positions[None, :]
    mask = torch.zeros(ago.shape).masked_fill((ago < 0) | (ago >= 8), float("-inf"))[None, None]

    def other_positions(module: torch.nn.Module, args: tuple[()], kwargs: dict[str, object]):  # type: ignore[no-untyped-def]
        changes = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": mask}
        return args, kwargs | changes

    with novel.register_forward_pre_hook(other_positions, with_kwargs=True), torch.inference_mode():
        want = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
