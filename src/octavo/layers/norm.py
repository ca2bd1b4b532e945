"""Layer normalisation, with the addition to the residual stream that comes before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.ops.cpu.row_ops import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Owns the scale of a root-mean-square norm (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(hidden + residual), hidden + residual); without residual (norm(hidden), hidden).

        hidden and residual: [num_tokens, size], of the same dtype. The sum is written into
        `residual`. On a GPU hidden may come in parts that are added up (Linear.forward_parts).
        """
        if hidden.device.type == "cuda":
            from octavo.ops.cuda import norm

            normed = norm.rms_norm(hidden, self.weight, self.eps, residual)
            return normed, hidden if residual is None else residual
        if residual is None:
            return rms_norm(hidden, self.weight, self.eps), hidden
        return add_rms_norm(hidden, residual, self.weight, self.eps), residual


class LayerNorm(nn.Module):
    """Owns the scale and shift of a layer norm; neither when `affine` is off."""

    def __init__(self, size: int, eps: float, affine: bool = True) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False) if affine else None
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if affine else None

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(hidden + residual), hidden + residual), as RMSNorm.forward."""
        if hidden.device.type == "cuda":
            from octavo.ops.cuda import norm

            normed = norm.layer_norm(hidden, self.weight, self.bias, self.eps, residual)
            return normed, hidden if residual is None else residual
        if residual is not None:
            hidden = residual.add_(hidden)
        return F.layer_norm(hidden, self.shape, self.weight, self.bias, self.eps), hidden


def add_parts(residual: Tensor, hidden: Tensor) -> Tensor:
    """residual + hidden, written into residual; hidden may be in parts (Linear.forward_parts)."""
    return residual.add_(hidden.sum(0) if hidden.dim() == 3 else hidden)
