"""Projections: packed in both ways and not at all, alone and in a crowd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.layers import linear
from octavo.layers.linear import Linear, MergedLinear

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WAYS = ["own kernel", "oneDNN", "F.linear"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take one way of packing, whichever this machine would choose."""
    if request.param == "own kernel" and not linear.has_own_kernel(torch.zeros(2, 2)):
        pytest.skip("this CPU has no AVX-512, or there is no Numba")
    if request.param == "oneDNN" and not linear.has_onednn(torch.zeros(2, 2)):
        pytest.skip("this torch has no packed products")
    if request.param != "own kernel":
        monkeypatch.setattr(linear, "has_own_kernel", lambda weight: False)
    if request.param == "F.linear":
        monkeypatch.setattr(linear, "has_onednn", lambda weight: False)
    name: str = request.param
    return name


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


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


@pytest.mark.usefixtures("way", "threads")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_result_is_that_of_the_plain_product(dtype: torch.dtype, bias: bool) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for in_features, out_sizes in ((80, (48, 24)), (6, (1,)), (2, (16,)), (1024, (1000, 151))):
        layer = MergedLinear(in_features, out_sizes, bias)
        weight, b = filled(layer, dtype)
        layer.finalize()
        for num_tokens in (0, 1, 2, 17, 300):
            # As a view of a wider tensor, at an odd distance.
            x = torch.randn(num_tokens, in_features + 3).to(dtype)[:, 1:-2]
            expected = F.linear(x.float(), weight.float(), None if b is None else b.float())
            y = layer.forward(x)
            assert y.dtype == dtype
            torch.testing.assert_close(y.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("size", [(384, 640), (1024, 384), (2048, 2048), (3072, 70)])
def test_a_packed_row_does_not_depend_on_the_batch(
    way: str, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    layer = Linear(*size, bias=False)
    weight, _ = filled(layer, dtype)
    ours = way == "own kernel" and linear.has_own_kernel(weight)  # bf16: oneDNN's, with AMX
    if way == "F.linear" or (dtype == torch.bfloat16 and not ours):
        pytest.skip("on some CPUs it does")
    layer.finalize()
    x = torch.randn(300, size[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = layer.forward(x)
    for num_tokens in (1, 2, 3, 7, 16, 33, 64, 200):
        assert torch.equal(layer.forward(x[:num_tokens]), expected[:num_tokens]), num_tokens


def test_packing_lets_go_of_the_loaded_weight(way: str) -> None:
    layer = Linear(64, 64, bias=False)
    filled(layer, torch.float32)
    layer.finalize()
    assert (layer.weight is None) == (way != "F.linear")


def test_what_no_kernel_serves_is_not_packed() -> None:
    assert linear.pack(torch.zeros(8, 8, dtype=torch.float16)) is None
    assert linear.pack(torch.zeros(8, 8, device="meta")) is None


def test_pairs_of_bf16_need_an_even_size() -> None:
    assert not linear.has_own_kernel(torch.zeros(8, 7, dtype=torch.bfloat16))
    x, weight = torch.randn(3, 7).bfloat16(), torch.randn(8, 7).bfloat16()
    packed = linear.pack(weight)
    if packed is not None:
        torch.testing.assert_close(packed.multiply(x, None), F.linear(x, weight))


def test_without_the_private_ops_onednn_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not linear.has_onednn(torch.zeros(8, 8))


def test_without_numba_there_is_no_kernel_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "find_spec", lambda name: None)
    assert not linear.has_own_kernel(torch.zeros(8, 8))
