"""Sums over ranks in the middle of transformers' modules."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.layers.linear import LinearMethod
from octavo.layers.norm import sum_over_ranks
from octavo.ops.communicator import Communicator, Reduction, ReductionSite


class RankSums:
    """Adds up the partial sums of a step, one after the other, at sites of which no two that follow
    each other are the same: a step begins at one where none ends."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._first, *self._others = (
            Reduction(communicator, site)
            for site in (ReductionSite.EMBEDDING, ReductionSite.ATTENTION, ReductionSite.MLP)
        )
        self._num_places = 0
        self._number = 0  # of the next sum in the step

    def add_place(self) -> None:
        """Called by each layer that will call `total` or `project` once in a step."""
        self._num_places += 1

    def begin(self) -> None:
        """Before each step."""
        self._number = 0

    def total(self, partial: Tensor, dtype: torch.dtype) -> Tensor:
        """A rank's partial sum [num_tokens, size], or several [num_splits, num_tokens, size] ->
        [num_tokens, size] in `dtype`."""
        if self._num_places == 1:  # which follows itself
            own = partial.sum(0) if partial.dim() == 3 else partial
            return self.communicator.all_reduce(own.to(dtype))
        number, self._number = self._number, self._number + 1
        reduction = self._others[number % len(self._others)] if number else self._first
        return sum_over_ranks(partial, dtype, reduction)

    def project(self, method: LinearMethod, x: Tensor) -> Tensor:
        """The whole result of a projection of which each rank has a part of the inputs."""
        return self.total(method.forward_partial(x), x.dtype)
