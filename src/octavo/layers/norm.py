"""Norms, each fused with the addition to the residual stream that precedes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from octavo.layers.base import WeightOwner, WeightSlice, WeightTarget, WeightTargets
from octavo.layers.config import NormConfig
from octavo.ops.communicator import Reduction
from octavo.ops.cpu import row_ops
from octavo.ops.linear import LinearInput
from octavo.ops.norm import Affine, DeferredNorm
from octavo.ops.quantized import RoundedInputs, Rounding
from octavo.parallel import Shard

# What blocks add to the residual stream: [num_tokens, size], or two of them in a parallel layer. On
# a GPU each may be partial sums [num_splits, num_tokens, size] that are added up
# (LinearMethod.forward_partial).
Branches = Tensor | tuple[Tensor, Tensor]


class Entry(Protocol):
    """What reads a norm's result first: a projection, or experts with their router."""

    def rounding(self, num_tokens: int) -> Rounding:
        """See LinearMethod.rounding."""

    def norms_inputs(self, num_tokens: int, norms_branch: bool, is_partial: bool = False) -> bool:
        """See LinearMethod.norms_inputs."""


class InputReader(Protocol):
    """What a norm's result is for."""

    @property
    def entry(self) -> Entry | None:
        """The only one to read it; None: several do."""


