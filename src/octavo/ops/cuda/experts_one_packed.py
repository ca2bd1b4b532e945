"""The experts of one token, of 4-bit weights: as experts_one.py, with words in place of weights.

A word has eight weights of one row (expert_weights.py), each of which multiplies an input of its
own. Tiles are [rows, blocks of inputs, words of a block].
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.epilogues import activate_gated
from octavo.ops.cuda.expert_weights import (
    BLOCK,
    MX_FLOAT4,
    WORDS,
    ExpertMatrices,
    has_bfloat16_pairs,
    unpack,
)
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import Routed

_WORDS, _BLOCK = tl.constexpr(WORDS), tl.constexpr(BLOCK)
_ROWS, _DOWN_ROWS = 4, 2  # of a program
_BLOCKS = 8  # at once: a load of 16 bytes for each of 128 threads and four rows or experts
_AHEAD = 4  # such tiles that are loaded together


def mix_one_packed(
    x: Tensor,
    routed: Routed,
    up: ExpertMatrices,
    down: ExpertMatrices,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    epilogue: Epilogue,
) -> Tensor:
    """See ExpertsKernel.apply_partial, of x [1, size]; weights are packed."""
    top_k, size = routed.ids.shape[1], x.shape[1]
    inner, out = x.new_empty((top_k, down.size)), x.new_empty((1, size))
    asm = has_bfloat16_pairs(x.device)
    options = launch_options(x.device)
    _gate_up_packed_kernel[(triton.cdiv(down.size, _ROWS), top_k)](
        x,
        up.values,
        up.scales,
        up.zeros,
        up.factors,
        up_bias,
        inner,
        routed.ids,
        down.size,
        size,
        up.values.shape[2],
        0 if up.scales is None else up.scales.shape[2],
        ROWS=_ROWS,
        BLOCKS=_BLOCKS,
        AHEAD=min(_AHEAD, triton.cdiv(size, BLOCK * _BLOCKS)),
        FORMAT=int(up.format),
        SCALE_COLUMNS=up.scale_columns,
        EPILOGUE=int(epilogue),
        ASM=asm,
        num_warps=4,
        **options,
    )
    _down_packed_kernel[(triton.cdiv(size, _DOWN_ROWS),)](
        inner,
        down.values,
        down.scales,
        down.zeros,
        down.factors,
        down_bias,
        out,
        routed.ids,
        routed.weights,
        size,
        down.size,
        down.values.shape[2],
        0 if down.scales is None else down.scales.shape[2],
        TOP_K=top_k,
        SLOTS=power_of_2(top_k),
        ROWS=_DOWN_ROWS,
        BLOCKS=_BLOCKS,
        AHEAD=min(_AHEAD, triton.cdiv(down.size, BLOCK * _BLOCKS)),
        FORMAT=int(down.format),
        SCALE_COLUMNS=down.scale_columns,
        ASM=asm,
        num_warps=4,
        **options,
    )
    return out


@triton.jit
def _words_of(rows, is_row, first, row_stride, BLOCKS: tl.constexpr):
    """int32 [ROWS, BLOCKS, WORDS], from block `first` on, of pointers [ROWS, 1, 1] to rows."""
    blocks = first + tl.arange(0, BLOCKS)[None, :, None]
    places = rows + blocks * _WORDS + tl.arange(0, _WORDS)[None, None, :]
    return tl.load(places, mask=is_row & (blocks * _WORDS < row_stride), other=0)


@triton.jit
def _products(
    words,
    x_rows,
    is_row,
    scales,
    zeros,
    first,
    size,
    FORMAT: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    ASM: tl.constexpr,
):
    """float32 [ROWS, BLOCKS, WORDS]: what each word's weights add to the products of their rows.

    Args:
        words: those of the blocks from `first` on.
        x_rows: pointers [ROWS, 1, 1] to inputs.
        is_row: [ROWS, 1, 1], which of them may be read.
        scales, zeros: pointers [ROWS, 1, 1] to those of a row.
        size: inputs; there are zeros, with scales, for those beyond it in the last block.
    """
    BLOCKS: tl.constexpr = words.shape[1]
    blocks = first + tl.arange(0, BLOCKS)[None, :, None]
    is_block = blocks * _BLOCK < size
    columns = blocks * _BLOCK + tl.arange(0, _WORDS)[None, None, :]
    total = tl.zeros(words.shape, tl.float32)
    if FORMAT == MX_FLOAT4:
        fields = tl.load(scales + blocks, mask=is_block, other=0)
        pieces = unpack(words, fields, None, FORMAT, tl.float32, ASM)
        for i in tl.static_range(8):
            inside = is_row & (columns < size - i * _WORDS)
            values = tl.load(x_rows + columns + i * _WORDS, mask=inside, other=0.0)
            total += pieces[i].to(tl.float32) * values.to(tl.float32)
    else:
        GROUPS: tl.constexpr = _BLOCK // SCALE_COLUMNS
        given = ()
        for i in tl.static_range(4):
            if zeros is None:
                zero = tl.full([words.shape[0], 1, 1], 8, tl.int32)
            else:
                place = blocks * GROUPS + i * GROUPS // 4
                zero = tl.load(zeros + place, mask=is_block, other=0)
            given += (zero,)  # type: ignore[assignment]
        pieces = unpack(words, None, given, FORMAT, tl.float32, ASM)
        for group in tl.static_range(GROUPS):
            part = tl.zeros(words.shape, tl.float32)
            for i in tl.static_range(group * 8 // GROUPS, (group + 1) * 8 // GROUPS):
                inside = is_row & (columns < size - i * _WORDS)
                values = tl.load(x_rows + columns + i * _WORDS, mask=inside, other=0.0)
                part += pieces[i].to(tl.float32) * values.to(tl.float32)
            total += part * tl.load(scales + blocks * GROUPS + group, mask=is_block, other=0.0)
    return total


@triton.jit
def _gate_up_packed_kernel(
    x,
    weight,
    weight_scales,
    weight_zeros,
    weight_factors,
    bias,
    out,
    ids,
    num_rows,
    size,
    row_stride,
    num_scales,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    AHEAD: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gates and ups of one of the token's experts, into out [TOP_K, num_rows]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_stored = rows < num_rows
    rows = tl.minimum(rows, num_rows - 1)
    is_row = tl.full([ROWS, 1, 1], 1, tl.int1)
    wait_previous(PDL)
    allow_next(PDL)  # not before: it reads `ids`, too, without waiting for this kernel
    slot = tl.program_id(1)
    expert = tl.load(ids + slot).to(tl.int64)
    first = expert * 2 * num_rows
    gate_row = (first + rows)[:, None, None]
    up_row = (first + num_rows + rows)[:, None, None]
    gates = weight + gate_row * row_stride
    ups = weight + up_row * row_stride
    pieces = ()
    up_pieces = ()
    for i in tl.static_range(AHEAD):
        words = _words_of(gates, is_row, i * BLOCKS, row_stride, BLOCKS)
        pieces += (words,)  # type: ignore[assignment]
        words = _words_of(ups, is_row, i * BLOCKS, row_stride, BLOCKS)
        up_pieces += (words,)  # type: ignore[assignment]
    gate_scales = weight_scales + gate_row * num_scales
    up_scales = weight_scales + up_row * num_scales
    gate_zeros = None
    up_zeros = None
    if weight_zeros is not None:
        gate_zeros = weight_zeros + gate_row * num_scales
        up_zeros = weight_zeros + up_row * num_scales
    # As many as words: one row of inputs would have to be given to the threads that need them.
    x_rows = x + tl.zeros([ROWS, 1, 1], tl.int32)
    acc = tl.zeros([ROWS, BLOCKS, _WORDS], tl.float32)
    up_acc = acc
    for i in tl.static_range(AHEAD):
        start = i * BLOCKS
        acc += _products(
            pieces[i],
            x_rows,
            is_row,
            gate_scales,
            gate_zeros,
            start,
            size,
            FORMAT,
            SCALE_COLUMNS,
            ASM,
        )
        up_acc += _products(
            up_pieces[i],
            x_rows,
            is_row,
            up_scales,
            up_zeros,
            start,
            size,
            FORMAT,
            SCALE_COLUMNS,
            ASM,
        )
    for start in range(AHEAD * BLOCKS, tl.cdiv(size, _BLOCK), BLOCKS):
        words = _words_of(gates, is_row, start, row_stride, BLOCKS)
        up_words = _words_of(ups, is_row, start, row_stride, BLOCKS)
        acc += _products(
            words,
            x_rows,
            is_row,
            gate_scales,
            gate_zeros,
            start,
            size,
            FORMAT,
            SCALE_COLUMNS,
            ASM,
        )
        up_acc += _products(
            up_words,
            x_rows,
            is_row,
            up_scales,
            up_zeros,
            start,
            size,
            FORMAT,
            SCALE_COLUMNS,
            ASM,
        )
    gate = tl.sum(tl.sum(acc, 2), 1)
    up = tl.sum(tl.sum(up_acc, 2), 1)
    if weight_factors is not None:
        factor = tl.load(weight_factors + expert)
        gate *= factor
        up *= factor
    if bias is not None:
        gate += tl.load(bias + first + rows).to(tl.float32)
        up += tl.load(bias + first + num_rows + rows).to(tl.float32)
    value = activate_gated(gate, up, EPILOGUE)
    tl.store(out + slot * num_rows + rows, value.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def _down_packed_kernel(
    x,
    weight,
    weight_scales,
    weight_zeros,
    weight_factors,
    bias,
    out,
    ids,
    scales,
    num_rows,
    size,
    row_stride,
    num_scales,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    AHEAD: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weighted sum of the token's experts, into out [num_rows]; x [TOP_K, size]. See
    _down_one_kernel of `ids` and `scales`."""
    allow_next(PDL)
    slots = tl.arange(0, SLOTS)
    is_slot = slots < TOP_K
    experts = tl.load(ids + slots, mask=is_slot, other=0, cache_modifier=".cg").to(tl.int64)
    shares = tl.load(scales + slots, mask=is_slot, other=0.0, cache_modifier=".cg")
    is_row = is_slot[:, None, None]
    first_row = tl.program_id(0) * ROWS
    pieces = ()
    for row in tl.static_range(ROWS):
        number = tl.minimum(first_row + row, num_rows - 1)
        own = (experts * num_rows + number)[:, None, None]
        for i in tl.static_range(AHEAD):
            words = _words_of(weight + own * row_stride, is_row, i * BLOCKS, row_stride, BLOCKS)
            pieces += (words,)  # type: ignore[assignment]
    wait_previous(PDL)
    x_rows = x + (slots * size)[:, None, None]
    for row in tl.static_range(ROWS):
        number = tl.minimum(first_row + row, num_rows - 1)
        own = (experts * num_rows + number)[:, None, None]
        own_scales = weight_scales + own * num_scales
        own_zeros = None
        if weight_zeros is not None:
            own_zeros = weight_zeros + own * num_scales
        acc = tl.zeros([SLOTS, BLOCKS, _WORDS], tl.float32)
        for i in tl.static_range(AHEAD):
            acc += _products(
                pieces[row * AHEAD + i],
                x_rows,
                is_row,
                own_scales,
                own_zeros,
                i * BLOCKS,
                size,
                FORMAT,
                SCALE_COLUMNS,
                ASM,
            )
        for start in range(AHEAD * BLOCKS, tl.cdiv(size, _BLOCK), BLOCKS):
            words = _words_of(weight + own * row_stride, is_row, start, row_stride, BLOCKS)
            acc += _products(
                words,
                x_rows,
                is_row,
                own_scales,
                own_zeros,
                start,
                size,
                FORMAT,
                SCALE_COLUMNS,
                ASM,
            )
        y = tl.sum(tl.sum(acc, 2), 1)
        if weight_factors is not None:
            y *= tl.load(weight_factors + experts)
        if bias is not None:
            biases = tl.load(bias + experts * num_rows + number, mask=is_slot, other=0.0)
            y += biases.to(tl.float32)
        total = tl.sum(tl.where(is_slot, y * shares, 0.0), 0)
        tl.store(out + number, total.to(out.dtype.element_ty))
