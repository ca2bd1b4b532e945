"""The files of a model: a directory in Hugging Face format, or a GGUF file. Imports no torch.

Here is what both have in common below the models: a tokenizer, and what tells one model from
another. What they say of the model itself is in models/source.py, and their tensors are read by the
WeightFiles of each format (models/base.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import tokenizers

from octavo.added_tokens import complete, special_tokens
from octavo.errors import ModelError, shown
from octavo.gguf import is_gguf, read_gguf
from octavo.gguf.tokenizer import read_tokenizer
from octavo.json_fields import Fields, read_optional_json, read_text
from octavo.sentencepiece import find_tokenizer

DEFAULT_CLASS = "PreTrainedTokenizerFast"  # of a tokenizer that comes without a class


class TokenizerFiles(NamedTuple):
    """What the files say of a tokenizer."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]  # role, such as "eos_token" -> token
    chat_template: str | None  # its source
    class_name: str = DEFAULT_CLASS  # the class of transformers that reads the same files
    response_template: object = None  # how the model writes its answers, if the files say so
    tool_template: str | None = None  # of conversations with tools, where it is another


class ModelFiles(Protocol):
    """The files of one model, read when they are asked for."""

    format: ClassVar[str]
    """A name in models.source.SOURCES."""

    @property
    def path(self) -> Path:
        """The directory, or the file."""

    def tokenizer(self) -> TokenizerFiles | None:
        """None: the model has none. Raises ModelError if it is broken."""

    def tokenizer_source(self) -> str | None:
        """What other libraries read the tokenizer from: what a whole tokenizer.json would hold.
        None: the model has no tokenizer, or one that they do not read."""

    def describe(self, weights: bool = True) -> dict[str, str]:
        """What tells whether two paths hold the same model, without reading the weights.

        Args:
            weights: whether its weights count.

        Returns:
            File name -> the SHA-256 of what describes the model, and the size of what holds
            weights.

        Raises:
            ModelError: a file cannot be read.

        Example:
            >>> open_files(resolve_model("demo")).describe()
            {'config.json': 'SHA-256 5a0c…', 'model.safetensors': '1181360 bytes'}
        """


def open_files(path: str | Path) -> ModelFiles:
    """The files of the model at `path`; nothing is read yet.

    Example:
        >>> open_files("Qwen3-0.6B-Q8_0.gguf").tokenizer().backend.encode("Hello").ids
    """
    path = Path(path)
    return GgufModel(path) if is_gguf(path) else ModelDirectory(path)


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """See ModelFiles. In Hugging Face format."""

    format: ClassVar[str] = "huggingface"
    path: Path

    def tokenizer(self) -> TokenizerFiles | None:
        """From tokenizer.json or SentencePiece's files, with tokenizer_config.json and
        chat_template.jinja if they exist."""
        file = self.path / "tokenizer.json"
        if file.is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises nothing more precise
                raise ModelError(f"{file} cannot be read: {error}") from error
            _check_post_processor(file, backend)
            complete(backend, self.path)
        else:
            found = find_tokenizer(self.path)
            if found is None:
                return None
            backend = found
        config = read_optional_json(self.path / "tokenizer_config.json")
        templates = _chat_templates(self.path, config)
        class_name = config.get("tokenizer_class", None)
        return TokenizerFiles(
            backend,
            special_tokens(config, self.path),
            templates.get("default"),
            class_name if isinstance(class_name, str) else DEFAULT_CLASS,
            config.get("response_template", None),
            templates.get("tool_use"),
        )

    def tokenizer_source(self) -> str | None:
        """See ModelFiles.tokenizer_source. Those of SentencePiece are not built for it, which takes
        seconds: llguidance refuses vocabularies that mark spaces and have no bytes."""
        read = self.tokenizer() if (self.path / "tokenizer.json").is_file() else None
        return None if read is None else read.backend.to_str()

    def describe(self, weights: bool = True) -> dict[str, str]:
        """See ModelFiles.describe."""
        return _facts(self.path, self._facts(weights))

    def _facts(self, weights: bool) -> Iterator[tuple[str, str]]:
        for path in sorted(self.path.iterdir()):
            if path.name == "config.json" or (weights and path.name.endswith(".index.json")):
                yield path.name, _digest(path.read_bytes())
            elif weights and path.suffix == ".safetensors":
                yield path.name, f"{path.stat().st_size} bytes"


@dataclass(frozen=True, slots=True)
class GgufModel:
    """See ModelFiles. In a GGUF file, and the others that the model is split into."""

    format: ClassVar[str] = "gguf"
    path: Path

    def tokenizer(self) -> TokenizerFiles | None:
        """See ModelFiles.tokenizer."""
        read = read_tokenizer(read_gguf(self.path))
        if read is None:
            return None
        return TokenizerFiles(
            read.backend,
            read.special_tokens,
            read.chat_template,
            tool_template=read.tool_template,
        )

    def tokenizer_source(self) -> str | None:
        """See ModelFiles.tokenizer_source."""
        read = self.tokenizer()
        return None if read is None else read.backend.to_str()

    def describe(self, weights: bool = True) -> dict[str, str]:
        """See ModelFiles.describe. The header is what describes the model."""
        return _facts(self.path, self._facts(weights))

    def _facts(self, weights: bool) -> Iterator[tuple[str, str]]:
        tensors = read_gguf(self.path).tensors.values()
        for part in sorted({tensor.path for tensor in tensors}):
            first = min(tensor.offset for tensor in tensors if tensor.path == part)
            with part.open("rb") as file:
                digest = _digest(file.read(first))
            yield part.name, f"{digest}, {part.stat().st_size} bytes" if weights else digest


def _digest(data: bytes) -> str:
    return f"SHA-256 {hashlib.sha256(data).hexdigest()[:16]}"


def _facts(path: Path, facts: Iterable[tuple[str, str]]) -> dict[str, str]:
    try:
        return dict(facts)
    except OSError as error:
        raise ModelError(f"{error.filename or path} cannot be read ({error.strerror})") from error


def _check_post_processor(file: Path, backend: tokenizers.Tokenizer) -> None:
    """Raises ModelError if it puts special tokens around a text that it does not describe, which
    the library finds out when it encodes one, and panics."""
    if backend.post_processor is None:
        return
    whole: dict[str, Any] = json.loads(backend.post_processor.__getstate__())
    for part in whole.get("processors", [whole]):
        pieces = [*part.get("single", ()), *part.get("pair", ())]
        for token in (piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece):
            if token not in part["special_tokens"]:
                raise ModelError(f"{file}: post_processor has no {shown(token)} in special_tokens")


def _chat_templates(directory: Path, config: Fields) -> dict[str, str]:
    """Name -> source, of the names that transformers takes by itself: "default", and "tool_use" for
    conversations with tools.

    Files come before chat_template in tokenizer_config.json, which may hold several named ones.
    """
    templates = config.get("chat_template", None)
    named: dict[object, object] = {"default": templates}
    if isinstance(templates, list):
        entries = [entry for entry in templates if isinstance(entry, dict)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
    files = {
        "default": directory / "chat_template.jinja",
        "tool_use": directory / "additional_chat_templates" / "tool_use.jinja",
    }
    if any(file.is_file() for file in files.values()):
        named = {"default": named.get("default")}
    found = {}
    for name, file in files.items():
        source = read_text(file) if file.is_file() else named.get(name)
        if source is None:
            continue
        if not isinstance(source, str):
            raise config.error(
                "chat_template", "it must be a template or a list of named templates"
            )
        found[name] = source
    return found
