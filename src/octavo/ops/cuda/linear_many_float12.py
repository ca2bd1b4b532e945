"""y = x W^T of many tokens with W in 12 bits (float12.py)."""

from __future__ import annotations

from functools import lru_cache

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
from octavo.ops.cuda.quantized_tiles import Division, Tiles
from octavo.ops.cuda.stored_weights import BLOCK, FLOAT12
from octavo.ops.epilogue import Epilogue

_MEMORY = 227_000  # bytes of shared memory, beside barriers and what the end of a tile takes
_BLOCK_BYTES = 2 * 4 * PIECE_WORDS // PIECE_ROWS  # of BLOCK inputs of a row of W
_NUM_SMS = 132
# Microseconds of a step with tiles of so many tokens and rows, and of adding up parts of tiles that
# programs share: those of weights of 4 and 8 bits (quantized_tiles.py), not measured with 12.
_COSTS = {
    (128, 128): (0.97, 6.0),
    (128, 256): (1.7, 16.0),
    (192, 128): (1.27, 8.0),
    (256, 128): (1.4, 13.0),
}
# Dequantizing W costs 3.5 bytes of traffic per weight, however many the tokens are: a seventh of
# the product with so many. Expected, not measured.
_MOST_TOKENS = 2048

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


def linear_many_float12(
    x: Tensor, weight: Float12Weight, bias: Tensor | None, out: Tensor, epilogue: Epilogue
) -> None:
    """Write epilogue(x W^T + b) to out [num_tokens, num_rows].

    Args:
        x: bfloat16 [num_tokens, in_features], of more than 64 tokens; rows aligned to 16 bytes.
        weight: with a gate of a multiple of 16 rows.
        out: bfloat16.
    """
    tiles = choose_tiles(len(x), weight.shape[0], x.shape[1])
    launch(x, weight, bias, out, epilogue, tiles)


def most_tokens(num_rows: int, size: int) -> int:
    """Up to how many tokens linear_many_float12 takes less time than dequantizing W [num_rows,
    size] and multiplying by it."""
    del num_rows, size  # Both take a time that grows with their product.
    return _MOST_TOKENS


@lru_cache(4096)
def choose_tiles(num_tokens: int, num_rows: int, size: int) -> Tiles:
    """Those with which a product with W [num_rows, size] is expected to take the least time."""
    shapes = [each for each in _COSTS if each[0] == 128 or num_tokens > 128]
    options = [tiles_of(*shape, is_shared=shared) for shape in shapes for shared in (False, True)]
    return min(options, key=lambda tiles: _expected(num_tokens, num_rows, size, tiles))


def _expected(num_tokens: int, num_rows: int, size: int, tiles: Tiles) -> float:
    """About how many microseconds a product takes, less what it takes with any tiles."""
    num_blocks = triton.cdiv(size, BLOCK)
    num_tiles = triton.cdiv(num_rows, tiles.rows) * triton.cdiv(num_tokens, tiles.tokens)
    division = Division.of(num_tiles, num_blocks, _NUM_SMS, tiles.is_shared)
    of_step, of_sharing = _COSTS[tiles.tokens, tiles.rows]
    steps = division.num_steps(num_tiles, num_blocks)
    return steps * of_step + (of_sharing if division.num_shared else 0)


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
