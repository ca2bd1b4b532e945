"""Where keys lie in a paged cache: shared by the attention kernels.

A block of one layer is [num_kv_heads, K or V, block_size, head_dim], so that what one KV head reads
of a block is one contiguous piece.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_offsets(
    table,
    first,
    end,
    block_stride,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """int64 [TILE]: of the keys at first .. first + TILE - 1, in elements from the layer's start.

    `first` < `end` is a multiple of `tile_alignment`. Past `end` the offsets are those of block 0,
    or of a place in the last block that nothing was written to.
    """
    lane = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        return block * block_stride + (first % BLOCK_SIZE + lane) * HEAD_DIM
    elif TILE % BLOCK_SIZE == 0:
        inside = first + lane // BLOCK_SIZE * BLOCK_SIZE < end
        index = first // BLOCK_SIZE + lane // BLOCK_SIZE
        block = tl.load(table + index, mask=inside, other=0).to(tl.int64)
        return block * block_stride + lane % BLOCK_SIZE * HEAD_DIM
    else:
        key = first + lane
        block = tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
        return block * block_stride + key % BLOCK_SIZE * HEAD_DIM


def tile_alignment(tile: int, block_size: int) -> int:
    """What a tile's first key must be a multiple of."""
    if block_size % tile == 0:
        return tile
    return block_size if tile % block_size == 0 else 1
