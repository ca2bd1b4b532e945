"""What a model's files say about its output, beside how to sample.

Some models, above all those with an encoder, are trained for one task and come with the rules for
it: tokens that must come first or last, words that must not come. transformers applies them to
every request, and so does octavo; it refuses a model with rules that it does not have. Lengths and
the search itself (`max_length`, `min_length`, `num_beams`, `length_penalty`, `early_stopping`) are
each request's own. Imports no torch.
"""

from __future__ import annotations

from octavo.errors import ModelError
from octavo.json_fields import Fields
from octavo.models.config import DecodingRules

# Rules that change the output, each with the value that turns it off.
UNSERVED = {
    "forced_decoder_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "force_words_ids": None,
    "stop_strings": None,
    "token_healing": False,
    "watermarking_config": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "remove_invalid_values": False,
    "guidance_scale": 1.0,
    "dola_layers": None,
}
# Lists among them, which are no rule when they are empty.
_LISTS = {"forced_decoder_ids", "begin_suppress_tokens", "stop_strings"}
# The same of models that ask for sampling.
UNSERVED_OF_SAMPLING = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
}
# The same of models that do not: contrastive search.
UNSERVED_OF_GREEDY = {"penalty_alpha": 0.0}
MAX_BAD_WORDS = 10_000


def read_decoding_rules(config: Fields, vocab_size: int) -> DecodingRules:
    """From generation_config.json, or from config.json where there is none.

    Raises:
        ModelError: a rule that octavo does not have, or one that makes no sense; names it.
    """
    samples = config.flag("do_sample", False)
    of_search = UNSERVED_OF_SAMPLING if samples else UNSERVED_OF_GREEDY
    for name, harmless in (UNSERVED | of_search).items():
        if name in _LISTS and config.get(name, None) == []:
            continue
        config.refuse(name, harmless, ModelError)  # of models through transformers, too
    size = 0
    if config.get("no_repeat_ngram_size", 0) != 0:
        size = config.count("no_repeat_ngram_size", limit=1 << 20)
    bad_words, suppressed = _bad_words(config, vocab_size), _suppressed(config, vocab_size)
    forbidden = {word[0] for word in bad_words + suppressed if len(word) == 1}
    if len(forbidden) == vocab_size:
        name = "suppress_tokens" if suppressed else "bad_words_ids"
        raise config.error(name, f"it forbids all {vocab_size} tokens of the vocabulary")
    first = _forced(config, "forced_bos_token_id", vocab_size, suppressed)
    if len(first) > 1:
        raise config.error("forced_bos_token_id", "octavo forces one token at the beginning")
    return DecodingRules(
        next(iter(first), None),
        _forced(config, "forced_eos_token_id", vocab_size, suppressed),
        size,
        bad_words + suppressed,
        config.flag("renormalize_logits", False),
    )


def _forced(
    config: Fields, name: str, vocab_size: int, suppressed: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    """The tokens of which one must come, whether it is a bad word or not, but those that are
    suppressed. If all are, there is no token to draw; transformers refuses that, too."""
    token_ids = config.token_ids(name)
    if any(not 0 <= token_id < vocab_size for token_id in token_ids):
        raise config.error(name, f"it must be an id below {vocab_size}, or several")
    left = tuple(token_id for token_id in token_ids if (token_id,) not in suppressed)
    if token_ids and not left:
        raise config.error(name, "but suppress_tokens has it, too, so that no token could come")
    return left


def _suppressed(config: Fields, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """suppress_tokens, as words of one token; transformers takes no number alone, either."""
    if not isinstance(config.get("suppress_tokens", []), list):
        raise config.error("suppress_tokens", "it must be a list of token ids")
    token_ids = config.token_ids("suppress_tokens")
    if any(not 0 <= token_id < vocab_size for token_id in token_ids):
        raise config.error("suppress_tokens", f"each must be an id below {vocab_size}")
    return tuple((token_id,) for token_id in token_ids)


def _bad_words(config: Fields, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """bad_words_ids; as in transformers, the end token alone is no bad word, and a list of none is
    refused."""
    words = config.get("bad_words_ids", None)
    if words is None:
        return ()
    if not isinstance(words, list) or not 1 <= len(words) <= MAX_BAD_WORDS:
        raise config.error("bad_words_ids", f"it must be a list of 1 to {MAX_BAD_WORDS:,} words")
    for word in words:
        if (
            not isinstance(word, list)
            or not word
            or any(type(i) is not int or not 0 <= i < vocab_size for i in word)
        ):
            raise config.error("bad_words_ids", f"each must be a list of ids below {vocab_size}")
    ends = [[token_id] for token_id in config.token_ids("eos_token_id")]
    return tuple(tuple(word) for word in words if word not in ends)
