"""Mixtures of experts: a router, experts of which each token takes some, and a shared one.

How experts are stored and computed is an `ExpertsMethod`, as that of projections is a
`LinearMethod`: it owns its tensors, says where a checkpoint's tensors go, rearranges them once they
are loaded, and computes. Routing is the same for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from octavo.layers.base import WeightOwner, WeightSlice, WeightSlot, WeightTarget, WeightTargets
from octavo.layers.config import ExpertsConfig, LinearConfig, MLPConfig
from octavo.layers.linear import LinearMethod, make_linear, warn_once
from octavo.layers.mlp import GATED_EPILOGUES, DenseMLP
from octavo.layers.norm import Branches
from octavo.ops.expert_kernels import (
    make_experts_kernel,
    make_quantized_experts_kernel,
    make_router_kernel,
)
from octavo.ops.experts import (
    ExpertsKernel,
    ExpertWeights,
    QuantizedExpertWeights,
    Routed,
    RouterKernel,
    RouterWeights,
    RoutingExpertsKernel,
    Unrouted,
)
from octavo.ops.linear import LinearInput
from octavo.ops.norm import DeferredNorm
from octavo.ops.quantized import (
    FormError,
    GroupedInt,
    MxFloat4,
    QuantizedWeight,
    RoundedInputs,
    Rounding,
    ScaledFloat8,
)
from octavo.registry import EXPERTS_METHODS

Place = Tensor | WeightSlot


class Router(WeightOwner):
    """Owns the projection from hidden states to a logit per expert.

    Each expert's `correction`, if there is one, is added to its score for the choice alone. It
    stays float32: the differences that it makes are smaller than bfloat16 can say.

    `num_hit` is int64 [1] on the weights' device, set before `finalize`: each call adds how many
    experts some token takes.
    """

    correction: Tensor | None

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = routing = config.routing
        shape = (routing.num_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.bias = _parameter(routing.num_experts) if routing.bias else None
        correction = torch.empty(routing.num_experts, dtype=torch.float32)
        self.register_buffer("correction", correction if routing.correction else None)
        self.scales = _parameter(routing.num_experts) if routing.expert_scales else None
        self.num_hit: Tensor
        self.weights: RouterWeights  # as kernels take them, after `finalize`
        self._kernel: RouterKernel

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """See WeightOwner.targets; a second name is that of the corrections, or of the scales."""
        found = super().targets(names[:1])
        found.pop(f"{names[0]}.scales", None)
        for each in (self.correction, self.scales):
            if each is not None:
                found[names[1]] = WeightTarget.whole(each)
        return found

    def finalize(self) -> None:
        """See WeightOwner.finalize."""
        self.weights = RouterWeights(self.weight, self.bias, self.correction, self.scales)
        self._kernel = make_router_kernel(self.weights, self.config, self.num_hit)

    def norms_inputs(self, num_tokens: int) -> bool:
        """See RouterKernel.norms_inputs."""
        return self._kernel.norms_inputs(num_tokens)

    def forward(self, hidden: Tensor | DeferredNorm, rounding: Rounding = Rounding.NONE) -> Routed:
        """Route hidden [num_tokens, hidden_size], or its norm; called after `finalize`.

        rounding: see RouterKernel.apply.
        """
        return self._kernel.apply(hidden, rounding)

    def unrouted(self, norm: DeferredNorm) -> Unrouted:
        """What experts need to do what the norm and `forward` do."""
        return Unrouted(norm, self.weights, self.config, self.num_hit)


class ExpertsMethod(WeightOwner):
    """The gated MLPs of all experts, however their weights are stored.

    `targets` takes names with a * for the number of an expert, of its gate, up and down
    projections; or the whole names of two tensors that have those of all experts: gates and ups
    merged, and down. Then that of a bias has `_bias` at its end.
    """

    def finalize(self) -> None:
        """Rearrange the weights for the device that they are on; called once, after loading."""
        raise NotImplementedError

    def rounding(self, num_tokens: int) -> Rounding:
        """See ExpertsKernel.rounding; what has no such kernel need not say so."""
        return Rounding.NONE

    def forward_partial(self, hidden: Tensor, routed: Routed) -> Tensor:
        """See ExpertsKernel.apply_partial; of this rank's intermediate elements."""
        raise NotImplementedError

    def routes_inputs(self, num_tokens: int, router: Router) -> bool:
        """Whether `forward_unrouted` is to compute with so many tokens."""
        return False

    def forward_unrouted(self, x: Unrouted) -> Tensor:
        """See RoutingExpertsKernel.apply_unrouted; of this rank's intermediate elements."""
        raise NotImplementedError


