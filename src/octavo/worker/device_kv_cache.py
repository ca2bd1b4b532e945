"""The physical blocks on a GPU, with the swap tier in pinned host memory, and their moves.

Block-major, as in kv_cache.py: swapping a block of all layers is one large copy, and so are blocks
that are neighbours on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from octavo.core.step import StepPlan
from octavo.errors import OutOfMemory
from octavo.memory_budget import format_bytes
from octavo.ops.cuda.block_copy import COPY_FIELDS, copy_blocks
from octavo.worker.device_clock import Moment
from octavo.worker.kv_cache import Move, independent_runs
from octavo.worker.staging import DeviceStaging

# Copies of blocks that one step brings to the device with its other arrays.
_STAGED_COPIES = 4096


class DeviceKVCache:
    """Owns the KV tensors of the device and of the swap tier."""

    def __init__(
        self,
        num_blocks: int,
        num_swap_blocks: int,
        block_shape: Sequence[int],
        dtype: torch.dtype,
        staging: DeviceStaging,
        device: torch.device,
    ) -> None:
        """Allocate both tiers; ids count from 1, block 0 of either tier is in addition.

        Raises:
            OutOfMemory: the host does not give so much pinned memory.
        """
        self._staging = staging
        self._device = device
        is_gpu = device.type == "cuda"
        # Kernels read whole tiles and mask what lies behind a sequence: that must be finite.
        self.blocks = torch.zeros((num_blocks + 1, *block_shape), dtype=dtype, device=device)
        shape = (num_swap_blocks + 1, *block_shape)
        try:
            self.swapped = torch.empty(shape, dtype=dtype, pin_memory=is_gpu)
        except RuntimeError as error:
            size = format_bytes(num_swap_blocks * self.blocks[0].nbytes)
            raise OutOfMemory(
                f"{size} of pinned host memory for swapped blocks cannot be had; lower swap_space"
            ) from error
        self._swap_stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._runs: list[Tensor] = []

    def stage(self, plan: StepPlan) -> None:
        """Put what the copies of `plan` need where the step's arrays are."""
        self._runs = []
        if not plan.copies:
            return
        runs = independent_runs(plan.copies)
        copies = np.array(plan.copies, np.int32).reshape(-1)
        if len(plan.copies) <= _STAGED_COPIES:
            staged = self._staging.put("copies", copies, COPY_FIELDS * _STAGED_COPIES)
        else:
            staged = torch.from_numpy(copies).to(self._device)
        self._runs = list(torch.split(staged.view(-1, COPY_FIELDS), [len(run) for run in runs]))

    def move(self, plan: StepPlan) -> Moment:
        """Start a plan's moves: swap out, swap in, copy. Returns the end of swapping."""
        if plan.swap_out or plan.swap_in:
            self._swap(plan)
        swapped = Moment(self._device)
        for copies in self._runs:
            copy_blocks(self.blocks, copies)
        return swapped

    def _swap(self, plan: StepPlan) -> None:
        stream = self._swap_stream
        if stream is None:
            _copy_runs(self.blocks, self.swapped, plan.swap_out)
            _copy_runs(self.swapped, self.blocks, plan.swap_in)
            return
        # Behind the steps before, which may still write these blocks, and before this one.
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            _copy_runs(self.blocks, self.swapped, plan.swap_out)
            _copy_runs(self.swapped, self.blocks, plan.swap_in)
        current.wait_stream(stream)


def _copy_runs(source: Tensor, target: Tensor, moves: Sequence[Move]) -> None:
    """Copy blocks in their order, neighbours together."""
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
