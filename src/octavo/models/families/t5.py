"""T5 (arXiv:1910.10683), T5 1.1 and Flan-T5: relative position biases, scores without a scale."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import ModelError, shown
from octavo.json_fields import Fields
from octavo.layers.config import (
    Activation,
    AttentionConfig,
    MLPConfig,
    MLPKind,
    NormConfig,
    RelativeBiasConfig,
)
from octavo.models.config import EncoderConfig, LayerConfig, ModelDescription
from octavo.models.families.common import GATED_ACTIVATIONS, MAX_LAYERS, PLAIN_ACTIVATIONS
from octavo.models.family import Family
from octavo.models.weight_names import WeightNames

# Nothing in the architecture limits the length; this many tokens of either side are served.
MAX_TOKENS = 32_768
MAX_BUCKETS, MAX_DISTANCE = 4096, 1 << 20  # a hundred and eight thousand times those of T5
FEED_FORWARDS: dict[str, tuple[MLPKind, Activation]] = {
    **{name: ("plain", activation) for name, activation in PLAIN_ACTIVATIONS.items()},
    **{f"gated-{name}": ("gated", activation) for name, activation in GATED_ACTIVATIONS.items()},
    "gated-gelu": ("gated", "gelu_tanh"),  # the exact one was never meant
}
# In files of T5 1.1 that transformers 5 has saved, tie_word_embeddings is true beside such a head.
OWN_HEAD = "lm_head.weight"
_ATTENTION = ("q", "k", "v")

WEIGHTS = WeightNames(
    model={
        "embedding": ("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
        "encoder.relative_biases": (
            "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias"
        ),
        "encoder.norm": "encoder.final_layer_norm",
        "relative_biases": "decoder.block.{}.layer.0.SelfAttention.relative_attention_bias",
        "norm": "decoder.final_layer_norm",
        "head.linear": "lm_head",
    },
    encoder_layers="encoder.block",
    encoder_layer={
        "attention_norm": "layer.0.layer_norm",
        "attention.qkv": tuple(f"layer.0.SelfAttention.{name}" for name in _ATTENTION),
        "attention.output": "layer.0.SelfAttention.o",
        "mlp_norm": "layer.1.layer_norm",
        "mlp.up": ("layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1"),
        "mlp.down": "layer.1.DenseReluDense.wo",
    },
    layers="decoder.block",
    layer={
        "attention_norm": "layer.0.layer_norm",
        "attention.qkv": tuple(f"layer.0.SelfAttention.{name}" for name in _ATTENTION),
        "attention.output": "layer.0.SelfAttention.o",
        "cross_norm": "layer.1.layer_norm",
        "cross_attention.query": "layer.1.EncDecAttention.q",
        "cross_attention.key_value": ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
        "cross_attention.output": "layer.1.EncDecAttention.o",
        "mlp_norm": "layer.2.layer_norm",
        "mlp.up": ("layer.2.DenseReluDense.wi_0", "layer.2.DenseReluDense.wi_1"),
        "mlp.down": "layer.2.DenseReluDense.wo",
    },
    prefixes=(),
    aliases={"wi": "wi_0"},  # of blocks without a gate
    # The first checkpoints have a bias that their own code never used.
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)


def read(config: Fields) -> ModelDescription:
    """Describe a T5ForConditionalGeneration by its config.json."""
    # Files of the first T5 say nothing or true, and mean both: one table, and scaled logits.
    tied = config.flag("tie_word_embeddings", True)
    return read_t5(config, tied, is_scaled=config.flag("scale_decoder_outputs", tied))


def read_t5(config: Fields, tied: bool, is_scaled: bool) -> ModelDescription:
    """The models of this architecture.

    Args:
        config: config.json.
        tied: whether the head shares the table of the token embedding.
        is_scaled: whether logits are multiplied by d_model ** -0.5.
    """
    hidden = config.count(config.either("d_model", "hidden_size"), 512)
    heads = config.count(config.either("num_heads", "num_attention_heads"), 8)
    num_layers = config.count(config.either("num_layers", "num_hidden_layers"), 6, MAX_LAYERS)
    kind, activation = config.choice("feed_forward_proj", FEED_FORWARDS, "relu")
    _check_feed_forward(config, kind)
    attention = AttentionConfig(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=config.count(config.either("d_kv", "head_dim"), 64),
        scale=1.0,
        relative_bias=0,
    )
    norm = NormConfig("rms", hidden, config.number("layer_norm_epsilon", 1e-6))
    layer = LayerConfig(
        attention=attention,
        mlp=MLPConfig(
            kind=kind,
            hidden_size=hidden,
            intermediate_size=config.count("d_ff", 2048),
            activation=activation,
        ),
        norm=norm,
    )
    cross = replace(attention, relative_bias=None, reads_encoder=True)
    bias = _read_bias(config, heads)
    return ModelDescription(
        vocab_size=config.count("vocab_size", 32128),
        hidden_size=hidden,
        max_model_len=MAX_TOKENS,
        encoder=EncoderConfig(
            max_model_len=MAX_TOKENS,
            layers=(layer,) * num_layers,
            relative_biases=(replace(bias, bidirectional=True),),
            final_norm=norm,
        ),
        layers=(replace(layer, cross_attention=cross),)
        * config.count("num_decoder_layers", num_layers, MAX_LAYERS),
        relative_biases=(bias,),
        final_norm=replace(norm, multiplier=hidden**-0.5) if is_scaled else norm,
        tied_embeddings=tied,
    )


def _check_feed_forward(config: Fields, kind: MLPKind) -> None:
    """Raise ModelError if the two fields that follow from feed_forward_proj say something else."""
    name = config.get("feed_forward_proj", "relu")
    activation = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    for field, value in (("is_gated_act", kind == "gated"), ("dense_act_fn", activation)):
        if config.get(field, value) != value:
            raise config.error(field, f"feed_forward_proj ({name}) means {shown(value)}")


def _read_bias(config: Fields, num_heads: int) -> RelativeBiasConfig:
    """The decoder's relative biases. Raises ModelError if its buckets do not reach the distance."""
    num_buckets = config.count("relative_attention_num_buckets", 32, MAX_BUCKETS)
    max_distance = config.count("relative_attention_max_distance", 128, MAX_DISTANCE)
    if num_buckets % 4 or 2 * max_distance <= num_buckets:
        raise ModelError(
            f"{config.where}: relative_attention_num_buckets is {num_buckets} and "
            f"relative_attention_max_distance {max_distance}; the first must be a multiple of 4, "
            "and less than twice the second"
        )
    return RelativeBiasConfig(num_heads, num_buckets, max_distance)


FAMILY = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    other_names=("T5WithLMHeadModel",),  # of the first files, from before the class was renamed
    note="T5, T5 1.1, Flan-T5, 60M to 11B; encoder and decoder",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(1,),
    own_head=OWN_HEAD,
    decoder_start_token_id=0,
)
