"""From token ids to vectors, and from vectors to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.layers.base import WeightOwner
from octavo.layers.config import LinearConfig
from octavo.layers.linear import PlainLinear


class Embedding(WeightOwner):
    """Owns a table of vectors: [num_rows, size]."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [num_tokens] -> [num_tokens, size]."""
        return F.embedding(ids, self.weight)


class PositionEmbedding(Embedding):
    """A table of learned positions in which position 0 is row `offset`."""

    def __init__(self, num_rows: int, size: int, offset: int = 0) -> None:
        super().__init__(num_rows, size)
        self.offset = offset

    def forward(self, ids: Tensor) -> Tensor:
        """int64 positions [num_tokens] -> [num_tokens, size]."""
        return F.embedding(ids, self.weight[self.offset :])


class LMHead(nn.Module):
    """Owns the projection to the vocabulary, or shares the token embedding's table for it."""

    def __init__(self, config: LinearConfig) -> None:
        super().__init__()
        self.linear = PlainLinear(config)

    def tie(self, embedding: Embedding) -> None:
        """Use the embedding's table; called before weights are loaded."""
        self.linear.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_rows, size] -> logits [num_rows, vocab_size], float32; on a GPU in its dtype."""
        logits = self.linear.forward(hidden)
        return logits if logits.device.type == "cuda" else logits.float()
