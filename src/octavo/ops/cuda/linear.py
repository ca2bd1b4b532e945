"""y = x W^T for the few tokens of a decode step, where reading W is what takes the time.

One token: linear_one.py. Some tokens, on Hopper: linear_hopper.py with the tiles that
linear_table.py chooses. Everything else (many tokens, float32, other GPUs) is cuBLAS, for some
shapes by two products rather than one.

What holds for a token's result: it depends on the kernel and the tiles, which follow from the
number of tokens padded as linear_table.py does, never on the values of the other tokens. Sums of
shares of K are added in a fixed order, so the same call gives the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from octavo.ops.cuda.activation import silu_mul
from octavo.ops.cuda.linear_gemv import linear_one
from octavo.ops.cuda.linear_table import Tiles, choose_tiles, pays_in_halves, pays_in_two_parts
from octavo.ops.cuda.pdl import launch_options

Activation = Literal["relu", "silu_mul"] | None
ACTIVATION_CODES: dict[Activation, int] = {None: 0, "relu": 1, "silu_mul": 2}

# Parts may cancel each other: rounded to bfloat16 each, they would then lose more than their sum
# does when it is rounded (benchmarks/logits_error.py).
PARTS_DTYPE = torch.float32

_WORKSPACE_BYTES = 32 << 20
_MAX_TILES = 1 << 14
_REGISTERS = 65536  # of a multiprocessor
_FAST_DTYPES = (torch.bfloat16, torch.float16)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = None
) -> Tensor:
    """activation(x W^T + b).

    Args:
        x: [num_tokens, in_features], bfloat16, float16 or float32; the last dimension dense.
        weight: [out_features, in_features], dense, of x's dtype.
        bias: [out_features].
        activation: "silu_mul" takes the first half of the outputs as gates of the second.

    Returns:
        [num_tokens, out_features], half as wide for "silu_mul".
    """
    num_tokens, size = x.shape
    code = ACTIVATION_CODES[activation]
    num_rows = weight.shape[0] // 2 if activation == "silu_mul" else weight.shape[0]
    if num_tokens == 1 and _is_dense(x, weight):
        out = x.new_empty((1, num_rows))
        linear_one(x, weight, bias, out, code)
        return out
    tiles = choose_tiles(num_tokens, num_rows, size, code) if _is_fast(x, weight) else None
    if tiles is None:
        return _plain(x, weight, bias, activation)
    out = x.new_empty((num_tokens, num_rows))
    _launch(x, weight, bias, out, code, tiles, parts=False)
    return out


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, perhaps in parts: [num_parts, num_tokens, out_features] to be added up.

    For a norm that adds them up: where K is cut into shares, none of them waits for the others.
    Parts are of PARTS_DTYPE.
    """
    num_tokens, size = x.shape
    num_rows = weight.shape[0]
    if num_tokens == 1 or not _is_fast(x, weight):
        return linear(x, weight, bias)
    tiles = choose_tiles(num_tokens, num_rows, size, 0)
    if tiles is None and bias is None and pays_in_two_parts(num_tokens, num_rows, size):
        shares = (2, size // 2)
        return torch.bmm(
            x.view(num_tokens, *shares).transpose(0, 1),
            weight.view(num_rows, *shares).permute(1, 2, 0),
            out_dtype=PARTS_DTYPE,
        )
    if tiles is None or tiles.shares == 1:
        return linear(x, weight, bias)
    out = x.new_empty((tiles.shares, num_tokens, num_rows), dtype=PARTS_DTYPE)
    _launch(x, weight, bias, out, 0, tiles, parts=True)
    return out


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    if activation == "relu" and bias is not None:
        # cuBLAS takes both along in the product; there is no public name for it.
        return torch._addmm_activation(bias, x, weight.t())
    if activation == "silu_mul" and bias is None and pays_in_halves(len(x), *weight.shape):
        return silu_mul(_halves(x, weight))
    y = F.linear(x, weight, bias)
    if activation == "relu":
        return y.relu_()
    return silu_mul(y) if activation == "silu_mul" else y


def _halves(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T by a product for each half of W."""
    y = x.new_empty((len(x), len(weight)))
    for rows, out in zip(weight.chunk(2), y.chunk(2, dim=1), strict=True):
        torch.mm(x, rows.t(), out=out)
    return y


def _is_dense(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype and x.stride(1) == 1 and weight.is_contiguous()


def _is_fast(x: Tensor, weight: Tensor) -> bool:
    """Whether linear_hopper.py takes such operands: the copy engine wants 16-byte rows."""
    return (
        x.dtype in _FAST_DTYPES
        and x.device.type == "cuda"
        and _is_dense(x, weight)
        and x.shape[1] % 64 == 0
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
        and _is_hopper(x.device)
    )


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] == 9


@cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums of shares, and how many have arrived (0 between kernels). For one stream."""
    assert not torch.cuda.is_current_stream_capturing(), "run a step before capturing it"
    sums = torch.empty(_WORKSPACE_BYTES // 4, dtype=torch.float32, device=device)
    return sums, torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    activation: int,
    tiles: Tiles,
    parts: bool,
) -> None:
    """Run linear_hopper's kernel."""
    from octavo.ops.cuda.linear_hopper import linear_kernel

    num_tokens, size = x.shape
    num_rows = out.shape[-1]
    grid = (
        triton.cdiv(num_tokens, tiles.tokens),
        triton.cdiv(num_rows, tiles.rows),
        tiles.shares,
    )
    reduces = tiles.shares > 1 and not parts
    sums, arrivals = _workspace(x.device)
    width = tiles.tokens * tiles.rows * (2 if activation == ACTIVATION_CODES["silu_mul"] else 1)
    assert not reduces or grid[0] * grid[1] <= _MAX_TILES
    assert not reduces or grid[0] * grid[1] * tiles.shares * width <= sums.numel()
    linear_kernel[grid](
        _descriptor(x, tiles.tokens, tiles.columns),
        _descriptor(weight, tiles.rows, tiles.columns),
        bias,
        out,
        sums,
        arrivals,
        num_tokens,
        num_rows,
        size,
        tiles.shares,
        STAGES=tiles.stages,
        SPLIT=tiles.shares if reduces else 1,
        PARTS=parts,
        SWAP=tiles.swap,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        EARLY=tiles.early,
        num_warps=tiles.warps,
        maxnreg=min(255, _REGISTERS // (32 * (tiles.warps + 4) * tiles.per_sm) // 8 * 8),
        **launch_options(x.device),
    )


def _descriptor(matrix: Tensor, rows: int, columns: int) -> Any:
    """What the copy engine needs to fetch blocks [rows, columns] of `matrix`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _block_layout(rows, columns, matrix.dtype)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


@cache
def _block_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)