class Norm(WeightOwner):
    """Normalises rows; owns a scale, a shift, both or neither."""

    is_rms: ClassVar[bool]
    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, config: NormConfig, reduction: Reduction | None = None) -> None:
        """reduction: set if what is normalised, or what is added to the residual stream before, is
        this rank's partial sum: the norm adds up those of all ranks first."""
        super().__init__()
        self.config = config
        self.reduction = reduction
        self.eps = config.eps
        has_bias = config.affine and config.bias and not self.is_rms
        self.weight = _parameter(config.size) if config.affine else None
        self.bias = _parameter(config.size) if has_bias else None
        self._joining: Joining | None = None
        self._loaded: Tensor | None = None  # the scale without offset, of fewer bytes

    def finalize(self) -> None:
        """Apply offset and multiplier to the loaded weights.

        In float32: rounding 1 + w to bfloat16 would lose most of a small w. The result replaces
        the parameters.
        """
        offset, multiplier = self.config.offset, self.config.multiplier
        weight, bias = self.weight, self.bias
        if weight is not None and multiplier == 1:
            self._loaded = weight.detach()
        if offset == 0 and multiplier == 1:
            return
        assert weight is not None, "offset and multiplier need a scale that they are put into"
        del self.weight, self.bias
        self.weight = (weight.float() + offset) * multiplier
        self.bias = None if bias is None else bias.float() * multiplier

    @cached_property
    def affine(self) -> Affine:
        """Scale and shift, as kernels take them; asked for after `finalize`.

        Kept, because a step asks for it in every layer, and attributes of modules are slow.
        """
        return Affine(self.weight, self.bias)

    def follow(self, joining: Joining) -> None:
        """What is added to the residual joins it so, by modules that another one owns."""
        self._joining = joining

    def forward(self, hidden: Branches, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(hidden + residual), hidden + residual); without residual (norm(hidden), hidden).

        residual: [num_tokens, size], of hidden's dtype; the sum is written into it. Without it,
        hidden is one complete tensor, of which every row of the last dimension is normalised.
        """
        results, residual = self._normalise(hidden, residual)
        return results[0], residual

    def forward_for(
        self, reader: InputReader, hidden: Branches, residual: Tensor | None = None
    ) -> tuple[LinearInput, Tensor]:
        """As `forward`, with the result in the form that `reader` takes.

        If it takes a DeferredNorm, it writes the second result, which has a memory of its own.
        """
        entry = reader.entry
        if entry is None:
            return self.forward(hidden, residual)
        first = hidden[0] if isinstance(hidden, tuple) else hidden
        num_tokens = first.shape[-2]
        deferred = self._deferred(hidden, residual, entry)
        if deferred is not None:
            return deferred, deferred.x if deferred.total is None else deferred.total
        rounding = entry.rounding(num_tokens)
        if rounding is Rounding.NONE:
            return self.forward(hidden, residual)
        (values, scales), residual = self._normalise(hidden, residual, rounding=rounding)
        return RoundedInputs(values, scales, rounding.group), residual

    def forward_each(
        self, hidden: Branches, residual: Tensor | None, *twins: Norm
    ) -> tuple[list[Tensor], Tensor]:
        """As `forward`, with this norm's and the twins' results of the same sum."""
        return self._normalise(hidden, residual, [each.affine for each in twins])

    def add_normed(self, branch: Tensor, residual: Tensor) -> Tensor:
        """residual + norm(branch), written into residual; branch as in `Branches`."""
        return Joining(self).add(branch, residual)

    def _deferred(
        self, hidden: Branches, residual: Tensor | None, entry: Entry
    ) -> DeferredNorm | None:
        """What `entry` needs to do what `_normalise` does; None: it is not to do that."""
        if not isinstance(hidden, Tensor) or not self._is_deferrable:
            return None
        branch = None if residual is None or self._joining is None else self._joining.norm
        if not entry.norms_inputs(
            hidden.shape[-2], branch is not None, is_partial=hidden.dim() > 2
        ):
            return None
        assert self._loaded is not None
        return DeferredNorm(
            hidden,
            self._loaded,
            self.eps,
            self.config.offset,
            residual,
            None if residual is None else torch.empty_like(residual),
            None if branch is None else branch._loaded,
        )

    @cached_property
    def _is_deferrable(self) -> bool:
        """Whether DeferredNorm has words for what this norm does; asked for after `finalize`."""
        joining = self._joining
        norms = (self,) if joining is None else (self, joining.norm)
        is_plain = self.is_rms and self.reduction is None
        is_plain = is_plain and (joining is None or joining == Joining(joining.norm))
        return is_plain and all(
            each._loaded is not None and each.config.offset == self.config.offset for each in norms
        )

    def _normalise(
        self,
        hidden: Branches,
        residual: Tensor | None,
        twins: Sequence[Affine] = (),
        rounding: Rounding = Rounding.NONE,
    ) -> tuple[list[Tensor], Tensor]:
        first, second = hidden if isinstance(hidden, tuple) else (hidden, None)
        joins: dict[str, Any] = {}
        if self._joining is not None and residual is not None:
            joins = self._joining.options
        if self.reduction is not None and residual is None:
            residual = torch.zeros_like(first)  # where the sum over the ranks is kept
        results = _norm_on(first)(
            first,
            self.affine,
            self.eps,
            residual,
            self.is_rms,
            second=second,
            **joins,
            twins=twins,
            reduction=self.reduction,
            rounding=rounding,
        )
        return results, first if residual is None else residual


class StreamScale(WeightOwner):
    """Owns a number that the residual stream is multiplied by; no parameter, as in transformers."""

    weight: Tensor
    factor: float
    """The number, on the host; known from `finalize` on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(1, dtype=torch.float32))

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """See WeightOwner.targets; the name is the tensor's own."""
        (name,) = names
        return {name: WeightTarget.whole(self.weight)}

    def finalize(self) -> None:
        """See WeightOwner.finalize."""
        self.factor = float(self.weight)


