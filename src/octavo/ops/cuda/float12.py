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
import triton
import triton.language as tl
from torch import Tensor

from octavo.float12 import PIECE_INPUTS, PIECE_ROWS
from octavo.ops.quantized import chunks

PIECE_WORDS = 192  # int32: of each thread 4 with signs and mantissas, then of each thread 2 others
MANTISSA, EXPONENT = 0x807F807F, 0x07800780
UNIT = 112  # a weight is what a register has, times 2 ** UNIT, times the row's scale

_LOWEST = -14  # exponent of the smallest weight that keeps all its bits
_BITS_OF_MANTISSA = 7
_SMALLEST_EXACT = tl.constexpr(2.0**_LOWEST)
_STEPS = tl.constexpr(2.0 ** (_BITS_OF_MANTISSA - _LOWEST))
_OFFSET = tl.constexpr(UNIT << _BITS_OF_MANTISSA)
_HALF_MANTISSA, _HALF_EXPONENT = tl.constexpr(MANTISSA & 0xFFFF), tl.constexpr(EXPONENT & 0xFFFF)
_NEAREST = tl.constexpr(1.5 * 2.0**23)  # added and taken away, it leaves the nearest integer
_ROWS, _INPUTS = tl.constexpr(PIECE_ROWS), tl.constexpr(PIECE_INPUTS)
_WORDS = tl.constexpr(PIECE_WORDS)
_PIECES_AT_ONCE = 8  # that a program of the kernel packs


@dataclass(frozen=True, slots=True, eq=False)
class Float12Weight:
    """W [out_features, in_features] in 12 bits."""

    shape: tuple[int, int]
    words: Tensor  # int32 [pieces of 8 rows, in_features / 64, PIECE_WORDS]
    scales: Tensor  # float32 [out_features], powers of two

    @property
    def nbytes(self) -> int:
        """Bytes of words and scales."""
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
    """W bfloat16 [out_features, in_features] that takes_float12, in 12 bits: on a GPU by a kernel,
    and elsewhere in plain torch, which gives the same bits and would take 60 times as long."""
    num_rows, size = weight.shape
    num_groups, num_pieces = -(-num_rows // PIECE_ROWS), size // PIECE_INPUTS
    shape, device = (num_groups, num_pieces, PIECE_WORDS), weight.device
    words = torch.empty(shape, dtype=torch.int32, device=device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=device)
    for rows in chunks(num_rows, size, PIECE_ROWS):
        scales[rows] = _scales(weight[rows])
    if weight.is_cuda:
        launch_packing(weight, scales, words)
        return Float12Weight((num_rows, size), words, scales)
    for rows in chunks(num_rows, size, PIECE_ROWS):
        codes = _codes(weight[rows], scales[rows])
        codes = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % PIECE_ROWS))
        first = rows.start // PIECE_ROWS
        words[first : first + len(codes) // PIECE_ROWS] = _words(codes)
    return Float12Weight((num_rows, size), words, scales)


def launch_packing(weight: Tensor, scales: Tensor, words: Tensor) -> None:
    """Pack W, whose rows have those scales, into the words of a Float12Weight."""
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    num_groups, num_pieces, _ = words.shape
    grid = (num_groups, triton.cdiv(num_pieces, _PIECES_AT_ONCE))
    _pack_kernel[grid](
        weight, scales, words, len(weight), num_pieces, weight.stride(0), PIECES=_PIECES_AT_ONCE
    )


@triton.jit
def _pack_kernel(weight, scales, words, num_rows, num_pieces, stride, PIECES: tl.constexpr):
    """PIECES pieces of a group of 8 rows."""
    group = tl.program_id(0)
    piece = tl.program_id(1) * PIECES + tl.arange(0, PIECES)[:, None]
    is_inside = piece < num_pieces
    thread = tl.arange(0, 32)[None, :]
    row = group * _ROWS + thread // 4 + 0 * piece
    is_weight = is_inside & (row < num_rows)
    # The scale's reciprocal, by its exponent; that of 2 ** 127 is no normal number.
    exponent = tl.load(scales + row, mask=is_weight, other=1.0).to(tl.int32, bitcast=True) >> 23
    factor = ((254 - tl.minimum(exponent, 253)) << 23).to(tl.float32, bitcast=True)
    factors = (factor, tl.where(exponent == 254, 0.5, 1.0))
    start = weight + row.to(tl.int64) * stride + piece * _INPUTS + thread % 4 * 2
    target = words + (group.to(tl.int64) * num_pieces + piece) * _WORDS
    for half in tl.static_range(2):
        exponents = tl.zeros([PIECES, 32], tl.uint32)
        for step in tl.static_range(2 * half, 2 * half + 2):
            signs = tl.zeros([PIECES, 32], tl.uint32)
            for i in tl.static_range(2):
                low = _code(start + 16 * step + 8 * i, is_weight, factors)
                high = _code(start + 16 * step + 8 * i + 1, is_weight, factors)
                own = (low & _HALF_MANTISSA) | ((high & _HALF_MANTISSA) << 16)
                signs |= _rotated_right(own, 8 * i)
                own = (low & _HALF_EXPONENT) | ((high & _HALF_EXPONENT) << 16)
                exponents |= _rotated_right(own, 4 * (2 * (step % 2) + i))
            tl.store(target + thread * 4 + step, signs.to(tl.int32, bitcast=True), mask=is_inside)
        place = target + 128 + thread * 2 + half
        tl.store(place, exponents.to(tl.int32, bitcast=True), mask=is_inside)


@triton.jit
def _code(weights, mask, factors):
    """As _codes, uint32 of weights at these places."""
    bits = tl.load(weights, mask=mask, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
    values = ((bits & 0x7FFF) << 16).to(tl.float32, bitcast=True)
    sizes = values * factors[0] * factors[1]
    steps = ((sizes * _STEPS + _NEAREST) - _NEAREST).to(tl.int32)
    exact = (sizes.to(tl.int32, bitcast=True) >> 16) - _OFFSET
    code = tl.where(sizes < _SMALLEST_EXACT, steps, exact)
    return (code | (bits & 0x8000)).to(tl.uint32, bitcast=True)


@triton.jit
def _rotated_right(words, COUNT: tl.constexpr):
    if COUNT > 0:
        words = (words >> COUNT) | (words << (32 - COUNT))
    return words


def _scales(weight: Tensor) -> Tensor:
    """float32 [rows]: of the largest weight of each row, its power of two."""
    largest = weight.abs().amax(dim=1).float().clamp_(min=torch.finfo(torch.float32).tiny)
    return (largest.view(torch.int32) >> 23 << 23).view(torch.float32)


def _codes(weight: Tensor, scales: Tensor) -> Tensor:
    """The bits of a bfloat16 with an exponent of 0 to 15, as int32 0 to 65,535."""
    values = weight.float() / scales[:, None]
    sizes = values.abs()
    steps = (sizes * 2.0 ** (_BITS_OF_MANTISSA - _LOWEST)).round_().to(torch.int32)
    exact = (sizes.view(torch.int32) >> 16) - (UNIT << _BITS_OF_MANTISSA)
    codes = torch.where(sizes < 2.0**_LOWEST, steps, exact)
    return codes | (weight.signbit().to(torch.int32) << 15)


def _words(codes: Tensor) -> Tensor:
    """int32 [rows / 8, inputs / 64, PIECE_WORDS] of codes [rows, inputs]."""
    num_rows, size = codes.shape
    # An input's place in a piece: step of 16, register (its half of 8), thread, half register.
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
