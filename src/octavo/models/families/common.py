"""What the readers of several families share.

Field names are those of transformers' configuration classes, in their old and new (version 5)
spellings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import ModelError
from octavo.json_fields import MAX_COUNT, Fields
from octavo.layers.config import (
    Activation,
    AttentionConfig,
    ExpertsConfig,
    MLPConfig,
    NormConfig,
    RotaryConfig,
)
from octavo.models.config import LayerConfig, ModelDescription, NormPlacement
from octavo.models.rope_scaling import read_rotary
from octavo.routing import RoutingConfig

MAX_LAYERS = 10_000  # a hundred times today's deepest; layers are built before memory is counted
MAX_ALIBI_HEADS = 10_000  # each has a slope in the description
# The routing kernel holds the scores of all experts for 16 tokens in registers. On Hopper, threads
# spill 1.9 KB each with 1,024 experts, 7.3 KB with 2,048, and 14.5 KB with 4,096; these take 16 and
# 90 s to compile.
MAX_EXPERTS = 1024
LAYER_TYPES = ("full_attention", "sliding_attention")
# Names in config.json, and ours. Those of the tanh approximation differ in how it is rounded.
_TANH_GELUS = (
    *("gelu_pytorch_tanh", "gelu_python_tanh"),
    *("gelu_new", "gelu_fast", "gelu_accurate"),
)
GATED_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    **dict.fromkeys(_TANH_GELUS, "gelu_tanh"),
}
PLAIN_ACTIVATIONS: dict[str, Activation] = {
    **GATED_ACTIVATIONS,
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
}


def read_num_layers(config: Fields) -> int:
    """num_hidden_layers, within MAX_LAYERS."""
    return config.count("num_hidden_layers", limit=MAX_LAYERS)


def divided_head_dim(
    config: Fields, hidden_size: int, num_heads: int, heads_field: str = "num_attention_heads"
) -> int:
    """The size of a head where no field has it; `heads_field` is what the family calls the number
    of heads."""
    if hidden_size % num_heads:
        raise ModelError(
            f"{config.where}: {heads_field} is {num_heads}; it must divide the hidden size "
            f"({hidden_size})"
        )
    return hidden_size // num_heads


def plain_attention(
    config: Fields,
    hidden_size: int,
    num_heads: int,
    heads_field: str = "num_attention_heads",
    has_biases: bool = True,
) -> AttentionConfig:
    """Attention with a KV head for each query head, which share the hidden size."""
    head_dim = divided_head_dim(config, hidden_size, num_heads, heads_field)
    return AttentionConfig(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=has_biases,
        output_bias=has_biases,
    )


def read_window(config: Fields, default: int | None = 4096) -> int | None:
    """sliding_window, which a null turns off; `default` is the family's."""
    if config.values.get("sliding_window", default) is None:
        return None
    return config.count("sliding_window", default)


def check_layer_types(config: Fields, window: int | None = None) -> None:
    """ModelError unless layer_types, if given, makes every layer what the window makes it."""
    expected = "full_attention" if window is None else "sliding_attention"
    if set(config.names("layer_types", [expected])) != {expected}:
        raise config.error("layer_types", f"every layer of this family is {expected}")


def uniform_windows(config: Fields, window: int | None) -> list[int | None]:
    """The same window for every layer."""
    check_layer_types(config, window)
    return [window] * read_num_layers(config)


