"""/v1/messages: conversations as Anthropic's clients send them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta
from pydantic import Field

from octavo.server.http.bodies import FAIL_FAST, NOT_SUPPORTED, Body, Integer, Refused
from octavo.server.http.context import context_of, reply
from octavo.server.http.conversations import ASSISTANT, TOOL, ChatMessage
from octavo.server.http.endpoints import chat
from octavo.server.http.endpoints.blocks import (
    Begun,
    Block,
    BlockWriter,
    Grown,
    Lenient,
    Step,
    ToolName,
    Words,
    answer_chat,
    chat_body,
    needed,
    new_writer,
    written_arguments,
)
from octavo.server.http.errors import ApiError, refused
from octavo.server.http.generation import INT64_MAX, PromptBody, Texts, UserName
from octavo.server.http.schema import documented
from octavo.server.http.tools import MAX_TOOLS

router = APIRouter(tags=["Anthropic"])

MAX_STOPS = 16
EXAMPLE = {"max_tokens": 40, "messages": [{"role": "user", "content": "What is a cat?"}]}
NAMES = {
    r"stop\b": "stop_sequences",
    r"(tools\[[0-9]+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[[0-9]+\])\.function": r"\1",
    r"tool_choice\.function": "tool_choice",
    r"thinking_token_budget": "thinking.budget_tokens",
    r"reasoning_effort": "output_config.effort",
}
# By where the form of the output is given.
WORDS, CONFIG_WORDS = (
    Words({**NAMES, r"response_format(\.json_schema)?": name})
    for name in ("output_format", "output_config.format")
)
IGNORED_BLOCKS = ("redacted_thinking",)


class ContentBlock(Lenient):
    """A part of a message. Other fields, such as cache_control, are ignored."""

    type: str
    """text, thinking, tool_use or tool_result; octavo reads text alone."""
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    """The id of a tool_use."""
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    """In a tool_result: the id of the tool_use that it answers."""
    content: str | Annotated[list[ResultBlock], FAIL_FAST] | None = None
    is_error: bool | None = None


class ResultBlock(Lenient):
    """A part of what a tool has returned: text."""

    type: str
    text: str | None = None


class SystemBlock(Lenient):
    """A part of what the model is told before the conversation: text."""

    type: Literal["text"]
    text: str


class MessageParam(Lenient):
    """A message."""

    role: Literal["user", "assistant", "system"]
    """A last message of the assistant's is continued."""
    content: str | Annotated[list[ContentBlock], FAIL_FAST]


class MessageTool(Lenient):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    """The JSON schema of its input, an object."""
    strict: bool | None = None


class MessageToolChoice(Lenient):
    """Which tools the model may call, or has to."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool that is to be called, with the type tool."""
    disable_parallel_tool_use: bool | None = None
    """Whether the answer makes at most one call."""


class ThinkingOptions(Lenient):
    """Whether the model thinks, and for how long."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Integer(1, INT64_MAX)] | None = None
    """The longest reasoning, in tokens."""


class OutputFormat(Body):
    """A form that the output has to have."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """A JSON schema."""


class OutputConfig(Body):
    """The form of the output, and how much the model thinks."""

    format: OutputFormat | None = None
    """The form of the output, as in output_format."""
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """How much the model thinks, if its chat template knows it."""


class MessageMetadata(Lenient):
    """Who asks."""

    user_id: UserName | None = None
    """Goes to the request log, if it is on."""


class CountTokensBody(PromptBody):
    """POST /v1/messages/count_tokens"""

    messages: Annotated[list[MessageParam], Field(min_length=1), FAIL_FAST]
    system: str | Annotated[list[SystemBlock], FAIL_FAST] | None = None
    """What the model is told before the conversation."""
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS), FAIL_FAST] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingOptions | None = None
    """Whether the model thinks, if its chat template knows enable_thinking."""
    output_config: OutputConfig | None = None

    thread: Annotated[object, Refused("send the whole conversation with each request")] = None
    mcp_servers: Annotated[object, Refused(NOT_SUPPORTED, ([],))] = None
    context_management: Annotated[object, Refused(NOT_SUPPORTED, ({},))] = None
    cache_control: dict[str, Any] | None = None
    """A hint that is not needed: equal prefixes are shared by themselves."""


class MessagesBody(CountTokensBody):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Integer(1)]
    """The longest output, in tokens."""
    stop_sequences: Annotated[Texts, Field(max_length=MAX_STOPS)] | None = None
    """End at one of these strings."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Integer(-1)] | None = None
    output_format: OutputFormat | None = None
    """The form of the output: JSON that keeps to a schema."""
    stream: bool | None = None
    """Send the answer as server-sent events."""
    metadata: MessageMetadata | None = None

    container: Annotated[object, Refused(NOT_SUPPORTED)] = None
    service_tier: Annotated[object, Refused(NOT_SUPPORTED, ("auto", "standard_only"))] = None
    inference_geo: Annotated[object, Refused(NOT_SUPPORTED)] = None


