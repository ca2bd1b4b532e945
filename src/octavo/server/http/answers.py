"""How the outputs of one conversation are read: as text, reasoning and calls of tools.

An endpoint that shows answers in its own way asks for a reader before it opens the streams, and
then reads each output by a parser of its own:

    >>> reader = answer_reader(context, prompt, tools)       # prompt: token ids
    >>> params = await answer_params(context, params, reader)  # keep the outputs to the format
    >>> parser = reader.parser()                             # one for each output
    >>> for event in parser.feed(delta.text): ...        # see octavo.parsing.events
    >>> for event in parser.finish(): ...                    # when the output has ended
    >>> reader.finish_reason("stop", parser)                 # "tool_calls" if there were any

Chats show how (`endpoints/chat.py`): a `Dialect` with `reading`, and a `Writer` that finds the
reader as `self.reader`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.parsing.call_grammar import CallForm, answer_grammars
from octavo.parsing.formats import AUTO, NONE, THINKING, AnswerFormat, Thinking, find_format
from octavo.parsing.parser import ResponseParser
from octavo.sampling_params import BeamSearchParams, SamplingParams, ThinkingLimit
from octavo.server.http.bodies import UNSUPPORTED
from octavo.server.http.context import Context
from octavo.server.http.errors import refused
from octavo.server.http.generation import Params
from octavo.server.http.replies import FinishReason
from octavo.server.http.tools import ToolUse
from octavo.structured.output import MAX_GRAMMAR_BYTES, StructuredOutput

# An answer that the prompt has begun must begin among so many last tokens of it.
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
        names = None if self.format.calls is None else properties.keys()
        return self.format.parser(self.prompt, properties, names=names)

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


async def answer_params(
    context: Context,
    params: Params,
    reader: AnswerReader,
    thinking_token_budget: int | None = None,
) -> Params:
    """Parameters that keep outputs to the reader's format: calls to the tools' schemas, reasoning
    to its limit, and the form that `params` demands to what follows the reasoning.

    Raises:
        InvalidRequest, ApiError: a schema cannot be enforced, or the model has no such format;
            names the field.
    """
    format_, tools = reader.format, reader.tools
    if isinstance(params, BeamSearchParams):
        if tools is not None:
            raise refused("tools", "beam search does not call them")
        if thinking_token_budget is not None:
            raise refused("thinking_token_budget", "beam search has none")
    thinking = format_.thinks(reader.prompt)
    if isinstance(params, SamplingParams) and thinking_token_budget is not None:
        params = replace(params, thinking=_limit(format_, thinking, thinking_token_budget))
    if params.skip_special_tokens and (tools is not None or thinking != "none"):
        params = replace(params, kept_special_tokens=_delimiter_tokens(context, format_))
    if tools is None and (params.structured is None or thinking == "none"):
        return params
    structured = await _structured(context, params.structured, reader, thinking)
    return params if structured is None else replace(params, structured=structured)


async def _structured(
    context: Context,
    form: StructuredOutput | Mapping[str, Any] | None,
    reader: AnswerReader,
    thinking: Thinking,
) -> StructuredOutput | None:
    """The form of an answer with tools, or with reasoning before its own form; None if it has
    none."""
    format_, tools = reader.format, reader.tools
    assert form is None or isinstance(form, StructuredOutput), "SamplingParams make it one"
    calls: list[CallForm] = []
    if tools is not None:
        if not format_.has_calls:
            raise refused("tools", "no format in which the model calls tools is known", UNSUPPORTED)
        if format_.calls is None:
            if tools.is_required or tools.is_limited or form is not None:
                reason = "calls cannot be demanded or limited in the format of this model"
                raise refused("tool_choice", reason, UNSUPPORTED)
            return None
        calls = [
            CallForm(each.name, each.schema, each.is_strict, each.field) for each in tools.callable
        ]
    grammar = None if form is None else form.to_grammar()
    parts = answer_grammars(
        format_,
        context.tokenizer("messages").added_tokens,
        thinking,
        calls,
        is_required=tools is not None and tools.is_required,
        is_parallel=tools is not None and tools.is_parallel,
        form=None if grammar is None else (grammar.kind, grammar.source),
        max_bytes=MAX_GRAMMAR_BYTES,
    )
    field = "tools" if tools is not None else form.field if form is not None else ""
    whole = StructuredOutput(parts=parts, field=field)
    try:
        await context.client.check_structured(whole)
    except InvalidRequest:
        # Which of them it is about.
        if form is not None:
            await context.client.check_structured(form)
        for each in tools.callable if tools is not None else ():
            kind = "json_schema" if each.is_strict else "lenient_schema"
            part = {"name": "arguments", "kind": kind, "source": json.dumps(each.schema)}
            await context.client.check_structured(StructuredOutput(parts=[part], field=each.field))
        raise
    return whole


def _limit(format_: AnswerFormat, thinking: Thinking, num_tokens: int) -> ThinkingLimit:
    if format_.thinking is None:
        raise refused(
            "thinking_token_budget", "the model is not known to mark its reasoning", UNSUPPORTED
        )
    return ThinkingLimit(num_tokens, *format_.thinking, is_open=thinking == "open")


def _delimiter_tokens(context: Context, format_: AnswerFormat) -> list[int]:
    """The special tokens that the format's delimiters have, and that its parser must see."""
    tokenizer = context.tokenizer("messages")
    delimiters = format_.delimiters
    return [
        token_id
        for text, token_id in tokenizer.added_tokens.items()
        if text in delimiters and tokenizer.is_special(token_id)
    ]


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
        "\n".join(filter(None, (tokenizer.chat_template, tokenizer.tool_template))),
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
