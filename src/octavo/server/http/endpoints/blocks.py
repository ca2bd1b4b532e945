"""An answer as a sequence of blocks: reasoning, text, and calls of tools.

APIs that show answers so (`endpoints/responses.py`, `endpoints/messages.py`) translate their bodies
to a chat's and write its outputs in their own words: a `BlockWriter` says what they are.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field

from octavo.errors import InvalidRequest
from octavo.outputs import RequestOutput, SequenceDelta
from octavo.parsing.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    joined,
)
from octavo.server.engine_process.stream import RequestStream
from octavo.server.http.answers import AnswerReader
from octavo.server.http.bodies import without_nulls
from octavo.server.http.context import encode, reply
from octavo.server.http.dialect import ReplyWriter, finish_reason
from octavo.server.http.endpoints import chat
from octavo.server.http.endpoints.chat import ChatBody
from octavo.server.http.errors import ApiError, as_api_error
from octavo.server.http.replies import FinishReason
from octavo.server.http.streams import check_ended, while_connected
from octavo.server.http.tools import MAX_NAME, NAME

ToolName = Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=f"^{NAME.pattern}$")]
Kind = Literal["reasoning", "text", "call"]


class Lenient(BaseModel):
    """What clients send back as other servers have given it to them: unknown fields are ignored."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(slots=True)
class Block:
    """A part of an answer: its text, or the arguments of a call, as far as they have come."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""  # of the tool
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def arguments(self) -> str:
        """The text of a JSON object, also if the call has none."""
        return self.text or "{}"


class Begun(NamedTuple):
    block: Block


class Grown(NamedTuple):
    block: Block
    text: str


class Ended(NamedTuple):
    block: Block


Step = Begun | Grown | Ended


class Blocks:
    """Collects the blocks of one output from its parser's events."""

    def __init__(self, reader: AnswerReader) -> None:
        self.all: list[Block] = []
        self.cut_index: int | None = None  # of the block that the output's end has ended
        self.parser = reader.parser()
        self._reader = reader
        self._open: Block | None = None

    def feed(self, text: str) -> list[Step]:
        """More of the output's text."""
        return self._steps(self.parser.feed(text))

    def finish(self) -> list[Step]:
        """The output has ended. It has a block, if only an empty one."""
        num_whole = len(self.all) - (self._open is not None)
        steps = self._steps(self.parser.finish())
        if not self.all:
            steps += self._begin("text")
        if len(self.all) > num_whole:
            self.cut_index = len(self.all) - 1
        return steps + self._end()

    def _steps(self, events: Iterable[Event]) -> list[Step]:
        steps: list[Step] = []
        for event in joined(events):
            match event:
                case Content(text):
                    steps += self._grow("text", text)
                case Reasoning(text):
                    steps += self._grow("reasoning", text)
                case ToolCallBegin(_, name):
                    steps += self._begin("call", self._reader.new_call_id(), name)
                case ToolCallArguments(_, text):
                    steps += self._grow("call", text)
                case ToolCallEnd():
                    steps += self._end()
        return steps

    def _grow(self, kind: Kind, text: str) -> list[Step]:
        steps: list[Step] = []
        if self._open is None or self._open.kind != kind:
            steps = self._begin(kind)
        assert self._open is not None, "one has begun"
        self._open.parts.append(text)
        return [*steps, Grown(self._open, text)]

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> list[Step]:
        steps = self._end()
        self._open = Block(kind, len(self.all), call_id, name)
        self.all.append(self._open)
        return [*steps, Begun(self._open)]

    def _end(self) -> list[Step]:
        block, self._open = self._open, None
        return [] if block is None else [Ended(block)]


