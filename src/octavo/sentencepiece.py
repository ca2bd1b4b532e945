"""Tokenizers of directories that have SentencePiece's own files and no tokenizer.json: Marian's
(source.spm, target.spm, vocab.json), and those of T5 1.1 and mT5 (spiece.model). Tokens that were
added to them later are in tokenizer_config.json, or in the added_tokens.json of older directories.

They are built with the `tokenizers` library. A model of SentencePiece is a protocol buffer
(https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto), of which a few
fields are read here:

    ModelProto      := pieces(1)* trainer_spec(2) normalizer_spec(3)
    SentencePiece   := piece(1) score(2) type(3)
    TrainerSpec     := ... model_type(3) ... treat_whitespace_as_suffix(24)
    NormalizerSpec  := ... precompiled_charsmap(2) add_dummy_prefix(3) remove_extra_whitespaces(4)
                       escape_whitespaces(5)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from octavo.added_tokens import described_tokens, older_tokens
from octavo.errors import ModelError, shown
from octavo.json_fields import Fields, is_text, read_json, read_optional_json

MAX_BYTES = 256 << 20
UNIGRAM = 1  # of model_type; also what a file means that does not say it
SPACE_MARK = "\u2581"
# What becomes of spaces that are left out, and of marks at the end; SentencePiece keeps other white
# space. Those at the end are matched from where they begin, and without stepping back: many marks
# within a text would take quadratic time.
EXTRA_SPACES = ((" {2,}", " "), (rf"(?<![ {SPACE_MARK}])[ {SPACE_MARK}]++\z|\A ", ""))
END, UNKNOWN, PADDING = "</s>", "<unk>", "<pad>"
MARIAN_FILES = "source.spm", "vocab.json"  # target.spm has no piece that vocab.json lacks
T5_FILE, T5_TYPES = "spiece.model", ("t5", "mt5")
T5_EXTRA_IDS = 100  # tokens for spans that are left out, unless tokenizer_config.json says how many
# What a text of Marian's begins with is the code of a language, known or not; a character that no
# model has a piece for stands for one that is not known.
CODE, UNKNOWN_CODE = r"\A>>[\s\S]*?<<", "\ue000"
# Score of pieces that only the target has: they are taken for text that the source has no piece
# for, and for nothing else.
FOREIGN_SCORE = -1e9
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


class PieceType(IntEnum):
    """SentencePiece.Type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of a vocabulary."""

    text: str
    score: float
    type: int = PieceType.NORMAL

    @property
    def is_in_text(self) -> bool:
        """Whether it stands for a part of a text."""
        return self.type in (PieceType.NORMAL, PieceType.USER_DEFINED)


@dataclass(frozen=True, slots=True)
class PieceModel:
    """A unigram model, by the ids of its pieces."""

    pieces: Sequence[Piece]
    normalizer: normalizers.Normalizer
    adds_space: bool  # in front of a text


def find_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer that SentencePiece's files describe; None if there are none that octavo knows.

    Raises ModelError: a file is broken, or is of another kind of model.
    """
    if all((directory / name).is_file() for name in MARIAN_FILES):
        tokenizer = _read_marian(*(directory / name for name in MARIAN_FILES))
    elif (directory / T5_FILE).is_file():
        config = read_json(directory / "config.json")
        if config.get("model_type", None) not in T5_TYPES:
            return None
        tokenizer = _read_t5(directory)
    else:
        return None
    _add_tokens(tokenizer, directory)
    return tokenizer


def _read_marian(source: Path, vocabulary: Path) -> Tokenizer:
    """Ids are those of vocab.json, which source and target share."""
    ids = _read_ids(read_json(vocabulary))
    model = read_pieces(source)
    scores = {piece.text: piece.score for piece in model.pieces if piece.is_in_text}
    pieces = [Piece(text, scores.get(text, FOREIGN_SCORE)) for text in ids]
    languages = [text for text in ids if text.startswith(">>") and text.endswith("<<")]
    # Those that are known never get here.
    parts = [
        normalizers.Replace(Regex(CODE), f"{UNKNOWN_CODE} "),
        model.normalizer,
        normalizers.Replace(Regex(rf"\A{SPACE_MARK}{UNKNOWN_CODE}"), UNKNOWN_CODE),
    ]
    model = replace(model, normalizer=normalizers.Sequence(parts))
    tokenizer = _build(pieces, model, ids.index(UNKNOWN), [END, UNKNOWN, PADDING])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in languages])
    return tokenizer


def _read_ids(vocabulary: Fields) -> list[str]:
    """The pieces in the order of their ids."""
    ids = vocabulary.values
    size = len(ids)
    if {type(i) for i in ids.values()} != {int} or set(ids.values()) != set(range(size)):
        raise ModelError(f"{vocabulary.where}: its ids are not the numbers below {size}")
    for token in (END, UNKNOWN):
        if token not in ids:
            raise ModelError(f"{vocabulary.where} has no {token}")
    for token in ids:
        if not is_text(token):
            raise ModelError(f"{vocabulary.where}: {shown(token)} is not valid text")
    return sorted(ids, key=lambda text: ids[text])


