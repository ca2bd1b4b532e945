"""Weights of e4m3 in 7 bits: sign, 3 bits of exponent, 3 of mantissa (e3m3).

A row of FP8 weights is scaled so that its largest one is 448. What lies from 4 to 448 has 7
exponents, and what lies below is a multiple of 1/2, if it was rounded to these (ScaledFloat8): an
e3m3 with subnormal numbers has all of them. Divided by 2 ** UNIT they are e4m3, whose exponent's
highest bit is 0, so that they are stored without it: products are those of e4m3, with seven eighths
of the bytes. Sums are, too, but where all products that tensor cores add at once are of weights
below 4: they align products by exponents, and all of the copy's subnormal numbers have the same.

Tensor cores take e4m3, which kernels unpack in registers. Their left operand has 8 rows and 128
inputs in a warp's 32 threads as eight registers each, of four neighbouring inputs. So a piece of W,
of 8 rows and 128 inputs, is stored as seven words of each thread. Word i is register i, and where
the bit that is 0 would be, it has a bit of the eighth register:

    register i of 7:  word i & ~FREE
    register 7:       of word i, FREE moved by SHIFTS[i]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.float7 import PIECE_INPUTS, PIECE_ROWS, UNIT
from octavo.ops.cuda.hopper import allocate_tiles, fetch_tile, recast, swizzled_descriptor
from octavo.ops.quantized import chunks, in_float7

PIECE_WORDS = 224  # int32: four of each thread, then two of each thread, then one of each
PARTS = (128, 64, 32)  # words of a piece that are fetched together
FREE = 0x40404040
# Bits by which FREE moves to those of the eighth register: 7, and 5 to 0.
SHIFTS = (1, -1, -2, -3, -4, -5, -6)

_ROWS, _INPUTS = tl.constexpr(PIECE_ROWS), tl.constexpr(PIECE_INPUTS)
_WORDS = tl.constexpr(PIECE_WORDS)
_PARTS = tl.constexpr(PARTS)
_FREE = tl.constexpr(FREE)
_PIECES_AT_ONCE = 8  # that a program of the kernel packs


@dataclass(frozen=True, slots=True, eq=False)
class Float7Weight:
    """W [out_features, in_features] in 7 bits, without its scales."""

    shape: tuple[int, int]
    words: Tensor  # int32 [pieces of 8 rows, in_features / 128, PIECE_WORDS]

    @property
    def nbytes(self) -> int:
        """Bytes of the words."""
        return self.words.nbytes

    def descriptors(self, rows: int) -> tuple[TensorDescriptor, ...]:
        """The TMA descriptors for fetching the words of so many rows of a block of inputs, by
        PARTS."""
        lines = self.words.view(len(self.words), -1)
        pieces = rows // PIECE_ROWS
        return tuple(swizzled_descriptor(lines, [pieces, each], 0) for each in PARTS)


def takes_float7(weight: Tensor) -> bool:
    """Whether W, e4m3 [out_features, in_features], has such a form."""
    if weight.shape[1] % PIECE_INPUTS:
        return False
    return all(bool(_is_kept(weight[rows])) for rows in chunks(*weight.shape))


def _is_kept(weight: Tensor) -> Tensor:
    values = weight.float()
    return (in_float7(values).float() * 2.0**UNIT == values).all()


def pack_float7(weight: Tensor) -> Float7Weight:
    """W, e4m3 [out_features, in_features] that takes_float7, in 7 bits: on a GPU by a kernel, and
    elsewhere in plain torch, which gives the same bits."""
    num_rows, size = weight.shape
    num_groups = -(-num_rows // PIECE_ROWS)
    shape = (num_groups, size // PIECE_INPUTS, PIECE_WORDS)
    words = torch.empty(shape, dtype=torch.int32, device=weight.device)
    if weight.is_cuda:
        launch_packing(weight, words)
        return Float7Weight((num_rows, size), words)
    for rows in chunks(num_rows, size, PIECE_ROWS):
        codes = in_float7(weight[rows].float()).view(torch.uint8)
        codes = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % PIECE_ROWS))
        first = rows.start // PIECE_ROWS
        words[first : first + len(codes) // PIECE_ROWS] = _words(codes)
    return Float7Weight((num_rows, size), words)


def launch_packing(weight: Tensor, words: Tensor) -> None:
    """Pack W, dense, into the words of a Float7Weight."""
    num_groups, num_blocks, _ = words.shape
    grid = (num_groups, triton.cdiv(num_blocks, _PIECES_AT_ONCE))
    _pack_kernel[grid](
        weight.view(torch.int32), words, len(weight), num_blocks, PIECES=_PIECES_AT_ONCE
    )


@triton.jit
def _pack_kernel(weight, words, num_rows, num_blocks, PIECES: tl.constexpr):
    """PIECES pieces of a group of 8 rows; W by words of four inputs."""
    group = tl.program_id(0)
    block = tl.program_id(1) * PIECES + tl.arange(0, PIECES)[:, None]
    thread = tl.arange(0, 32)[None, :]
    row = group * _ROWS + thread // 4 + 0 * block
    is_inside = block < num_blocks
    source = weight + (row.to(tl.int64) * num_blocks + block) * 32 + thread % 4
    is_weight = is_inside & (row < num_rows)
    target = words + (group.to(tl.int64) * num_blocks + block) * _WORDS
    last = _codes_of_word(tl.load(source + 28, mask=is_weight, other=0))
    for i in tl.static_range(7):
        own = _codes_of_word(tl.load(source + 4 * i, mask=is_weight, other=0))
        if i == 0:
            own |= (last >> 1) & _FREE
        else:
            own |= (last << i) & _FREE
        if i < 4:
            place = thread * 4 + i
        elif i < 6:
            place = 128 + thread * 2 + i - 4
        else:
            place = 192 + thread
        tl.store(target + place, own, mask=is_inside)


@triton.jit
def _codes_of_word(word):
    """The codes of four e4m3 numbers in a word: their bytes divided by 2 ** UNIT."""
    codes = word & 0
    for i in tl.static_range(4):
        byte = (word >> (8 * i)) & 0xFF
        size = byte & 0x7F
        # From 4 on an exponent less; from 2, from 1 and from 1/2 on what they have of halves.
        halves = tl.where(size >= 0x40, 4 + (size - 0x40) // 2, 2 + (size - 0x38) // 4)
        halves = tl.where(size >= 0x38, halves, (size >= 0x30).to(tl.int32))
        code = tl.where(size >= 0x48, size - 0x40, halves) | (byte & 0x80)
        codes |= code << (8 * i)
    return codes


def _words(codes: Tensor) -> Tensor:
    """int32 [rows / 8, inputs / 128, PIECE_WORDS] of codes uint8 [rows, inputs]."""
    num_rows, size = codes.shape
    # An input's place in a piece: register, thread, byte.
    parts = codes.view(num_rows // 8, 8, size // 128, 8, 4, 4).permute(0, 2, 3, 1, 4, 5)
    registers = parts.flatten(3, 4).contiguous()  # [.., register, thread, byte]
    last = registers[:, :, 7]
    for i, shift in enumerate(SHIFTS):
        registers[:, :, i] |= ((last >> (6 + shift)) & 1) << 6
    place = registers.shape[:2]
    by_thread = [
        registers[:, :, some].transpose(2, 3).reshape(*place, -1)
        for some in (slice(0, 4), slice(4, 6), slice(6, 7))
    ]
    return torch.cat(by_thread, dim=-1).view(torch.int32)


def unpack_float7(stored: Float7Weight) -> Tensor:
    """W, e4m3, in plain torch."""
    num_rows, size = stored.shape
    weight = torch.empty(stored.shape, dtype=torch.float8_e4m3fn, device=stored.words.device)
    for rows in chunks(num_rows, size, PIECE_ROWS):
        pieces = stored.words[rows.start // 8 : -(-rows.stop // 8)].view(torch.uint8)
        place = pieces.shape[:2]
        parts = torch.split(pieces, [4 * each for each in PARTS], dim=-1)
        words = [each.view(*place, 32, -1, 4).transpose(2, 3) for each in parts]
        registers = torch.cat(words, dim=2)  # [.., 7, thread, byte]
        last = torch.zeros_like(registers[:, :, 0])
        for i, shift in enumerate(SHIFTS):
            last |= ((registers[:, :, i] >> 6) & 1) << (6 + shift)
        registers = torch.cat((registers & 0xBF, last.unsqueeze(2)), dim=2)
        codes = registers.view(*place, 8, 8, 4, 4).permute(0, 3, 1, 2, 4, 5).reshape(-1, size)
        values = codes[: rows.stop - rows.start].contiguous().view(torch.float8_e4m3fn)
        weight[rows] = (values.float() * 2.0**UNIT).to(torch.float8_e4m3fn)
    return weight


def _unpacking() -> str:
    """PTX: seven words -> eight registers."""
    lines = [f".reg .b32 t, r; and.b32 r, $8, {FREE:#x}; shl.b32 r, r, 1"]
    for i, shift in enumerate(SHIFTS):
        lines.append(f"and.b32 ${i}, ${8 + i}, {FREE ^ 0xFFFFFFFF:#x}")
        if i:
            moved = 0x01010101 << (6 + shift)
            lines.append(f"shr.u32 t, ${8 + i}, {-shift}")
            lines.append(f"lop3.b32 r, t, {moved:#x}, r, 0xEA")
    lines.append("mov.b32 $7, r")
    return "{" + ";\n".join(lines) + ";}"


_UNPACK = tl.constexpr(_unpacking())


@gluon.jit
def descriptors_of(weight, pairs, singles):
    """The descriptors of W: one of it as it is, or those of PARTS of its words."""
    return (weight,) if pairs is None else (weight, pairs, singles)


@gluon.jit
def allocate(sources, COUNT: gl.constexpr, BLOCKS: gl.constexpr = 1):
    """COUNT tiles in shared memory, as the descriptors fetch them; words by BLOCKS blocks of
    inputs."""
    tiles = ()
    for i in gl.static_range(len(sources)):
        tiles += (allocate_tiles(sources[i], COUNT * (1 if len(sources) == 1 else BLOCKS)),)  # type: ignore[assignment]
    return tiles


@gluon.jit
def fetch_rows(
    sources, tiles, bar, row, place, step, BLOCKS: gl.constexpr = 1, DOWN: gl.constexpr = 0
):
    """Load a tile of W, of a step's inputs, from `row` on: as it is, or BLOCKS of inputs in words.

    DOWN: of W as it is, see linear_hopper.py's `produce`.
    """
    if len(sources) == 1:
        ACROSS: gl.constexpr = 0 if DOWN else sources[0].block_type.shape[1]
        fetch_tile(sources[0], [row + step * DOWN, step * ACROSS], bar, tiles[0].index(place))
    else:
        for j in gl.static_range(BLOCKS):
            block = step * BLOCKS + j
            _fetch_words(sources, tiles, bar, row // _ROWS, block, place * BLOCKS + j)


@gluon.jit
def _fetch_words(sources, tiles, bar, piece, block, place):
    """Load a tile of W: pieces from `piece` on, of a block of inputs."""
    word = block * _WORDS
    fetch_tile(sources[0], [piece, word], bar, tiles[0].index(place))
    fetch_tile(sources[1], [piece, word + _PARTS[0]], bar, tiles[1].index(place))
    fetch_tile(sources[2], [piece, word + _PARTS[0] + _PARTS[1]], bar, tiles[2].index(place))


@gluon.jit
def _bytes_of(tile, REGISTERS: gl.constexpr, WARPS: gl.constexpr):
    """A thread's words of a part, as bytes: int8 [pieces, 4 * words]."""
    PIECES: gl.constexpr = tile.shape[0]
    BYTES: gl.constexpr = 4 * tile.shape[1]
    OF_THREAD: gl.constexpr = BYTES // 32
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        REGISTERS,
        [
            [0, OF_THREAD],
            [0, 2 * OF_THREAD],
            [0, 4 * OF_THREAD],
            [0, 8 * OF_THREAD],
            [0, 16 * OF_THREAD],
        ],
        WARPS,
        [],
        [PIECES, BYTES],
    )
    AS_BYTES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return recast(tile, gl.int8, [PIECES, BYTES], AS_BYTES).load(LAYOUT)


