"""Products of int8 weights and rounded inputs on a CPU, against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray, cfunc, njit, types
from numba import int8 as int8_type
from numba import int32 as int32_type
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from daily_cases import checkered
from octavo.ops.cpu import int8, int8_kernel, int8_packed, row_ops
from octavo.ops.cpu.int8 import (
    CHUNK_TOKENS,
    Int8Linear,
    has_int8_product,
    has_onednn_product,
    has_own_product,
    make_kernel,
)
from octavo.ops.cpu.int8_packed import PackedInt8Linear, has_dot_products, has_matrix_units
from octavo.ops.cpu.vectors import pointer_to
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.linear import LinearKernel, make_quantized_kernel, make_rounding_kernel
from octavo.ops.quantized import GroupedInt

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # relative, and of the largest value


def operands(num_tokens: int, out_features: int, in_features: int) -> tuple[Tensor, GroupedInt]:
    generator = torch.Generator().manual_seed(num_tokens + out_features + in_features)
    x = torch.randn(num_tokens, in_features, generator=generator)
    x *= torch.logspace(-3, 3, num_tokens).unsqueeze(1)
    weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    return x, GroupedInt.quantize(weight, 8, in_features, quantizes_inputs=True)


def kernel_of(form: GroupedInt, dtype: torch.dtype) -> LinearKernel:
    kernel = make_quantized_kernel(form, dtype)
    assert isinstance(kernel, (PackedInt8Linear, Int8Linear))
    return kernel


@pytest.fixture(params=["matrix units", "dot products", "onednn"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the ways in which this CPU can multiply."""
    ways = {
        "matrix units": has_matrix_units,
        "dot products": has_dot_products,
        "onednn": has_onednn_product,
    }
    if not ways[request.param]():
        pytest.skip(f"no exact product by {request.param} here")
    if request.param == "dot products":
        monkeypatch.setattr(int8_packed, "has_matrix_units", lambda: False)
    elif request.param == "onednn":
        monkeypatch.setattr(int8, "has_own_product", lambda: False)


def rounded(x: Tensor) -> Tensor:
    """Each token with its largest element at 127 steps."""
    scales = x.double().abs().amax(dim=1, keepdim=True) / 127
    return (x.double() / scales).round() * scales


@pytest.fixture(params=["numba", "torch"])
def rows_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        for name in ("_quantize_kernel", "_rescale_kernel"):
            monkeypatch.setattr(row_ops, name, lambda dtype: None)


@pytest.mark.usefixtures("product", "rows_by")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "out_features", "in_features", "dtype"),
    checkered(
        [
            (1, 48, 64),
            (3, 34, 70),
            (17, 6, 1100),
            (CHUNK_TOKENS + 1, 66, 33),
            (0, 8, 16),
            (2, 2, 1),
            (49, 160, 128),
        ],
        DTYPES,
    ),
)
def test_products_are_those_of_rounded_inputs(
    dtype: torch.dtype, has_bias: bool, num_tokens: int, out_features: int, in_features: int
) -> None:
    x, form = operands(num_tokens, out_features, in_features)
    x, bias = x.to(dtype), torch.linspace(-2, 2, out_features).to(dtype) if has_bias else None
    wanted = rounded(x) @ form.dequantize().double().T
    if bias is not None:
        wanted += bias.double()
    kernel = kernel_of(form, dtype)
    for epilogue in (Epilogue.NONE, Epilogue.SILU_MUL, Epilogue.RELU):
        actual = kernel.apply(x, bias, epilogue)
        assert actual.dtype == dtype
        expected = apply_epilogue(wanted.to(dtype), epilogue)
        largest = float(expected.abs().max()) if len(x) else 0.0
        limit = TOLERANCE[dtype]
        torch.testing.assert_close(actual, expected, rtol=limit, atol=limit * largest / 10)


