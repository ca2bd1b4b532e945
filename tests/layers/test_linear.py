"""Projections: packed and not, alone and in a crowd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.layers import linear
from octavo.layers.linear import Linear, MergedLinear

DTYPES = [torch.float32, torch.bfloat16]


def filled(layer: Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Give a layer random weights; returns copies of them."""
    generator = torch.Generator().manual_seed(0)
    assert layer.weight is not None
    weight = torch.randn(layer.weight.shape, generator=generator).to(dtype)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    bias = None
    if layer.bias is not None:
        bias = torch.randn(layer.bias.shape, generator=generator).to(dtype)
        layer.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return weight, bias


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_result_is_that_of_the_plain_product(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, packs: bool, bias: bool
) -> None:
    if not packs:
        monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    layer = MergedLinear(80, (48, 24), bias)
    weight, b = filled(layer, dtype)
    layer.finalize()
    for num_tokens in (0, 1, 2, 17, 300):
        x = torch.randn(num_tokens, 2 * 80).to(dtype)[:, :80]
        expected = F.linear(x.float(), weight.float(), None if b is None else b.float())
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        y = layer.forward(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), expected, atol=tolerance, rtol=tolerance)


def test_packing_lets_go_of_the_loaded_weight() -> None:
    layer = Linear(64, 64, bias=False)
    filled(layer, torch.float32)
    assert layer.weight is not None
    packs = linear.can_pack(layer.weight)
    layer.finalize()
    assert (layer.weight is None) == packs


def test_half_precision_is_not_packed() -> None:
    assert not linear.can_pack(torch.zeros(8, 8, dtype=torch.float16))


def test_without_the_private_ops_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not linear.can_pack(torch.zeros(8, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [(384, 640), (1024, 384), (2048, 2048), (3072, 64)])
def test_a_packed_row_does_not_depend_on_the_batch(
    dtype: torch.dtype, size: tuple[int, int]
) -> None:
    layer = Linear(*size, bias=False)
    weight, _ = filled(layer, dtype)
    if not linear.can_pack(weight):
        pytest.skip("no packed product here")
    layer.finalize()
    x = torch.randn(300, size[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = layer.forward(x)
    for num_tokens in (1, 2, 3, 7, 16, 33, 64, 200):
        assert torch.equal(layer.forward(x[:num_tokens]), expected[:num_tokens]), num_tokens
