"""y = x W^T on Hopper with W quantized in memory.

Up to 2,048 tokens are computed with W as it is stored (linear_hopper_quantized.py, and from 65 on
linear_hopper_persistent.py). A model that was made for it has its inputs rounded to FP8, too, if
they are more than a few. Otherwise W is dequantized into a workspace first, and computed with as
any other weight: that costs as much as writing it, and the product with many tokens costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor

from octavo.ops.cuda.activation import apply_gate
from octavo.ops.cuda.linear import (
    PARTIAL_DTYPE,
    _descriptor,
    _is_hopper,
    _workspace,
    launch_dense,
    linear,
    linear_partial,
)
from octavo.ops.cuda.linear_hopper_persistent import (
    HALF,
    PIECE,
    persistent_linear_kernel,
    unpacking,
)
from octavo.ops.cuda.linear_hopper_quantized import (
    SCALE_RESULT,
    SCALE_SUMS,
    SCALE_WEIGHTS,
    quantized_linear_kernel,
)
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.quantize import quantize_rows
from octavo.ops.cuda.quantized_tiles import (
    Product,
    Tiles,
    candidates,
    choose_tiles,
    keep_tiles,
    rounded_tiles,
    steps_per_program,
)
from octavo.ops.cuda.stored_weights import BLOCK, INT4, StoredWeight, dequantize
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.quantized import GroupedInt, QuantizedWeight

# With more tokens than these, a product of FP8 with FP8 and rounding its inputs take less time.
MAX_EXACT_TOKENS = 32
_REGISTERS = 65536  # per SM
_MEASURED_BYTES = 160e6  # of several weights: they do not fit the L2 cache
_REPLAYS = 9


def launch(
    x: Tensor,
    stored: StoredWeight,
    bias: Tensor | None,
    out: Tensor,
    epilogue: Epilogue,
    tiles: Tiles,
    is_partial: bool,
) -> None:
    """Run linear_hopper_quantized's kernel, or linear_hopper_persistent's."""
    if tiles.x_stages:
        _launch_persistent(x, stored, bias, out, epilogue, tiles)
        return
    num_tokens, size = x.shape
    num_rows = out.shape[-1]
    rows = tiles.rows // 2 if epilogue.is_gated else tiles.rows
    grid = (triton.cdiv(num_tokens, tiles.tokens), triton.cdiv(num_rows, rows), tiles.splits)
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
        _descriptor(stored.weight, rows, width),
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
        BY_WARP=tiles.by_warp,
        EARLY=tiles.early,
        num_warps=tiles.warps,
        maxnreg=min(255, _REGISTERS // (32 * (tiles.warps + 4) * tiles.per_sm) // 8 * 8),
        **launch_options(x.device),
    )


def _launch_persistent(
    x: Tensor,
    stored: StoredWeight,
    bias: Tensor | None,
    out: Tensor,
    epilogue: Epilogue,
    tiles: Tiles,
) -> None:
    (num_tokens, size), num_rows = x.shape, out.shape[-1]
    rows = tiles.rows // 2 if epilogue.is_gated else tiles.rows
    num_blocks = triton.cdiv(size, BLOCK)
    num_tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_tokens, tiles.tokens)
    per_program = steps_per_program(num_tiles, num_blocks, tiles)
    num_steps = num_tiles * num_blocks
    sums, arrivals = _workspace(x.device)
    bits = 4 if stored.format == INT4 else 8
    fetched = PIECE if epilogue.is_gated else tiles.rows
    low, high = (unpacking(bits, word, x.dtype == torch.float16) for word in range(2))
    num_programs = triton.cdiv(num_steps, per_program)
    is_shared = per_program % num_blocks != 0
    assert not is_shared or 2 * num_programs * tiles.rows * tiles.tokens <= sums.numel()
    assert not is_shared or num_tiles <= len(arrivals)
    persistent_linear_kernel[(num_programs,)](
        _descriptor(x, tiles.tokens, HALF if tiles.in_halves else BLOCK),
        _descriptor(stored.weight, fetched, stored.row_bytes // stored.weight.element_size()),
        stored.scales,
        stored.scales if stored.zeros is None else stored.zeros,
        bias,
        out,
        sums,
        arrivals,
        num_tokens,
        num_rows,
        num_blocks,
        num_steps,
        per_program,
        stored.stride_row,
        stored.stride_group,
        stored.block_rows,
        max(1, stored.group // BLOCK),
        ROWS=tiles.rows,
        STAGES=tiles.stages,
        X_STAGES=tiles.x_stages,
        FORMAT=stored.format,
        SCALE=SCALE_WEIGHTS if stored.group else SCALE_RESULT,
        HAS_ZEROS=stored.zeros is not None,
        PARTS=max(1, BLOCK // stored.group) if stored.group else 1,
        UNPACK_LOW=low,
        UNPACK_HIGH=high,
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        num_warps=tiles.warps,
        maxnreg=min(255, _REGISTERS // (32 * (tiles.warps + 4) * tiles.per_sm) // 8 * 8),
        **launch_options(x.device),
    )


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
        self._row_scales = stored.row_scales if self._rounds_inputs else stored.scales
        _reserve(stored, dtype)

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See LinearKernel.apply."""
        return self._apply(self._aligned(x), bias, epilogue)

    def apply_partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See LinearKernel.apply_partial."""
        stored, num_tokens, x = self._stored, len(x), self._aligned(x)
        if self._rounds(num_tokens):
            return self._apply_rounded(x, bias, Epilogue.NONE, is_partial=True)
        tiles = self._tiles(num_tokens, is_gated=False)
        if tiles is None:
            return linear_partial(x, self._dense(x.dtype), bias)
        if tiles.splits == 1:
            return self._apply(x, bias, Epilogue.NONE)
        shape = (tiles.splits, num_tokens, stored.shape[0])
        out = x.new_empty(shape, dtype=PARTIAL_DTYPE)
        launch(x, stored, bias, out, Epilogue.NONE, tiles, is_partial=True)
        return out

    def _apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        stored, num_tokens = self._stored, len(x)
        if self._rounds(num_tokens):
            return self._apply_rounded(x, bias, epilogue, is_partial=False)
        num_rows = stored.shape[0] // 2 if epilogue.is_gated else stored.shape[0]
        tiles = self._tiles(num_tokens, epilogue.is_gated)
        if tiles is None:
            return linear(x, self._dense(x.dtype), bias, epilogue)
        out = x.new_empty((num_tokens, num_rows))
        launch(x, stored, bias, out, epilogue, tiles, is_partial=False)
        return out

    def _tiles(self, num_tokens: int, is_gated: bool) -> Tiles | None:
        """None: W is dequantized."""
        return choose_tiles(num_tokens, self._stored, is_gated)

    def _rounds(self, num_tokens: int) -> bool:
        return self._rounds_inputs and num_tokens > MAX_EXACT_TOKENS

    def _dense(self, dtype: torch.dtype) -> Tensor:
        """W, until another weight is dequantized."""
        num_rows, size = self._stored.shape
        dense = _workspaces[self._stored.weight.device, dtype][: num_rows * size]
        dequantize(self._stored, dense.view(num_rows, size))
        return dense.view(num_rows, size)

    def _apply_rounded(
        self, x: Tensor, bias: Tensor | None, epilogue: Epilogue, is_partial: bool
    ) -> Tensor:
        """With inputs in FP8, too; is_partial: the caller takes partial sums."""
        stored, num_tokens = self._stored, len(x)
        num_rows = stored.shape[0] // 2 if epilogue.is_gated else stored.shape[0]
        rounded, scales = quantize_rows(x)
        tiles = rounded_tiles(num_tokens, num_rows, stored.shape[1], epilogue.is_gated)
        if tiles is None:
            y = torch._scaled_mm(
                rounded,
                stored.weight.t(),
                scale_a=scales,
                scale_b=self._row_scales,
                bias=bias,
                out_dtype=x.dtype,
                use_fast_accum=True,
            )
            return apply_gate(y, epilogue) if epilogue.is_gated else apply_epilogue(y, epilogue)
        is_partial = is_partial and tiles.splits > 1
        if is_partial:
            out = x.new_empty((tiles.splits, num_tokens, num_rows), dtype=PARTIAL_DTYPE)
        else:
            out = x.new_empty((num_tokens, num_rows))
        factors = scales, stored.scales, stored.block_rows
        launch_dense(rounded, stored.weight, bias, out, epilogue, tiles, is_partial, factors)
        return out

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


def measure_tiles(
    form: QuantizedWeight,
    num_tokens: int,
    epilogue: Epilogue,
    tried: Sequence[Tiles] = (),
) -> dict[Tiles, float]:
    """Measure tiles for products with weights like `form`, and keep the best.

    Inputs are bfloat16.

    Args:
        tried: instead of the candidates that the rule proposes.

    Returns:
        Microseconds of each; empty if there is nothing to choose.
    """
    stored = StoredWeight.of(form)
    product = None if stored is None else Product.of(num_tokens, stored, epilogue.is_gated)
    if stored is None or product is None:
        return {}
    num_copies = int(_MEASURED_BYTES // stored.weight.nbytes) + 2
    copies = [replace(stored, weight=stored.weight.clone()) for _ in range(num_copies)]
    x = torch.randn(num_tokens, product.size, device=form.device, dtype=torch.bfloat16)
    out = x.new_empty((num_tokens, product.num_rows))
    times = {}
    for tiles in tried or candidates(product, stored):
        works = [
            partial(launch, x, each, None, out, epilogue, tiles, is_partial=False)
            for each in copies
        ]
        times[tiles] = microseconds(works)
    if times:
        keep_tiles(form.device, product, min(times, key=lambda tiles: times[tiles]))
    return times


def microseconds(works: Sequence[Callable[[], object]]) -> float:
    """Of each, one after the other in a CUDA graph: the median of several runs of it.

    They should read more weights than the L2 cache holds.
    """
    for work in works:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(works))
    return sorted(times)[len(times) // 2]
