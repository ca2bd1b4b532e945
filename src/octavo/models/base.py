"""What every model offers to the worker and to the loader, and the pieces they share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.layers.embedding import Embedding, LMHead
from octavo.layers.linear import Linear, MergedLinear
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.models.config import ModelConfig
from octavo.ops import AttentionBackend, LayerSpec

# Names in a checkpoint -> where each tensor goes: a parameter or a view of one, in the shape that
# the file has. A parameter may have several names (tied embeddings); one of them must be there.
WeightTargets = dict[str, Tensor]


class CausalLM(nn.Module):
    """A decoder-only language model, as the worker sees it; tokens of all sequences lie flat.

    Modules are called by `forward`, which is typed and costs less than the call of a module: at
    small batches on a CPU, the difference shows.
    """

    attention_layers: list[LayerSpec]
    embedding: Embedding
    head: LMHead

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """int64 ids and positions [num_tokens] -> hidden states [num_tokens, hidden_size].

        `attention` has been given the step's metadata by `plan`. Where only some tokens' hidden
        states are asked for, `wanted` says which: int64 [num_wanted] -> [num_wanted, hidden_size].
        The last layer computes no others once their K and V are written. At least one is wanted.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result [n, hidden_size] -> float32 [n, vocab_size]."""
        return self.head.forward(hidden)

    def weight_targets(self) -> WeightTargets:
        """Where the checkpoint's tensors go; names without the module's PREFIXES."""
        raise NotImplementedError


def attention_layers(config: ModelConfig) -> list[LayerSpec]:
    """The attention layers that the config describes, first to last."""
    return [
        LayerSpec(
            layer_id=i,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scales[i],
            window=config.layer_windows[i],
        )
        for i in range(config.num_layers)
    ]


def merged_qkv(config: ModelConfig) -> MergedLinear:
    """Query, key and value projections in one: [num_tokens, hidden_size] -> all heads."""
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return MergedLinear(config.hidden_size, (query_size, kv_size, kv_size), config.qkv_bias)


def split_heads(qkv: Tensor, layer: LayerSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Views of merged_qkv's output: query [num_tokens, num_heads, head_dim], key and value."""
    heads = qkv.view(qkv.shape[0], -1, layer.head_dim)
    num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    return query, key, value


def module_targets(name: str, module: Linear | LayerNorm | RMSNorm) -> WeightTargets:
    """A module whose tensors have the names and shapes of the checkpoint."""
    return {f"{name}.{parameter_name}": parameter for parameter_name, parameter in _own(module)}


def transposed_targets(name: str, linear: Linear | MergedLinear) -> WeightTargets:
    """A projection that the checkpoint keeps as [in_features, out_features] (GPT-2)."""
    return {f"{name}.{key}": tensor.t() for key, tensor in _own(linear)}


def merged_targets(names: list[str], linear: MergedLinear) -> WeightTargets:
    """Projections that the checkpoint keeps apart and `linear` computes in one, in its order."""
    targets = {}
    for parameter_name, parameter in _own(linear):
        for name, part in zip(names, torch.split(parameter, list(linear.out_sizes)), strict=True):
            targets[f"{name}.{parameter_name}"] = part
    return targets


def each_wanting(
    layers: nn.ModuleList, wanted: Tensor | None
) -> Iterator[tuple[Any, Tensor | None]]:
    """Each layer, with the tokens that it is asked for: all, but of the last one."""
    final = len(layers) - 1
    for index, layer in enumerate(layers):
        yield layer, wanted if index == final else None


def layer_targets(name: str, layers: Iterable[Any]) -> WeightTargets:
    """The targets of each layer, under its index."""
    return {
        f"{name}.{i}.{key}": target
        for i, layer in enumerate(layers)
        for key, target in layer.weight_targets().items()
    }


def _own(module: nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return list(module.named_parameters(recurse=False))
