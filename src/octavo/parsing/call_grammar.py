"""The grammar of an answer in a format: reasoning, then calls of tools, or text of some form.

It is a list of grammars (`StructuredOutput.parts`), of which the first names the others, in
llguidance's form of Lark's syntax. A delimiter that is a token of the vocabulary by itself is
demanded as that token, and free text has none of them; any other delimiter ends the text before it
as soon as it is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import InvalidRequest, shown
from octavo.parsing.argument_schemas import (
    limits_of_strings,
    listed_values,
    may_be_text,
    properties_of,
    required_of,
)
from octavo.parsing.formats import AnswerFormat, CallSyntax, Thinking, around_argument, named
from octavo.parsing.template import CALLS
from octavo.parsing.values import is_name_of_argument, parsed

Part = dict[str, str]  # name, kind and source

EMPTY = '""'
TEXT = r"/(.|\n)*/"
_BREAK = r"/[ \t\r\n]{0,8}/"  # before reasoning and behind it


@dataclass(frozen=True, slots=True)
class CallForm:
    """A tool that may be called.

    Attributes:
        name: of the tool.
        schema: of its arguments, an object.
        is_strict: refuse the schema if a part of it cannot be enforced.
        field: what the client calls the schema.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool = False
    field: str = "tools"


def answer_grammars(
    format_: AnswerFormat,
    token_ids: Mapping[str, int],
    thinking: Thinking,
    calls: Sequence[CallForm] = (),
    is_required: bool = False,
    is_parallel: bool = True,
    form: tuple[str, str] | None = None,
    max_bytes: int | None = None,
) -> list[Part]:
    """The grammars of an answer.

    Args:
        format_: how the model answers. It has a syntax of calls if there are any.
        token_ids: the tokens that are never part of a text, by what they are written as.
        thinking: whether the answer begins with reasoning.
        calls: the tools that may be called.
        is_required: the answer is a call.
        is_parallel: it may have several.
        form: kind and source of the grammar of the answer's text, if it has one.
        max_bytes: of the grammars of calls, which may repeat the definitions of a schema for each
            argument. None: any number.

    Raises:
        InvalidRequest: the format has no way to write an argument, or, of a strict tool, to keep it
            to its schema, or there are too many bytes; names the tool's field.
    """
    return _Writer(format_, token_ids, max_bytes).grammars(
        thinking, calls, is_required, is_parallel, form
    )


