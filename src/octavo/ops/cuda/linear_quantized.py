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

from octavo.ops.cuda.activation import apply_gate
from octavo.ops.cuda.linear import (
    PARTIAL_DTYPE,
    _descriptor,
    _is_hopper,
    _workspace,
    linear,
    linear_partial,
)
from octavo.ops.cuda.linear_gemv import Programs, linear_one
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
from octavo.ops.cuda.quantize import quantize_rows
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.quantized import GroupedInt, QuantizedWeight, ScaledFloat8

MAX_TOKENS = 256  # that are computed without dequantizing W as a whole
_NUM_SMS = 132
_SHARED_MEMORY = 222_000  # bytes per SM that tiles may fill
_REGISTERS = 65536  # per SM
_PROGRAMS = Programs(2, 2048, 2, per_sm=1)


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
    group: int  # inputs that share a scale; 0: there is one scale per output
    zeros: Tensor | None  # bfloat16 at the same places as scales, minus half of the range
    quantizes_inputs: bool = False  # see ScaledFloat8

    @property
    def row_bytes(self) -> int:
        """Of BLOCK inputs of a row."""
        return BLOCK if self.format == FLOAT8 else BLOCK // (2 if self.format == INT4 else 1)

    def staged_groups(self, splits: int) -> int:
        """How many groups a split of the inputs may have, rounded up to a power of 2."""
        if not self.group:
            return 1
        num_inputs = triton.cdiv(triton.cdiv(self.shape[1], BLOCK), splits) * BLOCK
        groups = triton.cdiv(num_inputs, self.group) + (self.group > BLOCK)
        return power_of_2(groups)

    @property
    def row_scales(self) -> Tensor:
        """float32 [1, out_features]: a scale per output, where there are no blocks of inputs."""
        return self.scales.repeat_interleave(self.block_rows, dim=0)[: self.shape[0]].view(1, -1)

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
                columns if columns < size else 0,
                None,
                form.quantizes_inputs,
            )
        if isinstance(form, GroupedInt):
            if form.group < size and form.group % BLOCK and form.group not in (32, 64):
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
                form.group if form.group < size else 0,
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
    scale = SCALE_RESULT
    if stored.group:
        scales_weights = tiles.scales_weights or stored.group < BLOCK
        scale = SCALE_WEIGHTS if scales_weights else SCALE_SUMS
    reduces = tiles.splits > 1 and not is_partial
    sums, arrivals = _workspace(x.device)
    width = stored.row_bytes // stored.weight.element_size()
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
        GROUP_BLOCKS=max(1, stored.group // BLOCK) if stored.group else num_blocks,
        PARTS=max(1, BLOCK // stored.group) if stored.group else 1,
        GROUPS=stored.staged_groups(tiles.splits),
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


class QuantizedCudaLinear:
    """Owns W as StoredWeight has it."""

    keeps_weight = True

    def __init__(
        self, stored: StoredWeight, permutation: Tensor | None, dtype: torch.dtype
    ) -> None:
        """permutation: int64 [in_features], of the inputs (GroupedInt)."""
        self._stored = stored
        self._permutation = permutation
        # What torch's product of FP8 with FP8 takes.
        is_served = dtype == torch.bfloat16 and all(each % 16 == 0 for each in stored.shape)
        self._rounds_inputs = stored.quantizes_inputs and stored.group == 0 and is_served
        self._row_scales = stored.row_scales if self._rounds_inputs else None
        _reserve(stored, dtype)

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See LinearKernel.apply."""
        return self._apply(self._aligned(x), bias, epilogue)

    def apply_partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See LinearKernel.apply_partial."""
        stored, num_tokens, x = self._stored, len(x), self._aligned(x)
        tiles = choose_tiles(num_tokens, stored, False)
        if tiles is None and not self._rounds_inputs:
            return linear_partial(x, self._dense(x.dtype), bias)
        if tiles is None or tiles.splits == 1 or self._is_gemv(num_tokens):
            return self._apply(x, bias, Epilogue.NONE)
        shape = (tiles.splits, num_tokens, stored.shape[0])
        out = x.new_empty(shape, dtype=PARTIAL_DTYPE)
        launch(x, stored, bias, out, Epilogue.NONE, tiles, is_partial=True)
        return out

    def _apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        stored, num_tokens = self._stored, len(x)
        num_rows = stored.shape[0] // 2 if epilogue.is_gated else stored.shape[0]
        tiles = choose_tiles(num_tokens, stored, epilogue.is_gated)
        if tiles is None:
            if self._rounds_inputs:
                return self._apply_rounded(x, bias, epilogue)
            return linear(x, self._dense(x.dtype), bias, epilogue)
        out = x.new_empty((num_tokens, num_rows))
        if self._is_gemv(num_tokens):
            weight, scales, height = stored.weight, stored.scales, stored.block_rows
            linear_one(x, weight, bias, out, epilogue, scales, height, _PROGRAMS)
        else:
            launch(x, stored, bias, out, epilogue, tiles, is_partial=False)
        return out

    def _is_gemv(self, num_tokens: int) -> bool:
        """Whether linear_gemv.py computes: it knows no scales of blocks of inputs."""
        return num_tokens == 1 and self._stored.format == FLOAT8 and self._stored.group == 0

    def _dense(self, dtype: torch.dtype) -> Tensor:
        """W, until another weight is dequantized."""
        num_rows, size = self._stored.shape
        dense = _workspaces[self._stored.weight.device, dtype][: num_rows * size]
        dequantize(self._stored, dense.view(num_rows, size))
        return dense.view(num_rows, size)

    def _apply_rounded(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """With inputs in FP8, too."""
        rounded, scales = quantize_rows(x)
        y = torch._scaled_mm(
            rounded,
            self._stored.weight.t(),
            scale_a=scales,
            scale_b=self._row_scales,
            bias=bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return apply_gate(y, epilogue) if epilogue.is_gated else apply_epilogue(y, epilogue)

    def _aligned(self, x: Tensor) -> Tensor:
        """The inputs in the order of W's columns, where TMA can fetch them."""
        if self._permutation is not None:
            return x.index_select(1, self._permutation)
        is_aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
        return x if is_aligned else x.contiguous().clone()


# Where weights are dequantized, one after the other: as large as the largest one needs.
_workspaces: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def _reserve(stored: StoredWeight, dtype: torch.dtype) -> None:
    device, numel = stored.weight.device, stored.shape[0] * stored.shape[1]
    present = _workspaces.get((device, dtype))
    if present is None or present.numel() < numel:
        _workspaces[device, dtype] = torch.empty(numel, dtype=dtype, device=device)


def make_kernel(form: QuantizedWeight, dtype: torch.dtype) -> QuantizedCudaLinear | None:
    """None: no kernel here takes the form, the dtype or the device."""
    if dtype not in (torch.bfloat16, torch.float16) or not _is_hopper(form.device):
        return None
    stored = StoredWeight.of(form)
    if stored is None:
        return None
    permutation = form.permutation if isinstance(form, GroupedInt) else None
    return QuantizedCudaLinear(stored, permutation, dtype)


def choose_tiles(num_tokens: int, stored: StoredWeight, is_gated: bool) -> Tiles | None:
    """None: so many tokens that W is dequantized, or inputs are rounded."""
    if num_tokens > MAX_TOKENS:
        return None
    num_rows, size = stored.shape
    halves = 2 if is_gated else 1
    tokens = next((each for each in (8, 16, 32, 64) if num_tokens <= each), 128)
    rows = 64
    num_blocks = triton.cdiv(size, BLOCK)
    num_tiles = triton.cdiv(num_rows // halves, rows) * triton.cdiv(num_tokens, tokens)
    per_sm = 2 if tokens * halves <= 64 else 1
    splits = max(1, min(8, _NUM_SMS * per_sm // num_tiles, num_blocks // 4))
    staged = 4 * stored.staged_groups(splits) * rows * halves
    room = _SHARED_MEMORY // per_sm - staged - 1024
    stage = stored.row_bytes * rows * halves + 2 * BLOCK * tokens
    stages = max(2, min(room // stage, 12, triton.cdiv(num_blocks, splits)))
    return Tiles(
        tokens,
        rows,
        stages,
        rows // 16,
        splits,
        per_sm,
        per_sm > 1,
        stored.group > 0 and tokens * halves >= 128,
    )


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
    group,
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
    pairs = tl.arange(0, 2 * BITS)
    sources = words + (rows.to(tl.int64) * num_blocks + block)[:, None] * (4 * BITS)
    sources += 2 * pairs[None, :]
    inner = tl.arange(0, 4 * BITS)
    outputs = out + rows.to(tl.int64)[:, None] * size + inner[None, :]
    wait_previous(PDL)
    for word in tl.static_range(2):
        stored = tl.load(sources + word, mask=is_row[:, None], other=0)
        for plane in tl.static_range(PLANES):
            low = (stored >> (BITS * plane)) & (2 * HALF - 1)
            high = (stored >> (16 + BITS * plane)) & (2 * HALF - 1)
            values = tl.reshape(tl.join(low, high), [ROWS, 4 * BITS])
            if BITS == 8:
                values = values ^ 128
            column = block * 128 + (word * PLANES + plane) * (4 * BITS)
            places = tl.minimum(column, size - 1) // group * num_rows + rows
            factors = tl.load(scales + places, mask=is_row, other=0.0).to(tl.float32)
            shift = tl.zeros([ROWS], tl.float32)
            if HAS_ZEROS:
                shift = tl.load(zeros + places, mask=is_row, other=0.0).to(tl.float32)
            dense = (values.to(tl.float32) - HALF - shift[:, None]) * factors[:, None]
            inside = is_row[:, None] & (column + inner < size)[None, :]
            tl.store(outputs + column, dense.to(out.dtype.element_ty), mask=inside)


def dequantize(stored: StoredWeight, out: Tensor) -> None:
    """Write W to out [out_features, in_features]."""
    num_rows, size = stored.shape
    num_blocks = triton.cdiv(size, BLOCK)
    if stored.format == FLOAT8:
        rows, columns = 16, 512 if stored.group == 0 else BLOCK
        _dequantize_float8_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(size, columns))](
            stored.weight,
            stored.scales,
            out,
            num_rows,
            size,
            stored.stride_row,
            stored.block_rows,
            stored.group or size + columns,
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
        stored.group or size + BLOCK,
        BITS=4 if stored.format == INT4 else 8,
        HAS_ZEROS=stored.zeros is not None,
        ROWS=rows,
        **launch_options(out.device),
    )
