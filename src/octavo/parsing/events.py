"""The events of which an answer consists, whatever way its model writes it.

    >>> parser = answer_format.parser(prompt_text, tools)   # see formats.AnswerFormat
    >>> for text in texts:                      # pieces of the output's text, cut anywhere
    ...     for event in parser.feed(text):
    ...         match event:
    ...             case Content(text): ...
    ...             case Reasoning(text): ...
    ...             case ToolCallBegin(number, name): ...
    ...             case ToolCallArguments(number, text): ...
    ...             case ToolCallEnd(number): ...
    >>> for event in parser.finish(): ...       # what was held back until the end

However the text is cut, the events are the same, but for where a text is divided between
neighbouring events of one kind; `joined` undoes that. Calls are numbered from 0, and their events
never overlap: begin, arguments in any number of pieces, end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Content(NamedTuple):
    """Text of the answer itself."""

    text: str


class Reasoning(NamedTuple):
    """Text with which the model thinks."""

    text: str


class ToolCallBegin(NamedTuple):
    """A call of a tool begins."""

    number: int
    name: str


class ToolCallArguments(NamedTuple):
    """More of the text of a call's arguments, which is a JSON object when it is whole."""

    number: int
    text: str


class ToolCallEnd(NamedTuple):
    """A call is whole, or the output has ended in the middle of it."""

    number: int


Event = Content | Reasoning | ToolCallBegin | ToolCallArguments | ToolCallEnd


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbouring pieces of one text made one; empty texts are left out."""
    whole: list[Event] = []
    for event in events:
        if isinstance(event, ToolCallBegin | ToolCallEnd):
            whole.append(event)
            continue
        last = whole[-1] if whole else None
        if not event.text:
            continue
        if type(last) is type(event) and last is not None and last[:-1] == event[:-1]:
            whole[-1] = event._replace(text=last[-1] + event.text)
        else:
            whole.append(event)
    return whole
