"""Vectors of tokens from a table, or from this rank's part of one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.pdl import allow_next, launch_options

BLOCK = 1024


def embed(ids: Tensor, table: Tensor, first: int = 0, factor: float = 1.0) -> Tensor:
    """Rows of a table, times `factor`, computed in float32 and rounded once.

    Layers begin with this kernel: unlike others, it starts when all kernels before it have ended
    (pdl.py). The next one may start at once.

    Args:
        ids: int64 [num_tokens], dense.
        table: [num_rows, size], dense: the rows from `first` on of the whole table.

    Returns:
        [num_tokens, size]; 0 for ids that the table does not have.
    """
    num_tokens, size = len(ids), table.shape[1]
    out = torch.empty((num_tokens, size), dtype=table.dtype, device=table.device)
    if num_tokens:
        _embed_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
            ids,
            table,
            out,
            first,
            table.shape[0],
            size,
            factor,
            BLOCK=BLOCK,
            PDL=launch_options(table.device)["PDL"],
            num_warps=4,
        )
    return out


@triton.jit(do_not_specialize=["first", "num_rows"])
def _embed_kernel(
    ids, table, out, first, num_rows, size, factor, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    allow_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token) - first
    held = tl.where((row >= 0) & (row < num_rows), size, 0)
    values = tl.load(table + row * size + columns, mask=columns < held, other=0.0)
    values = (values.to(tl.float32) * factor).to(out.dtype.element_ty)
    tl.store(out + token * size + columns, values, mask=columns < size)
