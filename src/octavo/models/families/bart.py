"""BART (arXiv:1910.13461): learned positions, norms after each block and of the embeddings."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.layers.config import EmbeddingScale, MLPConfig, NormConfig, PositionTable
from octavo.models.config import EncoderConfig, LayerConfig, ModelDescription
from octavo.models.families import opt
from octavo.models.families.common import MAX_LAYERS, PLAIN_ACTIVATIONS, plain_attention
from octavo.models.family import Family
from octavo.models.weight_names import WeightNames

POSITION_OFFSET = 2  # the table of positions begins with two rows that are never used
NORM_EPS = 1e-5  # torch's default, which transformers' BART uses

WEIGHTS = WeightNames(
    model={
        "embedding": ("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
        "encoder.positions": "encoder.embed_positions",
        "encoder.embedding_norm": "encoder.layernorm_embedding",
        "positions": "decoder.embed_positions",
        "embedding_norm": "decoder.layernorm_embedding",
        "head.linear": "lm_head",
        "head.logits_bias": "final_logits_bias",
    },
    encoder_layers="encoder.layers",
    encoder_layer=opt.WEIGHTS.layer,
    layers="decoder.layers",
    layer={
        **opt.WEIGHTS.layer,
        "cross_attention.query": "encoder_attn.q_proj",
        "cross_attention.key_value": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
        "cross_attention.output": "encoder_attn.out_proj",
        "cross_norm": "encoder_attn_layer_norm",
    },
    prefixes=("model.",),
    ignored=(r"(encoder|decoder)\.version",),  # of the file format of the original training code
)


def read(config: Fields) -> ModelDescription:
    """Describe a BartForConditionalGeneration by its config.json."""
    for name, harmless in (
        ("normalize_before", False),
        ("add_final_layer_norm", False),
        ("normalize_embedding", True),
        ("static_position_embeddings", False),
    ):
        config.refuse(name, harmless)  # of its relatives: mBART, Pegasus
    positions = config.count("max_position_embeddings", 1024)
    table = PositionTable(positions + POSITION_OFFSET, POSITION_OFFSET)
    hidden = config.count(config.either("d_model", "hidden_size"), 1024)
    return read_bart(config, 50265, table, positions, NormConfig("layer", hidden, NORM_EPS))


def read_bart(
    config: Fields,
    vocab_size: int,
    positions: PositionTable,
    max_tokens: int,
    embedding_norm: NormConfig | None,
) -> ModelDescription:
    """Encoder-decoder models with norms after each block and a bias of the logits.

    Args:
        config: config.json.
        vocab_size: the family's default.
        positions: of encoder and decoder.
        max_tokens: that there are positions for.
        embedding_norm: of encoder and decoder; None: embeddings are not normalised.
    """
    hidden = config.count(config.either("d_model", "hidden_size"), 1024)
    encoder, decoder = (_read_layers(config, side, hidden) for side in ("encoder", "decoder"))
    cross = replace(decoder[0].attention, reads_encoder=True)
    return ModelDescription(
        vocab_size=config.count("vocab_size", vocab_size),
        hidden_size=hidden,
        max_model_len=max_tokens,
        encoder=EncoderConfig(
            max_model_len=max_tokens,
            layers=encoder,
            positions=positions,
            embedding_norm=embedding_norm,
        ),
        layers=tuple(replace(layer, cross_attention=cross) for layer in decoder),
        positions=positions,
        embedding_scale=(
            EmbeddingScale(hidden**0.5) if config.flag("scale_embedding", False) else None
        ),
        embedding_norm=embedding_norm,
        final_norm=None,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        logits_bias=True,
    )


def _read_layers(config: Fields, side: str, hidden: int) -> tuple[LayerConfig, ...]:
    """The layers of the encoder or of the decoder, all alike."""
    layers_field, heads_field = f"{side}_layers", f"{side}_attention_heads"
    if side == "encoder":  # whose fields have other names, too
        layers_field = config.either(layers_field, "num_hidden_layers")
        heads_field = config.either(heads_field, "num_attention_heads")
    num_layers = config.count(layers_field, 12, MAX_LAYERS)
    heads = config.count(heads_field, 16)
    layer = LayerConfig(
        attention=plain_attention(config, hidden, heads, heads_field),
        mlp=MLPConfig(
            kind="plain",
            hidden_size=hidden,
            intermediate_size=config.count(f"{side}_ffn_dim", 4096),
            activation=config.choice("activation_function", PLAIN_ACTIVATIONS, "gelu"),
            bias=True,
        ),
        norm=NormConfig("layer", hidden, NORM_EPS),
        norm_placement="post",
    )
    return (layer,) * num_layers


FAMILY = Family(
    model_type="bart",
    architecture="BartForConditionalGeneration",
    other_names=("BartModel",),  # of the pretrained ones, which have no bias of the logits
    optional_logits_bias="final_logits_bias",
    note="BART base and large and fine-tunes, DistilBART; encoder and decoder",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(2,),
    decoder_start_token_id=2,
    forced_eos_token_id=2,
)
