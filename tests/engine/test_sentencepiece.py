"""Tokenizers of directories with SentencePiece's own files.

Expected pieces are those that the sentencepiece package (0.2.3) has of the same files, with the
rules of Marian and T5 in transformers 5.24; both were also compared on 4,000 random texts.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from octavo import model_files
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequest, ModelError
from octavo.model_files import open_files
from octavo.sentencepiece import PieceType, find_tokenizer
from octavo.structured.guidance import Guidance

# Pieces with their scores; the first three have types of their own.
SOURCE = {
    **{"<unk>": 0.0, "</s>": 0.0, "\u2581": -3.0, "\u2581the": -3.5, "\u2581block": -4.0},
    **{"s": -3.0, "\u2581table": -5.0, "t": -6.0, "h": -6.5, "e": -5.5, "b": -7.0, "l": -7.5},
    **{"o": -7.0, "c": -7.2, "k": -7.4, "a": -6.0, "ta": -6.2, "ble": -6.6, "\u2581t": -5.0},
}
# In vocab.json beside them: pieces of the target.
TARGET = ["\u2581der", "\u2581Block", "ö", "東京"]
TEXTS = {
    "the blocks": ["\u2581the", "\u2581block", "s"],
    "  the   tables ": ["\u2581the", "\u2581table", "s"],
    "stable": ["\u2581", "s", "ta", "ble"],
    "the 東京 block": ["\u2581the", "\u2581", "東京", "\u2581block"],
    "zz the": ["\u2581", "<unk>", "\u2581the"],
    "": [],
}


def encoded(number: int, value: int | bytes) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def varint(value: int) -> bytes:
    head = bytes([value & 127 | (128 if value > 127 else 0)])
    return head + (varint(value >> 7) if value > 127 else b"")


def spm(pieces: dict[str, float], model_type: int = 1, options: bytes = b"") -> bytes:
    """`options`: more of the normalizer's."""
    types = {"<unk>": PieceType.UNKNOWN, "</s>": PieceType.CONTROL, "<pad>": PieceType.CONTROL}
    file = b""
    for text, score in pieces.items():
        parts = encoded(1, text.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", score)
        file += encoded(1, parts + encoded(3, types.get(text, PieceType.NORMAL)))
    return file + encoded(2, encoded(3, model_type)) + encoded(3, encoded(1, b"identity") + options)


def marian(directory: Path) -> list[str]:
    """A directory of Marian's, and its pieces by id."""
    pieces = ["</s>", "<unk>", *TARGET, *list(SOURCE)[2:], ">>fra<<", "<pad>"]
    (directory / "source.spm").write_bytes(spm(SOURCE))
    (directory / "vocab.json").write_text(json.dumps({text: i for i, text in enumerate(pieces)}))
    return pieces


def test_marian(tmp_path: Path) -> None:
    pieces = marian(tmp_path)
    tokenizer = Tokenizer.find(tmp_path)
    assert tokenizer is not None
    for text, expected in TEXTS.items():
        ids = [pieces.index(piece) for piece in [*expected, "</s>"]]
        assert tokenizer.encode(text) == ids, text
        ids.insert(0, pieces.index(">>fra<<"))
        assert tokenizer.encode(f">>fra<< {text}") == ids, text
        ids[0] = pieces.index("<unk>")
        for code in (">>xyz<<", ">><<", ">> two\nlines <<"):
            assert tokenizer.encode(f"{code} {text}") == ids, "as transformers reads it"
            assert tokenizer.encode(f"{code}{text}") == ids
    assert tokenizer.encode(">>xyz<<") == [pieces.index("<unk>"), 0]
    output = [pieces.index(piece) for piece in ("\u2581der", "\u2581Block", "s", "</s>")]
    assert tokenizer.decode(output, skip_special_tokens=True) == "der Blocks"


def test_t5(tmp_path: Path) -> None:
    pieces = ["<pad>", "</s>", "<unk>", *list(SOURCE)[2:]]
    (tmp_path / "spiece.model").write_bytes(spm({text: SOURCE.get(text, 0.0) for text in pieces}))
    for model_type, options, num_extra in (("t5", {}, 100), ("mt5", {"extra_ids": 0}, 0)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
        tokenizer = Tokenizer.find(tmp_path)
        assert tokenizer is not None
        for text, expected in TEXTS.items():
            known = [piece if piece in pieces else "<unk>" for piece in expected]
            assert tokenizer.encode(text) == [pieces.index(each) for each in [*known, "</s>"]]
        assert tokenizer.vocab_size == len(pieces) + num_extra
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlnet"}))
    assert Tokenizer.find(tmp_path) is None, "whose rules are others"


def test_white_space(tmp_path: Path) -> None:
    """As the sentencepiece package has it: spaces alone are left out, if they are, and a mark is
    put in front of a text that begins with one, too."""
    expected = {
        "\n \n": (["\u2581", "<unk>", "\u2581", "<unk>"], ["\u2581", "<unk>", "\u2581", "<unk>"]),
        " the\t": (["\u2581the", "<unk>"], ["\u2581", "\u2581the", "<unk>"]),
        " ": ([], ["\u2581", "\u2581"]),
        "\u2581the": (["\u2581", "\u2581the"], ["\u2581", "\u2581the"]),
        "the\u2581": (["\u2581the"], ["\u2581the", "\u2581"]),
        " \u2581": ([], ["\u2581", "\u2581", "\u2581"]),
    }
    pieces = marian(tmp_path)
    for i, options in enumerate((b"", encoded(4, 0))):  # remove_extra_whitespaces
        (tmp_path / "source.spm").write_bytes(spm(SOURCE, options=options))
        tokenizer = find_tokenizer(tmp_path)
        assert tokenizer is not None
        for text, both in expected.items():
            found = [pieces[each] for each in tokenizer.encode(text).ids]
            assert found == [*both[i], "</s>"], text


def test_many_marks(tmp_path: Path) -> None:
    """Each is looked at a few times, not once for each of the others, which would take hours."""
    marian(tmp_path)
    tokenizer = find_tokenizer(tmp_path)
    assert tokenizer is not None
    marks = "\u2581" * 1_000_000
    assert tokenizer.normalizer.normalize_str(f"{marks}s") == f"\u2581{marks}s"
    assert tokenizer.normalizer.normalize_str(f"s{marks}") == "\u2581s"


@pytest.mark.parametrize("is_new", [True, False])
def test_added_tokens(tmp_path: Path, is_new: bool) -> None:
    """Ids as transformers' tokenizers of T5 and Marian have them."""
    pieces = marian(tmp_path)
    ids = {text: len(pieces) + i for i, text in enumerate(("<hl>", "<sep>"))}
    if is_new:
        described = {
            str(number): {"content": text, "normalized": True, "special": text == "<sep>"}
            for text, number in {**ids, "<unk>": 1}.items()
        }
        options = json.dumps({"added_tokens_decoder": described})
        (tmp_path / "tokenizer_config.json").write_text(options)
    else:
        (tmp_path / "added_tokens.json").write_text(json.dumps(dict(reversed(ids.items()))))
        roles = {"eos_token": {"content": "</s>"}, "additional_special_tokens": ["<sep>"]}
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(roles))
    tokenizer = Tokenizer.find(tmp_path)
    assert tokenizer is not None
    expected = ["\u2581the", "\u2581block", "\u2581table"]
    the, block, table = map(pieces.index, expected)
    text = "the <hl> block <sep>table"
    assert tokenizer.encode(text) == [the, ids["<hl>"], block, ids["<sep>"], table, 0]
    assert tokenizer.decode(list(ids.values())) == "<hl>"
    assert tokenizer.decode(list(ids.values()), skip_special_tokens=False) == "<hl><sep>"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "added_tokens",
            {"<hl>": 31},
            "token '<hl>' has the id 31; by the .* other files it is 25",
        ),
        ("added_tokens", {"s": 3}, "added token 's' has the id 3; by the .* other files it is 9"),
        ("added_tokens", {"<hl>": "25"}, "added_tokens.json: '<hl>' is '25', which is no token id"),
        ("added_tokens", {"\ud800": 23}, r"the added token '.ud800' is not valid text"),
        (
            "tokenizer_config",
            {"x": {"content": "<hl>"}},
            "added_tokens_decoder: 'x' is no token id",
        ),
        ("tokenizer_config", {"23": {}}, "added_tokens_decoder: 23 has no content"),
        ("tokenizer_config", {"23": {"content": ""}}, "23: the added token '' is not valid text"),
    ],
)
def test_added_tokens_that_do_not_fit(
    tmp_path: Path, name: str, content: dict[str, object], message: str
) -> None:
    marian(tmp_path)
    fields = {"added_tokens_decoder": content} if name == "tokenizer_config" else content
    (tmp_path / f"{name}.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=message):
        find_tokenizer(tmp_path)


def test_it_is_not_built_for_grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance would refuse it: the engine would take seconds to find out."""
    marian(tmp_path)
    found = find_tokenizer(tmp_path)
    assert found is not None
    with pytest.raises(ValueError, match="decoder type"):
        LLTokenizer(found.to_str())
    monkeypatch.setattr(model_files, "find_tokenizer", pytest.fail)
    assert open_files(tmp_path).tokenizer_source() is None
    with pytest.raises(InvalidRequest, match="no tokenizer that llguidance reads"):
        Guidance(tmp_path, 30, [0]).load()


def test_the_last_span_comes_first(tmp_path: Path) -> None:
    pieces = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "\u2581": -1.0, "a": -1.0}
    (tmp_path / "spiece.model").write_bytes(spm(pieces))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    tokenizer = find_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("a <extra_id_0> a").ids == [3, 4, 104, 3, 4, 1]
    assert tokenizer.token_to_id("<extra_id_99>") == 5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("source.spm", b"\x0a\xff", "source.spm is no model of SentencePiece: it is truncated"),
        ("source.spm", b"\x0b", "no model of SentencePiece: a field has the unknown wire type 3"),
        ("source.spm", b"\x80" * 11, "no model of SentencePiece: a number is too long"),
        ("source.spm", b"\x0a", "source.spm is no model of SentencePiece: "),
        ("source.spm", b"\x0a\x02\x08\x01", "no model of SentencePiece: a number is where text"),
        ("source.spm", b"\x0a\x03\x0a\x01\xff", "no model of SentencePiece: 'utf-8' codec"),
        ("source.spm", b"\x0a\x05\x15\0\0\xc0\x7f", "no model of SentencePiece: a score is nan"),
        ("source.spm", spm(SOURCE) + encoded(3, encoded(2, b"x")), "map of characters is broken"),
        ("source.spm", b"", "source.spm has no pieces"),
        ("source.spm", spm(SOURCE, 2), "a model of type 2; octavo reads unigram models"),
        (
            "source.spm",
            spm(SOURCE, options=encoded(5, 0)),
            "source.spm: escape_whitespaces is false; octavo does not serve it",
        ),
        (
            "source.spm",
            spm(SOURCE) + bytes([2 << 3 | 2, 3, 24 << 3 & 127 | 128, 24 >> 4, 1]),
            "source.spm: treat_whitespace_as_suffix is true; octavo does not serve it",
        ),
        ("vocab.json", b'{"</s>": 0, "<unk>": 5}', "its ids are not the numbers below 2"),
        ("vocab.json", b'{"</s>": 0, "a": "1"}', "its ids are not the numbers below 2"),
        ("vocab.json", b'{"</s>": 0, "a": 1}', "vocab.json has no <unk>"),
        ("vocab.json", rb'{"</s>": 0, "<unk>": 1, "\ud800": 2}', "'.ud800' is not valid text"),
        ("vocab.json", b"[", "vocab.json cannot be read"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    marian(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        find_tokenizer(tmp_path)
