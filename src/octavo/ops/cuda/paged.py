"""What the attention kernels have in common: where keys lie in a paged cache, and their softmax.

A block of one layer is [num_kv_heads, K or V, block_size, head_dim], so that what one KV head reads
of a block is contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ITEM_FIELDS = 8  # int32s per work item
MEMBER_FIELDS = 4  # int32s per member of a cascade segment
LOWEST = tl.constexpr(-1.0e30)  # finite, so that rows which see no key yet make no NaN


def precision_of(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies: float32 exactly."""
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def tile_blocks(table, first, end, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Ids of the blocks that hold the keys first .. first + TILE - 1: int32 [TILE], or one for all.

    `first` is a multiple of `tile_alignment`. Past `end` it is the null block, which exists.
    """
    lane = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table + first // BLOCK_SIZE, mask=first < end, other=0)
    elif TILE % BLOCK_SIZE == 0:
        inside = first + lane // BLOCK_SIZE * BLOCK_SIZE < end
        index = first // BLOCK_SIZE + lane // BLOCK_SIZE
        return tl.load(table + index, mask=inside, other=0)
    else:
        key = first + lane
        return tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)


@triton.jit
def key_offsets(
    blocks,
    first,
    block_stride,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """int64 [TILE]: where the keys of `tile_blocks` lie, in elements from the layer's start."""
    lane = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        inside = first % BLOCK_SIZE + lane
    elif TILE % BLOCK_SIZE == 0:
        inside = lane % BLOCK_SIZE
    else:
        inside = (first + lane) % BLOCK_SIZE
    return blocks.to(tl.int64) * block_stride + inside * HEAD_DIM


def tile_alignment(tile: int, block_size: int) -> int:
    """What a tile's first key must be a multiple of."""
    if block_size % tile == 0:
        return tile
    return block_size if tile % block_size == 0 else 1
