"""The tokenizer in a GGUF file, as one of the `tokenizers` library.

llama.cpp has two that octavo builds: byte-level BPE with merges ("gpt2"), and SentencePiece's BPE,
whose merges follow from the scores of its pieces ("llama"). What a file does not say, such as how
BPE splits a text first, is known by the name that the file gives it (`tokenizer.ggml.pre`).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

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

from octavo.errors import ModelError, shown
from octavo.gguf.file import GgufFile
from octavo.sentencepiece import SPACE_MARK, PieceType

logger = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
TOKENS, TYPES, SCORES, MERGES = (
    PREFIX + name for name in ("tokens", "token_type", "scores", "merges")
)
UNDEFINED = 0  # a type of token that SentencePiece does not have
DEFAULT_SPLITTING = "default"  # also what files mean that do not name one
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Ids of SentencePiece's tokens in files that do not say them.
SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
# Tokens that end a turn, whatever the file calls the end: some have one id where models have two.
END_TOKENS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
        *("<|end_of_text|>", "<|END_OF_TURN_TOKEN|>"),
    }
)
# Where these are tokens (Harmony), <|end|> ends a message, of which an answer has several.
HARMONY_ENDS = ("<|return|>", "<|call|>")
# Fills up a vocabulary to the number of rows of the model's table.
PADDING_TOKEN = re.compile(r"\[PAD\d+\]")


@dataclass(frozen=True, slots=True)
class Splitting:
    """How byte-level BPE cuts a text up before it merges."""

    pattern: str | None = None  # None: that of GPT-2
    single_digits: bool = False  # each digit is a word
    composes: bool = False  # characters (NFC)
    ignores_merges: bool = False  # a word that is a token is that token
    adds_bos: bool = False  # where the file does not say


_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str) -> str:
    """Words of lower-case letters behind upper-case ones, each alternative with such an ending."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"


