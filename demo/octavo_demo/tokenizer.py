"""The demo model's tokenizer: byte-level BPE over the demo corpus, so no text is ever unknown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo_demo.corpus import CHAT_TEMPLATE, EOS, PAD, SPECIAL_TOKENS, documents, text_of

# A word with the space before it, punctuation, one digit, one line break, other white space.
_PIECES = r" ?\p{L}+| ?[^\s\p{L}\p{N}]+| ?\p{N}|\n|[^\S\n]+"


def train_tokenizer(vocab_size: int, num_documents: int, seed: str = "tokenizer") -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_documents, seed), trainer)
    return tokenizer


def _texts(num_documents: int, seed: str) -> Iterable[str]:
    for document in islice(documents(seed), num_documents):
        text = text_of(document)
        for special in SPECIAL_TOKENS:
            text = text.replace(special, "\n")
        yield text


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """tokenizer.json and the tokenizer_config.json that tells transformers how to use it."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
