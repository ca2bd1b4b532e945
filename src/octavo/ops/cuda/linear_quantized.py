"""y = x W^T on Hopper with W quantized in memory.

Few tokens are computed with W as it is stored (linear_hopper_quantized.py). With many tokens, W is
dequantized into a workspace first, and computed with as any other weight: that costs as much as
writing it, and the product with many tokens costs more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.linear import PARTIAL_DTYPE, _descriptor, _workspace, linear, linear_partial
from octavo.ops.cuda.linear_hopper_quantized import (
    BLOCK,
    FLOAT8,
    INT4,
    INT8,
    SCALE_RESULT,
    SCALE_SUMS,
    SCALE_WEIGHTS,
    pack_integers,
    quantized_linear_kernel,
)
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.epilogue import Epilogue
from octavo.ops.quantized import GroupedInt, QuantizedWeight, ScaledFloat8

_REGISTERS = 65536  # per SM


@dataclass(frozen=True, slots=True)
class Tiles:
    """A configuration of linear_hopper_quantized.py's kernel."""

    tokens: int  # BM
    rows: int  # BN, of W
    stages: int
    warps: int = 4  # that multiply
    splits: int = 1  # of K
    per_sm: int = 1  # programs that fit on one SM
    early: bool = False  # PDL: the next kernel may start from the beginning
    scales_weights: bool = False  # not the sums


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """A quantized W [out_features, in_features] as the kernel takes it."""

    shape: tuple[int, int]
    weight: Tensor  # float8 [out_features, in_features], or int32 words (pack_integers)
    format: int
    scales: Tensor
    stride_row: int
    stride_group: int
    block_rows: int
    num_groups: int
    group_blocks: int  # blocks of BLOCK inputs that share a scale; 0: one scale per output
    zeros: Tensor | None  # bfloat16 at the same places as scales, minus half of the range

    @classmethod
    def of(cls, form: QuantizedWeight) -> StoredWeight | None:
        """None: the kernel does not take such a weight."""
        num_rows, size = form.shape
        if isinstance(form, ScaledFloat8):
            rows, columns = form.block
            if size % 16 or (columns < size and columns % BLOCK):
                return None
            scales = form.scales.contiguous()
            return cls(
                (num_rows, size),
                form.weight.contiguous(),
                FLOAT8,
                scales,
                scales.shape[1],
                1,
                rows,
                scales.shape[1],
                columns // BLOCK if columns < size else 0,
                None,
            )
        if isinstance(form, GroupedInt):
            if form.permutation is not None or (form.group < size and form.group % BLOCK):
                return None
            half = 1 << (form.bits - 1)
            zeros = None if form.zeros is None else (form.zeros - half).t().to(torch.bfloat16)
            return cls(
                (num_rows, size),
                pack_integers(form.values(), form.bits),
                INT4 if form.bits == 4 else INT8,
                form.scales.t().contiguous(),
                1,
                num_rows,
                1,
                form.scales.shape[1],
                form.group // BLOCK if form.group < size else 0,
                None if zeros is None else zeros.contiguous(),
            )
        return None


def launch(
    x: Tensor,
    stored: StoredWeight,
    bias: Tensor | None,
    out: Tensor,
    epilogue: Epilogue,
    tiles: Tiles,
    is_partial: bool,
) -> None:
    """Run linear_hopper_quantized's kernel."""
    num_tokens, size = x.shape
    num_rows = out.shape[-1]
    grid = (
        triton.cdiv(num_tokens, tiles.tokens),
        triton.cdiv(num_rows, tiles.rows),
        tiles.splits,
    )
    num_blocks = triton.cdiv(size, BLOCK)
    group_blocks = stored.group_blocks or num_blocks
    groups = 1
    if stored.group_blocks:
        groups = triton.cdiv(triton.cdiv(num_blocks, tiles.splits), group_blocks) + (
            group_blocks > 1
        )
    scale = SCALE_RESULT
    if stored.group_blocks:
        scale = SCALE_WEIGHTS if tiles.scales_weights else SCALE_SUMS
    reduces = tiles.splits > 1 and not is_partial
    sums, arrivals = _workspace(x.device)
    width = BLOCK if stored.format == FLOAT8 else BLOCK // 32 * (4 if stored.format == INT4 else 8)
    quantized_linear_kernel[grid](
        _descriptor(x, tiles.tokens, BLOCK),
        _stored_descriptor(stored.weight, tiles.rows, width),
        stored.scales,
        stored.scales if stored.zeros is None else stored.zeros,
        bias,
        out,
        sums,
        arrivals,
        num_tokens,
        num_rows,
        num_blocks,
        tiles.splits,
        stored.num_groups,
        stored.stride_row,
        stored.stride_group,
        stored.block_rows,
        STAGES=tiles.stages,
        SPLITS=tiles.splits if reduces else 1,
        PARTIAL=is_partial,
        FORMAT=stored.format,
        SCALE=scale,
        HAS_ZEROS=stored.zeros is not None,
        GROUP_BLOCKS=group_blocks,
        GROUPS=triton.next_power_of_2(groups),
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        EARLY=tiles.early,
        num_warps=tiles.warps,
        maxnreg=min(255, _REGISTERS // (32 * (tiles.warps + 4) * tiles.per_sm) // 8 * 8),
        **launch_options(x.device),
    )


def _stored_descriptor(weight: Tensor, rows: int, columns: int):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = gl.float8e4nv if weight.dtype == torch.float8_e4m3fn else gl.int32
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], element)
    return TensorDescriptor.from_tensor(weight, [rows, columns], layout)