class _Writer:
    """Writes rules in Lark's syntax, as llguidance has it."""

    def __init__(
        self, format_: AnswerFormat, token_ids: Mapping[str, int], max_bytes: int | None
    ) -> None:
        self._format = format_
        self._max_bytes = max_bytes
        self._num_bytes = 0  # at least, of the arguments so far
        self._token_ids = token_ids
        longest_first = sorted(token_ids, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._rules = [f"TEXT: {TEXT}", f"BREAK: {_BREAK}"]
        self._others: list[Part] = []

    def grammars(
        self,
        thinking: Thinking,
        calls: Sequence[CallForm],
        is_required: bool,
        is_parallel: bool,
        form: tuple[str, str] | None,
    ) -> list[Part]:
        text = "TEXT"
        if form is not None:
            self._others.append(_part("form", *form))
            text = "@form"
        if not calls:
            body = self._delimited(text)
        elif is_required:
            body = self._calls(calls, is_parallel)
        else:
            body = self._calls_or_text(calls, is_parallel, text, form is not None)
        start = f"{self._reasoning(thinking)} {body}"
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        return [_part("answer", "lark", lark), *self._others]

    # ---------------------------------------------------------------- parts of an answer

    def _reasoning(self, thinking: Thinking) -> str:
        if thinking == "none" or self._format.thinking is None:
            return ""
        opening, closing = self._format.thinking
        inside = f"{self._text_until('thought', closing)} BREAK"
        if thinking == "open":
            return inside
        return f"(BREAK {self._literal(opening)} {inside})?"

    def _delimited(self, text: str) -> str:
        """The text of an answer with what stands around it."""
        before, after = self._format.before_text, self._format.after_text
        return f"{self._any_of(before)} {text} {self._any_of(after)}"

    def _calls(self, calls: Sequence[CallForm], is_parallel: bool) -> str:
        """Nothing but calls."""
        syntax = self._syntax
        self._add_calls(calls)
        several = is_parallel and not syntax.is_single
        more = f"({self._literal(syntax.between)} call)*" if several else ""
        before = self._any_of(syntax.before)
        return f"{before} call {more} {self._any_of(syntax.after)}"

    def _calls_or_text(
        self,
        calls: Sequence[CallForm],
        is_parallel: bool,
        text: str,
        has_form: bool,
    ) -> str:
        """Calls within a text or after it, where the model begins one."""
        syntax = self._syntax
        several = is_parallel and not syntax.is_single
        if has_form:
            return f"({self._calls(calls, is_parallel)} | {self._delimited(text)})"
        if not syntax.trigger:
            if syntax.first:
                spaces = r" \t\r\n"
                first = re.escape(syntax.first)
                self._rules.append(f"PLAIN: /[{spaces}]*[^{first}{spaces}](.|\\n)*/")
                text = "PLAIN"
            return f"({self._calls(calls, is_parallel)} | {self._delimited(text)})?"
        self._add_calls(calls, without=syntax.trigger)
        head = self._text_until("head", syntax.trigger)
        if syntax.before == ("",):  # each call has the trigger
            group = f"{head} call_after"
        else:
            self._add_calls(calls)
            rest = self._any_of([each.removeprefix(syntax.trigger) for each in syntax.before])
            more = f"({self._literal(syntax.between)} call)*" if several else ""
            group = f"{head} {rest} call {more} {self._any_of(syntax.after)}"
        return f"({group})* TEXT" if several else f"({group} | TEXT)"

    def _text_until(self, name: str, delimiter: str) -> str:
        """Free text up to a delimiter, and the delimiter."""
        first, *rest = self._pieces(delimiter)
        if first.startswith("<"):  # a token
            return " ".join(["TEXT", first, *rest])
        self._rules.append(f"{name}[lazy]: TEXT {first}")
        return " ".join([name, *rest])

    # ---------------------------------------------------------------- calls

    @property
    def _syntax(self) -> CallSyntax:
        assert self._format.calls is not None, "there are no calls without a syntax"
        return self._format.calls

    def _add_calls(self, calls: Sequence[CallForm], without: str = "") -> None:
        """A rule for any of the calls; in an answer's text, without the trigger that came first."""
        rule = "call_after" if without else "call"
        if without and self._syntax.before != ("",):
            return
        options = []
        if self._syntax.call_id:
            self._rules.append(f"CALL_ID: /{self._syntax.call_id}/")
        for i, call in enumerate(calls):
            begin = named(self._syntax, call.name)
            begin[0] = begin[0].removeprefix(without)
            options.append(f"{rule}_{i}")
            parts = [
                " CALL_ID ".join(map(self._literal, begin)),
                self._arguments(i, call),
                self._literal(self._syntax.end),
            ]
            self._rules.append(f"{rule}_{i}: {' '.join(parts)}")
        self._rules.append(f"{rule}: {' | '.join(options)}")

    def _arguments(self, number: int, call: CallForm) -> str:
        if self._syntax.notation == "json":
            return self._json(f"arguments_{number}", call.schema, call)
        return self._members(number, call)

    def _members(self, number: int, call: CallForm) -> str:
        """The members of an object in their order, those that are not required or not."""
        members, required = properties_of(call.schema), required_of(call.schema)
        is_python = self._syntax.notation == "python"
        # What may follow when all before a member are left out, and when one was written.
        rests = {True: EMPTY, False: EMPTY}
        for place, (name, schema) in reversed(list(enumerate(members.items()))):
            prefix = f"arguments_{number}_{place}"
            written = self._member(prefix, name, schema, call)
            after: dict[bool, str] = {}
            for is_first in (True, False):
                comma = '", "' if is_python and not is_first else ""
                options = [f"{comma} {written} {rests[False]}"]
                if name not in required:
                    options.append(rests[is_first])
                after[is_first] = f"{prefix}_{'first' if is_first else 'next'}"
                self._rules.append(f"{after[is_first]}: {' | '.join(options)}")
                self._count(call, self._rules[-1])
            rests = after
        return rests[True]

    def _count(self, call: CallForm, text: str) -> None:
        """Raises InvalidRequest: with this text of a call's grammar there are too many bytes."""
        self._num_bytes += len(text)
        if self._max_bytes is not None and self._num_bytes > self._max_bytes:
            reason = f"its grammar has more than {self._max_bytes} bytes"
            raise InvalidRequest(call.field, reason)

    def _member(self, prefix: str, name: str, schema: Any, call: CallForm) -> str:
        if self._syntax.notation == "python":
            begin, end = f"{name}=", ""
            if not is_name_of_argument(name):
                begin, end = f"**{{{json.dumps(name, ensure_ascii=False)}: ", "}"
            value = self._json(prefix, schema, call)
            return f"{self._literal(begin)} {value} {self._literal(end)}"
        before, closing = around_argument(self._syntax, name)
        region = self._format.template.region(CALLS)
        assert region is not None, "there are no calls without a region"
        if parsed(region.content, f"{before}{closing}", region.content_args) != {name: ""}:
            raise _refused(call, name, "the model's calls have no way to write this name")
        opening = self._literal(before)
        listed = listed_values(schema)
        if listed:
            return f"{opening} {self._one_of(prefix, list(listed))} {self._literal(closing)}"
        # What is no schema is refused as one.
        if not may_be_text(schema):
            return f"{opening} {self._json(prefix, schema, call)} {self._literal(closing)}"
        limits = limits_of_strings(schema)
        if call.is_strict and limits:
            raise _refused(call, name, f"{limits[0]} cannot be enforced in the model's calls")
        return f"{opening} {self._text_until(f'{prefix}_text', closing)}"

    def _json(self, name: str, schema: Any, call: CallForm) -> str:
        """A reference to a grammar of JSON."""
        kind = "json_schema" if call.is_strict else "lenient_schema"
        self._others.append(_part(name, kind, json.dumps(schema)))
        self._count(call, self._others[-1]["source"])
        return f"@{name}"

    # ---------------------------------------------------------------- literals

    def _one_of(self, prefix: str, texts: Sequence[str]) -> str:
        """One of many texts: those without tokens as one terminal, as rules are all ways to go
        on."""
        plain = [json.dumps(each) for each in texts if each and not self._tokens.search(each)]
        others = [each for each in texts if not each or self._tokens.search(each)]
        options = [self._literal(each) or EMPTY for each in others]
        if plain:
            options.append(f"{prefix}_values".upper())
            self._rules.append(f"{options[-1]}: {' | '.join(plain)}")
        return f"({' | '.join(options)})"

    def _any_of(self, texts: Sequence[str]) -> str:
        if len(texts) == 1:
            return self._literal(texts[0])
        return f"({' | '.join(self._literal(each) or EMPTY for each in texts)})"

    def _literal(self, text: str) -> str:
        return " ".join(self._pieces(text))

    def _pieces(self, text: str) -> list[str]:
        """A text as strings and tokens."""
        pieces, place = [], 0
        for match in self._tokens.finditer(text):
            if match.start() > place:
                pieces.append(json.dumps(text[place : match.start()]))
            pieces.append(f"<[{self._token_ids[match[0]]}]>")
            place = match.end()
        if place < len(text):
            pieces.append(json.dumps(text[place:]))
        return pieces


def _refused(call: CallForm, name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(call.field, f"properties: {shown(name)}: {reason}")


def _part(name: str, kind: str, source: str) -> Part:
    return {"name": name, "kind": kind, "source": source}
