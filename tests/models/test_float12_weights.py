"""Whole models with weights in 12 bits, on a CPU that has doubles of the kernels."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import model_zoo
from float12_doubles import Exact, install
from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.layers import linear as layers_linear
from octavo.layers.linear import Projection
from octavo.models.registry import read_model_config
from octavo.ops.cuda.float12 import takes_float12
from octavo.ops.linear import LinearKernel, TorchLinear
from octavo.parallel import Shard
from octavo.worker.device.cpu import CpuDevice

PROMPTS = [model_zoo.random_token_ids(n, seed=n) for n in (3, 40, 90)]
SIZES = {"hidden_size": 128, "intermediate_size": 192}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> type:
    """The class of the kernels that weights in 12 bits get."""
    module, _ = install(monkeypatch)

    def make_kernel(
        weight: Tensor, is_chained: bool = False, dense_weights: str = "bfloat16"
    ) -> LinearKernel:
        is_packed = dense_weights == "float12" and takes_float12(weight)
        kernel: LinearKernel = module.Float12Linear(weight) if is_packed else TorchLinear(weight)
        return kernel

    monkeypatch.setattr(layers_linear, "make_linear_kernel", make_kernel)
    monkeypatch.setattr(layers_linear, "make_quantized_kernel", lambda *args: None)
    monkeypatch.setattr(CpuDevice, "weight_kernels", lambda *args: "hopper")
    return module.Float12Linear


def load(directory: Path | str, dense_weights: str = "float12", **options: Any) -> LLM:
    options = {"dtype": "bfloat16", "num_blocks": 200, **options}
    return LLM(str(directory), dense_weights=dense_weights, **options)


def model_of(llm: LLM) -> nn.Module:
    runner: Any = llm.engine.executor
    model: nn.Module = runner._worker.runner._model
    return model


def results(llm: LLM, num_tokens: int = 12) -> tuple[list[list[int]], Tensor]:
    """Greedy tokens, and their log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, logprobs=1, ignore_eos=True)
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS, params, use_tqdm=False)]
    scores = [position.logprob for each in outputs for position in each.logprobs or ()]
    return [list(each.token_ids) for each in outputs], torch.tensor(scores)


def exact_results(kernel: type, directory: Path | str, **options: Any) -> Any:
    """`results` by the same kernels, with weights that keep all their bits."""
    names = kernel.__init__.__globals__  # type: ignore[misc]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(names, "pack_float12", Exact)
        with load(directory, **options) as llm:
            return results(llm)


def test_the_demo_model_generates_the_same(hopper: type) -> None:
    """Trained weights; the head shares the embedding's table, and is packed beside it."""
    tokens, scores = exact_results(hopper, "demo")
    with load("demo") as llm:
        packed_tokens, packed_scores = results(llm)
        model = model_of(llm)
        heads = [m for path, m in model.named_modules() if path == "head.linear"]
        kernels = [m._kernel for m in model.modules() if isinstance(m, Projection)]
        assert all(isinstance(each, hopper) for each in kernels)
        assert isinstance(heads[0]._kernel, hopper)
        assert model.get_parameter("embedding.weight").dtype == torch.bfloat16
    assert packed_tokens == tokens
    assert float((packed_scores - scores).abs().max()) <= 1e-3


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama3", {}),
        ("gpt_oss", {}),
        ("qwen2_moe", {}),
        ("llama3", {"quantization": "fp8"}),
        ("llama3", {"model_impl": "transformers"}),
        ("t5", {}),
    ],
)
def test_other_kinds_of_models(
    hopper: type,
    name: str,
    options: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What does not take the form stays as it is, and the log says how much that is."""
    sizes = {"d_model": 128, "d_ff": 320} if name == "t5" else SIZES
    directory = model_zoo.write_model(name, tmp_path / "model", **sizes)
    tokens, scores = exact_results(hopper, directory, **options)
    caplog.clear()
    with caplog.at_level(logging.WARNING), load(directory, **options) as llm:
        packed_tokens, packed_scores = results(llm)
        projections = [m for m in model_of(llm).modules() if isinstance(m, Projection)]
        stay = [each for each in projections if each.stays_dense]
    assert 0 < len(stay) < len(projections)
    wanted = f"{len(stay)} of {len(projections)} projections stay in bfloat16"
    assert [each for each in caplog.messages if wanted in each]
    assert packed_tokens == tokens
    assert float((packed_scores - scores).abs().max()) < 1e-2


@pytest.mark.parametrize("options", [{}, {"model_impl": "transformers"}])
def test_nothing_keeps_the_memory_of_a_packed_weight(
    hopper: type, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while the next one is packed, either."""
    sizes = {**SIZES, "tie_word_embeddings": False}
    directory = model_zoo.write_model("llama3", tmp_path / "model", **sizes)
    given: list[weakref.ref[Any]] = []
    make: Callable[..., None] = hopper.__init__  # type: ignore[misc]

    def note(self: object, weight: Tensor) -> None:
        assert not any(each() is not None for each in given)
        given.append(weakref.ref(weight.untyped_storage()))
        make(self, weight)

    monkeypatch.setattr(hopper, "__init__", note)
    with load(directory, **options):
        assert given
        assert not any(each() is not None for each in given)


def test_two_ranks_pack_their_own_parts_by_description() -> None:
    """A rank's shapes decide."""
    root = Path(__file__).parents[2]
    config = read_model_config(root / "benchmarks/configs/llama-3-8b")
    for size, num_left in [(1, 0), (2, 0), (8, 0)]:
        projections = config.sharded(Shard(0, size)).projections()
        assert sum(not each.takes_float12 for each in projections) == num_left


def test_weights_that_are_not_finite_stay(
    hopper: type, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = model_zoo.write_model("llama3", tmp_path / "model", **SIZES)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = next(key for key in tensors if key.endswith("layers.1.mlp.gate_proj.weight"))
    tensors[name][3, 5] = torch.inf
    save_file(tensors, path, {"format": "pt"})
    with caplog.at_level(logging.WARNING), load(directory) as llm:
        paths = [
            path
            for path, m in model_of(llm).named_modules()
            if isinstance(m, Projection) and m.stays_dense
        ]
    assert "layers.1.mlp.up" in paths


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "a form of bfloat16, and the model is computed in float32"),
        ({"dtype": "bfloat16"}, "kernels for float12 on Hopper GPUs alone, not on this CPU"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load("demo", **options)
    assert caught.value.field == "dense_weights"
    with pytest.raises(ConfigError, match="'float13' is not one of bfloat16, float12"):
        load("demo", "float13")
