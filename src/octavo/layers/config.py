"""Descriptions of layers, from which they are built.

Every shape of a weight is declared here, so that memory can be counted without torch, which this
module does not import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RotaryKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
NormKind = Literal["rms", "layer"]
MLPKind = Literal["plain", "gated"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]


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
    # longrope: divisors of the frequencies [dim / 2] of a model that is limited to its original
    # context, and of one that is not.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """A projection y = x W^T + b; several projections of one input may be merged into one."""

    in_features: int
    out_sizes: tuple[int, ...]  # the outputs of each merged projection, in their order in W
    bias: bool = False
    method: str = "plain"  # how W is stored and computed: a name in registry.LINEAR_METHODS

    @property
    def out_features(self) -> int:
        return sum(self.out_sizes)

    @property
    def num_parameters(self) -> int:
        return self.out_features * (self.in_features + self.bias)


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
    head_norm: NormConfig | None = None  # of each query and key head, before the rotation
    qkv_bias: bool = False
    output_bias: bool = False
    linear_method: str = "plain"  # of its projections

    @property
    def qkv(self) -> LinearConfig:
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = (query_size, kv_size, kv_size)
        return LinearConfig(self.hidden_size, sizes, self.qkv_bias, self.linear_method)

    @property
    def output(self) -> LinearConfig:
        heads_size = self.num_heads * self.head_dim
        return LinearConfig(heads_size, (self.hidden_size,), self.output_bias, self.linear_method)

    @property
    def num_parameters(self) -> int:
        norms = 0 if self.head_norm is None else 2 * self.head_norm.num_parameters
        return self.qkv.num_parameters + self.output.num_parameters + norms


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

    @property
    def up(self) -> LinearConfig:
        merged = 2 if self.kind == "gated" else 1
        sizes = (self.intermediate_size,) * merged
        return LinearConfig(self.hidden_size, sizes, self.bias, self.linear_method)

    @property
    def down(self) -> LinearConfig:
        sizes = (self.hidden_size,)
        return LinearConfig(self.intermediate_size, sizes, self.bias, self.linear_method)

    @property
    def num_parameters(self) -> int:
        return self.up.num_parameters + self.down.num_parameters
