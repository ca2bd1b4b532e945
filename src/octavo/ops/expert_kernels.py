"""Kernels of mixtures of experts: which ones weights get, and those for any CPU and dtype.

On a CPU only experts that were hit cost anything. Rows are gathered by expert, so that each expert
multiplies dense rows of its own. Where our packed kernel serves the weights (cpu/experts.py), one
call computes a projection of all experts that were hit; elsewhere there is a call per expert, of
the fastest kernel for its weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.ops.cpu.row_ops import weighted_sum
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import (
    ExpertsKernel,
    ExpertWeights,
    QuantizedExpertWeights,
    Routed,
    RouterKernel,
    RouterWeights,
    RowLists,
    choose,
    list_rows,
)
from octavo.ops.linear import has_numba_kernel, make_linear_kernel
from octavo.ops.norm import DeferredNorm
from octavo.ops.quantized import Rounding, round_inputs
from octavo.routing import RoutingConfig


class TorchRouter:
    """Computes logits in float32, whatever the model's dtype: they decide between experts."""

    def __init__(self, weights: RouterWeights, config: RoutingConfig, num_hit: Tensor) -> None:
        self._kernel = make_linear_kernel(weights.weight.float())
        self._bias = None if weights.bias is None else weights.bias.float()
        self._weights = weights
        self._config = config
        self._num_hit = num_hit

    def norms_inputs(self, num_tokens: int) -> bool:
        """See RouterKernel.norms_inputs."""
        return False

    def apply(self, x: Tensor | DeferredNorm, rounding: Rounding = Rounding.NONE) -> Routed:
        """See RouterKernel.apply."""
        assert isinstance(x, Tensor), "it norms nothing"
        inputs = None if rounding is Rounding.NONE else round_inputs(x, rounding)
        logits = self._kernel.apply(x.float(), self._bias, Epilogue.NONE)
        routed = choose(logits, self._weights, self._config)
        lists = list_experts(routed.ids, self._config.num_experts, self._num_hit)
        return routed._replace(lists=lists, inputs=inputs)


class SeparateExperts:
    """Owns a kernel for each projection of each expert: for any dtype."""

    def __init__(self, weights: ExpertWeights, epilogue: Epilogue) -> None:
        self._up = [make_linear_kernel(each) for each in weights.up]
        self._down = [make_linear_kernel(each) for each in weights.down]
        self._biases = weights.up_bias, weights.down_bias
        self._epilogue = epilogue

    def rounding(self, num_tokens: int, top_k: int) -> Rounding:
        """See ExpertsKernel.rounding."""
        return Rounding.NONE

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


def make_router_kernel(
    weights: RouterWeights, config: RoutingConfig, num_hit: Tensor
) -> RouterKernel:
    """The fastest kernel on the weights' device.

    num_hit: int64 [1], to which each call adds how many experts some token takes.
    """
    if weights.weight.device.type == "cuda":
        from octavo.ops.cuda.routing_normed import CudaNormRouter

        return CudaNormRouter(weights, config, num_hit)
    return TorchRouter(weights, config, num_hit)


def list_experts(ids: Tensor, num_experts: int, num_hit: Tensor) -> Any:
    """The `lists` of a Routed with int32 ids [num_tokens, top_k], in the form of their device.

    num_hit: see make_router_kernel.
    """
    if ids.device.type == "cuda":
        from octavo.ops.cuda.routing import list_blocks

        return None if len(ids) == 1 else list_blocks(ids, num_experts, num_hit)
    lists = list_rows(ids, num_experts)
    num_hit += len(lists.hit)
    return lists


def make_quantized_experts_kernel(
    weights: QuantizedExpertWeights,
    epilogue: Epilogue,
    dtype: torch.dtype,
    float7_tokens: range = range(0),
) -> ExpertsKernel | None:
    """The fastest kernel for quantized forms and inputs of `dtype`; `epilogue` is gated.

    None: there is none on this device, or for such forms.

    float7_tokens: how many are multiplied by copies in 7 bits, if the weights have that form; only
        for Hopper GPUs.
    """
    if weights.up.device.type != "cuda":
        return None
    from octavo.ops.cuda.experts import CudaExperts
    from octavo.ops.cuda.experts_mx_hopper import MxExperts

    of_mx = MxExperts.of(weights, epilogue, dtype)
    return of_mx or CudaExperts.of(weights, epilogue, float7_tokens)


def make_experts_kernel(
    weights: ExpertWeights, epilogue: Epilogue, copied_tokens: range = range(0)
) -> ExpertsKernel:
    """The fastest kernel on the weights' device; `epilogue` is gated.

    copied_tokens: how many are multiplied by copies in 12 bits, if the weights have that form; only
        for Hopper GPUs.
    """
    if copied_tokens:
        from octavo.ops.cuda.experts_copied import CopiedExperts, take_copies

        if take_copies(weights):
            return CopiedExperts(weights, epilogue, copied_tokens)
    if weights.up.device.type == "cuda":
        from octavo.ops.cuda.experts import CudaExperts

        experts = CudaExperts.of(weights, epilogue)
        assert experts is not None, "kernels know all dense weights"
        return experts
    if has_numba_kernel(weights.up[0]) and has_numba_kernel(weights.down[0]):
        from octavo.ops.cpu.experts import PackedExperts

        return PackedExperts(weights, epilogue)
    return SeparateExperts(weights, epilogue)