@gluon.jit
def _as_singles(word, singles):
    """One word of each thread [pieces, 32, 4], as the threads have `singles` [pieces, 128]."""
    values = word.reshape(singles.shape)
    return gl.convert_layout(values, singles.type.layout, assert_trivial=True)


@gluon.jit
def _registers(tiles, place):
    """The eight registers of each thread, of the tile at that place: int8 [pieces, 128] each."""
    PIECES: gl.constexpr = 2 * gl.num_warps()
    # Each warp has two neighbouring pieces, of which each thread has its words.
    WARPS: gl.constexpr = [[2, 0], [4, 0]] if gl.num_warps() == 4 else [[2, 0], [4, 0], [8, 0]]
    four = _bytes_of(tiles[0].index(place), [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0]], WARPS)
    two = _bytes_of(tiles[1].index(place), [[0, 1], [0, 2], [0, 4], [1, 0]], WARPS)
    one = _bytes_of(tiles[2].index(place), [[0, 1], [0, 2], [1, 0]], WARPS)
    four = four.reshape([PIECES, 32, 2, 2, 4]).permute((0, 1, 4, 3, 2))
    low, high = gl.split(four)  # words 0 and 1, words 2 and 3
    word0, word1 = gl.split(low)
    word2, word3 = gl.split(high)
    word4, word5 = gl.split(two.reshape([PIECES, 32, 2, 4]).permute((0, 1, 3, 2)))
    return gl.inline_asm_elementwise(
        _UNPACK,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r",
        [
            _as_singles(word0, one),
            _as_singles(word1, one),
            _as_singles(word2, one),
            _as_singles(word3, one),
            _as_singles(word4, one),
            _as_singles(word5, one),
            one,
        ],
        dtype=(gl.int8,) * 8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _operand(low, high, NUM: gl.constexpr, LAYOUT: gl.constexpr):
    """Registers, joined by pairs up to two tensors of those with even and with odd numbers, as the
    left operand of 16 NUM inputs."""
    PIECES: gl.constexpr = 2 * gl.num_warps()
    values = gl.join(low, high)
    # Row and column of the thread, byte; the register's bits.
    if NUM == 8:
        values = values.reshape([PIECES, 8, 4, 4, 2, 2, 2]).permute((0, 1, 4, 5, 6, 2, 3))
    else:
        values = values.reshape([PIECES, 8, 4, 4, 2, 2]).permute((0, 1, 4, 5, 2, 3))
    values = values.reshape([PIECES * _ROWS, 16 * NUM]).to(gl.float8e4nv, bitcast=True)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, k_width=4)
    return gl.convert_layout(values, OPERAND, assert_trivial=True)


@gluon.jit
def left_operand(tiles, place, LAYOUT: gl.constexpr):
    """The left operand, e4m3 [rows, 128], of the tile at that place: W / 2 ** UNIT."""
    parts = _registers(tiles, place)
    even = gl.join(gl.join(parts[0], parts[4]), gl.join(parts[2], parts[6]))
    odd = gl.join(gl.join(parts[1], parts[5]), gl.join(parts[3], parts[7]))
    return _operand(even, odd, 8, LAYOUT)


@gluon.jit
def left_halves(tiles, place, LAYOUT: gl.constexpr):
    """The same in two halves, e4m3 [rows, 64] each."""
    parts = _registers(tiles, place)
    first = _operand(gl.join(parts[0], parts[2]), gl.join(parts[1], parts[3]), 4, LAYOUT)
    last = _operand(gl.join(parts[4], parts[6]), gl.join(parts[5], parts[7]), 4, LAYOUT)
    return first, last
