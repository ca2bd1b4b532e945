"""From token ids to vectors, and from vectors to logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.layers.base import WeightOwner, WeightSlice, WeightTarget, WeightTargets
from octavo.layers.config import EmbeddingScale, LinearConfig, PositionTable, TokenInputsConfig
from octavo.layers.linear import PlainLinear, Projection, make_linear
from octavo.layers.norm import make_norm
from octavo.ops.communicator import Communicator
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
        held, size = self.weight.shape
        index = (slice(self.start, min(self.start + held, self.num_rows)), slice(0, size))
        target = WeightTarget((self.num_rows, size), (WeightSlice(self.weight, index),))
        return {f"{name}.weight": target for name in names}  # copies of one table

    def finalize(self) -> None:
        """See WeightOwner.finalize."""
        if self.scale is not None and self.scale.is_rounded:
            self._factor = float(torch.tensor(self.scale.factor, dtype=self.weight.dtype))

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [num_tokens] -> [num_tokens, size]; of a shard, 0 for rows that others hold."""
        if self.weight.device.type == "cuda":
            from octavo.ops.cuda.embedding import embed

            return embed(ids, self.weight, self.start, self._factor)
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


class TokenInputs(nn.Module):
    """Owns what makes a token's vectors for all layers (TokenInputsConfig)."""

    def __init__(self, config: TokenInputsConfig, communicator: Communicator) -> None:
        super().__init__()
        self.config = config
        self._communicator = communicator
        self.embedding = Embedding(config.vocab_size, config.width, config.shard, config.scale)
        self.projection = make_linear(config.projection)
        self.norm = make_norm(config.norm)

    def forward(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """int64 ids [num_tokens], and their embeddings, complete [num_tokens, hidden_size]:
        [num_tokens, num_layers, size]."""
        own = self._communicator.all_reduce(self.embedding.forward(ids))
        rows = self.projection.forward(embedded).view(-1, self.config.size)
        summed = self.norm.add_normed(rows, own.view(rows.shape))
        return summed.view(len(ids), self.config.num_layers, self.config.size)


class SinusoidalPositions(nn.Module):
    """Owns a table of sines and cosines of the positions, which are no weights."""

    def __init__(self, num_rows: int, size: int, device: torch.device) -> None:
        super().__init__()
        steps = torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size
        positions = torch.arange(num_rows, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, 10000.0**-steps)
        table = torch.cat((angles.sin(), angles.cos()[:, : size // 2]), dim=1)
        self.table = table.float().to(device)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 positions [num_tokens] -> float32 [num_tokens, size]."""
        return F.embedding(ids, self.table)


def make_positions(
    config: PositionTable, size: int, device: torch.device
) -> PositionEmbedding | SinusoidalPositions:
    """The vectors that a model's description asks for; learned ones are uninitialised."""
    if config.kind == "sinusoidal":
        return SinusoidalPositions(config.num_rows, size, device)
    return PositionEmbedding(config.num_rows, size, config.offset)


class LogitsBias(WeightOwner):
    """Owns a bias of the logits [1, num_tokens], which the head adds once it is loaded."""

    def __init__(self, linear: Projection) -> None:
        """linear: the head's projection, without a bias of its own."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, linear.config.out_features), requires_grad=False)
        self._linear = (linear,)  # in a tuple, so that it is not a submodule

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """See WeightOwner.targets; the name is the tensor's own."""
        (name,), (linear,) = names, self._linear
        [(whole, tokens)] = linear.config.out_ranges()
        own = self.weight[:, : tokens.stop - tokens.start]
        return {name: WeightTarget((1, whole), (WeightSlice(own, (slice(0, 1), tokens)),))}

    def finalize(self) -> None:
        """See WeightOwner.finalize."""
        (linear,) = self._linear
        linear.bias = nn.Parameter(self.weight[0], requires_grad=False)


class LMHead(nn.Module):
    """Owns the projection to the vocabulary, or shares the token embedding's table for it."""

    def __init__(
        self, config: LinearConfig, softcap: float | None = None, has_logits_bias: bool = False
    ) -> None:
        """`config`: of this rank's part of the vocabulary."""
        super().__init__()
        linear = make_linear(config)
        assert isinstance(linear, Projection), "the head takes no other methods"
        self.linear: Projection = linear
        if has_logits_bias:
            self.logits_bias = LogitsBias(self.linear)
        [(_, tokens)] = config.out_ranges()
        self.num_tokens = tokens.stop - tokens.start
        self.softcap = softcap

    def tie(self, embedding: Embedding) -> None:
        """Use the embedding's table; called before weights are loaded."""
        assert isinstance(self.linear, PlainLinear), "a quantized head has weights of its own"
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
