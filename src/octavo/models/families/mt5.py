"""mT5 (arXiv:2010.11934): T5 1.1 for 101 languages."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families.t5 import OWN_HEAD, WEIGHTS, read_t5
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """Describe an MT5ForConditionalGeneration by its config.json."""
    config = config.with_defaults(
        {
            "vocab_size": 250112,
            "d_ff": 1024,
            config.either("num_layers", "num_hidden_layers"): 8,
            config.either("num_heads", "num_attention_heads"): 6,
        }
    ).with_defaults({"feed_forward_proj": "gated-gelu"})
    return read_t5(config, config.flag("tie_word_embeddings", True), is_scaled=False)


FAMILY = Family(
    model_type="mt5",
    architecture="MT5ForConditionalGeneration",
    note="mT5, 300M to 13B; encoder and decoder",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(1,),
    own_head=OWN_HEAD,
    decoder_start_token_id=0,
)
