"""From token ids to vectors, and from vectors to logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.layers.base import WeightOwner, WeightSlice, WeightTarget, WeightTargets
from octavo.layers.config import EmbeddingScale, LinearConfig
from octavo.layers.linear import PlainLinear
from octavo.parallel import WHOLE, Shard


class Embedding(WeightOwner):
    """Owns a table of vectors: [num_rows, size], or a shard of its rows, padded.

    They are perhaps scaled when they are read.
    """

    def __init__(
        self, num_rows: int, size: int, shard: Shard = WHOLE, scale: EmbeddingScale | None = None
    ) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.shard = shard
        held = shard.padded(num_rows)
        self.start = shard.rank * held  # the first row that this rank holds
        self.weight = nn.Parameter(torch.empty(held, size), requires_grad=False)
        self.scale = scale
        self._factor = 1.0 if scale is None else scale.factor

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """See WeightOwner.targets."""
        (name,) = names
        held, size = self.weight.shape
        index = (slice(self.start, min(self.start + held, self.num_rows)), slice(0, size))
        target = WeightTarget((self.num_rows, size), (WeightSlice(self.weight, index),))
        return {f"{name}.weight": target}

    def finalize(self) -> None:
        """See WeightOwner.finalize."""
        if self.scale is not None and self.scale.is_rounded:
            self._factor = float(torch.tensor(self.scale.factor, dtype=self.weight.dtype))

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [num_tokens] -> [num_tokens, size]; of a shard, 0 for rows that others hold."""
        if self.shard.size == 1:
            vectors = F.embedding(ids, self.weight)
        else:
            places = ids - self.start
            is_elsewhere = (places < 0) | (places >= self.weight.shape[0])
            vectors = F.embedding(places.masked_fill(is_elsewhere, 0), self.weight)
            vectors.masked_fill_(is_elsewhere.unsqueeze(-1), 0)
        return vectors if self.scale is None else vectors.mul_(self._factor)


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

    def __init__(self, config: LinearConfig, softcap: float | None = None) -> None:
        """`config`: of this rank's part of the vocabulary."""
        super().__init__()
        self.linear = PlainLinear(config)
        [(_, tokens)] = config.out_ranges()
        self.num_tokens = tokens.stop - tokens.start
        self.softcap = softcap

    def tie(self, embedding: Embedding) -> None:
        """Use the embedding's table; called before weights are loaded."""
        self.linear.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_rows, size] -> logits of this rank's tokens, [num_rows, num_tokens], rows dense.

        They are float32; on a GPU in its dtype.
        """
        logits = self.linear.forward(hidden)
        logits = logits if logits.device.type == "cuda" else logits.float()
        if self.softcap is not None:
            logits = _soft_cap(logits, self.softcap)
        return logits if logits.shape[1] == self.num_tokens else logits[:, : self.num_tokens]


def _soft_cap(logits: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(logits / softcap), written into logits."""
    if logits.device.type == "cuda":
        from octavo.ops.cuda.activation import soft_cap

        return soft_cap(logits, softcap)
    return logits.div_(softcap).tanh_().mul_(softcap)
