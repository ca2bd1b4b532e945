"""Copies of FP8 weights in 7 bits: which weights have them, and what is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import model_zoo
from octavo import LLM, SamplingParams, float7
from octavo.config import make_config
from octavo.layers.config import ExpertsConfig, LinearConfig
from octavo.layers.experts import QuantizedExperts
from octavo.models.config import ModelConfig
from octavo.models.quantization import Quantization
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.ops.cuda.expert_tiles import tokens_per_tile
from octavo.ops.cuda.float7 import pack_float7
from octavo.parallel import Shard
from octavo.routing import RoutingConfig
from octavo.simulation.cost_model import ModelSize
from octavo.weight_forms import with_copies

CONFIGS = Path(__file__).parents[2] / "benchmarks/configs"


def in_float8(name: str) -> ModelConfig:
    return quantized_on_load(read_model_config(CONFIGS / name), "fp8")


def test_large_projections_have_them() -> None:
    plain = in_float8("llama-3-8b")
    assert plain.copy_form == "float7"
    config = plain.with_copies()
    gates, down = 28672 * 4096, 14336 * 4096
    assert [sum(each.copy_bytes for each in of) for of in config.copyable] == [
        (gates + down) * 7 // 8
    ] * 32
    assert config.least_weight_bytes(2) == plain.least_weight_bytes(2) + config.copy_bytes
    head = config.head.copy_saves(8)
    assert config.copy_saves(1) == head
    assert config.copy_saves(2) == config.copy_saves(32) == head + 32 * (gates + down) // 8
    assert config.copy_saves(33) == config.copy_saves(64) == head + 32 * gates // 8
    assert config.copy_saves(65) == head
    size = ModelSize.of(config, "bfloat16")
    assert size.copies_save == ((2, 32, 32 * down // 8), (2, 64, 32 * gates // 8))
    reads = [
        ModelSize.of(plain, "bfloat16").read_bytes(n, 999) - size.read_bytes(n, 999)
        for n in (1, 2, 64, 65)
    ]
    assert reads == [0, 32 * (gates + down) // 8, 32 * gates // 8, 0]
    # Of a half of a down projection there are too few weights.
    shard = config.sharded(Shard(0, 2))
    assert shard.copy_bytes - shard.head.copy_bytes == 32 * gates // 2 * 7 // 8


def test_experts_have_them() -> None:
    config = in_float8("qwen3-30b-a3b").with_copies()
    qkv, output, experts = config.copyable[0]
    assert isinstance(experts, ExpertsConfig)
    assert qkv.copy_bytes == output.copy_bytes == 0
    assert experts.copy_bytes == 128 * 3 * 2048 * 768 * 7 // 8
    counts = experts.copied_tokens
    assert counts.start == 2
    tiles = [tokens_per_tile(count, 128, 8) for count in (counts[-1], counts.stop)]
    assert tiles == [32, 64]
    assert experts.copy_saves_of_all == 128 * 3 * 2048 * 768 // 8
    assert config.copy_saves(1) == config.head.copy_saves(1)
    [(least, most, saved)] = ModelSize.of(config, "bfloat16").expert_copies_save
    assert (least, most, saved) == (2, counts[-1], 48 * experts.copy_saves_of_all)
    few = replace(experts, routing=RoutingConfig(num_experts=8, top_k=2), hidden_size=1024)
    assert few.copied_tokens.start > counts.start
    assert not replace(few, intermediate_size=128).copied_tokens
    for other in ({"method": "plain"}, {"intermediate_size": 704}, {"bias": True}):
        assert replace(experts, **other).copy_bytes == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_rows", "size", "has_copy"),
    [(28672, 4096, True), (28680, 4096, False), (28672, 4160, False), (4096, 4096, False)],
)
def test_which_weights_have_them(num_rows: int, size: int, has_copy: bool) -> None:
    """Large ones of whole pieces: of rows, of gates and of what they gate, and of inputs."""
    config = LinearConfig(size, (num_rows,), method="quantized").with_copy("float7")
    assert (config.copy == "float7") == has_copy
    assert bool(config.copied_tokens) == has_copy
    assert LinearConfig(size, (num_rows,)).with_copy("float7").copy is None
    weight = torch.zeros(16, 256).to(torch.float8_e4m3fn)
    assert pack_float7(weight).nbytes == float7.copy_bytes(16, 256)


def test_files_in_fp8_have_none() -> None:
    """Their numbers have more bits."""
    model = read_model_config(CONFIGS / "llama-3-8b")
    stored = Quantization("fp8", form="float8", quantizes_inputs=True)
    assert replace(model, quantization=stored).copy_form is None
    blocks = replace(in_float8("llama-3-8b").quantization, block=(128, 128))  # type: ignore[type-var]
    assert replace(model, quantization=blocks).copy_form is None


@pytest.mark.parametrize(
    ("dtype", "kernels", "has_copies"),
    [("bfloat16", "hopper", True), ("bfloat16", "ampere", False), ("float16", "hopper", False)],
)
def test_devices_that_have_them(dtype: str, kernels: str, has_copies: bool) -> None:
    model, config = in_float8("llama-3-8b"), make_config(str(CONFIGS / "llama-3-8b"))
    made = with_copies(config, model, dtype, 126 * 10**9, kernels)  # type: ignore[arg-type]
    assert made == (model.with_copies() if has_copies else model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama3", {"hidden_size": 256, "intermediate_size": 512}),
        ("qwen3_moe", {"hidden_size": 256, "moe_intermediate_size": 128}),
    ],
)
def test_tokens_are_those_without_them(
    name: str, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_LEAST_SIZE", "_LEAST_OF_EXPERTS", "_MANY_ROWS"):
        monkeypatch.setattr(float7, limit, 1)
    directory = model_zoo.write_model(name, tmp_path / "model", **sizes)
    prompts = [model_zoo.random_token_ids(n, seed=n) for n in range(3, 20)]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    found = []
    for weight_copies in (True, False):
        with LLM(
            str(directory),
            dtype="bfloat16",
            quantization="fp8",
            num_blocks=200,
            weight_copies=weight_copies,
        ) as llm:
            assert any(
                each.copy_bytes for of in llm.engine.model_config.copyable for each in of
            ) == (weight_copies)
            executor = llm.engine.executor
            for module in executor._worker.runner._model.modules():  # type: ignore[attr-defined]
                if isinstance(module, QuantizedExperts):
                    assert (module._kernel._words is not None) == weight_copies  # type: ignore[attr-defined]
            outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
            found.append([(each.token_ids, each.logprobs) for each in outputs])
    assert found[0] == found[1]