class LoadedExperts(ExpertsMethod):
    """Owns the biases, and a kernel; subclasses own the weights until they are loaded."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        experts, size = config.routing.num_experts, config.hidden_size
        inner = config.intermediate_size
        self.up_bias = _parameter(experts, 2 * inner) if config.bias else None
        self.down_bias = _parameter(experts, size) if config.has_down_bias else None
        self._kernel: ExpertsKernel | None = None  # a subclass may compute otherwise

    def places(self, expert: int) -> tuple[Place, Place, Place]:
        """Where the gates, ups and down weights of one expert go: [out_features, in_features]."""
        raise NotImplementedError

    def merged_places(self) -> tuple[Sequence[Place], Place]:
        """Where a tensor with the gates and ups of all experts goes, and that of down weights.

        The first are gates and ups, [experts, out_features, in_features], or one place for both,
        if this rank has all of them or they take turns (ExpertsConfig.alternating). All are as such
        a checkpoint has them (ExpertsConfig.transposed).
        """
        raise NotImplementedError

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """See WeightOwner.targets, and ExpertsMethod."""
        if len(names) == 2:
            return self._merged_targets(*names)
        config = self.config
        inner, part = self._inner()
        everything = slice(0, config.hidden_size)
        found: WeightTargets = {}
        for expert in range(config.routing.num_experts):
            *ups, down = self.places(expert)
            *up_names, down_name = (each.replace("*", str(expert)) for each in names)
            for name, place in zip(up_names, ups, strict=True):
                found[f"{name}.weight"] = WeightTarget(
                    (inner, config.hidden_size), (WeightSlice(place, (part, everything)),)
                )
            found[f"{down_name}.weight"] = WeightTarget(
                (config.hidden_size, inner), (WeightSlice(down, (everything, part)),)
            )
            if self.up_bias is None:
                continue
            for name, bias in zip(up_names, self.up_bias[expert].chunk(2), strict=True):
                found[f"{name}.bias"] = WeightTarget((inner,), (WeightSlice(bias, (part,)),))
            own = self.down_bias
            slices = () if own is None else (WeightSlice(own[expert], (everything,)),)
            found[f"{down_name}.bias"] = WeightTarget((config.hidden_size,), slices)
        return found

    def rounding(self, num_tokens: int) -> Rounding:
        """See ExpertsMethod.rounding."""
        if self._kernel is None:
            return Rounding.NONE
        return self._kernel.rounding(num_tokens, self.config.routing.top_k)

    def forward_partial(self, hidden: Tensor, routed: Routed) -> Tensor:
        """See ExpertsMethod.forward_partial."""
        assert self._kernel is not None, "finalize makes it"
        return self._kernel.apply_partial(hidden, routed)

    def routes_inputs(self, num_tokens: int, router: Router) -> bool:
        """See ExpertsMethod.routes_inputs."""
        kernel = self._routing_kernel
        return kernel is not None and kernel.routes_inputs(
            num_tokens, router.weights, router.config
        )

    def forward_unrouted(self, x: Unrouted) -> Tensor:
        """See ExpertsMethod.forward_unrouted."""
        assert self._routing_kernel is not None, "it does not route"
        return self._routing_kernel.apply_unrouted(x)

    @cached_property
    def _routing_kernel(self) -> RoutingExpertsKernel | None:
        """The kernel, if it can route; asked for after `finalize`."""
        return self._kernel if isinstance(self._kernel, RoutingExpertsKernel) else None

    def _biases(self) -> tuple[Tensor | None, Tensor | None]:
        """The biases of gates and ups, and those of the down projections; None: there are none."""
        up, down = self.up_bias, self.down_bias
        return None if up is None else up.detach(), None if down is None else down.detach()

    def _inner(self) -> tuple[int, slice]:
        """How many intermediate elements a whole expert has, and which of them these are."""
        size, shard = self.config.intermediate_size, self.config.shard
        return size * shard.size, slice(size * shard.rank, size * (shard.rank + 1))

    def _merged_targets(self, up_name: str, down_name: str) -> WeightTargets:
        """All experts in one tensor."""
        config = self.config
        num, size = config.routing.num_experts, config.hidden_size
        inner, part = self._inner()
        experts, everything = slice(0, num), slice(0, size)
        ups, down = self.merged_places()
        where = (experts, part, everything) if config.transposed else (experts, everything, part)
        shape = (num, inner, size) if config.transposed else (num, size, inner)
        found = {
            up_name: self._merged_up(ups, (size,)),
            down_name: WeightTarget(shape, (WeightSlice(down, where),)),
        }
        if config.bias:
            assert self.up_bias is not None
            biases = _up_views(self.up_bias, config.alternating)
            found[f"{up_name}_bias"] = self._merged_up(biases, ())
            own = self.down_bias
            slices = () if own is None else (WeightSlice(own, (experts, everything)),)
            found[f"{down_name}_bias"] = WeightTarget((num, size), slices)
        return found

    def _merged_up(self, places: Sequence[Place], columns: tuple[int, ...]) -> WeightTarget:
        """Gates and ups of all experts: weights, or biases, which have no columns."""
        inner, part = self._inner()
        num = self.config.routing.num_experts
        if self.config.alternating:
            rows = [slice(2 * part.start, 2 * part.stop)]
        elif len(places) == 1:
            rows = [slice(0, 2 * inner)]
        else:
            rows = [slice(first + part.start, first + part.stop) for first in (0, inner)]

        def turned(of_rows: Any, of_columns: Sequence[Any]) -> tuple[Any, ...]:
            return (*of_columns, of_rows) if self.config.transposed else (of_rows, *of_columns)

        everything = [slice(0, each) for each in columns]
        slices = [
            WeightSlice(place, (slice(0, num), *turned(each, everything)))
            for place, each in zip(places, rows, strict=True)
        ]
        return WeightTarget((num, *turned(2 * inner, columns)), tuple(slices))


class PlainExperts(LoadedExperts):
    """Owns the weights in the model's dtype, as loaded or packed for the CPU."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__(config)
        experts, size = config.routing.num_experts, config.hidden_size
        inner = config.intermediate_size
        self.up = _parameter(experts, 2 * inner, size)
        self.down = _parameter(experts, size, inner)

    def places(self, expert: int) -> tuple[Place, Place, Place]:
        """See LoadedExperts.places."""
        gates, ups = self.up[expert].chunk(2)
        return gates, ups, self.down[expert]

    def merged_places(self) -> tuple[Sequence[Place], Place]:
        """See LoadedExperts.merged_places."""
        config = self.config
        ups = _up_views(self.up, config.alternating, config.transposed)
        return ups, self.down.transpose(1, 2) if config.transposed else self.down

    def finalize(self) -> None:
        """See ExpertsMethod.finalize; the kernel owns the weights from here on."""
        weights = ExpertWeights(self.up.detach(), self.down.detach(), *self._biases())
        epilogue = GATED_EPILOGUES[self.config.activation]
        self._kernel = make_experts_kernel(weights, epilogue, self.config.copied_tokens)
        del self.up, self.down


