"""Logits equal transformers' within 1e-4 for every family and every option of its config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dense_harness import DenseHarness
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import model_zoo
from octavo.errors import ModelError
from octavo.layers.norm import Branches
from octavo.models.base import CausalLM
from octavo.models.loader import load_model
from octavo.models.registry import read_model_config
from octavo.ops.communicator import SingleRank

TOLERANCE = 1e-4
CPU = torch.device("cpu")
PROMPT = model_zoo.random_token_ids(70)  # longer than the zoo's sliding windows


def load(directory: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(read_model_config(directory), dtype, CPU, SingleRank())


def expected(reference: PreTrainedModel, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([token_ids])).logits[0]
    return logits


def assert_equal(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float32
    # Rounding errors of both grow with the logits: of a tied table they are up to 11.
    atol = TOLERANCE * max(1.0, float(want.abs().max()) / 5)
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_a_prompt_at_once_and_in_chunks(name: str) -> None:
    model = load(model_zoo.model_directory(name))
    want = expected(model_zoo.reference_model(name), PROMPT)
    assert_equal(DenseHarness(model, len(PROMPT)).run({0: PROMPT})[0], want)
    for cuts in ([0, 41, 70], [0, 8, 9, 10, 37, 69, 70]):
        harness = DenseHarness(model, len(PROMPT))
        parts = [harness.run({0: PROMPT[start:end]})[0] for start, end in pairwise(cuts)]
        assert_equal(torch.cat(parts), want)


@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_sequences_in_one_batch(name: str) -> None:
    """Prompts and decodes of three sequences, flat in one dimension."""
    reference = model_zoo.reference_model(name)
    prompts = {seq: model_zoo.random_token_ids(n, seed=n) for seq, n in enumerate((23, 1, 48))}
    wants = {seq: expected(reference, prompt) for seq, prompt in prompts.items()}
    harness = DenseHarness(load(model_zoo.model_directory(name)), 64, max_seqs=3)
    harness.run({0: prompts[0][:22], 2: prompts[2][:30]})
    got = harness.run({2: prompts[2][30:], 0: prompts[0][22:], 1: prompts[1]})
    assert_equal(got[0], wants[2][30:])
    assert_equal(got[1], wants[0][22:])
    assert_equal(got[2], wants[1])


@pytest.mark.parametrize(
    ("name", "overrides"),
    [*((name, {}) for name in model_zoo.NAMES), ("opt", {"do_layer_norm_before": False})],
)
def test_logits_indices(
    name: str, overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the caller's order; the last layer computes no others, but what comes later sees all."""
    directory = model_zoo.write_model(name, tmp_path, **overrides)
    want = expected(model_zoo.load_reference(directory), PROMPT)
    model = load(directory)
    harness = DenseHarness(model, len(PROMPT), max_seqs=2)
    rows: list[int] = []
    mlp = model.layers[-1].mlp

    def noted(compute: Callable[..., Branches]) -> Callable[..., Branches]:
        def feed_forward(*inputs: Tensor) -> Branches:
            rows.append(len(inputs[0]))
            return compute(*inputs)

        return feed_forward

    for name in ("forward", "forward_apart"):
        if hasattr(mlp, name):
            monkeypatch.setattr(mlp, name, noted(getattr(mlp, name)))
    got = harness.logits({0: PROMPT[:40], 1: PROMPT[:5]}, torch.tensor([44, 39, 12]))
    assert_equal(got, want[[4, 39, 12]])
    assert rows == [3]
    assert_equal(harness.logits({0: PROMPT[40:]}, torch.tensor([29]))[0], want[69])


