"""How MXFP4 experts lie in the memory of a Hopper GPU, whose tensor cores take them as e4m3.

What an e2m1 number times a power of two is in e4m3 is looked up in a table of eight bytes, to whose
exponents the scale is added, so that nothing has to be multiplied (experts_mx_hopper.py). That is
exact as long as the scales of a row lie within a factor of 2^11: the largest of them is that of the
whole row, and is applied to its sums.

Rows are stored in tiles: ROWS of one matrix and as many of another one, gates and the ups that
belong to them, or the first and the second half of the down projection. What a tile has of BLOCK
inputs is contiguous, and so are its scales. A thread of the tensor cores has, of each 32 inputs of
a row, those of one word: number 4 h + j of the word c of thread t is that of input
32 c + 16 h + 4 t + j. Its magnitude lies in bits 4 (4 h + j) to 4 (4 h + j) + 2, and its sign in
bit 8 j + 7 or, in the second half (h = 1), in bit 8 j + 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.ops.cuda.expert_weights import BLOCK
from octavo.ops.epilogue import Epilogue
from octavo.ops.quantized import LATTER, MX_BLOCK, MxFloat4

ROWS = 64  # of each matrix in a tile
MAX_SHIFT = 11  # of exponents within a row: from 0.5 as the smallest normal number to 6 below 448
# The code of 0.5 is 8, with a shift of 0: 2^-6 in e4m3. So numbers are 2^-5 times what they stand
# for, and e2m1's exponents are biased by 127.
_BIAS = 127 - 5 + MAX_SHIFT
_GROUPS = BLOCK // MX_BLOCK


def _table_lookup(word: str, shifts: str, c: int, small: str, large: str) -> list[str]:
    """PTX: of 8 numbers of a word, magnitudes of the first 4 from the table -> the octets of t, and
    those of the others, as places in the table -> high.

    Args:
        shifts: register whose octet c has the word's shift.
        small, large: the table without a shift: of 0, 0.5, 1 and 1.5, and of 2, 3, 4 and 6.
    """
    return [
        f"prmt.b32 shift, {shifts}, 0, 0x444{c};",
        f"mad.lo.u32 small, shift, 0x01010100, {small};",
        f"mad.lo.u32 large, shift, 0x01010101, {large};",
        f"and.b32 low, {word}, 0x77777777;",
        "shr.u32 high, low, 16;",
        "prmt.b32 t, small, large, low;",
    ]


def _assembly() -> str:
    """PTX: words $8 to $11 of one row, with the shifts of its four groups in the octets of $12, ->
    four e4m3 in each of $0 to $7, of which 2 c and 2 c + 1 are those of word c."""
    lines = [".reg .b32 low, high, shift, small, large, t;"]
    for c in range(4):
        word = f"${8 + c}"
        lines += [
            *_table_lookup(word, "$12", c, "0x14100800", "0x24201C18"),
            f"lop3.b32 ${2 * c}, {word}, 0x80808080, t, 0xEA;",
            "prmt.b32 t, small, large, high;",
            f"shl.b32 high, {word}, 4;",
            f"lop3.b32 ${2 * c + 1}, high, 0x80808080, t, 0xEA;",
        ]
    return "{" + "\n".join(lines) + "}"


_TO_FLOAT8 = tl.constexpr(_assembly())
LOW_FACTOR = tl.constexpr(LATTER)  # how much larger the second number of an input is kept
_BLOCK = tl.constexpr(BLOCK)


@gluon.jit
def to_float8(words, shifts, LAYOUT: gl.constexpr):
    """Words int32 [ROWS, 16], in order of t and c, and shifts int32 [ROWS] as e4m3 [ROWS, BLOCK],
    the tensor cores' left operand in registers."""
    WORDS: gl.constexpr = words.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, k_width=4)
    none = gl.zeros(words.shape, gl.int32, WORDS)
    # Eight tensors e4m3 [ROWS, 16], one for each word c and half h.
    parts = gl.inline_asm_elementwise(
        _TO_FLOAT8,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [words, none + shifts[:, None]],
        dtype=(gl.float8e4nv,) * 8,
        is_pure=True,
        pack=4,
    )
    first = gl.join(gl.join(parts[0], parts[4]), gl.join(parts[2], parts[6]))
    second = gl.join(gl.join(parts[1], parts[5]), gl.join(parts[3], parts[7]))
    values = gl.join(first, second)  # [ROWS, 16, c / 2, c % 2, h]
    values = values.permute((0, 2, 3, 4, 1)).reshape([words.shape[0], _BLOCK])
    return gl.convert_layout(values, OPERAND, assert_trivial=True)


