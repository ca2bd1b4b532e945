"""What the readers of several families share.

Field names are those of transformers' configuration classes, in their old and new (version 5)
spellings.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.errors import ModelError
from octavo.json_fields import MAX_COUNT, Fields
from octavo.layers.config import Activation, AttentionConfig, MLPConfig, NormConfig
from octavo.models.config import LayerConfig, ModelDescription
from octavo.models.rope_scaling import read_rotary

MAX_LAYERS = 10_000  # a hundred times today's deepest; layers are built before memory is counted
# Names in config.json, and ours.
GATED_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu"}
PLAIN_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def read_num_layers(config: Fields) -> int:
    """num_hidden_layers, within MAX_LAYERS."""
    return config.count("num_hidden_layers", limit=MAX_LAYERS)


def divided_head_dim(config: Fields, hidden_size: int, num_heads: int) -> int:
    """The size of a head in a family that has no head_dim field."""
    if hidden_size % num_heads:
        raise ModelError(
            f"{config.where}: a hidden size of {hidden_size} does not divide into {num_heads} heads"
        )
    return hidden_size // num_heads


def read_window(config: Fields) -> int | None:
    """sliding_window, where the family's default is 4,096 and a null turns it off."""
    if config.values.get("sliding_window", 4096) is None:
        return None
    return config.count("sliding_window", 4096)


def check_layer_types(config: Fields, window: int | None) -> None:
    """All layers must be of the kind that the family's window, or its absence, makes them."""
    expected = "full_attention" if window is None else "sliding_attention"
    if set(config.names("layer_types", [expected])) != {expected}:
        raise config.error("layer_types", f"every layer of this family is {expected}")


def read_gated_decoder(
    config: Fields,
    *,
    windows: Sequence[int | None] | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    partial_rotary: bool = False,
    head_norms: bool = False,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
) -> ModelDescription:
    """What Llama and the families after it share: RMS norms, rotary positions, gated MLPs.

    Args:
        config: config.json.
        windows: one per layer; None: no layer has a window.
        num_kv_heads: the family's default; None: as many as query heads.
        head_dim: the family's default; None: hidden_size / num_attention_heads.
        norm_eps: the family's default.
        partial_rotary: whether the family may rotate a part of each head.
        head_norms: whether query and key heads are normalised.
        qkv_bias, output_bias, mlp_bias: whether these projections have biases.
    """
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    num_layers = read_num_layers(config)
    if num_kv_heads is None or "num_key_value_heads" in config.values:  # a null also means heads
        num_kv_heads = heads
    kv_heads = config.count("num_key_value_heads", num_kv_heads)
    if heads % kv_heads:
        raise ModelError(
            f"{config.where}: num_key_value_heads is {kv_heads}; it must divide "
            f"num_attention_heads ({heads})"
        )
    if config.get("head_dim", head_dim) is None:
        head_dim = divided_head_dim(config, hidden, heads)
    else:
        head_dim = config.count("head_dim", head_dim)
    if head_dim % 2:
        raise ModelError(f"{config.where}: rotary embedding needs an even head_dim, not {head_dim}")
    positions = config.count("max_position_embeddings")
    rotary = read_rotary(config, head_dim, positions, partial_rotary)
    extended = int(rotary.factor * rotary.original_max_positions) if rotary.kind == "yarn" else 0
    if extended > MAX_COUNT:
        raise ModelError(f"{config.where}: the extended context has {extended:.3g} positions")
    eps = config.number("rms_norm_eps", norm_eps)
    norm = NormConfig("rms", hidden, eps)
    mlp = MLPConfig(
        kind="gated",
        hidden_size=hidden,
        intermediate_size=config.count("intermediate_size"),
        activation=config.choice("hidden_act", GATED_ACTIVATIONS, "silu"),
        bias=mlp_bias,
    )
    layers = [
        LayerConfig(
            attention=AttentionConfig(
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                window=window,
                rotary=0,
                head_norm=NormConfig("rms", head_dim, eps) if head_norms else None,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
            ),
            mlp=mlp,
            norm=norm,
        )
        for window in windows or [None] * num_layers
    ]
    return ModelDescription(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden,
        max_model_len=max(positions, extended),
        layers=tuple(layers),
        rotaries=(rotary,),
        final_norm=norm,
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )
