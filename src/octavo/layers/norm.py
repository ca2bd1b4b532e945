"""Norms, each fused with the addition to the residual stream that precedes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.layers.base import WeightOwner
from octavo.layers.config import NormConfig
from octavo.ops.cpu.row_ops import add_rms_norm, rms_norm


class Norm(WeightOwner):
    """Normalises rows; owns a scale, a shift, both or neither."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    eps: float

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(hidden + residual), hidden + residual); without residual (norm(hidden), hidden).

        hidden and residual: [num_tokens, size], of the same dtype. The sum is written into
        `residual`. On a GPU hidden may be partial sums [num_splits, num_tokens, size] that are
        added up (LinearMethod.forward_partial).
        """
        raise NotImplementedError


class RMSNorm(Norm):
    """A root-mean-square norm (arXiv:1910.07467) with a scale."""

    weight: nn.Parameter

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See Norm.forward."""
        if hidden.device.type == "cuda":
            from octavo.ops.cuda import norm

            normed = norm.rms_norm(hidden, self.weight, self.eps, residual)
            return normed, hidden if residual is None else residual
        if residual is None:
            return rms_norm(hidden, self.weight, self.eps), hidden
        return add_rms_norm(hidden, residual, self.weight, self.eps), residual


class LayerNorm(Norm):
    """A layer norm with scale and shift; with neither unless it is `affine`."""

    def __init__(self, size: int, eps: float, affine: bool = True) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False) if affine else None
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if affine else None

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See Norm.forward."""
        if hidden.device.type == "cuda":
            from octavo.ops.cuda import norm

            normed = norm.layer_norm(hidden, self.weight, self.bias, self.eps, residual)
            return normed, hidden if residual is None else residual
        if residual is not None:
            hidden = residual.add_(hidden)
        return F.layer_norm(hidden, self.shape, self.weight, self.bias, self.eps), hidden


def make_norm(config: NormConfig) -> Norm:
    """The norm that a model's description asks for, with uninitialised weights."""
    if config.kind == "rms":
        return RMSNorm(config.size, config.eps)
    return LayerNorm(config.size, config.eps, config.affine)


def add_partial(residual: Tensor, hidden: Tensor) -> Tensor:
    """residual + hidden, written into residual; hidden may be partial sums (see Norm.forward)."""
    return residual.add_(hidden.sum(0) if hidden.dim() == 3 else hidden)
