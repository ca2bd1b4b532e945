"""Norms, each fused with the addition to the residual stream that precedes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.layers.base import WeightOwner
from octavo.layers.config import NormConfig
from octavo.ops.communicator import Reduction
from octavo.ops.cpu.row_ops import add_rms_norm, rms_norm


class Norm(WeightOwner):
    """Normalises rows; owns a scale, a shift, both or neither."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    eps: float

    def __init__(self, reduction: Reduction | None) -> None:
        """`reduction`: set if `hidden` is a partial sum of this rank; the norm adds up those of
        all ranks first."""
        super().__init__()
        self.reduction = reduction

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(hidden + residual), hidden + residual); without residual (norm(hidden), hidden).

        hidden and residual: [num_tokens, size], of the same dtype. The sum is written into
        `residual`. On a GPU hidden may be partial sums [num_splits, num_tokens, size] that are
        added up (LinearMethod.forward_partial).
        """
        raise NotImplementedError

    def _reduced(self, hidden: Tensor) -> Tensor:
        """The sum over the ranks, if hidden is a partial one."""
        return hidden if self.reduction is None else self.reduction.communicator.all_reduce(hidden)


class RMSNorm(Norm):
    """A root-mean-square norm (arXiv:1910.07467) with a scale."""

    weight: nn.Parameter

    def __init__(self, size: int, eps: float, reduction: Reduction | None = None) -> None:
        super().__init__(reduction)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See Norm.forward."""
        if hidden.device.type == "cuda":
            from octavo.ops.cuda import norm

            if self.reduction is not None:
                return norm.reduce_add_rms_norm(
                    hidden, self.weight, self.eps, residual, self.reduction
                )
            normed = norm.rms_norm(hidden, self.weight, self.eps, residual)
            return normed, hidden if residual is None else residual
        hidden = self._reduced(hidden)
        if residual is None:
            return rms_norm(hidden, self.weight, self.eps), hidden
        return add_rms_norm(hidden, residual, self.weight, self.eps), residual


class LayerNorm(Norm):
    """A layer norm with scale and shift; with neither unless it is `affine`."""

    def __init__(
        self, size: int, eps: float, affine: bool = True, reduction: Reduction | None = None
    ) -> None:
        super().__init__(reduction)
        self.shape = (size,)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False) if affine else None
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if affine else None

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See Norm.forward."""
        if hidden.device.type == "cuda":
            from octavo.ops.cuda import norm

            if self.reduction is not None:
                return norm.reduce_add_layer_norm(
                    hidden, self.weight, self.bias, self.eps, residual, self.reduction
                )
            normed = norm.layer_norm(hidden, self.weight, self.bias, self.eps, residual)
            return normed, hidden if residual is None else residual
        hidden = self._reduced(hidden)
        if residual is not None:
            hidden = residual.add_(hidden)
        return F.layer_norm(hidden, self.shape, self.weight, self.bias, self.eps), hidden


def make_norm(config: NormConfig, reduction: Reduction | None = None) -> Norm:
    """The norm that a model's description asks for, with uninitialised weights.

    reduction: set if what it normalises is the sum of what all ranks have, to be added up by it.
    """
    if reduction is not None and reduction.communicator.shard.size == 1:
        reduction = None
    if config.kind == "rms":
        return RMSNorm(config.size, config.eps, reduction)
    return LayerNorm(config.size, config.eps, config.affine, reduction)


def add_partial(residual: Tensor, hidden: Tensor) -> Tensor:
    """residual + hidden, written into residual; hidden may be partial sums (see Norm.forward)."""
    return residual.add_(hidden.sum(0) if hidden.dim() == 3 else hidden)
