"""Norms against torch in float32."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops import norm as reference
from octavo.ops import quantized
from octavo.ops.cpu import row_ops
from octavo.ops.cuda.norm import norm
from octavo.ops.cuda.quantize import round_inputs
from octavo.ops.norm import Affine
from octavo.ops.quantized import Rounding

pytestmark = pytest.mark.usefixtures("poisoned")
EPS = 1e-5
SIZES = {"cpu": [(1, 100), (5, 64)], "cuda": [(1, 1024), (3, 16384), (300, 5120), (70_000, 100)]}
DTYPES = {"cpu": [torch.float32], "cuda": [torch.float32, torch.float16, torch.bfloat16]}


@pytest.mark.parametrize("is_rms", [True, False])
@pytest.mark.parametrize("num_parts", [0, 1, 3])  # 0: without a residual
def test_norms(device: torch.device, is_rms: bool, num_parts: int) -> None:
    for num_rows, size in SIZES[device.type]:
        for dtype in DTYPES[device.type]:
            weight, bias = torch.randn(2, size, device=device).to(dtype)
            x = torch.randn(num_rows, size, device=device).to(dtype)
            residual = torch.randn(num_rows, size, device=device).to(dtype)
            given, total = x, x
            if num_parts:
                total = residual + x
                if num_parts > 1:
                    given = torch.randn(num_parts, num_rows, size, device=device)
                    total = (residual.float() + given.sum(0)).to(dtype)
            added = residual if num_parts else None
            affine = Affine(weight, None if is_rms else bias)
            [actual] = norm(given, affine, EPS, added, is_rms)
            if is_rms:
                wanted = F.rms_norm(total.float(), (size,), weight.float(), EPS)
            else:
                wanted = F.layer_norm(total.float(), (size,), weight.float(), bias.float(), EPS)
            assert actual.dtype == dtype
            tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
            if dtype != torch.float32:
                tolerance = {"rtol": 2e-2, "atol": 4e-2}
            torch.testing.assert_close(actual.float(), wanted, **tolerance)
            if num_parts:
                torch.testing.assert_close(residual, total)


def test_a_layer_norm_without_scale_and_shift(device: torch.device) -> None:
    x = torch.randn(3, 40, device=device)
    [actual] = norm(x, Affine(None), EPS, None, is_rms=False)
    torch.testing.assert_close(actual, F.layer_norm(x, (40,), eps=EPS))


@pytest.mark.parametrize("is_rms", [True, False])
def test_rows_may_be_longer_than_registers_hold(device: torch.device, is_rms: bool) -> None:
    """As those of Nemotron-4 340B."""
    size = 18_432
    x, residual = torch.randn(2, 3, size, device=device)
    affine = Affine(*torch.randn(2, size, device=device))
    total = x + residual
    [actual] = norm(x, affine, EPS, residual, is_rms)
    wanted = plain(total, affine, is_rms)
    if is_rms:
        wanted = wanted + affine.bias
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


def test_partial_sums_may_be_farther_apart_than_32_bits_say(
    device: torch.device, tmp_path: Path
) -> None:
    """As what eight experts contribute to 131,072 tokens of 4,096 elements is."""
    stride, before, shape = 2**31 - 64, 128, (3, 2, 64)
    num_elements = before + 2 * stride + 128
    if device.type == "cpu":  # a file with holes: few pages of its 8 GiB are ever there
        file = tmp_path / "parts"
        memory = torch.from_file(str(file), shared=True, size=num_elements, dtype=torch.float16)
    else:
        memory = torch.empty(num_elements, dtype=torch.float16, device=device)
    parts = memory.as_strided(shape, (stride, 64, 1), before)
    parts.copy_(torch.randn(shape))
    residual = torch.randn(2, 64, device=device).half()
    total = (residual.float() + parts.float().sum(0)).half()
    norm(parts, Affine(None), EPS, residual, is_rms=True)
    torch.testing.assert_close(residual, total)


FORMS = {
    "parallel": {"second"},
    "twin": {"second", "twin"},
    "branch": {"branch"},
    "branch alone": {"branch", "alone"},
    "both": {"second", "both", "branch", "factor", "twin", "third"},
    "both alone": {"second", "both", "alone"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_rms", [True, False])
@pytest.mark.parametrize("splits", [(1, 1), (3, 1), (1, 2)])
def test_forms(device: torch.device, form: str, is_rms: bool, splits: tuple[int, int]) -> None:
    """What blocks add, in partial sums or not, and what happens to it and to the sum."""
    parts = FORMS[form]
    for num_rows, size in SIZES[device.type]:
        for dtype in DTYPES[device.type]:
            scales = torch.randn(6, size, device=device)  # float32, whatever the rows are
            shifts = [None, None] if is_rms else list(torch.randn(2, size, device=device))
            affine, twin = (Affine(scales[i], shifts[i]) for i in range(2))
            x, second = (
                torch.randn(num, num_rows, size, device=device)
                if num > 1
                else torch.randn(num_rows, size, device=device).to(dtype)
                for num in splits
            )
            residual = torch.randn(num_rows, size, device=device).to(dtype)
            total = residual.float()
            addend = x.sum(0) if splits[0] > 1 else x.float()
            other = second.sum(0) if splits[1] > 1 else second.float()
            both = tuple(map(Affine, scales[3:5])) if "both" in parts else None
            if both is not None:
                addend, other = (
                    plain(each, one, is_rms)
                    for each, one in zip((addend, other), both, strict=True)
                )
            if "second" in parts:
                addend = addend + other
            if "branch" in parts:
                total = total + plain(addend, Affine(scales[2]), is_rms)
            else:
                total = total + addend
            factor = -0.6 if "factor" in parts else 1.0
            total = (total * factor).to(dtype)
            twins = [twin] if "twin" in parts else []
            twins += [Affine(scales[5])] if "third" in parts else []
            results = norm(
                x,
                None if "alone" in parts else affine,
                EPS,
                residual,
                is_rms,
                second=second if "second" in parts else None,
                branch=Affine(scales[2]) if "branch" in parts else None,
                branches=both,
                factor=factor,
                twins=twins,
            )
            tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
            if dtype != torch.float32:
                tolerance = {"rtol": 2e-2, "atol": 4e-2}
            torch.testing.assert_close(residual.float(), total.float(), **tolerance)
            wanted = [] if "alone" in parts else [affine, *twins]
            assert len(results) == len(wanted)
            for result, each in zip(results, wanted, strict=True):
                assert result.dtype == dtype
                expected = plain(residual.float(), each, is_rms)
                torch.testing.assert_close(result.float(), expected, **tolerance)


def plain(x: Tensor, affine: Affine, is_rms: bool) -> Tensor:
    if is_rms:
        return F.rms_norm(x, x.shape[-1:], affine.weight, EPS)
    return F.layer_norm(x, x.shape[-1:], affine.weight, affine.bias, EPS)


# Every two values of different lists are in one of these cases; the others are computed by night.
ROUNDED_CASES = [
    pytest.param(*case, marks=pytest.mark.slow if (sum(map(int, case)) % 2) else ())
    for case in product(list(Rounding)[1:], (True, False), (0, 1, 3))
]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("rounding", "is_rms", "num_parts"), ROUNDED_CASES)  # 0: no residual
def test_a_rounded_result_is_the_result_rounded(
    device: torch.device, rounding: Rounding, is_rms: bool, num_parts: int
) -> None:
    """To the last bit, whatever rounds it, and in rows that are not finite, too; but for the odd
    element that a GPU's code of both computes in another order."""
    sizes = [128 if rounding is Rounding.INTEGERS else 112, 640]
    if device.type == "cuda":  # a row is one block, whose size is nothing new to the interpreter
        sizes.append(4096)
    for size in sizes:
        weight, bias = torch.randn(2, size, device=device).bfloat16()
        affine = Affine(weight, None if is_rms else bias)
        x, residual = torch.randn(2, 7, size, device=device).bfloat16()
        x[2, 100], x[3, 5], x[4] = torch.nan, torch.inf, 0
        if num_parts > 1:
            x = x + torch.randn(num_parts, 7, size, device=device)
        given = [residual.clone() if num_parts else None for _ in range(2)]
        values, scales = norm(x, affine, EPS, given[0], is_rms, rounding=rounding)
        [result] = norm(x, affine, EPS, given[1], is_rms)
        wanted = round_inputs(result, rounding)
        same = {"rtol": 0, "atol": 0, "equal_nan": True}
        got, expected = values.float(), wanted.values.float()
        if device.type == "cpu":  # the interpreter stores NaN as a number of either sign
            got, expected = got.abs(), expected.abs()
        differ = (got != expected) & ~(got.isnan() & expected.isnan())
        assert int(differ.sum()) <= (got.numel() / 10_000 if device.type == "cuda" else 0)
        used = (..., slice(0, 7 if rounding.group else 1))
        torch.testing.assert_close(scales[used], wanted.scales[used], **same)
        if num_parts:
            torch.testing.assert_close(*given, **same)
        plain_values, plain_scales, _ = quantized.round_inputs(result, rounding)
        assert plain_scales.shape == scales[used].shape
        if rounding is Rounding.INTEGERS:  # the last bit of few of them may differ
            apart = joined_integers(plain_values) - joined_integers(wanted.values)
            is_finite = plain_scales[:, 0].isfinite().all(dim=0)
            assert apart[is_finite].abs().max() <= 1
            plain_scales, scales = plain_scales[:, :1], scales[:, :1]
        torch.testing.assert_close(plain_scales, scales[used], rtol=1e-6, atol=0, equal_nan=True)
        if (
            device.type == "cuda" and rounding is not Rounding.INTEGERS
        ):  # the interpreter rounds 126 to 64
            torch.testing.assert_close(
                plain_values.float(), wanted.values.float(), rtol=0.13, atol=2**-9, equal_nan=True
            )