@gluon.jit
def split_in_two(values):
    """float32 below 256 -> e4m3, and what is left, LOW_FACTOR times as large, as e4m3.

    Numbers are rounded to e4m3's bits before they are converted, by a number that is added and
    subtracted again: the ptxas of Triton 3.6 loses half of those that are converted, and back
    again to be subtracted.
    """
    bits = values.to(gl.int32, bitcast=True) & 0x7F800000
    # 1.5 * 2^(e + 20) of a number with the exponent e, or of the least normal one, 2^-6.
    bits = gl.maximum(bits, 0x3C800000) + 0x0A400000
    large = bits.to(gl.float32, bitcast=True)
    high = (values + large) - large
    return high.to(gl.float8e4nv), ((values - high) * LOW_FACTOR).to(gl.float8e4nv)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTables:
    """A matrix W [num_rows, size] of each expert."""

    words: Tensor  # int32 [experts * tiles * blocks * ROWS, 32]: 16 words of each matrix's row
    # int32 [experts * tiles * blocks * ROWS / 16, 32]: of each 16 rows, by row r of 8, matrix, and
    # half of the 16: four shifts, times 8.
    shifts: Tensor
    factors: Tensor  # float32 [experts, num_rows]
    size: int
    num_first: int  # rows of the first matrix; the second one has the others

    @property
    def num_rows(self) -> int:
        """Rows of each expert."""
        return self.factors.shape[1]

    @property
    def num_tiles(self) -> int:
        """Tiles of each expert."""
        return -(-self.num_first // ROWS)

    @property
    def num_blocks(self) -> int:
        """Blocks of BLOCK inputs."""
        return -(-self.size // BLOCK)

    @classmethod
    def of(cls, form: MxFloat4, num_first: int | None = None) -> ExpertTables | None:
        """Arrange weights [experts, num_rows, size] for the kernel.

        Args:
            num_first: gates, which the ups follow. None: tiles are of two halves of the rows.

        Returns:
            None, if some row's scales are too far from each other.
        """
        num_rows, size = form.shape[1:]
        if num_first is None:
            num_first = -(-num_rows // (2 * ROWS)) * ROWS
        found = [_scales(*each) for each in zip(form.packed, form.exponents, strict=True)]
        if not all(is_exact for _, _, is_exact in found):
            return None
        parts = [
            (_words(packed, num_first), _shifts(shifts, num_first))
            for packed, (shifts, _, _) in zip(form.packed, found, strict=True)
        ]
        words, shifts = (torch.cat(each) for each in zip(*parts, strict=True))
        factors = torch.stack([factors for _, factors, _ in found])
        return cls(words, shifts, factors, size, num_first)


class ExpertProjection(NamedTuple):
    """Gates and ups, or down, of all experts: epilogue(x W^T + bias)."""

    tables: ExpertTables
    bias: Tensor | None  # [experts, num_rows]
    epilogue: Epilogue


def _scales(packed: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor, bool]:
    """An expert's shifts uint8 [num_rows, groups], times 8, its rows' factors, and whether all
    weights are what they were."""
    is_used = ((packed & 0x77) != 0).view(*exponents.shape, MX_BLOCK // 2).any(dim=-1)
    used = torch.where(is_used, exponents, 0).int()
    top = used.amax(dim=1, keepdim=True)
    shifts = torch.where(is_used, used - top + MAX_SHIFT, 0)
    factors = torch.exp2((top[:, 0] - _BIAS).float())
    return (shifts * 8).to(torch.uint8), factors, bool((shifts >= 0).all())


def _in_tiles(values: Tensor, num_first: int) -> Tensor:
    """[num_rows, ...] -> [tiles, 2, ROWS, ...], with zeros where a matrix has no more rows."""
    num = -(-num_first // ROWS) * ROWS
    halves = (values[:num_first], values[num_first:])
    padded = [F.pad(each, (0, 0) * (each.dim() - 1) + (0, num - len(each))) for each in halves]
    tiles = torch.stack(padded).view(2, num // ROWS, ROWS, *values.shape[1:])
    return tiles.transpose(0, 1)


def _words(packed: Tensor, num_first: int) -> Tensor:
    """uint8 [num_rows, size / 2] -> ExpertTables.words of one expert."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    nibbles = F.pad(nibbles, (0, -nibbles.shape[1] % BLOCK)).int()
    nibbles = nibbles.view(len(packed), -1, _GROUPS, 2, 4, 4)  # by block, c, h, t, j
    words = torch.zeros_like(nibbles[:, :, :, 0, :, 0])
    for h in range(2):
        for j in range(4):
            values = nibbles[:, :, :, h, :, j]
            words |= (values & 7) << (16 * h + 4 * j)
            words |= (values >> 3) << (8 * j + (7, 3)[h])
    tiles = _in_tiles(words.transpose(2, 3).flatten(2), num_first)  # [tiles, 2, ROWS, blocks, 16]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1, 32)


def _shifts(shifts: Tensor, num_first: int) -> Tensor:
    """uint8 [num_rows, groups] -> ExpertTables.shifts of one expert."""
    octets = F.pad(shifts, (0, -shifts.shape[1] % _GROUPS)).contiguous()
    fields = octets.view(torch.int32)  # [num_rows, blocks]
    tiles = _in_tiles(fields, num_first)  # [tiles, 2, ROWS, blocks]
    tiles = tiles.reshape(len(tiles), 2, ROWS // 16, 2, 8, -1)
    return tiles.permute(0, 5, 2, 4, 1, 3).reshape(-1, 32)
