"""The experts of one token: two kernels that multiply and add without tensor cores.

Each weight is read and used once, as in linear_gemv.py. Programs are small and many, and load all
that they multiply at once. Which experts the token takes is known when gates and ups begin, so the
second kernel, which starts while the first one ends, loads weights before it waits for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.epilogues import activate_gated
from octavo.ops.cuda.expert_tiles import programs_of_one_token
from octavo.ops.cuda.expert_weights import ExpertMatrices
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import Routed


def mix_one(
    x: Tensor,
    routed: Routed,
    up: ExpertMatrices,
    down: ExpertMatrices,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    epilogue: Epilogue,
) -> Tensor:
    """See ExpertsKernel.apply_partial, of x [1, size]; weights are not packed."""
    top_k, size = routed.ids.shape[1], x.shape[1]
    inner = x.new_empty((top_k, down.size))
    options = launch_options(x.device)
    programs = programs_of_one_token(size, up.bits)
    _gate_up_one_kernel[(triton.cdiv(down.size, programs.rows), top_k)](
        x,
        up.values,
        up.scales,
        up_bias,
        inner,
        routed.ids,
        down.size,
        size,
        0 if up.scales is None else up.scales.stride(0),
        0 if up.scales is None else up.scales.shape[2],
        ROWS=programs.rows,
        BLOCK=programs.columns,
        AHEAD=min(programs.ahead, triton.cdiv(size, programs.columns)),
        SCALE_ROWS=up.scale_rows,
        SCALE_COLUMNS=up.scale_columns,
        EPILOGUE=int(epilogue),
        num_warps=programs.warps,
        **options,
    )
    out = x.new_empty((1, size))
    slots = power_of_2(top_k)
    programs = programs_of_one_token(down.size, down.bits, slots)
    _down_one_kernel[(triton.cdiv(size, programs.rows),)](
        inner,
        down.values,
        down.scales,
        down_bias,
        out,
        routed.ids,
        routed.weights,
        size,
        down.size,
        0 if down.scales is None else down.scales.stride(0),
        0 if down.scales is None else down.scales.shape[2],
        TOP_K=top_k,
        SLOTS=slots,
        ROWS=programs.rows,
        BLOCK=programs.columns,
        AHEAD=min(programs.ahead, triton.cdiv(down.size, programs.columns)),
        SCALE_ROWS=down.scale_rows,
        SCALE_COLUMNS=down.scale_columns,
        num_warps=programs.warps,
        **options,
    )
    return out


@triton.jit
def _added(acc, piece, values, scales, SCALE_COLUMNS: tl.constexpr):
    """acc plus products of weights [ROWS, BLOCK] and values.

    If columns have scales, acc is [ROWS]; else it is [ROWS, BLOCK], to be added up at the end.
    """
    products = piece.to(tl.float32) * values
    if SCALE_COLUMNS > 0:
        rows: tl.constexpr = products.shape[0]
        blocks: tl.constexpr = products.shape[1] // SCALE_COLUMNS
        sums = tl.sum(tl.reshape(products, [rows, blocks, SCALE_COLUMNS]), 2)
        acc += tl.sum(sums * scales, 1)
    else:
        acc += products
    return acc


@triton.jit
def _scales_of(scales, start, num_scales, BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr):
    """The scales of the columns from `start` on, [ROWS, columns], by pointers [ROWS, 1] to those of
    each row; 1 if whole rows have scales."""
    if SCALE_COLUMNS > 0:
        places = start // SCALE_COLUMNS + tl.arange(0, BLOCK // SCALE_COLUMNS)[None, :]
        found = tl.load(scales + places, mask=places < num_scales, other=0.0)
    else:
        found = 1.0
    return found


@triton.jit
def _total(acc, scales, HAS_SCALES: tl.constexpr, SCALE_COLUMNS: tl.constexpr):
    """What `_added` has added up, a value per row, times `scales` if whole rows have them."""
    if SCALE_COLUMNS > 0:
        total = acc
    else:
        total = tl.sum(acc, 1)
        if HAS_SCALES:
            total *= scales
    return total


@triton.jit(do_not_specialize=["scale_stride"])
def _gate_up_one_kernel(
    x,
    weight,
    weight_scales,
    bias,
    out,
    ids,
    num_rows,
    size,
    scale_stride,
    num_scales,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gates and ups of one of the token's experts, into out [TOP_K, num_rows]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    rows = tl.minimum(rows, num_rows - 1)
    columns = tl.arange(0, BLOCK)
    wait_previous(PDL)
    allow_next(PDL)  # not before: it reads `ids`, too, without waiting for this kernel
    slot = tl.program_id(1)
    expert = tl.load(ids + slot).to(tl.int64)
    first = expert * 2 * num_rows
    places = weight + (first + rows)[:, None] * size + columns[None, :]
    up_places = places + tl.cast(num_rows, tl.int64) * size
    pieces = ()
    up_pieces = ()
    for i in tl.static_range(AHEAD):
        inside = (columns < size - i * BLOCK)[None, :]
        pieces += (tl.load(places + i * BLOCK, mask=inside, other=0.0),)  # type: ignore[assignment]
        up_piece = tl.load(up_places + i * BLOCK, mask=inside, other=0.0)
        up_pieces += (up_piece,)  # type: ignore[assignment]
    HAS_SCALES: tl.constexpr = weight_scales is not None
    scales = None
    up_scales = None
    row_scale = 1.0
    up_row_scale = 1.0
    if HAS_SCALES:
        start_scale = weight_scales + expert * scale_stride
        scales = (start_scale + rows // SCALE_ROWS * num_scales)[:, None]
        up_scales = (start_scale + (rows + num_rows) // SCALE_ROWS * num_scales)[:, None]
        if SCALE_COLUMNS == 0:
            row_scale = tl.load(start_scale + rows // SCALE_ROWS)
            up_row_scale = tl.load(start_scale + (rows + num_rows) // SCALE_ROWS)
    acc = tl.zeros([ROWS], tl.float32) if SCALE_COLUMNS > 0 else tl.zeros([ROWS, BLOCK], tl.float32)
    up_acc = acc
    for i in tl.static_range(AHEAD):
        start = i * BLOCK
        inside = columns < size - start
        values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        found = _scales_of(scales, start, num_scales, BLOCK, SCALE_COLUMNS)
        acc = _added(acc, pieces[i], values, found, SCALE_COLUMNS)
        found = _scales_of(up_scales, start, num_scales, BLOCK, SCALE_COLUMNS)
        up_acc = _added(up_acc, up_pieces[i], values, found, SCALE_COLUMNS)
    for start in range(AHEAD * BLOCK, size, BLOCK):
        inside = columns < size - start
        piece = tl.load(places + start, mask=inside[None, :], other=0.0)
        up_piece = tl.load(up_places + start, mask=inside[None, :], other=0.0)
        values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        found = _scales_of(scales, start, num_scales, BLOCK, SCALE_COLUMNS)
        acc = _added(acc, piece, values, found, SCALE_COLUMNS)
        found = _scales_of(up_scales, start, num_scales, BLOCK, SCALE_COLUMNS)
        up_acc = _added(up_acc, up_piece, values, found, SCALE_COLUMNS)
    gate = _total(acc, row_scale, HAS_SCALES, SCALE_COLUMNS)
    up = _total(up_acc, up_row_scale, HAS_SCALES, SCALE_COLUMNS)
    if bias is not None:
        gate += tl.load(bias + first + rows).to(tl.float32)
        up += tl.load(bias + first + num_rows + rows).to(tl.float32)
    value = activate_gated(gate, up, EPILOGUE)
    tl.store(out + slot * num_rows + rows, value.to(out.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["scale_stride"])
def _down_one_kernel(
    x,
    weight,
    weight_scales,
    bias,
    out,
    ids,
    scales,
    num_rows,
    size,
    scale_stride,
    num_scales,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weighted sum of the token's experts, into out [num_rows]; x [TOP_K, size].

    `ids` and `scales` were written before the preceding kernel let this one start; they are read
    past the SM's own cache, which may have older values.
    """
    allow_next(PDL)
    slots = tl.arange(0, SLOTS)
    is_slot = slots < TOP_K
    columns = tl.arange(0, BLOCK)
    experts = tl.load(ids + slots, mask=is_slot, other=0, cache_modifier=".cg").to(tl.int64)
    shares = tl.load(scales + slots, mask=is_slot, other=0.0, cache_modifier=".cg")
    first_row = tl.program_id(0) * ROWS
    HAS_SCALES: tl.constexpr = weight_scales is not None
    # Weights and scales of all rows, then inputs: no load waits for what another row has stored.
    pieces = ()
    row_scales = ()
    for row in tl.static_range(ROWS):
        number = tl.minimum(first_row + row, num_rows - 1)
        places = weight + (experts * num_rows + number)[:, None] * size + columns[None, :]
        for i in tl.static_range(AHEAD):
            inside = is_slot[:, None] & (columns < size - i * BLOCK)[None, :]
            piece = tl.load(places + i * BLOCK, mask=inside, other=0.0)
            pieces += (piece,)  # type: ignore[assignment]
        row_scale = 1.0
        if HAS_SCALES and SCALE_COLUMNS == 0:
            slot_scales = weight_scales + experts * scale_stride + number // SCALE_ROWS * num_scales
            row_scale = tl.load(slot_scales)
        row_scales += (row_scale,)  # type: ignore[assignment]
    wait_previous(PDL)
    inputs = x + slots[:, None] * size + columns[None, :]
    loaded = ()
    for i in tl.static_range(AHEAD):
        inside = is_slot[:, None] & (columns < size - i * BLOCK)[None, :]
        values = tl.load(inputs + i * BLOCK, mask=inside, other=0.0)
        loaded += (values,)  # type: ignore[assignment]
    for row in tl.static_range(ROWS):
        number = tl.minimum(first_row + row, num_rows - 1)
        places = weight + (experts * num_rows + number)[:, None] * size + columns[None, :]
        slot_scales = None
        if HAS_SCALES:
            slot_scales = weight_scales + experts * scale_stride + number // SCALE_ROWS * num_scales
            slot_scales = slot_scales[:, None]
        if SCALE_COLUMNS > 0:
            acc = tl.zeros([SLOTS], tl.float32)
        else:
            acc = tl.zeros([SLOTS, BLOCK], tl.float32)
        for i in tl.static_range(AHEAD):
            found = _scales_of(slot_scales, i * BLOCK, num_scales, BLOCK, SCALE_COLUMNS)
            piece = pieces[row * AHEAD + i]
            values = loaded[i].to(tl.float32)
            acc = _added(acc, piece, values, found, SCALE_COLUMNS)
        for start in range(AHEAD * BLOCK, size, BLOCK):
            inside = is_slot[:, None] & (columns < size - start)[None, :]
            piece = tl.load(places + start, mask=inside, other=0.0)
            values = tl.load(inputs + start, mask=inside, other=0.0).to(tl.float32)
            found = _scales_of(slot_scales, start, num_scales, BLOCK, SCALE_COLUMNS)
            acc = _added(acc, piece, values, found, SCALE_COLUMNS)
        y = _total(acc, row_scales[row], HAS_SCALES, SCALE_COLUMNS)
        if bias is not None:
            biases = tl.load(bias + experts * num_rows + number, mask=is_slot, other=0.0)
            y += biases.to(tl.float32)
        total = tl.sum(tl.where(is_slot, y * shares, 0.0), 0)
        tl.store(out + number, total.to(out.dtype.element_ty))
