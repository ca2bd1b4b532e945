"""Forms of quantized weights: what they stand for, and how they are cut, joined and stacked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.ops.quantized import (
    E2M1,
    FormError,
    GroupedInt,
    MxFloat4,
    QuantizedWeight,
    ScaledFloat8,
)

Make = Callable[[Tensor], QuantizedWeight]
ALL = slice(0, 384)


def dense(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def mx_float4(weight: Tensor) -> MxFloat4:
    """Random bytes: any byte is a pair of values."""
    generator = torch.Generator().manual_seed(weight.numel())
    *leading, size = weight.shape
    packed = torch.randint(256, (*leading, size // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(120, 130, (*leading, size // 32), generator=generator)
    return MxFloat4(packed, exponents.to(torch.uint8))


def asymmetric(weight: Tensor) -> GroupedInt:
    form = GroupedInt.quantize(weight, 4, 128)
    zeros = torch.arange(form.scales.numel()).view(form.scales.shape) % 16
    return GroupedInt.from_values(form.values(), form.scales, zeros, 4)


FORMS: dict[str, Make] = {
    "float8-tensor": lambda weight: ScaledFloat8.quantize(weight, (1 << 20, 1 << 20)),
    "float8-row": lambda weight: ScaledFloat8.quantize(weight, (1, 1 << 20)),
    "float8-block": lambda weight: ScaledFloat8.quantize(weight, (128, 128)),
    "int4": lambda weight: GroupedInt.quantize(weight, 4, 128),
    "int4-asymmetric": asymmetric,
    "int4-small": lambda weight: GroupedInt.quantize(weight, 4, 32),
    "int8-row": lambda weight: GroupedInt.quantize(weight, 8, weight.shape[-1]),
    "mxfloat4": mx_float4,
}
forms = pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)


@forms
@pytest.mark.parametrize("shape", [(300, 384), (3, 130, 384)])
def test_values_in_another_dtype(
    make: Make, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = make(dense(*shape))
    monkeypatch.setattr("octavo.ops.quantized.CHUNK_ELEMENTS", 7 * 384)
    assert torch.equal(form.dense(torch.bfloat16), form.dequantize().to(torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "error"),
    [("float8-row", 2**-4), ("float8-block", 2**-4), ("int4", 0.15), ("int8-row", 0.02)],
)
def test_rounding_is_as_exact_as_the_bits_allow(name: str, error: float) -> None:
    weight = dense(200, 384)
    values = FORMS[name](weight).dequantize()
    if name.startswith("float8"):  # below 4 of 448 it has multiples of 1/2
        scale = weight.abs().clamp(min=weight.abs().amax() * 4 / 448)
    else:
        scale = weight.abs().view(200, 3, 128).amax(dim=-1).repeat_interleave(128, dim=1)
    assert ((values - weight).abs() <= error * scale).all()


@forms
def test_bytes_are_fewer_than_those_of_16_bits(make: Make) -> None:
    weight = dense(256, 384)
    form = make(weight)
    assert form.shape == (256, 384)
    assert form.nbytes < 0.53 * 2 * weight.numel()


@forms
def test_cuts_are_those_of_the_values(make: Make) -> None:
    form = make(dense(384, 384))
    whole = form.dequantize()
    for rows in (slice(0, 128), slice(128, 384)):
        assert torch.equal(form.cut(rows, ALL).dequantize(), whole[rows])
        assert torch.equal(form.cut(ALL, rows).dequantize(), whole[:, rows])


@forms
def test_joined_parts_keep_their_values(make: Make) -> None:
    parts = [make(dense(rows, 256)) for rows in (128, 64, 48)]
    joined = type(parts[0]).join(parts)
    assert joined.shape == (240, 256)
    assert torch.equal(joined.dequantize(), torch.cat([each.dequantize() for each in parts]))


@forms
def test_stacked_matrices_keep_their_values(make: Make) -> None:
    parts = [make(dense(128, 256) * (i + 1)) for i in range(3)]
    stacked = type(parts[0]).stack(parts)
    expected = torch.stack([each.dequantize() for each in parts])
    assert stacked.shape == (3, 128, 256)
    assert torch.equal(stacked.dequantize(), expected)
    assert torch.equal(stacked[1].dequantize(), expected[1])
    cut = stacked.cut(slice(0, 64), slice(128, 256))
    assert torch.equal(cut.dequantize(), expected[:, :64, 128:])


@pytest.mark.parametrize(
    ("name", "first", "length"),
    [("float8-block", 64, 128), ("int4", 64, 128), ("mxfloat4", 16, 32)],
)
def test_cuts_inside_a_group_are_refused(name: str, first: int, length: int) -> None:
    form = FORMS[name](dense(16, 384))
    with pytest.raises(FormError, match=f"inputs {first} to 384 cut blocks of {length}"):
        form.cut(slice(0, 16), slice(first, 384))


def test_inputs_in_another_order_are_found_again() -> None:
    weight = dense(16, 256)
    permutation = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    plain = GroupedInt.quantize(weight[:, permutation], 4, 64)
    form = GroupedInt.from_values(
        plain.values()[:, permutation.argsort()], plain.scales, None, 4, permutation
    )
    assert torch.equal(form.dequantize()[:, permutation], plain.dequantize())
    with pytest.raises(FormError, match="groups in any order"):
        form.cut(slice(0, 16), slice(0, 128))
    other = GroupedInt.quantize(weight, 4, 64)
    with pytest.raises(FormError, match="parts differ in permutation"):
        GroupedInt.join([form, other])
    assert torch.equal(
        GroupedInt.join([form, form]).dequantize(), torch.cat([form.dequantize()] * 2)
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_small_weights_in_float16_are_rounded_by_half_a_step(bits: int) -> None:
    """Also where float16 holds few scales, or none that is as small."""
    exponents = torch.arange(-24, 8).unsqueeze(1)
    weight = (dense(32, 128) * torch.exp2(exponents.float())).half()
    weight[0] = 0
    form = GroupedInt.quantize(weight, bits, 128)
    assert form.scales.dtype == torch.float16
    exact = weight.float().abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 0.5)
    assert (form.scales.float() <= (exact * 1.001).clamp(min=2**-24) + 2**-24).all()
    error = (form.dequantize() - weight.float()).abs()
    assert (error <= 0.6 * form.scales.float()).all()


def test_mxfp4_keeps_its_own_values_and_rounds_others_to_the_nearest() -> None:
    values = torch.tensor([*E2M1, *(-each for each in E2M1)]).repeat(4, 4)
    scaled = values * torch.tensor([2.0**-20, 1.0, 2.0, 2.0**30])[:, None]
    assert torch.equal(MxFloat4.quantize(scaled).dequantize(), scaled)
    assert torch.equal(MxFloat4.quantize(torch.zeros(1, 32)).dequantize(), torch.zeros(1, 32))
    dense = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    form = MxFloat4.quantize(dense)
    steps = torch.exp2(form.exponents.float() - 127).repeat_interleave(32, dim=1)
    off = (form.dequantize() - dense).abs()
    is_inside = dense.abs() <= 6 * steps  # larger ones become 6
    assert (off[is_inside] <= steps[is_inside]).all()
    assert (off <= 2 * steps).all()
    with pytest.raises(FormError, match="blocks of 32 do not divide 48 inputs"):
        MxFloat4.quantize(torch.zeros(2, 48))