LLAMA_BIAS = {"attention_bias": True, "mlp_bias": True}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}
PROPORTIONAL = {
    "rope_type": "proportional",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "factor": 2.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"scale_attn_weights": False, "n_inner": 100}),
        ("gpt2", {"tie_word_embeddings": False, "activation_function": "relu"}),
        ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
        ("opt", {"_remove_final_layer_norm": True}),
        ("opt", {"tie_word_embeddings": False, "activation_function": "gelu"}),
        ("opt", {"word_embed_proj_dim": 32}),
        ("opt", {"do_layer_norm_before": False}),
        ("llama", LLAMA_BIAS | {"head_dim": 16}),
        ("llama", {"num_key_value_heads": 1, "rope_parameters": YARN}),
        ("llama", {"rope_parameters": YARN | {"truncate": None}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": PROPORTIONAL}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 1}),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
        ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
        ("phi3", {"original_max_position_embeddings": 32}),  # less than PROMPT
        ("phi3", {"sliding_window": None, "rope_parameters": {"rope_theta": 1e6}}),
        ("phi3", {"tie_word_embeddings": True, "rope_parameters": LONGROPE | {"factor": None}}),
        ("gpt_neox", {"hidden_act": "gelu_fast"}),  # of GPT-NeoX 20B
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        ),
    ],
)
def test_options(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    directory = model_zoo.write_model(name, tmp_path, **overrides)
    want = expected(model_zoo.load_reference(directory), PROMPT)
    assert_equal(DenseHarness(load(directory), len(PROMPT)).run({0: PROMPT})[0], want)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_with_images(prefix: str, tmp_path: Path) -> None:
    """Both ways in which checkpoints of Gemma 3 are named; what belongs to images is left out."""
    text = tmp_path / "text"
    model_zoo.write_model("gemma3_text", text, final_logit_softcapping=None)
    fields = json.loads((text / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": fields | {"model_type": "gemma3_text"},
        "vision_config": {"hidden_size": 8},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(text / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    renamed["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(8)
    renamed["model.multi_modal_projector.mm_input_projection_weight"] = torch.ones(8, 8)
    save_file(renamed, tmp_path / "model.safetensors")
    want = expected(model_zoo.load_reference(text), PROMPT)
    assert_equal(DenseHarness(load(tmp_path), len(PROMPT)).run({0: PROMPT})[0], want)
    config = read_model_config(tmp_path)
    assert (config.family, config.eos_token_ids) == ("gemma3", (1, 106))
    # The last is ignored by transformers' class for models with images, and by no other.
    for name, value in (("use_bidirectional_attention", True), ("final_logit_softcapping", 30.0)):
        whole["text_config"] = fields | {name: value}
        (tmp_path / "config.json").write_text(json.dumps(whole))
        with pytest.raises(ModelError, match=f"text_config: {name} is {value}"):
            read_model_config(tmp_path)
    whole["text_config"] = fields
    (tmp_path / "config.json").write_text(json.dumps(whole | {"is_causal": False}))
    with pytest.raises(ModelError, match=r"config\.json: is_causal is False; octavo does not"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": 5}))
    with pytest.raises(ModelError, match="text_config is 5; it must be a JSON object"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("name", ["mistral", "ministral3"])
def test_the_text_part_of_mistral_3(name: str, has_head: bool, tmp_path: Path) -> None:
    """Whether there is a head of its own is what the files say, whatever tie_word_embeddings does,
    as in transformers."""
    text = model_zoo.model_directory(name)
    fields = json.loads((text / "config.json").read_text())
    tensors = load_file(text / "model.safetensors")
    if not has_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tied = tmp_path / "text"
    shutil.copytree(text, tied)
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    want = expected(model_zoo.load_reference(tied), PROMPT)
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": fields | {"tie_word_embeddings": True},
        "vision_config": {"hidden_size": 8},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    if not has_head:
        del tensors["lm_head.weight"]
    renamed = {f"language_model.{key}": tensor for key, tensor in tensors.items()}
    renamed["vision_tower.ln_pre.weight"] = torch.ones(8)
    save_file(renamed, tmp_path / "model.safetensors")
    assert_equal(DenseHarness(load(tmp_path), len(PROMPT)).run({0: PROMPT})[0], want)
    config = read_model_config(tmp_path)
    assert (config.family, config.tied_embeddings) == ("mistral3", not has_head)
    whole["text_config"] = fields | {"bos_token_id": 8, "eos_token_id": 9}
    for outside, ends in (({}, (9,)), ({"eos_token_id": None}, (9,)), ({"eos_token_id": 7}, (7,))):
        (tmp_path / "config.json").write_text(json.dumps(whole | outside))
        config = read_model_config(tmp_path)
        assert (config.bos_token_id, config.eos_token_ids) == (8, ends)
    whole["text_config"] = fields | {"dtype": "float16"}
    for outside, dtype in (({}, "float16"), ({"torch_dtype": "bfloat16"}, "bfloat16")):
        (tmp_path / "config.json").write_text(json.dumps(whole | outside))
        assert read_model_config(tmp_path).dtype == dtype
    whole["text_config"] = fields | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ModelError, match="text_config: model_type is 'llama'; octavo knows mini"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("said", "of_text", "is_tied"),
    [({}, False, True), ({"tie_word_embeddings": False}, True, False)],
)
@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_heads_of_models_with_images_are_tied_as_said_outside_text_config(
    name: str, said: dict[str, bool], of_text: bool, is_tied: bool, tmp_path: Path
) -> None:
    text_name, vision, kind, architecture = {
        "gemma3": ("gemma3_text", "siglip_vision_model", "gemma3_text", "Gemma3"),
        "mistral3": ("mistral", "pixtral", "mistral", "Mistral3"),
    }[name]
    text = json.loads((model_zoo.model_directory(text_name) / "config.json").read_text())
    text.pop("final_logit_softcapping", None)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    whole = {
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "model_type": name,
        **said,
        "text_config": text | {"model_type": kind, "tie_word_embeddings": of_text},
        "vision_config": {
            **sizes,
            **{"model_type": vision, "num_attention_heads": 2, "head_dim": 8},
            **{"image_size": 28, "patch_size": 14},
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model_zoo.randomise(model.eval(), seed=0)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert read_model_config(tmp_path).tied_embeddings == is_tied
    got = DenseHarness(load(tmp_path), len(PROMPT)).run({0: PROMPT})[0]
    assert_equal(got, expected(model, PROMPT))


def test_longrope_within_the_original_context(tmp_path: Path) -> None:
    """A model limited to it has the frequencies that transformers takes for short sequences."""
    directory = model_zoo.write_model("phi3", tmp_path, original_max_position_embeddings=128)
    reference = model_zoo.load_reference(directory)
    config = read_model_config(directory)
    for limit, prompt in ((128, PROMPT), (512, model_zoo.random_token_ids(129))):
        model = load_model(config.with_max_model_len(limit), torch.float32, CPU, SingleRank())
        got = DenseHarness(model, len(prompt)).run({0: prompt})[0]
        assert_equal(got, expected(reference, prompt))


@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_bfloat16(name: str) -> None:
    """Coarse, since rounding differs, and may decide between experts; what it would catch is a
    wrong cast."""
    model = load(model_zoo.model_directory(name), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    got = DenseHarness(model, len(PROMPT)).run({0: PROMPT})[0]
    want = expected(model_zoo.reference_model(name), PROMPT)
    assert got.dtype == torch.float32
    errors = (got - want).norm(dim=1) / want.norm(dim=1)
    assert errors.median() < 0.1


@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_declared_layers(name: str) -> None:
    config = read_model_config(model_zoo.model_directory(name))
    layers = load(config.path).attention_layers
    assert [layer.layer_id for layer in layers] == list(range(config.num_layers))
    assert tuple(layer.window for layer in layers) == config.layer_windows


@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_num_parameters(name: str) -> None:
    reference = model_zoo.reference_model(name)
    counts = [parameter.numel() for parameter in reference.parameters()]  # tied ones once
    assert read_model_config(model_zoo.model_directory(name)).num_parameters() == sum(counts)


def test_declared_windows() -> None:
    for name, windows in {"llama": {None}, "mistral": {20}, "qwen2": {None, 20}}.items():
        config = read_model_config(model_zoo.model_directory(name))
        assert set(config.layer_windows) == windows
