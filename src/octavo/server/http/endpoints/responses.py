"""/v1/responses: OpenAI's newer API for conversations."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, UnsetType
from pydantic import Field

from octavo.server.http.bodies import (
    FAIL_FAST,
    NOT_SUPPORTED,
    Body,
    Integer,
    Metadata,
    Refused,
    check_num_nodes,
)
from octavo.server.http.context import context_of, encode, reply, request_id_of, tenant_of
from octavo.server.http.conversations import ASSISTANT, TOOL, ChatMessage
from octavo.server.http.endpoints.blocks import (
    Begun,
    Block,
    BlockWriter,
    Ended,
    Grown,
    Lenient,
    Step,
    ToolName,
    Words,
    answer_chat,
    chat_body,
    needed,
    new_writer,
)
from octavo.server.http.endpoints.chat import ChatBody, Effort
from octavo.server.http.errors import ApiError, ErrorDetail, refused
from octavo.server.http.generation import INT64_MAX, PromptBody, Text
from octavo.server.http.replies import REASONING_TOKENS
from octavo.server.http.schema import documented
from octavo.server.http.tools import MAX_TOOLS

router = APIRouter(tags=["OpenAI"])

MAX_ITEMS = 4_096
EXAMPLE = {"input": "What is a cat?", "max_output_tokens": 40}
WORDS = Words(
    {
        r"messages": "input",
        r"max_tokens|max_completion_tokens": "max_output_tokens",
        r"response_format\.json_schema\.schema": "text.format.schema",
        r"response_format\.json_schema": "text.format",
        r"response_format": "text.format",
        r"(tools\[[0-9]+\])\.function": r"\1",
        r"tool_choice\.function": "tool_choice",
        r"tool_choice\.allowed_tools\.(tools\[[0-9]+\])\.function": r"tool_choice.\1",
        r"reasoning_effort": "reasoning.effort",
    }
)
SYSTEM_ROLES = ("system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


class InputPart(Lenient):
    """A part of an item's content: text."""

    type: str
    """One of input_text, output_text and text; octavo reads text alone."""
    text: str | None = None
    refusal: str | None = None


Parts = Annotated[list[InputPart], FAIL_FAST]


class InputItem(Lenient):
    """A part of a conversation: a message, a call of a function, its output, or reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    """Not given: message."""
    role: Literal["user", "assistant", "system", "developer"] | None = None
    """Who has written a message."""
    content: str | Parts | None = None
    """The content of a message, or of reasoning."""
    call_id: str | None = None
    """The id that a call and its output share."""
    name: str | None = None
    """The name of the called function."""
    arguments: str | None = None
    """A JSON object as text."""
    output: str | Parts | None = None
    """What the function has returned."""
    summary: Parts | None = None
    """A summary of reasoning."""


class ResponseTool(Lenient):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments, an object."""
    strict: bool | None = None


class NamedResponseTool(Lenient):
    """The function that is to be called."""

    type: Literal["function"]
    name: Text


class AllowedResponseTools(Lenient):
    """Those of the functions that may be called, and whether one has to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedResponseTool], Field(min_length=1, max_length=MAX_TOOLS), FAIL_FAST]


class TextFormat(Body):
    """The form of the output."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    # By its name in JSON; pydantic's models have a method of this name.
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    """A JSON schema."""
    strict: bool | None = None


class TextOptions(Body):
    """The form of the output's text."""

    format: TextFormat | None = None
    verbosity: Annotated[object, Refused(NOT_SUPPORTED, ("medium",))] = None


class ReasoningOptions(Body):
    """How much the model thinks, and how that is shown."""

    effort: Effort | None = None
    """How much the model thinks, if its chat template knows it."""
    summary: Annotated[object, Refused("reasoning is shown whole", ("auto", "none"))] = None
    generate_summary: Annotated[object, Refused("reasoning is shown whole")] = None


class ResponseStreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: Annotated[object, Refused(NOT_SUPPORTED, (False,))] = None


