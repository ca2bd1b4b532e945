"""Calls that are written in JSON, read while they come: the name, and the text of the arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

_WHITE_SPACE = " \t\n\r"
_STRING_PART = re.compile(r'[^"\\]*')
_SCALAR_PART = re.compile(r"[^,\]}\s]*")

# A path in a JSON value: names of members.
Path = tuple[str, ...]
Layout = Literal["one", "list", "sequence"]  # one call; an array of calls; one after the other
Part = tuple[Literal["name", "arguments", "end"], str]


@dataclass(frozen=True, slots=True)
class CallPaths:
    """Where a call's name and arguments are in its object."""

    layout: Layout
    name: Path | None  # None: it is not there, but in the delimiter before
    arguments: Path

    @property
    def depth(self) -> int:
        """How deep in a call its parts are at most."""
        return max(len(self.name or ()), len(self.arguments))


class JsonCalls:
    """Reads calls in a JSON text that grows.

    `feed` returns parts of calls: the name when it is whole, pieces of the arguments' text as it
    was written, and the end of each call. Arguments before their name wait for it.
    """

    def __init__(
        self, paths: CallPaths, name: str | None = None, names: Collection[str] | None = None
    ) -> None:
        """
        Args:
            name: that of the one call, if its object does not say it.
            names: what has another name in its object is no call. None: any name is one.
        """
        self._paths = paths
        self._names = names
        self._given_name = name
        self._level = 1 if paths.layout == "list" else 0  # at which values are calls
        # For each open object or array: the name of the open member, or None in an array.
        self._keys: list[str | None] = []
        self._kinds: list[str] = []
        self._expects: Literal["value", "first", "key", "colon", "comma", "nothing"] = "value"
        self._string: list[str] | None = None  # of the open string, with its quotes
        self._is_escaped = False
        self._is_key = False
        self._scalar: list[str] | None = None  # of the open number, true, false or null
        self._captures: Literal["name", "arguments"] | None = None
        self._capture_level = 0
        self._captured: list[str] = []  # of that value, and not returned
        # The arguments are a string, whose text is the JSON that is meant.
        self._is_text = False
        self._early = ""  # arguments that came before the name
        self._is_shown = False  # the name has been returned
        self._has_arguments = False
        self._parts: list[Part] = []
        self.is_broken = False  # it is no JSON, or something else than calls
        self.num_calls = 0  # whose names have been returned
        self._rest: list[str] = []  # what comes after it is broken

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends within a string."""
        return self._string is not None and not self.is_broken

    @property
    def rest(self) -> str:
        """What comes after it is broken."""
        return "".join(self._rest)

    def feed(self, text: str) -> list[Part]:
        """Take in more text."""
        place = 0
        while place < len(text) and not self.is_broken:
            place = self._step(text, place)
        if self.is_broken:
            self._rest.append(text[place:])
        if self._captures == "arguments" and self._is_shown and not self._is_text:
            self._release()
        return self._taken()

    def finish(self) -> list[Part]:
        """No more text comes: end the call that is open."""
        if self._scalar is not None and not self.is_broken:
            self._end_scalar()
        if self._is_shown:
            self._release()
            self._end_call()
        return self._taken()

    # ---------------------------------------------------------------- inside

    def _step(self, text: str, place: int) -> int:
        """Read one thing; returns the place behind it."""
        if self._string is not None:
            return self._in_string(text, place)
        if self._scalar is not None:
            match = _SCALAR_PART.match(text, place)
            assert match is not None, "it may be empty"
            self._scalar.append(match[0])
            self._note(match[0])
            if match.end() < len(text):
                self._end_scalar()
            return match.end()
        character = text[place]
        if character in _WHITE_SPACE:
            self._note(character)
            return place + 1
        if self._expects == "nothing" and self._paths.layout == "sequence":
            if character in ";,":
                return place + 1
            self._expects = "value"
        if character == '"' and self._expects in ("value", "first", "key"):
            self._is_key = bool(self._kinds) and self._kinds[-1] == "{" and self._expects != "value"
            if not self._is_key:
                self._begin_value(character)
            self._string = [character]
            self._note(character)
        elif character == ":" and self._expects == "colon":
            self._expects = "value"
            self._note(character)
        elif character == "," and self._expects == "comma":
            self._expects = "key" if self._kinds[-1] == "{" else "value"
            self._note(character)
        elif character in "]}" and self._expects in ("comma", "first"):
            self._close(character)
        elif self._expects == "value" or (self._expects == "first" and self._kinds[-1] == "["):
            self._begin_value(character)
            if character in "{[":
                self._kinds.append(character)
                self._keys.append(None)
                self._expects = "first"
                self._note(character)
            elif character in "-0123456789tfn":
                self._scalar = []
                return place
            else:
                self.is_broken = True
                return place
        else:
            self.is_broken = True
            return place
        return place + 1

    def _in_string(self, text: str, place: int) -> int:
        assert self._string is not None
        if self._is_escaped:
            piece, self._is_escaped = text[place], False
        else:
            match = _STRING_PART.match(text, place)
            assert match is not None, "it may be empty"
            piece = match[0]
            if not piece:
                piece = text[place]
                self._is_escaped = piece == "\\"
                if piece == '"':
                    self._string.append(piece)
                    self._note(piece)
                    self._end_string()
                    return place + 1
        self._string.append(piece)
        self._note(piece)
        return place + len(piece)

    def _end_string(self) -> None:
        assert self._string is not None
        written, self._string = "".join(self._string), None
        if not self._is_key:
            self._end_value()
            return
        try:
            self._keys[-1] = json.loads(written, strict=False)
        except ValueError:
            self.is_broken = True
        self._expects = "colon"

    def _end_scalar(self) -> None:
        assert self._scalar is not None
        written, self._scalar = "".join(self._scalar), None
        try:
            json.loads(written)
        except ValueError:
            self.is_broken = True
        self._end_value()

    def _note(self, text: str) -> None:
        """Keep text of the value that is captured."""
        if self._captures is not None:
            self._captured.append(text)

    def _begin_value(self, character: str) -> None:
        depth = len(self._kinds)
        if depth == self._level:
            self._begin_call()
        expected = "[" if depth < self._level else "{"
        if depth <= self._level and character != expected:
            self.is_broken = True
        if self._captures is not None or depth - self._level > self._paths.depth:
            return
        path = tuple(self._keys[self._level :])
        if path == self._paths.name and not self._is_shown and depth > self._level:
            self._captures = "name"
        elif path == self._paths.arguments and not self._has_arguments:
            self._captures = "arguments"
            self._has_arguments, self._is_text = True, character == '"'
        self._capture_level = depth

    def _begin_call(self) -> None:
        self._is_shown, self._has_arguments, self._early = False, False, ""
        if self._given_name is not None:
            self._show(self._given_name)

    def _close(self, character: str) -> None:
        self._note(character)
        if self._kinds.pop() + character not in ("{}", "[]"):
            self.is_broken = True
            return
        self._keys.pop()
        self._end_value()

    def _end_value(self) -> None:
        depth = len(self._kinds)
        self._expects = "comma" if depth else "nothing"
        if self._captures is not None and depth == self._capture_level:
            self._end_capture()
        if depth == self._level and not self.is_broken:
            if not self._is_shown:
                self.is_broken = True  # a call without a name
                return
            if not self._has_arguments:
                self._parts.append(("arguments", "{}"))
            self._end_call()

    def _end_capture(self) -> None:
        kind, self._captures = self._captures, None
        if kind == "arguments":
            if self._is_shown:
                self._release()
            else:
                self._early = self._text()
            return
        try:
            name = json.loads("".join(self._captured), strict=False)
            str(name).encode()
        except ValueError:  # as of half a character
            name = None
        self._captured = []
        if isinstance(name, str) and name and (self._names is None or name in self._names):
            self._show(name)
        else:
            self.is_broken = True

    def _show(self, name: str) -> None:
        self._is_shown = True
        self.num_calls += 1
        self._parts.append(("name", name))
        if self._early:
            self._parts.append(("arguments", self._early))

    def _text(self) -> str:
        """What has been captured of the arguments."""
        written, self._captured = "".join(self._captured), []
        if not self._is_text:
            return written
        try:
            text = str(json.loads(written, strict=False))
            text.encode()
        except ValueError:  # as of half a character
            return written
        return text

    def _release(self) -> None:
        text = self._text()
        if text:
            self._parts.append(("arguments", text))

    def _end_call(self) -> None:
        self._parts.append(("end", ""))
        self._is_shown = False

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
