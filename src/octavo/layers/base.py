"""What layers with weights have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo.ops.quantized import QuantizedWeight


class WeightSlot:
    """Where a slice of a weight goes that may stay quantized.

    The loader puts in what the checkpoint has: a quantized form, or a tensor [out_features,
    in_features] in the model's dtype; the owner takes it in `finalize`. Leading dimensions are
    those of a checkpoint's tensor that has several matrices, such as all experts.
    """

    __slots__ = ("_content", "_dtype", "is_of_experts", "is_transposed", "shape")

    def __init__(
        self, *shape: int, is_transposed: bool = False, is_of_experts: bool = False
    ) -> None:
        """`shape` is that of the slice, of the weight as it is computed with; or, of a checkpoint
        that keeps dense weights as [..., in_features, out_features], as that does.
        `is_of_experts`: of experts that a router chooses from."""
        self.shape = shape
        self.is_transposed = is_transposed
        self.is_of_experts = is_of_experts
        self._content: Tensor | QuantizedWeight | None = None
        self._dtype: torch.dtype

    def put(self, content: Tensor | QuantizedWeight, dtype: torch.dtype) -> None:
        """Fill it; `dtype` is the model's."""
        self._content, self._dtype = content, dtype

    @property
    def content(self) -> Tensor | QuantizedWeight:
        """What was put in."""
        assert self._content is not None, "nothing was loaded"
        return self._content

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        assert self._content is not None, "nothing was loaded"
        return self._dtype

    def dense(self) -> Tensor:
        """The weight in the model's dtype, [..., out_features, in_features]."""
        content = self.content
        if isinstance(content, Tensor):
            return content.mT if self.is_transposed else content
        return content.dense(self.dtype)

    def clear(self) -> None:
        """Let go of what was put in."""
        self._content = None


class WeightSlice(NamedTuple):
    """A slice of a checkpoint's tensor, and where it goes."""

    # A parameter or a view of one, which may have more rows that are padding; or a slot.
    target: Tensor | WeightSlot
    where: tuple[slice, ...]  # in the checkpoint's tensor, one per dimension


@dataclass(frozen=True, slots=True, eq=False)
class WeightTarget:
    """Where a tensor of a checkpoint goes: its shape there, and the slices that are kept of it."""

    shape: tuple[int, ...]
    slices: tuple[WeightSlice, ...]

    @classmethod
    def whole(cls, target: Tensor | WeightSlot) -> WeightTarget:
        """All of the tensor, or of the slot."""
        where = tuple(slice(0, size) for size in target.shape)
        return cls(tuple(target.shape), (WeightSlice(target, where),))

    def transposed(self) -> WeightTarget:
        """The same target in a checkpoint that keeps matrices transposed."""
        slices = tuple(WeightSlice(_tensor(each).t(), each.where[::-1]) for each in self.slices)
        return WeightTarget(self.shape[::-1], slices)


def _tensor(part: WeightSlice) -> Tensor:
    assert isinstance(part.target, Tensor), "slots take weights as they are computed with"
    return part.target


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

    def kernels(self) -> Sequence[object]:
        """What it computes with; called after `finalize`."""
        return ()


def kernels_of(model: nn.Module) -> list[object]:
    """What all layers of a model compute with, in the order of its modules."""
    owners = (module for module in model.modules() if isinstance(module, WeightOwner))
    return [kernel for owner in owners for kernel in owner.kernels()]
