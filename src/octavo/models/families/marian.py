"""Marian (arXiv:1804.00344), as OPUS-MT translates: BART's layers with sinusoidal positions."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.layers.config import PositionTable
from octavo.models.config import ModelDescription
from octavo.models.families import bart
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """Describe a MarianMTModel by its config.json."""
    for name, harmless in (
        ("normalize_before", False),
        ("add_final_layer_norm", False),
        ("normalize_embedding", False),
        ("share_encoder_decoder_embeddings", True),
        ("static_position_embeddings", True),
    ):
        config.refuse(name, harmless)
    vocab_size = config.count("vocab_size", 58101)
    config.refuse("decoder_vocab_size", vocab_size)
    positions = config.count("max_position_embeddings", 1024)
    table = PositionTable(positions, kind="sinusoidal")
    return bart.read_bart(config, vocab_size, table, positions, embedding_norm=None)


FAMILY = Family(
    model_type="marian",
    architecture="MarianMTModel",
    note="Marian translation models (OPUS-MT) whose languages share a vocabulary",
    read=read,
    # Older files have the table of positions, which follows from the config.
    weights=replace(bart.WEIGHTS, ignored=(r"(encoder|decoder)\.embed_positions\.weight",)),
    eos_token_ids=(0,),
    decoder_start_token_id=58100,
    forced_eos_token_id=0,
)
