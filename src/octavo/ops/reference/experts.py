"""Mixtures of experts in plain PyTorch, in fp32: the reference for the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.experts import ExpertWeights, Routed, RouterWeights
from octavo.routing import RoutingConfig, Scoring

LEAST_SUM = 1e-20  # that weights are divided by


def route(x: Tensor, weights: RouterWeights, config: RoutingConfig) -> Routed:
    """See RouterKernel.apply. Of equal scores, that of the expert with the lower id is larger."""
    bias = None if weights.bias is None else weights.bias.float()
    logits = F.linear(x.float(), weights.weight.float(), bias)
    return choose(logits, weights.correction, config)


def choose(logits: Tensor, correction: Tensor | None, config: RoutingConfig) -> Routed:
    """From float32 logits [num_tokens, num_experts] to experts; correction: [num_experts]."""
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
    """NaN last, but before what is chosen already."""
    return scores.masked_fill(scores.isnan(), torch.finfo(scores.dtype).min)


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


def mix(x: Tensor, routed: Routed, weights: ExpertWeights, epilogue: Epilogue) -> Tensor:
    """See ExpertsKernel.apply_partial; one row after the other."""
    result = torch.zeros_like(x, dtype=torch.float32)
    for token, (ids, token_weights) in enumerate(
        zip(routed.ids.tolist(), routed.weights, strict=True)
    ):
        for expert, weight in zip(ids, token_weights, strict=True):
            up_bias = None if weights.up_bias is None else weights.up_bias[expert].float()
            y = F.linear(x[token].float(), weights.up[expert].float(), up_bias)
            y = apply_epilogue(y, epilogue)
            down_bias = None if weights.down_bias is None else weights.down_bias[expert].float()
            y = F.linear(y, weights.down[expert].float(), down_bias)
            result[token] += weight * y
    return result.to(x.dtype)