def read_windows(config: Fields, default: Sequence[str], window: int | None) -> list[int | None]:
    """The window of each layer: None in those with full attention.

    Args:
        config: config.json.
        default: the family's layer_types, one of LAYER_TYPES per layer.
        window: that of the layers with sliding attention.
    """
    layer_types = config.names("layer_types", list(default))
    if len(layer_types) != len(default) or not set(layer_types) <= set(LAYER_TYPES):
        expected = f"it must name {len(default)} layers, each one of {', '.join(LAYER_TYPES)}"
        raise config.error("layer_types", expected)
    if window is None and "sliding_attention" in layer_types:
        raise config.error("sliding_window", "layer_types has layers with sliding attention")
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def periodic_layer_types(num_layers: int, period: int) -> list[str]:
    """Full attention in every layer whose number, counted from 1, is a multiple of the period."""
    return [LAYER_TYPES[(i + 1) % period != 0] for i in range(num_layers)]


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of attention."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_heads(
    config: Fields, num_kv_heads: int | None = None, head_dim: int | None = None
) -> Heads:
    """hidden_size, num_attention_heads, num_key_value_heads and head_dim.

    Args:
        config: config.json.
        num_kv_heads: the family's default; None: as many as query heads.
        head_dim: the family's default; None: hidden_size / num_attention_heads.
    """
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if num_kv_heads is None or "num_key_value_heads" in config.values:  # a null also means heads
        num_kv_heads = heads
    kv_heads = config.count("num_key_value_heads", num_kv_heads)
    if heads % kv_heads:
        raise ModelError(
            f"{config.where}: num_key_value_heads is {kv_heads}; it must divide "
            f"num_attention_heads ({heads})"
        )
    if head_dim is None or "head_dim" in config.values:  # a null also means the quotient
        head_dim = config.get("head_dim", None) or divided_head_dim(config, hidden, heads)
    head_dim = config.count("head_dim", head_dim)
    return Heads(hidden, heads, kv_heads, head_dim)


def read_rotary_decoder(
    config: Fields,
    *,
    windows: Sequence[int | None] | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    norm: NormConfig | None = None,
    norm_placement: NormPlacement = "pre",
    partial_rotary: float | None = None,
    rope_theta: float = 10000.0,
    interleaved_rotary: bool = False,
    rotaries: Sequence[RotaryConfig] | None = None,
    rotary_of_layer: Sequence[int | None] | None = None,
    scale: float | None = None,
    mlp: MLPConfig | None = None,
    experts: Mapping[int, ExpertsConfig] | None = None,
    softcap: float | None = None,
    head_norms: bool = False,
    width_norms: bool = False,
    sinks: bool = False,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    activation_field: str = "hidden_act",
    activation: str = "silu",
    tied_embeddings: bool = False,
) -> ModelDescription:
    """Decoders with rotary positions; by default RMS norms and gated MLPs, as Llama has them.

    Args:
        config: config.json.
        windows: one per layer; None: no layer has a window.
        num_kv_heads, head_dim: see `read_heads`.
        norm_eps: the family's default.
        norm: of the layers and the last one; None: an RMS norm.
        norm_placement: see LayerConfig.
        partial_rotary, rope_theta: see `read_rotary`.
        interleaved_rotary: see RotaryConfig.
        rotaries: the model's rotary embeddings; None: one, by `read_rotary`.
        rotary_of_layer: index of `rotaries` per layer, None: not rotated; None: 0 for all.
        scale: of the scores; None: head_dim ** -0.5.
        softcap: of the scores.
        mlp: None: a gated one.
        experts: by the number of a layer, the mixture of experts that it has in place of `mlp`.
        head_norms: whether each query and key head is normalised.
        width_norms: whether all query heads are normalised together, and all key heads.
        sinks: whether each head has an attention sink.
        qkv_bias, output_bias, mlp_bias: whether these projections have biases.
        activation_field, activation: what the family calls the activation, and its default.
        tied_embeddings: the family's default of tie_word_embeddings.
    """
    heads = read_heads(config, num_kv_heads, head_dim)
    head_dim = heads.head_dim
    num_layers = read_num_layers(config)
    if head_dim % 2:
        raise ModelError(f"{config.where}: rotary embedding needs an even head_dim, not {head_dim}")
    positions = config.count("max_position_embeddings")
    if rotaries is None:
        rotary = read_rotary(config, head_dim, positions, partial_rotary, rope_theta)
        rotaries = [replace(rotary, interleaved=interleaved_rotary)]
    if norm is None:
        eps = config.number("rms_norm_eps", norm_eps)
        norm = NormConfig("rms", heads.hidden_size, eps)
    experts = experts or {}
    if mlp is None and len(experts) < num_layers:
        mlp = MLPConfig(
            kind="gated",
            hidden_size=heads.hidden_size,
            intermediate_size=config.count("intermediate_size"),
            activation=config.choice(activation_field, GATED_ACTIVATIONS, activation),
            bias=mlp_bias,
        )
    mlps = [experts.get(i, mlp) for i in range(num_layers)]
    layers = [
        LayerConfig(
            attention=AttentionConfig(
                hidden_size=heads.hidden_size,
                num_heads=heads.num_heads,
                num_kv_heads=heads.num_kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5 if scale is None else scale,
                window=window,
                rotary=rotary,
                softcap=softcap,
                head_norm=replace(norm, size=head_dim) if head_norms else None,
                width_norm=norm if width_norms else None,
                sinks=sinks,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
            ),
            mlp=mlp,
            norm=norm,
            norm_placement=norm_placement,
        )
        for window, rotary, mlp in zip(
            windows or [None] * num_layers,
            rotary_of_layer or [0] * num_layers,
            mlps,
            strict=True,
        )
        if mlp is not None
    ]
    return ModelDescription(
        vocab_size=config.count("vocab_size"),
        hidden_size=heads.hidden_size,
        max_model_len=max([positions, *(extended_positions(config, each) for each in rotaries)]),
        layers=tuple(layers),
        rotaries=tuple(rotaries),
        final_norm=norm,
        tied_embeddings=config.flag("tie_word_embeddings", tied_embeddings),
    )


