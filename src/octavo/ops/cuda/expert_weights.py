"""How experts' weights lie in the memory of a GPU, and how Triton kernels read them.

Quantized weights are rearranged once, when they are loaded. Of 4-bit weights, a word of 32 bits has
eight of one row: with BLOCK = 128 inputs in a block, word c of the block has as its number i the
weight of input 16 i + c. So weights i of all words of a block are a matrix [rows, 16] that
multiplies 16 neighbouring inputs, and no element has to change its place in a tensor. Integers have
the bits 4 i to 4 i + 3; MXFP4 has those from which a bfloat16 takes the fewest operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.quantized import MX_BLOCK, GroupedInt, MxFloat4, QuantizedWeight, ScaledFloat8

BLOCK = 128  # inputs of a block of 4-bit weights
WORDS = BLOCK // 8
# A factor of MXFP4 is 2^(field - 127) of a bfloat16 with that exponent field; nibbles stand for
# 2^-126 times their value, because their bits are put where those of a bfloat16 are.
FACTOR_BIAS = 126
LARGEST_FACTOR = 254


# Where the 16 bits of four weights of MXFP4 have sign and magnitude (3 bits). The first two have
# them as far from each other as a bfloat16 does, so that one operation moves both.
SIGN_BITS, MAGNITUDE_BITS = (15, 12, 14, 13), (6, 3, 0, 9)


def _mx_float4_assembly() -> str:
    """PTX: the words $8 and $9 -> $0 to $7, two bfloat16 each, by factors in $10 to $13."""
    lines = [
        ".reg .b32 low, high, s, t;",
        "prmt.b32 low, $8, $9, 0x5410;",
        "prmt.b32 high, $8, $9, 0x7632;",
    ]
    for i in range(8):
        source = moved = "low" if i < 4 else "high"
        sign, magnitude = SIGN_BITS[i % 4], MAGNITUDE_BITS[i % 4]
        if magnitude != 6:
            direction = "shr.u32" if magnitude > 6 else "shl.b32"
            lines.append(f"{direction} t, {source}, {abs(magnitude - 6)};")
            moved = "t"
        if sign - magnitude == 9:
            lines.append(f"and.b32 t, {moved}, 0x81C081C0;")
        else:
            lines.append(f"and.b32 t, {moved}, 0x01C001C0;")
            lines.append(f"shl.b32 s, {source}, {15 - sign};")
            lines.append("lop3.b32 t, s, 0x80008000, t, 0xEA;")
        lines.append(f"mul.bf16x2 ${i}, t, ${10 + i // 2};")
    return "{" + "\n".join(lines) + "}"


_TO_BFLOAT16 = tl.constexpr(_mx_float4_assembly())


class Format(IntEnum):
    """How a weight is stored; kernels take its value as a compile-time constant."""

    PLAIN = 0  # in the model's dtype
    FLOAT8 = 1  # e4m3 times float32 of a block
    MX_FLOAT4 = 2  # e2m1 times a power of two for each 32 inputs
    INT4 = 3  # integers minus a zero point, times float32 of a group of inputs

    @property
    def is_packed(self) -> bool:
        """Whether eight weights share a word."""
        return self in (Format.MX_FLOAT4, Format.INT4)


MX_FLOAT4 = tl.constexpr(int(Format.MX_FLOAT4))
FLOAT8 = tl.constexpr(int(Format.FLOAT8))
_SIGN_BITS, _MAGNITUDE_BITS = tl.constexpr(SIGN_BITS), tl.constexpr(MAGNITUDE_BITS)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrices:
    """A matrix W [num_rows, size] of each expert."""

    # [experts, num_rows, size], dense; of packed formats int32 [experts, num_rows, words], with
    # the size padded to whole blocks.
    values: Tensor
    format: Format
    size: int
    # FLOAT8: float32 [experts, row blocks, column blocks]. MX_FLOAT4: int32 [experts, num_rows,
    # blocks], four exponent fields each. INT4: float32 [experts, num_rows, groups].
    scales: Tensor | None = None
    zeros: Tensor | None = None  # INT4: int32, like scales; None: 8
    factors: Tensor | None = None  # MX_FLOAT4: float32 [experts], of all its weights
    scale_rows: int = 1  # FLOAT8: rows of a block
    scale_columns: int = 0  # inputs that share a scale; 0: all

    @property
    def num_rows(self) -> int:
        """Rows of each expert."""
        return self.values.shape[1]

    @property
    def bits(self) -> int:
        """Bits of a weight, without its scale."""
        return 4 if self.format.is_packed else 8 * self.values.element_size()

    @classmethod
    def of(cls, weight: Tensor | QuantizedWeight) -> ExpertMatrices | None:
        """The matrices of a weight [experts, num_rows, size]; None if no kernel knows the form."""
        if isinstance(weight, Tensor):
            return cls(weight, Format.PLAIN, weight.shape[2])
        if isinstance(weight, ScaledFloat8):
            return _of_float8(weight) if _has_float8(weight.device) else None
        if isinstance(weight, MxFloat4):
            return _of_mx_float4(weight)
        if isinstance(weight, GroupedInt):
            return _of_grouped(weight)
        return None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """That of the newest, for the interpreter on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def _has_float8(device: torch.device) -> bool:
    return _capability(device) >= (8, 9)


