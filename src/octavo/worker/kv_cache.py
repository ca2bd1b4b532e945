"""The physical blocks of both tiers on a CPU, and their moves.

One allocation per tier, block-major: a block of all layers is contiguous, so a copy or a swap of a
block is one large move (the paper's penalty for swapping small blocks, figure 19, disappears).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.step import BlockCopy, StepPlan
from octavo.errors import OutOfMemory
from octavo.memory_budget import format_bytes

Move = tuple[int, int]  # (source, destination) block ids


class KVCache:
    """Owns the KV tensors that are computed with, and those of the swap tier."""

    def __init__(
        self,
        num_blocks: int,
        num_swap_blocks: int,
        block_shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """Allocate both tiers.

        Args:
            num_blocks, num_swap_blocks: ids count from 1; block 0 of either tier is in addition.
            block_shape: of one block, [layers_per_group, *kv_block_shape].

        Raises:
            OutOfMemory: the machine does not give so much.
        """
        # Lazy: memory is taken when a block is first written.
        self.blocks = _zeros((num_blocks + 1, *block_shape), dtype)
        self.swapped = _zeros((num_swap_blocks + 1, *block_shape), dtype)

    def move(self, plan: StepPlan) -> float:
        """Carry out a plan's moves: swap out, swap in, copy; what a later one reads, an earlier
        one may just have written. Returns the seconds that swapping took."""
        started = perf_counter()
        _copy_blocks(self.blocks, self.swapped, plan.swap_out)
        _copy_blocks(self.swapped, self.blocks, plan.swap_in)
        swap_seconds = perf_counter() - started if plan.swap_out or plan.swap_in else 0.0
        _copy_blocks(self.blocks, self.blocks, [(c.source, c.target) for c in plan.copies])
        return swap_seconds


def _zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    num_bytes = prod(shape) * dtype.itemsize
    # Fresh anonymous pages are zero without being touched; torch.zeros would write them all.
    try:
        memory = mmap.mmap(-1, num_bytes)
    except (OSError, MemoryError) as error:
        raise OutOfMemory(
            f"{format_bytes(num_bytes)} of host memory for KV blocks cannot be had ({error}); "
            "lower kv_cache_memory, num_blocks or swap_space"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def _copy_blocks(source: Tensor, target: Tensor, moves: Sequence[Move]) -> None:
    """Copy whole blocks in the order of `moves`."""
    if not moves:
        return
    # A block is one stretch of bytes: a plain loop of memcpy takes a half to a tenth of the time of
    # torch's indexed copies.
    from_bytes, to_bytes = _bytes_of(source), _bytes_of(target)
    for source_id, target_id in moves:
        to_bytes[target_id] = from_bytes[source_id]


def _bytes_of(blocks: Tensor) -> NDArray[np.uint8]:
    """uint8 [num_blocks, block_bytes], the same memory."""
    flat: NDArray[np.uint8] = blocks.view(len(blocks), -1).view(torch.uint8).numpy()
    return flat


def independent_runs(copies: Sequence[BlockCopy]) -> list[list[BlockCopy]]:
    """Cut the copies where one reads or writes what an earlier one of its run wrote.

    For devices that carry out a run at once (device_kv_cache.py).
    """
    runs: list[list[BlockCopy]] = [[]]
    written: set[int] = set()
    for copy in copies:
        if copy.target in written or copy.source in written:
            runs.append([])
            written.clear()
        runs[-1].append(copy)
        written.add(copy.target)
    return runs