class QuantizedExperts(LoadedExperts):
    """Owns the weights as the checkpoint has them: quantized where a kernel computes with that
    form. What has no such kernel is dequantized when it is loaded: on a CPU, experts of different
    forms, and those that the checkpoint has not quantized."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__(config)
        self._separate: list[tuple[WeightSlot, WeightSlot, WeightSlot]] = []
        self._merged: tuple[list[WeightSlot], WeightSlot] | None = None

    def places(self, expert: int) -> tuple[Place, Place, Place]:
        """See LoadedExperts.places."""
        size, inner = self.config.hidden_size, self.config.intermediate_size
        if not self._separate:
            self._separate = [
                (_slot(inner, size), _slot(inner, size), _slot(size, inner))
                for _ in range(self.config.routing.num_experts)
            ]
        return self._separate[expert]

    def merged_places(self) -> tuple[Sequence[Place], Place]:
        """See LoadedExperts.merged_places."""
        config = self.config
        num, size, inner = config.routing.num_experts, config.hidden_size, config.intermediate_size

        def slot(rows: int, columns: int) -> WeightSlot:
            shape = (columns, rows) if config.transposed else (rows, columns)
            return _slot(num, *shape, is_transposed=config.transposed)

        if self._merged is None:
            is_one = config.alternating or config.shard.size == 1
            sizes = [2 * inner] if is_one else [inner, inner]
            self._merged = [slot(each, size) for each in sizes], slot(size, inner)
        return self._merged

    def finalize(self) -> None:
        """See ExpertsMethod.finalize."""
        epilogue = GATED_EPILOGUES[self.config.activation]
        up, down = self._taken()
        kernel = None
        if isinstance(up, QuantizedWeight) and isinstance(down, QuantizedWeight):
            quantized = QuantizedExpertWeights(up, down, *self._biases())
            kernel = make_quantized_experts_kernel(
                quantized, epilogue, self._dtype, self.config.copied_tokens
            )
        if kernel is None:
            dense_up, dense_down = _dense(up, self._dtype), _dense(down, self._dtype)
            weights = ExpertWeights(dense_up, dense_down, *self._biases())
            kernel = make_experts_kernel(weights, epilogue)
        self._kernel = kernel

    def _taken(self) -> tuple[Tensor | QuantizedWeight, Tensor | QuantizedWeight]:
        """Gates and ups, and down weights of all experts, which the slots have no more: each is
        cleared before the next weights are moved, so that a layer is not there twice."""
        if self._merged is not None:
            ups, down = self._merged
            self._dtype = down.dtype
            up = _joined(_emptied(ups), self._dtype)
            if self.config.alternating:
                up = _in_halves(up, self._dtype)
            if isinstance(up, ScaledFloat8):  # kernels take no block with rows of both
                up = up.in_lower_blocks(math.gcd(up.block[0], up.shape[-2] // 2))
            [down_weights] = _emptied([down])
            return up, down_weights
        self._dtype = self._separate[0][0].dtype
        gates, ups_of_all, downs = (
            _stacked(_emptied(slots), self._dtype) for slots in zip(*self._separate, strict=True)
        )
        return _joined([gates, ups_of_all], self._dtype), downs


def _slot(*shape: int, is_transposed: bool = False) -> WeightSlot:
    return WeightSlot(*shape, is_transposed=is_transposed, is_of_experts=True)


def _emptied(slots: Sequence[WeightSlot]) -> list[Tensor | QuantizedWeight]:
    """What was put into the slots, which let go of it."""
    contents = [_content(each) for each in slots]
    for each in slots:
        each.clear()
    return contents


def _content(slot: WeightSlot) -> Tensor | QuantizedWeight:
    """[..., out_features, in_features]."""
    return slot.content if isinstance(slot.content, QuantizedWeight) else slot.dense()


def _dense(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The weight in the model's dtype."""
    return weight.contiguous() if isinstance(weight, Tensor) else weight.dense(dtype)


