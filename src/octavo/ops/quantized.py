"""Weights that stay quantized in memory: their forms, and the values that they stand for.

A form holds a weight W [..., out_features, in_features] in few bits beside its scales. Leading
dimensions number matrices of equal shape, such as those of experts. Kernels compute with the
tensors of a form; what has no kernel for one computes with `dequantize()`.

All forms of a device can be cut along their outputs and inputs, which is what a rank takes of a
weight, joined along their outputs (merged projections) and stacked (experts). Where groups of
inputs or blocks share a scale, a cut must fall between them.

Example:
    >>> form = GroupedInt.quantize(torch.randn(64, 256), bits=4, group=128)
    >>> form.shape, form.nbytes
    ((64, 256), 8448)
    >>> y = torch.nn.functional.linear(torch.randn(3, 256), form.dequantize())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from octavo.float7 import UNIT as FLOAT7_UNIT

FLOAT8_MAX = 448.0  # of e4m3
_MOST_ERROR_OF_FEWER = 1.25  # of e4m3 in 7 bits, as a multiple of e4m3's
FLOAT16_NORMAL = 2.0**-14  # smaller numbers in float16 are multiples of FLOAT16_STEP
FLOAT16_STEP = 2.0**-24
MX_BLOCK = 32  # inputs that share an exponent
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # without sign
# Elements of a weight that are converted at once. Copies in float32 of whole weights would leave
# gaps between what is kept, into which the next ones do not fit: malloc would take from the system
# as much again as the model has.
CHUNK_ELEMENTS = 1 << 22


class Rounding(IntEnum):
    """How inputs of a product are rounded to 8 bits; kernels take it as a compile-time constant.

    The largest value that shares a scale becomes FLOAT8_MAX in e4m3, with IN_TWO and TOKENS_IN_TWO
    128 to 256, and LARGEST_INTEGER with INTEGERS. Where one is not finite, the scale is not either.
    """

    NONE = 0  # they are not
    TOKENS = 1  # a scale for each token
    GROUPS = 2  # a scale for each group of 128 inputs of a token
    # Two numbers for each input, which add up to a bfloat16, with a scale for each group of 512
    IN_TWO = 3
    # Two integers of 8 bits for each input, 256 high + low, with a scale for each group of 128, in
    # the order in which products with packed integers of 4 bits take them
    INTEGERS = 4
    SPANS = 5  # a scale for each group of 512 inputs of a token
    # Two numbers for each input, as with IN_TWO, and a scale for each token; the second number is
    # LATTER times as large, so that small inputs of a token lose little, too.
    TOKENS_IN_TWO = 6

    @property
    def group(self) -> int:
        """How many inputs of a token share a scale; 0: all of them."""
        return _GROUPS.get(self, 0)


# Tensor cores add up 512 products of e4m3 numbers, before their sums are scaled and added in
# float32.
_GROUPS = {
    Rounding.GROUPS: 128,
    Rounding.IN_TWO: 512,
    Rounding.INTEGERS: 128,
    Rounding.SPANS: 512,
}
LARGEST_INTEGER = 127 * 256 + 127
LATTER = 32.0  # see Rounding.TOKENS_IN_TWO


class RoundedInputs(NamedTuple):
    """Inputs in place of which a projection takes `values` times `scales`."""

    values: Tensor  # e4m3 or int8 [num_tokens, (2,) in_features], dense
    # float32: of tokens [num_tokens, 1]; of groups [num_groups, at least num_tokens], where those
    # behind the last token are of no meaning. With INTEGERS [num_groups, 2, at least num_tokens]:
    # scales, and sums of the inputs that the integers stand for
    scales: Tensor
    # How many inputs of a token share a scale; 0: all. What computes parts of tokens may have
    # smaller groups than its Rounding, which are a multiple of them.
    group: int


def round_inputs(x: Tensor, rounding: Rounding) -> RoundedInputs:
    """Round x [num_tokens, in_features], in plain torch.

    With Rounding.INTEGERS, in_features are a multiple of its groups.
    """
    size = x.shape[-1]
    group = rounding.group or size
    grouped = torch.nn.functional.pad(x.float(), (0, -size % group)).view(len(x), -1, group)
    top = grouped.abs().amax(dim=-1)
    if rounding is Rounding.INTEGERS:
        return _integers(grouped, top)
    if rounding in (Rounding.IN_TWO, Rounding.TOKENS_IN_TWO):
        values, scales = _in_two(grouped, top, rounding)
    else:
        scales = (top.clamp(min=1e-12) / FLOAT8_MAX).where(top.isfinite(), torch.nan)
        values = grouped / scales.unsqueeze(-1)
    values = values.to(torch.float8_e4m3fn).flatten(-2)[..., :size]
    scales = scales.t() if rounding.group else scales
    return RoundedInputs(values.contiguous(), scales.contiguous(), rounding.group)


def _in_two(grouped: Tensor, top: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Both numbers of each input [num_tokens, 2, num_groups, group], and scales.

    The largest input of a group becomes 128 to 256 by a power of two, and the first number of each
    is the one that is nearest, upwards from the middle; with TOKENS_IN_TWO to the even one, and of
    small inputs the one that e4m3 has.
    """
    exponents = top.clamp(min=1e-30).view(torch.int32) >> 23
    factors, scales = (
        (bits << 23).view(torch.float32).where(exponents < 255, torch.nan)
        for bits in (261 - exponents, exponents - 7)
    )
    scaled = grouped * factors.unsqueeze(-1)
    if rounding is Rounding.TOKENS_IN_TWO:
        high = scaled.to(torch.float8_e4m3fn).float()
        return torch.stack((high, (scaled - high) * LATTER), dim=1), scales
    high = ((scaled.view(torch.int32) + 0x80000) & -0x100000).view(torch.float32)
    return torch.stack((high, scaled - high), dim=1), scales


