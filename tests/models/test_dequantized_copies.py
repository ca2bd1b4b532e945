"""Copies of quantized weights in the model's dtype: who has them, what they take, who is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config import make_config
from octavo.layers import linear as layers_linear
from octavo.layers.config import LinearConfig
from octavo.layers.linear import QuantizedLinear
from octavo.models.config import ModelConfig
from octavo.models.quantization import Quantization, WeightKernels
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.ops.linear import TorchLinear
from octavo.ops.quantized import GroupedInt, QuantizedWeight
from octavo.parallel import Shard
from octavo.weight_forms import with_copies

CONFIGS = Path(__file__).parents[2] / "benchmarks/configs"
GB = 10**9


def int4(name: str = "llama-3-8b") -> ModelConfig:
    return quantized_on_load(read_model_config(CONFIGS / name), "int4")


def test_quantized_projections_have_them() -> None:
    plain = int4()
    config = plain.with_copies()
    weights = 6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096
    assert [sum(each.copy_bytes for each in of) for of in config.copyable] == [2 * weights] * 32
    assert config.head.copy == "float12"
    assert config.copy_bytes == 64 * weights + config.head.copy_bytes
    assert config.least_weight_bytes(2) == plain.least_weight_bytes(2) + config.copy_bytes
    assert config.sharded(Shard(0, 2)).copy_bytes == config.copy_bytes // 2
    some = plain.with_copies(3, of_head=None)
    assert [any(each.copy for each in of) for of in some.copyable] == [True] * 3 + [False] * 29
    assert some.copy_bytes == 6 * weights
    # They are read where arithmetic bounds products: no step reads fewer bytes because of them.
    assert some.copy_saves(1) == some.copy_saves(512) == 0
    assert all(not each.copied_tokens for each in some.copyable[0])


def test_experts_and_plain_projections_have_none() -> None:
    config = int4("qwen3-30b-a3b").with_copies()
    qkv, output, experts = config.copyable[0]
    assert (qkv.copy_bytes, output.copy_bytes) == (2 * 5120 * 2048, 2 * 4096 * 2048)
    assert experts.copy_bytes == 0
    assert LinearConfig(64, (64,)).with_copy("dequantized").copy is None


@pytest.mark.parametrize(
    ("quantization", "form"),
    [
        (None, "float12"),
        (Quantization("gguf"), "float12"),  # dequantized when it is loaded
        (Quantization("fp8", form="float8", quantizes_inputs=True), None),
        (Quantization("fp8", form="float8"), "dequantized"),
        (Quantization("compressed-tensors", form="int", num_bits=4), "dequantized"),
        (Quantization("compressed-tensors", form="int", quantizes_inputs=True), "dequantized"),
    ],
)
def test_which_forms_have_them(quantization: Quantization | None, form: str | None) -> None:
    model = replace(read_model_config(CONFIGS / "llama-3-8b"), quantization=quantization)
    assert model.copy_form == form


@pytest.mark.parametrize(
    ("options", "dtype", "total", "kernels", "num_layers"),
    [
        ({}, "bfloat16", 126 * GB, "hopper", 32),  # 14 GB, beside 34 GB of KV
        ({"max_num_seqs": 1024}, "bfloat16", 126 * GB, "hopper", 32),  # of 15 GB, an eighth
        ({"max_num_seqs": 1024}, "bfloat16", 122 * GB, "hopper", 0),  # of 14.5 GB: no head's beside
        ({"max_num_seqs": 1024}, "float16", 122 * GB, "hopper", 32),  # whose head has none
        ({}, "bfloat16", 50 * GB, "hopper", 14),  # beside 34 GB of KV
        ({}, "float32", 126 * GB, "hopper", None),
        ({}, "bfloat16", 126 * GB, "ampere", None),
        ({"weight_copies": False}, "bfloat16", 126 * GB, "hopper", None),
        ({"kv_cache_memory": 117 * GB}, "bfloat16", 126 * GB, "hopper", None),
    ],
)
def test_as_many_layers_as_the_kv_cache_can_spare(
    options: dict[str, Any],
    dtype: str,
    total: int,
    kernels: WeightKernels,
    num_layers: int | None,
) -> None:
    """num_layers: None: no copies."""
    model, config = int4(), make_config(str(CONFIGS / "llama-3-8b"), **options)
    made = with_copies(config, model, dtype, total, kernels)
    if num_layers is None:
        assert made is model
    else:
        of_head = "float12" if dtype == "bfloat16" else None
        assert made == model.with_copies(num_layers, of_head=of_head)


@pytest.mark.parametrize("has_copy", [False, True])
def test_kernels_are_asked_for_them(monkeypatch: pytest.MonkeyPatch, has_copy: bool) -> None:
    asked: list[bool] = []

    def make(
        weight: QuantizedWeight,
        dtype: torch.dtype,
        *_: object,
        dequantized_copy: bool,
        **__: object,
    ) -> TorchLinear:
        asked.append(dequantized_copy)
        return TorchLinear(weight.dequantize())

    monkeypatch.setattr(layers_linear, "make_quantized_kernel", make)
    config = LinearConfig(64, (32,), method="quantized")
    linear = QuantizedLinear(config.with_copy("dequantized" if has_copy else None))
    linear._slots[0].put(GroupedInt.quantize(torch.randn(32, 64), 4, 32), torch.float32)
    linear.finalize()
    assert asked == [has_copy]