class ResponsesBody(PromptBody):
    """POST /v1/responses"""

    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS), FAIL_FAST]
    """Text, or what the conversation adds: messages, calls and their outputs."""
    instructions: str | None = None
    """A system message; not kept for previous_response_id."""
    previous_response_id: str | None = None
    """Continue the conversation that this response ended; the server keeps the last ones."""
    store: bool | None = None
    """Keep the response for previous_response_id; not given: true."""
    max_output_tokens: Annotated[int, Integer(1, INT64_MAX)] | None = None
    """The longest output, reasoning included; not given: what the context holds."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Integer(-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    seed: Annotated[int, Integer(-INT64_MAX - 1, INT64_MAX)] | None = None
    """Makes draws repeatable."""
    text: TextOptions | None = None
    """The form of the output: text, a JSON object, or JSON that keeps to a schema."""
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS), FAIL_FAST] | None = None
    """The functions that the model may call."""
    tool_choice: (
        Literal["none", "auto", "required"] | NamedResponseTool | AllowedResponseTools | None
    ) = None
    """As in a chat."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls; not given: true."""
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the template, such as enable_thinking."""
    stream: bool | None = None
    """Send the response as server-sent events."""
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata | None = None
    """Notes of your own, which the response repeats: at most 16."""

    include: Annotated[object, Refused(NOT_SUPPORTED, ([], ["reasoning.encrypted_content"]))] = None
    truncation: Annotated[
        object, Refused("use truncate_prompt_tokens, which cuts by tokens", ("disabled",))
    ] = None
    top_logprobs: Annotated[object, Refused("chats have log-probabilities", (0,))] = None
    background: Annotated[object, Refused("use /v1/batches", (False,))] = None
    background_options: Annotated[object, Refused("use /v1/batches")] = None
    context_management: Annotated[object, Refused(NOT_SUPPORTED, ([],))] = None
    moderation: Annotated[object, Refused(NOT_SUPPORTED)] = None
    conversation: Annotated[object, Refused("use previous_response_id")] = None
    prompt: Annotated[object, Refused("use instructions and input")] = None
    max_tool_calls: Annotated[object, Refused("octavo calls no tools itself")] = None
    service_tier: Annotated[object, Refused(NOT_SUPPORTED, ("auto", "default"))] = None


# ---------------------------------------------------------------- what is sent


class OutputText(msgspec.Struct, kw_only=True):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[None] = []


class ReasoningText(msgspec.Struct, kw_only=True):
    """The text of a reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(msgspec.Struct, kw_only=True):
    """An item of the output: what the model answers."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: str
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True):
    """An item of the output: what the model thought."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: str
    summary: list[None] = []
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, kw_only=True):
    """An item of the output: a call of a function."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: str
    call_id: str
    name: str
    arguments: Annotated[str, Meta(description="A JSON object, as the model wrote it.")]


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct):
    """How many tokens of the input were cached."""

    cached_tokens: int
    cache_write_tokens: Annotated[int, Meta(description="Always 0: writing costs nothing.")] = 0


class OutputTokensDetails(msgspec.Struct):
    """How many tokens of the output are reasoning."""

    reasoning_tokens: Annotated[int, Meta(description=REASONING_TOKENS + "; 0 if that fails.")]


class ResponseUsage(msgspec.Struct, kw_only=True):
    """How many tokens a response has taken."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response: the output so far, and the options that it was asked for with."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class ResponseEvent(msgspec.Struct, kw_only=True):
    """What each event has; the others are OpenAI's of this type."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item: dict[str, Any] | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: dict[str, Any] | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[None] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


class DeletedResponse(msgspec.Struct, kw_only=True):
    """A response has been deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ResponsesWriter(BlockWriter):
    """Writes a response, and stores it."""

    id_prefix = "resp_"
    own: ResponsesBody
    messages: list[ChatMessage]  # of the conversation so far, without the instructions
    _number = 0  # of the next event
    _num_thought = 0  # tokens of reasoning

    async def count(self) -> None:
        thoughts = "".join(each.text for each in self.blocks.all if each.kind == "reasoning")
        if thoughts:
            self._num_thought = await self.tokenized_again([thoughts]) or 0

    def reply(self) -> ResponseObject:
        return self._ended()

    def opening(self) -> list[Any]:
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def step_events(self, step: Step) -> list[Any]:
        block = step.block
        place: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        match step:
            case Begun():
                item = self._item(block, "in_progress", is_empty=True)
                added = self._event(
                    "response.output_item.added", item=item, output_index=block.index
                )
                if block.kind == "call":
                    return [added]
                part = _part(block, "")
                return [
                    added,
                    self._event("response.content_part.added", **place, content_index=0, part=part),
                ]
            case Grown(_, text):
                if block.kind == "call":
                    kind = "response.function_call_arguments.delta"
                    return [self._event(kind, **place, delta=text)]
                if block.kind == "reasoning":
                    kind = "response.reasoning_text.delta"
                    return [self._event(kind, **place, content_index=0, delta=text)]
                kind = "response.output_text.delta"
                return [self._event(kind, **place, content_index=0, delta=text, logprobs=[])]
            case Ended():
                return self._done(block, place)

    def closing(self) -> list[Any]:
        response = self._ended()
        return [self._event(f"response.{response.status}", response=response)]

    def error_event(self, error: ApiError) -> Any:
        detail: ErrorDetail = error.reply.error
        fields = {"code": detail.code, "message": detail.message, "param": detail.param}
        return self._event("error", **fields)

    def _done(self, block: Block, place: dict[str, Any]) -> list[Any]:
        """The events of a block that is whole."""
        item = self._item(block, self._status_of(block))
        end = self._event
        if block.kind == "call":
            fields = {"name": block.name, "arguments": item["arguments"]}
            events = [end("response.function_call_arguments.done", **place, **fields)]
        else:
            part, text = _part(block, block.text), block.text
            place = {**place, "content_index": 0}
            if block.kind == "reasoning":
                events = [end("response.reasoning_text.done", **place, text=text)]
            else:
                events = [end("response.output_text.done", **place, text=text, logprobs=[])]
            events.append(end("response.content_part.done", **place, part=part))
        last = end("response.output_item.done", item=item, output_index=block.index)
        return [*events, last]

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=kind, sequence_number=self._number, **fields)
        self._number += 1
        return event

    def _ended(self) -> ResponseObject:
        """The whole response; kept, if it is to be."""
        is_cut = self.reason == "length"
        items = [self._item(each, self._status_of(each)) for each in self.blocks.all]
        response = self._response("incomplete" if is_cut else "completed", items)
        if is_cut:
            response.incomplete_details = {"reason": "max_output_tokens"}
        else:
            response.completed_at = int(time.time())
        response.usage = self._usage()
        if self.own.store is not False:
            store, tenant = context_of(self.request).stored_responses, tenant_of(self.request)
            answer = _answer_message(self.blocks.all)
            messages = [*self.messages, answer]
            shown = encode(response)  # which repeats instructions and tools of any length
            size = len(shown) + sum(map(_num_characters, messages))
            store.put(tenant, self.id, msgspec.Raw(shown), messages, size)
        return response

    def _response(self, status: Any, items: list[dict[str, Any]]) -> ResponseObject:
        own = self.own
        format_ = own.text.format if own.text is not None else None
        shown = {"type": "text"} if format_ is None else _given(format_)
        choice = own.tool_choice
        effort = None if own.reasoning is None else own.reasoning.effort
        defaults = context_of(self.request).client.model_config.sampling_defaults
        return ResponseObject(
            id=self.id,
            created_at=self.head["created"],
            status=status,
            instructions=own.instructions,
            max_output_tokens=own.max_output_tokens,
            metadata=own.metadata or {},
            model=self.head["model"],
            output=items,
            parallel_tool_calls=own.parallel_tool_calls is not False,
            previous_response_id=own.previous_response_id,
            reasoning={"effort": effort, "summary": None},
            store=own.store is not False,
            temperature=_or_default(own.temperature, defaults.get("temperature", 1.0)),
            text={"format": shown},
            tool_choice=_given(choice) if isinstance(choice, Lenient) else choice or "auto",
            tools=[_given(tool) for tool in own.tools or ()],
            top_p=_or_default(own.top_p, defaults.get("top_p", 1.0)),
            user=own.user,
        )

    def _usage(self) -> ResponseUsage:
        usage = self.usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(self._num_thought),
            total_tokens=usage.total_tokens,
        )

    def _id(self, block: Block) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        return f"{prefix}_{request_id_of(self.request)}_{block.index}"

    def _status_of(self, block: Block) -> str:
        """The status of a block that has ended."""
        is_cut = self.reason == "length" and block.index == self.blocks.cut_index
        return "incomplete" if is_cut else "completed"

    def _item(self, block: Block, status: str, is_empty: bool = False) -> dict[str, Any]:
        item: OutputItem
        if block.kind == "call":
            # What was cut off before the first argument must not look like a call without any.
            arguments = block.text if status == "incomplete" else block.arguments
            item = FunctionCallItem(
                id=self._id(block),
                status=status,
                call_id=block.call_id,
                name=block.name,
                arguments="" if is_empty else arguments,
            )
        elif block.kind == "reasoning":
            thoughts = [] if is_empty else [ReasoningText(text=block.text)]
            item = ReasoningItem(id=self._id(block), status=status, content=thoughts)
        else:
            texts = [] if is_empty else [OutputText(text=block.text)]
            item = OutputMessage(id=self._id(block), status=status, content=texts)
        return _plain(item)


