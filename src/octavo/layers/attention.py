"""Attention with its projections; the backend reads and writes the paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.layers.base import WeightOwner, WeightSlice, WeightTarget, WeightTargets
from octavo.layers.config import (
    AttentionConfig,
    NormConfig,
    QueryScaleConfig,
    RelativeBiasConfig,
)
from octavo.layers.linear import LinearMethod, make_linear
from octavo.layers.norm import Norm, ShardedRMSNorm, make_norm
from octavo.ops import AttentionBackend, HeadNorms, LayerSpec, RotaryTable, ScoreFunction
from octavo.ops.base import RoundingBackend
from octavo.ops.communicator import Communicator
from octavo.ops.linear import LinearInput, MaybeRounded
from octavo.parallel import Shard


class AttentionSinks(WeightOwner):
    """Owns a score per query head that takes part in the softmax (gpt-oss)."""

    def __init__(self, num_heads: int, shard: Shard) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads), requires_grad=False)
        self._shard = shard

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """See WeightOwner.targets; the name is the tensor's own."""
        (name,) = names
        count = len(self.weight)
        first = self._shard.rank * count
        part = WeightSlice(self.weight, (slice(first, first + count),))
        return {name: WeightTarget((count * self._shard.size,), (part,))}


class RelativePositionBias(WeightOwner):
    """Owns the relative position bias of one layer or of several: [num_buckets, num_heads] (T5)."""

    def __init__(self, config: RelativeBiasConfig) -> None:
        super().__init__()
        self.config = config
        self.max_distance = config.max_distance
        shape = config.num_buckets, config.num_heads
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """See WeightOwner.targets."""
        (name,) = names
        num_buckets, count = self.weight.shape
        shard = self.config.shard
        heads = slice(shard.rank * count, (shard.rank + 1) * count)
        part = WeightSlice(self.weight, (slice(0, num_buckets), heads))
        return {f"{name}.weight": WeightTarget((num_buckets, count * shard.size), (part,))}

    def biases(self, distances: Tensor) -> Tensor:
        """See ops.RelativeBias."""
        vectors = F.embedding(self._buckets(distances), self.weight.float())
        return vectors.movedim(-1, 0)

    def _buckets(self, distances: Tensor) -> Tensor:
        """int64 distances, key minus query position -> buckets.

        In float32 and rounded down, as in the code that the models were trained with.
        """
        config, count = self.config, self.config.num_buckets
        behind = torch.zeros_like(distances)
        if config.bidirectional:
            count //= 2
            behind = (distances > 0) * count
            distances = distances.abs()
        else:
            distances = (-distances).clamp(min=0)
        num_exact = count // 2
        # The argument of the logarithm is at least 1; nearer distances have buckets of their own.
        factors = torch.log(distances.clamp(min=num_exact).float() / num_exact)
        steps = factors / math.log(config.max_distance / num_exact) * (count - num_exact)
        far = (num_exact + steps.long()).clamp(max=count - 1)
        return behind + torch.where(distances < num_exact, distances, far)


class QueryScale:
    """What queries are multiplied by, in all layers that share it; see QueryScaleConfig."""

    factors: Tensor
    """What the queries of the current step are multiplied by: float32 [num_tokens, 1, 1]."""

    def __init__(self, config: QueryScaleConfig, max_positions: int, device: torch.device) -> None:
        periods = torch.arange(max_positions, device="cpu") // config.period
        self._table = (1 + config.beta * torch.log(1 + periods)).to(device)

    def begin(self, positions: Tensor) -> None:
        """Before the layers of a step, whose tokens are at `positions` [num_tokens]."""
        self.factors = self._table[positions].view(-1, 1, 1)


class Step(NamedTuple):
    """What the layers of a model compute a step with."""

    backend: AttentionBackend
    """It has been given the step's metadata."""
    inputs: Tensor | None = None
    """Of models whose layers take them in, the tokens' vectors [num_tokens, num_layers, size]."""
    heads: dict[int, tuple[Tensor, Tensor]] | None = None
    """By layer, keys and values as they were projected, of layers whose KV others read."""


