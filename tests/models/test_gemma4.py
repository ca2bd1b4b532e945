"""Gemma 4: what is read from config.json and the files, counted, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dense_harness import DenseHarness
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import model_zoo
from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.models.config import ModelConfig
from octavo.models.loader import load_model
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.ops.communicator import SingleRank
from octavo.parallel import Shard

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
PROMPT = model_zoo.random_token_ids(70)
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def changed(directory: Path, name: str = "gemma4_text", **changes: Any) -> ModelConfig:
    """The zoo's model with other fields in config.json."""
    fields = json.loads((model_zoo.model_directory(name) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | changes))
    return read_model_config(directory)


def on_meta(directory: Path) -> PreTrainedModel:
    """transformers' text model of a directory's config.json, without weights."""
    text = json.loads((directory / "config.json").read_text())["text_config"]
    with torch.device("meta"):
        return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**text))


@pytest.mark.parametrize("name", ["gemma-4-e4b", "gemma-4-26b-a4b"])
def test_parameters_are_those_of_transformers(name: str) -> None:
    config, model = read_model_config(CONFIGS / name, "native"), on_meta(CONFIGS / name)
    assert config.num_parameters() == sum(each.numel() for each in model.parameters())
    inputs = 0
    if config.token_inputs is not None:
        inputs = model.model.embed_tokens_per_layer.weight.numel()
    assert config.num_lookup_parameters() == inputs
    assert [config.layers[i].attention.head_dim for i in (0, 5)] == [256, 512]


def test_ranks_hold_equal_parts_of_the_table_of_layers_inputs() -> None:
    config = read_model_config(CONFIGS / "gemma-4-e4b", "native")
    half = config.sharded(Shard(1, 2))
    assert 2 * half.num_lookup_parameters() == config.num_lookup_parameters()
    assert half.layers[0].layer_input == config.layers[0].layer_input, "each has the whole of it"


def test_layers_read_the_kv_of_the_last_one_of_their_kind(tmp_path: Path) -> None:
    config = changed(tmp_path)
    assert config.kv_sources == [0, 1, 2, 3, 3, 2]
    assert config.kv_specs()[4:] == [None, None]
    with LLM(model_zoo.model_directory("gemma4_text"), num_blocks=40) as llm:
        keeping = [config.layers[i].attention for i in range(4)]
        stored = sum(group.token_size for group in llm.engine.executor.capacity.layout.groups)
        assert stored == sum(
            2 * 16 * -(-each.head_dim // 16) * each.num_kv_heads for each in keeping
        )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "attention is 'all'; octavo does"),
        (
            "gemma4_text",
            {"num_kv_shared_layers": 4},
            "num_kv_shared_layers is 4; of 6 layers, those before them must have every kind",
        ),
        ("gemma4_text", {"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1; it must be a"),
        (
            "gemma4_text",
            {"vocab_size_per_layer_input": 319},
            r"vocab_size_per_layer_input is 319; it must be at least vocab_size \(320\)",
        ),
        ("gemma4_text", {"hidden_size_per_layer_input": True}, "per_layer_input is True; it must"),
        ("gemma4_text", {"layer_types": ["full_attention"] * 5}, "layer_types is .* name 6 layers"),
        (
            "gemma4_text",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters is .*; it must have each of full_attention, sliding_attention",
        ),
        (
            "gemma4_text",
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 1e4},
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5},
                }
            },
            "partial_rotary_factor is 1.5; it must be a part of each head, at most 1",
        ),
        (
            "glm",
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
            "rope_type is 'proportional'; a part of each head is rotated here",
        ),
        ("gemma4_text", {"per_layer_config": {"6": {}}}, "must have numbers of layers, below 6"),
        (
            "gemma4_text",
            {"per_layer_config": {"2": {"sliding_window": 4}}},
            "2 is .*sliding_window.*; octavo knows head_dim and num_key_value_heads",
        ),
        (
            "gemma4_text",
            {"per_layer_config": {"2": {"head_dim": 24}}},
            "per_layer_config: 5 is None; layers of full_attention before it have other heads",
        ),
        (
            "gemma4-31b",
            {"per_layer_config": None, "num_global_key_value_heads": 3},
            r"full_attention have 3 KV heads, whose number must divide num_attention_heads \(4\)",
        ),
        ("gemma4-31b", {"per_layer_config": None, "global_head_dim": 15}, "heads of 15 elements"),
        ("gemma4-26b-a4b", {"num_experts": None}, "config.json has no num_experts"),
        ("gemma4-26b-a4b", {"num_experts": 1025}, "num_experts is 1025; .* at most 1,024"),
        ("gemma4-26b-a4b", {"top_k_experts": 10}, "10 of 9 experts cannot be chosen"),
    ],
)
def test_what_cannot_be_served_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        changed(tmp_path, name, **changes)


