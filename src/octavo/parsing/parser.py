"""Reads the text of an answer, as it comes, by its model's template."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from octavo.parsing.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from octavo.parsing.json_calls import CallPaths, JsonCalls, Layout, Part
from octavo.parsing.template import (
    CALLS,
    CONTENT,
    REASONING,
    Delimiter,
    Region,
    ResponseTemplate,
    placeholder,
)
from octavo.parsing.values import Unreadable, cast_arguments, region_value

BARE_KINDS = ("text", "xml-inline", "kv-lines")  # of content, in which strings have no quotes
MAX_READ = 1 << 12  # characters that were read already and are still held
KEPT = 64  # of them, which patterns may look back at
MAX_HELD = 1 << 10  # characters that may become a delimiter; longer ones are text


@dataclass(slots=True)
class _Open:
    """The region in which the text is."""

    region: Region
    is_implicit: bool = True
    delimiter: str = ""  # that opened it, with the white space before
    captures: Mapping[str, str] = field(default_factory=dict)
    calls: JsonCalls | None = None  # if its calls are read as they come
    body: list[str] = field(default_factory=list)  # the text of a region of calls


class ResponseParser:
    """Reads one answer. See `events` for how it is used.

    White space next to a delimiter belongs to the delimiter. What stands in a region of calls and
    is no call is content, with its delimiters, so that nothing that a model says is lost. Where
    calls are JSON, a delimiter in one of its strings closes nothing.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        prefix: str = "",
        properties: Mapping[str, Mapping[str, Any]] | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        """
        Args:
            template: how the model writes.
            prefix: what of the answer its prompt has already. It brings no events, but for a call
                that it leaves open.
            properties: of each tool's parameters, by the tool's name; bare texts become values of
                these types.
            names: of the tools; JSON in the place of a call that names none of them is content.
                None: it may name any.
        """
        self._template = template
        self._properties = properties or {}
        self._names = names
        self._buffer = ""
        self._place = 0  # before it, the buffer has been read
        self._events: list[Event] = []
        self._num_calls = 0
        self._spaces = ""  # at the end of the text so far; a delimiter may follow
        self._drops_spaces = False  # a delimiter came before
        self._open = self._implicit()
        [first, *others] = template.regions
        self._is_plain = not others and first.name == CONTENT and first.closing is None
        if prefix:
            self._events = self._begun(self.feed(prefix))
            self._spaces = ""

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    def feed(self, text: str) -> list[Event]:
        """Take in the next piece of the text."""
        if self._is_plain:
            return [Content(text)] if text else []
        # In pieces: after each delimiter, all others are searched in what is there.
        for start in range(0, len(text), MAX_READ):
            self._buffer += text[start : start + MAX_READ]
            self._read(is_end=False)
            if self._place > MAX_READ:
                self._buffer = self._buffer[self._place - KEPT :]
                self._place = KEPT
        return self._taken()

    def finish(self) -> list[Event]:
        """The text has ended."""
        self._read(is_end=True)
        self._say_spaces()
        if self._open is not None and not self._open.is_implicit:
            self._close("")
            self._say_spaces()
        return self._taken()

    # ---------------------------------------------------------------- delimiters

    def _read(self, is_end: bool) -> None:
        while (found := self._next(is_end)) is not None:
            region, match = found
            self._take(self._buffer[self._place : match.start()])
            self._place = match.end()
            if region is not None:
                self._enter(region, match)
                continue
            had_region = self._open is not None and not self._open.is_implicit
            self._close(match[0])
            if not had_region and not match[0]:
                return  # an end without length would be found for ever
        # Nothing more that can be a delimiter: _next has taken the rest.

    def _next(self, is_end: bool) -> tuple[Region | None, regex.Match[str]] | None:
        """The next delimiter, and the region that it opens: None if it closes the one that is open.
        None if there is no delimiter yet; then what can be no part of one has been taken in."""
        best: tuple[tuple[int, int, bool, str], Region | None, regex.Match[str]] | None = None
        hold = len(self._buffer)
        for region, delimiter in self._watched():
            match = self._search(delimiter, is_end)
            if match is None:
                continue
            if not is_end and (match.partial or delimiter.may_grow(match, len(self._buffer))):
                hold = min(hold, match.start())
                continue
            # As in transformers: the first one, of several the longest.
            name = "" if region is None else region.name
            key = (match.start(), match.start() - match.end(), region is None, name)
            if best is None or key < best[0]:
                best = key, region, match
        hold = max(hold, len(self._buffer) - MAX_HELD)
        if best is not None and (is_end or best[2].start() < hold):
            return best[1], best[2]
        self._take(self._buffer[self._place : hold])
        self._place = max(self._place, hold)
        return None

    def _search(self, delimiter: Delimiter, is_end: bool) -> regex.Match[str] | None:
        """The next place where a delimiter stands, or, before the end, may begin to stand."""
        while True:
            match = delimiter.pattern.search(self._buffer, self._place, partial=not is_end)
            calls = None if self._open is None else self._open.calls
            if match is None or calls is None or match.start() == len(self._buffer):
                return match
            self._take(self._buffer[self._place : match.start()])
            self._place = match.start()
            if not calls.in_string:
                return match
            self._take(self._buffer[self._place])
            self._place += 1

    def _watched(self) -> list[tuple[Region | None, Delimiter]]:
        watched: list[tuple[Region | None, Delimiter]] = []
        if self._open is None or self._open.is_implicit:
            watched = [(each, each.opening) for each in self._template.regions if each.opening]
        if self._open is not None and self._open.region.closing is not None:
            watched.append((None, self._open.region.closing))
        return watched

    # ---------------------------------------------------------------- regions

    def _implicit(self) -> _Open | None:
        region = self._template.implicit
        return None if region is None else _Open(region)

    def _enter(self, region: Region, match: regex.Match[str]) -> None:
        captures = {name: each for name, each in match.groupdict().items() if each is not None}
        self._open = _Open(region, False, self._spaces + match[0], captures)
        self._drop_spaces()
        paths = call_paths(region) if region.name == CALLS else None
        if paths is not None:
            self._open.calls = JsonCalls(paths, _given_name(region, captures), self._names)

    def _take(self, text: str) -> None:
        """Text of the region that is open."""
        if not text or self._open is None:
            return
        region = self._open.region
        if region.name == CALLS:
            self._open.body.append(text)
            if self._open.calls is not None:
                self._add(self._open.calls.feed(text))
        elif region.name == CONTENT or region.name in REASONING:
            self._say(text)

    def _close(self, delimiter: str) -> None:
        """The region that is open ends, with this delimiter."""
        current, self._open = self._open, self._implicit()
        self._drop_spaces()
        if current is None or current.region.name != CALLS:
            return
        unread = self._end_calls(current)
        if unread is None:
            unread = f"{current.delimiter}{''.join(current.body)}{delimiter}"
        if unread.strip() and self._open is not None:
            self._drops_spaces = False
            self._say(unread)

    def _end_calls(self, current: _Open) -> str | None:
        """Bring the calls of a region to their end. Returns what follows them; None if there are
        none."""
        if current.calls is not None:
            self._add(current.calls.finish())
            return current.calls.rest if current.calls.num_calls else None
        try:
            value = region_value(current.region, "".join(current.body), current.captures)
            is_bare = current.region.content in BARE_KINDS
            values = value if isinstance(value, list) else [value]
            calls = [self._read_call(each, is_bare) for each in values]
        except Unreadable:
            return None
        for name, written in calls:
            self._add([("name", name), ("arguments", written), ("end", "")])
        return ""

    def _read_call(self, value: Any, is_bare: bool) -> tuple[str, str]:
        """The name of a call, and its arguments as JSON. Raises Unreadable."""
        name, arguments = _call_of(value)
        cast = cast_arguments(arguments, self._properties.get(name, {}), is_bare)
        try:
            written = cast if isinstance(cast, str) else _as_json(cast)
            f"{name}{written}".encode()
        # 0xfff... may have too many digits, 1e999 is no JSON, and "\ud800" no text by itself.
        except (ValueError, RecursionError) as error:
            raise Unreadable(str(error)) from None
        return name, written

    # ---------------------------------------------------------------- events

    def _add(self, parts: Sequence[Part]) -> None:
        """Parts of calls."""
        for kind, text in parts:
            if kind == "name":
                self._events.append(ToolCallBegin(self._num_calls, text))
                self._num_calls += 1
            elif kind == "arguments":
                self._events.append(ToolCallArguments(self._num_calls - 1, text))
            else:
                self._events.append(ToolCallEnd(self._num_calls - 1))

    def _say(self, text: str) -> None:
        """Text of the region that is open; white space at its end waits for what follows."""
        if self._drops_spaces:
            text = text.lstrip()
        if not text:
            return
        self._drops_spaces = False
        if text.isspace():
            self._spaces += text
            return
        text = self._spaces + text
        said = text.rstrip()
        self._spaces = text[len(said) :]
        self._add_text(said)

    def _say_spaces(self) -> None:
        self._add_text(self._spaces)
        self._spaces = ""

    def _add_text(self, text: str) -> None:
        if text and self._open is not None:
            is_reasoning = self._open.region.name in REASONING
            self._events.append(Reasoning(text) if is_reasoning else Content(text))

    def _drop_spaces(self) -> None:
        """White space before this place and after it belongs to a delimiter."""
        self._spaces = ""
        self._drops_spaces = True

    def _begun(self, events: Sequence[Event]) -> list[Event]:
        """The events of the call that a prefix leaves open, as those of the first call."""
        last = self._num_calls - 1
        own = [each for each in events if isinstance(each, ToolCallBegin | ToolCallArguments)]
        is_open = last >= 0 and ToolCallEnd(last) not in events
        self._num_calls = int(is_open)
        return [each._replace(number=0) for each in own if is_open and each.number == last]

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def call_paths(region: Region) -> CallPaths | None:
    """Where the calls of a region of JSON have their parts; None if that is known only when all of
    it has been read."""
    if region.content not in ("json", "json-sequence") or region.content_args:
        return None
    call = _function(region.transform)
    if not isinstance(call, dict):
        return None
    name, arguments = placeholder(call.get("name")), placeholder(call.get("arguments"))
    if name is None or arguments is None:
        return None
    captures = () if region.opening is None else region.opening.pattern.groupindex
    if region.transform_each or region.content == "json-sequence":
        layout: Layout = "sequence" if region.content == "json-sequence" else "list"
        is_plain = name[0] not in captures and arguments[0] not in captures
        return CallPaths(layout, name, arguments) if is_plain else None
    if arguments[0] != "content" or (name[0] != "content" and name[0] not in captures):
        return None
    return CallPaths("one", name[1:] if name[0] == "content" else None, arguments[1:])


def _given_name(region: Region, captures: Mapping[str, str]) -> str | None:
    path = placeholder(_function(region.transform)["name"])
    assert path is not None, "call_paths has checked it"
    return captures.get(path[0]) if not region.transform_each else None


def _function(value: Any) -> Any:
    """The part of a call that has its name and arguments."""
    return value.get("function", value) if isinstance(value, dict) else None


def _as_json(value: Any) -> str:
    """A value as JSON. Raises ValueError and RecursionError."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        written.encode()
    except UnicodeEncodeError:  # halves of characters, which escapes can write
        return json.dumps(value)
    return written


def _call_of(value: Any) -> tuple[str, Any]:
    """The name and the arguments of a call. Raises Unreadable."""
    call = _function(value)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise Unreadable("it is not a call")
    arguments = call.get("arguments", {})
    return call["name"], {} if arguments is None else arguments
