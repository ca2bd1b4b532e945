"""Tokenizers of GGUF files give the ids of those that they were made of."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, trainers
from transformers.integrations.gguf import convert_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

import gguf_files
import model_zoo
from gguf_files import gguf
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ModelError
from octavo.gguf import read_gguf
from octavo.gguf.tokenizer import SPLITTINGS, _merges_of, end_token_ids, read_tokenizer
from octavo.sentencepiece import PieceType

TEXTS = [
    "A block table maps logical blocks to physical blocks.",
    "  two spaces, a tab\tand\n\nlines \n ",
    "Grüße aus dem Süden, naïve façade, π ≈ 3.14159, 東京 and 😀 emoji 👩‍🚀.",
    "don't WE'LL I'M he'S 1234567 x=[1,2];//!? \r\n\r\n snake_case camelCase HTTPServer",
    "A\u030a combining, \u00a0 and \u2009 spaces, \x00 and \x7f",
    "",
    " ",
]
Fields = dict[str, Any]


def write(path: Path, metadata: Fields, arch: str = "llama") -> Path:
    """A file without tensors."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if value is not None:
            gguf_files.add_value(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def byte_level() -> tuple[Backend, Fields]:
    """A tokenizer of the zoo's, and the metadata of it."""
    directory = model_zoo.model_directory("gpt2")
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    return backend, gguf_files.tokenizer_metadata(directory)


@pytest.fixture(scope="module")
def sentencepiece() -> tuple[Backend, Fields]:
    """One as Llama 2's: pieces with a mark for spaces, and a token for each byte. The file has the
    scores that SentencePiece gives its pieces, in the order of their merges."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    control = ["<unk>", "<s>", "</s>"]
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*control, *octets],
        show_progress=False,
        limit_alphabet=60,
        max_token_length=8,
    )
    words = [word for text in model_zoo.TOKENIZER_TEXT for word in text.split(" ")]
    backend.train_from_iterator(words * 2, trainer)
    fields = json.loads(backend.to_str())
    fields["added_tokens"] = fields["added_tokens"][:3]  # bytes are no special tokens
    backend = Backend.from_str(json.dumps(fields))
    backend.add_special_tokens(["<|turn|>"])
    vocabulary = backend.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|turn|>": 3, **dict.fromkeys(octets, 6)}
    merged = ["".join(pair) for pair in fields["model"]["merges"]]
    ranks = {token: rank for rank, token in reversed(list(enumerate(merged)))}
    return backend, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.scores": [-float(ranks.get(token, len(tokens))) for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_byte_level_bpe(byte_level: tuple[Backend, Fields], tmp_path: Path) -> None:
    backend, metadata = byte_level
    tokenizer = Tokenizer.find(write(tmp_path / "model.gguf", metadata))
    assert tokenizer is not None
    for text in [*TEXTS, f"<bos>{TEXTS[0]}<eos>x"]:
        ids = backend.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.special_tokens["eos_token"] == "<eos>"
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]).startswith("<bos><user>hi")
    tools = {"tokenizer.chat_template.tool_use": "tools {{ tools | length }}"}
    tokenizer = Tokenizer.find(write(tmp_path / "tools.gguf", metadata | tools))
    assert tokenizer is not None
    assert tokenizer.render_chat([], tools=[{}]) == "tools 1"


def test_sentencepiece(sentencepiece: tuple[Backend, Fields], tmp_path: Path) -> None:
    backend, metadata = sentencepiece
    tokenizer = Tokenizer.find(write(tmp_path / "model.gguf", metadata))
    assert tokenizer is not None
    for text in [*TEXTS, f"{TEXTS[0]}<|turn|>{TEXTS[2]} <|turn|> <unk>x"]:
        ids = backend.encode(text).ids
        assert tokenizer.encode(text) == [1, *ids]  # it adds BOS unless the file says otherwise
        assert tokenizer.decode(ids) == backend.decode(ids)
    bare = {**metadata, "tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    tokenizer = Tokenizer.find(write(tmp_path / "bare.gguf", bare))
    assert tokenizer is not None
    assert tokenizer.encode(TEXTS[2]) == [*backend.encode(TEXTS[2]).ids, 2]


def test_pieces_with_equal_scores_are_reported(
    sentencepiece: tuple[Backend, Fields], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, metadata = sentencepiece
    read_tokenizer(read_gguf(write(tmp_path / "model.gguf", metadata)))
    assert "have the score of another one" not in caplog.text
    scores = [*metadata["tokenizer.ggml.scores"]]
    first, second = [
        number
        for number, token in enumerate(metadata["tokenizer.ggml.tokens"])
        if metadata["tokenizer.ggml.token_type"][number] == 1 and len(token) > 1
    ][:2]
    scores[second] = scores[first]
    tied = metadata | {"tokenizer.ggml.scores": scores}
    read_tokenizer(read_gguf(write(tmp_path / "tied.gguf", tied)))
    assert "tied.gguf: 1 of " in caplog.text
    assert "have the score of another one (tokenizer.ggml.scores)" in caplog.text


def test_transformers_builds_the_same(
    sentencepiece: tuple[Backend, Fields], byte_level: tuple[Backend, Fields], tmp_path: Path
) -> None:
    for _, metadata in (sentencepiece, byte_level):
        read = read_tokenizer(read_gguf(write(tmp_path / "model.gguf", metadata)))
        assert read is not None
        fields = {key.removeprefix("tokenizer.ggml."): each for key, each in metadata.items()}
        fields |= {"tokenizer_type": fields["model"], "pre_tokenizer_type": fields.get("pre")}
        theirs, _ = convert_gguf_tokenizer("llama", fields)
        for text in (each for each in TEXTS if not each.startswith(" ")):  # theirs lose a space
            ours = read.backend.encode(text, add_special_tokens=False).ids
            assert ours == theirs.encode(text, add_special_tokens=False).ids, text


def test_without_a_space_in_front(sentencepiece: tuple[Backend, Fields], tmp_path: Path) -> None:
    """As Gemma has it, whose texts begin without a mark."""
    backend, metadata = sentencepiece
    backend = Backend.from_str(backend.to_str())
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bare = {**metadata, "tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.find(write(tmp_path / "model.gguf", bare))
    assert tokenizer is not None
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == backend.decode(ids)


@pytest.mark.parametrize("name", sorted(SPLITTINGS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_texts_are_split_as_transformers_splits_them(
    name: str, byte_level: tuple[Backend, Fields], tmp_path: Path
) -> None:
    metadata = byte_level[1] | {"tokenizer.ggml.pre": name}
    read = read_tokenizer(read_gguf(write(tmp_path / "model.gguf", metadata)))
    assert read is not None
    fields = {key.removeprefix("tokenizer.ggml."): each for key, each in metadata.items()}
    theirs, _ = convert_gguf_tokenizer(
        "llama", fields | {"tokenizer_type": "gpt2", "pre_tokenizer_type": name}
    )
    for text in TEXTS:
        ours = read.backend.pre_tokenizer.pre_tokenize_str(text)
        assert ours == theirs.pre_tokenizer.pre_tokenize_str(text)


def test_digits_are_words_of_their_own(byte_level: tuple[Backend, Fields], tmp_path: Path) -> None:
    metadata = byte_level[1] | {"tokenizer.ggml.pre": "smollm"}
    read = read_tokenizer(read_gguf(write(tmp_path / "model.gguf", metadata)))
    assert read is not None
    words = [word for word, _ in read.backend.pre_tokenizer.pre_tokenize_str("it's 123")]
    assert words == ["it", "'s", "Ġ", "1", "2", "3"]


def test_a_file_that_does_not_say_how_texts_are_split(
    byte_level: tuple[Backend, Fields], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend, metadata = byte_level
    tokenizer = Tokenizer.find(write(tmp_path / "a.gguf", {**metadata, "tokenizer.ggml.pre": None}))
    assert tokenizer is not None
    assert tokenizer.encode(TEXTS[3]) == backend.encode(TEXTS[3]).ids
    assert "does not say how texts are split (tokenizer.ggml.pre)" in caplog.text


def test_tokens_with_a_meaning(byte_level: tuple[Backend, Fields], tmp_path: Path) -> None:
    """Those that are matched in texts, whatever characters they have, and those that end one."""
    tokens = [*byte_level[1]["tokenizer.ggml.tokens"]]
    types = [*byte_level[1]["tokenizer.ggml.token_type"]]
    added = ["<|im_end|>", "<\uff5cbegin\u2581of\uff5c>", "<think>", "[PAD323]", "<|end|>"]
    metadata = byte_level[1] | {
        "tokenizer.ggml.tokens": [*tokens, *added],
        "tokenizer.ggml.token_type": [*types, 3, 3, 4, 5, 1],
        "tokenizer.ggml.eot_token_id": 2,
    }
    file = read_gguf(write(tmp_path / "model.gguf", metadata))
    assert end_token_ids(file) == (model_zoo.EOS_ID, 2, 320)  # <|end|> is an ordinary token
    tokenizer = Tokenizer.find(file.path)
    assert tokenizer is not None
    text = "a<think><\uff5cbegin\u2581of\uff5c>[PAD323]<|im_end|>"
    ids = tokenizer.encode(text)
    assert [i for i in ids if i >= 320] == [322, 321, 320]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "a<think>[PAD323]"
    assert not tokenizer.has_piece(323)


def test_the_end_of_a_message_is_not_that_of_an_answer(
    byte_level: tuple[Backend, Fields], tmp_path: Path
) -> None:
    """In gpt-oss, which reasons in a message of its own."""
    added = ["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"]
    metadata = byte_level[1] | {
        "tokenizer.ggml.tokens": [*byte_level[1]["tokenizer.ggml.tokens"], *added],
        "tokenizer.ggml.token_type": [*byte_level[1]["tokenizer.ggml.token_type"], *[3] * 4],
        "tokenizer.ggml.eos_token_id": 320,
    }
    path = tmp_path / "model.gguf"
    assert end_token_ids(read_gguf(write(path, metadata))) == (320, 322, 323)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"][:-2], "<call>", "<x>"]
    assert end_token_ids(read_gguf(write(path, metadata))) == (320, 321)


def test_spaces_behind_special_tokens_of_phi3(
    sentencepiece: tuple[Backend, Fields], tmp_path: Path
) -> None:
    backend, metadata = sentencepiece
    backend = Backend.from_str(backend.to_str())
    fields = json.loads(backend.to_str())
    for token in fields["added_tokens"]:
        token["rstrip"] = token["content"] in ("<|turn|>", "</s>")
    backend = Backend.from_str(json.dumps(fields))
    tokenizer = Tokenizer.find(write(tmp_path / "model.gguf", metadata, "phi3"))
    assert tokenizer is not None
    text = "a<|turn|> \n block <s> table"
    assert tokenizer.encode(text) == [1, *backend.encode(text).ids]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "ggml.model is 'bert'; octavo builds gpt2, llama"),
        ({"pre": "unheard-of"}, "ggml.pre is 'unheard-of'; octavo knows default, gpt-2"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "ggml.merges has 'ab', which is no pair of tokens"),
        ({"merges": ["a \u6771"]}, "no tokenizer can be made of it"),
        ({"tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "ggml.tokens is .*; it must be an array of strings"),
        ({"token_type": [1, 2]}, "token_type has 2 elements for 320 tokens"),
        ({"token_type": [1] * 319 + [7]}, r"token_type has 7 at \[319\]; types are 0 to 6"),
        ({"token_type": [math.nan] * 320}, r"token_type has nan at \[0\]; types are 0 to 6"),
        ({"model": "llama", "scores": [-1.0, math.inf] * 160}, r"scores has inf at \[1\]"),
        ({"eos_token_id": 320}, "eos_token_id is 320; the vocabulary has 320 tokens"),
        ({"add_bos_token": True, "bos_token_id": None}, "there is no tokenizer.ggml.bos_token_id"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'; it must be true or false"),
        ({"model": "llama"}, "ggml.scores has no elements for 320 tokens"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_tokenizers_that_are_not_built(
    change: Fields, message: str, byte_level: tuple[Backend, Fields], tmp_path: Path
) -> None:
    changed = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    path = write(tmp_path / "model.gguf", byte_level[1] | changed)
    with pytest.raises(ModelError, match=message):
        Tokenizer.find(path)


def test_a_file_without_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.find(write(tmp_path / "model.gguf", {})) is None
    none = {"tokenizer.ggml.model": "none"}
    assert Tokenizer.find(write(tmp_path / "none.gguf", none)) is None


def test_a_long_piece_is_cut_only_where_parts_may_be_pieces() -> None:
    class Piece(str):
        num_cuts = 0

        def __getitem__(self, index: Any) -> str:
            Piece.num_cuts += 1
            return str.__getitem__(self, index)

    tokens = ["a", "b", "ab", Piece("ab" * 500), "ab" * 499]
    merges = _merges_of(tokens, [PieceType.NORMAL] * 5, [0.0, -1.0, -2.0, -3.0, -4.0])
    assert merges == [("a", "b"), ("ab", "ab" * 499), ("ab" * 499, "ab")]
    assert Piece.num_cuts == 4
