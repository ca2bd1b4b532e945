"""The KL divergence that the log reports of weights that were quantized on load."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import cast

import pytest
import torch
from dense_harness import DenseHarness
from torch import Tensor

import model_zoo
from octavo import LLM
from octavo.config import QuantizationName
from octavo.errors import ConfigError
from octavo.models import quantization_loss
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.loader import load_model
from octavo.models.quantization_loss import measure_loss
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.ops.communicator import SingleRank

IDS = model_zoo.random_token_ids(40)
CPU = torch.device("cpu")


def loaded(config: ModelConfig) -> CausalLM:
    return load_model(config, torch.float32, CPU, SingleRank())


def log_probs(model: CausalLM) -> Tensor:
    """Of every next token of IDS, in float64."""
    [logits] = DenseHarness(model, len(IDS)).run({0: IDS})
    return logits.double().log_softmax(-1)


def check(config: ModelConfig, name: str) -> None:
    """What is measured with one model is what the logits of two say."""
    rounded_config = quantized_on_load(config, cast("QuantizationName", name))
    rounded = loaded(rounded_config)
    found = log_probs(rounded)
    measured = measure_loss(rounded, rounded_config, SingleRank(), IDS)
    assert torch.equal(log_probs(rounded), found), "the model has changed"
    exact = log_probs(loaded(config))
    expected = (exact.exp() * (exact - found)).sum(-1)
    assert measured.mean == pytest.approx(float(expected.mean()), rel=1e-3)
    assert measured.largest == pytest.approx(float(expected.max()), rel=1e-3)
    assert measured.mean > 1e-6, "the samples cannot tell"


@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_it_is_that_of_two_models(name: str) -> None:
    config = read_model_config(model_zoo.model_directory(name))
    try:
        quantized_on_load(config, "fp8")
    except ConfigError:
        pytest.skip("such weights are not quantized")
    check(config, "fp8")


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("llama3", "int8"), ("qwen3_moe", "fp8"), ("gpt_oss", "fp8"), ("phi3", "fp8")],
)
def test_of_a_model_through_transformers(name: str, quantization: str) -> None:
    """Merged projections and blocks, and experts in tensors of their own or in one."""
    check(read_model_config(model_zoo.model_directory(name), "transformers"), quantization)


@pytest.mark.parametrize("is_tied", [True, False])
def test_with_a_head_that_is_rounded(
    is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of which, as of the other projections, some rows are read at once."""
    monkeypatch.setattr(quantization_loss, "CHUNK_ELEMENTS", 5 * 48)
    directory = model_zoo.write_model("llama3", tmp_path, tie_word_embeddings=is_tied)
    check(read_model_config(directory), "int8")


def test_of_a_gguf_file(tmp_path: Path) -> None:
    import gguf_files

    kind = gguf_files.Kind.F16
    path = gguf_files.write_pair("mixtral", tmp_path, gguf_files.everywhere(kind))
    check(read_model_config(path), "fp8")


def logged(caplog: pytest.LogCaptureFixture, model: Path, **options: object) -> str:
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, "octavo.models.quantization_loss"),
        LLM(str(model), num_blocks=400, **options),
    ):
        pass
    return "\n".join(
        each.getMessage()
        for each in caplog.records
        if each.name == "octavo.models.quantization_loss"
    )


def test_the_log_says_it_or_why_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = model_zoo.model_directory("llama3")
    without_tokenizer = tmp_path / "without tokenizer"
    shutil.copytree(llama, without_tokenizer)
    (without_tokenizer / "tokenizer.json").unlink()
    for model, options, expected in [
        (llama, {"quantization": "fp8"}, r"over \d+ tokens of a text: mean \S+ nats, largest "),
        (llama, {"quantization": "fp8", "max_model_len": 7}, "over 7 tokens"),
        (llama, {"quantization": "fp8", "kv_cache_dtype": "fp8"}, r"over \d+ tokens"),
        (llama, {}, "^$"),
        (llama, {"quantization": "fp8", "measure_quantization": False}, "^$"),
        (llama, {"quantization": "fp8", "load_format": "dummy"}, "the weights are random"),
        (model_zoo.model_directory("t5"), {"quantization": "fp8"}, "the model has an encoder"),
        (without_tokenizer, {"quantization": "fp8"}, "the model has no tokenizer"),
    ]:
        assert re.search(expected, logged(caplog, model, **options)), (model, options)
    monkeypatch.setattr(quantization_loss, "ROOM_GIB", 1 << 30)
    assert "less than 1073741824 GiB are free" in logged(caplog, llama, quantization="fp8")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama3", "gemma2", "mixtral"])
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_on_a_gpu(name: str, quantization: str, tmp_path: Path) -> None:
    """About that on a CPU in float32; inputs may be rounded, too."""
    directory = model_zoo.write_model(name, tmp_path, hidden_size=128, intermediate_size=256)
    config = read_model_config(directory)
    config = quantized_on_load(config, cast("QuantizationName", quantization))
    expected = measure_loss(loaded(config), config, SingleRank(), IDS).mean
    model = load_model(config, torch.bfloat16, torch.device("cuda"), SingleRank())
    for _ in range(2):
        assert expected / 3 < measure_loss(model, config, SingleRank(), IDS).mean < 5 * expected
