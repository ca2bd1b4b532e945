"""What every model offers to the worker and to the loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.layers.base import WeightOwner, WeightTargets
from octavo.layers.embedding import Embedding, LMHead
from octavo.models.dequantize import StoredTensor
from octavo.ops import AttentionBackend, KVScales, LayerSpec

# The file, the name in it, and the tensor.
FileTensor = tuple[Path, str, StoredTensor]


class WeightFiles(Protocol):
    """The tensors in a model's files; made of its ModelConfig."""

    config_name: str
    """What errors call the part of the files that says which shapes the tensors have."""

    def tensors(
        self, dtype: torch.dtype, device: torch.device
    ) -> AbstractContextManager[Iterable[FileTensor]]:
        """All tensors, one for each weight, as the family computes with it; they can be read until
        the context ends.

        Args:
            dtype: what may be dequantized is dequantized to.
            device: where quantized weights are read to.
        """

    def kv_scales(self) -> list[KVScales]:
        """The scales of cached keys and values, by attention layer; 1 where the files have none."""


class Checkpoint(Protocol):
    """What a model's checkpoints call its weights."""

    @property
    def targets(self) -> WeightTargets:
        """Where tensors go, by the names that `translate` gives them."""

    def translate(self, tensors: Iterable[FileTensor]) -> Iterator[tuple[str, FileTensor]]:
        """The tensors of all files by these names; several may become one."""

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor without a target is no weight."""

    def names_of(self, path: str, owner: WeightOwner) -> Sequence[str]:
        """What WeightOwner.targets takes for one of the model's modules, which is at a path."""


class CausalLM(nn.Module):
    """A language model, as the worker sees it; the tokens of all sequences lie flat.

    Modules are called by `forward`, which is typed and cheaper than calling a module: at small
    batches on a CPU, the difference shows.
    """

    attention_layers: list[LayerSpec]
    embedding: Embedding
    head: LMHead
    checkpoint: Checkpoint | None = None
    """None: as the family's WeightNames say. It has no targets once weights are loaded."""
    num_hit_experts: Tensor | None = None
    """int64 [1] on the device: of all mixtures of experts, how many experts were computed, added up
    over their steps; None: there is no mixture."""

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Give the parameters memory, of `dtype` on `device`, uninitialised. Called once, before
        weights are loaded; until then there are their shapes."""
        # Not Module.to_empty: copying from "meta" imports sympy, which takes a second.
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                weight = torch.empty(parameter.shape, dtype=dtype, device=device)
                setattr(module, name, nn.Parameter(weight, requires_grad=False))
            for name, buffer in module.named_buffers(recurse=False):  # those keep their dtypes
                setattr(module, name, torch.empty_like(buffer, device=device))

    @property
    def token_table(self) -> Tensor:
        """The token embeddings: [vocab_size, size]."""
        return self.embedding.weight

    @property
    def tied_table(self) -> Tensor:
        """The rows of `token_table` that this rank computes logits with, if it does."""
        return self.token_table

    def tie(self) -> None:
        """Compute logits with the table of the token embeddings; called after `allocate`."""
        self.head.tie(self.embedding)

    def check(self) -> None:
        """Called once, when the weights are loaded: raise ModelError if the model cannot be served
        after all."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        logits_indices: Tensor | None = None,
    ) -> Tensor:
        """int64 ids and positions [num_tokens] -> hidden states [num_tokens, hidden_size].

        `attention` has been given the step's metadata by `plan`. With `logits_indices`, int64
        [num_logits], at least one, only those tokens' hidden states are returned, [num_logits,
        hidden_size]; the last layer computes no others once it has written K and V of all.
        """
        raise NotImplementedError

    def encode(
        self,
        input_ids: Tensor,
        positions: Tensor,
        lens: Sequence[int],
        attention: AttentionBackend,
    ) -> None:
        """Run the encoder, and write the K and V of its result for all decoder layers.

        input_ids, positions: int64 [num_tokens], of whole inputs, one after the other. lens: their
        numbers of tokens. `attention` has been given the inputs by `plan_encoded`. Only called
        for models with an encoder.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result [n, hidden_size] -> LMHead.forward's logits."""
        return self.head.forward(hidden)
