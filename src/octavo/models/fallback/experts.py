"""The experts of transformers' modules, computed by octavo's grouped products.

Whether a module's experts are gated MLPs with an activation that the kernels know is tried out, as
in replacing.py: its own gate is given random numbers. Nothing depends on the names of classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.layers.base import WeightOwner
from octavo.models.fallback.paged import GROUPED_EXPERTS
from octavo.models.fallback.replacing import are_rows_alike, of_all_sizes
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.expert_kernels import list_experts, make_experts_kernel
from octavo.ops.experts import ExpertsKernel, ExpertWeights, Routed

GATED = tuple(each for each in Epilogue if each.is_gated)
PROBED_ROWS, PROBED_SIZE = 64, 4


class GroupedExperts(WeightOwner):
    """Computes the experts of a module, whose parameters it takes over once they are loaded."""

    def __init__(self, module: nn.Module, epilogue: Epilogue, is_alternating: bool) -> None:
        """
        Args:
            module: transformers' experts.
            epilogue: what their gates are.
            is_alternating: whether gates and ups take turns.
        """
        super().__init__()
        self._module = (module,)  # in a tuple, so that it is not a submodule
        self._epilogue = epilogue
        self._is_alternating = is_alternating
        self._num_experts: int
        self._kernel: ExpertsKernel
        self._num_hit: Tensor

    def finalize(self) -> None:
        """See WeightOwner.finalize: the module's own parameters are empty from here on."""
        up, down = self._taken("gate_up_proj"), self._taken("down_proj")
        assert up is not None
        assert down is not None
        if self._module[0].is_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2).contiguous()
        up_bias, down_bias = self._taken("gate_up_proj_bias"), self._taken("down_proj_bias")
        up = self._in_halves(up).contiguous()
        up_bias = None if up_bias is None else self._in_halves(up_bias).contiguous()
        self._num_experts = len(up)
        self._num_hit = torch.zeros(1, dtype=torch.int64, device=up.device)
        weights = ExpertWeights(up, down, up_bias, down_bias)
        self._kernel = make_experts_kernel(weights, self._epilogue)

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """hidden [num_tokens, size], ids and weights [num_tokens, top_k] -> [num_tokens, size].

        Ids are those of experts: transformers' routers name others only where ranks divide the
        experts, and no ranks share these models (TransformersConfig.sharded).
        """
        ids, weights = ids.int().contiguous(), weights.float().contiguous()
        lists = list_experts(ids, self._num_experts, self._num_hit)
        result = self._kernel.apply_partial(hidden, Routed(ids, weights, lists))
        return result if result.dim() == 2 else result.sum(0).to(hidden.dtype)

    def _taken(self, name: str) -> Tensor | None:
        """The parameter's values, if there is one, of which the module keeps nothing."""
        module = self._module[0]
        found = module._parameters.get(name)
        if found is None:
            return None
        empty = nn.Parameter(found.new_empty(0), requires_grad=False)
        module._parameters[name] = empty
        return found.detach()

    def _in_halves(self, up: Tensor) -> Tensor:
        """[num_experts, 2 * inner, ...] with gates before ups."""
        if not self._is_alternating:
            return up
        return torch.cat([up[:, ::2], up[:, 1::2]], dim=1)


def group_experts(model: nn.Module) -> None:
    """Put GroupedExperts into the experts of a model on the meta device that they can compute."""
    for module in list(model.modules()):
        if not hasattr(module, "is_transposed") or not getattr(module, "has_gate", False):
            continue
        if getattr(module, "has_post_expert_norm", False):
            continue
        names = {"gate_up_proj", "down_proj"}
        if module.has_bias:
            names |= {"gate_up_proj_bias", "down_proj_bias"}
        if names != module._parameters.keys():
            continue
        found = _gate_of(module)
        if found is not None:
            module.add_module(GROUPED_EXPERTS, GroupedExperts(module, *found))


def _gate_of(module: nn.Module) -> tuple[Epilogue, bool] | None:
    """The epilogue that the module's gate is, and whether gates and ups take turns."""
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
    for epilogue in GATED:
        for is_alternating, halves in ((False, given), (True, turned)):
            if are_rows_alike(result, apply_epilogue(halves, epilogue)):
                return epilogue, is_alternating
    return None
