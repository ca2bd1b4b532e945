"""GEMV, y = x W^T of one token: each weight is read and used once, so tensor cores do not help.

A program holds a few rows of W and accumulates in registers. Programs are small and many: while
some wait for memory, others compute. The first columns of W are loaded before the preceding kernels
have ended (pdl.py).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.epilogues import activate
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.epilogue import Epilogue


def shape_of_programs(num_rows: int, size: int) -> dict[str, Any]:
    """Rows and columns of W that a program takes at once.

    Measured on 2026-11-20 on one H200, Triton 3.6, bfloat16: 2 to 16 rows by 512 to 2,048 columns
    on the shapes of linear_table.py.
    """
    if size <= 1024:
        columns = min(512, power_of_2(size))
        return {"ROWS": 4 if num_rows == 4096 else 8, "BLOCK": columns}
    if size < 4096 or (size % 2048 == 0 and size <= 16384):
        return {"ROWS": 4, "BLOCK": 2048}
    return {"ROWS": 4 if num_rows > 16384 else 2, "BLOCK": 1024}


def linear_one(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, epilogue: Epilogue
) -> None:
    """Write epilogue(x W^T + b) of x [1, size] to out [1, num_rows]."""
    num_rows, size = out.shape[1], x.shape[1]
    shape = shape_of_programs(num_rows, size)
    _linear_one_kernel[(triton.cdiv(num_rows, shape["ROWS"]),)](
        x,
        weight,
        bias,
        out,
        num_rows,
        size,
        **shape,
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        num_warps=4,
        **launch_options(x.device),
    )


@triton.jit
def _linear_one_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    size,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EPILOGUE: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    rows = tl.minimum(rows, num_rows - 1)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    places = weight + rows.to(tl.int64)[:, None] * size + columns[None, :]
    up_places = places + num_rows.to(tl.int64) * size
    piece = tl.load(places, mask=inside[None, :], other=0.0)
    if GATED:
        up_piece = tl.load(up_places, mask=inside[None, :], other=0.0)
    wait_previous(PDL)
    values = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    acc = piece.to(tl.float32) * values
    if GATED:
        up_acc = up_piece.to(tl.float32) * values
    for start in range(BLOCK, size, BLOCK):
        inside = columns < size - start
        piece = tl.load(places + start, mask=inside[None, :], other=0.0)
        values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc += piece.to(tl.float32) * values
        if GATED:
            up_piece = tl.load(up_places + start, mask=inside[None, :], other=0.0)
            up_acc += up_piece.to(tl.float32) * values
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(bias + rows).to(tl.float32)
    y = activate(y, EPILOGUE)
    if GATED:
        up = tl.sum(up_acc, 1)
        if HAS_BIAS:
            up += tl.load(bias + num_rows + rows).to(tl.float32)
        y = y * up
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=is_row)
