"""Projections, packed for the CPU once their weights are loaded.

torch keeps a weight as the checkpoint has it, and rearranges it in every call. There are two ways
to pack it once, and the first that the machine has is taken: our own kernel (cpu_linear.py: Numba,
AVX-512), and the private ops by which torch's compiler packs for oneDNN when it freezes a model.
Without either, `Linear` is F.linear. Measured on one Zen 5 core (benchmarks/cpu_kernels.py), in
multiples of our kernel's time for 1, 16, 64 and 512 tokens, 1,024 by 6,144 weights from memory:
  oneDNN, packed   fp32 1.2, 1.1, 1.1, 1.0   bf16 1.3, 1.2, 1.1, 1.0
  F.linear         fp32 2.4, 3.1, 2.7, 2.4   bf16 3.1, 2.0, 1.4, 1.1
Ours fetches the next weights while it computes with these, and its sums never depend on the batch.

On a GPU a weight stays as it is: ops/cuda/linear.py chooses between our kernels and F.linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.ops.cpu.row_ops import silu_mul

# For how many tokens oneDNN arranges a weight: 16 to 512 gave the same speed at every size, while
# 1 halves that of larger batches.
ONEDNN_TOKENS = 64


class Packed(Protocol):
    """A weight in the order of some kernel."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias: [num_tokens, in_features] -> [num_tokens, out_features]."""


class OneDnnWeight:
    """Owns a weight packed by oneDNN."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_TOKENS)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See Packed.multiply."""
        num_tokens = x.shape[0]
        if num_tokens == 1:
            # For a token alone oneDNN cuts the sum elsewhere than in a batch. Two take as long.
            x = x.expand(2, -1)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return result[:num_tokens]


class Linear(nn.Module):
    """Owns W [out_features, in_features] and b of y = x W^T + b, as loaded or packed."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(out_features, in_features), requires_grad=False
        )
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self._packed: Packed | None = None

    def finalize(self) -> None:
        """Pack the weight where that pays and let go of it; to be called once, after loading.

        Whoever else holds the weight (an embedding table that the output shares) keeps it: then
        there are two copies.
        """
        assert self.weight is not None, "finalize is called once"
        self._packed = pack(self.weight.detach())
        if self._packed is not None:
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features].

        Packed, a token's result is the same to the bit whatever else is in the batch (oneDNN's sums
        in bf16 depend on it on CPUs with matrix units).
        """
        if self._packed is not None:
            return self._packed.multiply(x, self.bias)
        assert self.weight is not None
        if x.device.type == "cuda":
            from octavo.ops.cuda.linear import linear

            return linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def forward_activated(self, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """activation(forward(x)); on a GPU in one kernel where there is one."""
        if x.device.type == "cuda" and activation in (F.relu, silu_mul):
            from octavo.ops.cuda.linear import linear

            assert self.weight is not None
            name: Literal["relu", "silu_mul"] = "relu" if activation is F.relu else "silu_mul"
            return linear(x, self.weight, self.bias, name)
        return activation(self.forward(x))

    def forward_parts(self, x: Tensor) -> Tensor:
        """As forward, for a norm that follows: on a GPU perhaps in parts, which it adds up.

        Parts are [num_parts, num_tokens, out_features].
        """
        if x.device.type == "cuda":
            from octavo.ops.cuda.linear import linear_parts

            assert self.weight is not None
            return linear_parts(x, self.weight, self.bias)
        return self.forward(x)


class MergedLinear(Linear):
    """Several projections of the same input in one, stacked along the output."""

    def __init__(self, in_features: int, out_sizes: Sequence[int], bias: bool) -> None:
        super().__init__(in_features, sum(out_sizes), bias)
        self.out_sizes = tuple(out_sizes)


def pack(weight: Tensor) -> Packed | None:
    """A packed copy of W [out_features, in_features]; None where F.linear is all there is."""
    if has_own_kernel(weight):
        from octavo.ops.cpu.linear import PackedWeight

        return PackedWeight(weight)
    return OneDnnWeight(weight) if has_onednn(weight) else None


def has_own_kernel(weight: Tensor) -> bool:
    """Whether cpu_linear.py serves such a weight here."""
    if weight.device.type != "cpu" or find_spec("numba") is None:
        return False
    from octavo.ops.cpu.linear import can_pack

    return can_pack(weight)


def has_onednn(weight: Tensor) -> bool:
    """Whether this torch and this CPU have oneDNN's packed products for such a weight."""
    mkldnn, ops = torch.backends.mkldnn, torch.ops.mkldnn
    if weight.device.type != "cpu" or not mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
