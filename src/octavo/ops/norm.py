"""Norms of rows with the additions to the residual stream that come before them, in plain torch.

The kernels (cpu/row_ops.py, cuda/norm.py) take the same arguments and do it in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.communicator import Reduction
from octavo.ops.quantized import Rounding, round_inputs

MAX_TWINS = 2


class Affine(NamedTuple):
    """Scale and shift of a norm, [size] each, float32 or of the rows' dtype; None: without."""

    weight: Tensor | None
    bias: Tensor | None = None


class DeferredNorm(NamedTuple):
    """Inputs of a projection, or of a router, that applies their RMS norm itself, with the addition
    to the residual stream before it; the arguments are those of `norm`."""

    # [1, size], dense; with a residual perhaps in float32; of a router, also of several tokens, and
    # partial sums of them
    x: Tensor
    weight: Tensor  # [size], as the checkpoint has it
    eps: float
    offset: float  # added to both weights
    # [num_tokens, size] each, dense; None: x itself is normalised
    residual: Tensor | None = None
    total: Tensor | None = None  # where the projection writes residual + x, for those that follow
    branch_weight: Tensor | None = None  # [size], of an RMS norm of x before it is added

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the norm's result."""
        return self.x.dtype if self.residual is None else self.residual.dtype


def norm(
    x: Tensor,
    affine: Affine | None,
    eps: float,
    residual: Tensor | None,
    is_rms: bool,
    *,
    second: Tensor | None = None,
    branch: Affine | None = None,
    branches: tuple[Affine, Affine] | None = None,
    factor: float = 1.0,
    twins: Sequence[Affine] = (),
    reduction: Reduction | None = None,
    rounding: Rounding = Rounding.NONE,
) -> list[Tensor]:
    """Add to the residual stream, and normalise the sum.

    Args:
        x: [num_tokens, (heads,) size], the last dimension dense.
        affine: scale and shift of the result; None: only the residual is computed.
        eps: of all norms here.
        residual: [num_tokens, size]. x is added to it in place, and the sum is normalised. None: x
            itself is normalised.
        is_rms: whether the norms are RMS norms (arXiv:1910.07467), else layer norms.
        second: [num_tokens, size], dense, also added: a parallel block has two results.
        branch: scale of a norm that is applied to x, or x + second, before it is added; with
            `second` only beside `branches`.
        branches: scales of norms that are applied to x and to second before these are added up.
        factor: what the sum with the residual is multiplied by, in it, too.
        twins: other scales and shifts, at most MAX_TWINS, for a result of each.
        reduction: x + second, or with `branches` each of the two, is this rank's part of a sum over
            all ranks, which is computed first. Needs a residual, which all ranks have alike.
        rounding: of the result, for a projection that rounds its inputs; not with `twins`.

    Returns:
        The results for `affine` and `twins`, as far as they are given, dense, shaped like x. A
        rounded result is two tensors, those of RoundedInputs: exactly what rounding the result in
        x's dtype gives.
    """
    if reduction is not None:
        x, second = reduced(x, second, branches is not None, reduction)
    if branches is not None:
        assert second is not None
        x, second = (_norm(*each, eps, is_rms) for each in zip((x, second), branches, strict=True))
    if second is not None:
        x = x + second
    if branch is not None:
        x = _norm(x, branch, eps, is_rms)
    total = x if residual is None else residual.add_(x)
    if factor != 1:
        total.mul_(factor)
    affines = [each for each in (affine, *twins) if each is not None]
    return rounded_results([_norm(total, each, eps, is_rms) for each in affines], rounding)


def reduced(
    x: Tensor, second: Tensor | None, are_apart: bool, reduction: Reduction
) -> tuple[Tensor, Tensor | None]:
    """x and second, of shape and dtype alike, summed over the ranks: `are_apart`, or both in x."""
    communicator = reduction.communicator
    if second is None:
        return communicator.all_reduce(x), None
    if not are_apart:
        return communicator.all_reduce(x + second), None
    x, second = communicator.all_reduce(torch.stack((x, second)))
    return x, second


def rounded_results(results: list[Tensor], rounding: Rounding) -> list[Tensor]:
    """What `norm` returns where it would return `results` without rounding."""
    return results if rounding is Rounding.NONE else [*round_inputs(results[0], rounding)[:2]]


def _norm(x: Tensor, affine: Affine, eps: float, is_rms: bool) -> Tensor:
    weight, bias = affine
    if weight is not None and weight.dtype != x.dtype:  # float32, which is not to be rounded
        return _norm(x.float(), affine, eps, is_rms).to(x.dtype)
    if is_rms:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
