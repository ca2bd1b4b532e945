"""The experts' projections on NVIDIA GPUs, as grouped products.

Two kernels compute all experts that were hit: gates and ups with the activation, for which rows of
x are gathered; then the down projection, whose rows are weighted and put where the norm that
follows adds up each token's experts in their order. One token has two kernels of its own, which
multiply and add without tensor cores, the second of them over all experts of the token.

Programs find their rows in the lists of routing.py. Their number follows from the number of tokens:
those that find no block end at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.ops.cuda.epilogues import activate_gated
from octavo.ops.cuda.expert_tiles import Tiles, choose_tiles, programs_of_one_token
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.routing import BlockLists
from octavo.ops.cuda.tile_sizes import MUCH_SHARED_MEMORY, shared_memory
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import ExpertWeights, Routed

# Up to so many tokens, what each expert contributes to a token is kept in float32 until it is added
# up; beyond that it would take longer to write and read than it is worth.
EXACT_TOKENS = 256


class CudaExperts:
    """Uses the experts' weights in place."""

    def __init__(self, weights: ExpertWeights, epilogue: Epilogue) -> None:
        self._weights = weights
        self._epilogue = epilogue

    def apply_partial(self, x: Tensor, routed: Routed) -> Tensor:
        """See ExpertsKernel.apply_partial."""
        return mix(x, routed, self._weights, self._epilogue)


def mix(x: Tensor, routed: Routed, weights: ExpertWeights, epilogue: Epilogue) -> Tensor:
    """See ExpertsKernel.apply_partial; x dense, of the weights' dtype; `epilogue` is gated."""
    assert x.stride(1) == 1
    assert epilogue.is_gated
    if len(x) == 1:
        return _mix_one(x, routed, weights, epilogue)
    num_tokens, top_k = routed.ids.shape
    inner = x.new_empty((num_tokens * top_k, weights.down.shape[2]))
    _launch(x, weights.up, weights.up_bias, inner, routed, epilogue)
    dtype = torch.float32 if num_tokens <= EXACT_TOKENS else x.dtype
    out = torch.empty((top_k, num_tokens, x.shape[1]), dtype=dtype, device=x.device)
    _launch(inner, weights.down, weights.down_bias, out, routed, Epilogue.NONE)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    routed: Routed,
    epilogue: Epilogue,
) -> None:
    """One projection of all experts: gates and ups, if the epilogue is gated, else down."""
    lists: BlockLists = routed.lists
    num_tokens, top_k = routed.ids.shape
    size = weight.shape[2]
    has_tma = _has_tma(weight)
    tiles = choose_tiles(lists.block_rows, size, weight.element_size(), epilogue.is_gated, has_tma)
    num_outputs = out.shape[-1]
    grid = (triton.cdiv(num_outputs, tiles.rows), len(lists.experts))
    _experts_kernel[grid](
        x,
        _descriptor(weight, tiles) if has_tma else weight,
        bias,
        out,
        lists.rows,
        lists.experts,
        lists.begins,
        lists.ends,
        lists.num_blocks,
        routed.weights,
        num_tokens,
        num_outputs,
        size,
        x.stride(0),
        TOP_K=top_k,
        TOKENS=lists.block_rows,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        EVEN=size % tiles.columns == 0,
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        TMA=has_tma,
        IEEE=x.dtype == torch.float32,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch_options(x.device),
    )


def _has_tma(weight: Tensor) -> bool:
    """Whether weights are fetched by TMA, which needs rows aligned to 16 bytes."""
    aligned = weight.stride(1) * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
    if not aligned or shared_memory(weight.device) < MUCH_SHARED_MEMORY:
        return False
    return weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device)[0] >= 9


def _descriptor(weight: Tensor, tiles: Tiles) -> Any:
    """The TMA descriptor of the rows of all experts, for blocks of the tiles' size."""
    return TensorDescriptor.from_tensor(weight.flatten(0, 1), [tiles.rows, tiles.columns])