def extended_positions(config: Fields, rotary: RotaryConfig) -> int:
    """How many positions YaRN extends the context to."""
    extended = int(rotary.factor * rotary.original_max_positions) if rotary.kind == "yarn" else 0
    if extended > MAX_COUNT:
        raise ModelError(f"{config.where}: the extended context has {extended:.3g} positions")
    return extended


def count_experts(config: Fields, name: str, default: int) -> int:
    """How many experts a layer has.

    Raises ModelError if there are more than MAX_EXPERTS.
    """
    return config.count(
        name, default, MAX_EXPERTS, "kernels hold a token's scores of all experts in registers"
    )


def read_experts(
    config: Fields,
    *,
    num_experts: int,
    top_k: int,
    intermediate_size: int,
    activation: Activation | None = None,
    bias: bool = False,
    alternating: bool = False,
    transposed: bool = False,
    shared: MLPConfig | None = None,
    shared_gate: bool = False,
    router_bias: bool = False,
    **routing: Any,
) -> ExpertsConfig:
    """A layer's mixture of experts.

    Args:
        config: config.json.
        num_experts, top_k, routing: see RoutingConfig, which checks them.
        activation: None: hidden_act, by default silu.
        router_bias: whether the router's logits have one.
        intermediate_size, bias, alternating, transposed, shared, shared_gate: see ExpertsConfig.
    """
    if activation is None:
        usual: Activation = config.choice("hidden_act", GATED_ACTIVATIONS, "silu")
    else:
        usual = activation
    try:
        rule = RoutingConfig(num_experts=num_experts, top_k=top_k, bias=router_bias, **routing)
    except ValueError as error:
        raise ModelError(f"{config.where}: {error}") from error
    return ExpertsConfig(
        hidden_size=config.count("hidden_size"),
        intermediate_size=intermediate_size,
        activation=usual,
        routing=rule,
        bias=bias,
        alternating=alternating,
        transposed=transposed,
        shared=shared,
        shared_gate=shared_gate,
    )


def gated_mlp(config: Fields, intermediate_size: int) -> MLPConfig:
    """A gated MLP without biases."""
    return MLPConfig(
        kind="gated",
        hidden_size=config.count("hidden_size"),
        intermediate_size=intermediate_size,
        activation=config.choice("hidden_act", GATED_ACTIVATIONS, "silu"),
    )


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """By how much a score falls per position of distance, for each head (arXiv:2108.12409).

    For n heads, a power of 2, 2^(-8 i / n), i = 1 .. n. Otherwise those of the power of 2 below,
    and of twice as many heads every other one.
    """
    num = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / num) for i in range(num)]
    slopes += [2 ** (-4 * (2 * i + 1) / num) for i in range(num_heads - num)]
    return tuple(slopes)
