"""The shipped model: whole, small enough, and clear about what is wrong with it when it is not."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from octavo.demo import MANIFEST, demo_model_path
from octavo.errors import ModelError
from octavo_demo.corpus import CHAT_TEMPLATE, SPECIAL_TOKENS, translation_prompt


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_path(), tmp_path / "model"))


def test_sizes() -> None:
    path = demo_model_path()
    weights = path / "model.safetensors"
    assert weights.stat().st_size + (path / "tokenizer.json").stat().st_size < 12_000_000
    num_parameters = 0
    with safe_open(str(weights), "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
            assert tensors.get_slice(name).get_dtype() == "BF16"
            shape = tensors.get_slice(name).get_shape()
            num_parameters += shape[0] * (shape[1] if len(shape) > 1 else 1)
    assert 4_000_000 < num_parameters < 12_000_000
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 2048
    assert (
        json.loads((path / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    )


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_missing_file(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(ModelError, match=rf"{name} is missing.*octavo_demo\.train"):
        demo_model_path(copy)


def test_a_truncated_file(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000_000])
    with pytest.raises(ModelError, match=r"is truncated \(1,000,000 bytes of 11,"):
        demo_model_path(copy)


def test_a_changed_file(copy: Path) -> None:
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[5_000_000] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ModelError, match=r"content of .* has changed"):
        demo_model_path(copy)


def test_no_model_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="demo model is missing"):
        demo_model_path(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(ModelError, match="is damaged"):
        demo_model_path(tmp_path)


@pytest.mark.parametrize("name", [MANIFEST, "tokenizer.json"])
def test_a_file_that_cannot_be_read(copy: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another user has installed octavo, whose files this one may not read."""
    open_file = Path.open

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_file(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=rf"cannot be read: .*{name} \(Permission denied\); rein"):
        demo_model_path(copy)


@pytest.mark.parametrize(
    "text",
    [
        "The dog sleeps. => Der Hund schläft.",
        "Once upon a time\n  there\twas 1 fox, 22 hens; \r\nand “quotes” — naïve.",
        "世界 你好 👩‍🚀🙂 Привет עולם",
        "\x00\x7f\ufeff\U0010ffff",
        "",
        " ",
        "<|im_start|>user\nHi<|im_end|>\n",
    ],
)
def test_the_tokenizer_knows_every_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_tokenizer_is_small_and_adds_nothing() -> None:
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    assert 2000 <= tokenizer.get_vocab_size() <= 4096
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    # A prompt's ids are a prefix of the ids of prompt and answer: examples can be pinned.
    prompt = translation_prompt([("The dog sleeps.", "Der Hund schläft.")], "I laugh.")
    whole = tokenizer.encode(f"{prompt} Ich lache.").ids
    assert whole[: len(tokenizer.encode(prompt).ids)] == tokenizer.encode(prompt).ids
