"""Weights of bfloat16 in 12 bits: sign, 4 bits of exponent, 7 of mantissa (e4m7).

A row of W shares a power of two, that of its largest weight. A weight of at least 2 ** -14 of it
keeps all its bits. A smaller one, of which a row has hardly one in thousands, is rounded to a
multiple of 2 ** -21 of it: what that changes of a sum is far less than what adding in float32
rounds. So products are those of bfloat16, with three quarters of the bytes.

Tensor cores multiply bfloat16, into which kernels unpack weights in registers. Their left operand
has 8 rows and 64 inputs in a warp's 32 threads as four times two registers, of two neighbouring
inputs each. So a piece of W, of 8 rows and 64 inputs, is stored as the 24 bytes of each thread: one
word for each 16 inputs, with sign and mantissa of four weights, and two words with the exponents of
eight weights each. Shifted by rotation, both kinds lie where bfloat16 has them:

    register i of word `signs`:      signs << 8 i  & MANTISSA
    register i of word `exponents`:  exponents << 4 i & EXPONENT

The sum of both is a bfloat16 with an exponent of 0 to 15; times 2 ** 112 it is W divided by the
row's scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.float12 import PIECE_INPUTS, PIECE_ROWS
from octavo.ops.quantized import chunks

PIECE_WORDS = 192  # int32: of each thread 4 with signs and mantissas, then of each thread 2 others
MANTISSA, EXPONENT = 0x807F807F, 0x07800780
UNIT = 112  # a weight is what a register has, times 2 ** UNIT, times the row's scale

_LOWEST = -14  # exponent of the smallest weight that keeps all its bits
_BITS_OF_MANTISSA = 7


@dataclass(frozen=True, slots=True, eq=False)
class Float12Weight:
    """W [out_features, in_features] in 12 bits."""

    shape: tuple[int, int]
    words: Tensor  # int32 [pieces of 8 rows, in_features / 64, PIECE_WORDS]
    scales: Tensor  # float32 [out_features], powers of two

    @property
    def nbytes(self) -> int:
        """Of words and scales."""
        return self.words.nbytes + self.scales.nbytes


def takes_float12(weight: Tensor) -> bool:
    """Whether W [out_features, in_features] has such a form: with bfloat16 that is finite, and
    whole pieces of inputs."""
    return (
        weight.dtype == torch.bfloat16
        and weight.shape[1] % PIECE_INPUTS == 0
        and bool(all(weight[rows].isfinite().all() for rows in chunks(*weight.shape)))
    )


def pack_float12(weight: Tensor) -> Float12Weight:
    """W bfloat16 [out_features, in_features] that takes_float12, in 12 bits."""
    num_rows, size = weight.shape
    device, num_pieces = weight.device, -(-num_rows // PIECE_ROWS)
    words = torch.empty(
        (num_pieces, size // PIECE_INPUTS, PIECE_WORDS), dtype=torch.int32, device=device
    )
    scales = torch.empty(num_rows, dtype=torch.float32, device=device)
    for rows in chunks(num_rows, size, PIECE_ROWS):
        codes, scales[rows] = _codes(weight[rows])
        codes = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % PIECE_ROWS))
        first = rows.start // PIECE_ROWS
        words[first : first + len(codes) // PIECE_ROWS] = _words(codes)
    return Float12Weight((num_rows, size), words, scales)


def _codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of a bfloat16 with an exponent of 0 to 15, as int32 0 to 65,535, and scales."""
    largest = weight.abs().amax(dim=1).float().clamp_(min=torch.finfo(torch.float32).tiny)
    scales = (largest.view(torch.int32) >> 23 << 23).view(torch.float32)
    values = weight.float() / scales[:, None]
    sizes = values.abs()
    steps = (sizes * 2.0 ** (_BITS_OF_MANTISSA - _LOWEST)).round_().to(torch.int32)
    exact = (sizes.view(torch.int32) >> 16) - (UNIT << _BITS_OF_MANTISSA)
    codes = torch.where(sizes < 2.0**_LOWEST, steps, exact)
    return codes | (weight.signbit().to(torch.int32) << 15), scales


def _words(codes: Tensor) -> Tensor:
    """int32 [rows / 8, inputs / 64, PIECE_WORDS] of codes [rows, inputs]."""
    num_rows, size = codes.shape
    # Of an input in a piece: step of 16, register (its half of 8), thread, place in the register.
    parts = codes.view(num_rows // 8, 8, size // 64, 4, 2, 4, 2).permute(0, 2, 3, 4, 1, 5, 6)
    # [.., step, register, thread], as int64, so that rotations keep all bits
    registers = (parts[..., 0].long() | (parts[..., 1].long() << 16)).flatten(-2)
    signs = _rotated(registers[..., 0, :] & MANTISSA, 0)
    signs = signs | _rotated(registers[..., 1, :] & MANTISSA, 8)
    exponents = torch.zeros_like(registers[:, :, ::2, 0])
    for step in range(2):
        for i in range(2):
            own = registers[:, :, step::2, i] & EXPONENT
            exponents |= _rotated(own, 4 * (2 * step + i))
    by_thread = [each.transpose(-1, -2).flatten(-2) for each in (signs, exponents)]
    joined = torch.cat(by_thread, dim=-1)
    return (joined - ((joined >> 31) << 32)).to(torch.int32)


def _rotated(words: Tensor, count: int) -> Tensor:
    """int64 words of 32 bits, rotated to the right."""
    return ((words >> count) | (words << (32 - count))) & 0xFFFFFFFF


def unpack_float12(stored: Float12Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """W in `dtype`, in plain torch."""
    num_rows, size = stored.shape
    dense = torch.empty(stored.shape, dtype=dtype, device=stored.words.device)
    for rows in chunks(num_rows, size, PIECE_ROWS):
        pieces = stored.words[rows.start // 8 : -(-rows.stop // 8)].long() & 0xFFFFFFFF
        place = pieces.shape[:2]
        signs = pieces[..., :128].reshape(*place, 32, 4).transpose(-1, -2)
        exponents = pieces[..., 128:].reshape(*place, 32, 2).transpose(-1, -2)
        steps = []
        for step in range(4):
            for i in range(2):
                own = _rotated(signs[..., step, :], 32 - 8 * i) & MANTISSA
                shift = 4 * (2 * (step % 2) + i)
                own |= _rotated(exponents[..., step // 2, :], 32 - shift) & EXPONENT
                steps.append(torch.stack((own & 0xFFFF, own >> 16), dim=-1))
        # [row pieces, pieces of inputs, step, register, thread, place]
        codes = torch.stack(steps, dim=2).view(*place, 4, 2, 8, 4, 2)
        codes = codes.permute(0, 4, 1, 2, 3, 5, 6).reshape(-1, size)
        values = _floats(codes)
        dense[rows] = (values[: rows.stop - rows.start] * stored.scales[rows, None]).to(dtype)
    return dense


def _floats(codes: Tensor) -> Tensor:
    """What codes are, times 2 ** UNIT: float32 of int64 0 to 65,535."""
    wide = codes << 16
    bits = (wide - ((wide >> 31) << 32)).to(torch.int32)
    return bits.view(torch.float32) * 2.0**UNIT
