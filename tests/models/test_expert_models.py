"""Mixtures of experts: what is read from config.json, counted, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from dense_harness import DenseHarness
from safetensors.torch import load_file, save_file

import model_zoo
from octavo import LLM, SamplingParams
from octavo.cli.main import main
from octavo.config import ModelImpl
from octavo.core.step import StepResult
from octavo.errors import ModelError
from octavo.layers import experts as layers
from octavo.layers.config import ExpertsConfig
from octavo.layers.experts import MixtureOfExperts, QuantizedExperts
from octavo.models.config import ModelConfig
from octavo.models.dequantize import MX_LARGEST
from octavo.models.loader import load_model
from octavo.models.registry import read_model_config
from octavo.ops.communicator import SingleRank
from octavo.ops.cuda.experts import CudaExperts
from octavo.ops.cuda.routing import CudaRouter
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import QuantizedExpertWeights, Routed
from octavo.ops.quantized import MxFloat4, Rounding
from octavo.parallel import Shard
from octavo.routing import RoutingConfig

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


def changed(name: str, directory: Path, **changes: Any) -> ModelConfig:
    """The zoo's model with other fields in config.json."""
    fields = json.loads((model_zoo.model_directory(name) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | changes))
    return read_model_config(directory)


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_active"),
    [
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
        ("gpt-oss-20b", 20_914_757_184, 4_187_440_704),
    ],
)
def test_parameters_of_published_models(name: str, num_parameters: int, num_active: int) -> None:
    config = read_model_config(CONFIGS / name)
    assert config.num_parameters() == num_parameters
    assert config.num_active_parameters() == num_active
    half = config.sharded(Shard(1, 2)).num_expert_parameters()
    assert half == pytest.approx(config.num_expert_parameters() / 2, rel=1e-3)


def test_no_jitter_noise(tmp_path: Path) -> None:
    """Both experts have the weight 1; config_sweep.py compares it with transformers."""
    config = changed("phimoe", tmp_path, router_jitter_noise=0)
    assert {layer.mlp.routing.jitter for layer in config.layers} == {0.0}


def test_expected_experts() -> None:
    """As many as top_k for one token, and all of them for very many."""
    routing = RoutingConfig(num_experts=128, top_k=8)
    assert routing.expected_distinct(1) == pytest.approx(8)
    assert routing.expected_distinct(8) == pytest.approx(51.6, abs=0.1)
    assert routing.expected_distinct(10_000) == pytest.approx(128)
    assert routing.expected_distinct(0) == 0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ("mixtral", {"num_local_experts": 1025}, "is 1025; .* at most 1,024 .*registers"),
        ("mixtral", {"num_experts_per_tok": 6}, "6 of 5 experts cannot be chosen"),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers is .* numbers of layers"),
        ("glm4_moe", {"n_group": 5}, "12 experts do not form 5 groups"),
        ("glm4_moe", {"topk_group": 1, "n_group": 6}, "1 groups of 2 have no 3 experts"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3; octavo does not"),
        ("phimoe", {"router_jitter_noise": -0.1}, "router_jitter_noise is -0.1"),
        ("phimoe", {"router_jitter_noise": False}, "router_jitter_noise is False"),
    ],
)
def test_what_cannot_be_served_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        changed(name, tmp_path, **changes)


