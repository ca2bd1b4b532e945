"""How the outputs of one conversation are read: as text, reasoning and calls of tools.

An endpoint that shows answers in its own way asks for a reader before it opens the streams, and
then reads each output by a parser of its own:

    >>> reader = answer_reader(context, prompt, tools)       # prompt: token ids
    >>> parser = reader.parser()                             # one for each output
    >>> for event in parser.feed(delta.text): ...        # see octavo.parsing.events
    >>> for event in parser.finish(): ...                    # when the output has ended
    >>> reader.finish_reason("stop", parser)                 # "tool_calls" if there were any

Chats show how (`endpoints/chat.py`): a `Dialect` with `reading`, and a `Writer` that finds the
reader as `self.reader`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.parsing.formats import AUTO, NONE, THINKING, AnswerFormat, find_format
from octavo.parsing.parser import ResponseParser
from octavo.server.http.context import Context
from octavo.server.http.replies import FinishReason
from octavo.server.http.tools import ToolUse

# Of a prompt, the tokens among which an answer may have begun.
MAX_PREFIX_TOKENS = 1_024
_MARK = "\ue0ff"  # stands for what a user says


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Reads the outputs of one prompt."""

    format: AnswerFormat
    prompt: str  # the end of its text
    tools: ToolUse | None = None

    def parser(self) -> ResponseParser:
        """A new one, for one output."""
        if self.tools is None:
            return self.format.parser(self.prompt, with_calls=False)
        properties = {each.name: each.properties for each in self.tools.callable}
        return self.format.parser(self.prompt, properties)

    def finish_reason(
        self, reason: FinishReason | None, parser: ResponseParser
    ) -> FinishReason | None:
        """What a client calls an output's end: one that calls tools waits for what they say."""
        return "tool_calls" if reason == "stop" and parser.num_calls else reason

    def new_call_id(self) -> str:
        """An id for a call."""
        mark = uuid.uuid4().hex
        return mark[:9] if self.format.short_ids else f"call_{mark[:24]}"


PLAIN = AnswerReader(find_format(None), "")


def answer_reader(
    context: Context, prompt: Sequence[int], tools: ToolUse | None = None
) -> AnswerReader:
    """How outputs that continue a prompt are read."""
    format_ = context.answer_format
    if tools is None and format_.thinking is None and not format_.reads_prefix:
        return AnswerReader(format_, "")
    tokenizer = context.tokenizer("messages")
    end = tokenizer.decode(prompt[-MAX_PREFIX_TOKENS:], skip_special_tokens=False)
    return AnswerReader(format_, end, tools)


def format_of(
    tokenizer: Tokenizer | None, calls: str = AUTO, reasoning: str = AUTO
) -> AnswerFormat:
    """How a model answers, by its tokenizer's files and the server's options; see `find_format`."""
    if tokenizer is None:
        return find_format(None, None, NONE if calls == AUTO else calls, reasoning)
    return find_format(
        tokenizer.chat_template,
        tokenizer.response_template,
        calls,
        reasoning,
        _header(tokenizer),
    )


def _header(tokenizer: Tokenizer) -> str:
    """What a model's chat template writes between the last message and the answer, without the
    beginning of reasoning; "" if that is not known."""
    try:
        text = tokenizer.render_chat([{"role": "user", "content": _MARK}])
    except InvalidRequest:
        return ""
    header = text.rpartition(_MARK)[2] if _MARK in text else ""
    for opening, _ in THINKING.values():
        header = header.partition(opening)[0]
    return header