def test_heads_as_published_files_have_them(tmp_path: Path) -> None:
    """Not by layer, as transformers 5 writes them."""
    expected = changed(tmp_path, "gemma4-31b")
    assert expected.layers[2].attention.num_kv_heads == 1
    own = {"global_head_dim": 24, "num_global_key_value_heads": 1}
    assert changed(tmp_path, "gemma4-31b", per_layer_config=None, **own) == expected
    # Without attention_k_eq_v, the number is not that of layers without windows.
    other = changed(tmp_path, "gemma4-31b", per_layer_config=None, attention_k_eq_v=False, **own)
    assert other.layers[2].attention.num_kv_heads == 2
    assert other.layers[2].attention.head_dim == 24


@pytest.mark.parametrize("said", ["vision", None])
def test_the_text_part_of_a_model_with_images(said: str | None, tmp_path: Path) -> None:
    """By the names of published files, which have keys and values of layers that read others', too;
    what belongs to images and sound is left out."""
    text = model_zoo.model_directory("gemma4-e2b")
    fields = json.loads((text / "config.json").read_text())
    whole = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma4",
        "text_config": fields | {"use_bidirectional_attention": said},
        "vision_config": {"hidden_size": 8},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    prefix = "model.language_model."
    tensors = {
        prefix + name.removeprefix("model."): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"{prefix}layers.5.self_attn.{name}.weight"] = torch.ones(2, 3)
    for name in (
        "vision_tower.std_bias",
        "audio_tower.x.weight",
        "embed_vision.y",
        "embed_audio.z",
    ):
        tensors[f"model.{name}"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors")
    config = read_model_config(tmp_path)
    assert (config.family, config.eos_token_ids, config.tied_embeddings) == (
        "gemma4",
        (1, 106),
        True,
    )
    model = load_model(config, torch.float32, CPU, SingleRank())
    with torch.inference_mode():
        want = model_zoo.reference_model("gemma4-e2b")(torch.tensor([PROMPT])).logits[0]
    got = DenseHarness(model, len(PROMPT)).run({0: PROMPT})[0]
    torch.testing.assert_close(got, want, rtol=0, atol=3e-4)
    save_file(tensors | {"model.other.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.other\.weight"):
        load_model(config, torch.float32, CPU, SingleRank())


@pytest.mark.parametrize("name", ["gemma4-e2b", "gemma4-31b", "gemma4-26b-a4b"])
def test_quantization_on_load(name: str, tmp_path: Path) -> None:
    """All projections of layers, those of their inputs among them."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "global_head_dim": 64}
    if name == "gemma4-e2b":
        sizes["hidden_size_per_layer_input"] = 32
    if name == "gemma4-26b-a4b":
        sizes["moe_intermediate_size"] = 64
    directory = model_zoo.write_model(name, tmp_path, **sizes)
    config = quantized_on_load(read_model_config(directory), "fp8")
    weights = dict(config.quantizable_weights())
    assert sum(config.quantized_parts) == sum(
        each.num_quantized_parameters(1) for each in weights.values()
    )
    assert ("layers.0.layer_input.gate" in weights) == (name == "gemma4-e2b")
    with LLM(directory, num_blocks=80, quantization="fp8") as llm:
        [output] = llm.generate(PROMPT[:20], GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 6
