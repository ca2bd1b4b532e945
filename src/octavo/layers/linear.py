"""Projections, packed for the CPU once their weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T + b, with W [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(out_features, in_features), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        )
        self._packed: Tensor | None = None

    def finalize(self) -> None:
        """Pack the weight, if this torch can; to be called once, after loading."""
        assert self.weight is not None, "finalize is called once"
        if self.weight.device.type == "cpu" and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            weight = self.weight.detach()
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return result


class MergedLinear(Linear):
    """Several projections of the same input in one, stacked along the output."""

    def __init__(self, in_features: int, out_sizes: Sequence[int], bias: bool) -> None:
        super().__init__(in_features, sum(out_sizes), bias)
        self.out_sizes = tuple(out_sizes)