@router.post(
    "/v1/responses",
    **documented(ResponsesBody, ResponseObject, example=EXAMPLE, streams=ResponseEvent),
)
async def create_response(request: Request) -> Response:
    """Answer a conversation, which may continue an earlier response."""
    context, tenant = context_of(request), tenant_of(request)
    body = await context.body(request, ResponsesBody)
    if body.request_id is not None:
        request.state.request_id = body.request_id
    known: Sequence[ChatMessage] = ()
    if body.previous_response_id is not None:
        stored = context.stored_responses.get(
            tenant, body.previous_response_id, "previous_response_id"
        )
        known = stored.messages
    messages, translated = await context.translated(request, lambda: _translated(body, known))
    writer = new_writer(ResponsesWriter, own=body, messages=messages)
    return await answer_chat(request, translated, writer, WORDS)


@router.get("/v1/responses/{response_id}", **documented(None, ResponseObject))
async def get_response(request: Request, response_id: str) -> Response:
    """A response that is still stored."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise refused("stream", "a stored response is not sent as events", "unsupported_field")
    store = context_of(request).stored_responses
    return reply(store.get(tenant_of(request), response_id, "response_id").response)


@router.delete("/v1/responses/{response_id}", **documented(None, DeletedResponse))
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a stored response; those that continue it are kept."""
    store, tenant = context_of(request).stored_responses, tenant_of(request)
    store.get(tenant, response_id, "response_id")
    store.remove(tenant, response_id)
    return reply(DeletedResponse(id=response_id))


