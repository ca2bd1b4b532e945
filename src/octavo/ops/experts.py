"""Mixtures of experts: what their kernels take and return, and the same in plain torch.

A router says which experts compute a token (`RouterKernel`), and the experts' projections are
grouped products: each expert multiplies the tokens that were routed to it (`ExpertsKernel`).
expert_kernels.py chooses kernels by the weights' device; `route` and `mix`, in float32, are what
they are compared with.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.norm import DeferredNorm
from octavo.ops.quantized import QuantizedWeight, RoundedInputs, Rounding
from octavo.routing import RoutingConfig, Scoring

LEAST_SUM = 1e-20  # that weights are divided by


class Routed(NamedTuple):
    """Which experts compute a batch's tokens."""

    ids: Tensor  # int32 [num_tokens, top_k]: the experts of a token, all different
    weights: Tensor  # float32 [num_tokens, top_k]: of their results
    lists: Any = None  # the same by expert, in the form that the device's ExpertsKernel takes
    inputs: RoundedInputs | None = None  # of the experts, if given: see RouterKernel.apply
    normed: Tensor | None = None  # of a DeferredNorm: [num_tokens, size], which the experts take


class RouterWeights(NamedTuple):
    """What logits follow from: x W^T + bias; what is added to scores for the choice alone, and what
    the weights of chosen experts are multiplied by in the end."""

    weight: Tensor  # [num_experts, size]
    bias: Tensor | None = None  # [num_experts]
    correction: Tensor | None = None  # float32 [num_experts]
    scales: Tensor | None = None  # [num_experts]


class ExpertWeights(NamedTuple):
    """Gated MLPs of equal shape, each projection in one tensor."""

    up: Tensor  # [num_experts, 2 * intermediate_size, size]: an expert's gates, then its ups
    down: Tensor  # [num_experts, size, intermediate_size]
    up_bias: Tensor | None = None  # [num_experts, 2 * intermediate_size]
    down_bias: Tensor | None = None  # [num_experts, size]


class QuantizedExpertWeights(NamedTuple):
    """The same in quantized forms; biases are in the model's dtype."""

    up: QuantizedWeight
    down: QuantizedWeight
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Unrouted(NamedTuple):
    """Inputs of experts that apply the norm before the router, and route, themselves."""

    norm: DeferredNorm
    router: RouterWeights
    config: RoutingConfig
    num_hit: Tensor  # see make_router_kernel


class RouterKernel(Protocol):
    """Computes logits in float32, and chooses experts."""

    def norms_inputs(self, num_tokens: int) -> bool:
        """Whether it is to be given a DeferredNorm, of complete or partial sums, and no result of
        the norm."""

    def apply(self, x: Tensor | DeferredNorm, rounding: Rounding = Rounding.NONE) -> Routed:
        """Route x [num_tokens, size], or its norm, which is `normed` of the result.

        A token with NaN among its logits gets experts, too, of which one at least has a weight of
        NaN.

        rounding: of x in `inputs` of the result, as ExpertsKernel.rounding says.
        """


class ExpertsKernel(Protocol):
    """Owns the experts' weights, perhaps packed; computes those that tokens were routed to, and
    adds their results up."""

    def rounding(self, num_tokens: int, top_k: int) -> Rounding:
        """How it rounds inputs, which the router may do for it: Routed.inputs."""

    def apply_partial(self, x: Tensor, routed: Routed) -> Tensor:
        """sum over j of weights[t, j] * MLP of expert ids[t, j] (x[t]), of x [num_tokens, size].

        The result has x's shape and its dtype, or float32; or, on GPUs, it is [num_parts,
        num_tokens, size], for a norm that adds up what a token's experts contribute, in the order
        of `ids`, or pieces of it.
        """


def route(x: Tensor, weights: RouterWeights, config: RoutingConfig) -> Routed:
    """See RouterKernel.apply. Of equal scores, that of the expert with the lower id is larger."""
    bias = None if weights.bias is None else weights.bias.float()
    logits = F.linear(x.float(), weights.weight.float(), bias)
    return choose(logits, weights, config)


