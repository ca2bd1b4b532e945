"""The one-pass operations against plain torch in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.cpu import row_ops
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import Affine

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
    for epilogue, activated in (
        (Epilogue.SILU_MUL, F.silu(gate)),
        (Epilogue.GELU_TANH_MUL, F.gelu(gate, approximate="tanh")),
    ):
        result = row_ops.apply_gate(gate_up, epilogue)
        torch.testing.assert_close(result.float(), activated * up, **close)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("is_rms", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_forms_of_norms(
    dtype: torch.dtype, weight_dtype: torch.dtype, is_rms: bool, num_tokens: int
) -> None:
    """What is added to the residual stream, and in which ways the sum is scaled and shifted."""
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    if torch.bfloat16 in (dtype, weight_dtype):
        close = {"atol": 6e-2, "rtol": 3e-2}
    scales = torch.randn(3, 100).to(weight_dtype)
    shifts = [None, None] if is_rms else list(torch.randn(2, 100).to(weight_dtype))
    affine, twin, branch = Affine(scales[0], shifts[0]), Affine(scales[1], shifts[1]), scales[2]

    def plain(x: Tensor, affine: Affine) -> Tensor:
        weight, bias = (None if each is None else each.float() for each in affine)
        if is_rms:
            return F.rms_norm(x.float(), (100,), weight, EPS)
        return F.layer_norm(x.float(), (100,), weight, bias, EPS)

    x, second, given = torch.randn(3, num_tokens, 100).to(dtype)
    third = Affine(torch.randn(100), None if is_rms else torch.randn(100))
    for takes_second, takes_branch in ((True, False), (False, True), (False, False)):
        addend = x.float() + (second.float() if takes_second else 0)
        if takes_branch:
            addend = plain(x, Affine(branch))
        for factor, affines in (
            (1.0, [affine, twin]),
            (-0.7, [affine]),
            (1.5, [] if takes_branch else [affine]),
            (0.9, [affine, twin, third]),
        ):
            total = ((given.float() + addend) * factor).to(dtype)
            residual = given.clone()
            results = row_ops.norm(
                x,
                affines[0] if affines else None,
                EPS,
                residual,
                is_rms,
                second=second if takes_second else None,
                branch=Affine(branch) if takes_branch else None,
                factor=factor,
                twins=affines[1:],
            )
            assert [result.dtype for result in results] == [dtype] * len(affines)
            torch.testing.assert_close(residual.float(), total.float(), **close)
            for result, each in zip(results, affines, strict=True):
                torch.testing.assert_close(result.float(), plain(residual, each), **close)


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
    for epilogue in (Epilogue.SILU_MUL, Epilogue.GELU_TANH_MUL):
        one, all_rows = (row_ops.apply_gate(each, epilogue) for each in (x[7:8], x))
        assert torch.equal(one, all_rows[7:8])


def test_nan_and_extremes_pass_through_gates() -> None:
    gate = torch.tensor([float("nan"), -1e30, -200.0, 0.0, 200.0, 1e30])
    gate_up = torch.cat((gate, torch.ones(6)))[None]
    for epilogue, expected in (
        (Epilogue.SILU_MUL, F.silu(gate)),
        (Epilogue.GELU_TANH_MUL, F.gelu(gate, approximate="tanh")),
    ):
        result = row_ops.apply_gate(gate_up, epilogue)[0]
        torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_weights_that_are_nan_leave_no_number(dtype: torch.dtype) -> None:
    """Whatever their bits: those of torch's softmax are all 1."""
    bits = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, -0x00400000], dtype=torch.int32)
    weights = bits.view(torch.float32)[:, None]
    places = torch.zeros(len(bits), 1, dtype=torch.int64)
    rows = torch.ones(1, 20, dtype=dtype)
    assert row_ops.weighted_sum(rows, places, weights).isnan().all()


@pytest.mark.parametrize("has_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("first", "size"), [(0, 4096), (0, 97), (5, 100), (7, 5), (32, 64), (33, 31), (40, 20)]
)
def test_masks_rule_out_elements_and_hide_no_damage(
    has_kernel: bool, dtype: torch.dtype, first: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel:
        monkeypatch.setattr(row_ops, "_mask_kernel", lambda dtype: None)
    random = np.random.default_rng(size)
    logits = torch.randn(40, size + 3).to(dtype)[:, :size]
    logits[0, size // 2], logits[1, size - 1], logits[2, 0] = torch.nan, torch.inf, -torch.inf
    logits[39, 0] = torch.nan  # of a row without a mask
    words = random.integers(-(2**31), 2**31, (50, (first + size) // 32 + 2)).astype(np.int32)
    words[3], words[4] = 0, -1
    places = random.permutation(50)[:40].astype(np.int32)
    places[[3, 4, 39]] = 3, 4, -1
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    is_out = torch.from_numpy(bits[places, first : first + size] == 0)
    expected = logits.masked_fill(is_out, -torch.inf)
    expected[:2], expected[39] = torch.nan, logits[39]
    row_ops.mask_rows(logits, words, places, first)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)
