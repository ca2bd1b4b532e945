"""Mixtures of experts on a CPU: only experts that were hit cost anything.

Rows are gathered by expert, so that each expert multiplies dense rows of its own. Where our packed
kernel serves the weights (packed_experts.py), one call computes a projection of all experts that
were hit; elsewhere there is a call per expert, of the fastest kernel for its weights.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.cpu.row_ops import weighted_sum
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import ExpertWeights, Routed, RouterWeights
from octavo.ops.linear import make_linear_kernel
from octavo.ops.reference.experts import choose
from octavo.routing import RoutingConfig


class RowLists(NamedTuple):
    """The rows of each expert: one for each of a token's experts, `top_k` of them for a token."""

    order: Tensor  # int64 [num_rows]: rows sorted by expert; row r is of token r // top_k
    places: Tensor  # int64 [num_tokens, top_k]: where each row is in that order
    hit: NDArray[np.int64]  # experts that have rows, ascending
    counts: NDArray[np.int64]  # how many rows each of them has
    starts: NDArray[np.int64]  # where they begin in `order`


def list_rows(ids: Tensor, num_experts: int) -> RowLists:
    """Lists of ids [num_tokens, top_k]."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    counts = np.bincount(flat.numpy(), minlength=num_experts)
    (hit,) = counts.nonzero()
    counts = counts[hit]
    return RowLists(order, places.view(ids.shape), hit, counts, counts.cumsum() - counts)


class TorchRouter:
    """Computes logits in float32, whatever the model's dtype: they decide between experts."""

    def __init__(self, weights: RouterWeights, config: RoutingConfig, num_hit: Tensor) -> None:
        self._kernel = make_linear_kernel(weights.weight.float())
        self._bias = None if weights.bias is None else weights.bias.float()
        self._correction = weights.correction
        self._config = config
        self._num_hit = num_hit

    def apply(self, x: Tensor) -> Routed:
        """See RouterKernel.apply."""
        logits = self._kernel.apply(x.float(), self._bias, Epilogue.NONE)
        routed = choose(logits, self._correction, self._config)
        lists = list_rows(routed.ids, self._config.num_experts)
        self._num_hit += len(lists.hit)
        return routed._replace(lists=lists)


class SeparateExperts:
    """Owns a kernel for each projection of each expert: for any dtype."""

    def __init__(self, weights: ExpertWeights, epilogue: Epilogue) -> None:
        self._up = [make_linear_kernel(each) for each in weights.up]
        self._down = [make_linear_kernel(each) for each in weights.down]
        self._biases = weights.up_bias, weights.down_bias
        self._epilogue = epilogue

    def apply_partial(self, x: Tensor, routed: Routed) -> Tensor:
        """See ExpertsKernel.apply_partial."""
        lists: RowLists = routed.lists
        rows = x[lists.order // routed.ids.shape[1]]
        up_bias, down_bias = self._biases
        results = []
        for expert, part in zip(
            lists.hit.tolist(), torch.split(rows, lists.counts.tolist()), strict=True
        ):
            bias = None if up_bias is None else up_bias[expert]
            inner = self._up[expert].apply(part, bias, self._epilogue)
            bias = None if down_bias is None else down_bias[expert]
            results.append(self._down[expert].apply(inner, bias, Epilogue.NONE))
        return weighted_sum(torch.cat(results), lists.places, routed.weights)