def choose(logits: Tensor, weights: RouterWeights, config: RoutingConfig) -> Routed:
    """Choose experts by float32 logits [num_tokens, num_experts]."""
    routed = _choose(logits, weights.correction, config)
    if weights.scales is None:
        return routed
    return routed._replace(weights=routed.weights * weights.scales.float()[routed.ids.long()])


def _choose(logits: Tensor, correction: Tensor | None, config: RoutingConfig) -> Routed:
    if config.scoring == Scoring.SPARSEMIXER:
        return _mix_sparsely(logits, config)
    is_softmax = config.scoring == Scoring.SOFTMAX
    scores = logits.softmax(dim=-1) if is_softmax else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if correction is None and is_softmax and config.num_groups == 1:
        choice = logits  # whose order is that of the probabilities, and which differ more
    choice = _ordered(choice)
    if config.num_groups > 1:
        choice = _in_best_groups(choice, config)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : config.top_k]
    weights = scores.gather(1, ids)
    if config.renormalised:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=LEAST_SUM)
    return Routed(ids.int(), weights * config.scale)


def _ordered(scores: Tensor) -> Tensor:
    """NaN first: whatever the other scores are, the token's result is NaN."""
    most = torch.finfo(scores.dtype).max
    return scores.clamp(max=most).masked_fill(scores.isnan(), torch.inf)


def _in_best_groups(choice: Tensor, config: RoutingConfig) -> Tensor:
    """Scores with -inf for the experts of groups that are not chosen."""
    by_group = choice.view(len(choice), config.num_groups, -1)
    sums = by_group.topk(2, dim=-1).values.sum(dim=-1)
    best = sums.sort(dim=-1, descending=True, stable=True).indices[:, : config.top_groups]
    is_out = torch.ones_like(sums, dtype=torch.bool).scatter_(1, best, False)
    return by_group.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(1)


def _mix_sparsely(logits: Tensor, config: RoutingConfig) -> Routed:
    """One expert after the other (Scoring.SPARSEMIXER)."""
    left, ids, weights = logits, [], []
    for _ in range(config.top_k):
        best = _ordered(left).argmax(dim=-1, keepdim=True)
        largest = left.gather(1, best)
        distance = (largest - logits) / torch.maximum(logits.abs(), largest)
        near = left.masked_fill(distance > 2 * config.jitter, -torch.inf)
        ids.append(best)
        weights.append(near.softmax(dim=-1).gather(1, best))
        left = left.scatter(1, best, -torch.inf)
    return Routed(torch.cat(ids, 1).int(), torch.cat(weights, 1) * config.scale)


def mix(
    x: Tensor,
    routed: Routed,
    weights: ExpertWeights | QuantizedExpertWeights,
    epilogue: Epilogue,
) -> Tensor:
    """See ExpertsKernel.apply_partial; one row after the other, complete."""

    def dense(weight: Tensor | QuantizedWeight, expert: int) -> Tensor:
        one = weight[expert]
        return one.float() if isinstance(one, Tensor) else one.dequantize()

    result = torch.zeros_like(x, dtype=torch.float32)
    for token, (ids, token_weights) in enumerate(
        zip(routed.ids.tolist(), routed.weights, strict=True)
    ):
        for expert, weight in zip(ids, token_weights, strict=True):
            up_bias = None if weights.up_bias is None else weights.up_bias[expert].float()
            y = F.linear(x[token].float(), dense(weights.up, expert), up_bias)
            y = apply_epilogue(y, epilogue)
            down_bias = None if weights.down_bias is None else weights.down_bias[expert].float()
            y = F.linear(y, dense(weights.down, expert), down_bias)
            result[token] += weight * y
    return result.to(x.dtype)


@runtime_checkable
class RoutingExpertsKernel(ExpertsKernel, Protocol):
    """Applies the RMS norm of its inputs and routes them itself where that takes less time."""

    def routes_inputs(self, num_tokens: int, router: RouterWeights, config: RoutingConfig) -> bool:
        """Whether it does so for so many tokens."""

    def apply_unrouted(self, x: Unrouted) -> Tensor:
        """As `apply_partial`, of the norm of x; writes x.norm.total, if there is one."""


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