# ---------------------------------------------------------------- translation


def _translated(
    body: ResponsesBody, known: Sequence[ChatMessage]
) -> tuple[list[ChatMessage], ChatBody]:
    """The conversation without the instructions, and the whole body as a chat's. Raises ApiError.

    `known`: the messages before those of the body.
    """
    messages = [*known, *input_messages(body.input, known)]
    instructions = []
    if body.instructions is not None:
        instructions = [ChatMessage(role="system", content=body.instructions)]
    whole = with_one_system_message([*instructions, *messages])
    if all(each.role == "system" for each in whole):
        raise refused("input", "it has no message beside those of the system")
    return messages, _chat(body, whole)


def input_messages(
    given: str | Sequence[InputItem], known: Sequence[ChatMessage] = ()
) -> list[ChatMessage]:
    """The messages that a request adds to those that are `known`. Raises ApiError."""
    if isinstance(given, str):
        return [ChatMessage(role="user", content=given)]
    check_num_nodes("".join(item.arguments or "" for item in given).encode(), "input")
    calls = {call.id for message in known for call in message.tool_calls or ()}
    messages: list[dict[str, Any]] = []

    def assistant() -> dict[str, Any]:
        """The assistant's message that the items before and behind are parts of."""
        if not messages or messages[-1]["role"] != ASSISTANT:
            messages.append({"role": ASSISTANT})
        return messages[-1]

    for i, item in enumerate(given):
        where = f"input[{i}]"
        if item.type in (None, "message"):
            role = needed(item.role, f"{where}.role")
            text = _text(needed(item.content, f"{where}.content"), f"{where}.content")
            if role == ASSISTANT:
                assistant().setdefault("content", []).append(text)
            else:
                messages.append({"role": "system" if role in SYSTEM_ROLES else role})
                messages[-1]["content"] = text
        elif item.type == "reasoning":
            thoughts = item.content or item.summary or ""
            text = _text(thoughts, f"{where}.content")
            assistant().setdefault("reasoning_content", []).append(text)
        elif item.type == "function_call":
            call_id = needed(item.call_id or None, f"{where}.call_id")
            arguments = needed(item.arguments, f"{where}.arguments")
            if not _is_object(arguments):
                raise refused(f"{where}.arguments", "it is not the text of a JSON object")
            function = {"name": needed(item.name or None, f"{where}.name"), "arguments": arguments}
            calls.add(call_id)
            assistant().setdefault("tool_calls", []).append({"id": call_id, "function": function})
        else:
            call_id = needed(item.call_id, f"{where}.call_id")
            if call_id not in calls:
                raise refused(f"{where}.call_id", f"there is no call {call_id[:64]!r} before it")
            text = _text(needed(item.output, f"{where}.output"), f"{where}.output")
            messages.append({"role": TOOL, "tool_call_id": call_id, "content": text})
    for message in messages:
        for name in ("content", "reasoning_content"):
            if isinstance(message.get(name), list):
                message[name] = "".join(message[name])
    return [ChatMessage.model_validate(message) for message in messages]