class Attention(nn.Module):
    """Owns the projections around one layer's attention, and norms and sinks of heads, if any."""

    query_norm: Norm
    key_norm: Norm

    def __init__(
        self,
        config: AttentionConfig,
        layer_id: int,
        rotary: RotaryTable | None,
        communicator: Communicator,
        relative_bias: RelativePositionBias | None = None,
        query_scale: QueryScale | None = None,
        source: Attention | None = None,
    ) -> None:
        """
        Args:
            relative_bias, query_scale: owned by another module, which several layers may share.
            source: that of the layer whose keys and values are this one's, too.
        """
        super().__init__()
        self._source = (source,)  # in a tuple, so that it is not a submodule
        self.is_source = False  # whether it is that of another layer
        self._communicator = communicator
        self.sinks = AttentionSinks(config.num_heads, config.shard) if config.sinks else None
        self.spec = LayerSpec(
            layer_id=layer_id,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scores=ScoreFunction(
                config.scale, config.softcap, config.alibi_slopes, self.sinks, relative_bias
            ),
            window=config.window,
        )
        self.rotary = rotary
        self._query_scale = query_scale
        self.qkv = make_linear(config.qkv)
        self._counts = [size // config.head_dim for size in config.qkv.out_sizes]
        self.head_norms: HeadNorms | None = None  # which the backend applies
        self._own_norms: tuple[Norm, Norm] | None = None
        self._sharded_norms: tuple[ShardedRMSNorm, ShardedRMSNorm] | None = None
        self.value_norm: Norm | None = None
        if config.value_norm is not None and source is None:
            self.value_norm = make_norm(config.value_norm)
        if config.query_key_norms is not None:
            self._make_norms(*config.query_key_norms, config, communicator.shard.size)
        self.output = make_linear(config.output)

    def _make_norms(
        self, query: NormConfig, key: NormConfig, config: AttentionConfig, num_ranks: int
    ) -> None:
        if config.width_norm is not None and num_ranks > 1:
            query_norm = ShardedRMSNorm(query, config.shard, num_ranks)
            key_norm = ShardedRMSNorm(key, config.kv_shard, num_ranks)
            self.query_norm, self.key_norm = self._sharded_norms = query_norm, key_norm
            return
        (source,) = self._source
        if source is not None:
            self.query_norm = make_norm(query)
            self.head_norms = HeadNorms(self.query_norm, source.key_norm, source.value_norm)
            return
        self.query_norm, self.key_norm = norms = make_norm(query), make_norm(key)
        # Backends have RMS norms of heads, with a scale.
        if query.size == config.head_dim and query.kind == "rms" and query.affine:
            self.head_norms = HeadNorms(*norms, self.value_norm)
        else:
            self._own_norms = norms

    @property
    def entry(self) -> LinearMethod:
        """See InputReader.entry."""
        return self.qkv

    def forward(self, hidden: LinearInput, step: Step, may_round: bool = True) -> MaybeRounded:
        """hidden [num_tokens, hidden_size] -> what `output` takes, [num_tokens, all heads].

        The backend normalises heads and rotates query and key, and writes K and V to the cache.

        may_round: whether the result may be rounded, as `output` takes it.
        """
        spec, backend = self.spec, step.backend
        projected = self.qkv.project(hidden)
        query, key, value = self._split(projected.view(len(projected), -1, spec.head_dim), step)
        if self._own_norms is not None:
            query_norm, key_norm = self._own_norms
            query, key = _normalise(query_norm, query), _normalise(key_norm, key)
        elif self._sharded_norms is not None:
            query, key = self._normalise_together(*self._sharded_norms, query, key)
        if self._query_scale is not None:  # before the rotation, which is linear
            query = query * self._query_scale.factors.to(query.dtype)
        arguments = spec.layer_id, query, key, value, self.rotary, self.head_norms
        if may_round and _may_round(type(backend)):
            rounder = cast(RoundingBackend, backend)
            rounding = self.output.part_rounding(len(query))
            if rounder.rounds(spec.layer_id, rounding):
                return rounder.forward_rounded(*arguments, rounding)
        return backend.forward(*arguments)

    def _split(self, heads: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of projected heads [num_tokens, heads, head_dim]; keys and
        values of another layer, if they are its."""
        (source,) = self._source
        if source is not None:
            assert step.heads is not None
            return heads, *step.heads[source.spec.layer_id]
        query, key, *others = torch.split(heads, self._counts, dim=1)
        value = others[0] if others else key
        if self.is_source:
            assert step.heads is not None
            step.heads[self.spec.layer_id] = key, value
        return query, key, value

    def _normalise_together(
        self, query_norm: ShardedRMSNorm, key_norm: ShardedRMSNorm, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Normalise the heads of all ranks together, queries and keys each."""
        queries, keys = query.flatten(1), key.flatten(1)
        own = torch.cat((query_norm.squares(queries), key_norm.squares(keys)), dim=1)
        squares = self._communicator.all_reduce(own)
        queries, keys = (
            query_norm.scaled(queries, squares[:, :1]),
            key_norm.scaled(keys, squares[:, 1:]),
        )
        return queries.view(query.shape), keys.view(key.shape)


class CrossAttention(nn.Module):
    """Attention to the encoder's result, with its projections.

    Keys and values of an encoder input are computed once, when the encoder has run, and stay in the
    cache for all tokens of all sequences that read it.
    """

    def __init__(self, config: AttentionConfig, layer_id: int) -> None:
        """layer_id: of the KV, among all attention layers."""
        super().__init__()
        assert config.reads_encoder
        assert config.query_key_norms is None, "no model has norms of heads here"
        assert config.rotary is None, "distances have no meaning here"
        self.spec = LayerSpec(
            layer_id=layer_id,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scores=ScoreFunction(config.scale, config.softcap),
            reads_encoder=True,
        )
        self.query = make_linear(config.query)
        self.key_value = make_linear(config.key_value)
        self.output = make_linear(config.output)

    @property
    def entry(self) -> LinearMethod:
        """See InputReader.entry."""
        return self.query

    def forward(self, hidden: LinearInput, backend: AttentionBackend) -> Tensor:
        """hidden [num_tokens, hidden_size] -> what `output` takes, [num_tokens, all heads]."""
        spec = self.spec
        projected = self.query.project(hidden)
        query = projected.view(len(projected), -1, spec.head_dim)
        return backend.attend_encoded(spec.layer_id, query)

    def write(self, encoded: Tensor, backend: AttentionBackend) -> None:
        """Write K and V of the encoder's result [num_tokens, hidden_size] to the cache."""
        spec = self.spec
        heads = self.key_value.forward(encoded).view(len(encoded), -1, spec.head_dim)
        key, value = torch.split(heads, spec.num_kv_heads, dim=1)
        backend.write_encoded(spec.layer_id, key, value)


@cache
def _may_round(backend: type) -> bool:
    """Kept, because such a check is slow."""
    return issubclass(backend, RoundingBackend)


def _normalise(norm: Norm, heads: Tensor) -> Tensor:
    """Normalise heads [num_tokens, heads, head_dim], each or all together, by the norm's size."""
    if norm.config.size == heads.shape[2]:
        return norm.forward(heads)[0]
    return norm.forward(heads.flatten(1))[0].view(heads.shape)
