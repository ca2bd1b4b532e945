"""What a family of models consists of. One module in families/ describes one family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.weight_names import WeightNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of config.json."""

    model_type: str
    architecture: str  # the class in config.json that octavo serves
    other_names: tuple[str, ...] = ()  # that published files have for this class
    note: str  # what `octavo models` says of the variants that are served
    read: Callable[[Fields], ModelDescription]  # from config.json; raises ModelError
    weights: WeightNames
    text_config: str | None = None  # the object in config.json that `read` takes; None: all of it
    options: frozenset[str] = frozenset()  # of registry.UNSERVED, those that `read` honours
    eos_token_ids: tuple[int, ...] = ()  # where config.json does not mention them
    # The head's tensor, without prefix, in a family where it may be there although
    # tie_word_embeddings says that the head shares the table of the embedding.
    own_head: str | None = None
    # The tensor of the logits' bias, in a family whose files may have none.
    optional_logits_bias: str | None = None
    decoder_start_token_id: int | None = None  # where neither file mentions it
    # What ends outputs of max_tokens where there is no generation_config.json, and config.json does
    # not mention it.
    forced_eos_token_id: int | None = None
    model_class: str = "octavo.models.decoder:Decoder"  # a CausalLM; its module is imported late
