"""Descriptions of layers, from which they are built.

Every shape of a weight is declared here, so that memory can be counted without torch, which this
module does not import. Families describe whole layers; `sharded` makes of such a description that
of one rank's part (parallel.py), in which all counts and sizes are the rank's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from octavo import float7, float12
from octavo.errors import ConfigError
from octavo.float12 import PIECE_ROWS
from octavo.parallel import OPTION, WHOLE, Shard
from octavo.routing import RoutingConfig

RotaryKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
NormKind = Literal["rms", "layer"]
PositionKind = Literal["learned", "sinusoidal"]
MLPKind = Literal["plain", "gated"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "clamped_swiglu"]
# In which form a device holds a weight a second time: of one in bfloat16 in 12 bits, or of one in
# FP8 in 7 bits, which few tokens are multiplied by; or of another quantized one in the model's
# dtype, for many tokens.
CopyForm = Literal["float12", "float7", "dequantized"]
# Bytes of a weight of whose copy few tokens read fewer.
_COPIED_BYTES: dict[CopyForm | None, int] = {"float12": 2, "float7": 1}


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """How the frequencies of a rotary embedding follow from the position."""

    dim: int  # leading elements of each head that are rotated
    theta: float
    kind: RotaryKind = "default"
    factor: float = 1.0  # by how much the context was extended
    original_max_positions: int = 0  # llama3, yarn, longrope: the context before that
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the bounds of the ramp to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    num_turning: int = 0  # proportional: pairs that turn; the others have the frequency 0
    # longrope: divisors of the frequencies [dim / 2] of a model that is limited to its original
    # context, and of one that is not.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    # Which elements turn together: 2 i and 2 i + 1 (GPT-J, Cohere, GLM-4), not i and i + dim / 2.
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class QueryScaleConfig:
    """How queries grow with their position: by 1 + beta ln(1 + floor(position / period))."""

    beta: float
    period: int  # the original context, in which it is 1


@dataclass(frozen=True, slots=True)
class PositionTable:
    """A vector per position that is added to the embedding: position p is row p + offset.

    Learned ones are weights. Sinusoidal ones follow from the position: sines of all frequencies,
    then their cosines (arXiv:1706.03762, section 3.5).
    """

    num_rows: int
    offset: int = 0
    kind: PositionKind = "learned"


@dataclass(frozen=True, slots=True)
class RelativeBiasConfig:
    """A learned number per head and bucket of distances, which is added to scores (T5).

    Half of the buckets have one distance each, and the others distances that grow by a constant
    factor up to max_distance. If keys may be behind the query (bidirectional), half of all buckets
    are theirs.
    """

    num_heads: int
    num_buckets: int
    max_distance: int
    bidirectional: bool = False
    shard: Shard = WHOLE  # which part of the heads these are

    def sharded(self, shard: Shard) -> RelativeBiasConfig:
        """One rank's heads. Raises ConfigError if they do not divide."""
        num_heads = shard.divide(self.num_heads, "the number of attention heads")
        return replace(self, num_heads=num_heads, shard=shard)

    @property
    def num_parameters(self) -> int:
        return self.num_buckets * self.num_heads


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """A projection y = x W^T + b; several projections of one input may be merged into one."""

    in_features: int
    out_sizes: tuple[int, ...]  # the outputs of each merged projection, in their order in W
    bias: bool = False
    method: str = "plain"  # how W is stored and computed: a name in registry.LINEAR_METHODS
    # Which part of the whole projection this is: of the outputs of each merged one (none: all of
    # them), or of the inputs, so that y is a partial sum.
    out_shards: tuple[Shard, ...] = ()
    in_shard: Shard = WHOLE
    padding: int = 0  # added to the whole projection, so that ranks have equal parts
    copy: CopyForm | None = None  # what a Hopper GPU has beside W

    @property
    def out_features(self) -> int:
        return sum(self.out_sizes)

    def with_copy(self, form: CopyForm | None) -> LinearConfig:
        """The same projection with a copy in that form, if it is of use for its W."""
        is_quantized = self.method == "quantized"
        if form == "float12":
            has_use = float12.has_use(self.out_features, self.in_features)
        elif form == "float7":
            has_use = is_quantized and float7.has_use(self.out_features, self.in_features)
        else:
            has_use = is_quantized
        return replace(self, copy=form if has_use else None)

    @property
    def copy_bytes(self) -> int:
        """What the copy takes; 0: there is none."""
        if self.copy is None:
            return 0
        if self.copy == "dequantized":
            return 2 * self.out_features * self.in_features
        count = float7.copy_bytes if self.copy == "float7" else float12.copy_bytes
        return count(self.out_features, self.in_features)

    def copy_saves(self, num_tokens: int, is_chained: bool = False) -> int:
        """How many bytes fewer than those of W are read for so many tokens because of the copy: 0
        of a dequantized one, which products read that arithmetic bounds.

        is_chained: see LayerConfig.chains_projections.
        """
        if num_tokens not in self._copied_tokens(is_chained):
            return 0
        return _COPIED_BYTES[self.copy] * self.out_features * self.in_features - self.copy_bytes

    @property
    def copied_tokens(self) -> range:
        """For which numbers of tokens a copy in 12 or 7 bits is read by a projection in no
        chain."""
        return self._copied_tokens(is_chained=False)

    def _copied_tokens(self, is_chained: bool) -> range:
        if self.copy == "float7":
            return float7.copied_tokens(self.out_features, self.in_features)
        if self.copy != "float12":
            return range(0)
        return float12.copied_tokens(self.out_features, self.in_features, is_chained)

    def out_ranges(self) -> list[tuple[int, slice]]:
        """For each merged projection, how many outputs the whole has, and which of them these are:
        without padding."""
        shards = self.out_shards or (WHOLE,) * len(self.out_sizes)
        found = []
        for size, shard in zip(self.out_sizes, shards, strict=True):
            whole, start = size * shard.size - self.padding, size * shard.rank
            found.append((whole, slice(start, min(start + size, whole))))
        return found

    def in_range(self) -> tuple[int, slice]:
        """How many inputs the whole has, and which of them these are."""
        start = self.in_features * self.in_shard.rank
        return self.in_features * self.in_shard.size, slice(start, start + self.in_features)

    @property
    def is_part(self) -> bool:
        """Whether other ranks have other outputs or inputs."""
        return any(each.size > 1 for each in (self.in_shard, *self.out_shards))

    @property
    def has_bias(self) -> bool:
        """Whether this part adds the bias: of partial sums, the first does."""
        return self.bias and self.in_shard.rank == 0

    @property
    def num_parameters(self) -> int:
        return self.out_features * (self.in_features + self.has_bias)

    def num_quantized_parameters(self, group: int) -> int:
        """Those that are quantized where groups of so many inputs must divide the inputs."""
        is_quantized = self.method == "quantized" and self.in_features % group == 0
        return self.num_parameters if is_quantized else 0


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A normalisation of rows of `size` elements."""

    kind: NormKind
    size: int
    eps: float
    affine: bool = True  # has a scale and, if it is a layer norm with `bias`, a shift
    bias: bool = True
    offset: float = 0.0  # added to the scale; Gemma's checkpoints hold the scale minus 1
    multiplier: float = 1.0  # of the result

    @property
    def num_parameters(self) -> int:
        if not self.affine:
            return 0
        return 2 * self.size if self.kind == "layer" and self.bias else self.size


@dataclass(frozen=True, slots=True)
class EmbeddingScale:
    """What token embeddings are multiplied by; perhaps rounded to the model's dtype before."""

    factor: float
    is_rounded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """One layer's attention with its projections."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores
    window: int | None = None  # the query at p reads keys p - window + 1 .. p; None: 0 .. p
    rotary: int | None = None  # index of the model's rotary embeddings; None: no rotary embedding
    query_scale: QueryScaleConfig | None = None
    # How products of queries and keys become weights; see ops.ScoreFunction.
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None  # per query head
    sinks: bool = False  # whether there is one per query head, among the weights
    relative_bias: int | None = None  # index of the relative biases of the layer's stack
    # Cross-attention: keys and values are projections of the encoder's result.
    reads_encoder: bool = False
    # Of keys and values. 1: values are what keys are made of, before norm and rotation; 0: both are
    # another layer's (LayerConfig.kv_source).
    num_kv_projections: Literal[0, 1, 2] = 2
    # Norms before the rotation: of each query and key head, or of all query heads together and of
    # all key heads together, whatever the size that the description of this one has.
    head_norm: NormConfig | None = None
    width_norm: NormConfig | None = None
    value_norm: NormConfig | None = None  # of each value head, beside a head_norm
    qkv_bias: bool = False
    output_bias: bool = False
    linear_method: str = "plain"  # of its projections
    copies: CopyForm | None = None  # what its projections may have (LinearConfig.with_copy)
    shard: Shard = WHOLE  # which part of the query heads these are
    kv_shard: Shard = WHOLE  # which part of the KV heads these are

    def sharded(self, shard: Shard) -> AttentionConfig:
        """One rank's heads. Raises ConfigError if they do not divide, or share a layer norm."""
        if self.width_norm is not None and self.width_norm.kind != "rms" and shard.size > 1:
            raise ConfigError(OPTION, f"{shard.size} ranks cannot share a layer norm of all heads")
        num_heads = shard.divide(self.num_heads, "the number of attention heads")
        first, slopes = shard.rank * num_heads, self.alibi_slopes
        return replace(
            self,
            num_heads=num_heads,
            alibi_slopes=None if slopes is None else slopes[first : first + num_heads],
            num_kv_heads=max(1, self.num_kv_heads // shard.size),
            shard=shard,
            kv_shard=shard.of_kv_heads(self.num_kv_heads),
        )

    def with_linear_method(self, method: str) -> AttentionConfig:
        """The same with another method for its projections, unless they have an unusual one."""
        return replace(self, linear_method=method) if self.linear_method == "plain" else self

    @property
    def qkv(self) -> LinearConfig:
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv = LinearConfig(
            self.hidden_size,
            (query_size, *(kv_size,) * self.num_kv_projections),
            self.qkv_bias,
            self.linear_method,
            out_shards=(self.shard, *(self.kv_shard,) * self.num_kv_projections),
        )
        return qkv.with_copy(self.copies)

    @property
    def query(self) -> LinearConfig:
        """The first part of `qkv`, where the others have another input."""
        qkv = self.qkv
        return replace(qkv, out_sizes=qkv.out_sizes[:1], out_shards=qkv.out_shards[:1])

    @property
    def key_value(self) -> LinearConfig:
        """The other parts of `qkv`."""
        qkv = self.qkv
        return replace(qkv, out_sizes=qkv.out_sizes[1:], out_shards=qkv.out_shards[1:])

    @property
    def output(self) -> LinearConfig:
        output = LinearConfig(
            self.num_heads * self.head_dim,
            (self.hidden_size,),
            self.output_bias,
            self.linear_method,
            in_shard=self.shard,
        )
        return output.with_copy(self.copies)

    @property
    def score_features(self) -> frozenset[str]:
        """What a backend must compute for the layer beyond dot products (ops.LayerSpec.features):
        the optional fields of ops.ScoreFunction that it uses, and cross-attention."""
        fields = {
            "softcap": self.softcap is not None,
            "alibi_slopes": self.alibi_slopes is not None,
            "sinks": self.sinks,
            "relative_bias": self.relative_bias is not None,
            "cross_attention": self.reads_encoder,
        }
        return frozenset(name for name, is_used in fields.items() if is_used)

    @property
    def query_key_norms(self) -> tuple[NormConfig, NormConfig] | None:
        """The norms of queries and of keys, each as it is applied to its rows, if there are
        some. The second is another layer's if the keys are."""
        assert self.head_norm is None or self.width_norm is None, "heads are normalised once"
        if self.width_norm is not None:
            query_size, kv_size, *_ = self.qkv.out_sizes
            return replace(self.width_norm, size=query_size), replace(self.width_norm, size=kv_size)
        return None if self.head_norm is None else (self.head_norm, self.head_norm)

    @property
    def num_parameters(self) -> int:
        of_heads: tuple[NormConfig, ...] = self.query_key_norms or ()
        if self.num_kv_projections == 0:
            of_heads = of_heads[:1]
        elif self.value_norm is not None:
            of_heads = (*of_heads, self.value_norm)
        norms = sum(norm.num_parameters for norm in of_heads)
        sinks = self.num_heads if self.sinks else 0
        return self.qkv.num_parameters + self.output.num_parameters + norms + sinks


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """One layer's feed-forward block: activation(up(x)), or activation(gate(x)) * up(x), and down.

    `up` of a gated block is the gate and up projections merged, in this order.
    """

    kind: MLPKind
    hidden_size: int
    intermediate_size: int
    activation: Activation
    bias: bool = False
    linear_method: str = "plain"  # of its projections
    copies: CopyForm | None = None  # what its projections may have (LinearConfig.with_copy)
    shard: Shard = WHOLE  # which part of the intermediate elements these are

    def sharded(self, shard: Shard) -> MLPConfig:
        """One rank's intermediate elements. Raises ConfigError if they do not divide."""
        size = shard.divide(self.intermediate_size, "the intermediate size")
        return replace(self, intermediate_size=size, shard=shard)

    def with_linear_method(self, method: str) -> MLPConfig:
        """The same with another method for its projections, unless they have an unusual one."""
        return replace(self, linear_method=method) if self.linear_method == "plain" else self

    @property
    def up(self) -> LinearConfig:
        merged = 2 if self.kind == "gated" else 1
        up = LinearConfig(
            self.hidden_size,
            (self.intermediate_size,) * merged,
            self.bias,
            self.linear_method,
            out_shards=(self.shard,) * merged,
        )
        # Kernels for 12 bits take gates whose halves are whole pieces of rows.
        has_pieces = merged == 1 or self.intermediate_size % PIECE_ROWS == 0
        return up.with_copy(self.copies if has_pieces or self.copies != "float12" else None)

    @property
    def down(self) -> LinearConfig:
        down = LinearConfig(
            self.intermediate_size,
            (self.hidden_size,),
            self.bias,
            self.linear_method,
            in_shard=self.shard,
        )
        return down.with_copy(self.copies)

    @property
    def num_parameters(self) -> int:
        return self.up.num_parameters + self.down.num_parameters

    @property
    def num_active_parameters(self) -> int:
        """Those that one token's result depends on: all."""
        return self.num_parameters

    @property
    def activation_width(self) -> int:
        """Elements that a token has at once inside the block."""
        return 3 * self.intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputConfig:
    """What a layer makes of a token's own vector for it: output(activation(gate(x)) * vector).

    All ranks hold the whole of it.
    """

    hidden_size: int
    size: int  # of the vectors
    activation: Activation
    linear_method: str = "plain"  # of its projections

    def with_linear_method(self, method: str) -> LayerInputConfig:
        """The same with another method for its projections, unless they have an unusual one."""
        return replace(self, linear_method=method) if self.linear_method == "plain" else self

    @property
    def gate(self) -> LinearConfig:
        return LinearConfig(self.hidden_size, (self.size,), method=self.linear_method)

    @property
    def output(self) -> LinearConfig:
        return LinearConfig(self.size, (self.hidden_size,), method=self.linear_method)

    @property
    def num_parameters(self) -> int:
        return self.gate.num_parameters + self.output.num_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputsConfig:
    """A vector of each token for each layer: of a table of its own, plus a projection of the
    token's embedding, normed for each layer. The norm's multiplier and the scale of the table are
    those of the sum."""

    vocab_size: int
    num_layers: int
    size: int  # of each vector
    hidden_size: int
    scale: EmbeddingScale
    norm: NormConfig
    shard: Shard = WHOLE  # which part of the table's rows a rank holds

    @property
    def width(self) -> int:
        """Elements of a token's vectors for all layers."""
        return self.num_layers * self.size

    @property
    def projection(self) -> LinearConfig:
        return LinearConfig(self.hidden_size, (self.width,))

    @property
    def table_parameters(self) -> int:
        """Those of which a step reads the rows of its tokens alone."""
        return self.shard.padded(self.vocab_size) * self.width

    @property
    def num_parameters(self) -> int:
        """Those that every step reads."""
        return self.projection.num_parameters + self.norm.num_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """One layer's mixture of experts: gated MLPs of which each token takes some.

    Its result is the weighted sum of theirs, plus that of a shared expert, which all tokens take.
    All ranks hold a part of every expert, and the whole router.
    """

    hidden_size: int
    intermediate_size: int  # of each expert
    activation: Activation
    routing: RoutingConfig
    bias: bool = False  # whether the experts' projections have biases
    # In checkpoints that have the experts in one tensor:
    alternating: bool = False  # whether gates and ups take turns, and ups do not follow gates
    transposed: bool = False  # whether it is [experts, inputs, outputs]
    method: str = "plain"  # how experts are stored and computed: in registry.EXPERTS_METHODS
    shared: MLPConfig | None = None
    shared_gate: bool = False  # whether its result is multiplied by a learned sigmoid
    copies: CopyForm | None = None  # what experts may have, where their form takes them
    shard: Shard = WHOLE  # which part of each expert's intermediate elements these are

    def sharded(self, shard: Shard) -> ExpertsConfig:
        """One rank's intermediate elements. Raises ConfigError if they do not divide."""
        size = shard.divide(self.intermediate_size, "the intermediate size of an expert")
        shared = None if self.shared is None else self.shared.sharded(shard)
        return replace(self, intermediate_size=size, shared=shared, shard=shard)

    def with_linear_method(self, method: str) -> ExpertsConfig:
        """With another method for the experts, and for the shared expert's projections; a name
        for both."""
        shared = None if self.shared is None else self.shared.with_linear_method(method)
        return replace(self, method=method, shared=shared)

    def with_copies(self, of_shared: CopyForm | None, of_experts: CopyForm | None) -> ExpertsConfig:
        """The same experts with copies, as far as their form takes them: a Hopper GPU has them
        beside those in bfloat16 in 12 bits, and beside those in FP8 in 7."""
        shared = None if self.shared is None else replace(self.shared, copies=of_shared)
        return replace(self, shared=shared, copies=of_experts)

    @property
    def copy_bytes(self) -> int:
        """What the copies of all experts that a router chooses from take; 0: there are none."""
        if not self.copied_tokens:
            return 0
        count = float7.copy_bytes if self.copies == "float7" else float12.copy_bytes
        up = count(2 * self.intermediate_size, self.hidden_size)
        down = count(self.hidden_size, self.intermediate_size)
        return self.routing.num_experts * (up + down)

    def copy_saves(self, num_tokens: int) -> int:
        """How many bytes fewer than those of the experts are read for so many tokens because of the
        copies, if all choices of experts are equally likely."""
        if num_tokens not in self.copied_tokens:
            return 0
        routing = self.routing
        hit_share = routing.expected_distinct(num_tokens) / routing.num_experts
        return int(self.copy_saves_of_all * hit_share)

    @property
    def copy_saves_of_all(self) -> int:
        """How many bytes fewer the copies have than all experts that a router chooses from."""
        if not self.copied_tokens:
            return 0
        num_weights = self.routing.num_experts * self.expert_parameters
        return _COPIED_BYTES[self.copies] * num_weights - self.copy_bytes

    @property
    def copied_tokens(self) -> range:
        """For which numbers of tokens the copies are read; for none, if there are no copies."""
        routing = self.routing
        sizes = routing.num_experts, routing.top_k, self.hidden_size, self.intermediate_size
        if self.copies == "float7" and self.method == "quantized" and not self.bias:
            return float7.copied_expert_tokens(*sizes)
        if self.copies != "float12" or self.method != "plain" or self.bias:
            return range(0)
        return float12.copied_expert_tokens(*sizes)

    @property
    def has_down_bias(self) -> bool:
        """Whether this part adds the bias of the down projections: of partial sums, the first."""
        return self.bias and self.shard.rank == 0

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert."""
        biases = (2 * self.intermediate_size if self.bias else 0) + (
            self.hidden_size if self.has_down_bias else 0
        )
        return 3 * self.intermediate_size * self.hidden_size + biases

    @property
    def num_parameters(self) -> int:
        return self._num_parameters(self.routing.num_experts)

    def num_quantized_parameters(self, group: int) -> int:
        """See LinearConfig.num_quantized_parameters. Of experts that a router chooses from: all of
        their weights or none."""
        sizes = self.hidden_size, self.intermediate_size
        if self.method != "quantized" or any(size % group for size in sizes):
            return 0
        return self.routing.num_experts * self.expert_parameters

    @property
    def num_active_parameters(self) -> int:
        """Those that one token's result depends on."""
        return self._num_parameters(self.routing.top_k)

    @property
    def activation_width(self) -> int:
        """Elements that a token has at once inside the block."""
        expert = 3 * self.intermediate_size + 2 * self.hidden_size
        shared = 0 if self.shared is None else self.shared.activation_width
        return self.routing.top_k * expert + shared

    def _num_parameters(self, num_experts: int) -> int:
        routing = self.routing
        # Corrections are no parameters: they are not trained by gradients, and remain float32.
        per_expert = self.hidden_size + routing.bias + routing.expert_scales
        shared = 0 if self.shared is None else self.shared.num_parameters
        gate = self.hidden_size if self.shared_gate else 0
        router = routing.num_experts * per_expert
        return router + num_experts * self.expert_parameters + shared + gate
