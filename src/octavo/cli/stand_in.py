"""Stands in for the demo model until that one ships: a tiny model with random weights."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from pathlib import Path

END = "<end>"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "eos_token_id": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def stand_in_directory() -> Path:
    """config.json and a tokenizer whose tokens are bytes; for `load_format="dummy"`."""
    import tokenizers

    directory = Path(tempfile.mkdtemp(prefix="octavo-stand-in-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: token_id for token_id, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([END])
    backend.save(str(directory / "tokenizer.json"))
    tokenizer_config = {"eos_token": END, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory
