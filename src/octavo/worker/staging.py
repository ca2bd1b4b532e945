"""How a step's small arrays reach the device: packed on the host, in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NUM_BUFFERS = 3  # of the host: steps that may be prepared before the first of them is copied
_ALIGNMENT = 256  # bytes


@dataclass(frozen=True, slots=True)
class _Region:
    hosts: list[Tensor]  # a pinned buffer's part each
    device: Tensor
    end: int  # of its bytes in the buffers


class DeviceStaging:
    """Owns a buffer on the device and its twins in pinned memory.

    A step calls `begin`, `put` for each of its arrays, and `flush`. A name keeps its place for
    good, so captured graphs find the arrays of any step. The copy runs in the order of the stream:
    behind the kernels of the step before, which may still read what it replaces.
    """

    def __init__(
        self,
        device: torch.device,
        max_num_seqs: int,
        max_num_tokens: int,
        num_bytes: int = 16 << 20,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_tokens = max_num_tokens
        is_gpu = device.type == "cuda"
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._hosts = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
            for _ in range(_NUM_BUFFERS)
        ]
        self._copied = (
            [torch.cuda.Event() for _ in range(_NUM_BUFFERS)]  # type: ignore[no-untyped-call]
            if is_gpu
            else []
        )
        self._regions: dict[str, _Region] = {}
        self._reserved = 0
        self._current = 0
        self._used = 0

    def begin(self) -> None:
        """Start a new step: take the next buffer, once it is no longer being copied."""
        self._current = (self._current + 1) % _NUM_BUFFERS
        self._used = 0
        if self._copied:
            self._copied[self._current].synchronize()

    def put(self, name: str, values: NDArray[Any], capacity: int) -> Tensor:
        """See Staging.put; values [n] of any fixed dtype."""
        assert values.ndim == 1, "flat arrays only"
        region = self._regions.get(name)
        if region is None:
            region = self._reserve(name, values.dtype, capacity)
        assert len(values) <= len(region.device), (
            f"{name}: {len(values)} values, but room for {len(region.device)}"
        )
        region.hosts[self._current].numpy()[: len(values)] = values
        self._used = max(self._used, region.end)
        return region.device[: len(values)]

    def flush(self) -> None:
        """Copy what was put; the device computes with it from here on."""
        used = self._used
        self._device[:used].copy_(self._hosts[self._current][:used], non_blocking=True)
        if self._copied:
            self._copied[self._current].record()

    def _reserve(self, name: str, dtype: np.dtype[Any], capacity: int) -> _Region:
        start, num_bytes = self._reserved, capacity * dtype.itemsize
        end = start + num_bytes
        assert end <= len(self._device), f"{name}: no room for {num_bytes} bytes"
        self._reserved = -(-end // _ALIGNMENT) * _ALIGNMENT
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        parts = [buffer[start:end].view(kind) for buffer in (self._device, *self._hosts)]
        region = self._regions[name] = _Region(parts[1:], parts[0], end)
        return region
