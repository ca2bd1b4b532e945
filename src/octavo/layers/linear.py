"""Projections, packed for the CPU once their weights are loaded.

torch keeps a weight as the checkpoint has it, and MKL or oneDNN rearrange it in every call. The ops
that torch's own compiler uses when it freezes a model do so once. Measured on a Zen 5 core, in
GFLOPS at 1, 16, 64 and 512 tokens (benchmarks/cpu_kernels.py; inner size 1024, 4096 outputs):
  fp32  F.linear 30, 61, 90, 101     packed 42, 217, 221, 246
  bf16  F.linear 36, 268, 397, 469   packed 84, 449, 479, 492
The ops are private: without them `Linear` is F.linear.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# For how many tokens oneDNN arranges the weight: 16 to 512 gave the same speed at every size, while
# 1 halves that of larger batches.
PACKED_FOR_TOKENS = 64


class Linear(nn.Module):
    """Owns W [out_features, in_features] and b of y = x W^T + b, as loaded or packed."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(out_features, in_features), requires_grad=False
        )
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self._packed: Tensor | None = None

    def finalize(self) -> None:
        """Pack the weight where that pays and let go of it; to be called once, after loading.

        Whoever else holds the weight (an embedding table that the output shares) keeps it: then
        there are two copies.
        """
        assert self.weight is not None, "finalize is called once"
        if can_pack(self.weight):
            weight = self.weight.detach()
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_TOKENS)
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features].

        Packed, a token's result is the same to the bit whatever else is in the batch.
        """
        if self._packed is None:
            assert self.weight is not None
            return F.linear(x, self.weight, self.bias)
        num_tokens = x.shape[0]
        if num_tokens == 1:
            # For a single token alone oneDNN cuts the sum elsewhere. Two take as long.
            x = x.expand(2, -1)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return result[:num_tokens]


class MergedLinear(Linear):
    """Several projections of the same input in one, stacked along the output."""

    def __init__(self, in_features: int, out_sizes: Sequence[int], bias: bool) -> None:
        super().__init__(in_features, sum(out_sizes), bias)
        self.out_sizes = tuple(out_sizes)


def can_pack(weight: Tensor) -> bool:
    """Whether this torch and this CPU have fast packed products for such a weight."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ops = torch.ops.mkldnn
    if not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
