"""What layers with weights have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn


class WeightSlice(NamedTuple):
    """A slice of a checkpoint's tensor, and where it goes."""

    target: Tensor  # a parameter or a view of one; it may have more rows, which are padding
    where: tuple[slice, ...]  # in the checkpoint's tensor, one per dimension


@dataclass(frozen=True, slots=True, eq=False)
class WeightTarget:
    """Where a tensor of a checkpoint goes: its shape there, and the slices that are kept of it."""

    shape: tuple[int, ...]
    slices: tuple[WeightSlice, ...]

    @classmethod
    def whole(cls, target: Tensor) -> WeightTarget:
        """All of the tensor."""
        where = tuple(slice(0, size) for size in target.shape)
        return cls(tuple(target.shape), (WeightSlice(target, where),))

    def transposed(self) -> WeightTarget:
        """For a checkpoint that keeps matrices transposed."""
        slices = tuple(WeightSlice(each.target.t(), each.where[::-1]) for each in self.slices)
        return WeightTarget(self.shape[::-1], slices)


# By names in a checkpoint. A parameter may have several names (tied embeddings); one of them must
# be there.
WeightTargets = dict[str, WeightTarget]


class WeightOwner(nn.Module):
    """A module with parameters of its own."""

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """Where a checkpoint's tensors go, which are named after `names` of this module."""
        (name,) = names
        own = self.named_parameters(recurse=False)
        return {f"{name}.{key}": WeightTarget.whole(parameter) for key, parameter in own}

    def finalize(self) -> None:
        """Rearrange the loaded weights for the device that they are on; called once."""
