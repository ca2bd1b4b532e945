"""Mixtures of experts: a router, experts of which each token takes some, and a shared one.

How experts are stored and computed is an `ExpertsMethod`, as that of projections is a
`LinearMethod`: it owns its tensors, says where a checkpoint's tensors go, rearranges them once they
are loaded, and computes. Routing is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from octavo.layers.base import WeightOwner, WeightSlice, WeightTarget, WeightTargets
from octavo.layers.config import ExpertsConfig, LinearConfig, MLPConfig
from octavo.layers.linear import make_linear
from octavo.layers.mlp import GATED_EPILOGUES, DenseMLP
from octavo.layers.norm import Branches
from octavo.ops.expert_kernels import make_experts_kernel, make_router_kernel
from octavo.ops.experts import ExpertsKernel, ExpertWeights, Routed, RouterKernel, RouterWeights
from octavo.registry import EXPERTS_METHODS


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
        self.num_hit: Tensor
        self._kernel: RouterKernel

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """See WeightOwner.targets; a second name is that of the corrections."""
        found = super().targets(names[:1])
        if self.correction is not None:
            found[names[1]] = WeightTarget.whole(self.correction)
        return found

    def finalize(self) -> None:
        """See WeightOwner.finalize."""
        weights = RouterWeights(self.weight, self.bias, self.correction)
        self._kernel = make_router_kernel(weights, self.config, self.num_hit)

    def forward(self, hidden: Tensor) -> Routed:
        """Route hidden [num_tokens, hidden_size]; called after `finalize`."""
        return self._kernel.apply(hidden)


class ExpertsMethod(WeightOwner):
    """The gated MLPs of all experts, however their weights are stored.

    `targets` takes names with a * for the number of an expert, of its gate, up and down
    projections; or the whole names of two tensors that have those of all experts: gates and ups
    merged, and down. Then that of a bias has `_bias` at its end.
    """

    def finalize(self) -> None:
        """Rearrange the weights for the device that they are on; called once, after loading."""
        raise NotImplementedError

    def forward_partial(self, hidden: Tensor, routed: Routed) -> Tensor:
        """See ExpertsKernel.apply_partial; of this rank's intermediate elements."""
        raise NotImplementedError


class PlainExperts(ExpertsMethod):
    """Owns the weights in the model's dtype, as loaded or packed for the CPU."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        experts, size = config.routing.num_experts, config.hidden_size
        inner = config.intermediate_size
        self.up = _parameter(experts, 2 * inner, size)
        self.down = _parameter(experts, size, inner)
        self.up_bias = _parameter(experts, 2 * inner) if config.bias else None
        self.down_bias = _parameter(experts, size) if config.has_down_bias else None
        self._kernel: ExpertsKernel

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """See WeightOwner.targets, and ExpertsMethod."""
        if len(names) == 2:
            return self._merged_targets(*names)
        up, down, config = self.up, self.down, self.config
        assert not config.bias, "experts with biases are merged in all checkpoints"
        gate_name, up_name, down_name = names
        inner, part = self._inner()
        everything = slice(0, config.hidden_size)
        size = config.intermediate_size
        found: WeightTargets = {}
        for expert in range(config.routing.num_experts):
            gates, ups = up[expert, :size], up[expert, size:]
            for name, target in ((gate_name, gates), (up_name, ups)):
                found[f"{name.replace('*', str(expert))}.weight"] = WeightTarget(
                    (inner, config.hidden_size), (WeightSlice(target, (part, everything)),)
                )
            found[f"{down_name.replace('*', str(expert))}.weight"] = WeightTarget(
                (config.hidden_size, inner), (WeightSlice(down[expert], (everything, part)),)
            )
        return found

    def finalize(self) -> None:
        """See ExpertsMethod.finalize; the kernel owns the weights from here on."""
        biases = [
            None if each is None else each.detach() for each in (self.up_bias, self.down_bias)
        ]
        weights = ExpertWeights(self.up.detach(), self.down.detach(), *biases)
        self._kernel = make_experts_kernel(weights, GATED_EPILOGUES[self.config.activation])
        del self.up, self.down

    def forward_partial(self, hidden: Tensor, routed: Routed) -> Tensor:
        """See ExpertsMethod.forward_partial."""
        return self._kernel.apply_partial(hidden, routed)

    def _inner(self) -> tuple[int, slice]:
        """How many intermediate elements a whole expert has, and which of them these are."""
        size, shard = self.config.intermediate_size, self.config.shard
        return size * shard.size, slice(size * shard.rank, size * (shard.rank + 1))

    def _merged_targets(self, up_name: str, down_name: str) -> WeightTargets:
        """All experts in one tensor."""
        up, down, config = self.up, self.down, self.config
        num, size = config.routing.num_experts, config.hidden_size
        inner, part = self._inner()
        experts, everything = slice(0, num), slice(0, size)
        turned = config.alternating
        found = {
            up_name: self._merged_up(up, (size,)),
            down_name: WeightTarget(
                (num, inner, size) if turned else (num, size, inner),
                (
                    WeightSlice(down.transpose(1, 2), (experts, part, everything))
                    if turned
                    else WeightSlice(down, (experts, everything, part)),
                ),
            ),
        }
        if config.bias:
            assert self.up_bias is not None
            found[f"{up_name}_bias"] = self._merged_up(self.up_bias, ())
            own = self.down_bias
            slices = () if own is None else (WeightSlice(own, (experts, everything)),)
            found[f"{down_name}_bias"] = WeightTarget((num, size), slices)
        return found

    def _merged_up(self, up: Tensor, columns: tuple[int, ...]) -> WeightTarget:
        """Gates and ups of all experts: weights, or biases, which have no columns."""
        num, size = self.config.routing.num_experts, self.config.intermediate_size
        inner, part = self._inner()
        experts, everything = slice(0, num), tuple(slice(0, each) for each in columns)
        gates, ups = up[:, :size], up[:, size:]
        if not self.config.alternating:
            return WeightTarget(
                (num, 2 * inner, *columns),
                (
                    WeightSlice(gates, (experts, part, *everything)),
                    WeightSlice(
                        ups, (experts, slice(inner + part.start, inner + part.stop), *everything)
                    ),
                ),
            )
        # As [experts, columns, intermediate elements, gate and up].
        pairs = up.view(num, 2, size, *columns).movedim((2, 1), (-2, -1))
        where = (experts, *everything, slice(2 * part.start, 2 * part.stop))
        return WeightTarget((num, *columns, 2 * inner), (WeightSlice(pairs, where),))


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

    def forward(self, hidden: Tensor) -> Branches:
        """[num_tokens, hidden_size] -> the same; of a shared expert, in a second tensor."""
        result = self.experts.forward_partial(hidden, self.router.forward(hidden))
        if self.shared is None:
            return result
        shared = self.shared.forward(hidden)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate.forward(hidden).sigmoid()
        return result, shared


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
