"""Norms against torch in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.cuda.norm import layer_norm, rms_norm

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
            if is_rms:
                actual = rms_norm(given, weight, EPS, added)
                wanted = F.rms_norm(total.float(), (size,), weight.float(), EPS)
            else:
                actual = layer_norm(given, weight, bias, EPS, added)
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
    torch.testing.assert_close(layer_norm(x, None, None, EPS), F.layer_norm(x, (40,), eps=EPS))


@pytest.mark.parametrize("heads", [1, 3])
def test_strided_heads(device: torch.device, heads: int) -> None:
    x = torch.randn(4, heads + 2, 32, device=device)[:, 1 : heads + 1]
    weight = torch.randn(32, device=device)
    wanted = F.rms_norm(x, (32,), weight, EPS)
    torch.testing.assert_close(rms_norm(x, weight, EPS), wanted)


def test_no_rows(device: torch.device) -> None:
    assert (
        rms_norm(torch.empty(0, 8, device=device), torch.ones(8, device=device), EPS).numel() == 0
    )
