"""Gemma 4 for text (Google, 2026): norms around each block, of heads and of values; windows in five
of six layers, whose heads have another shape. Small models have a vector of each token for each
layer, and layers that read the KV of others; large ones experts beside a dense block, or keys that
are values, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from octavo.errors import ModelError, UnservedOption
from octavo.json_fields import Fields
from octavo.layers.config import (
    AttentionConfig,
    EmbeddingScale,
    ExpertsConfig,
    LayerInputConfig,
    MLPConfig,
    NormConfig,
    TokenInputsConfig,
)
from octavo.models.config import LayerConfig, ModelDescription
from octavo.models.families import gemma2
from octavo.models.families.common import (
    GATED_ACTIVATIONS,
    Heads,
    count_experts,
    extended_positions,
    periodic_layer_types,
    read_experts,
    read_heads,
    read_num_layers,
    read_window,
    read_windows,
)
from octavo.models.family import Family
from octavo.models.rope_scaling import read_rotaries

WEIGHTS = replace(
    gemma2.WEIGHTS,
    model={
        **gemma2.WEIGHTS.model,
        "token_inputs.embedding": "embed_tokens_per_layer",
        "token_inputs.projection": "per_layer_model_projection",
        "token_inputs.norm": "per_layer_projection_norm",
    },
    layer={
        **gemma2.WEIGHTS.layer,
        "attention.value_norm": "self_attn.v_norm",
        "mlp.router": ("router.proj", "router.per_expert_scale"),
        "mlp.experts": ("experts.gate_up_proj", "experts.down_proj"),
        "mlp.shared.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.shared.down": "mlp.down_proj",
        "router_norm": "router.scale",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_branch_norm": "post_feedforward_layernorm_2",
        "shared_branch_norm": "post_feedforward_layernorm_1",
        "layer_input.gate": "per_layer_input_gate",
        "layer_input.output": "per_layer_projection",
        "input_norm": "post_per_layer_input_norm",
        "stream_scale": "layer_scalar",
    },
    # Of layers that read the KV of others, published files have them all the same.
    ignored=(r"layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight",),
)
# transformers' defaults, on which files rely.
DEFAULTS = {
    **{"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216},
    **{"num_hidden_layers": 30, "num_attention_heads": 8, "max_position_embeddings": 131072},
}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        **{"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
# In the order of the description's rotary embeddings.
ROPE_THETAS = dict.fromkeys(("full_attention", "sliding_attention"), ("rope_theta", 1e4))


def read(config: Fields) -> ModelDescription:
    """Describe a Gemma4ForCausalLM by its config.json."""
    config = config.with_defaults(DEFAULTS)
    # Images' tokens see each other, in both directions; texts are causal.
    config.refuse("use_bidirectional_attention", "vision")
    kinds, window = _read_kinds(config), read_window(config, 512)
    heads = _read_heads(config, kinds)
    sources = _read_sources(config, kinds)
    hidden = config.count("hidden_size")
    norm = NormConfig("rms", hidden, config.number("rms_norm_eps", 1e-6))
    token_inputs = _read_token_inputs(config, hidden, len(kinds), norm.eps)
    positions = config.count("max_position_embeddings")
    rotaries = _read_rotaries(config, kinds, {kind: heads[kind].head_dim for kind in heads})
    are_values_keys = config.flag("attention_k_eq_v", False)
    bias = config.flag("attention_bias", False)
    activation = config.choice("hidden_activation", GATED_ACTIVATIONS, "gelu_pytorch_tanh")
    layer_input = None
    if token_inputs is not None:
        layer_input = LayerInputConfig(
            hidden_size=hidden, size=token_inputs.size, activation=activation
        )
    mlps = [_read_mlp(config, has_source) for has_source in (False, True)]
    layers = []
    for kind, source in zip(kinds, sources, strict=True):
        is_full, shape = kind == "full_attention", heads[kind]
        num_projections: Literal[0, 1, 2] = 1 if is_full and are_values_keys else 2
        of_head = replace(norm, size=shape.head_dim)
        mlp = mlps[source is not None]
        layers.append(
            LayerConfig(
                attention=AttentionConfig(
                    hidden_size=hidden,
                    num_heads=shape.num_heads,
                    num_kv_heads=shape.num_kv_heads,
                    head_dim=shape.head_dim,
                    scale=1.0,
                    window=None if is_full else window,
                    rotary=list(ROPE_THETAS).index(kind),
                    num_kv_projections=num_projections if source is None else 0,
                    head_norm=of_head,
                    value_norm=replace(of_head, affine=False),
                    qkv_bias=bias,
                    output_bias=bias,
                ),
                mlp=mlp,
                norm=norm,
                norm_placement="apart" if isinstance(mlp, ExpertsConfig) else "around",
                kv_source=source,
                layer_input=layer_input,
                scales_stream=True,
            )
        )
    return ModelDescription(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden,
        max_model_len=max(positions, *(extended_positions(config, each) for each in rotaries)),
        layers=tuple(layers),
        rotaries=rotaries,
        final_norm=norm,
        embedding_scale=EmbeddingScale(hidden**0.5, is_rounded=True),
        token_inputs=token_inputs,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        logits_softcap=gemma2.read_softcap(config, "final_logit_softcapping"),
    )


def _read_kinds(config: Fields) -> list[str]:
    """The kind of each layer, of LAYER_TYPES; the last one has full attention, as in transformers,
    whatever the file says."""
    default = periodic_layer_types(read_num_layers(config), 6)
    read_windows(config, default, read_window(config, 512))  # which checks them
    *kinds, _ = config.names("layer_types", default)
    return [*kinds, "full_attention"]


def _read_heads(config: Fields, kinds: list[str]) -> dict[str, Heads]:
    """The shape of attention in each kind of layer."""
    usual = read_heads(config, num_kv_heads=4, head_dim=256)
    found = dict.fromkeys(("full_attention", "sliding_attention"), usual)
    if config.get("per_layer_config", None) is not None:
        found |= _read_own_heads(config, kinds, usual)
    else:
        num_kv_heads = usual.num_kv_heads
        if config.flag("attention_k_eq_v", False):
            num_kv_heads = config.count("num_global_key_value_heads", num_kv_heads)
        found["full_attention"] = replace(
            usual, num_kv_heads=num_kv_heads, head_dim=config.count("global_head_dim", 512)
        )
    for kind, heads in found.items():
        if heads.num_heads % heads.num_kv_heads:
            raise ModelError(
                f"{config.where}: layers of {kind} have {heads.num_kv_heads} KV heads, whose "
                f"number must divide num_attention_heads ({heads.num_heads})"
            )
        if heads.head_dim % 2:
            raise ModelError(
                f"{config.where}: layers of {kind} have heads of {heads.head_dim} elements; rotary "
                "embedding needs an even number"
            )
    return found


def _read_own_heads(config: Fields, kinds: list[str], usual: Heads) -> dict[str, Heads]:
    """By kind of layer, what per_layer_config says of each of its layers: transformers 5 writes
    so what it has read from global_head_dim and num_global_key_value_heads."""
    name = "per_layer_config"
    by_layer = config.part(name)
    if not by_layer.values.keys() <= set(map(str, range(len(kinds)))):
        raise config.error(name, f"it must have numbers of layers, below {len(kinds)}, as its keys")
    found: dict[str, Heads] = {}
    for number, kind in enumerate(kinds):
        own = by_layer.part(str(number), {})
        if not own.values.keys() <= {"head_dim", "num_key_value_heads"}:
            raise UnservedOption(
                str(by_layer.error(str(number), "octavo knows head_dim and num_key_value_heads"))
            )
        heads = replace(
            usual,
            head_dim=own.count("head_dim", usual.head_dim),
            num_kv_heads=own.count("num_key_value_heads", usual.num_kv_heads),
        )
        if found.setdefault(kind, heads) != heads:
            raise UnservedOption(
                str(by_layer.error(str(number), f"layers of {kind} before it have other heads"))
            )
    return found


def _read_sources(config: Fields, kinds: list[str]) -> list[int | None]:
    """The layer whose KV each layer reads: of the last num_kv_shared_layers, that of the last layer
    of its kind before them; None: its own."""
    name = "num_kv_shared_layers"
    num_shared = _count_or_zero(config, name, 0)
    first = len(kinds) - num_shared
    if not set(kinds) <= set(kinds[: max(0, first)]):
        raise config.error(
            name,
            f"of {len(kinds)} layers, those before them must have every kind in layer_types "
            f"({', '.join(sorted(set(kinds)))})",
        )
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    return [None] * first + [last[kind] for kind in kinds[first:]]


def _count_or_zero(config: Fields, name: str, default: int) -> int:
    value = config.get(name, default)
    return 0 if type(value) is int and value == 0 else config.count(name, default)


def _read_rotaries(config: Fields, kinds: list[str], head_dims: dict[str, int]) -> Any:
    ropes = config.get("rope_parameters", ROPES)
    if isinstance(ropes, dict) and any(ropes.get(kind) is None for kind in set(kinds)):
        raise config.error(
            "rope_parameters", f"it must have each of {', '.join(sorted(set(kinds)))}"
        )
    config = Fields(config.where, config.values | {"rope_parameters": ropes})
    positions = config.count("max_position_embeddings")
    return read_rotaries(config, head_dims, positions, ROPE_THETAS)


def _read_token_inputs(
    config: Fields, hidden: int, num_layers: int, eps: float
) -> TokenInputsConfig | None:
    """transformers divides the projection by the root of its inputs' size before it is normed, and
    the sum with the table's row, which it scales by the root of its size, by that of 2. The first
    changes nothing but what the epsilon is added to."""
    size = _count_or_zero(config, "hidden_size_per_layer_input", 256)
    if size == 0:
        return None
    vocab_size, num_rows = config.count("vocab_size"), "vocab_size_per_layer_input"
    if config.count(num_rows, 262144) < vocab_size:
        raise config.error(num_rows, f"it must be at least vocab_size ({vocab_size})")
    return TokenInputsConfig(
        vocab_size=config.count(num_rows, 262144),
        num_layers=num_layers,
        size=size,
        hidden_size=hidden,
        scale=EmbeddingScale((size / 2) ** 0.5),
        norm=NormConfig("rms", size, eps * hidden, multiplier=0.5**0.5),
    )


def _read_mlp(config: Fields, has_source: bool) -> MLPConfig | ExpertsConfig:
    """A layer's feed-forward block; has_source: whether it reads another layer's KV."""
    is_wide = has_source and config.flag("use_double_wide_mlp", False)
    activation = config.choice("hidden_activation", GATED_ACTIVATIONS, "gelu_pytorch_tanh")
    dense = MLPConfig(
        kind="gated",
        hidden_size=config.count("hidden_size"),
        intermediate_size=config.count("intermediate_size") * (2 if is_wide else 1),
        activation=activation,
    )
    if not config.flag("enable_moe_block", False):
        return dense
    return read_experts(
        config,
        num_experts=count_experts(config, "num_experts", config.get("num_experts")),
        top_k=config.count("top_k_experts"),
        intermediate_size=config.count("moe_intermediate_size"),
        activation=activation,
        shared=dense,
        expert_scales=True,
    )


FAMILY = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    note="the text part of Gemma 4, by itself",
    read=read,
    weights=WEIGHTS,
    options=frozenset(
        {"final_logit_softcapping", "per_layer_config", "use_bidirectional_attention"}
    ),
    eos_token_ids=(1,),
)