class BlockWriter(ReplyWriter[ChatBody]):
    """Writes one answer as blocks. Events are structures or mappings with a `type`."""

    blocks: Blocks
    reason: FinishReason | None = None  # why it has ended
    stop_reason: int | str | None = None  # the stop string or token that ended it

    @abstractmethod
    def reply(self) -> Any:
        """The whole reply, of the blocks that there are."""

    @abstractmethod
    def opening(self) -> list[Any]:
        """The events before the first block."""

    @abstractmethod
    def step_events(self, step: Step) -> list[Any]:
        """What a step is to clients."""

    @abstractmethod
    def closing(self) -> list[Any]:
        """The events behind the last block."""

    @abstractmethod
    def error_event(self, error: ApiError) -> Any:
        """The event that ends a stream which cannot go on."""

    async def respond(self, outputs: Sequence[RequestOutput]) -> Response:
        [output] = outputs
        [sample] = output.outputs
        self.blocks = Blocks(self.reader)
        self.blocks.feed(sample.text)
        self.blocks.finish()
        self.num_output_tokens = len(sample.token_ids)
        self._end(finish_reason(sample), sample.stop_reason)
        await self.count()
        return reply(self.reply())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events with names; those that come together are one item."""
        self.blocks = Blocks(self.reader)
        [stream] = self.streams
        try:
            yield b"".join(map(named_event, self.opening()))
            async for item in stream:
                if not isinstance(item, SequenceDelta):
                    check_ended(item)
                    continue
                self.num_output_tokens += len(item.token_ids)
                steps = self.blocks.feed(item.text)
                reason = finish_reason(item)
                if reason is not None:
                    steps += self.blocks.finish()
                    self._end(reason, item.stop_reason)
                events = [event for step in steps for event in self.step_events(step)]
                if events:
                    yield b"".join(map(named_event, events))
            await self.count()
            yield b"".join(map(named_event, self.closing()))
        except Exception as error:
            # The status is on its way already, so the error is an event of its own.
            yield named_event(self.error_event(as_api_error(error)))

    def _end(self, reason: FinishReason | None, stop_reason: int | str | None) -> None:
        self.reason = self.reader.finish_reason(reason, self.blocks.parser)
        self.stop_reason = stop_reason
        self.log(self.usage())


def named_event(value: Any) -> bytes:
    """A server-sent event that is called as its `type`."""
    name = value["type"] if isinstance(value, Mapping) else value.type
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(value))


@dataclass(frozen=True, slots=True)
class Words:
    """What a client calls the fields of a chat: patterns of their beginnings -> its own words."""

    names: Mapping[str, str]

    def of(self, error: Exception) -> Exception:
        """The same error about the client's field."""
        if isinstance(error, InvalidRequest):
            return type(error)(self._renamed(error.field), error.reason)
        if isinstance(error, ApiError) and error.reply.error.param is not None:
            detail = error.reply.error
            param = self._renamed(error.reply.error.param)
            message = detail.message.removeprefix(f"{detail.param}: ")
            return ApiError(error.status, f"{param}: {message}", param, detail.code)
        return error

    def _renamed(self, field: str) -> str:
        for pattern, name in self.names.items():
            renamed, count = re.subn(f"^{pattern}", name, field)
            if count:
                return renamed
        return field


def needed(value: Any, where: str) -> Any:
    """The value of a field that may not be missing there."""
    if value is None:
        raise ApiError(400, f"{where}: it is missing", where, "missing_field")
    return value


async def answer_chat(
    request: Request, body: ChatBody, writer: type[BlockWriter] | Any, words: Words
) -> Response:
    """Answer a chat in the words of another API.

    `writer` makes a BlockWriter of request, body, the model's name and the streams. Raises ApiError
    or InvalidRequest about the client's fields.
    """
    dialect = replace(chat.DIALECT, writer=writer)
    try:
        return await while_connected(request.receive, dialect.answer(request, body))
    except (ApiError, InvalidRequest) as error:
        raise words.of(error) from error


def chat_body(**fields: Any) -> ChatBody:
    """A chat with these fields, of those that are not None."""
    return ChatBody.model_validate(without_nulls(fields))


def written_arguments(block: Block) -> msgspec.Raw:
    """The arguments of a call as the model has written them: half a character or 1e999 is JSON, but
    no value. {} if they are no whole JSON object."""
    try:
        value = json.loads(
            block.arguments, parse_int=str, parse_float=str, parse_constant=_no_constant
        )
    except (ValueError, RecursionError):
        value = None
    return msgspec.Raw(block.arguments.encode() if isinstance(value, dict) else b"{}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def new_writer(kind: type[BlockWriter], **more: Any) -> Any:
    """A maker of writers that are also told `more`."""

    def make(
        request: Request, body: ChatBody, model: str, streams: Sequence[RequestStream]
    ) -> BlockWriter:
        writer = kind(request, body, model, streams)
        for name, value in more.items():
            setattr(writer, name, value)
        return writer

    return make
