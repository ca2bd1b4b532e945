"""The measured loss of weights that ranks quantize while they load their parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import Ranks
from sharded import model_for

import model_zoo
from models.dense_harness import DenseHarness
from octavo.config import ModelImpl, QuantizationName
from octavo.models.loader import load_model
from octavo.models.quantization_loss import measure_loss
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.ops.communicator import Communicator


def losses(
    communicator: Communicator,
    directory: str,
    model_impl: ModelImpl,
    quantization: QuantizationName,
    ids: list[int],
) -> tuple[float, float]:
    """What this rank measures of quantized weights, and what the logits of two models say."""
    config = read_model_config(directory, model_impl)
    models, logits = [], []
    for each in (config, quantized_on_load(config, quantization)):
        sharded = each.sharded(communicator.shard)
        models.append(load_model(sharded, torch.float32, torch.device("cpu"), communicator))
        [own] = DenseHarness(models[-1], len(ids)).run({0: ids})
        logits.append(communicator.all_gather(own).transpose(0, 1).flatten(1).double())
    exact, found = (each.log_softmax(-1) for each in logits)
    loss = measure_loss(models[1], sharded, communicator, ids)
    return loss.mean, float((exact.exp() * (exact - found)).sum(-1).mean())


@pytest.mark.parametrize(
    ("name", "model_impl", "quantization"),
    [
        pytest.param("llama3", "native", "fp8", marks=pytest.mark.slow),
        ("mixtral", "native", "fp8"),
        ("mixtral", "transformers", "fp8"),
        # The head, too, which computes with the table of the embeddings.
        pytest.param("qwen3", "native", "int8", marks=pytest.mark.slow),
        ("qwen3", "transformers", "int8"),
    ],
)
def test_the_measured_loss_of_quantization(
    name: str,
    model_impl: ModelImpl,
    quantization: QuantizationName,
    ranks: Callable[[int], Ranks],
) -> None:
    directory = model_for(name, 2)
    ids = model_zoo.random_token_ids(20)
    results = ranks(2).call(losses, str(directory), model_impl, quantization, ids)
    for measured, expected in results:
        assert measured == results[0][0]
        assert measured == pytest.approx(expected, rel=1e-3)
        assert measured > 1e-6, "the samples cannot tell"