def has_bfloat16_pairs(device: torch.device) -> bool:
    """Whether two bfloat16 are multiplied by one instruction of PTX."""
    return device.type == "cuda" and _capability(device) >= (9, 0)


def _of_float8(form: ScaledFloat8) -> ExpertMatrices | None:
    num_rows, size = form.shape[1:]
    rows, columns = form.block
    if columns >= size:
        columns = 0
    elif columns % BLOCK:
        return None
    scales = form.scales
    if columns:  # one token's kernels have no larger groups
        scales = scales.repeat_interleave(columns // BLOCK, dim=2)[..., : -(-size // BLOCK)]
        columns = BLOCK
    values = form.weight.contiguous()
    rows = min(rows, num_rows)
    return ExpertMatrices(
        values, Format.FLOAT8, size, scales.contiguous(), scale_rows=rows, scale_columns=columns
    )


def _of_mx_float4(form: MxFloat4) -> ExpertMatrices:
    size = form.shape[2]
    fields = form.exponents.int() + FACTOR_BIAS
    excess = (fields.amax(dim=(1, 2)) - LARGEST_FACTOR).clamp_(min=0)
    fields = (fields - excess[:, None, None]).clamp_(min=0)
    fields = _padded(fields, BLOCK // MX_BLOCK)
    fields = fields.view(*fields.shape[:2], -1, BLOCK // MX_BLOCK)
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=fields.device)
    scales = (fields << shifts).sum(dim=-1, dtype=torch.int32)
    factors = torch.exp2(excess.float())
    return ExpertMatrices(
        _words(form.packed, _mx_float4_bits),
        Format.MX_FLOAT4,
        size,
        scales,
        factors=factors,
        scale_columns=BLOCK,
    )


def _of_grouped(form: GroupedInt) -> ExpertMatrices | None:
    size, group = form.shape[2], form.group
    if form.bits != 4 or form.permutation is not None:
        return None
    if group not in (32, 64) and group % BLOCK and group != size:
        return None
    columns = group if group in (32, 64) else BLOCK
    num_groups = -(-size // columns)

    def spread(values: Tensor) -> Tensor:
        """The same values, one for each `columns` inputs, and for those that are padding."""
        spread = values.repeat_interleave(-(-group // columns), dim=2)[..., :num_groups]
        return _padded(spread, BLOCK // columns)

    zeros = None if form.zeros is None else spread(form.zeros.int())
    return ExpertMatrices(
        _words(form.packed, _int4_bits),
        Format.INT4,
        size,
        spread(form.scales.float()),
        zeros,
        scale_columns=columns,
    )


def _padded(values: Tensor, multiple: int) -> Tensor:
    """The values with zeros after them, up to a multiple of so many in the last dimension."""
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % multiple)).contiguous()


def _words(packed: Tensor, bits_of: Callable[[Tensor, int], Tensor]) -> Tensor:
    """uint8 [experts, num_rows, size / 2] -> int32 [experts, num_rows, words].

    bits_of: of the weights of a word with some number, int32, the bits that they have there.
    """
    words = []
    for each in packed:  # one after the other: they are spread to 32 bits on the way
        nibbles = torch.stack((each & 15, each >> 4), dim=-1).flatten(-2)
        nibbles = _padded(nibbles, BLOCK).view(len(each), -1, 8, WORDS).int()
        parts = [bits_of(nibbles[:, :, i], i) for i in range(8)]
        words.append(torch.stack(parts).sum(dim=0, dtype=torch.int32).flatten(1))
    return torch.stack(words)


def _int4_bits(values: Tensor, number: int) -> Tensor:
    return values << (4 * number)


def _mx_float4_bits(values: Tensor, number: int) -> Tensor:
    half, i = number // 4 * 16, number % 4
    signs, magnitudes = values >> 3, values & 7
    return (signs << (half + SIGN_BITS[i])) + (magnitudes << (half + MAGNITUDE_BITS[i]))


# ---------------------------------------------------------------- in kernels


@triton.jit
def load_tile(
    weight,
    row,
    last_row,
    start,
    size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
):
    """Elements [ROWS, COLUMNS] of rows of `size` from (row, start) on. Rows from `last_row` on, and
    columns from `size` on, are of no meaning, and 0, respectively."""
    if TMA:
        tile = weight.load([row, start])
    else:
        rows = tl.minimum(row + tl.arange(0, ROWS), last_row - 1)
        columns = start + tl.arange(0, COLUMNS)
        places = weight + rows.to(tl.int64)[:, None] * size + columns[None, :]
        if EVEN:
            tile = tl.load(places)
        else:
            tile = tl.load(places, mask=(columns < size)[None, :], other=0.0)
    return tile


@triton.jit
def unpack(words, scales, zeros, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The eight matrices of a block of packed weights.

    Args:
        words: int32 [ROWS, WORDS].
        scales: MX_FLOAT4: int32 [ROWS, 1], the block's exponent fields.
        zeros: INT4: four of int32 [ROWS, 1], the zero points of the block's quarters.

    Returns:
        DTYPE [ROWS, WORDS] each: values of MX_FLOAT4, integers of INT4 without their scales.
    """
    if FORMAT == MX_FLOAT4:
        factors = ()
        for i in tl.static_range(4):
            field = ((scales >> (8 * i)) & 255) << 23
            factors += (field.to(tl.float32, bitcast=True),)  # type: ignore[assignment]
        if ASM:
            found = _mx_float4_by_asm(words, factors)
        else:
            found = ()
            for i in tl.static_range(8):
                half = words >> (i // 4 * 16)
                magnitude = (half >> _MAGNITUDE_BITS[i % 4]) & 7
                bits = (magnitude << 22) | ((half >> _SIGN_BITS[i % 4]) << 31)
                value = bits.to(tl.float32, bitcast=True) * factors[i // 2]
                found += (value.to(DTYPE),)
    elif ASM:
        found = _int4_by_asm(words, zeros)
    else:
        found = ()
        for i in tl.static_range(8):
            value = ((words >> (4 * i)) & 15) - zeros[i // 2]
            found += (value.to(DTYPE),)
    return found


@triton.jit
def _mx_float4_by_asm(words, factors):
    """Two words at a time: sign, exponent and mantissa are moved to where those of two bfloat16
    are, which are multiplied by the factor."""
    return tl.inline_asm_elementwise(
        _TO_BFLOAT16,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r",
        [
            words,
            factors[0].to(tl.bfloat16),
            factors[1].to(tl.bfloat16),
            factors[2].to(tl.bfloat16),
            factors[3].to(tl.bfloat16),
        ],
        (
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _int4_by_asm(words, zeros):
    """Two words at a time: below the bits of 128.0, integers make 128.0 + q, of which 128.0 + zero
    is subtracted."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 low, high, t;
            prmt.b32 low, $8, $9, 0x5410;
            prmt.b32 high, $8, $9, 0x7632;
            and.b32 t, low, 0x000F000F;
            or.b32 t, t, 0x43004300;
            sub.bf16x2 $0, t, $10;
            shr.u32 t, low, 4;
            and.b32 t, t, 0x000F000F;
            or.b32 t, t, 0x43004300;
            sub.bf16x2 $1, t, $10;
            shr.u32 t, low, 8;
            and.b32 t, t, 0x000F000F;
            or.b32 t, t, 0x43004300;
            sub.bf16x2 $2, t, $11;
            shr.u32 t, low, 12;
            and.b32 t, t, 0x000F000F;
            or.b32 t, t, 0x43004300;
            sub.bf16x2 $3, t, $11;
            and.b32 t, high, 0x000F000F;
            or.b32 t, t, 0x43004300;
            sub.bf16x2 $4, t, $12;
            shr.u32 t, high, 4;
            and.b32 t, t, 0x000F000F;
            or.b32 t, t, 0x43004300;
            sub.bf16x2 $5, t, $12;
            shr.u32 t, high, 8;
            and.b32 t, t, 0x000F000F;
            or.b32 t, t, 0x43004300;
            sub.bf16x2 $6, t, $13;
            shr.u32 t, high, 12;
            and.b32 t, t, 0x000F000F;
            or.b32 t, t, 0x43004300;
            sub.bf16x2 $7, t, $13;
        }
        """,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r",
        [
            words,
            (zeros[0] + 128).to(tl.bfloat16),
            (zeros[1] + 128).to(tl.bfloat16),
            (zeros[2] + 128).to(tl.bfloat16),
            (zeros[3] + 128).to(tl.bfloat16),
        ],
        (
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
            tl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )
