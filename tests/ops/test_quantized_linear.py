"""Kernels of quantized projections, against float32 products of what the weights stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_quantized_forms import FORMS
from torch import Tensor

from octavo.ops.cuda import stored_weights
from octavo.ops.cuda.linear_gemv import Programs, linear_one
from octavo.ops.cuda.linear_quantized import make_kernel
from octavo.ops.cuda.quantize import quantize_rows
from octavo.ops.cuda.stored_weights import StoredWeight
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.quantized import GroupedInt, QuantizedWeight, ScaledFloat8

pytestmark = pytest.mark.usefixtures("poisoned")
GPU = torch.device("cuda")
SERVED = [name for name in FORMS if name != "mxfloat4"]


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """For what the interpreter does not run: Gluon's kernels, and torch's FP8 products."""
    skipped = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skipped(test))


def made(name: str, num_rows: int, size: int, device: torch.device) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(num_rows + size)
    dense = torch.randn(num_rows, size, generator=generator) * size**-0.5
    return FORMS[name](dense.bfloat16()).to(device)


def inputs(num_tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens * size)
    return torch.randn(num_tokens, size, generator=generator).to(device, dtype)


def relative(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(("num_rows", "size"), [(70, 256), (200, 384)])
def test_weights_are_dequantized_exactly(
    device: torch.device, name: str, num_rows: int, size: int
) -> None:
    form = made(name, num_rows, size, device)
    stored = StoredWeight.of(form)
    assert stored is not None
    out = torch.empty(num_rows, size, device=device)
    stored_weights.dequantize(stored, out)
    assert torch.equal(out, form.dequantize())


@pytest.mark.parametrize("name", ["float8-tensor", "float8-row"])
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.SILU_MUL])
def test_one_token(device: torch.device, name: str, epilogue: Epilogue) -> None:
    form = made(name, 70, 320, device)
    assert isinstance(form, ScaledFloat8)
    x, bias = inputs(1, 320, torch.float32, device), inputs(1, 70, torch.float32, device)[0]
    wanted = apply_epilogue(x @ form.dequantize().t() + bias, epilogue)
    out = torch.empty_like(wanted)
    scales, height = form.scales, form.block[0]
    linear_one(x, form.weight, bias, out, epilogue, scales, height, Programs(2, 128, 2, 1))
    assert relative(out, wanted) < 1e-5


def test_rows_of_inputs_are_rounded_by_themselves(device: torch.device) -> None:
    x = inputs(4, 300, torch.bfloat16, device)
    x[1] *= 1000
    x[2, 7], x[3, 5] = torch.nan, torch.inf
    rounded, scales = quantize_rows(x)
    values = rounded.float() * scales
    wanted = x[:2].float()
    assert torch.allclose(scales[:2], wanted.abs().amax(dim=1, keepdim=True) / 448)
    if device.type == "cuda":  # the interpreter rounds 126 to 64
        smallest = 2**-9 * scales[:2]
        assert ((values[:2] - wanted).abs() <= 2**-4 * wanted.abs() + smallest).all()
    assert values[2:].isnan().all()


@on_gpu
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "size"), [(256, 512), (2880, 2944), (1000, 1152)])
def test_all_numbers_of_tokens(name: str, dtype: torch.dtype, num_rows: int, size: int) -> None:
    form = made(name, num_rows, size, GPU)
    kernel = make_kernel(form, dtype)
    assert kernel is not None
    weight = form.dequantize()
    bias = inputs(1, num_rows, dtype, GPU)[0]
    for num_tokens in (1, 2, 8, 9, 33, 64, 130, 256, 700):
        x = inputs(num_tokens, size, dtype, GPU)
        y = x.float() @ weight.t() + bias.float()
        for epilogue in (Epilogue.NONE, Epilogue.SILU_MUL):
            wanted = apply_epilogue(y, epilogue)
            actual = kernel.apply(x, bias, epilogue)
            assert relative(actual, wanted) < 6e-3, (num_tokens, epilogue)
        partial = kernel.apply_partial(x, bias)
        partial = partial.sum(dim=0) if partial.dim() == 3 else partial
        assert relative(partial, y) < 6e-3, num_tokens


@on_gpu
@pytest.mark.parametrize("name", SERVED)
def test_rows_that_are_not_finite_spoil_no_others(name: str) -> None:
    form = made(name, 256, 512, GPU)
    kernel = make_kernel(form, torch.bfloat16)
    assert kernel is not None
    for num_tokens in (5, 64, 200, 300):
        x = inputs(num_tokens, 512, torch.bfloat16, GPU)
        clean = kernel.apply(x, None, Epilogue.NONE)
        x[3] = torch.nan
        spoiled = kernel.apply(x, None, Epilogue.NONE)
        assert spoiled[3].isnan().all()
        others = torch.arange(num_tokens, device=GPU) != 3
        assert torch.equal(spoiled[others], clean[others])


@on_gpu
def test_inputs_may_stand_in_another_order() -> None:
    weight = torch.randn(256, 512, device=GPU)
    permutation = torch.randperm(512, device=GPU)
    plain = GroupedInt.quantize(weight, 4, 128)
    form = GroupedInt.from_values(plain.values(), plain.scales, None, 4, permutation)
    kernel = make_kernel(form, torch.bfloat16)
    assert kernel is not None
    for num_tokens in (1, 20, 300):
        x = inputs(num_tokens, 512, torch.bfloat16, GPU)
        wanted = x.float() @ form.dequantize().t()
        assert relative(kernel.apply(x, None, Epilogue.NONE), wanted) < 6e-3


@on_gpu
def test_inputs_are_rounded_if_the_model_was_made_for_it() -> None:
    weight = torch.randn(256, 512, device=GPU)
    form = ScaledFloat8.quantize(weight, (1, 512), quantizes_inputs=True)
    kernel = make_kernel(form, torch.bfloat16)
    assert kernel is not None
    x = inputs(700, 512, torch.bfloat16, GPU)
    for epilogue in (Epilogue.NONE, Epilogue.SILU_MUL):
        wanted = apply_epilogue(x.float() @ form.dequantize().t(), epilogue)
        assert relative(kernel.apply(x, None, epilogue), wanted) < 0.06
