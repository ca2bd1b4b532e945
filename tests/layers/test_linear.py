"""Projections: packed in both ways and not at all, in batches of all sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.layers.config import LinearConfig
from octavo.layers.linear import PlainLinear
from octavo.ops import linear
from octavo.ops.cpu import onednn
from octavo.ops.epilogue import Epilogue

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MKLDNN = torch.ops.mkldnn
WAYS = ["own kernel", "oneDNN", "F.linear"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take one way of packing, whichever this machine would choose."""
    if request.param == "own kernel" and not linear.has_numba_kernel(torch.zeros(2, 2)):
        pytest.skip("this CPU has no AVX-512, or there is no Numba")
    if request.param == "oneDNN" and not onednn.can_pack(torch.zeros(2, 2)):
        pytest.skip("this torch has no packed products")
    if request.param != "own kernel":
        monkeypatch.setattr(linear, "has_numba_kernel", lambda weight: False)
    if request.param == "F.linear":
        monkeypatch.setattr(onednn, "can_pack", lambda weight: False)
    name: str = request.param
    return name


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def filled(layer: PlainLinear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
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
        layer = PlainLinear(LinearConfig(in_features, out_sizes, bias))
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
    layer = PlainLinear(LinearConfig(size[0], size[1:]))
    weight, _ = filled(layer, dtype)
    ours = way == "own kernel" and linear.has_numba_kernel(weight)  # bf16: oneDNN's, with AMX
    if way == "F.linear" or (dtype == torch.bfloat16 and not ours):
        pytest.skip("on some CPUs it does")
    layer.finalize()
    x = torch.randn(300, size[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = layer.forward(x)
    for num_tokens in (1, 2, 3, 7, 16, 33, 64, 200):
        assert torch.equal(layer.forward(x[:num_tokens]), expected[:num_tokens]), num_tokens


@pytest.mark.usefixtures("way", "threads")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 256, 257, 700])
def test_a_gated_projection_of_many_tokens(dtype: torch.dtype, num_tokens: int) -> None:
    layer = PlainLinear(LinearConfig(64, (160, 160), bias=True))
    filled(layer, dtype)
    layer.finalize()
    # As a view of a wider tensor, at an odd distance.
    x = torch.randn(num_tokens, 64 + 3).to(dtype)[:, 1:-2]
    gate, up = layer.forward(x).float().chunk(2, dim=1)
    result = layer.forward(x, Epilogue.SILU_MUL)
    assert result.dtype == dtype
    assert result.is_contiguous()
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(result.float(), F.silu(gate) * up, atol=tolerance, rtol=tolerance)


def test_packing_lets_go_of_the_loaded_weight(way: str) -> None:
    layer = PlainLinear(LinearConfig(64, (64,)))
    filled(layer, torch.float32)
    layer.finalize()
    assert (layer.weight is None) == (way != "F.linear")


def test_what_no_kernel_serves_is_not_packed() -> None:
    for weight in (torch.zeros(8, 8, dtype=torch.float16), torch.zeros(8, 8, device="meta")):
        assert isinstance(linear.make_linear_kernel(weight), linear.TorchLinear)


def test_pairs_of_bf16_need_an_even_size() -> None:
    assert not linear.has_numba_kernel(torch.zeros(8, 7, dtype=torch.bfloat16))
    x, weight = torch.randn(3, 7).bfloat16(), torch.randn(8, 7).bfloat16()
    kernel = linear.make_linear_kernel(weight)
    torch.testing.assert_close(kernel.apply(x, None, Epilogue.NONE), F.linear(x, weight))


class Ops:
    """torch.ops.mkldnn with some ops hidden or replaced."""

    def __init__(self, **replaced: Any) -> None:
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        op = self._replaced.get(name, getattr(MKLDNN, name))
        if op is None:
            raise AttributeError(name)
        return op


def wrong_schema(*args: Any) -> Tensor:
    raise RuntimeError("_linear_pointwise() expected at most 4 argument(s)")


@pytest.mark.parametrize(
    "ops",
    [
        Ops(_reorder_linear_weight=None),
        Ops(_linear_pointwise=None),
        Ops(_is_mkldnn_bf16_supported=None),
        Ops(_linear_pointwise=wrong_schema),
        Ops(_linear_pointwise=lambda x, *args: x),
    ],
    ids=["no reorder", "no product", "no check", "other schema", "other result"],
)
def test_without_the_private_ops_a_projection_is_plain_torch(
    ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "has_numba_kernel", lambda weight: False)
    monkeypatch.setattr(torch.ops, "mkldnn", ops)
    onednn._has_ops.cache_clear()
    layer = PlainLinear(LinearConfig(16, (8, 4), bias=True))
    weight, bias = filled(layer, torch.float32)
    layer.finalize()
    onednn._has_ops.cache_clear()
    assert layer.weight is not None, "it was packed"
    x = torch.randn(3, 16)
    assert torch.equal(layer.forward(x), F.linear(x, weight, bias))


def test_without_numba_there_is_no_kernel_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "find_spec", lambda name: None)
    assert not linear.has_numba_kernel(torch.zeros(8, 8))