class AddedUp:
    """The GPU's kernel, with the sum that a norm takes there."""

    def __init__(
        self,
        weights: QuantizedExpertWeights,
        epilogue: Epilogue,
        dtype: torch.dtype,
        float7_tokens: range,
    ) -> None:
        assert dtype == torch.float32
        assert not float7_tokens
        kernel = CudaExperts.of(weights, epilogue)
        assert kernel is not None
        self._kernel = kernel

    def rounding(self, num_tokens: int, top_k: int) -> Rounding:
        return self._kernel.rounding(num_tokens, top_k)

    def apply_partial(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        return self._kernel.apply_partial(x, routed).sum(0)


def test_experts_in_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gpt-oss is published: the same model as one with the values that they stand for, and by
    the kernels that compute with the packed ones."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    plain = model_zoo.write_model("gpt_oss", tmp_path / "plain", **sizes)
    packed = model_zoo.write_model("gpt_oss", tmp_path / "packed", **sizes)
    tensors, stored = load_file(plain / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        num_experts, inputs, outputs = tensor.shape
        shape = (num_experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 125, shape, generator=generator, dtype=torch.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
        scaled = values[pairs] * torch.exp2(scales.float() - 127).unsqueeze(-1)
        tensors[name] = scaled.flatten(-2).transpose(1, 2).contiguous()
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, packed / "model.safetensors")
    fields = json.loads((packed / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4"}
    (packed / "config.json").write_text(json.dumps(fields))
    logits = []
    for directory in (plain, packed, packed):
        model = load_model(
            read_model_config(directory), torch.float32, torch.device("cpu"), SingleRank()
        )
        prompt = model_zoo.random_token_ids(20)
        logits.append(DenseHarness(model, len(prompt)).run({0: prompt})[0])
        if len(logits) == 2:
            monkeypatch.setattr(layers, "make_router_kernel", CudaRouter)
            monkeypatch.setattr(layers, "make_quantized_experts_kernel", AddedUp)
    dense, dequantized, quantized = logits
    assert torch.equal(dequantized, dense)
    assert not torch.equal(quantized, dense), "computed by the same kernels"
    torch.testing.assert_close(quantized, dense, rtol=1e-4, atol=1e-4)
    assert torch.equal(quantized.argmax(dim=-1), dense.argmax(dim=-1))

    def generated(model_impl: ModelImpl) -> list[int]:
        with LLM(packed, dtype="float32", num_blocks=8, model_impl=model_impl) as llm:
            [output] = llm.generate([prompt], SamplingParams(temperature=0), use_tqdm=False)
        return list(output.outputs[0].token_ids)

    monkeypatch.undo()
    assert generated("transformers") == generated("native")


def test_ranks_keep_parts_of_experts_in_mxfp4(tmp_path: Path) -> None:
    """Random weights: gates and ups take turns, and down weights are cut along their inputs."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    directory = model_zoo.write_model("gpt_oss", tmp_path / "model", **sizes)
    fields = json.loads((directory / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(fields))
    config, x = read_model_config(directory), torch.randn(9, 64)

    def results(config: ModelConfig) -> torch.Tensor:
        cpu = torch.device("cpu")
        model = load_model(config, torch.float32, cpu, SingleRank(), "dummy")
        [block] = [each for each in model.modules() if isinstance(each, MixtureOfExperts)]
        assert isinstance(block.experts, QuantizedExperts)
        return block.experts.forward_partial(x, block.router.forward(x))

    ranks = [results(config.sharded(Shard(rank, 2))) for rank in range(2)]
    torch.testing.assert_close(sum(ranks), results(config), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (
            "scales",
            lambda scales: scales.fill_(255),
            r"has the exponent 255 at \[0, 0, 0\]; weights are finite with those from 0 to 252",
        ),
        ("scales", lambda scales: scales.fill_(253), r"has the exponent 253 at \[0, 0, 0\]"),
        ("scales", lambda scales: scales[:, :-1], r"has shape \[\d, 63, 2\], not one per block"),
        ("scales", lambda scales: scales.float(), r"is torch\.float32; it must be torch\.uint8"),
        ("scales", lambda scales: None, r"down_proj_blocks is there, but not .*down_proj_scales"),
        ("blocks", lambda blocks: blocks[..., :8], r"has shape \[\d, 64, 2, 8\], not \[experts"),
        ("blocks", lambda blocks: blocks.flatten(2), r"has shape \[\d, 64, 32\], not \[experts"),
        ("blocks", lambda blocks: None, r"down_proj_scales is there, but not .*down_proj_blocks"),
    ],
)
def test_broken_mxfp4_is_refused(
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    message: str,
    tmp_path: Path,
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    directory = model_zoo.write_model("gpt_oss", tmp_path / "model", **sizes)
    tensors = load_file(directory / "model.safetensors")
    [name] = [each for each in tensors if each.endswith("experts.down_proj")]
    num_experts, inputs, outputs = tensors.pop(name).shape
    shape = (num_experts, outputs, inputs // 32)
    parts = {
        f"{name}_blocks": torch.zeros(*shape, 16, dtype=torch.uint8),
        f"{name}_scales": torch.full(shape, 120, dtype=torch.uint8),
    }
    broken = change(parts.pop(f"{name}_{part}"))
    if broken is not None:
        parts[f"{name}_{part}"] = broken.contiguous()
    save_file(tensors | parts, directory / "model.safetensors")
    fields = json.loads((directory / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(fields))
    config = read_model_config(directory)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(config, torch.float32, torch.device("cpu"), SingleRank())
    assert "experts.down_proj_" in str(caught.value)


def test_the_largest_exponent_of_mxfp4_gives_finite_weights() -> None:
    """In bfloat16 as in float32."""
    values = torch.arange(32, dtype=torch.uint8).fmod(16).view(1, 32)
    form = MxFloat4.from_values(values, torch.full((1, 1), MX_LARGEST, dtype=torch.uint8))
    for dtype in (torch.float32, torch.bfloat16):
        assert form.dense(dtype).isfinite().all()
    above = MxFloat4.from_values(values, torch.full((1, 1), MX_LARGEST + 1, dtype=torch.uint8))
    assert not above.dense(torch.float32).isfinite().all()


def test_layers_with_experts(tmp_path: Path) -> None:
    def kinds(**changes: Any) -> list[bool]:
        layers = changed("qwen3_moe", tmp_path, **changes).layers
        return [isinstance(layer.mlp, ExpertsConfig) for layer in layers]

    assert kinds() == [True, False, True]
    assert kinds(mlp_only_layers=[], decoder_sparse_step=2) == [False, True, False]
    assert kinds(mlp_only_layers=[0, 1, 2]) == [False] * 3


def test_a_step_counts_the_experts_that_it_computes() -> None:
    """Two of three layers have experts, of which a token takes three."""
    results: list[StepResult] = []
    with LLM(str(model_zoo.model_directory("qwen3_moe")), num_blocks=40) as llm:
        llm.engine.observers.append(lambda plan, result, progress: results.append(result))
        prompt = model_zoo.random_token_ids(30)
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        assert sum(llm.engine.model_config.mixtures().values()) == 2
    counts = [result.num_hit_experts for result in results]
    assert 6 <= counts[0] <= 14
    assert [b - a for a, b in pairwise(counts)] == [6] * (len(counts) - 1)


def test_memory_tells_experts_from_other_weights() -> None:
    arguments = ["memory", str(CONFIGS / "qwen3-30b-a3b"), "--device-memory", "140GiB"]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    values = json.loads(done.stdout)
    assert values["active_parameters"] == 3_353_032_704
    assert values["expert_bytes"] == 2 * 48 * 128 * 3 * 2048 * 768
    text = CliRunner().invoke(main, arguments).stdout
    assert "a token takes 3,353.0 M of them" in text
    assert "54.00 GiB of the weights" in text
    arguments = ["memory", str(CONFIGS / "gpt-oss-20b-mxfp4"), "--gpu", "h200", "--json"]
    values = json.loads(CliRunner().invoke(main, arguments).stdout)
    num_weights = 24 * 32 * 3 * 2880 * 2880
    assert values["expert_bytes"] == pytest.approx(num_weights * 17 / 32, rel=1e-3)  # 4.25 bits