def _stacked(
    contents: Sequence[Tensor | QuantizedWeight], dtype: torch.dtype
) -> Tensor | QuantizedWeight:
    """The weights of all experts as one; dense, with a warning, where their forms differ."""
    forms = [each for each in contents if isinstance(each, QuantizedWeight)]
    try:
        if len(forms) == len(contents) and len({type(each) for each in forms}) == 1:
            return type(forms[0]).stack(forms)
        if forms:
            warn_once("experts are dequantized: some are not quantized, or otherwise")
    except FormError as error:
        warn_once(f"experts are dequantized: {error}")
    dense = [each.dense(dtype) if isinstance(each, QuantizedWeight) else each for each in contents]
    return torch.stack(dense)


def _joined(
    parts: Sequence[Tensor | QuantizedWeight], dtype: torch.dtype
) -> Tensor | QuantizedWeight:
    """Gates and ups of all experts as one; dense, with a warning, where their forms differ."""
    if len(parts) == 1:
        return parts[0]
    forms = [each for each in parts if isinstance(each, QuantizedWeight)]
    try:
        if len(forms) == len(parts) and len({type(each) for each in forms}) == 1:
            return type(forms[0]).join(forms)
        if forms:
            warn_once("experts are dequantized: gates and ups are quantized differently")
    except FormError as error:
        warn_once(f"experts are dequantized: {error}")
    return torch.cat([_dense(each, dtype) for each in parts], dim=1)