def _integers(grouped: Tensor, top: Tensor) -> RoundedInputs:
    """See Rounding.INTEGERS. Of an input's place in its group, the bits that follow each other from
    the highest one on are moved to where `permute` puts them."""
    num_tokens, num_groups, group = grouped.shape
    largest = top.clamp(min=1e-30)
    rounded = (grouped * (LARGEST_INTEGER / largest).unsqueeze(-1)).nan_to_num().round().int()
    high = (rounded + 128) >> 8
    both = torch.stack((high, rounded - 256 * high), dim=1).to(torch.int8)
    ordered = both.view(num_tokens, 2, num_groups, 2, 2, 2, 4, 2, 2)
    values = ordered.permute(0, 1, 2, 7, 3, 5, 6, 8, 4).reshape(num_tokens, 2, num_groups * group)
    scales = largest / LARGEST_INTEGER
    scales = torch.stack((scales, rounded.sum(dim=-1) * scales), dim=-1)
    return RoundedInputs(values, scales.permute(1, 2, 0).contiguous(), group)


class FormError(ValueError):
    """A form cannot be cut or joined that way; the weight can, dequantized."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """What all forms have in common."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out_features, in_features] of the weight."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self._tensors()[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self._tensors())

    def dequantize(self) -> Tensor:
        """The weight in float32, in the order of its inputs."""
        raise NotImplementedError

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, of which little is in float32 on the way."""
        dense = torch.empty(self.shape, dtype=dtype, device=self.device)
        if dense.dim() > 2:
            for number, matrix in enumerate(dense):
                matrix.copy_(self[number].dense(dtype))
            return dense
        num_rows, num_columns = dense.shape
        for rows in chunks(num_rows, num_columns, self.rows_together):
            dense[rows] = self.cut(rows, slice(0, num_columns)).dequantize()
        return dense

    @property
    def rows_together(self) -> int:
        """A cut along the outputs may fall behind each multiple of so many."""
        return 1

    def cut(self, rows: slice, columns: slice) -> Self:
        """Some of the outputs and of the inputs, of all matrices; views where that is possible.

        Raises FormError if the cut falls inside a group or block that shares a scale.
        """
        raise NotImplementedError

    def to(self, device: torch.device) -> Self:
        """The same on `device`."""
        return self._map(lambda each: each.to(device))

    def __getitem__(self, index: int | slice) -> Self:
        """One of the matrices, or some, by their first leading dimension."""
        return self._map(lambda each: each[index])

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """One weight with the outputs of all parts, in their order.

        Raises FormError if parts differ in what one form has only once.
        """
        raise NotImplementedError

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Matrices of equal shape in one form, with a leading dimension that numbers them.

        Raises FormError if they differ in shape or in what one form has only once.
        """
        parts = cls._alike(parts)
        first = parts[0]
        for other in parts[1:]:
            _check_equal(first, other, [each.name for each in fields(first)])
            if other.shape != first.shape:
                raise FormError(f"a weight has shape {list(other.shape)}, not {list(first.shape)}")
        return cls.stack_each(parts, len(parts))

    @classmethod
    def stack_each(cls, parts: Iterable[Self], number: int) -> Self:
        """Like `stack`, of `number` parts that come one after the other and need not all be there
        at once; they differ in nothing but their tensors."""
        stacked: Self | None = None
        for index, part in enumerate(parts):
            if stacked is None:
                stacked = part._map(lambda each: each.new_empty((number, *each.shape)))
            for name in stacked._own_names():
                getattr(stacked, name)[index].copy_(getattr(part, name))
        assert stacked is not None, "there are parts"
        return stacked

    @classmethod
    def _alike(cls, parts: Sequence[Self]) -> Sequence[Self]:
        """The same parts, with what some of them have and others imply in all of them."""
        return parts

    def _tensors(self) -> list[Tensor]:
        values = (getattr(self, each.name) for each in fields(self))
        return [each for each in values if isinstance(each, Tensor)]

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply `function` to all tensors that have the leading dimensions."""
        return replace(self, **{name: function(getattr(self, name)) for name in self._own_names()})

    def _own_names(self) -> list[str]:
        """Names of the tensors that have the leading dimensions."""
        names = (each.name for each in fields(self) if each.name not in _SHARED)
        return [name for name in names if isinstance(getattr(self, name), Tensor)]


def in_float7(values: Tensor) -> Tensor:
    """Of values, divided by 2 ** UNIT, the nearest numbers of e4m3 (ops/cuda/float7.py): up to 448,
    these have three bits of exponent."""
    return (values * 2.0**-FLOAT7_UNIT).to(torch.float8_e4m3fn)


def chunks(num_rows: int, num_columns: int, rows_together: int = 1) -> Iterator[slice]:
    """Rows of a matrix that are converted at once: a multiple of `rows_together`, but for the
    last ones, with about CHUNK_ELEMENTS elements."""
    step = max(1, CHUNK_ELEMENTS // (num_columns * rows_together)) * rows_together
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))


_SHARED = frozenset({"permutation"})  # tensors that all matrices have in common


@dataclass(frozen=True, slots=True, eq=False)
class ScaledFloat8(QuantizedWeight):
    """e4m3 times the scale of a block: of `block` = (rows, columns) of the weight.

    A scale per tensor is a block of the whole weight, and one per output a block (1, in_features).
    `quantizes_inputs` says that the model was made for inputs that are rounded to e4m3, too; it
    allows that, and does not demand it.
    """

    weight: Tensor  # e4m3 [..., out_features, in_features]
    scales: Tensor  # float32 [..., ceil(out_features / rows), ceil(in_features / columns)]
    block: tuple[int, int]
    quantizes_inputs: bool = False

    def __post_init__(self) -> None:
        (*leading, num_rows, num_columns), (rows, columns) = self.weight.shape, self.block
        expected = (*leading, -(-num_rows // rows), -(-num_columns // columns))
        assert self.weight.dtype == torch.float8_e4m3fn
        assert self.scales.dtype == torch.float32
        assert tuple(self.scales.shape) == expected, (self.scales.shape, expected)

    @classmethod
    def quantize(
        cls, dense: Tensor, block: tuple[int, int], quantizes_inputs: bool = False
    ) -> Self:
        """Round a weight [..., out_features, in_features] so that each block's largest value is
        FLOAT8_MAX.

        The numbers are those of e4m3 that 7 bits hold (ops/cuda/float7.py): below 4, multiples of
        1/2. Only an output whose error would grow by more than a quarter gets all numbers of e4m3:
        one whose largest weight is some 85 times the standard deviation of the others, or one that
        had been in FP8 before.
        """
        num_rows, num_columns = dense.shape[-2:]
        rows, columns = min(block[0], num_rows), min(block[1], num_columns)
        padding = (0, -num_columns % columns, 0, -num_rows % rows)
        blocks = torch.nn.functional.pad(dense.float().abs(), padding)
        (*leading, height, width) = blocks.shape
        blocks = blocks.view(*leading, height // rows, rows, width // columns, columns)
        scales = blocks.amax(dim=(-3, -1)).clamp_(min=1e-12) / FLOAT8_MAX
        spread = _spread_blocks(scales, (rows, columns), (num_rows, num_columns))
        values = (dense.float() / spread).clamp_(-FLOAT8_MAX, FLOAT8_MAX)
        weight = values.to(torch.float8_e4m3fn)
        fewer = in_float7(values).float().mul_(2.0**FLOAT7_UNIT)
        error, error_of_fewer = (
            (values - rounded).square_().sum(dim=-1, keepdim=True)
            for rounded in (weight.float(), fewer)
        )
        is_enough = error_of_fewer <= _MOST_ERROR_OF_FEWER**2 * error
        weight = torch.where(is_enough, fewer.to(torch.float8_e4m3fn), weight)
        return cls(weight, scales, (rows, columns), quantizes_inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """See QuantizedWeight.shape."""
        return tuple(self.weight.shape)

    @property
    def rows_together(self) -> int:
        """See QuantizedWeight.rows_together."""
        return self.block[0]

    def dequantize(self) -> Tensor:
        """See QuantizedWeight.dequantize."""
        sizes = self.weight.shape[-2], self.weight.shape[-1]
        return self.weight.float().mul_(_spread_blocks(self.scales, self.block, sizes))

    def cut(self, rows: slice, columns: slice) -> Self:
        """See QuantizedWeight.cut. Within one block, a cut may fall anywhere."""
        first_row, last_row = _cut_blocks(rows, self.block[0], self.shape[-2], "outputs")
        first_column, last_column = _cut_blocks(columns, self.block[1], self.shape[-1], "inputs")
        block = (
            min(self.block[0], rows.stop - rows.start),
            min(self.block[1], columns.stop - columns.start),
        )
        scales = self.scales[..., first_row:last_row, first_column:last_column]
        return replace(self, weight=self.weight[..., rows, columns], scales=scales, block=block)

    def in_lower_blocks(self, rows: int) -> Self:
        """The same weight in blocks of so many rows, which divide those of its own."""
        if rows == self.block[0]:
            return self
        return replace(self, scales=_lower_blocks(self, rows), block=(rows, self.block[1]))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """See QuantizedWeight.join. Blocks become as high as all parts allow."""
        columns = parts[0].block[1]
        if any(each.block[1] != columns for each in parts):
            blocks = sorted({each.block for each in parts})
            raise FormError(f"parts have blocks of different sizes: {blocks}")
        heights = [each.block[0] for each in parts]
        rows = math.gcd(*heights, *(each.shape[-2] for each in parts[:-1]))
        return cls(
            _as_bytes(lambda weights: torch.cat(weights, dim=-2), [each.weight for each in parts]),
            torch.cat([_lower_blocks(each, rows) for each in parts], dim=-2),
            (rows, columns),
            all(each.quantizes_inputs for each in parts),
        )


@dataclass(frozen=True, slots=True, eq=False)
class GroupedInt(QuantizedWeight):
    """Integers of 4 or 8 bits minus a zero point, times the scale of a group of inputs.

    Two 4-bit integers share a byte: of inputs 2 i and 2 i + 1, in its low and in its high half. One
    scale per output is one group.
    """

    packed: Tensor  # uint8 [..., out_features, in_features * bits / 8]
    scales: Tensor  # floating point [..., out_features, num_groups]
    zeros: Tensor | None  # int16, like scales; None: 2 ** (bits - 1)
    bits: int
    # int64 [in_features]: which input each column of `packed` belongs to; None: in their order.
    permutation: Tensor | None = None
    quantizes_inputs: bool = False  # see ScaledFloat8; to integers of 8 bits

    def __post_init__(self) -> None:
        assert self.bits in (4, 8)
        assert self.packed.dtype == torch.uint8
        assert self.packed.shape[:-1] == self.scales.shape[:-1]
        assert self.shape[-1] % self.scales.shape[-1] == 0, "groups have equal sizes"
        assert self.zeros is None or self.zeros.shape == self.scales.shape

    @classmethod
    def from_values(
        cls,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bits: int,
        permutation: Tensor | None = None,
        quantizes_inputs: bool = False,
    ) -> Self:
        """Pack integers uint8 [..., out_features, in_features], one in each byte."""
        if zeros is not None and bool((zeros == 1 << (bits - 1)).all()):
            zeros = None
        if permutation is not None:
            values = values[..., permutation]
        if bits == 4:
            values = values[..., ::2] | (values[..., 1::2] << 4)
        zeros = None if zeros is None else zeros.to(torch.int16).contiguous()
        return cls(
            values.contiguous(), scales.contiguous(), zeros, bits, permutation, quantizes_inputs
        )

    @classmethod
    def quantize(cls, dense: Tensor, bits: int, group: int, quantizes_inputs: bool = False) -> Self:
        """Round a weight [..., out_features, in_features] to integers without zero points.

        Scales have the weight's dtype; those that float16 does not hold exactly because they are
        small are rounded up, so that no weight is cut off. Raises FormError if groups do not divide
        the inputs.
        """
        if dense.shape[-1] % group or dense.shape[-1] * bits % 8:
            raise FormError(f"groups of {group} do not divide {dense.shape[-1]} inputs")
        half = 1 << (bits - 1)
        grouped = _in_groups(dense.float(), group)
        scales = (grouped.abs().amax(dim=-1) / (half - 0.5)).clamp_(min=1e-12)
        if dense.dtype == torch.float16:
            rounded_up = (scales / FLOAT16_STEP).ceil_().mul_(FLOAT16_STEP)
            scales = rounded_up.where(scales < FLOAT16_NORMAL, scales)
        scales = scales.to(dense.dtype)
        values = (grouped / scales.float().unsqueeze(-1)).round_().clamp_(-half, half - 1) + half
        integers = values.flatten(-2).to(torch.uint8)
        return cls.from_values(integers, scales, None, bits, quantizes_inputs=quantizes_inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """See QuantizedWeight.shape."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 8 // self.bits)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[-1] // self.scales.shape[-1]

    def values(self) -> Tensor:
        """The integers, uint8 [..., out_features, in_features], in the order of `packed`."""
        return self.packed if self.bits == 8 else _nibbles(self.packed)

    def dequantize(self) -> Tensor:
        """See QuantizedWeight.dequantize."""
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros.float().unsqueeze(-1)
        grouped = _in_groups(self.values().float(), self.group)
        grouped = grouped.sub_(zeros).mul_(self.scales.float().unsqueeze(-1))
        dense = grouped.flatten(-2)
        if self.permutation is None:
            return dense
        return torch.empty_like(dense).index_copy_(-1, self.permutation, dense)

    def cut(self, rows: slice, columns: slice) -> Self:
        """See QuantizedWeight.cut."""
        num_columns, group = self.shape[-1], self.group
        is_whole = columns.start == 0 and columns.stop == num_columns
        if self.permutation is not None and not is_whole:
            raise FormError("inputs of a rank belong to groups in any order")
        first, last = _cut_blocks(columns, group, num_columns, "inputs")
        if columns.start * self.bits % 8 or columns.stop * self.bits % 8:
            raise FormError(f"inputs {columns.start} to {columns.stop} cut a byte")
        octets = slice(columns.start * self.bits // 8, columns.stop * self.bits // 8)
        return replace(
            self,
            packed=self.packed[..., rows, octets],
            scales=self.scales[..., rows, first:last],
            zeros=None if self.zeros is None else self.zeros[..., rows, first:last],
        )

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """See QuantizedWeight.join."""
        for other in parts[1:]:
            _check_equal(parts[0], other, ["bits", "group", "permutation"])
        parts = cls._alike(parts)
        return replace(
            parts[0],
            packed=torch.cat([each.packed for each in parts], dim=-2),
            scales=torch.cat([each.scales for each in parts], dim=-2),
            zeros=_joined([each.zeros for each in parts]),
            quantizes_inputs=all(each.quantizes_inputs for each in parts),
        )

    @classmethod
    def _alike(cls, parts: Sequence[Self]) -> Sequence[Self]:
        if all(each.zeros is None for each in parts):
            return parts
        return [
            each
            if each.zeros is not None
            else replace(
                each,
                zeros=torch.full_like(each.scales, 1 << (each.bits - 1), dtype=torch.int16),
            )
            for each in parts
        ]


@dataclass(frozen=True, slots=True, eq=False)
class MxFloat4(QuantizedWeight):
    """e2m1 times a power of two for each MX_BLOCK inputs (OCP Microscaling Formats 1.0, MXFP4).

    Two values share a byte: of inputs 2 i and 2 i + 1, in its low and in its high half.
    """

    packed: Tensor  # uint8 [..., out_features, in_features / 2]
    exponents: Tensor  # uint8 [..., out_features, in_features / 32]: 127 stands for 1

    def __post_init__(self) -> None:
        expected = (*self.packed.shape[:-1], self.packed.shape[-1] * 2 // MX_BLOCK)
        assert tuple(self.exponents.shape) == expected, (self.exponents.shape, expected)

    @classmethod
    def from_values(cls, values: Tensor, exponents: Tensor) -> Self:
        """Pack e2m1 uint8 [..., out_features, in_features], one in each byte."""
        return cls(values[..., ::2] | (values[..., 1::2] << 4), exponents)

    @classmethod
    def quantize(cls, dense: Tensor) -> Self:
        """Round a weight [..., out_features, in_features], with the exponents that the
        specification proposes: that of a block's largest value, less the largest of e2m1.

        Raises FormError if blocks do not divide the inputs.
        """
        if dense.shape[-1] % MX_BLOCK:
            raise FormError(f"blocks of {MX_BLOCK} do not divide {dense.shape[-1]} inputs")
        grouped = _in_groups(dense.float().contiguous(), MX_BLOCK)
        largest = grouped.abs().amax(dim=-1).clamp_(min=2.0**-125)
        exponents = (largest.frexp().exponent - 3).clamp_(-127, 127)
        scaled = grouped * torch.exp2(-exponents.float()).unsqueeze(-1)
        bounds = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)], device=dense.device)
        values = torch.bucketize(scaled.abs(), bounds).to(torch.uint8)
        values = (values | (scaled < 0).to(torch.uint8) << 3).flatten(-2)
        return cls.from_values(values, (exponents + 127).to(torch.uint8))

    @property
    def shape(self) -> tuple[int, ...]:
        """See QuantizedWeight.shape."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 2)

    def dequantize(self) -> Tensor:
        """See QuantizedWeight.dequantize."""
        return scaled_e2m1(self.packed, torch.exp2(self.exponents.float() - 127))

    def cut(self, rows: slice, columns: slice) -> Self:
        """See QuantizedWeight.cut."""
        if columns.start % MX_BLOCK or columns.stop % MX_BLOCK:
            raise FormError(f"inputs {columns.start} to {columns.stop} cut blocks of {MX_BLOCK}")
        octets = slice(columns.start // 2, columns.stop // 2)
        blocks = slice(columns.start // MX_BLOCK, columns.stop // MX_BLOCK)
        return replace(
            self,
            packed=self.packed[..., rows, octets],
            exponents=self.exponents[..., rows, blocks],
        )

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """See QuantizedWeight.join."""
        return cls(
            torch.cat([each.packed for each in parts], dim=-2),
            torch.cat([each.exponents for each in parts], dim=-2),
        )


def scaled_e2m1(packed: Tensor, scales: Tensor) -> Tensor:
    """The values of e2m1 times a scale for each group of inputs.

    packed: see MxFloat4. scales: float32 [..., out_features, groups], which divide the inputs.
    """
    table = torch.tensor([*E2M1, *(-each for each in E2M1)], device=packed.device)
    values = table[_nibbles(packed).long()]
    grouped = _in_groups(values, values.shape[-1] // scales.shape[-1])
    return grouped.mul_(scales.unsqueeze(-1)).flatten(-2)


# ---------------------------------------------------------------- inside


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 2 n]: the low half of each byte, then its high half."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _in_groups(values: Tensor, group: int) -> Tensor:
    """[..., n] -> [..., n / group, group]."""
    return values.view(*values.shape[:-1], -1, group)


def _spread_blocks(scales: Tensor, block: tuple[int, int], sizes: tuple[int, int]) -> Tensor:
    """A scale per block -> one that broadcasts against [..., *sizes]."""
    for dim, (length, size) in zip((-2, -1), zip(block, sizes, strict=True), strict=True):
        if length < size:
            scales = scales.repeat_interleave(length, dim=dim).narrow(dim, 0, size)
    return scales


def _cut_blocks(cut: slice, length: int, size: int, what: str) -> tuple[int, int]:
    """Which blocks of `length` a cut has. Raises FormError if it takes parts of several."""
    first, last = cut.start // length, -(-cut.stop // length)
    is_between = cut.start % length == 0 and (cut.stop % length == 0 or cut.stop == size)
    if last - first > 1 and not is_between:
        raise FormError(f"{what} {cut.start} to {cut.stop} cut blocks of {length}")
    return first, last


def _lower_blocks(form: ScaledFloat8, rows: int) -> Tensor:
    """Scales of blocks of so many rows."""
    return form.scales.repeat_interleave(form.block[0] // rows, dim=-2)[
        ..., : -(-form.shape[-2] // rows), :
    ]


def _joined(zeros: Sequence[Tensor | None]) -> Tensor | None:
    """Along the outputs; all are there or none is."""
    present = [each for each in zeros if each is not None]
    return torch.cat(present, dim=-2) if present else None


def _as_bytes(function: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> Tensor:
    """A function that moves elements; torch has few of these for float8."""
    if tensors[0].dtype != torch.float8_e4m3fn:
        return function(tensors)
    return function([each.view(torch.uint8) for each in tensors]).view(torch.float8_e4m3fn)


def _check_equal(one: QuantizedWeight, other: QuantizedWeight, names: Sequence[str]) -> None:
    """Raise FormError if parts differ in one of these, tensors of weights apart."""
    for name in names:
        ours: Any = getattr(one, name)
        theirs: Any = getattr(other, name)
        if name in _SHARED and ours is not None and theirs is not None:
            is_equal = torch.equal(ours, theirs)
        elif isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            is_equal = ours.dtype == theirs.dtype
        else:
            is_equal = ours == theirs
        if not is_equal:
            raise FormError(f"parts differ in {name}")