class Joining(NamedTuple):
    """How a block's result is added to the residual stream; the modules are owned by another."""

    norm: Norm  # of the result
    norms: tuple[Norm, Norm] | None = None  # of each of two results, before they are added up
    scale: StreamScale | None = None  # of the sum

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of norms (ops/norm.py) that say so; asked for after `finalize`."""
        return {
            "branch": self.norm.affine,
            "branches": self.norms and tuple(each.affine for each in self.norms),
            "factor": 1.0 if self.scale is None else self.scale.factor,
        }

    def add(self, branch: Branches, residual: Tensor) -> Tensor:
        """The stream with a block's result, written into residual. The norm's Reduction is that of
        the result."""
        norm = self.norm
        first, second = branch if isinstance(branch, tuple) else (branch, None)
        _norm_on(residual)(
            first,
            None,
            norm.eps,
            residual,
            norm.is_rms,
            second=second,
            **self.options,
            reduction=norm.reduction,
        )
        return residual


def _norm_on(x: Tensor) -> Callable[..., list[Tensor]]:
    """The kernels for x's device; see ops/norm.py."""
    if x.device.type == "cuda":
        from octavo.ops.cuda import norm

        return norm.norm
    return row_ops.norm


class RMSNorm(Norm):
    """A root-mean-square norm (arXiv:1910.07467) with a scale."""

    is_rms = True


class RouterNorm(RMSNorm):
    """An RMS norm of a router's inputs, whose scale has the name of a tensor."""

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """See WeightOwner.targets."""
        (name,) = names
        assert self.weight is not None
        return {name: WeightTarget.whole(self.weight)}


class ShardedRMSNorm(RMSNorm):
    """An RMS norm of rows of which each rank has a part."""

    def __init__(self, config: NormConfig, shard: Shard, num_ranks: int) -> None:
        """
        Args:
            config: of this rank's part.
            shard: which part that is.
            num_ranks: how many ranks there are; if there are fewer parts, several have the same.
        """
        super().__init__(config)
        self._shard = shard
        self._num_copies = num_ranks // shard.size

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """See WeightOwner.targets."""
        (name,) = names
        assert self.weight is not None
        count, shard = len(self.weight), self._shard
        part = WeightSlice(self.weight, (slice(count * shard.rank, count * (shard.rank + 1)),))
        return {f"{name}.weight": WeightTarget((count * shard.size,), (part,))}

    def squares(self, x: Tensor) -> Tensor:
        """x [num_tokens, size] -> float32 [num_tokens, 1], whose sum over the ranks is that of the
        squares of whole rows."""
        return x.float().square().sum(dim=-1, keepdim=True) / self._num_copies

    def scaled(self, x: Tensor, squares: Tensor) -> Tensor:
        """The norm of x [num_tokens, size], by the sum of `squares` over the ranks."""
        assert self.weight is not None
        mean = squares / (self.config.size * self._shard.size)
        return (x.float() * torch.rsqrt(mean + self.eps) * self.weight.float()).to(x.dtype)


class LayerNorm(Norm):
    """A layer norm with scale and shift, with a scale, or with neither."""

    is_rms = False


def make_norm(config: NormConfig, reduction: Reduction | None = None) -> Norm:
    """The norm that a model's description asks for, with uninitialised weights.

    reduction: see Norm; without effect in a group of one rank.
    """
    if reduction is not None and reduction.communicator.shard.size == 1:
        reduction = None
    kind = RMSNorm if config.kind == "rms" else LayerNorm
    return kind(config, reduction)


def add_partial(residual: Tensor, hidden: Branches) -> Tensor:
    """residual + hidden, written into residual."""
    for each in hidden if isinstance(hidden, tuple) else (hidden,):
        residual.add_(each.sum(0) if each.dim() == 3 else each)
    return residual


def sum_over_ranks(partial: Tensor, dtype: torch.dtype, reduction: Reduction) -> Tensor:
    """What all ranks have of a sum, added up where no norm follows: [num_rows, size] in `dtype`.

    partial: this rank's part, [num_rows, size], or on a GPU [num_splits, num_rows, size]
    (LinearMethod.forward_partial).
    """
    total = torch.zeros(partial.shape[-2:], dtype=dtype, device=partial.device)
    _norm_on(partial)(partial, None, 0.0, total, is_rms=True, reduction=reduction)
    return total


def _parameter(size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size), requires_grad=False)
