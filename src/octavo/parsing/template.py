"""How a model writes its answers, as data: transformers' `response_template`, version 1.

A template names regions of the text. Each but one has a delimiter that opens it, and may have one
that closes it; the one without is where the text is otherwise. What a region's text means is said
by `content`, and `transform` arranges that as a message has it.

Source: https://huggingface.co/docs/transformers/main/chat_response_parsing
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

from octavo.errors import ModelError

VERSION = 1
CONTENT_KINDS = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines")
# What octavo adds: several JSON values one after the other, and calls written as in Python.
OWN_KINDS = ("json-sequence", "python-calls")

# What a region of this name is for.
CONTENT, CALLS = "content", "tool_calls"
REASONING = ("reasoning_content", "reasoning", "thinking")

_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_REGION_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
    *("repeats", "join", "optional", "transform", "transform_each"),
}
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


@dataclass(frozen=True, slots=True)
class Delimiter:
    """Where a region begins or ends."""

    pattern: regex.Pattern[str]
    literals: tuple[str, ...]  # () if it is a regular expression

    def may_grow(self, match: regex.Match[str], end: int) -> bool:
        """Whether a whole match could become another one if more text came after `end`."""
        if match.end() < end:
            return False
        if match.start() == match.end() or not self.literals:
            return True
        found = match[0]
        return any(each != found and each.startswith(found) for each in self.literals)


@dataclass(frozen=True, slots=True)
class Region:
    """A part of an answer."""

    name: str
    opening: Delimiter | None
    closing: Delimiter | None
    content: str = "text"
    content_args: Mapping[str, Any] = field(default_factory=dict)
    transform: Any = None
    transform_each: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """The regions of an answer; `anchor` ends where an answer begins in the prompt before it."""

    regions: tuple[Region, ...]
    anchor: regex.Pattern[str] | None

    @property
    def implicit(self) -> Region | None:
        """The region without a delimiter that opens it."""
        return next((each for each in self.regions if each.opening is None), None)

    def region(self, *names: str) -> Region | None:
        """The first region that has one of these names."""
        return next((each for each in self.regions if each.name in names), None)

    def prefix(self, prompt: str) -> str:
        """What of the answer stands in its prompt already."""
        if self.anchor is None:
            return ""
        end = 0
        for match in self.anchor.finditer(prompt):
            end = match.end()
        return prompt[end:]


def read_template(value: object, kinds: tuple[str, ...] = CONTENT_KINDS) -> ResponseTemplate:
    """A template from JSON. Raises ModelError, which says what is wrong with it."""
    if not isinstance(value, dict):
        raise _error("it is not an object")
    if value.get("version", VERSION) != VERSION:
        raise _error(f"version {value['version']!r} is not {VERSION}")
    _check_keys("", value, _TEMPLATE_KEYS)
    fields = value.get("fields")
    if not isinstance(fields, dict) or not fields:
        raise _error("fields is not an object with entries")
    regions = tuple(_region(name, each, kinds) for name, each in fields.items())
    if sum(each.opening is None for each in regions) > 1:
        raise _error("more than one field has no delimiter that opens it")
    anchor = _delimiter("", value, "start_anchor")
    return ResponseTemplate(regions, None if anchor is None else anchor.pattern)


def _region(name: str, value: object, kinds: tuple[str, ...]) -> Region:
    where = f"fields.{name}: "
    if not isinstance(value, dict):
        raise _error(f"{where}it is not an object")
    _check_keys(where, value, _REGION_KEYS)
    content = value.get("content", "text")
    if content not in kinds:
        raise _error(f"{where}content {content!r} is not one of {', '.join(kinds)}")
    arguments = value.get("content_args", {})
    if not isinstance(arguments, dict):
        raise _error(f"{where}content_args is not an object")
    if content == "xml-inline":
        _check_tag_pattern(where, arguments)
    transform = value.get("transform")
    _check_transform(where, transform)
    return Region(
        name,
        _delimiter(where, value, "open"),
        _delimiter(where, value, "close"),
        content,
        arguments,
        transform,
        bool(value.get("transform_each", False)),
    )


def _delimiter(where: str, value: Mapping[str, Any], key: str) -> Delimiter | None:
    literal, source = value.get(key), value.get(f"{key}_pattern")
    if literal is not None and source is not None:
        raise _error(f"{where}{key} and {key}_pattern contradict each other")
    if source is not None:
        return Delimiter(_compiled(f"{where}{key}_pattern", source), ())
    if literal is None:
        return None
    literals = [literal] if isinstance(literal, str) else literal
    if not isinstance(literals, list) or not literals:
        raise _error(f"{where}{key} is neither a text nor a list of texts")
    if not all(isinstance(each, str) and each for each in literals):
        raise _error(f"{where}{key} has an entry that is no text, or an empty one")
    longest_first = sorted(literals, key=len, reverse=True)
    pattern = regex.compile("|".join(map(regex.escape, longest_first)))
    return Delimiter(pattern, tuple(literals))


def _compiled(where: str, source: object) -> regex.Pattern[str]:
    if not isinstance(source, str):
        raise _error(f"{where} is not a text")
    try:
        return regex.compile(source, regex.DOTALL)
    except regex.error as error:
        raise _error(f"{where} is no regular expression: {error}") from None


def _check_tag_pattern(where: str, arguments: Mapping[str, Any]) -> None:
    pattern = _compiled(f"{where}tag_pattern", arguments.get("tag_pattern"))
    if "key" not in pattern.groupindex:
        raise _error(f"{where}tag_pattern has no group named key")


def _check_transform(where: str, value: Any) -> None:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in parts:
        _check_transform(where, each)
    if isinstance(value, str) and _PLACEHOLDER.search(value) and placeholder(value) is None:
        raise _error(f"{where}transform {value!r} has text beside a placeholder")


def _check_keys(where: str, value: Mapping[str, Any], known: set[str]) -> None:
    for name in value:
        if name not in known:
            raise _error(f"{where}there is no field {name!r}")


def placeholder(value: object) -> tuple[str, ...] | None:
    """The path that a transform's "{content.name}" stands for: ("content", "name"). None if it is
    not a placeholder."""
    match = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else tuple(match[1].split("."))


def _error(reason: str) -> ModelError:
    return ModelError(f"response_template in tokenizer_config.json: {reason}")
