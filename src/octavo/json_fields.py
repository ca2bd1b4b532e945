"""Reads a JSON file of a model directory, with an error for each field that cannot be right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from octavo.errors import ModelError, UnservedOption, shown

MAX_FILE_BYTES = 64 << 20  # the index of a thousand shards has some megabytes
MAX_COUNT = 1 << 31
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30  # float32 holds them and their inverses
_RANGE = f"from {MIN_NUMBER:g} to {MAX_NUMBER:g}"
_REQUIRED = object()

Choice = TypeVar("Choice")


class Fields:
    """Reads one JSON object with checks; a null counts as absent."""

    def __init__(self, where: str, values: dict[str, Any]) -> None:
        self.where = where  # for messages: the file, and the object inside it
        self.values = values

    def error(self, name: str, expected: str) -> ModelError:
        return ModelError(f"{self.where}: {name} is {shown(self.values.get(name))}; {expected}")

    def with_defaults(self, defaults: dict[str, Any]) -> Fields:
        """The same object with `defaults` where it has nothing; its nulls stay."""
        return Fields(self.where, defaults | self.values)

    def part(self, name: str, default: Any = _REQUIRED) -> Fields:
        """The object under a name."""
        values = self.get(name, default)
        if not isinstance(values, dict):
            raise self.error(name, "it must be a JSON object")
        return Fields(f"{self.where}: {name}", values)

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ModelError(f"{self.where} has no {name}")
        return default

    def count(
        self, name: str, default: Any = _REQUIRED, limit: int = MAX_COUNT, why: str = ""
    ) -> int:
        """A positive integer, at most `limit`; `why` says why no more."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            reason = f" ({why})" if why else ""
            raise self.error(name, f"it must be a positive integer, at most {limit:,}{reason}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A positive number that float32 holds; Python's JSON reads infinities, too."""
        value = self.get(name, default)
        if not _is_number(value):
            raise self.error(name, f"it must be a positive number, {_RANGE}")
        return float(value)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
        values = self.get(name)
        if (
            not isinstance(values, list)
            or len(values) != length
            or not all(map(_is_number, values))
        ):
            raise self.error(name, f"it must be a list of {length} positive numbers, {_RANGE}")
        return tuple(map(float, values))

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "it must be true or false")
        return value

    def choice(self, name: str, choices: Mapping[str, Choice], default: str) -> Choice:
        """What the value stands for."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in choices:
            error = self.error(name, f"octavo knows {', '.join(sorted(choices))}")
            raise UnservedOption(str(error)) if isinstance(value, str) else error
        return choices[value]

    def names(self, name: str, default: list[str]) -> list[str]:
        """A list of strings."""
        value = self.get(name, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "it must be a list of strings")
        return value

    def either(self, name: str, alias: str) -> str:
        """Which of two names for one field is used; ModelError if they contradict each other."""
        value, other = self.get(name, None), self.get(alias, None)
        if value is None and other is not None:
            return alias
        if other is not None and other != value:
            raise self.error(name, f"but {alias}, which means the same, is {shown(other)}")
        return name

    def refuse(self, name: str, harmless: Any, kind: type[ModelError] = UnservedOption) -> None:
        """An option that octavo does not implement must have the value that turns it off.

        kind: of the error; UnservedOption: only octavo's own family does not implement it.
        """
        if self.get(name, harmless) != harmless:
            raise kind(str(self.error(name, "octavo does not implement this option")))

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them; () when absent."""
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise self.error(name, "it must be a token id or a list of token ids")
        return tuple(ids)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and MIN_NUMBER <= value <= MAX_NUMBER


def is_text(value: object) -> bool:
    """Whether it is a string without lone surrogates, which JSON can spell."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_text(path: Path) -> str:
    """The text in `path`, UTF-8; ModelError if there is none, or too much."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        where = path.parent if path.parent.is_dir() else f"directory {path.parent}"
        raise ModelError(f"{where} has no {path.name}: not a model directory") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> Fields:
    """The JSON object in `path`; ModelError if there is none."""
    text = read_text(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # integers of 5,000 digits, too
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__}, not a JSON object")
    return Fields(str(path), values)


def read_optional_json(path: Path) -> Fields:
    """The same; no fields if there is no such file."""
    return read_json(path) if path.exists() else Fields("", {})
