"""Text to token ids and back, with a model directory's tokenizer files.

Only the `tokenizers` library is used. An engine that gets token ids needs no tokenizer.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers

from octavo.engine.chat_template import ChatTemplate
from octavo.errors import InvalidRequest, ModelError, RequestTooLong
from octavo.model_files import DEFAULT_CLASS, ModelDirectory, open_files

REPLACEMENT = "\ufffd"  # what bytes that are not UTF-8 decode to
MAX_HELD_TOKENS = 8  # a character has at most 4 bytes, so more pending tokens are not a character
CONTEXT_TOKENS = 5  # prompt tokens that the output's text may depend on; characters have 4 bytes
MANY_TOKENS = 1_024  # they take about a millisecond to decode
SPACE_MARK = "\u2581"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
ANY_BYTE_PIECE = "<0x61>"  # "a"; a vocabulary that has one byte has them all


# Parts of a tokenizer that drop no characters -> how many characters they merge into one at most.
# Unicode composes up to four code points.
_KEEPING_PARTS = {
    **{"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1},
    **{"ByteLevel": 1, "Metaspace": 1, "Digits": 1, "UnicodeScripts": 1, "FixedLength": 1},
}


class Detokenizer(ABC):
    """Turns one sequence's output tokens into text, piece by piece.

    Not `tokenizers.decoders.DecodeStream`: it decodes neighbouring byte tokens all or not at all,
    holds broken bytes back forever, repeats the prompt's ending, and takes longer.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], ending: list[int]) -> None:
        """Start after a prompt.

        Args:
            tokenizer: the tokenizer of the tokens.
            skipped: tokens that have no text here.
            ending: the last tokens of the prompt that have text, up to CONTEXT_TOKENS of them.
        """
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._follow(ending)

    @abstractmethod
    def _follow(self, ending: list[int]) -> None:
        """Take the prompt's ending into account."""

    @abstractmethod
    def add(self, token_id: int) -> str:
        """The text that `token_id` completes; "" while a character is incomplete."""

    @abstractmethod
    def finish(self) -> str:
        """The text held back: at most one incomplete character, as U+FFFD."""