def _in_halves(pairs: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor | QuantizedWeight:
    """Gates and then ups, of [experts, outputs that take turns, in_features]."""
    num_rows, size = pairs.shape[1:]
    if isinstance(pairs, MxFloat4 | GroupedInt):  # whose outputs have scales of their own
        halves = [pairs.cut(slice(i, num_rows, 2), slice(0, size)) for i in range(2)]
        return _joined(halves, dtype)
    if isinstance(pairs, ScaledFloat8) and pairs.block[0] == 1:
        weight = pairs.weight.view(torch.uint8)  # of which torch can move more
        weight = torch.cat([weight[:, ::2], weight[:, 1::2]], dim=1).view(pairs.weight.dtype)
        scales = torch.cat([pairs.scales[:, ::2], pairs.scales[:, 1::2]], dim=1)
        return replace(pairs, weight=weight, scales=scales)
    dense = _dense(pairs, dtype)
    return torch.cat([dense[:, ::2], dense[:, 1::2]], dim=1)


def _up_views(up: Tensor, alternating: bool, transposed: bool = False) -> list[Tensor]:
    """Gates and ups of [experts, 2 * intermediate_size, ...], as merged_places has them; where they
    take turns, one view in which the dimension of outputs is two: intermediate elements, and gate
    and up."""
    if alternating:
        pairs = up.view(up.shape[0], 2, up.shape[1] // 2, *up.shape[2:]).transpose(1, 2)
        return [pairs.movedim(-1, 1) if transposed else pairs]
    return [each.transpose(1, 2) if transposed else each for each in up.chunk(2, dim=1)]


class MixtureOfExperts(nn.Module):
    """Owns a router, the experts, and perhaps a shared expert with a gate."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = make_experts(config)
        self.shared = None if config.shared is None else DenseMLP(config.shared)
        self.shared_gate = (
            make_linear(LinearConfig(config.hidden_size, (1,))) if config.shared_gate else None
        )

    @property
    def entry(self) -> MixtureOfExperts:
        """See InputReader.entry: what the router norms, the experts read, too."""
        return self

    def rounding(self, num_tokens: int) -> Rounding:
        """See Entry.rounding: the router reads the input as it is."""
        return Rounding.NONE

    def norms_inputs(self, num_tokens: int, norms_branch: bool, is_partial: bool = False) -> bool:
        """See Entry.norms_inputs: experts that route norm their inputs before, and so do routers of
        a few tokens, which add up partial sums, too."""
        if norms_branch:
            return False
        return self._routes_inputs(num_tokens, is_partial) or self.router.norms_inputs(num_tokens)

    @property
    def projections(self) -> Sequence[LinearMethod]:
        """See DenseMLP.projections; of a shared expert, which is beside the others, none."""
        return ()

    def forward_apart(
        self, for_router: Tensor, for_experts: Tensor, for_shared: Tensor
    ) -> Branches:
        """As `forward`, of inputs [num_tokens, hidden_size] that differ."""
        assert self.shared is not None
        assert self.shared_gate is None, "there is one input for it and the shared expert"
        routed = self.router.forward(for_router)
        return self.experts.forward_partial(for_experts, routed), self.shared.forward(for_shared)

    def forward(self, hidden: LinearInput) -> Branches:
        """[num_tokens, hidden_size] -> the same; of a shared expert, in a second tensor."""
        assert not isinstance(hidden, RoundedInputs)
        num_tokens = hidden.x.shape[-2] if isinstance(hidden, DeferredNorm) else len(hidden)
        if isinstance(hidden, DeferredNorm) and self._routes_inputs(num_tokens, hidden.x.dim() > 2):
            return self.experts.forward_unrouted(self.router.unrouted(hidden))
        routed = self.router.forward(hidden, self.experts.rounding(num_tokens))
        if isinstance(hidden, DeferredNorm):
            assert routed.normed is not None
            hidden = routed.normed
        result = self.experts.forward_partial(hidden, routed)
        if self.shared is None:
            return result
        shared = self.shared.forward(hidden)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate.forward(hidden).sigmoid()
        return result, shared

    def _routes_inputs(self, num_tokens: int, is_partial: bool) -> bool:
        """See ExpertsMethod.routes_inputs; a shared expert would read the norm's result, too."""
        if self.shared is not None or is_partial:
            return False
        return self.experts.routes_inputs(num_tokens, self.router)


def make_experts(config: ExpertsConfig) -> ExpertsMethod:
    """The method that the description names, with uninitialised weights.

    Raises ConfigError if there is none.
    """
    method: ExpertsMethod = EXPERTS_METHODS.find(config.method)(config)
    return method


def make_mlp(config: MLPConfig | ExpertsConfig) -> DenseMLP | MixtureOfExperts:
    """The block that a layer's description asks for, with uninitialised weights."""
    return DenseMLP(config) if isinstance(config, MLPConfig) else MixtureOfExperts(config)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
