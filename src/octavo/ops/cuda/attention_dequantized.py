"""Keys and values of a step's prompts, from an FP8 KV cache into the model's dtype.

On Hopper GPUs tensor cores read keys and values as TMA leaves them in shared memory
(attention_prefill_hopper.py), which cannot be e4m3 beside queries of 16 bits. Converting each tile
on its way takes two thirds as many instructions as its softmax, and every tile of queries would do
it again. So each layer converts the blocks that its prompts see once, into room that all layers
share, and attends to them there: all KV heads together, or, over long contexts, as many at a time
as find room. Every e4m3 number is one of float16 and of bfloat16, so nothing is
rounded; scales are those of the scores and of the results.

It pays where enough tokens of a sequence read its keys together, which `num_passes` decides. Other
prompts have the kernel of attention_prefill.py, which converts tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.attention_work_items import Int32s, Sequences, parts_of, starts_of
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous

_ROOM = 256 << 20  # bytes: 65,536 tokens of 8 KV heads of 128
_MOST_BLOCKS = 65_536  # that find room, however small they are
_SPAN = 4  # blocks of a sequence that a program converts one after the other
_TILE = 4096  # elements of each
SPAN_FIELDS = 4
# Rows of queries (tokens times heads of a group) that see a key, on average, and those of all keys,
# from which on converting takes less time.
_LEAST_ROWS, _LEAST_WORK = 256, 1 << 17


class DequantizedPrompts(NamedTuple):
    """Prompts whose blocks are converted for each layer."""

    # Their rows are numbers of blocks in the room, where each one's first visible block is; and so
    # many tokens are left out of their contexts as no new token sees.
    seqs: Sequences
    spans: Int32s  # [num_spans, SPAN_FIELDS], as `DequantizedBlocks.fill` reads them
    num_passes: int  # each of which converts equally many KV heads, and attends to them


class DequantizedBlocks:
    """Room for the blocks that a step's prompts see in one layer.

    Args:
        dtype: float16 or bfloat16.
        room: bytes.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, room: int = _ROOM) -> None:
        self._room = torch.empty(room // dtype.itemsize, dtype=dtype, device=device)
        self._numbers = torch.arange(_MOST_BLOCKS, dtype=torch.int32, device=device)[:, None]

    def num_passes(
        self,
        seqs: Sequences,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        group: int,
        window: int | None,
    ) -> int | None:
        """In how many passes a step's prompts are computed from converted blocks; None: they are
        not, because too few tokens read them, or not even one KV head finds room.

        Args:
            group: query heads per KV head.
        """
        _, contexts, counts = _visible(seqs, block_size, window)
        work = int((contexts.astype(np.int64) * seqs.lens).sum()) * group
        if work < max(_LEAST_ROWS * int(contexts.sum()), _LEAST_WORK):
            return None
        num_blocks = int(counts.sum())
        find_room = self._room.numel() // (num_blocks * 2 * block_size * head_dim)
        if not find_room or num_blocks > _MOST_BLOCKS:
            return None
        return next(n for n in numbers_of_passes(num_kv_heads) if num_kv_heads // n <= find_room)

    def plan(
        self, seqs: Sequences, num_passes: int, block_size: int, window: int | None
    ) -> DequantizedPrompts:
        """How they are computed in so many passes."""
        firsts, contexts, counts = _visible(seqs, block_size, window)
        starts = starts_of(counts).astype(np.int32)
        seq, number = parts_of(-(-counts // _SPAN))
        first = number * _SPAN
        spans = np.empty((len(seq), SPAN_FIELDS), np.int32)
        spans[:, 0] = seqs.rows.take(seq)
        spans[:, 1] = firsts.take(seq) + first
        spans[:, 2] = np.minimum(counts.take(seq) - first, _SPAN)
        spans[:, 3] = starts.take(seq) + first
        seqs = seqs._replace(rows=starts, contexts=contexts)
        return DequantizedPrompts(seqs, spans, num_passes)

    def capacity(self, max_num_seqs: int) -> int:
        """Numbers that say which spans a step of so many sequences has."""
        return (len(self._numbers) // _SPAN + max_num_seqs) * SPAN_FIELDS

    def fill(self, layer_cache: Tensor, table: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
        """Convert a layer's blocks, into the place of what was converted before.

        Args:
            layer_cache: e4m3 [num_blocks, num_kv_heads, 2, block_size, head_dim], blocks strided:
                of the KV heads of a pass.
            table: int32 [num_rows, max_blocks].
            spans: int32 [num_spans * 4], each (table row, its first block there, number of blocks,
                number of the first one in the room).

        Returns:
            The room as a layer's cache, and a table whose row i has the blocks from i on.
        """
        num_elements = layer_cache[0].numel()
        assert layer_cache[0].is_contiguous(), "a block is dense"
        num_blocks = min(self._room.numel() // num_elements, _MOST_BLOCKS)
        blocks = self._room[: num_blocks * num_elements].view(num_blocks, *layer_cache.shape[1:])
        _dequantize_kernel[(len(spans) // SPAN_FIELDS, triton.cdiv(num_elements, _TILE))](
            layer_cache,
            table,
            spans,
            blocks,
            table.stride(0),
            layer_cache.stride(0),
            SIZE=num_elements,
            TILE=_TILE,
            FIELDS=SPAN_FIELDS,
            num_warps=4,
            **launch_options(layer_cache.device),
        )
        return blocks, self._numbers


def numbers_of_passes(num_kv_heads: int) -> list[int]:
    """In how many passes so many KV heads may be computed, equally many in each. They are few,
    because kernels are compiled for each."""
    numbers = [1]
    while num_kv_heads % (2 * numbers[-1]) == 0:
        numbers.append(2 * numbers[-1])
    return list(dict.fromkeys([*numbers, num_kv_heads]))


def _visible(seqs: Sequences, block_size: int, window: int | None) -> tuple[Int32s, Int32s, Int32s]:
    """Of each sequence, the first block that a new token sees, tokens from there on, and blocks."""
    firsts = np.zeros_like(seqs.contexts)
    if window is not None:
        firsts = np.maximum(seqs.contexts - seqs.lens - window + 1, 0) // block_size
    contexts = seqs.contexts - firsts * block_size
    return firsts, contexts, -(-contexts // block_size)


@triton.jit(do_not_specialize=["table_stride"])
def _dequantize_kernel(
    cache,
    table,
    spans,
    blocks,
    table_stride,
    block_stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: some elements of each block of a span."""
    allow_next(PDL)
    wait_previous(PDL)
    span = spans + tl.program_id(0) * FIELDS
    source = table + tl.load(span).to(tl.int64) * table_stride + tl.load(span + 1)
    count = tl.load(span + 2)
    target = blocks + tl.load(span + 3).to(tl.int64) * SIZE
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = element < SIZE
    for i in range(count):
        block = tl.load(source + i).to(tl.int64)
        x = tl.load(cache + block * block_stride + element, mask=inside)
        tl.store(target + i * SIZE + element, x.to(blocks.dtype.element_ty), mask=inside)