def joined_integers(values: Tensor) -> Tensor:
    """Of the high and low parts of Rounding.INTEGERS."""
    return 256 * values[:, 0].int() + values[:, 1].int()


@pytest.mark.parametrize("rounding", list(Rounding)[1:])
@pytest.mark.parametrize("computed", [reference.norm, row_ops.norm])
def test_norms_on_a_cpu_round_their_results(
    computed: Callable[..., Any], rounding: Rounding
) -> None:
    x, residual, weight = *torch.randn(2, 3, 640), torch.randn(640)
    [result] = computed(x, Affine(weight), EPS, residual.clone(), True)
    rounded = computed(x, Affine(weight), EPS, residual.clone(), True, rounding=rounding)
    for part, wanted in zip(rounded, quantized.round_inputs(result, rounding)[:2], strict=True):
        assert torch.equal(part.float(), wanted.float())


@pytest.mark.parametrize("heads", [1, 3])
def test_strided_heads(device: torch.device, heads: int) -> None:
    x = torch.randn(4, heads + 2, 32, device=device)[:, 1 : heads + 1]
    weight = torch.randn(32, device=device)
    wanted = F.rms_norm(x, (32,), weight, EPS)
    torch.testing.assert_close(norm(x, Affine(weight), EPS, None, is_rms=True)[0], wanted)


def test_no_rows(device: torch.device) -> None:
    x, weight = torch.empty(0, 8, device=device), torch.ones(8, device=device)
    assert norm(x, Affine(weight), EPS, None, is_rms=True)[0].numel() == 0