@triton.jit
def _dequantize_float8_kernel(
    weight,
    scales,
    out,
    num_rows,
    size,
    stride_row,
    block_rows,
    block_columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
    places = rows.to(tl.int64)[:, None] * size + columns[None, :]
    values = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    block = tl.program_id(1) * BLOCK // block_columns
    factors = tl.load(
        scales + (rows // block_rows) * stride_row + block, mask=rows < num_rows, other=0.0
    )
    wait_previous(PDL)
    tl.store(out + places, (values * factors[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_int_kernel(
    words,
    scales,
    zeros,
    out,
    num_rows,
    size,
    num_blocks,
    group_blocks,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes ROWS rows of a block of 128 inputs; see pack_integers."""
    allow_next(PDL)
    HALF: tl.constexpr = 1 << (BITS - 1)
    PLANES: tl.constexpr = 16 // BITS  # in a word
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    block = tl.program_id(1)
    group = block // group_blocks
    factors = tl.load(scales + group * num_rows + rows, mask=is_row, other=0.0).to(tl.float32)
    shift = tl.zeros([ROWS], tl.float32)
    if HAS_ZEROS:
        shift = tl.load(zeros + group * num_rows + rows, mask=is_row, other=0.0).to(tl.float32)
    pairs = tl.arange(0, 2 * BITS)
    places = (rows.to(tl.int64) * num_blocks + block)[:, None] * (4 * BITS) + 2 * pairs[None, :]
    inner = tl.arange(0, 4 * BITS)
    outputs = out + rows.to(tl.int64)[:, None] * size + inner[None, :]
    wait_previous(PDL)
    for word in tl.static_range(2):
        stored = tl.load(words + places + word, mask=is_row[:, None], other=0)
        for plane in tl.static_range(PLANES):
            low = (stored >> (BITS * plane)) & (2 * HALF - 1)
            high = (stored >> (16 + BITS * plane)) & (2 * HALF - 1)
            values = tl.reshape(tl.join(low, high), [ROWS, 4 * BITS])
            if BITS == 8:
                values = values ^ 128
            column = block * 128 + (word * PLANES + plane) * (4 * BITS)
            dense = (values.to(tl.float32) - HALF - shift[:, None]) * factors[:, None]
            inside = is_row[:, None] & (column + inner < size)[None, :]
            tl.store(outputs + column, dense.to(out.dtype.element_ty), mask=inside)


def dequantize(stored: StoredWeight, out: Tensor) -> None:
    """Write W to out [out_features, in_features]."""
    num_rows, size = stored.shape
    num_blocks = triton.cdiv(size, BLOCK)
    if stored.format == FLOAT8:
        rows, columns = 16, 512 if stored.group_blocks == 0 else BLOCK
        _dequantize_float8_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(size, columns))](
            stored.weight,
            stored.scales,
            out,
            num_rows,
            size,
            stored.stride_row,
            stored.block_rows,
            stored.group_blocks * BLOCK or size + columns,
            ROWS=rows,
            BLOCK=columns,
            **launch_options(out.device),
        )
        return
    rows = 64
    _dequantize_int_kernel[(triton.cdiv(num_rows, rows), num_blocks)](
        stored.weight,
        stored.scales,
        stored.zeros,
        out,
        num_rows,
        size,
        num_blocks,
        stored.group_blocks or num_blocks,
        BITS=4 if stored.format == INT4 else 8,
        HAS_ZEROS=stored.zeros is not None,
        ROWS=rows,
        **launch_options(out.device),
    )