def _read_t5(directory: Path) -> Tokenizer:
    """Ids are those of the pieces; tokens for spans follow, the last of them first."""
    model = read_pieces(directory / T5_FILE)
    options = read_optional_json(directory / "tokenizer_config.json")
    num_extra = options.get("extra_ids", T5_EXTRA_IDS)
    if type(num_extra) is not int or not 0 <= num_extra <= 1 << 16:
        raise options.error("extra_ids", "it must be an integer from 0 to 65,536")
    extra = [f"<extra_id_{i}>" for i in reversed(range(num_extra))]
    known = {piece.text for piece in model.pieces}
    pieces = [*model.pieces, *(Piece(text, 0.0) for text in extra if text not in known)]
    unknown = [i for i, piece in enumerate(model.pieces) if piece.type == PieceType.UNKNOWN]
    if len(unknown) != 1 or END not in known:
        raise ModelError(f"{directory / T5_FILE}: it needs one unknown piece, and {END}")
    kinds = PieceType.UNKNOWN, PieceType.CONTROL
    special = [piece.text for piece in model.pieces if piece.type in kinds]
    return _build(pieces, model, unknown[0], [*special, *extra])


def _build(
    pieces: Sequence[Piece], model: PieceModel, unknown: int, special: Sequence[str]
) -> Tokenizer:
    """The unigram model of `pieces`, with the normalisation of `model`; texts end with END."""
    vocabulary = [(piece.text, piece.score) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unknown, byte_fallback=False))
    tokenizer.normalizer = model.normalizer
    scheme = "always" if model.adds_space else "never"
    # The normalizer has put a mark in front, also where the text begins with one.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, "never")
    tokenizer.decoder = decoders.Metaspace(SPACE_MARK, scheme)
    known = {piece.text for piece in pieces}
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text in special if text in known]
    )
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, end)]
    )
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, directory: Path) -> None:
    """Add the tokens that the model's pieces do not have, and match them in texts as they are.

    Raises ModelError if one would not get the id that its file says.
    """
    config = read_optional_json(directory / "tokenizer_config.json")
    ids = described_tokens(config, normalized=False)
    if ids is None:
        ids = older_tokens(config, directory, normalized=False)
    size = tokenizer.get_vocab_size()
    for token, number in sorted(ids.items(), key=lambda item: item[1]):
        known = tokenizer.token_to_id(token.content)
        if number != (size if known is None else known):
            raise ModelError(
                f"{directory}: the added token {shown(token.content)} has the id {number}; by the "
                f"tokenizer's other files it is {size if known is None else known}"
            )
        size += known is None
    tokenizer.add_tokens(sorted(ids, key=lambda token: ids[token]))


def read_pieces(path: Path) -> PieceModel:
    """A file of SentencePiece with a unigram model.

    Raises ModelError: it is broken, too large, or of another kind.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelError(f"{path} is larger than {MAX_BYTES:,} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror})") from error
    try:
        pieces, trainer, options = _parse(data)
        model_type = int(trainer.get(3, UNIGRAM))
        charsmap = _as_bytes(options.get(2, b""))
    except (ValueError, struct.error) as error:
        raise ModelError(f"{path} is no model of SentencePiece: {error}") from error
    if model_type != UNIGRAM:
        raise ModelError(f"{path} has a model of type {model_type}; octavo reads unigram models")
    if trainer.get(24, 0):
        raise ModelError(f"{path}: treat_whitespace_as_suffix is true; octavo does not serve it")
    if not options.get(5, 1):
        raise ModelError(f"{path}: escape_whitespaces is false; octavo does not serve it")
    if not pieces:
        raise ModelError(f"{path} has no pieces")
    if any(piece.type == PieceType.BYTE for piece in pieces):
        raise ModelError(f"{path} has pieces for bytes, which octavo does not read here")
    parts: list[normalizers.Normalizer] = []
    if charsmap:
        try:
            parts.append(normalizers.Precompiled(charsmap))
        except Exception as error:  # the library raises nothing more precise
            raise ModelError(f"{path}: its map of characters is broken: {error}") from error
    if options.get(4, 1):  # spaces around a text are left out, and several become one
        parts += [normalizers.Replace(Regex(spaces), by) for spaces, by in EXTRA_SPACES]
    adds_space = bool(options.get(3, 1))
    if adds_space:
        parts.append(normalizers.Prepend(SPACE_MARK))
    return PieceModel(pieces, normalizers.Sequence(parts), adds_space)


def _parse(data: bytes) -> tuple[list[Piece], dict[int, int | bytes], dict[int, int | bytes]]:
    """Pieces, and the fields of trainer_spec and of normalizer_spec."""
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    options: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1:
            fields = dict(_fields(_as_bytes(value)))
            (score,) = struct.unpack("<f", _as_bytes(fields.get(2, bytes(4))))
            if not math.isfinite(score):
                raise ValueError(f"a score is {score}")
            text = _as_bytes(fields.get(1, b"")).decode()
            pieces.append(Piece(text, score, int(fields.get(3, PieceType.NORMAL))))
        elif number == 2:
            trainer = dict(_fields(_as_bytes(value)))
        elif number == 3:
            options = dict(_fields(_as_bytes(value)))
    return pieces, trainer, options


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number is where text should be")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of the fields of a message. Numbers of fixed size stay bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire_type == _BYTES:
            size, at = _varint(data, at)
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise ValueError(f"a field has the unknown wire type {wire_type}")
        if at + size > len(data):
            raise ValueError("it is truncated")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it is truncated")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number is too long")
