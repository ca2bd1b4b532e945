"""Models through transformers generate its own tokens, whatever the engine does."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fallback.shrunken
import model_zoo
from fallback.shrunken import shrunken_config
from fallback.sweep import (
    GREEDY,
    NUM_TOKENS,
    Reference,
    prompts,
    reference_beams,
    reference_tokens,
    served_tokens,
    write_reference,
)
from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import ModelError
from octavo.models.fallback.build import build
from octavo.models.registry import read_model_config
from octavo.ops import load_backend, token_size_of

# Windows and sinks, experts of several kinds, MLA, biases, parallel blocks, norms of other kinds,
# multipliers, layers without rotation, one KV head, learned positions.
MODEL_TYPES = (
    *("gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "olmoe", "cohere2_moe"),
    *("nemotron", "gpt_bigcode", "apertus", "hunyuan_v1_dense", "minicpm3", "biogpt"),
    # Whose files have queries, keys and values in one tensor (transformers 5.24).
    *({"sarvam_moe"} & set(fallback.shrunken.MODEL_TYPES)),
    # Fewer KV heads in layers with windows than in others.
    "mimo_v2_flash",
)
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    # Layers without windows have longer heads, and the last two read other layers' KV.
    "gemma4_shared": (
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "layer_types": KINDS * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "global_head_dim": 32,
        },
    ),
    # Keys are values, too, in one head of such layers; experts beside a dense block.
    "gemma4_experts": (
        "gemma4_text",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
        },
    ),
    "gemma3n_shared": (
        "gemma3n_text",
        {
            "num_hidden_layers": 6,
            "layer_types": KINDS * 2,
            "num_kv_shared_layers": 2,
            "intermediate_size": 48,
            "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4,
        },
    ),
}
MAX_MODEL_LEN = 80


@functools.cache
def reference(model_type: str) -> Reference:
    own, fields = VARIANTS.get(model_type, (model_type, {}))
    return write_reference(own, Path(tempfile.mkdtemp(prefix=f"{model_type}-")), **fields)


@functools.cache
def expected(model_type: str) -> list[list[int]]:
    return [reference_tokens(reference(model_type).model, each) for each in prompts()]


def load(model_type: str, **options: object) -> LLM:
    given = {"num_blocks": 120, "block_size": 8, "max_model_len": MAX_MODEL_LEN, **options}
    return LLM(reference(model_type).directory, model_impl="transformers", **given)


@pytest.mark.parametrize("model_type", [*MODEL_TYPES, *VARIANTS])
def test_greedy_tokens_equal_transformers(model_type: str) -> None:
    """In chunks, beside each other, and again from the prefix cache."""
    assert served_tokens(reference(model_type).directory) == expected(model_type)


@pytest.mark.parametrize("model_type", ["gemma4_shared", "gemma4_experts"])
def test_layers_whose_heads_differ_and_layers_that_share_kv(model_type: str) -> None:
    """What a sequence holds follows from the layers that keep KV, each with its own size."""
    config = read_model_config(reference(model_type).directory, "transformers")
    keeping = [config.layers[i].attention for i in sorted(set(config.kv_sources))]
    assert len({(each.num_kv_heads, each.head_dim) for each in keeping}) == 2
    assert len(keeping) == config.num_layers - 2 * (model_type == "gemma4_shared")
    with load(model_type) as llm:
        capacity = llm.engine.executor.capacity
        stored = sum(group.token_size for group in capacity.layout.groups)
        assert stored == sum(2 * each.num_kv_heads * each.head_dim for each in keeping)


def test_the_part_for_text_of_a_model_that_takes_images(tmp_path: Path) -> None:
    """Towers and what follows them take no memory, and their tensors are not read."""
    model = write_reference("llava", tmp_path).model
    config = read_model_config(tmp_path)
    own = {name for name, _ in model.named_parameters()}
    of_images = {name for name in own if "vision_tower" in name or "multi_modal" in name}
    assert of_images
    used = sum(p.numel() for name, p in model.named_parameters() if name not in of_images)
    assert config.num_parameters() == used
    assert served_tokens(tmp_path) == [reference_tokens(model, each) for each in prompts()]
    # A name of octavo's, and none that merely begins like it.
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"vision_towers.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"vision_towers\.weight"):
        LLM(tmp_path, num_blocks=120)


def test_a_tower_whose_library_is_missing(tmp_path: Path) -> None:
    """Of Gemma 3n, whose tower is timm's, the part for text computes as it does alone."""
    own = reference("gemma3n_shared").directory
    whole = shrunken_config("gemma3n", **VARIANTS["gemma3n_shared"][1])
    whole.architectures = ["Gemma3nForConditionalGeneration"]
    whole.save_pretrained(tmp_path)
    tensors = load_file(own / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    for name, tensor in build(tmp_path, torch.float32).model.state_dict().items():
        if "language_model" not in name and name != "lm_head.weight":
            renamed[name] = torch.randn(tensor.shape)
    renamed["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.ones(2)
    save_file(renamed, tmp_path / "model.safetensors")
    assert served_tokens(tmp_path) == expected("gemma3n_shared")


def test_dynamic_scaling_of_a_rotary_embedding(tmp_path: Path) -> None:
    """It compares positions with the context, which a step without data cannot."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = write_reference("arcee", tmp_path, rope_parameters=rope).model
    assert served_tokens(tmp_path) == [reference_tokens(model, each) for each in prompts()]


@pytest.mark.parametrize("max_model_len", [80, 100, 101])
def test_a_window_that_is_longer_than_what_is_served(tmp_path: Path, max_model_len: int) -> None:
    model = write_reference("mixtral", tmp_path, sliding_window=100).model
    expected = [reference_tokens(model, each) for each in prompts()]
    assert served_tokens(tmp_path, max_model_len=max_model_len) == expected


def test_no_experts_for_a_token(tmp_path: Path) -> None:
    model = write_reference("mellum", tmp_path, num_experts_per_tok=0).model
    assert served_tokens(tmp_path) == [reference_tokens(model, each) for each in prompts()]


def test_positions_are_those_that_a_model_counts_itself() -> None:
    """RoBERTa's begin after pad_token_id, of which as many rows of the table are not used."""
    config = reference("roberta").model.config
    assert config.pad_token_id == 2
    assert read_model_config(reference("roberta").directory).max_model_len == 253
    assert served_tokens(reference("roberta").directory) == expected("roberta")


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe", "gemma4_shared"])
def test_preempted_requests_go_on_with_the_same_tokens(model_type: str, mode: str) -> None:
    config = read_model_config(reference(model_type).directory, "transformers")
    layout = config.kv_layout(token_size_of(load_backend("cpu")))
    num_blocks = sum(
        spec.max_blocks(MAX_MODEL_LEN, size, MAX_MODEL_LEN)
        for spec, size in zip(layout.specs, layout.block_sizes(8), strict=True)
    )
    options = {"policy": "priority", "preemption_mode": mode, "num_blocks": num_blocks}
    with load(model_type, **options) as llm:
        stream = llm.client.make_request(prompts()[1], GREEDY, priority=5)
        llm.client.add_request(stream)
        for _ in range(4):
            llm.client.step()
        filler = torch.arange(3, 3 + MAX_MODEL_LEN - 1).tolist()
        urgent = llm.client.make_request(filler, SamplingParams(max_tokens=1), priority=0)
        llm.client.add_request(urgent)
        while llm.client.has_unfinished:
            llm.client.step()
        assert stream.output is not None
        assert stream.output.num_preemptions == 1
        assert stream.output.outputs[0].token_ids == expected(model_type)[1]
        assert llm.engine.scheduler.num_preemptions[mode] == 1
        assert llm.engine.kv.pool.num_held == 0


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe", "gemma4_shared"])
def test_beams_equal_transformers(model_type: str) -> None:
    prompt, model = prompts()[1], reference(model_type).model
    with load(model_type) as llm:
        params = BeamSearchParams(beam_width=4, max_tokens=NUM_TOKENS, ignore_eos=True)
        [output] = llm.beam_search(prompt, params, use_tqdm=False)
    beams = reference_beams(model, prompt, 4)
    assert [each.token_ids for each in output.outputs] == beams


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
def test_parallel_samples_do_not_depend_on_company(model_type: str) -> None:
    params = SamplingParams(n=3, temperature=0.8, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
    with load(model_type) as llm:
        [alone] = llm.generate(prompts()[1], params, use_tqdm=False)
    with load(model_type, max_num_batched_tokens=20, max_num_seqs=8) as llm:
        *_, busy = llm.generate([*prompts(), prompts()[1]], params, use_tqdm=False)
    samples = [each.token_ids for each in alone.outputs]
    assert [each.token_ids for each in busy.outputs] == samples
    assert len({tuple(each) for each in samples}) == 3


@pytest.mark.parametrize("name", ["llama3", "gemma2", "qwen3", "gemma4_text"])
def test_families_of_octavo_s_own_generate_the_same_tokens_through_transformers(name: str) -> None:
    """Greedy, drawn and beams; gemma2 has windows, soft caps and norms of its own."""
    directory = model_zoo.model_directory(name)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    drawn = SamplingParams(n=2, temperature=0.9, seed=3, max_tokens=8, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    results = []
    for model_impl in ("native", "transformers"):
        with LLM(directory, model_impl=model_impl, num_blocks=120, max_num_seqs=8) as llm:
            made = "transformers" if "fallback" in llm.engine.model_config.model_class else "native"
            assert made == model_impl
            outputs = llm.generate(prompts(), [greedy, drawn], use_tqdm=False)
            outputs += llm.beam_search(prompts()[1], beams, use_tqdm=False)
        results.append([[each.token_ids for each in output.outputs] for output in outputs])
    assert results[0] == results[1]
