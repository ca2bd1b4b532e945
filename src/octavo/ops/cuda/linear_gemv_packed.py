"""y = x W^T of one token, with W in packed integers of 4 bits, bound by reading W.

A program computes a few rows of W, and its warps share their inputs. Its words of W are on their
way to registers before the preceding kernels have ended (pdl.py), because the
memory would be idle until then; each thread takes those that it needs as the left operand of tensor
cores. Then all inputs are fetched at once. Of the eight columns of a product of tensor cores one
token uses one, which takes fewer instructions than products of single numbers.

A thread takes four neighbouring words of a row, which hold pairs of neighbouring inputs
(stored_weights.py): four inputs of each plane. Both operands of a product may have the inputs in
any order, if it is the same, so that these four are the two pairs that a thread has of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from octavo.ops.cuda.linear_hopper import _finish
from octavo.ops.cuda.linear_hopper_quantized import _integers, _stacked_rows
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.stored_weights import BLOCK, INT4, StoredWeight
from octavo.ops.epilogue import Epilogue

# A name that changed between Triton 3.6 and 3.9, where the old one still exists, and fails.
_copy = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)

_BLOCK = tl.constexpr(BLOCK)
_INT4 = tl.constexpr(INT4)
_WIDTH = tl.constexpr(16)  # words of a block, and inputs of a plane
_TOKENS = tl.constexpr(8)  # columns of the right operand, of which one is used


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
        **launch_options(x.device),
    )


@gluon.jit
def _regrouped(values):
    """A thread's four neighbours in the last dimension as two pairs, eight elements apart."""
    A: gl.constexpr = values.shape[0]
    B: gl.constexpr = values.shape[1]
    C: gl.constexpr = values.shape[2]
    parts = values.reshape([A, B, C // 16, 4, 2, 2]).permute((0, 1, 2, 4, 3, 5))
    return parts.reshape([A, B, C])


@gluon.jit
def _factors(source, groups, i):
    """Scales, or zero points, of each warp's i-th block: 0 if it has none."""
    own_blocks, rows, stride, group_blocks, last = groups
    block = own_blocks + i * gl.num_warps()
    places = rows + block // group_blocks * stride
    return gl.load(source + places, mask=block < last, other=0.0)


@gluon.jit
def _add_block(acc, words, inputs, factor, shifts, i: gl.constexpr):
    """The sums with the products of each warp's i-th block; `inputs` are in shared memory."""
    DTYPE: gl.constexpr = inputs.dtype
    LOADED: gl.constexpr = words.type.layout
    SUMS: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, k_width=2)
    planes = _integers(gl.convert_layout(_regrouped(words), LEFT), _INT4, DTYPE)
    spread = gl.zeros([1, _TOKENS, 1], DTYPE, LOADED)
    ones = gl.full(words.shape, 1.0, DTYPE, LEFT)
    product = gl.zeros(acc.shape, gl.float32, SUMS)
    sums = product
    for plane in gl.static_range(_BLOCK // _WIDTH):
        values = inputs.slice(plane * _WIDTH, _WIDTH, 2).load(LOADED)
        columns, _ = gl.broadcast(values, spread)
        right = gl.convert_layout(_regrouped(columns).permute((0, 2, 1)), RIGHT)
        product = mma_v2(planes[plane], right, product)
        if len(shifts) > 0:
            sums = mma_v2(ones, right, sums)
    if len(shifts) > 0:
        product = product - sums * shifts[i].to(gl.float32)[:, :, None]
    return acc + product * factor.to(gl.float32)[:, :, None]


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
    BY_ROW: gl.constexpr = gl.SliceLayout(2, SUMS)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    BY_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LOADED))
    ACROSS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LOADED))
    ALONG: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LOADED))

    row = gl.program_id(0) * (ROWS // HALVES)
    rows = _stacked_rows(row, row + num_rows, ROWS, GATED, ACROSS)
    rows = gl.minimum(rows, num_rows * HALVES - 1)[None, :, None]
    own_rows = _stacked_rows(row, row + num_rows, ROWS, GATED, gl.SliceLayout(0, BY_ROW))
    own_rows = gl.minimum(own_rows, num_rows * HALVES - 1)[None, :]
    split = gl.program_id(1)
    start = split * per_split
    last = gl.minimum(start + per_split, num_blocks)
    blocks = start + gl.arange(0, WARPS, layout=BY_WARP)[:, None, None]
    own_blocks = start + gl.arange(0, WARPS, layout=gl.SliceLayout(1, BY_ROW))[:, None]
    inner = gl.arange(0, _WIDTH, layout=ALONG)[None, None, :]
    words = weight + rows.to(gl.int64) * (num_blocks * _WIDTH) + (blocks * _WIDTH + inner)
    groups = own_blocks, own_rows * stride_row, stride_group, group_blocks, last

    STEP: gl.constexpr = WARPS * _WIDTH
    FLAT_MEMORY: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [WARPS, 1, 1], [2, 1, 0])
    x_tiles = gl.allocate_shared_memory(x.dtype.element_ty, [COUNT, WARPS, 1, _BLOCK], FLAT_MEMORY)
    pieces = ()
    for i in gl.static_range(COUNT):
        if EVEN:
            places = words + i * STEP
        else:
            places = words + gl.minimum(last - 1 - blocks, i * WARPS) * _WIDTH
        pieces += (gl.load(places),)  # type: ignore[assignment]
    factors = ()
    shifts = ()
    for i in gl.static_range(COUNT):
        factors += (_factors(scales, groups, i),)  # type: ignore[assignment]
        if zeros is not None:
            shifts += (_factors(zeros, groups, i),)  # type: ignore[assignment]
    wide_blocks = start + gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, WIDE)))
    wide_blocks = wide_blocks[:, None, None]
    columns = gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, WIDE)))[None, None, :]
    sources = x + (wide_blocks * _BLOCK + columns)
    acc = gl.zeros([WARPS, ROWS, _TOKENS], gl.float32, SUMS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in gl.static_range(COUNT):
        if EVEN:
            places = sources + i * (WARPS * _BLOCK)
        else:
            places = sources + gl.minimum(last - 1 - wide_blocks, i * WARPS) * _BLOCK
        _copy(x_tiles.index(i), places)
    async_copy.commit_group()
    async_copy.wait_group(0)
    for i in gl.static_range(COUNT):
        acc = _add_block(acc, pieces[i], x_tiles.index(i), factors[i], shifts, i)
    total = gl.sum(acc, 0)
    shape = (0, row, 1, num_rows)
    if PARTIAL:
        out += split.to(gl.int64) * num_rows
    if GATED:
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [8, 4, 1], [WARPS, 1, 1], [2, 0, 1])
        pairs = total.reshape([2, ROWS // 2, _TOKENS]).permute((1, 2, 0))
        gates, ups = gl.split(gl.convert_layout(pairs, PAIRS))
        _finish(gates, ups, bias, out, shape, True, False, EPILOGUE, True, HAS_BIAS)
    else:
        FLAT: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [0, 1])
        total = gl.convert_layout(total, FLAT)
        _finish(total, total, bias, out, shape, split == 0, False, EPILOGUE, False, HAS_BIAS)
