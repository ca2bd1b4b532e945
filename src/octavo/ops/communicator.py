"""How the ranks of a tensor-parallel group exchange tensors.

All ranks make the same calls, with tensors of the same shapes and dtypes, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from octavo.parallel import Shard

# Renamed in torch 2.13.
_all_gather: Callable[..., object] = (
    dist.all_gather_single  # type: ignore[attr-defined,unused-ignore]
    if hasattr(dist, "all_gather_single")
    else dist.all_gather_into_tensor
)


class ReductionSite(IntEnum):
    """Where in a decoder partial sums are added up over the ranks.

    Consecutive reductions of a step are at different sites, so that they may use different buffers.
    """

    EMBEDDING = 0
    ATTENTION = 1
    MLP = 2
    CROSS_ATTENTION = 3


class Communicator(Protocol):
    """One rank's connection to the others."""

    shard: Shard

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, of x's shape and dtype.

        It is computed in float32 in the order of the ranks and rounded once: it has the same bits
        on all ranks and is batch-invariant. x is left unchanged; it may be returned.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks in the order of the ranks: [size, *x.shape], dense."""

    def all_to_all(self, x: Tensor) -> Tensor:
        """x[i] of [size, ...] goes to rank i; what comes from rank i is at i, of the same shape."""

    def broadcast(self, values: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The first rank's values, on the host. All ranks call it in the same order, with equally
        many values; what the devices do is not waited for."""

    def reserve(
        self, max_rows: int, row_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take what memory reductions of `max_rows` rows need on this device.

        Called once, by all ranks; larger reductions are possible, but may be slower.
        """

    def close(self) -> None:
        """Leave the group. A second call does nothing."""


class Reduction(NamedTuple):
    """One place in a model where partial sums are added up over the ranks."""

    communicator: Communicator
    site: ReductionSite


class SingleRank:
    """One rank that holds the whole model: nothing is exchanged."""

    shard = Shard()

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Communicator.all_reduce."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See Communicator.all_gather."""
        return x.unsqueeze(0)

    def all_to_all(self, x: Tensor) -> Tensor:
        """See Communicator.all_to_all."""
        return x

    def broadcast(self, values: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """See Communicator.broadcast."""
        return values

    def reserve(
        self, max_rows: int, row_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """See Communicator.reserve."""

    def close(self) -> None:
        """See Communicator.close."""


class GroupCommunicator:
    """The ranks of a torch.distributed process group: gloo on CPUs, NCCL on GPUs.

    On a GPU calls return when they are launched, and may be captured in a CUDA graph.
    """

    def __init__(self, group: dist.ProcessGroup, hosts: dist.ProcessGroup | None = None) -> None:
        """`hosts`: the same ranks, by gloo; None: `group` is by gloo itself."""
        self.shard = Shard(group.rank(), group.size())
        self._group: dist.ProcessGroup | None = group
        self._hosts = group if hosts is None else hosts

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which must not have been closed."""
        assert self._group is not None, "the communicator is closed"
        return self._group

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Communicator.all_reduce."""
        parts = self.all_gather(x)
        total = parts[0].float()
        for rank in range(1, self.shard.size):
            total = total + parts[rank]
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """See Communicator.all_gather."""
        gathered = torch.empty((self.shard.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            _all_gather(_as_bytes(gathered), _as_bytes(x.contiguous()), self.group)
        return gathered

    def all_to_all(self, x: Tensor) -> Tensor:
        """See Communicator.all_to_all."""
        received = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            sent = _as_bytes(x.contiguous())
            dist.all_to_all_single(_as_bytes(received), sent, group=self.group)
        return received

    def broadcast(self, values: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """See Communicator.broadcast."""
        shared = torch.from_numpy(values.astype(np.uint8))
        dist.broadcast(shared, 0, group=self._hosts)
        return shared.numpy().astype(np.bool_)

    def reserve(
        self, max_rows: int, row_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """See Communicator.reserve."""

    def close(self) -> None:
        """See Communicator.close."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


def _as_bytes(x: Tensor) -> Tensor:
    """A dense tensor as bytes, since gloo does not know all dtypes. (A single value is dense
    whatever its strides are, but has no view as bytes.)"""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
