"""The experts of transformers' modules, computed by octavo's kernels.

Whether a module's experts are gated MLPs with an activation that the kernels know is tried out, as
in replacing.py: its own gate is given random numbers. Nothing depends on the names of classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from octavo.layers.config import Activation, ExpertsConfig
from octavo.layers.experts import ExpertsMethod, make_experts
from octavo.layers.mlp import GATED_EPILOGUES
from octavo.models.fallback.build import Built
from octavo.models.fallback.checkpoint import DOWN, UP, ExpertNames
from octavo.models.fallback.config import Weight
from octavo.models.fallback.paged import GROUPED_EXPERTS
from octavo.models.fallback.probing import are_rows_alike, of_all_sizes
from octavo.models.fallback.replacing import Owners
from octavo.models.fallback.sums import RankSums
from octavo.ops.epilogue import apply_epilogue
from octavo.ops.expert_kernels import list_experts
from octavo.ops.experts import Routed
from octavo.routing import RoutingConfig

PROBED_ROWS, PROBED_SIZE = 64, 4


class GroupedExperts(nn.Module):
    """Computes the experts of a module by a method that owns their weights in its place."""

    num_hit: Tensor
    """int64 [1] on the weights' device: each call adds how many experts some token takes."""

    def __init__(self, config: ExpertsConfig, sums: RankSums) -> None:
        """sums: adds up what ranks compute that have parts of the experts."""
        super().__init__()
        self._sums = sums if config.shard.size > 1 else None
        if self._sums is not None:
            self._sums.add_place()
        self.method: ExpertsMethod = make_experts(config)
        self._num_experts, self.top_k = config.routing.num_experts, config.routing.top_k

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """hidden [num_tokens, size], ids and weights [num_tokens, top_k] -> [num_tokens, size].

        Ids are those of experts: transformers' routers name others only where its own plans divide
        the experts among ranks, which are not used.
        """
        ids, weights = ids.int().contiguous(), weights.float().contiguous()
        lists = list_experts(ids, self._num_experts, self.num_hit)
        result = self.method.forward_partial(hidden, Routed(ids, weights, lists))
        if self._sums is not None:
            return self._sums.total(result, hidden.dtype)
        return (result if result.dim() == 2 else result.sum(0)).to(hidden.dtype)


def experts_config(module: nn.Module, top_k: int) -> ExpertsConfig | None:
    """A module's experts as octavo describes them; None if it computes them in another way.

    Args:
        module: on the meta device.
        top_k: how many of them a token takes.
    """
    if not getattr(module, "has_gate", False) or getattr(module, "has_post_expert_norm", False):
        return None
    names = {UP, DOWN}
    if module.has_bias:
        names |= {f"{UP}_bias", f"{DOWN}_bias"}
    if names != module._parameters.keys():
        return None
    down, found = module.get_parameter(DOWN), _gate_of(module)
    if found is None or not 1 <= top_k <= len(down):
        return None
    activation, is_alternating = found
    size, inner = down.shape[:0:-1] if module.is_transposed else down.shape[1:]
    return ExpertsConfig(
        hidden_size=size,
        intermediate_size=inner,
        activation=activation,
        routing=RoutingConfig(num_experts=len(down), top_k=top_k),
        bias=bool(module.has_bias),
        alternating=is_alternating,
        transposed=bool(module.is_transposed),
    )


def find_experts(built: Built) -> dict[nn.Module, ExpertsConfig]:
    """The experts of a model that octavo computes."""
    found = {}
    for module, top_k in built.recording.experts.items():
        config = experts_config(module, top_k)
        if config is not None:
            found[module] = config
    return found


def replace_experts(
    built: Built,
    dtype: torch.dtype,
    held: Mapping[str, Weight],
    names: ExpertNames,
    sums: RankSums,
) -> Owners:
    """Put GroupedExperts into the experts of a model on the meta device, whose own parameters have
    no elements from then on.

    Args:
        built: the model.
        dtype: that it is computed in.
        held: what layers of octavo's hold, by names of modules.
        names: what tensors the experts of each module are in, by its name.
        sums: see GroupedExperts.

    Returns:
        The methods that own the weights.
    """
    owners: Owners = []
    for module in built.recording.experts:
        path = built.paths[module]
        config = held.get(path)
        parameters = module._parameters
        if not isinstance(config, ExpertsConfig) or module.get_parameter(DOWN).dtype != dtype:
            continue
        grouped = GroupedExperts(config, sums)
        for name in parameters:
            parameters[name] = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        module.add_module(GROUPED_EXPERTS, grouped)
        usual = tuple(f"{path}.{each}" for each in (UP, DOWN))
        owners.append((grouped.method, names.get(path, usual)))
    return owners


def _gate_of(module: nn.Module) -> tuple[Activation, bool] | None:
    """The activation that the module's gate is, and whether gates and ups take turns."""
    shape = (PROBED_ROWS, 2 * PROBED_SIZE)
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        given = of_all_sizes(torch.randn(shape, generator=generator))
        try:
            with torch.no_grad():
                result = module._apply_gate(given.clone())  # type: ignore[operator]
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError):
            return None  # of a form that it does not take
    if not isinstance(result, Tensor):
        return None
    turned = torch.cat([given[:, ::2], given[:, 1::2]], dim=1)
    for activation, epilogue in GATED_EPILOGUES.items():
        for is_alternating, halves in ((False, given), (True, turned)):
            if are_rows_alike(result, apply_epilogue(halves, epilogue)):
                return activation, is_alternating
    return None
