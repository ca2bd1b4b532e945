"""How a step's small arrays reach a GPU: packed on the host, in one upload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import StagingPart

_NUM_BUFFERS = 3  # on the host: as many steps may be prepared before the first one is uploaded
_ALIGNMENT = 256  # bytes
# Generous: memory that no array reserves is never uploaded.
_FIXED_BYTES = 16 << 20  # what does not grow with the step
_BLOCK_BYTES = 512 << 10  # changed entries of block tables, and copies of blocks
_SEQ_BYTES = 256  # per sequence: rows and sampling parameters
_TOKEN_BYTES = 32  # per token: ids and positions
# Attention's work items, for each shape of layers: a constant part, and per sequence and token.
_SHAPE_BYTES, _SHAPE_SEQ_BYTES, _SHAPE_TOKEN_BYTES = 256 << 10, 160, 48


@dataclass(frozen=True, slots=True)
class _Region:
    hosts: list[NDArray[Any]]  # the region in each pinned buffer
    device: Tensor
    capacity: int
    start: int  # offset in the buffers, bytes
    part: StagingPart
    views: dict[int, Tensor]  # n -> view of the first n values: creating one takes microseconds


class UploadStaging:
    """Owns a buffer on the device and several of the same size in pinned memory.

    A step calls `begin`, `put` for each of its arrays, and `flush`, or `send` and `receive`. A name
    always has the same address, so captured graphs find the arrays of any step. The upload runs
    after the kernels that may still read what it replaces: those before the previous `release`, on
    a stream of its own, so that it is done when the device gets to the step; without one, all of
    the stream.

    Of each part, a step uploads what lies between the first and the last that it puts. Arrays that
    grow with tokens lie at the end of the buffers, where steps that only decode put nothing: they
    upload some KB in place of all the room that prompts may need, which takes up to 20 us of every
    step. Steps that continue the one before put nothing but what changes of blocks, which lies at
    the beginning.
    """

    def __init__(
        self,
        device: torch.device,
        max_num_seqs: int,
        max_num_tokens: int,
        num_shapes: int = 1,
        num_bytes: int | None = None,
    ) -> None:
        """
        Args:
            device: where the arrays are uploaded to.
            max_num_seqs, max_num_tokens: sizes of the largest step.
            num_shapes: different shapes of attention layers, each with its own work items.
            num_bytes: size of a buffer, without room for blocks. None: enough for the arrays of the
                largest step.
        """
        self._first = 0  # byte of the sequences' part
        if num_bytes is None:
            self._first = _BLOCK_BYTES
            num_bytes = (
                _FIXED_BYTES
                + _BLOCK_BYTES
                + _SHAPE_BYTES * num_shapes
                + (_SEQ_BYTES + _SHAPE_SEQ_BYTES * num_shapes) * max_num_seqs
                + (_TOKEN_BYTES + _SHAPE_TOKEN_BYTES * num_shapes) * max_num_tokens
            )
        self.device = device
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
        # Where the next region of a part begins; that of tokens lies before the others.
        self._free = {"blocks": 0, "sequences": self._first, "tokens": num_bytes}
        self._current = 0
        self._used: dict[StagingPart, tuple[int, int]] = {}  # bytes that this step has put
        self._is_released = False
        self._sent: torch.cuda.Event | None = None  # and not received yet
        if is_gpu:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._released = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Start a new step. The first array that is put takes the next buffer, once that is no
        longer being uploaded."""
        self._used.clear()

    def put(
        self, name: str, values: NDArray[Any], capacity: int, part: StagingPart = "sequences"
    ) -> Tensor:
        """See Staging.put; values [n] of any fixed dtype."""
        assert values.ndim == 1, "flat arrays only"
        if part != "sequences" and len(values) <= self.max_num_seqs:
            name, capacity = f"few {name}", min(capacity, self.max_num_seqs)
            part = "sequences" if part == "tokens" else part
        region = self._regions.get(name)
        if region is None:
            region = self._reserve(name, values.dtype, capacity, part)
        n = len(values)
        self.room(name, n)[:] = values
        view = region.views.get(n)
        if view is None:
            view = region.views[n] = region.device[:n]
        return view

    def room(self, name: str, length: int) -> NDArray[Any]:
        """Where the host writes the first `length` values of `name`, which were put before, instead
        of putting them; before the next flush, which takes them along."""
        region = self._regions[name]
        assert length <= region.capacity, f"{name}: {length} values, but room for {region.capacity}"
        if not self._used:
            self._current = (self._current + 1) % _NUM_BUFFERS
            if self._copied:
                self._copied[self._current].synchronize()
        room = region.hosts[self._current][:length]
        start, end = self._used.get(region.part, (region.start, region.start))
        last = region.start + room.nbytes
        self._used[region.part] = min(start, region.start), max(end, last)
        return room

    def padded(self, name: str, length: int) -> Tensor:
        """The first `length` values of `name`; those beyond the last `put` are older ones."""
        region = self._regions[name]
        assert length <= region.capacity, f"{name}: {length} is beyond {region.capacity}"
        return region.device[:length]

    def release(self) -> None:
        """See Staging.release."""
        if self._copied:
            self._released.record(torch.cuda.current_stream(self._device.device))
            self._is_released = True

    def flush(self, then: Callable[[], None] | None = None) -> None:
        """See Staging.flush."""
        self.send(then)
        self.receive()

    def send(self, then: Callable[[], None] | None = None) -> None:
        """See Staging.send."""
        if not self._used and then is None:
            return
        if not self._copied:
            self._upload(then)
            return
        assert self._sent is None, "what was sent has not been received"
        copied = self._copied[self._current]
        if self._is_released:
            self._stream.wait_event(self._released)
            with torch.cuda.stream(self._stream):
                self._upload(then)
                copied.record(self._stream)
            self._sent = copied
        else:
            self._upload(then)
            copied.record(torch.cuda.current_stream(self._device.device))
        self._is_released = False

    def receive(self) -> None:
        """See Staging.receive."""
        if self._sent is not None:
            torch.cuda.current_stream(self._device.device).wait_event(self._sent)
            self._sent = None

    def _upload(self, then: Callable[[], None] | None) -> None:
        host = self._hosts[self._current]
        for start, end in self._used.values():
            self._device[start:end].copy_(host[start:end], non_blocking=True)
        if then is not None:
            then()

    def _reserve(
        self, name: str, dtype: np.dtype[Any], capacity: int, part: StagingPart
    ) -> _Region:
        num_bytes, free = capacity * dtype.itemsize, self._free
        if part == "tokens":
            start = following = (free[part] - num_bytes) // _ALIGNMENT * _ALIGNMENT
            has_room = start >= free["sequences"]
        else:
            start = free[part]
            following = start + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            has_room = start + num_bytes <= (self._first if part == "blocks" else free["tokens"])
        assert has_room, f"{name}: no room for {num_bytes} bytes"
        free[part], end = following, start + num_bytes
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        parts = [buffer[start:end].view(kind) for buffer in (self._device, *self._hosts)]
        hosts = [part.numpy() for part in parts[1:]]
        region = _Region(hosts, parts[0], capacity, start, part, {})
        self._regions[name] = region
        return region
