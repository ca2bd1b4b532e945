"""Kernels of mixtures of experts: their interfaces, and which kernels weights get.

A router says which experts compute a token (`RouterKernel`), and the experts' projections are
grouped products: each expert multiplies the tokens that were routed to it (`ExpertsKernel`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from octavo.ops.epilogue import Epilogue
from octavo.ops.linear import has_numba_kernel
from octavo.routing import RoutingConfig


class Routed(NamedTuple):
    """Which experts compute a batch's tokens."""

    ids: Tensor  # int32 [num_tokens, top_k]: the experts of a token, all different
    weights: Tensor  # float32 [num_tokens, top_k]: of their results
    lists: Any = None  # the same by expert, in the form that the device's ExpertsKernel takes


class RouterWeights(NamedTuple):
    """What logits follow from: x W^T + bias; and what is added to scores for the choice alone."""

    weight: Tensor  # [num_experts, size]
    bias: Tensor | None = None  # [num_experts]
    correction: Tensor | None = None  # float32 [num_experts]


class ExpertWeights(NamedTuple):
    """Gated MLPs of equal shape, each projection in one tensor."""

    up: Tensor  # [num_experts, 2 * intermediate_size, size]: an expert's gates, then its ups
    down: Tensor  # [num_experts, size, intermediate_size]
    up_bias: Tensor | None = None  # [num_experts, 2 * intermediate_size]
    down_bias: Tensor | None = None  # [num_experts, size]


class RouterKernel(Protocol):
    """Computes logits in float32, and chooses experts."""

    def apply(self, x: Tensor) -> Routed:
        """Route x [num_tokens, size].

        A token whose logits are not finite gets experts, too, and weights that are not finite.
        """


class ExpertsKernel(Protocol):
    """Owns the experts' weights, perhaps packed; computes those that tokens were routed to, and
    adds their results up."""

    def apply_partial(self, x: Tensor, routed: Routed) -> Tensor:
        """sum over j of weights[t, j] * MLP of expert ids[t, j] (x[t]), of x [num_tokens, size].

        The result has x's shape and dtype; or, on GPUs, it is [top_k, num_tokens, size], for a
        norm that adds up what a token's experts contribute, in the order of `ids`.
        """


def make_router_kernel(
    weights: RouterWeights, config: RoutingConfig, num_hit: Tensor
) -> RouterKernel:
    """The fastest kernel on the weights' device.

    num_hit: int64 [1], to which each call adds how many experts some token takes.
    """
    if weights.weight.device.type == "cuda":
        from octavo.ops.cuda.routing import CudaRouter

        return CudaRouter(weights, config, num_hit)
    from octavo.ops.cpu.experts import TorchRouter

    return TorchRouter(weights, config, num_hit)


def make_experts_kernel(weights: ExpertWeights, epilogue: Epilogue) -> ExpertsKernel:
    """The fastest kernel on the weights' device; `epilogue` is gated."""
    if weights.up.device.type == "cuda":
        from octavo.ops.cuda.experts import CudaExperts

        return CudaExperts(weights, epilogue)
    if has_numba_kernel(weights.up[0]) and has_numba_kernel(weights.down[0]):
        from octavo.ops.cpu.packed_experts import PackedExperts

        return PackedExperts(weights, epilogue)
    from octavo.ops.cpu.experts import SeparateExperts

    return SeparateExperts(weights, epilogue)
