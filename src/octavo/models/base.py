"""What every model offers to the worker and to the loader."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from octavo.layers.embedding import Embedding, LMHead
from octavo.ops import AttentionBackend, LayerSpec


class CausalLM(nn.Module):
    """A language model, as the worker sees it; the tokens of all sequences lie flat.

    Modules are called by `forward`, which is typed and cheaper than calling a module: at small
    batches on a CPU, the difference shows.
    """

    attention_layers: list[LayerSpec]
    embedding: Embedding
    head: LMHead
    num_hit_experts: Tensor | None = None
    """int64 [1] on the device: of all mixtures of experts, how many experts were computed, added up
    over their steps; None: there is no mixture."""

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
        numbers of tokens. `attention` has been given the inputs by `plan_encoded`. A decoder
        without encoder is never asked.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result [n, hidden_size] -> LMHead.forward's logits."""
        return self.head.forward(hidden)
