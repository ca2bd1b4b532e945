"""The physical blocks of both tiers, and their moves.

One allocation per tier, block-major: a block of all layers is contiguous, so a copy or a swap of a
block is one large move (the paper's penalty for swapping small blocks, figure 19, disappears).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from octavo.core.step import BlockCopy, StepPlan
from octavo.ops import Staging
from octavo.worker.device.base import Device, Moment

_FIELDS = len(BlockCopy._fields)
_STAGED_COPIES = (
    4096  # that are uploaded with the step's other arrays; more take an upload of theirs
)


class KVCache:
    """Owns the KV tensors that are computed with, and those of the swap tier."""

    def __init__(
        self,
        num_blocks: int,
        num_swap_blocks: int,
        block_shape: Sequence[int],
        dtype: torch.dtype,
        device: Device,
        copies_whole_blocks: bool = False,
    ) -> None:
        """Allocate both tiers.

        Args:
            num_blocks, num_swap_blocks: ids count from 1; block 0 of either tier is in addition.
            block_shape: of one block, [layers, *kv_block_shape] or, if blocks are copied whole,
                [block_size, elements].
            copies_whole_blocks: the shape does not say where a block's first tokens are, because
                layers differ in their heads, or the blocks of some KV groups hold more tokens.

        Raises:
            OutOfMemory: the machine does not give so much.
        """
        self._device = device
        self._copies_whole_blocks = copies_whole_blocks
        self.blocks = device.allocate_blocks((num_blocks + 1, *block_shape), dtype)
        self.swapped = device.allocate_swap_blocks((num_swap_blocks + 1, *block_shape), dtype)

    def stage(self, copies: Sequence[BlockCopy], staging: Staging) -> list[Tensor]:
        """Put the copies where the next upload takes them along: int32 [n, 3] for each run of
        them that `move` carries out at once."""
        if not copies:
            return []
        runs = independent_runs(copies)
        fields = np.array(copies, np.int32)
        if self._copies_whole_blocks:
            fields[:, 2] = self.blocks.shape[-2]
        fields = fields.reshape(-1)
        if len(copies) <= _STAGED_COPIES:
            staged = staging.put("copies", fields, _FIELDS * _STAGED_COPIES, part="blocks")
        else:
            staged = torch.from_numpy(fields).to(self.blocks.device)
        return list(torch.split(staged.view(-1, _FIELDS), [len(run) for run in runs]))

    def move(self, plan: StepPlan, copies: Sequence[Tensor]) -> Moment | None:
        """Carry out a plan's moves: swap out, swap in, copy; what a later one reads, an earlier
        one may just have written. `copies` is what `stage` made of the plan's. Returns the end of
        swapping; None if nothing is swapped."""
        swapped = None
        if plan.swap_out or plan.swap_in:
            with self._device.swapping():
                _copy_runs(self.blocks, self.swapped, plan.swap_out)
                _copy_runs(self.swapped, self.blocks, plan.swap_in)
            swapped = self._device.moment()
        for run in copies:
            self._device.copy_blocks(self.blocks, run)
        return swapped


def _copy_runs(source: Tensor, target: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copy blocks, (source, target) ids, in their order; those that are neighbours on both sides
    together."""
    if not moves:
        return
    cuts = [
        i
        for i, (a, b) in enumerate(pairwise(moves), start=1)
        if (b[0] - a[0], b[1] - a[1]) != (1, 1)
    ]
    for first, end in pairwise([0, *cuts, len(moves)]):
        (source_id, target_id), n = moves[first], end - first
        part = source[source_id : source_id + n]
        target[target_id : target_id + n].copy_(part, non_blocking=True)


def independent_runs(copies: Sequence[BlockCopy]) -> list[list[BlockCopy]]:
    """Cut the copies where one reads or writes what an earlier one of its run wrote."""
    runs: list[list[BlockCopy]] = [[]]
    written: set[int] = set()
    for copy in copies:
        if copy.target in written or copy.source in written:
            runs.append([])
            written.clear()
        runs[-1].append(copy)
        written.add(copy.target)
    return runs
