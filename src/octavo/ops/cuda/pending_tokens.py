"""Tokens that the host does not know yet: drawn by the step before, kept on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous

_BLOCK = 128  # an element per thread


@triton.jit
def _fill_pending(token_ids, rows, last_tokens, num_tokens, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < num_tokens
    token = tl.load(token_ids + offset, mask=inside, other=0)
    pending = inside & (token < 0)
    row = tl.load(rows + offset, mask=pending, other=0)
    tl.store(token_ids + offset, tl.load(last_tokens + row, mask=pending), mask=pending)


def fill_pending(token_ids: Tensor, rows: Tensor, last_tokens: Tensor) -> None:
    """Where token_ids[i] is negative, it becomes last_tokens[rows[i]].

    token_ids int64 [n], rows int32 [n], last_tokens int64 [num_rows], all dense.
    """
    n = len(token_ids)
    _fill_pending[(triton.cdiv(n, _BLOCK),)](token_ids, rows, last_tokens, n, BLOCK=_BLOCK)


@triton.jit
def _keep_tokens(
    token_ids,
    rows,
    last_tokens,
    address,
    counter,
    num_tokens,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < num_tokens
    wait_previous(PDL)
    token = tl.load(token_ids + offset, mask=inside, other=0)
    row = tl.load(rows + offset, mask=inside, other=0)
    # Logits that are not finite give no token; the next step must not look for its embedding.
    tl.store(last_tokens + row, tl.maximum(token, 0), mask=inside)
    if address is not None:
        results = tl.load(address).to(tl.pointer_type(tl.int64))
        tl.store(results + 1 + offset, token, mask=inside)
        if counter is not None:
            tl.store(results, tl.load(counter), mask=tl.program_id(0) == 0)


def keep_tokens(
    token_ids: Tensor,
    rows: Tensor,
    last_tokens: Tensor,
    address: Tensor | None = None,
    counter: Tensor | None = None,
) -> None:
    """last_tokens[rows[i]] becomes token_ids[i], or 0 where that is negative.

    Only row 0, which belongs to no sequence, may repeat.

    Args:
        token_ids: int64 [n], dense.
        rows: int32 [n], dense.
        last_tokens: int64 [num_rows], dense.
        address: int64 [1]: of int64 [1 + n] in memory of the device, or pinned memory of the host,
            where the kernel writes the tokens, too, from the second element on.
        counter: int64 [1], which it writes into the first element.
    """
    n = len(token_ids)
    _keep_tokens[(triton.cdiv(n, _BLOCK),)](
        token_ids,
        rows,
        last_tokens,
        address,
        counter,
        n,
        BLOCK=_BLOCK,
        **launch_options(token_ids.device),
    )
