"""The one-pass operations against plain torch in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.cpu import row_ops

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[True, False], ids=["kernel", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(row_ops, "_is_plain", lambda x: False)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_operations_are_those_of_torch(dtype: torch.dtype, num_tokens: int) -> None:
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    x, residual = torch.randn(2, num_tokens, 100).to(dtype)
    weight = torch.randn(100).to(dtype)
    expected = F.rms_norm(x.float(), (100,), weight.float(), EPS)
    torch.testing.assert_close(row_ops.rms_norm(x, weight, EPS).float(), expected, **close)

    added = (x.float() + residual.float()).to(dtype)
    expected = F.rms_norm(added.float(), (100,), weight.float(), EPS)
    result = row_ops.add_rms_norm(x, residual, weight, EPS)
    assert result.dtype == dtype
    assert torch.equal(residual, added)
    torch.testing.assert_close(result.float(), expected, **close)

    gate_up = 20 * torch.randn(num_tokens, 2 * 1000).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    torch.testing.assert_close(row_ops.silu_mul(gate_up).float(), F.silu(gate) * up, **close)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_heads_of_a_fused_projection_are_normalised(dtype: torch.dtype) -> None:
    query = torch.randn(50, 7, 64).to(dtype)[:, :4]
    weight = torch.randn(64).to(dtype)
    expected = F.rms_norm(query.float(), (64,), weight.float(), EPS)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(row_ops.rms_norm(query, weight, EPS).float(), expected, **close)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x, weight = torch.randn(300, 2000).to(dtype), torch.randn(2000).to(dtype)
    assert torch.equal(row_ops.rms_norm(x[7:8], weight, EPS), row_ops.rms_norm(x, weight, EPS)[7:8])
    assert torch.equal(row_ops.silu_mul(x[7:8]), row_ops.silu_mul(x)[7:8])


def test_nan_and_extremes_pass_through_silu() -> None:
    gate = torch.tensor([float("nan"), -1e30, -200.0, 0.0, 200.0, 1e30])
    gate_up = torch.cat((gate, torch.ones(6)))[None]
    expected = F.silu(gate)[None]
    torch.testing.assert_close(row_ops.silu_mul(gate_up), expected, equal_nan=True)