class Tokenizer:
    """Owns the vocabulary of one model, and its chat template if it has one."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        template: str | None,
        class_name: str = DEFAULT_CLASS,
        response_template: object = None,
        tool_template: str | None = None,
    ) -> None:
        """`special_tokens`: role (such as "eos_token") -> token; templates may use them all.
        `class_name`: the class of transformers that reads the same files. `response_template`: how
        the model writes its answers, if it says so (`octavo.parsing.template`). `tool_template`:
        the chat template of conversations with tools; None: `template`, too."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self.chat_template = template  # its source
        self.tool_template = template if tool_template is None else tool_template
        self.class_name = class_name
        self.response_template = response_template
        self._template, self._tool_template = (
            None if source is None else ChatTemplate(source, self._special_tokens)
            for source in (template, self.tool_template)
        )
        added = backend.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        vocabulary = backend.get_vocab(with_added_tokens=True)
        # The largest token id plus 1. The model's vocabulary may be larger (padding).
        self.vocab_size = max(vocabulary.values()) + 1
        # Upper bound on a text's characters per token; None if there is none.
        self.max_characters_per_token = _max_characters_per_token(backend, vocabulary)
        decoder = backend.decoder
        self._is_byte_level = isinstance(decoder, tokenizers.decoders.ByteLevel)
        # The id of a byte token, if the vocabulary falls back to bytes.
        self._any_byte = backend.token_to_id(ANY_BYTE_PIECE) if _joins_bytes(decoder) else None
        self._detokenizer: type[Detokenizer] = _WindowDetokenizer
        if self._is_byte_level:
            self._detokenizer = _ByteDetokenizer
        elif self._any_byte is not None:
            self._detokenizer = _FallbackDetokenizer
        # Filled as tokens appear.
        self._token_bytes: dict[int, bytes] = {}
        self._fallback_bytes: dict[int, bytes | None] = {}
        self._piece_texts: dict[int, str] = {}

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json, and tokenizer_config.json and chat_template.jinja if they exist.

        Raises ModelError if tokenizer.json is missing or broken.
        """
        files = ModelDirectory(Path(path)).tokenizer()
        if files is None:
            raise ModelError(
                f"{path} has no tokenizer.json: give prompts as token ids, or let transformers"
                " write one (AutoTokenizer.from_pretrained(path).save_pretrained(path))"
            )
        return cls(*files)

    @classmethod
    def find(cls, path: str | Path) -> Tokenizer | None:
        """The tokenizer of a model; None if it has none.

        Raises:
            ModelError: a file of it is broken.
        """
        files = open_files(path).tokenizer()
        return None if files is None else cls(*files)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Role (such as "eos_token") -> token."""
        return dict(self._special_tokens)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        field: str = "prompt",
        room: Room | None = None,
    ) -> list[int]:
        """Token ids of `text`; with the special tokens (such as BOS) that the model expects.

        Releases the GIL. Raises InvalidRequest about `field` if it is not text, and
        RequestTooLong if there is no `room` for its tokens; before any work, if the number of
        characters shows that.
        """
        if room is not None:
            self.check_length(text, field, room)
        if not isinstance(text, str):
            raise InvalidRequest(field, f"it is not valid text ({type(text).__name__})")
        try:
            # Like `encode`, which would compute offsets and hold the GIL.
            [encoding] = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except Exception as error:  # lone surrogates; characters that the vocabulary cannot spell
            raise InvalidRequest(field, f"it is not valid text ({error})") from error
        except BaseException as error:
            # A regular expression that looks too far, for instance, is a panic to the library.
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidRequest(field, f"the tokenizer fails on it ({error})") from error
        if room is not None:
            room.check(field, len(encoding))
        return encoding.ids

    def check_length(self, text: str, field: str, room: Room) -> None:
        """Raises RequestTooLong if `text` has more characters than the tokens that there is room
        for can have."""
        per_token = self.max_characters_per_token
        if per_token is not None and len(text) > room.num_tokens * per_token:
            raise RequestTooLong(
                field,
                f"{len(text)} characters {room.excess}, each of at most {per_token} characters",
            )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids outside the vocabulary have none."""
        if len(token_ids) < MANY_TOKENS:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        # Releases the GIL, which costs more than it saves for few tokens.
        [text] = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token by itself; b"" outside the vocabulary."""
        known = self._token_bytes.get(token_id)
        if known is None:
            if self._is_byte_level:
                known = _byte_level_bytes(self._backend.id_to_token(token_id) or "")
            else:
                known = self._piece_bytes(token_id)
            self._token_bytes[token_id] = known
        return known

    def piece(self, token_id: int) -> str:
        """The token as the vocabulary writes it, with marks for spaces and bytes; "" outside it."""
        return self._backend.id_to_token(token_id) or ""

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens that are never part of a text, by what they are written as."""
        return dict(self._added)

    def is_special(self, token_id: int) -> bool:
        """Whether it is a special token, such as BOS, which is left out of texts."""
        return token_id in self._special_ids

    def detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        kept: Sequence[int] = (),
    ) -> Detokenizer:
        """A detokenizer for one output that continues `prompt_ids`; special tokens that are `kept`
        have text in any case.

        The text of a word's first token depends on whether anything stands before it: in
        vocabularies that mark spaces in front of words, a prompt keeps the output's first space.
        """
        skipped = self._special_ids.difference(kept) if skip_special_tokens else frozenset()
        has_text = (i for i in reversed(prompt_ids) if i not in skipped and self.has_piece(i))
        ending = list(islice(has_text, CONTEXT_TOKENS))[::-1]
        return self._detokenizer(self, skipped, ending)

    def has_piece(self, token_id: int) -> bool:
        """Whether the vocabulary has such a token; a model's may have more (padding)."""
        return self._backend.id_to_token(token_id) is not None

    def fallback_byte(self, token_id: int) -> bytes | None:
        """The byte of a byte token that is part of a character; None for all other tokens."""
        try:
            return self._fallback_bytes[token_id]
        except KeyError:
            byte = BYTE_PIECE.fullmatch(self._backend.id_to_token(token_id) or "")
            known = bytes.fromhex(byte[1]) if byte is not None else None
            known = known if known is not None and known >= b"\x80" else None
            self._fallback_bytes[token_id] = known
            return known

    def piece_text(self, token_id: int, is_first: bool) -> str:
        """The text of a whole piece, in a vocabulary that falls back to bytes.

        Spaces are marks in front of words, and the first token of a text loses its mark.
        """
        if is_first:
            return self.decode([token_id], skip_special_tokens=False)
        known = self._piece_texts.get(token_id)
        if known is None:
            assert self._any_byte is not None
            known = self.decode([self._any_byte, token_id], skip_special_tokens=False)[1:]
            self._piece_texts[token_id] = known
        return known

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def template_variables(self) -> Set[str]:
        """What the chat template shows, with tools or without, by the names of its variables."""
        templates = filter(None, (self._template, self._tool_template))
        return frozenset[str]().union(*(template.variables for template in templates))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation; encode it with add_special_tokens=False.

        `variables` (tools, enable_thinking, ...) are handed to the template. Raises
        InvalidRequest if the model has no template or its template refuses the messages.
        """
        has_tools = variables.get("tools") is not None
        template = self._tool_template if has_tools else self._template
        if template is None:
            raise InvalidRequest(
                "messages", "the model has no chat template; send a prompt instead of messages"
            )
        return template.render(messages, add_generation_prompt, variables)

    def _piece_bytes(self, token_id: int) -> bytes:
        """SentencePiece marks spaces with U+2581, which decoding drops at the beginning of a text,
        and writes bytes as <0x0A>."""
        piece = self._backend.id_to_token(token_id) or ""
        byte = BYTE_PIECE.fullmatch(piece)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        if SPACE_MARK in piece:
            return piece.replace(SPACE_MARK, " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()


class _Utf8:
    """Joins bytes to characters, and holds the last one back while it is incomplete."""

    def __init__(self, prompt_bytes: bytes) -> None:
        """`prompt_bytes`: the end of the prompt, which may be in the middle of a character."""
        _, used = codecs.utf_8_decode(prompt_bytes, "replace", False)
        self._held = prompt_bytes[used:]
        self._is_shown = bool(self._held)  # as a U+FFFD at the end of the prompt's text

    def add(self, data: bytes) -> str:
        """The characters that `data` completes."""
        data = self._held + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return self._without_shown(text)

    def finish(self) -> str:
        """The bytes held back, as U+FFFD; "" if there are none."""
        text, self._held = self._held.decode(errors="replace"), b""
        return self._without_shown(text)

    def _without_shown(self, text: str) -> str:
        """A character that the prompt began is the output's if the output completes it."""
        if text and self._is_shown:
            self._is_shown = False
            return text.removeprefix(REPLACEMENT)
        return text


