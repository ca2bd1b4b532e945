"""y = x W^T on NVIDIA GPUs: GEMV, skinny GEMM on Hopper, cuBLAS.

One token is a GEMV (linear_gemv.py; on Hopper, of products that follow each other, linear_ring.py).
Up to 128 tokens on Hopper are a skinny GEMM (linear_hopper.py) with the tiles that linear_table.py
chooses; all are bound by reading W. Everything else (more tokens, float32, other GPUs) is cuBLAS,
for some shapes as two products rather than one.

A token's result depends on the kernel and its tiles, which follow from the number of tokens padded
as in linear_table.py, but never on the values of the other tokens. Split-K partial sums are added
in a fixed order, so the same call gives the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from octavo.ops.cuda.activation import apply_gate
from octavo.ops.cuda.devices import is_on_hopper
from octavo.ops.cuda.float7 import Float7Weight
from octavo.ops.cuda.linear_gemv import linear_one, pays_to_norm
from octavo.ops.cuda.linear_table import Tiles, choose_tiles, pays_as_two_splits, pays_in_halves
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.tile_sizes import registers_for
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.norm import DeferredNorm
from octavo.ops.quantized import RoundedInputs

# Partial sums may cancel each other: rounding each to bfloat16 would then lose more than rounding
# their sum does (benchmarks/logits_error.py).
PARTIAL_DTYPE = torch.float32

_WORKSPACE_BYTES = 46 << 20  # two tiles of 160 KB for each SM need 43 MB
_MAX_TILES = 1 << 14
# cuBLAS's product with bias and ReLU; it has no public name, and a torch may lack the private one.
_addmm_activation = getattr(torch, "_addmm_activation", None)
_FAST_DTYPES = (torch.bfloat16, torch.float16)


class CudaLinear:
    """Uses a weight in place, without packing it."""

    keeps_weight = True

    def __init__(self, weight: Tensor, is_chained: bool = False) -> None:
        """is_chained: see make_linear_kernel."""
        self._weight = weight
        self._is_in_ring = is_chained and _takes_ring(weight)

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See LinearKernel.apply."""
        if self._is_in_ring and len(x) == 1:
            return self._apply_ring(x, bias, epilogue)
        return linear(x, self._weight, bias, epilogue)

    def apply_partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See LinearKernel.apply_partial."""
        if self._is_in_ring and len(x) == 1:
            return self._apply_ring(x, bias, Epilogue.NONE)
        return linear_partial(x, self._weight, bias)

    def norms_inputs(self, num_tokens: int, norms_branch: bool) -> bool:
        """See NormingKernel.norms_inputs."""
        is_served = num_tokens == 1 and self._weight.is_contiguous()
        num_rows, size = self._weight.shape
        return is_served and (self._is_in_ring or pays_to_norm(num_rows, size, norms_branch))

    def apply_normed(self, x: DeferredNorm, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See NormingKernel.apply_normed."""
        if self._is_in_ring:
            return self._apply_ring(x, bias, epilogue)
        return linear_one(x, self._weight, bias, epilogue)

    def _apply_ring(
        self, x: Tensor | DeferredNorm, bias: Tensor | None, epilogue: Epilogue
    ) -> Tensor:
        from octavo.ops.cuda.linear_ring import linear_by_ring

        return linear_by_ring(x, self._weight, bias, epilogue)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    epilogue: Epilogue = Epilogue.NONE,
    is_new: bool = False,
) -> Tensor:
    """epilogue(x W^T + b).

    Args:
        x: [num_tokens, in_features], bfloat16, float16 or float32; the last dimension dense.
        weight: [out_features, in_features], dense, of x's dtype.
        bias: [out_features].
        epilogue: fused into our kernels; after cuBLAS's, a kernel of its own.
        is_new: whether a kernel of the same step writes W. Then cuBLAS multiplies: our kernels load
            W before the preceding ones have ended (pdl.py).

    Returns:
        [num_tokens, out_features], half as wide for a gated epilogue.
    """
    if is_new:
        return _plain(x, weight, bias, epilogue)
    num_tokens, size = x.shape
    if num_tokens == 1 and _is_dense(x, weight):
        return linear_one(x, weight, bias, epilogue)
    num_rows = weight.shape[0] // 2 if epilogue.is_gated else weight.shape[0]
    tiles = choose_tiles(num_tokens, num_rows, size, epilogue) if _is_fast(x, weight) else None
    if tiles is None:
        return _plain(x, weight, bias, epilogue)
    out = x.new_empty((num_tokens, num_rows))
    launch_dense(x, weight, bias, out, epilogue, tiles, is_partial=False)
    return out