@pytest.mark.usefixtures("product", "rows_by")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_weights_are_rounded_here_for_results_in_float32(
    dtype: torch.dtype, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, as those of a large vocabulary are."""
    monkeypatch.setattr("octavo.ops.quantized.CHUNK_ELEMENTS", 7 * 96)
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = operands(9, 50, 96)[0].to(dtype)
    bias = torch.linspace(-2, 2, 50).to(dtype) if has_bias else None
    form = GroupedInt.quantize(weight, 8, 96, quantizes_inputs=True)
    values, scales = row_ops.quantize_rows(x)
    wanted = values.double() * scales.double().unsqueeze(1) @ form.dequantize().double().T
    wanted = wanted if bias is None else wanted + bias.double()
    kernel = make_rounding_kernel(weight)
    assert isinstance(kernel, (PackedInt8Linear, Int8Linear))
    actual = kernel.apply(x, bias, Epilogue.NONE)
    torch.testing.assert_close(
        actual, wanted.float(), rtol=1e-5, atol=1e-5 * float(wanted.abs().max())
    )


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operators return, by where these begin."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that no place is taken twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            self.sizes[storage.data_ptr()] = storage.nbytes()
            self._kept.append(result)
        return result


@pytest.mark.skipif(not has_own_product(), reason="oneDNN packs in its own way")
def test_rounding_takes_little_memory_beside_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded values and packed ones, a byte for each weight; what else there is has a few rows."""
    monkeypatch.setattr("octavo.ops.quantized.CHUNK_ELEMENTS", 1 << 12)
    weight = torch.ones(2048, 64, dtype=torch.bfloat16)
    with Allocations() as allocations:
        assert isinstance(make_rounding_kernel(weight), PackedInt8Linear)
    allocations.sizes.pop(weight.data_ptr(), None)
    large = [size for size in allocations.sizes.values() if size > 1 << 16]
    assert large == [weight.numel()] * 2


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, form = operands(CHUNK_TOKENS + 44, 320, 1536)
    x, kernel = x.to(dtype), kernel_of(form, dtype)
    together = kernel.apply(x, None, Epilogue.SILU_MUL)
    for part in (slice(0, 1), slice(7, 23), slice(250, 270), slice(40, 104)):
        assert torch.equal(kernel.apply(x[part], None, Epilogue.SILU_MUL), together[part])


@pytest.mark.usefixtures("product", "rows_by")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, bad: float) -> None:
    x, form = operands(5, 32, 64)
    x, kernel = x.to(dtype), kernel_of(form, dtype)
    before = kernel.apply_partial(x, None)
    x[2, 9] = bad
    after = kernel.apply_partial(x, None)
    assert after[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(after[others], before[others])


@pytest.mark.usefixtures("product", "rows_by")
def test_rows_of_zeros_and_of_extremes() -> None:
    _, form = operands(1, 32, 64)
    x = torch.zeros(5, 64)
    x[1] = 1e-40  # subnormal
    x[2] = torch.finfo(torch.float32).max / 64
    x[3, 5] = 1e30
    x[4] = torch.linspace(-1, 1, 64)
    strided = torch.empty(64, 5).t().copy_(x)  # tokens are not dense
    kernel = kernel_of(form, torch.float32)
    y = kernel.apply_partial(x, None)
    assert (y[:2] == 0).all()
    wanted = rounded(x[2:]) @ form.dequantize().double().T
    assert ((y[2:].double() - wanted).norm(dim=1) < 1e-5 * wanted.norm(dim=1)).all()
    assert torch.equal(kernel.apply_partial(strided, None), y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rounded_by_torch_as_by_numba(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = operands(9, 4, 1000)[0].to(dtype)[:, :777]
    x[0] = torch.arange(777) - 250.5  # halves between two integers, some of them
    x[1, 5], x[2] = math.nan, 0
    ours = row_ops.quantize_rows(x)
    monkeypatch.setattr(row_ops, "_quantize_kernel", lambda dtype: None)
    for mine, torchs in zip(ours, row_ops.quantize_rows(x), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=0, atol=0, equal_nan=True)


def test_other_forms_have_no_kernel() -> None:
    weight = torch.randn(8, 64)
    served = GroupedInt.quantize(weight, 8, 64, quantizes_inputs=True)
    for form in (
        GroupedInt.quantize(weight, 8, 64),
        GroupedInt.quantize(weight, 8, 32, quantizes_inputs=True),
        GroupedInt.quantize(weight, 4, 64, quantizes_inputs=True),
        GroupedInt.join([GroupedInt.quantize(weight, 8, 64), served]),
    ):
        assert make_kernel(form, torch.bfloat16) is None
    assert make_kernel(served, torch.float16) is None
    assert (make_kernel(served, torch.bfloat16) is not None) == has_int8_product()


@pytest.mark.skipif(
    not (has_own_product() and has_onednn_product()), reason="not both products here"
)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 33, 70, 300])
def test_our_product_has_the_bits_of_onednn_s(num_tokens: int, threads: int) -> None:
    """However the work is shared, whatever the last tiles lack, and wherever the tokens lie."""
    x, form = operands(num_tokens, 1234, 528)
    x, bias = x.bfloat16(), torch.linspace(-2, 2, 1234).bfloat16()
    apart = torch.full((num_tokens, 600), torch.nan).bfloat16()
    apart[:, :528] = x
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for each in (None, bias):
            expected = Int8Linear(form).apply_partial(x, each)
            for given in (x, apart[:, :528], x.T.contiguous().T):
                assert torch.equal(PackedInt8Linear(form).apply_partial(given, each), expected)
        x[num_tokens // 2, 3] = torch.inf
        ours, theirs = (
            kind(form).apply_partial(x, bias) for kind in (PackedInt8Linear, Int8Linear)
        )
        assert ours[num_tokens // 2].isnan().all()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize(
    ("epilogue", "dtype"),
    checkered([Epilogue.SILU_MUL, Epilogue.GELU_TANH_MUL, Epilogue.CLAMPED_SWIGLU], DTYPES),
)
def test_gates_are_applied_to_scaled_sums(dtype: torch.dtype, epilogue: Epilogue) -> None:
    x, form = operands(70, 224, 96)
    x = (x / x.abs().amax(dim=1, keepdim=True) * 40).to(dtype)
    wanted = rounded(x) @ form.dequantize().double().T
    actual = kernel_of(form, dtype).apply(x, None, epilogue)
    expected = apply_epilogue(wanted.float(), epilogue).to(dtype)
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit)


@pytest.mark.skipif(not has_onednn_product(), reason="no exact product of oneDNN's here")
@pytest.mark.parametrize("sums", ["saturated", "missing"])
def test_inexact_or_missing_products_are_not_used(
    sums: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(self: Int8Linear, rounded: Tensor) -> Tensor:
        if sums == "missing":
            raise RuntimeError("qlinear_pointwise has another schema")
        return torch.full((len(rounded), 32), 32767.0)

    monkeypatch.setattr(Int8Linear, "_multiply", product)
    monkeypatch.setattr(int8, "has_own_product", lambda: False)
    monkeypatch.setattr(int8, "has_onednn_product", has_onednn_product.__wrapped__)
    form = operands(1, 32, 64)[1]
    assert make_quantized_kernel(form, torch.bfloat16) is None


@pytest.mark.skipif(not has_onednn_product(), reason="no exact product of oneDNN's here")
def test_onednn_s_reference_implementation_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is exact, but takes some hundred times as long as a product of float32."""
    seconds = iter([1e-3 * int8._REFERENCE + 1e-6, 1e-3])
    monkeypatch.setattr(int8, "repeat", lambda work, **options: [next(seconds)])
    assert not has_onednn_product.__wrapped__()


@pytest.mark.usefixtures("product")
def test_the_largest_sums_are_exact() -> None:
    """Of the most inputs, all at the largest size."""
    form = GroupedInt.quantize(torch.ones(3, int8._MAX_INPUTS), 8, int8._MAX_INPUTS, True)
    signs = torch.tensor([[1.0], [-1.0]]).expand(2, int8._MAX_INPUTS)
    actual = kernel_of(form, torch.float32).apply_partial(signs, None)
    wanted = signs.double() @ form.dequantize().double().T
    assert torch.equal(actual, wanted.float()), (actual, wanted)


@pytest.mark.skipif(not has_onednn_product(), reason="no exact product of oneDNN's here")
def test_tiles_are_dealt_to_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any CPU: with loops in place of the instructions, and nothing kept on disk. Memory that
    is free when the kernel begins is overwritten."""

    @njit
    def configure(palette):  # type: ignore[no-untyped-def]
        size = 16
        while size < 1 << 20:
            for _ in range(4):
                np.full(size, 99, np.int8)
            size += size // 8

    @njit
    def release():  # type: ignore[no-untyped-def]
        pass

    @njit
    def multiply(  # type: ignore[no-untyped-def]
        tokens, outputs, x, x_stride, x_tile, weight, weight_tile, fetches, depth, sums,
        sums_stride, sums_column,
    ):  # fmt: skip
        for t in range(tokens):
            for n in range(outputs):
                # As many rows as the tiles of tokens are apart.
                for r in range(x_tile // x_stride):
                    row = carray(pointer_to(x + t * x_tile + r * x_stride, int8_type), depth * 64)
                    place = sums + t * sums_stride + n * sums_column + r * 64
                    target = carray(pointer_to(place, int32_type), 16)
                    values = carray(
                        pointer_to(weight + n * weight_tile, int8_type), (depth * 16, 16, 4)
                    )
                    target[:] = 0
                    for k in range(depth * 64):
                        for i in range(16):
                            product = np.int32(row[k]) * np.int32(values[k // 4, i, k % 4])
                            target[i] += product

    for name, emulated in (
        ("configure_tiles", configure),
        ("release_tiles", release),
        ("multiply_tiles", multiply),
    ):
        monkeypatch.setattr(int8_kernel, name, emulated)
    monkeypatch.setattr(int8_packed, "has_matrix_units", lambda: True)
    monkeypatch.setattr(
        int8_kernel, "compile_kernel", cfunc(types.void(types.intp), error_model="numpy")
    )
    monkeypatch.setattr(int8_packed, "_runner", int8_packed._runner.__wrapped__)
    for num_tokens, epilogue in ((70, Epilogue.NONE), (3, Epilogue.SILU_MUL)):
        x, form = operands(num_tokens, 352, 200)
        x = (x / x.abs().amax(dim=1, keepdim=True)).bfloat16()
        actual = PackedInt8Linear(form).apply(x, None, epilogue)
        if epilogue is Epilogue.NONE:
            assert torch.equal(actual, Int8Linear(form).apply(x, None, epilogue))
        else:
            wanted = (rounded(x) @ form.dequantize().double().T).float()
            expected = apply_epilogue(wanted, epilogue).bfloat16()
            torch.testing.assert_close(actual, expected, rtol=1.6e-2, atol=1.6e-2)