# ---------------------------------------------------------------- what is sent


class MessageUsage(msgspec.Struct, kw_only=True):
    """How many tokens a message has taken."""

    input_tokens: Annotated[int, Meta(description="That were not cached.")]
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: Annotated[int, Meta(description="Found in the prefix cache.")]
    service_tier: Literal["standard"] = "standard"


class Message(msgspec.Struct, kw_only=True):
    """The reply to a conversation, if it is not a stream."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: Annotated[
        list[dict[str, Any]], Meta(description="Blocks of the types text, thinking and tool_use.")
    ]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(msgspec.Struct):
    """What each event has; the others are Anthropic's of this type."""

    type: str


class TokenCount(msgspec.Struct):
    """How many tokens a conversation has as a prompt."""

    input_tokens: int


class MessagesWriter(BlockWriter):
    """Writes a message."""

    id_prefix = "msg_"

    def reply(self) -> Message:
        return self._message([_shown(each) for each in self.blocks.all])

    def opening(self) -> list[Any]:
        return [{"type": "message_start", "message": self._message([])}]

    def step_events(self, step: Step) -> list[Any]:
        block = step.block
        place = {"index": block.index}
        match step:
            case Begun():
                empty = _shown(Block(block.kind, block.index, block.call_id, block.name))
                return [{"type": "content_block_start", **place, "content_block": empty}]
            case Grown(_, text):
                delta = {
                    "text": {"type": "text_delta", "text": text},
                    "reasoning": {"type": "thinking_delta", "thinking": text},
                    "call": {"type": "input_json_delta", "partial_json": text},
                }[block.kind]
                return [{"type": "content_block_delta", **place, "delta": delta}]
        return [{"type": "content_block_stop", **place}]

    def closing(self) -> list[Any]:
        whole = self.reply()
        delta = {"stop_reason": whole.stop_reason, "stop_sequence": whole.stop_sequence}
        return [
            {"type": "message_delta", "delta": delta, "usage": whole.usage},
            {"type": "message_stop"},
        ]

    def error_event(self, error: ApiError) -> Any:
        return {"type": "error", "error": error.reply.error}

    def _message(self, content: list[dict[str, Any]]) -> Message:
        usage = self.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        stop_reason: Any = None
        stop = self.stop_reason if isinstance(self.stop_reason, str) else None
        if self.reason is not None:
            stop_reason = "stop_sequence" if stop is not None else STOP_REASONS[self.reason]
        return Message(
            id=self.id,
            model=self.head["model"],
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop,
            usage=MessageUsage(
                input_tokens=usage.prompt_tokens - cached,
                output_tokens=usage.completion_tokens,
                cache_read_input_tokens=cached,
            ),
        )


STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post(
    "/v1/messages", **documented(MessagesBody, Message, example=EXAMPLE, streams=MessageEvent)
)
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await context.body(request, MessagesBody)
    if body.request_id is not None:
        request.state.request_id = body.request_id
    user = body.user
    if body.metadata is not None and body.metadata.user_id is not None:
        user = body.metadata.user_id
    form, words = body.output_format, WORDS
    if body.output_config is not None and body.output_config.format is not None:
        if form is not None:
            raise refused("output_config.format", "it contradicts output_format; give one of them")
        form, words = body.output_config.format, CONFIG_WORDS
    response_format = None
    if form is not None:
        response_format = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    known = context.tokenizer("messages").template_variables
    fields = {
        "user": user,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "response_format": response_format,
        "stream": body.stream,
    }
    translated = await context.translated(request, lambda: _chat(body, known, **fields))
    return await answer_chat(request, translated, new_writer(MessagesWriter), words)