def with_one_system_message(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The same with the leading messages of the system made one: templates know only one."""
    count = next((i for i, each in enumerate(messages) if each.role != "system"), len(messages))
    if count < 2:
        return list(messages)
    texts = [each.content for each in messages[:count] if isinstance(each.content, str)]
    return [ChatMessage(role="system", content="\n\n".join(texts)), *messages[count:]]


def _chat(body: ResponsesBody, messages: list[ChatMessage]) -> ChatBody:
    tools = None
    if body.tools is not None:
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    choice: Any = body.tool_choice
    if isinstance(choice, NamedResponseTool):
        choice = _named(choice)
    elif isinstance(choice, AllowedResponseTools):
        allowed = {"mode": choice.mode, "tools": [_named(each) for each in choice.tools]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
    shared = {
        name: getattr(body, name)
        for name in (
            *PromptBody.model_fields,
            *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "seed", "parallel_tool_calls", "chat_template_kwargs"),
            "stream",
        )
    }
    return chat_body(
        messages=messages,
        max_tokens=body.max_output_tokens,
        tools=tools,
        tool_choice=choice,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        response_format=None if body.text is None else _response_format(body.text.format),
        **shared,
    )


def _named(tool: NamedResponseTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _response_format(given: TextFormat | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if given.type != "json_schema":
        for name in ("name", "schema", "strict", "description"):
            if name in _given(given):
                raise refused(f"text.format.{name}", f"it contradicts the type, {given.type}")
        return {"type": given.type}
    if given.schema_ is None:
        raise ApiError(
            400, "text.format.schema: it is missing", "text.format.schema", "missing_field"
        )
    inner = {name: value for name, value in _given(given).items() if name != "type"}
    return {"type": "json_schema", "json_schema": inner}


def _answer_message(blocks: Sequence[Block]) -> ChatMessage:
    """The answer, as a later request would send it back."""
    texts: dict[str, str] = {
        kind: "".join(each.text for each in blocks if each.kind == kind)
        for kind in ("text", "reasoning")
    }
    calls = [
        {
            "id": each.call_id,
            "function": {
                "name": each.name,
                "arguments": each.arguments if _is_object(each.arguments) else "{}",
            },
        }
        for each in blocks
        if each.kind == "call"
    ]
    fields = {"content": texts["text"], "reasoning_content": texts["reasoning"] or None}
    return ChatMessage.model_validate({"role": ASSISTANT, **fields, "tool_calls": calls or None})


def _num_characters(message: ChatMessage) -> int:
    content = message.content or ""
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    texts += [message.reasoning_content or "", message.tool_call_id or ""]
    for call in message.tool_calls or ():
        texts += [call.id or "", call.function.name, str(call.function.arguments)]
    return sum(map(len, texts))


def _text(content: str | Sequence[InputPart], where: str) -> str:
    """The text of a content; ApiError if a part of it is something else."""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            reason = f"{part.type[:64]!r} is not supported; octavo reads text"
            raise refused(f"{where}[{i}].type", reason, "unsupported_field")
        needed(part.refusal if part.text is None else part.text, f"{where}[{i}].text")
    return "".join(part.text or part.refusal or "" for part in content)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text) if text.strip() else {}, dict)
    except (ValueError, RecursionError):
        return False


def _part(block: Block, text: str) -> dict[str, Any]:
    kind = ReasoningText if block.kind == "reasoning" else OutputText
    return _plain(kind(text=text))


def _plain(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain


def _given(model: Any) -> dict[str, Any]:
    """The fields that a client gave, by their names in JSON."""
    plain: dict[str, Any] = model.model_dump(exclude_none=True, by_alias=True)
    return plain


def _or_default(value: float | None, default: Any) -> float:
    return float(default if value is None else value)