@triton.jit
def _weights(
    weight,
    row,
    last_row,
    start,
    size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
):
    """Weights [ROWS, COLUMNS] from (row, start) on. All formats of weights meet here: what is
    loaded is ready to be multiplied. Rows from `last_row` on, and columns from `size` on, are of
    no meaning, and 0, respectively."""
    if TMA:
        tile = weight.load([row, start])
    else:
        rows = tl.minimum(row + tl.arange(0, ROWS), last_row - 1)
        columns = start + tl.arange(0, COLUMNS)
        places = weight + rows.to(tl.int64)[:, None] * size + columns[None, :]
        if EVEN:
            tile = tl.load(places)
        else:
            tile = tl.load(places, mask=(columns < size)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=["num_tokens"])
def _experts_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    experts,
    begins,
    ends,
    num_blocks,
    scales,
    num_tokens,
    num_outputs,
    size,
    stride,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    EPILOGUE: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one block: rows of an expert's weights, times rows that were routed to it.

    Weights are the first operand of the tensor cores, whose 64 rows they fill, so that few tokens
    cost little.

    Args:
        x: if GATED [num_tokens, size], else [num_tokens * TOP_K, size] in the order of `rows`.
        weight: of [experts, num_outputs or 2 * num_outputs, size]: a pointer or, with TMA, a
            descriptor.
        out: if GATED [num_tokens * TOP_K, num_outputs] in the order of `rows`, else
            [TOP_K, num_tokens, num_outputs].
        scales: [num_tokens, TOP_K], weights of the results if not GATED.
    """
    allow_next(PDL)
    wait_previous(PDL)
    block = tl.program_id(1)
    if block < tl.load(num_blocks):
        expert = tl.load(experts + block)
        places = tl.load(begins + block) + tl.arange(0, TOKENS)
        is_row = places < tl.load(ends + block)
        assigned = tl.load(rows + places, mask=is_row, other=0)
        output = tl.program_id(0) * ROWS
        per_expert = 2 * num_outputs if GATED else num_outputs
        row = expert * per_expert + output
        last_row = (expert + 1) * per_expert
        source = assigned // TOP_K if GATED else places
        x_rows = x + source.to(tl.int64)[:, None] * stride
        columns = tl.arange(0, COLUMNS)
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        up = acc
        for start in range(0, size, COLUMNS):
            mask = is_row[:, None]
            if not EVEN:
                mask = mask & (columns < size - start)[None, :]
            values = tl.load(x_rows + (start + columns)[None, :], mask=mask, other=0.0)
            values = tl.trans(values)
            piece = _weights(weight, row, last_row, start, size, ROWS, COLUMNS, EVEN, TMA)
            if IEEE:
                acc = tl.dot(piece, values, acc, input_precision="ieee")
            else:
                acc = tl.dot(piece, values, acc)
            if GATED:
                piece = _weights(
                    weight, row + num_outputs, last_row, start, size, ROWS, COLUMNS, EVEN, TMA
                )
                if IEEE:
                    up = tl.dot(piece, values, up, input_precision="ieee")
                else:
                    up = tl.dot(piece, values, up)
        outputs = output + tl.arange(0, ROWS)
        is_output = outputs < num_outputs
        if HAS_BIAS:
            bias_places = bias + expert * per_expert + outputs
            acc += tl.load(bias_places, mask=is_output, other=0.0).to(tl.float32)[:, None]
            if GATED:
                shift = tl.load(bias_places + num_outputs, mask=is_output, other=0.0)
                up += shift.to(tl.float32)[:, None]
        if GATED:
            acc = activate_gated(acc, up, EPILOGUE)
            target = places
        else:
            acc = acc * tl.load(scales + assigned, mask=is_row, other=0.0)[None, :]
            target = assigned % TOP_K * num_tokens + assigned // TOP_K
        targets = out + target.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        result = tl.trans(acc).to(out.dtype.element_ty)
        tl.store(targets, result, mask=is_row[:, None] & is_output[None, :])


def _mix_one(x: Tensor, routed: Routed, weights: ExpertWeights, epilogue: Epilogue) -> Tensor:
    """`mix` of one token."""
    top_k, size, inner_size = routed.ids.shape[1], x.shape[1], weights.down.shape[2]
    inner = x.new_empty((top_k, inner_size))
    rows, columns = programs_of_one_token(size)
    options = launch_options(x.device)
    _gate_up_one_kernel[(triton.cdiv(inner_size, rows), top_k)](
        x,
        weights.up,
        weights.up_bias,
        inner,
        routed.ids,
        inner_size,
        size,
        ROWS=rows,
        BLOCK=columns,
        EPILOGUE=int(epilogue),
        num_warps=4,
        **options,
    )
    out = torch.empty_like(x)
    rows, columns = programs_of_one_token(inner_size)
    _down_one_kernel[(triton.cdiv(size, rows),)](
        inner,
        weights.down,
        weights.down_bias,
        out,
        routed.ids,
        routed.weights,
        size,
        inner_size,
        TOP_K=top_k,
        ROWS=rows,
        BLOCK=columns,
        num_warps=4,
        **options,
    )
    return out


@triton.jit
def _gate_up_one_kernel(
    x,
    weight,
    bias,
    out,
    ids,
    num_rows,
    size,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gates and ups of one of the token's experts, into out [TOP_K, num_rows]."""
    allow_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    rows = tl.minimum(rows, num_rows - 1)
    columns = tl.arange(0, BLOCK)
    wait_previous(PDL)
    slot = tl.program_id(1)
    first = tl.load(ids + slot).to(tl.int64) * 2 * num_rows
    places = weight + (first + rows)[:, None] * size + columns[None, :]
    up_places = places + tl.cast(num_rows, tl.int64) * size
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    up_acc = acc
    for start in range(0, size, BLOCK):
        inside = columns < size - start
        piece = tl.load(places + start, mask=inside[None, :], other=0.0)
        up_piece = tl.load(up_places + start, mask=inside[None, :], other=0.0)
        values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc += piece.to(tl.float32) * values
        up_acc += up_piece.to(tl.float32) * values
    gate = tl.sum(acc, 1)
    up = tl.sum(up_acc, 1)
    if bias is not None:
        gate += tl.load(bias + first + rows).to(tl.float32)
        up += tl.load(bias + first + num_rows + rows).to(tl.float32)
    value = activate_gated(gate, up, EPILOGUE)
    tl.store(out + slot * num_rows + rows, value.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _down_piece(weight, ids, step, rows, num_rows, size, BLOCK: tl.constexpr, TOP_K: tl.constexpr):
    """The weights of one step: a block of columns of one of the token's experts."""
    blocks = tl.cdiv(size, BLOCK)
    expert = tl.load(ids + tl.minimum(step // blocks, TOP_K - 1)).to(tl.int64)
    columns = step % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < tl.where(step < TOP_K * blocks, size, 0)
    places = weight + (expert * num_rows + rows)[:, None] * size + columns[None, :]
    return tl.load(places, mask=inside[None, :], other=0.0)


@triton.jit
def _down_one_kernel(
    x,
    weight,
    bias,
    out,
    ids,
    scales,
    num_rows,
    size,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weighted sum of the token's experts, into out [num_rows]; x [TOP_K, size]."""
    allow_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    rows = tl.minimum(rows, num_rows - 1)
    wait_previous(PDL)
    blocks = tl.cdiv(size, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    ahead = _down_piece(weight, ids, 0, rows, num_rows, size, BLOCK, TOP_K)
    for step in range(TOP_K * blocks):
        piece = ahead
        # Loaded while this one is multiplied.
        ahead = _down_piece(weight, ids, step + 1, rows, num_rows, size, BLOCK, TOP_K)
        slot = step // blocks
        columns = step % blocks * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + slot * size + columns, mask=columns < size, other=0.0).to(tl.float32)
        acc += piece.to(tl.float32) * (values * tl.load(scales + slot))[None, :]
    y = tl.sum(acc, 1)
    if bias is not None:
        for slot in range(TOP_K):
            first = tl.load(ids + slot).to(tl.int64) * num_rows
            y += tl.load(scales + slot) * tl.load(bias + first + rows).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=is_row)