_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_GPT2 = Splitting()
_CL100K = Splitting(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_SPACES}")
_LLAMA3 = replace(_CL100K, ignores_merges=True, adds_bos=True)
_QWEN2 = Splitting(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS}[\r\n]*|{_SPACES}")
_O200K = Splitting(rf"{_cased(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n/]*|{_SPACES}")
_TEKKEN = Splitting(
    rf"{_cased('')}|\p{{N}}|{_SYMBOLS}[\r\n/]*|{_SPACES}", ignores_merges=True, adds_bos=True
)
_DIGITS = Splitting(single_digits=True)
SPLITTINGS: Mapping[str, Splitting] = {
    **dict.fromkeys((DEFAULT_SPLITTING, "gpt-2", "phi-2", "mpt"), _GPT2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    "qwen2": replace(_QWEN2, composes=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    "tekken": _TEKKEN,
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    "command-r": replace(_DIGITS, composes=True),
    "olmo": replace(_GPT2, composes=True),
    "seed-coder": Splitting(
        rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
    ),
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What engines need of a tokenizer."""

    backend: Tokenizer
    special_tokens: Mapping[str, str]  # role, such as "eos_token" -> token
    chat_template: str | None
    tool_template: str | None  # of conversations with tools, where it is another


def read_tokenizer(file: GgufFile) -> GgufTokenizer | None:
    """The tokenizer of a model; None: the file has none.

    Raises:
        ModelError: a kind of tokenizer that octavo does not build, or parts that do not fit each
            other; names the value.

    Example:
        >>> read_tokenizer(read_gguf(path)).backend.encode("Hello").ids
    """
    kind = file.text(PREFIX + "model")
    if kind in (None, "none", "no_vocab"):
        return None
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise file.error(PREFIX + "model", f"octavo builds {', '.join(builders)}")
    tokens, types = _tokens(file), _types(file)
    try:
        backend, adds_bos = builders[kind](file, tokens, types)
        special = _of_types(tokens, types, PieceType.UNKNOWN, PieceType.CONTROL)
        backend.add_special_tokens([_added(file, token, True) for token in special])
        plain = _of_types(tokens, types, PieceType.USER_DEFINED)
        backend.add_tokens([_added(file, token, False) for token in plain])
        _add_ends(file, backend, tokens, adds_bos)
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"{file.path}: no tokenizer can be made of it: {error}") from error
    special_tokens = {}
    for role, name in ROLES.items():
        number = token_id(file, name)
        if number is not None:
            special_tokens[f"{role}_token"] = tokens[number]
    name = "tokenizer.chat_template"
    return GgufTokenizer(backend, special_tokens, file.text(name), file.text(f"{name}.tool_use"))


def token_id(file: GgufFile, name: str) -> int | None:
    """The id of the token "bos", "eos", ...; None: there is none.

    Raises ModelError if it is no token of the vocabulary.
    """
    key = f"{PREFIX}{name}_token_id"
    number: int | None = file.find(key, int, "the number of a token")
    size = len(file.texts(TOKENS) or ())
    if number is None and file.text(PREFIX + "model") == "llama":
        number = SENTENCEPIECE_IDS.get(name)
        return number if number is not None and number < size else None
    if number in (None, -1, 0xFFFFFFFF):  # how some files say that there is none
        return None
    if size and not 0 <= number < size:
        raise file.error(key, f"the vocabulary has {size} tokens")
    return number


def end_token_ids(file: GgufFile) -> tuple[int, ...]:
    """The tokens that end an answer.

    Raises ModelError if one is no token of the vocabulary.
    """
    named = [token_id(file, name) for name in ("eos", "eot", "eom")]
    tokens, types = file.texts(TOKENS) or [], _types(file)
    control = {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == PieceType.CONTROL
    }
    ends = END_TOKENS
    if control.keys() >= set(HARMONY_ENDS):
        ends = ends - {"<|end|>"} | set(HARMONY_ENDS)
    known = [number for token, number in control.items() if token in ends]
    return tuple(dict.fromkeys(each for each in (*named, *known) if each is not None))


def _byte_level(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """BPE of bytes, each written as a printable character; whether it adds BOS by itself."""
    key = PREFIX + "pre"
    name = file.text(key) or DEFAULT_SPLITTING
    if name == DEFAULT_SPLITTING:
        logger.warning(
            "%s does not say how texts are split (%s): they are split as GPT-2 splits them",
            file.path,
            key,
        )
    if name not in SPLITTINGS:
        raise file.error(key, f"octavo knows {', '.join(SPLITTINGS)}")
    splitting = SPLITTINGS[name]
    texts = file.texts(MERGES)
    if texts is None:  # without them each byte would be a token
        raise ModelError(f"{file.path} has no {MERGES}")
    merges = []
    for merge in texts:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise ModelError(
                f"{file.path}: {MERGES} has {shown(merge)}, which is no pair of tokens"
            )
        merges.append((left, right))
    vocabulary = _vocabulary(tokens, types)
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=splitting.ignores_merges))
    if splitting.composes:
        backend.normalizer = normalizers.NFC()
    before: list[pre_tokenizers.PreTokenizer] = []
    if splitting.single_digits:
        before.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        before.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    before.append(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(before)
    backend.decoder = decoders.ByteLevel()
    return backend, splitting.adds_bos


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE, with a token for each byte; whether it adds BOS by itself."""
    scores = file.numbers(SCORES)
    if scores is None or len(scores) != len(tokens):
        count = "no" if scores is None else len(scores)
        raise ModelError(f"{file.path}: {SCORES} has {count} elements for {len(tokens)} tokens")
    for number, score in enumerate(scores):
        if not math.isfinite(score):
            raise ModelError(f"{file.path}: {SCORES} has {score} at [{number}]")
    if (file.text("general.architecture") or "").startswith("gemma"):
        scores = [-float(i) for i in range(len(tokens))]  # whose pieces are in the order of merges
    merged = [
        score
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if kind == PieceType.NORMAL and len(token) > 1
    ]
    if num_tied := len(merged) - len(set(merged)):
        # Each merge of the tokenizers library has a rank of its own.
        logger.warning(
            "%s: %d of %d pieces have the score of another one (%s): where such pieces overlap in "
            "a text, the one with the lower id is made first, and in llama.cpp the left one",
            file.path,
            num_tied,
            len(merged),
            SCORES,
        )
    vocabulary = _vocabulary(tokens, types)
    unknown = token_id(file, "unknown")
    has_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    backend = Tokenizer(
        models.BPE(
            vocabulary,
            _merges_of(tokens, types, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    has_prefix = file.flag(PREFIX + "add_space_prefix") is not False
    marks = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marks]) if has_prefix else marks
    )
    parts = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)
    return backend, True


def _merges_of(
    tokens: list[str], types: list[int], scores: Iterable[float]
) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, those with the best scores first."""
    normal = {
        token: (-score, number)
        for number, (token, kind, score) in enumerate(zip(tokens, types, scores, strict=True))
        if kind == PieceType.NORMAL
    }
    lengths = {len(token) for token in normal}
    merges = []
    for token, rank in normal.items():
        for cut in range(1, len(token)):
            # Of a token of megabytes, which a file may have, few such parts are looked at.
            if cut not in lengths or len(token) - cut not in lengths:
                continue
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                merges.append((rank, left, right))
    merges.sort()
    return [(left, right) for _, left, right in merges]


def _add_ends(file: GgufFile, backend: Tokenizer, tokens: list[str], adds_bos: bool) -> None:
    """BOS in front of prompts and EOS behind them, where the file or the kind asks for it."""
    template, used = ["$A"], []
    for name, is_usual in (("bos", adds_bos), ("eos", False)):
        key = f"{PREFIX}add_{name}_token"
        asked = file.flag(key)
        number = token_id(file, name)
        if asked and number is None:
            raise file.error(key, f"there is no {PREFIX}{name}_token_id")
        if number is None or not (is_usual if asked is None else asked):
            continue
        template.insert(0 if name == "bos" else len(template), name)
        used.append({"id": name, "ids": [number], "tokens": [tokens[number]]})
    if used:
        backend.post_processor = processors.TemplateProcessing(
            single=template,
            special_tokens=used,  # tokens may hold characters that templates use
        )


def _added(file: GgufFile, token: str, is_special: bool) -> AddedToken:
    # Phi-3's take the spaces behind them.
    takes_spaces = (
        is_special
        and file.text("general.architecture") == "phi3"
        and file.text(PREFIX + "model") == "llama"
        and token not in ("<unk>", "<s>", "<|endoftext|>")
    )
    return AddedToken(token, normalized=False, special=is_special, rstrip=takes_spaces)


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.texts(TOKENS)
    if not tokens:
        raise ModelError(f"{file.path} has no {TOKENS}")
    return tokens


def _types(file: GgufFile) -> list[int]:
    """The type of each token; those of files without types are normal."""
    tokens, types = file.texts(TOKENS) or [], file.numbers(TYPES)
    if types is None:
        return [PieceType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{file.path}: {TYPES} has {len(types)} elements for {len(tokens)} tokens")
    known = frozenset({UNDEFINED, *PieceType})
    for number, each in enumerate(types):
        if each not in known:  # NaN and fractions, too
            raise ModelError(
                f"{file.path}: {TYPES} has {each} at [{number}]; types are 0 to {max(known):d}"
            )
    return [int(each) for each in types]


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """The id of each token, without those that only fill the vocabulary up."""
    vocabulary: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != PieceType.UNUSED or not PADDING_TOKEN.fullmatch(token):
            vocabulary.setdefault(token, number)
    return vocabulary


def _of_types(tokens: list[str], types: list[int], *kinds: PieceType) -> list[str]:
    found = (token for token, kind in zip(tokens, types, strict=True) if kind in kinds)
    return [token for token in found if token]
