"""y = x W^T of one token, with W in packed integers of 4 bits, bound by reading W.

A program computes a few rows of W, and its warps share their inputs. Its words of W are on their
way to registers before the preceding kernels have ended (pdl.py), because the memory would be idle
until then; each thread takes those that it needs as the left operand of tensor cores.

These multiply integers of 8 bits, which three instructions make of eight weights; numbers of 16
bits take eleven. So each warp makes two such integers of each of its inputs: 256 high + low, times
a scale of the block of 128 inputs. They miss an input by some 2^-16 of the largest one in its
block, at most, and what is added up in a block is exact.

The columns of the right operand are the eight blocks of a warp, each of which four threads have
just where they have made the integers. Of its product with a block of W only this block's column is
of use. This takes more products than one column would, but no shared memory, and no warp waits for
another one before the end.

Both operands of a product may have the inputs in any order, if it is the same. A thread has four
neighbouring words of a row. They hold two pairs of neighbouring inputs of each of the eight planes
(stored_weights.py): of a pair, the first word has four planes, and the second one the others. The
even integers of a word are four octets of one register, and the odd ones of another.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from octavo.ops.cuda.epilogues_hopper import finish
from octavo.ops.cuda.linear_hopper_quantized import interleave, stacked_rows
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.quantize import ROUNDER, SMALLEST_SIZE
from octavo.ops.cuda.stored_weights import BLOCK, CHUNK_ROWS, INT4, StoredWeight
from octavo.ops.epilogue import Epilogue
from octavo.ops.quantized import LARGEST_INTEGER

BLOCKS = 8  # of a warp, at most: columns of the right operand
_REGISTERS = 168  # of a thread: three programs share an SM; the compiler takes more for zero points

_BLOCK = tl.constexpr(BLOCK)
_BLOCKS = tl.constexpr(BLOCKS)
_PLANES = tl.constexpr(8)
_WIDTH = tl.constexpr(16)  # words of a block, and inputs of a plane
_CHUNK_ROWS = tl.constexpr(CHUNK_ROWS)
_CHUNK = tl.constexpr(CHUNK_ROWS * 16)  # words
_LARGEST = tl.constexpr(LARGEST_INTEGER)
# Four such sums -> four octets `high`, and four `low`.
_SPLIT = tl.constexpr("""{
    .reg .b32 a, b, s;
    mov.b32 s, 0x80808080;
    prmt.b32 a, $2, $3, 0x0051;
    prmt.b32 b, $4, $5, 0x0051;
    prmt.b32 $0, a, b, 0x5410;
    prmt.b32 a, $2, $3, 0x0040;
    prmt.b32 b, $4, $5, 0x0040;
    prmt.b32 a, a, b, 0x5410;
    xor.b32 $1, a, s;
    }""")
# Four words -> for each of them, its even and its odd integers, as 16 (q - 8) in 8 bits.
_UNPACK = tl.constexpr("""{
    .reg .b32 t, s, m;
    mov.b32 s, 0x80808080;
    mov.b32 m, 0xF0F0F0F0;
    shl.b32 t, $8, 4;
    lop3.b32 $0, t, s, m, 0x28;
    lop3.b32 $1, $8, s, m, 0x28;
    shl.b32 t, $9, 4;
    lop3.b32 $2, t, s, m, 0x28;
    lop3.b32 $3, $9, s, m, 0x28;
    shl.b32 t, $10, 4;
    lop3.b32 $4, t, s, m, 0x28;
    lop3.b32 $5, $10, s, m, 0x28;
    shl.b32 t, $11, 4;
    lop3.b32 $6, t, s, m, 0x28;
    lop3.b32 $7, $11, s, m, 0x28;
    }""")


@dataclass(frozen=True, slots=True)
class PackedPrograms:
    """What a program of the kernel takes."""

    rows: int  # of W, a multiple of 16; with a gate half of them are gates
    warps: int  # that share the inputs
    splits: int = 1  # of K, for partial sums


def linear_packed(
    x: Tensor,
    stored: StoredWeight,
    bias: Tensor | None,
    out: Tensor,
    epilogue: Epilogue,
    programs: PackedPrograms,
) -> None:
    """Write epilogue(x W^T + b) to out [num_tokens, num_rows].

    Args:
        x: bfloat16 or float16 [1, in_features], dense, aligned to 16 bytes; in_features a multiple
            of 128.
        stored: of 4 bits, of which at least 128 inputs share a scale.
        bias: [out_features].
        out: of x's dtype, dense; with splits float32 [splits, num_tokens, num_rows], for partial
            sums, and there is no epilogue.
    """
    (num_tokens, size), num_rows = x.shape, out.shape[-1]
    assert num_tokens == 1
    assert size % BLOCK == 0
    assert stored.format == INT4
    assert stored.group == 0 or stored.group >= BLOCK
    assert out.dim() == 2 + (programs.splits > 1)
    rows = programs.rows // 2 if epilogue.is_gated else programs.rows
    num_blocks = size // BLOCK
    per_split = triton.cdiv(num_blocks, programs.splits)
    count = triton.cdiv(per_split, programs.warps)
    assert count <= BLOCKS
    _linear_packed_kernel[(triton.cdiv(num_rows, rows), programs.splits)](
        x,
        stored.weight,
        stored.scales,
        stored.zeros,
        bias,
        out,
        num_rows,
        num_blocks,
        per_split,
        stored.stride_row,
        stored.stride_group if stored.group else 0,
        max(1, stored.group // BLOCK),
        ROWS=programs.rows,
        COUNT=count,
        EVEN=programs.splits * count * programs.warps == num_blocks,
        PARTIAL=programs.splits > 1,
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        num_warps=programs.warps,
        maxnreg=None if stored.zeros is None else _REGISTERS,
        **launch_options(x.device),
    )


@gluon.jit
def _along(SIZE: gl.constexpr, AXIS: gl.constexpr, LAYOUT: gl.constexpr):
    """0, 1, 2, ... along one of the three axes of a tensor."""
    FIRST: gl.constexpr = 0 if AXIS > 0 else 1
    SECOND: gl.constexpr = 2 if AXIS < 2 else 1
    places = gl.arange(0, SIZE, layout=gl.SliceLayout(FIRST, gl.SliceLayout(SECOND, LAYOUT)))
    if AXIS == 0:
        places = places[:, None, None]
    elif AXIS == 1:
        places = places[None, :, None]
    else:
        places = places[None, None, :]
    return places


@gluon.jit
def unpacked(words):
    """Words of a block [rows, 16] -> 16 (q - 8), int8 [rows, 128]."""
    parts = gl.inline_asm_elementwise(
        _UNPACK,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [words],
        dtype=(gl.int8,) * 8,
        is_pure=True,
        pack=4,
    )
    return interleave(parts)


@gluon.jit
def _weights(words):
    """Words [warps, rows, words of a block] -> 16 (q - 8), int8 [warps, rows, 128]."""
    WARPS: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = words.shape[1]
    values = unpacked(words.reshape([WARPS * ROWS, _WIDTH]))
    return values.reshape([WARPS, ROWS, _BLOCK])


@gluon.jit
def _integers(values):
    """Inputs [warps * blocks, planes, inputs of a plane] as integers, in the order of `_weights`.

    Returns:
        high, low: int8 [warps, 128, blocks].
        scales: float32 [warps, blocks]; infinite or NaN if an input is.
        totals: of the integers of a block, float32 [warps, blocks].
    """
    WARPS: gl.constexpr = gl.num_warps()
    exact = values.to(gl.float32)
    sizes = exact.to(gl.int32, bitcast=True) & 0x7FFFFFFF  # in the order of numbers, NaN above all
    largest = gl.maximum(gl.max(gl.max(sizes, 2), 1), SMALLEST_SIZE).to(gl.float32, bitcast=True)
    sums = exact * (_LARGEST / largest)[:, None, None] + ROUNDER
    # An input's place has bits for: which of a pair's two words, octet, even or odd integers; which
    # of four threads, which of its two pairs, which of the pair.
    places = sums.reshape([WARPS * _BLOCKS, 2, 2, 2, 4, 2, 2]).permute((0, 5, 1, 3, 4, 6, 2))
    ordered = gl.convert_layout(places.reshape(values.shape), values.type.layout)
    high, low = gl.inline_asm_elementwise(
        _SPLIT,
        "=&r,=&r,r,r,r,r",
        [ordered.to(gl.int32, bitcast=True)],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )
    high = high.reshape([WARPS, _BLOCKS, _BLOCK]).permute((0, 2, 1))
    low = low.reshape([WARPS, _BLOCKS, _BLOCK]).permute((0, 2, 1))
    scales = (largest / _LARGEST).reshape([WARPS, _BLOCKS])
    totals = gl.sum(gl.sum(sums - ROUNDER, 2), 1).reshape([WARPS, _BLOCKS])
    return high, low, scales, totals


@gluon.jit
def _linear_packed_kernel(
    x,
    weight,
    scales,
    zeros,
    bias,
    out,
    num_rows,
    num_blocks,
    per_split,
    stride_row,
    stride_group,
    group_blocks,
    ROWS: gl.constexpr,
    COUNT: gl.constexpr,
    EVEN: gl.constexpr,
    PARTIAL: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_rows].

    Args:
        weight: words as of pack_integers.
        scales: of row r and group g at r * stride_row + g * stride_group.
        zeros: minus half of the integers' range, at the same places, or None.
        stride_group: 0 if all inputs share scales.
        group_blocks: how many blocks of 128 inputs share them.
        per_split: how many blocks a split has.
        COUNT: how many blocks a warp has, at most.
        PARTIAL: out is float32 [num_splits, num_rows].
        EVEN: all warps have equally many blocks.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    HALVES: gl.constexpr = 2 if GATED else 1
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    BY_BLOCK: gl.constexpr = gl.SliceLayout(1, SUMS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, k_width=4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, k_width=4)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    INPUTS: gl.constexpr = gl.BlockedLayout([1, 8, 4], [8, 1, 4], [WARPS, 1, 1], [2, 1, 0])

    row = gl.program_id(0) * (ROWS // HALVES)
    last_row = num_rows * HALVES - 1
    split = gl.program_id(1)
    start = split * per_split
    last = gl.minimum(start + per_split, num_blocks)
    ACROSS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LOADED))
    rows = stacked_rows(row, row + num_rows, ROWS, GATED, ACROSS)
    rows = gl.minimum(rows, last_row)[None, :, None]
    blocks = start + _along(WARPS, 0, LOADED)
    inner = blocks * _CHUNK + rows % _CHUNK_ROWS * _WIDTH + _along(_WIDTH, 2, LOADED)
    words = weight + (rows // _CHUNK_ROWS).to(gl.int64) * (num_blocks * _CHUNK) + inner
    pieces = ()
    for i in gl.static_range(COUNT):
        if EVEN:
            places = words + i * (WARPS * _CHUNK)
        else:
            places = words + gl.minimum(last - 1 - blocks, i * WARPS) * _CHUNK
        pieces += (gl.load(places),)  # type: ignore[assignment]

    columns = _along(_BLOCKS, 2, SUMS)
    blocks = start + columns * WARPS + _along(WARPS, 0, SUMS)
    OF_SUMS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, SUMS))
    rows = stacked_rows(row, row + num_rows, ROWS, GATED, OF_SUMS)
    rows = gl.minimum(rows, last_row)[None, :, None]
    places = rows * stride_row + blocks // group_blocks * stride_group
    factors = gl.load(scales + places, mask=blocks < last, other=0.0).to(gl.float32)
    if zeros is not None:
        shifts = gl.load(zeros + places, mask=blocks < last, other=0.0).to(gl.float32)

    own = _along(WARPS * _BLOCKS, 0, INPUTS)
    blocks = gl.minimum(start + own % _BLOCKS * WARPS + own // _BLOCKS, last - 1)
    inner = _along(_PLANES, 1, INPUTS) * _WIDTH + _along(_WIDTH, 2, INPUTS)
    sources = x + blocks * _BLOCK + inner
    if PDL:
        tl.extra.cuda.gdc_wait()
    high, low, x_scales, totals = _integers(gl.load(sources))
    high = gl.convert_layout(high, RIGHT)
    low = gl.convert_layout(low, RIGHT)
    nothing = gl.zeros([WARPS, ROWS, _BLOCKS], gl.int32, SUMS)
    products = nothing
    for i in gl.static_range(COUNT):
        left = gl.convert_layout(_weights(pieces[i]), LEFT)
        product = mma_v2(left, high, nothing) * 256 + mma_v2(left, low, nothing)
        products = gl.where(columns == i, product, products)
    acc = products.to(gl.float32) * 0.0625  # weights are 16 times too large
    if zeros is not None:
        acc -= shifts * gl.convert_layout(totals, BY_BLOCK)[:, None, :]
    acc = acc * factors * gl.convert_layout(x_scales, BY_BLOCK)[:, None, :]
    total = gl.sum(gl.sum(acc, 2), 0).reshape([ROWS, 1])
    shape = (0, row, 1, num_rows)
    if PARTIAL:
        out += split.to(gl.int64) * num_rows
    if GATED:
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [8, 4, 1], [WARPS, 1, 1], [2, 0, 1])
        pairs = total.reshape([2, ROWS // 2, 1]).permute((1, 2, 0))
        gates, ups = gl.split(gl.convert_layout(pairs, PAIRS))
        finish(gates, ups, bias, out, shape, True, False, EPILOGUE, True, HAS_BIAS)
    else:
        FLAT: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [0, 1])
        total = gl.convert_layout(total, FLAT)
        finish(total, total, bias, out, shape, split == 0, False, EPILOGUE, False, HAS_BIAS)