def linear_partial(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, is_new: bool = False
) -> Tensor:
    """x W^T + b, or its split-K partial sums [num_splits, num_tokens, out_features].

    The norm that follows adds them up, so no split waits for the others. Partial sums have
    PARTIAL_DTYPE. is_new: see `linear`.
    """
    num_tokens, size = x.shape
    num_rows = weight.shape[0]
    if num_tokens == 1 or not _is_fast(x, weight):
        return linear(x, weight, bias, is_new=is_new)
    tiles = None if is_new else choose_tiles(num_tokens, num_rows, size, Epilogue.NONE)
    if tiles is None and bias is None and pays_as_two_splits(num_tokens, num_rows, size):
        splits = (2, size // 2)
        return torch.bmm(
            x.view(num_tokens, *splits).transpose(0, 1),
            weight.view(num_rows, *splits).permute(1, 2, 0),
            out_dtype=PARTIAL_DTYPE,
        )
    if tiles is None or tiles.splits == 1:
        return linear(x, weight, bias, is_new=is_new)
    out = x.new_empty((tiles.splits, num_tokens, num_rows), dtype=PARTIAL_DTYPE)
    launch_dense(x, weight, bias, out, Epilogue.NONE, tiles, is_partial=True)
    return out


def _takes_ring(weight: Tensor) -> bool:
    if not _is_fast(weight, weight):
        return False
    from octavo.ops.cuda.linear_ring import takes_ring

    return takes_ring(*weight.shape)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
    if epilogue == Epilogue.RELU and _addmm_activation is not None:
        shift = _zeros(len(weight), x.dtype, x.device) if bias is None else bias
        result: Tensor = _addmm_activation(shift, x, weight.t())
        return result
    if epilogue.is_gated and bias is None and pays_in_halves(len(x), *weight.shape):
        return apply_gate(_halves(x, weight), epilogue)
    y = F.linear(x, weight, bias)
    if epilogue == Epilogue.RELU:
        return y.relu_()
    return apply_gate(y, epilogue) if epilogue.is_gated else apply_epilogue(y, epilogue)


@cache
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A bias for products that have none, of which cuBLAS has no fused form."""
    return torch.zeros(size, dtype=dtype, device=device)


def _halves(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T as one product per half of W."""
    y = x.new_empty((len(x), len(weight)))
    for rows, out in zip(weight.chunk(2), y.chunk(2, dim=1), strict=True):
        torch.mm(x, rows.t(), out=out)
    return y


def _is_dense(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype and x.stride(1) == 1 and weight.is_contiguous()


def _is_fast(x: Tensor, weight: Tensor) -> bool:
    """Whether linear_hopper.py takes such operands: TMA needs rows aligned to 16 bytes."""
    return (
        x.dtype in _FAST_DTYPES
        and is_on_hopper(x.device)
        and _is_dense(x, weight)
        and x.shape[1] % 64 == 0
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


@cache
def split_workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Split-K partial sums, and how many splits of each tile are done (0 between kernels).

    For one stream.
    """
    assert not torch.cuda.is_current_stream_capturing(), "run a step before capturing it"
    sums = torch.empty(_WORKSPACE_BYTES // 4, dtype=torch.float32, device=device)
    return sums, torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def launch_dense(
    x: Tensor | RoundedInputs,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | RoundedInputs,
    epilogue: Epilogue,
    tiles: Tiles,
    is_partial: bool,
    scales: tuple[Tensor, int] | None = None,
    words: Float7Weight | None = None,
) -> None:
    """Run linear_hopper's kernel.

    x: [num_tokens, size], or in float8, in one number each or in two.
    out: may take two float8 numbers each, with a scale for the rows of each tile, if there are no
        splits.
    scales: of W in float8, float32 per so many rows.
    words: W in 7 bits, which are read instead; `scales` are those of W / 2 ** UNIT then.
    """
    from octavo.ops.cuda.linear_hopper import linear_kernel

    given, x_scales, group = x if isinstance(x, RoundedInputs) else (x, None, 0)
    results, out_scales, rows = out if isinstance(out, RoundedInputs) else (out, None, tiles.rows)
    num_tokens, size, num_rows = len(given), given.shape[-1], results.shape[-1]
    numbers = 1
    if given.dim() == 3:
        given, numbers = given.view(-1, size), 2
    grid = (
        triton.cdiv(num_tokens, tiles.tokens),
        triton.cdiv(num_rows, tiles.rows),
        tiles.splits,
    )
    reduces = tiles.splits > 1 and not is_partial
    assert out_scales is None or (tiles.splits == 1 and rows == tiles.rows)
    assert not epilogue.is_gated or group % tiles.columns == 0
    sums, arrivals = split_workspace(given.device)
    width = tiles.tokens * tiles.rows * (2 if epilogue.is_gated else 1)
    assert not reduces or grid[0] * grid[1] <= _MAX_TILES
    assert not reduces or grid[0] * grid[1] * tiles.splits * width <= sums.numel()
    row_scales, block_rows = scales or (None, 1)
    if words is None:
        sources = block_descriptor(weight, tiles.rows, tiles.columns), None, None
    else:
        sources = words.descriptors(tiles.rows)
    linear_kernel[grid](
        block_descriptor(given, numbers * tiles.tokens, tiles.columns),
        *sources,
        x_scales,
        row_scales,
        bias,
        results,
        out_scales,
        sums,
        arrivals,
        num_tokens,
        num_rows,
        size,
        tiles.splits,
        0 if x_scales is None else x_scales.stride(0),
        0 if out_scales is None else out_scales.stride(0),
        block_rows,
        STAGES=tiles.stages,
        SPLITS=tiles.splits if reduces else 1,
        PARTIAL=is_partial,
        SWAP=tiles.swap,
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        HAS_SCALES=scales is not None,
        NUMBERS=numbers,
        GROUP=group,
        ROUNDS=out_scales is not None,
        EARLY=tiles.early,
        num_warps=tiles.warps,
        maxnreg=registers_for(tiles.warps + 4, tiles.per_sm),
        **launch_options(given.device),
    )


def block_descriptor(matrix: Tensor, rows: int, columns: int) -> Any:
    """The TMA descriptor for fetching blocks [rows, columns] of `matrix`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = block_layout(rows, columns, matrix.dtype)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


@cache
def block_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """How shared memory holds blocks [rows, columns] that TMA fetches."""
    from triton.experimental.gluon import language as gl

    elements = {
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.int32: gl.int32,
    }
    return gl.NVMMASharedLayout.get_default_for([rows, columns], elements[dtype])
