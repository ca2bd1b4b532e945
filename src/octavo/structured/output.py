"""What a client may ask of an output's form, checked when it is said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from octavo.core.step import Grammar
from octavo.errors import InvalidRequest, shown

# A schema of this size takes a fraction of a second to refuse, or to compile.
MAX_GRAMMAR_BYTES = 256 << 10
MAX_CHOICES = 4_096


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an output must have; exactly one field is given.

    Raises:
        InvalidRequest: it is not what the field says, or too large; `field` names it.

    Example:
        >>> StructuredOutput(json_schema={"type": "object", "required": ["name"]})
        >>> StructuredOutput(choice=["yes", "no"])
    """

    json_schema: Mapping[str, Any] | bool | str | None = None
    """A JSON schema, or its text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression (without look-around and back references) for the whole output."""
    choice: Sequence[str] | None = None
    """The texts among which the output is one; at most 4,096."""
    grammar: str | None = None
    """A context-free grammar in the Lark syntax of llguidance."""
    parts: Sequence[Mapping[str, str]] | None = None
    """Several grammars, each with a name, a kind ("lark", "json_schema", "lenient_schema", "regex",
    "choice") and a source. The first is the grammar; it may name the others: @name. Lenient schemas
    are kept to as far as llguidance knows their keywords."""
    begun: int = 0
    """How many tokens at the end of the prompt are the beginning of the output that has the form,
    which goes on from there."""
    field: str = "structured"
    """What the client calls this, for errors about it."""

    def __post_init__(self) -> None:
        given = [name for name in _SOURCES if getattr(self, name) not in (None, False)]
        if self.json_schema is False:
            given.insert(0, "json_schema")
        if isinstance(self.begun, bool) or not isinstance(self.begun, int) or self.begun < 0:
            raise self._error("begun", f"{shown(self.begun)} is not a number of tokens")
        if not isinstance(self.json_object, bool):
            raise self._error("json_object", f"{shown(self.json_object)} is not true or false")
        if len(given) != 1:
            what = " and ".join(given) or "nothing"
            raise InvalidRequest(
                self.field, f"{what} is given; give exactly one of {', '.join(_SOURCES)}"
            )

    @classmethod
    def of(cls, field: str, value: object) -> StructuredOutput:
        """`value` as one; a mapping has the names of the fields for keys."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequest(field, f"{shown(value)} is not a StructuredOutput")
        for name in value:
            if name not in (*_SOURCES, "begun"):
                raise InvalidRequest(
                    field, f"there is no {shown(name)}; there are {', '.join(_SOURCES)} and begun"
                )
        return cls(**value, field=field)

    @classmethod
    def going_on(cls, grammar: Grammar, begun: int, field: str) -> StructuredOutput:
        """The rest of an output whose form `to_grammar` has returned."""
        value: Any = grammar.source
        if grammar.kind == "choice":
            value = json.loads(value)
        elif grammar.kind == "parts":
            value = [dict(zip(_PART_KEYS, part, strict=True)) for part in json.loads(value)]
        name = "grammar" if grammar.kind == "lark" else grammar.kind
        return cls(**{name: value}, begun=begun, field=field)

    def to_grammar(self) -> Grammar:
        """What it means, as text. Raises InvalidRequest."""
        for name in _SOURCES:
            value = getattr(self, name)
            if value is None or (name == "json_object" and value is False):
                continue
            kind, source = getattr(self, f"_{name}")(value)
            where = f"{self.field}.{name}" if self.field == "structured" else self.field
            size = len(source.encode(errors="replace"))
            if size > MAX_GRAMMAR_BYTES:
                raise InvalidRequest(where, f"{size} bytes are more than {MAX_GRAMMAR_BYTES}")
            return Grammar(kind, source, where)
        raise AssertionError("one is given")

    def _json_schema(self, value: object) -> tuple[str, str]:
        if isinstance(value, str):
            if len(value) > MAX_GRAMMAR_BYTES:  # before it is read
                raise self._error(
                    "json_schema", f"{len(value)} characters are more than {MAX_GRAMMAR_BYTES}"
                )
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise self._error("json_schema", f"it is not JSON: {error}") from None
        if not isinstance(value, Mapping | bool):
            raise self._error("json_schema", f"{shown(value)} is neither an object nor a boolean")
        try:
            plain = value if isinstance(value, bool) else dict(value)
            return "json_schema", json.dumps(plain, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise self._error("json_schema", f"it is not JSON: {error}") from None

    def _json_object(self, value: bool) -> tuple[str, str]:
        return "json_schema", '{"type": "object"}'

    def _regex(self, value: object) -> tuple[str, str]:
        return "regex", self._text("regex", value)

    def _choice(self, value: object) -> tuple[str, str]:
        if not isinstance(value, list | tuple):
            raise self._error("choice", f"{shown(value)} is not a list of texts")
        if not 0 < len(value) <= MAX_CHOICES:
            raise self._error("choice", f"{len(value)} texts are not between 1 and {MAX_CHOICES}")
        return "choice", json.dumps([self._text("choice", text) for text in value])

    def _grammar(self, value: object) -> tuple[str, str]:
        return "lark", self._text("grammar", value)

    def _parts(self, value: object) -> tuple[str, str]:
        if not isinstance(value, list | tuple) or not value:
            raise self._error("parts", f"{shown(value)} is not a list of grammars")
        parts = []
        for each in value:
            if not isinstance(each, Mapping) or set(each) != set(_PART_KEYS):
                raise self._error("parts", f"{shown(each)} has not name, kind and source")
            if each["kind"] not in _PART_KINDS:
                known = ", ".join(_PART_KINDS)
                raise self._error("parts", f"{shown(each['kind'])} is not one of {known}")
            parts.append([self._text("parts", each[key]) for key in _PART_KEYS])
        return "parts", json.dumps(parts)

    def _text(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise self._error(name, f"{shown(value)} is not a text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            reason = f"{shown(value)} is not valid Unicode: {error.reason}"
            raise self._error(name, reason) from None
        return value

    def _error(self, name: str, reason: str) -> InvalidRequest:
        where = f"{self.field}.{name}" if self.field == "structured" else self.field
        return InvalidRequest(where, reason)


_PART_KEYS = ("name", "kind", "source")
_PART_KINDS = ("lark", "json_schema", "lenient_schema", "regex", "choice")
_SOURCES = tuple(
    each.name for each in fields(StructuredOutput) if each.name not in ("begun", "field")
)
