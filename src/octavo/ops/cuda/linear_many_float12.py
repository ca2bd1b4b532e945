"""y = x W^T of many tokens with W in 12 bits (float12.py)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.float12 import (
    EXPONENT,
    MANTISSA,
    PIECE_INPUTS,
    PIECE_ROWS,
    PIECE_WORDS,
    UNIT,
    Float12Weight,
)
from octavo.ops.cuda.linear_hopper import swizzled_descriptor
from octavo.ops.cuda.linear_hopper_persistent import SIGN_WORDS
from octavo.ops.cuda.linear_hopper_quantized import SCALE_RESULT
from octavo.ops.cuda.linear_persistent import Operand, launch_persistent
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.quantized_tiles import Tiles
from octavo.ops.cuda.stored_weights import BLOCK, FLOAT12
from octavo.ops.epilogue import Epilogue

_MANTISSA = tl.constexpr(MANTISSA)
_EXPONENT = tl.constexpr(EXPONENT)
_UNIT = tl.constexpr(2.0**UNIT)
_PIECE_WORDS = tl.constexpr(PIECE_WORDS)


@triton.jit
def _values(signs, exponents, rotation: tl.constexpr, count: tl.constexpr, factors):
    """The pairs of neighbours that two words have at a place, in a new last dimension."""
    own = signs
    if count:
        own = (signs << 8) | (signs >> 24)
    shared = exponents
    if rotation:
        shared = (exponents << rotation) | (exponents >> (32 - rotation))
    both = (own & _MANTISSA) | (shared & _EXPONENT)
    pairs = tl.join(both << 16, both & 0xFFFF0000).to(tl.float32, bitcast=True)
    return (pairs * _UNIT * factors).to(tl.bfloat16)


@triton.jit
def _dequantize_float12_kernel(
    words,
    scales,
    out,
    num_rows,
    size,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes PIECES pieces of 8 rows and 64 inputs, side by side."""
    allow_next(PDL)
    num_pieces = size // 64
    first = tl.program_id(1) * PIECES
    pieces = first + tl.arange(0, PIECES)
    source = words + (tl.program_id(0).to(tl.int64) * num_pieces + pieces[:, None]) * _PIECE_WORDS
    inside = (pieces < num_pieces)[:, None]
    wait_previous(PDL)
    signs = tl.load(source + tl.arange(0, 128)[None, :], mask=inside, other=0)
    exponents = tl.load(source + 128 + tl.arange(0, 64)[None, :], mask=inside, other=0)
    signs = signs.to(tl.uint32, bitcast=True)
    exponents = tl.reshape(exponents.to(tl.uint32, bitcast=True), [PIECES, 32, 2])
    even, odd = tl.split(tl.reshape(signs, [PIECES, 32, 2, 2]))
    rows = tl.program_id(0) * 8 + tl.arange(0, 8)
    factors = tl.load(scales + rows, mask=rows < num_rows, other=0.0)
    factors = tl.reshape(tl.broadcast_to(factors[:, None], [8, 4]), [32])[None, :, None, None]
    values = tl.join(
        tl.join(_values(even, exponents, 0, 0, factors), _values(even, exponents, 4, 1, factors)),
        tl.join(_values(odd, exponents, 8, 0, factors), _values(odd, exponents, 12, 1, factors)),
    )
    # [piece, row, pair of inputs, pair of steps, input, octet, step]
    values = tl.reshape(values, [PIECES, 8, 4, 2, 2, 2, 2])
    values = tl.reshape(tl.permute(values, (1, 0, 3, 6, 5, 2, 4)), [8, PIECES * 64])
    columns = first * 64 + tl.arange(0, PIECES * 64)
    places = out + rows.to(tl.int64)[:, None] * size + columns[None, :]
    tl.store(places, values, mask=(rows < num_rows)[:, None] & (columns < size)[None, :])


def dequantize_float12(weight: Float12Weight, out: Tensor) -> None:
    """Write W to out, bfloat16 [out_features, in_features]."""
    num_rows, size = weight.shape
    pieces = 8
    grid = (len(weight.words), triton.cdiv(size // PIECE_INPUTS, pieces))
    _dequantize_float12_kernel[grid](
        weight.words,
        weight.scales,
        out,
        num_rows,
        size,
        PIECES=pieces,
        num_warps=4,
        **launch_options(out.device),
    )


def launch(
    x: Tensor,
    weight: Float12Weight,
    bias: Tensor | None,
    out: Tensor,
    epilogue: Epilogue,
    tiles: Tiles,
) -> None:
    """Run linear_hopper_persistent's kernel."""
    rows = tiles.rows // 2 if epilogue.is_gated else tiles.rows
    lines, pieces = weight.words.view(len(weight.words), -1), rows // PIECE_ROWS
    signs = swizzled_descriptor(lines, [pieces, SIGN_WORDS], 0)
    exponents = swizzled_descriptor(lines, [pieces, PIECE_WORDS - SIGN_WORDS], 0)
    operand = Operand(
        (signs, exponents),
        weight.scales,
        weight.scales,
        (1, 1, 1),
        1,
        FORMAT=FLOAT12,
        SCALE=SCALE_RESULT,
        HAS_ZEROS=False,
        PARTS=1,
        UNPACK_LOW="",
        UNPACK_HIGH="",
    )
    launch_persistent(x, operand, bias, out, epilogue, tiles)


_MEMORY = 227_000  # beside barriers and what the end of a tile takes
_BLOCK_BYTES = 2 * 4 * PIECE_WORDS // PIECE_ROWS  # of BLOCK inputs of a row of W


def tiles_of(tokens: int, rows: int, is_shared: bool) -> Tiles:
    """Of linear_hopper_persistent.py's kernel, with as many stages as fit."""
    num_bytes, half_bytes = _BLOCK_BYTES * rows, BLOCK * tokens
    halves = 1 if rows * tokens > 192 * 128 else 2  # there is no room for enough larger stages
    if halves == 1:
        stages = 3 if rows == 128 else 2
        x_stages = (_MEMORY - stages * num_bytes) // half_bytes
    else:
        stages = x_stages = _MEMORY // (num_bytes + 2 * half_bytes)
    return Tiles(*(tokens, rows, stages, 8), x_stages=x_stages, halves=halves, is_shared=is_shared)