@router.post(
    "/v1/messages/count_tokens",
    **documented(CountTokensBody, TokenCount, example={"messages": EXAMPLE["messages"]}),
)
async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation takes as a prompt."""
    context = context_of(request)
    body = await context.body(request, CountTokensBody)
    context.model_name(body.model)
    known = context.tokenizer("messages").template_variables
    try:
        # -1: of any length.
        translated = await context.translated(
            request, lambda: _chat(body, known, truncate_prompt_tokens=-1)
        )
        [prompt] = await chat.DIALECT.prompts(context, translated)
    except Exception as error:
        raise WORDS.of(error) from error
    return reply(TokenCount(len(prompt)))


# ---------------------------------------------------------------- translation


def _chat(body: CountTokensBody, known: Any, **fields: Any) -> Any:
    """The body as a chat's; `known`: the variables of the chat template."""
    system = body.system
    if system is not None and not isinstance(system, str):
        system = "\n\n".join(block.text for block in system)
    messages = [ChatMessage(role="system", content=system)] if system else []
    messages += conversation(body.messages)
    tools = None
    if body.tools is not None:
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
        ]
    is_prefilled = messages[-1].role == ASSISTANT
    if is_prefilled and messages[-1].tool_calls:
        raise refused("messages", "the last one calls tools; send what they have returned")
    shared = {name: getattr(body, name) for name in PromptBody.model_fields}
    parallel = None
    if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
        parallel = False
    budget, variables = None, {}
    if body.thinking is not None:
        if body.thinking.type == "disabled" and body.thinking.budget_tokens is not None:
            raise refused("thinking.budget_tokens", "it contradicts the type, disabled")
        budget = body.thinking.budget_tokens
        if "enable_thinking" in known:
            variables["enable_thinking"] = body.thinking.type != "disabled"
        elif body.thinking.type == "enabled" and budget is None:
            raise refused("thinking.type", "the chat template does not know enable_thinking")
    effort = None if body.output_config is None else body.output_config.effort
    return chat_body(
        messages=messages,
        reasoning_effort=effort,
        continue_final_message=is_prefilled or None,
        tools=tools,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=parallel,
        thinking_token_budget=budget,
        chat_template_kwargs=variables or None,
        **shared | fields,
    )


def _tool_choice(choice: MessageToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        name = needed(choice.name or None, "tool_choice.name")
        return {"type": "function", "function": {"name": name}}
    return "required" if choice.type == "any" else choice.type


def conversation(messages: Sequence[MessageParam]) -> list[ChatMessage]:
    """The messages as a chat's. Raises ApiError about what cannot be one."""
    calls: set[str] = set()
    found: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}].content"
        content = message.content
        if isinstance(content, str):
            found.append({"role": message.role, "content": content})
        elif message.role == ASSISTANT:
            found.append(_assistants(content, where, calls))
        else:
            found += _users(message.role, content, where, calls)
    return [ChatMessage.model_validate(each) for each in found]


def _assistants(content: Sequence[ContentBlock], where: str, calls: set[str]) -> dict[str, Any]:
    """A message of the assistant's; its calls are added to `calls`."""
    texts, thoughts, made = [], [], []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        if block.type == "text":
            texts.append(needed(block.text, f"{place}.text"))
        elif block.type == "thinking":
            thoughts.append(needed(block.thinking, f"{place}.thinking"))
        elif block.type == "tool_use":
            call_id = needed(block.id or None, f"{place}.id")
            arguments = json.dumps(needed(block.input, f"{place}.input"))
            name = needed(block.name or None, f"{place}.name")
            made.append({"id": call_id, "function": {"name": name, "arguments": arguments}})
            calls.add(call_id)
        elif block.type not in IGNORED_BLOCKS:
            raise _unreadable(block.type, place)
    return {
        "role": ASSISTANT,
        "content": "".join(texts),
        "reasoning_content": "".join(thoughts) or None,
        "tool_calls": made or None,
    }


def _users(
    role: str, content: Sequence[ContentBlock], where: str, calls: set[str]
) -> list[dict[str, Any]]:
    """What tools have returned, and what the user says, as messages."""
    found: list[dict[str, Any]] = []
    texts = []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        if block.type == "text":
            texts.append(needed(block.text, f"{place}.text"))
        elif block.type == "tool_result":
            call_id = needed(block.tool_use_id, f"{place}.tool_use_id")
            if call_id not in calls:
                raise refused(
                    f"{place}.tool_use_id", f"there is no tool_use {call_id[:64]!r} before it"
                )
            text = _result(block.content or "", f"{place}.content")
            found.append({"role": TOOL, "tool_call_id": call_id, "content": text})
        else:
            raise _unreadable(block.type, place)
    if texts or not found:
        if not texts:
            raise refused(where, "it is empty")
        found.append({"role": role, "content": "\n\n".join(texts)})
    return found


def _result(content: str | Sequence[ResultBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        if block.type != "text":
            raise _unreadable(block.type, f"{where}[{i}]")
    texts = [needed(block.text, f"{where}[{i}].text") for i, block in enumerate(content)]
    return "\n\n".join(texts)


def _unreadable(kind: str, where: str) -> ApiError:
    reason = f"{kind[:64]!r} is not supported here; octavo reads text and calls of tools"
    return refused(f"{where}.type", reason, "unsupported_field")


def _shown(block: Block) -> dict[str, Any]:
    """A block as clients see it."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        # Nothing has to be proven when it is sent back.
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    call = {"id": block.call_id, "name": block.name, "input": written_arguments(block)}
    return {"type": "tool_use", **call}
