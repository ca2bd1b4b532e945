"""What octavo registers with transformers: its attention, and how experts are computed.

transformers' models call their attention by a name (`config._attn_implementation`) through
AttentionInterface, and their experts by another through ExpertsInterface. There is no mask
function of octavo's name, so that transformers makes no masks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward
from transformers.modeling_utils import AttentionInterface

from octavo.ops import AttentionBackend, RotaryTable
from octavo.ops.communicator import Communicator

ATTENTION, EXPERTS = "octavo_paged", "octavo_experts"
PAGED_LAYER = "_octavo_paged_layer"  # the attribute of modules that call the attention
GROUPED_EXPERTS = "octavo_experts"  # the submodule of experts that our kernels compute
GATHERED = 1 << 30  # bytes of experts' weights that are gathered at once


class Step:
    """What all layers of a model need for the step that is being computed."""

    __slots__ = ("backend",)

    backend: AttentionBackend


class OwnHeads(NamedTuple):
    """Which of the heads of all ranks are this one's."""

    query: slice
    kv: slice
    communicator: Communicator


class PagedLayer:
    """One module's calls of the attention."""

    def __init__(
        self, layer_id: int, step: Step, head_dim: int, value_dim: int, dtype: torch.dtype
    ) -> None:
        """
        Args:
            layer_id: by the order of calls.
            step: the model's.
            dtype: of the KV cache; some models compute their heads in float32.
            head_dim: of heads in the KV cache; shorter ones are padded with zeros.
            value_dim: of what the module gets back.
        """
        self.layer_id = layer_id
        self.step = step
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.dtype = dtype
        self.rotary: RotaryTable | None = None
        """Set if the backend rotates queries and keys, instead of the module."""
        self.own_heads: OwnHeads | None = None
        """Set if the module has the heads of all ranks, of which this one attends with its own."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [1, num_heads, num_tokens, size], key and value [1, num_kv_heads, num_tokens, size]
        -> [1, num_tokens, num_heads, value_dim]."""
        size, own = self.head_dim, self.own_heads
        if own is not None:
            query, key, value = query[:, own.query], key[:, own.kv], value[:, own.kv]
        attended = self.step.backend.forward(
            self.layer_id,
            _flat(query.to(self.dtype), size),
            _flat(key.to(self.dtype), size),
            _flat(value.to(self.dtype), size),
            self.rotary,
        )
        if own is not None:
            attended = own.communicator.all_gather(attended).transpose(0, 1).flatten(1)
        attended = attended.to(query.dtype).view(1, attended.shape[0], -1, size)
        return attended if self.value_dim == size else attended[..., : self.value_dim]


def _flat(heads: Tensor, size: int) -> Tensor:
    """[1, heads, num_tokens, n] -> [num_tokens, heads, size], with dense heads and elements."""
    flat = heads[0].transpose(0, 1)
    if flat.shape[2] != size:
        return F.pad(flat, (0, size - flat.shape[2]))
    is_dense = flat.stride(2) == 1 and (flat.shape[1] == 1 or flat.stride(1) == size)
    return flat if is_dense else flat.contiguous()


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; the arguments are those that were recorded."""
    layer: PagedLayer = getattr(module, PAGED_LAYER)
    return layer.attend(query, key, value), None


def experts(
    module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' experts interface: hidden [num_tokens, size] -> the same.

    By octavo's kernels (experts.py) where they can. Else on a GPU by transformers' batched products
    of gathered weights, whose launches do not depend on the routing, so that they can be captured,
    for a few tokens at a time; on a CPU one expert after the other.
    """
    if hidden.device.type == "meta":
        return torch.empty_like(hidden)
    if not top_k_index.shape[1]:  # no token has an expert: kernels divide by their number
        return torch.zeros_like(hidden)
    grouped = getattr(module, GROUPED_EXPERTS, None)
    if grouped is not None:
        computed: Tensor = grouped.forward(hidden, top_k_index, top_k_weights)
        return computed
    if hidden.device.type == "cuda":
        num_bytes = max(each[0].nbytes for each in module.parameters(recurse=False))
        at_once = max(1, GATHERED // (num_bytes * top_k_index.shape[1]))
        pieces = [
            batched_mm_experts_forward(
                module,
                hidden[start : start + at_once],
                top_k_index[start : start + at_once],
                top_k_weights[start : start + at_once],
            )
            for start in range(0, len(hidden), at_once)
        ]
        return torch.cat(pieces)
    # The decorator that chooses the implementation keeps the class's own one.
    own: Tensor = type(module).forward.__wrapped__(  # type: ignore[attr-defined]
        module, hidden, top_k_index, top_k_weights
    )
    return own


def register() -> None:
    """Make octavo's names known to transformers; more than once does nothing more."""
    AttentionInterface.register(ATTENTION, paged_attention)
    ExpertsInterface.register(EXPERTS, experts)