class _ByteDetokenizer(Detokenizer):
    """For vocabularies of byte strings, such as GPT-2's: a token's bytes are always the same."""

    def _follow(self, ending: list[int]) -> None:
        self._utf8 = _Utf8(b"".join(map(self._tokenizer.token_bytes, ending)))

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.add(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.finish()


class _FallbackDetokenizer(Detokenizer):
    """For vocabularies of pieces of text with byte tokens for everything else, such as Llama 2's.

    `tokenizers` decodes neighbouring byte tokens as one: if one byte is missing, all of them
    become U+FFFD. Here the bytes of each character are decoded separately, when all are there.
    """

    def _follow(self, ending: list[int]) -> None:
        self._is_first = not ending
        prompt_bytes = [self._tokenizer.fallback_byte(token_id) or b" " for token_id in ending]
        self._utf8 = _Utf8(b"".join(prompt_bytes))

    def add(self, token_id: int) -> str:
        if token_id in self._skipped or not self._tokenizer.has_piece(token_id):
            return ""
        is_first, self._is_first = self._is_first, False
        byte = self._tokenizer.fallback_byte(token_id)
        if byte is not None:
            return self._utf8.add(byte)
        return self._utf8.finish() + self._tokenizer.piece_text(token_id, is_first)

    def finish(self) -> str:
        return self._utf8.finish()


class _WindowDetokenizer(Detokenizer):
    """For all other vocabularies, such as WordPiece's: neighbours may change a token's text.

    Holds the last few tokens: those already shown, as context, and those held back. Decoding a
    window instead of everything keeps the cost per token constant.
    """

    def _follow(self, ending: list[int]) -> None:
        while len(ending) > 1 and self._decode(ending).startswith(REPLACEMENT):
            del ending[0]  # it begins inside a character
        self._set_context(ending)

    def add(self, token_id: int) -> str:
        if token_id in self._skipped or not self._tokenizer.has_piece(token_id):
            return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        is_open = text.endswith(REPLACEMENT) or len(text) <= len(self._context_text)
        if is_open and len(self._pending) < MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def finish(self) -> str:
        return self._show(self._decode(self._context + self._pending)) if self._pending else ""

    def _show(self, text: str) -> str:
        shown = text[len(self._context_text) :]
        self._set_context(self._pending)
        return shown

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._pending: list[int] = []
        self._context_text = self._decode(token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class Room:
    """How many tokens a prompt may have."""

    num_tokens: int
    excess: str  # what is said of more, as in "leave no room for output"

    @classmethod
    def before_output(cls, context_len: int) -> Room:
        """The room in a context that leaves space for one token of output at least."""
        return cls(
            context_len - 1, f"leave no room for output in a context of {context_len} tokens"
        )

    @classmethod
    def whole(cls, context_len: int) -> Room:
        """The room in a context that a prompt may fill."""
        return cls(context_len, f"do not fit into a context of {context_len} tokens")

    @classmethod
    def of_encoder(cls, num_tokens: int, is_of_steps: bool) -> Room:
        """The room in a model's encoder, or in a step, if that takes fewer tokens (is_of_steps)."""
        why = " in a step (max_num_batched_tokens)" if is_of_steps else ""
        excess = f"are too many for the model's encoder, which takes {num_tokens} tokens{why}"
        return cls(num_tokens, excess)

    def check(self, field: str, num_tokens: int) -> None:
        """Raises RequestTooLong if there is no room for `num_tokens`."""
        if num_tokens > self.num_tokens:
            raise RequestTooLong(field, f"{num_tokens} tokens {self.excess}")


def _joins_bytes(decoder: tokenizers.decoders.Decoder | None) -> bool:
    """Whether a decoder joins byte tokens to characters."""
    if decoder is None:
        return False
    parts: dict[str, Any] = json.loads(decoder.__getstate__())
    return any(part["type"] == "ByteFallback" for part in parts.get("decoders", [parts]))


def _max_characters_per_token(
    backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]
) -> int | None:
    """The characters of the longest token; None if some characters may have no token.

    Those are, for instance, spaces that a normalizer strips, and unknown characters without byte
    tokens.
    """
    parts = [backend.normalizer, backend.pre_tokenizer]
    shrinkage = [_shrinkage(json.loads(part.__getstate__())) for part in parts if part]
    if None in shrinkage or not _spells_everything(backend, vocabulary):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # they absorb spaces
        return None
    return max(map(len, vocabulary)) * math.prod(filter(None, shrinkage))


def _shrinkage(part: dict[str, Any]) -> int | None:
    """The most characters that a normalizer or pre-tokenizer merges into one; None: any number.

    `part` is its description in tokenizer.json.
    """
    kind = part["type"]
    if kind == "Sequence":
        inner = [_shrinkage(p) for p in part.get("normalizers") or part.get("pretokenizers") or ()]
        return None if None in inner else math.prod(filter(None, inner))
    if kind in ("Split", "Punctuation"):
        return None if part["behavior"] == "Removed" else 1
    if kind == "Replace":
        pattern = part["pattern"].get("String")  # a regular expression may match any length
        keeps = pattern is not None and 0 < len(pattern) <= len(part["content"])
        return 1 if keeps else None
    return _KEEPING_PARTS.get(kind)


def _spells_everything(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> bool:
    """Whether every character, however rare, becomes at least one token."""
    model, before = backend.model, backend.pre_tokenizer
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    is_byte_level = before is not None and b'"ByteLevel"' in before.__getstate__()
    if is_byte_level and _BYTE_OF.keys() <= vocabulary.keys():
        return True
    return model.unk_token is not None and not model.fuse_unk


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write each byte as a printable character (Radford et al., 2019).

    Printable Latin-1 bytes are written as themselves, the others as U+0100, U+0101, ...
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """A token's bytes; one with characters outside the alphabet was added as plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
