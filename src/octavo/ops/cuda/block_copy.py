"""Batched copy of the filled part of KV blocks (copy-on-write).

Reference: slices copied in PyTorch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COPY_FIELDS = 3  # integers of a copy: source, target, tokens
_CHUNK = 8192  # words per program


@triton.jit
def _copy_kernel(
    cache,
    copies,
    words,
    FIELDS: tl.constexpr,
    TOKEN: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program copies one chunk of one block.

    words: per block; TOKEN: words per token in one of its pieces, which hold TOKENS tokens each.
    """
    copy = copies + tl.program_id(0) * FIELDS
    offset = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    source = tl.load(copy).to(tl.int64)
    target = tl.load(copy + 1).to(tl.int64)
    filled = tl.load(copy + 2) * TOKEN
    wanted = (offset < words) & (offset % (TOKENS * TOKEN) < filled)
    chunk = tl.load(cache + source * words + offset, mask=wanted)
    tl.store(cache + target * words + offset, chunk, mask=wanted)


def copy_blocks(cache: Tensor, copies: Tensor) -> None:
    """Copy tokens 0 .. copies[i, 2] - 1 of block copies[i, 0] to block copies[i, 1], for all i at
    once.

    cache [num_blocks, ..., block_size, size], dense: each piece of a block holds `size` elements
    per token. copies int32 or int64 [n, COPY_FIELDS] on the cache's device. No copy may read or
    write what another one writes: the caller splits dependent copies into several calls.
    """
    if not len(copies):
        return
    assert cache.is_contiguous(), "the cache is one dense allocation"
    assert copies.is_contiguous(), "copies are dense"
    block_size, size = cache.shape[-2:]
    # Copied in words of 4 bytes if a token's elements are a multiple of that, or else of 2 or 1.
    token_bytes = size * cache.itemsize
    words_of = (torch.int32, torch.int16, torch.int8)
    word = next(word for word in words_of if token_bytes % word.itemsize == 0)
    words = cache.view(len(cache), -1).view(word)
    _copy_kernel[(len(copies), -(-words.shape[1] // _CHUNK))](
        words,
        copies,
        words.shape[1],
        FIELDS=COPY_FIELDS,
        TOKEN=token_bytes // word.itemsize,
        TOKENS=block_size,
        CHUNK=_CHUNK,
        num_warps=8,
    )
