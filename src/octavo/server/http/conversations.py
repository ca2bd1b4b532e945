"""From a conversation to the prompt that the model's chat template makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from octavo.engine.chat_template import ChatTemplate
from octavo.errors import InvalidRequest, ModelError, RequestTooLong
from octavo.server.http.bodies import FAIL_FAST, UNSUPPORTED, Refused, check_num_nodes
from octavo.server.http.context import Context
from octavo.server.http.errors import refused
from octavo.server.offload import HUGE_TEXT, LONG_TEXT

# Variables that octavo sets itself; `self` is Jinja's.
RESERVED = frozenset({"messages", "add_generation_prompt", "self"})
# Stands for where the last message ends; templates may trim white space around it.
END_MARK = "\ue0ff"
# The one role whose turn may be empty: servers send null when all they have is its reasoning.
ASSISTANT = "assistant"
TOOL = "tool"
MESSAGE_COST = 64  # characters: rendering a message takes about as long as handling that much text

MAX_ROLE = 64  # characters
# Characters. Models' own templates have half as many at most, and compiling takes up to 0.1 ms for
# each of them.
MAX_TEMPLATE = 65_536


def _check_is_text(kind: str) -> str:
    if kind != "text":
        raise PydanticCustomError(
            UNSUPPORTED,
            "{kind} is not supported; octavo reads text",
            {"kind": repr(kind[:MAX_ROLE])},
        )
    return kind


class _Lenient(BaseModel):
    """What clients send back as other servers have given it to them: unknown fields are ignored."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True
    )


class ContentPart(_Lenient):
    """A part of a message's content: text. Other fields are ignored."""

    type: Annotated[
        str,
        AfterValidator(_check_is_text),
        WithJsonSchema({"type": "string", "const": "text"}),
    ]
    """octavo reads text alone."""
    text: str
    """The text."""


class CalledFunction(_Lenient):
    """The function of a call, and its arguments."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] | None = None
    """A JSON object, or its text; not given: no arguments."""


class MessageToolCall(_Lenient):
    """A call of a tool that the assistant made."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(_Lenient):
    """One message of a conversation. Fields that octavo does not know are ignored."""

    role: Annotated[str, Field(min_length=1, max_length=MAX_ROLE)]
    """Which roles there are is for the model's chat template to say."""
    content: str | Annotated[list[ContentPart], Field(min_length=1), FAIL_FAST] | None = None
    """Text, or parts of type text; only an assistant's message may have none."""
    reasoning_content: str | None = None
    """The assistant's reasoning, for templates that show it."""
    reasoning: str | None = None
    """The same by its other name."""
    tool_calls: Annotated[list[MessageToolCall], FAIL_FAST] | None = None
    """The assistant's calls of tools."""
    tool_call_id: str | None = None
    """In a message of a tool: the call that it answers."""
    name: str | None = None
    """The name of the tool, for templates that show it."""

    function_call: Annotated[object, Refused("use tool_calls")] = None
    audio: Annotated[object, Refused("octavo reads text")] = None
    refusal: Annotated[object, Refused("octavo's models do not have it")] = None
    annotations: Annotated[object, Refused("octavo's models do not have it", ([],))] = None


Messages = Annotated[list[ChatMessage], Field(min_length=1), FAIL_FAST]

Plain = dict[str, Any]
Render = Callable[[list[Plain], bool, Mapping[str, Any]], str]


async def conversation_prompt(
    context: Context,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_special_tokens: bool = False,
    any_length: bool = False,
) -> list[int]:
    """Token ids of a conversation that the assistant is to continue.

    A template is a program, so a long conversation is rendered in a thread, where it does not hold
    up the other requests. How many messages there may be is bounded by the context: a template that
    shows its messages needs at least one token for each of them.

    `any_length`: also if they leave no room for an answer. Raises InvalidRequest or ApiError, which
    name the field.
    """
    if context.client.model_config.encoder is not None:
        raise refused("messages", "a model with an encoder has no conversations")
    reserved = sorted(RESERVED.intersection(variables or ()))
    if reserved:
        raise refused(f"chat_template_kwargs.{reserved[0]}", "it is not yours to set")
    if continue_final_message and add_generation_prompt:
        raise refused("add_generation_prompt", "it contradicts continue_final_message")
    limit = context.client.info.max_model_len
    if len(messages) > limit:
        raise RequestTooLong(
            "messages", f"{len(messages)} messages do not fit into a context of {limit} tokens"
        )
    render, shown = await _renderer(context, template)
    for name, values in (("documents", documents), ("tools", tools)):
        if values is None:
            continue
        if name not in shown:
            raise refused(name, "the chat template does not show them", UNSUPPORTED)
        variables = {**(variables or {}), name: values}
    begins_answer = not continue_final_message and add_generation_prompt is not False

    def rendered() -> str:
        check_num_nodes(
            "".join(
                call.function.arguments
                for message in messages
                for call in message.tool_calls or ()
                if isinstance(call.function.arguments, str)
            ).encode(),
            "messages",
        )
        plain = [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
        if continue_final_message:
            plain[-1]["content"] += END_MARK
        return render(plain, begins_answer, variables or {})

    size = _size(messages)
    if template is not None or documents is not None or tools is not None:
        size = max(size, LONG_TEXT)  # a template from a request may take any time
    text = await context.client.offload.text(size, rendered)
    if continue_final_message:
        text, mark, _ = text.rpartition(END_MARK)
        if not mark:
            raise refused(
                "continue_final_message", "the chat template does not show the last message"
            )
    [token_ids] = await context.client.encode([text], "messages", add_special_tokens, any_length)
    return token_ids


async def _renderer(context: Context, template: str | None) -> tuple[Render, Set[str]]:
    """What renders a conversation, and the names of the variables that its template shows.

    To compile a template takes longer than to render it, so that it is done in a thread, too.
    """
    tokenizer = context.tokenizer("messages")
    if template is None:
        return lambda messages, begins, variables: tokenizer.render_chat(
            messages, begins, **variables
        ), tokenizer.template_variables
    if not context.settings.trust_request_chat_template:
        raise refused(
            "chat_template",
            "this server takes none from requests (--trust-request-chat-template)",
            "unsupported_field",
        )
    if len(template) > MAX_TEMPLATE:
        raise refused("chat_template", f"{len(template)} characters are more than {MAX_TEMPLATE}")
    try:
        compiled = await context.client.offload.text(
            LONG_TEXT, lambda: ChatTemplate(template, tokenizer.special_tokens)
        )
    except ModelError as error:
        raise InvalidRequest("chat_template", str(error)) from error
    return compiled.render, compiled.variables


def _size(messages: Sequence[ChatMessage]) -> int:
    """What messages take to render, in characters. The rest of huge conversations is not counted,
    because there may be tens of thousands of messages."""
    size = 0
    for message in messages:
        size += _cost(message)
        if size >= HUGE_TEXT:
            break
    return size


def _cost(message: ChatMessage) -> int:
    """What a message takes to render, in characters."""
    content = message.content or ""
    called = sum(
        MESSAGE_COST + _arguments_cost(call.function.arguments) for call in message.tool_calls or ()
    )
    called += len(message.reasoning_content or message.reasoning or "")
    if isinstance(content, str):
        return MESSAGE_COST + called + len(content)
    return called + MESSAGE_COST * (1 + len(content)) + sum(len(part.text) for part in content)


def _arguments_cost(arguments: str | dict[str, Any] | None) -> int:
    """To measure an object or an array takes as long as to write it, so those within an object
    count as long ones."""
    if isinstance(arguments, dict):
        nested = sum(isinstance(value, dict | list) for value in arguments.values())
        texts = sum(len(value) for value in arguments.values() if isinstance(value, str))
        return MESSAGE_COST * len(arguments) + texts + LONG_TEXT * nested
    return len(arguments or "")


def _plain(message: ChatMessage, path: str) -> Plain:
    """The message at `path` as templates expect it: its content as one text, the arguments of calls
    as objects. Raises ApiError."""
    plain: Plain = {"role": message.role, "content": message_text(message, path)}
    if message.name is not None:
        plain["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain["reasoning_content"] = reasoning
    if message.role == TOOL:
        if not message.tool_call_id:
            raise refused(f"{path}.tool_call_id", "it is missing", "missing_field")
        plain["tool_call_id"] = message.tool_call_id
    elif message.tool_call_id is not None:
        raise refused(f"{path}.tool_call_id", f"only messages of the role {TOOL} have one")
    if message.tool_calls:
        if message.role != ASSISTANT:
            raise refused(f"{path}.tool_calls", f"only the {ASSISTANT} calls tools")
        plain["tool_calls"] = [
            _plain_call(call, f"{path}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    return plain


def _plain_call(call: MessageToolCall, path: str) -> Plain:
    arguments = "" if call.function.arguments is None else call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = ""
        if not isinstance(arguments, dict):
            raise refused(f"{path}.function.arguments", "it is not the text of a JSON object")
    plain = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id, **plain}


def message_text(message: ChatMessage, path: str) -> str:
    """The content of the message at `path` as one text. Raises ApiError if it must not be empty."""
    content = message.content
    if content is None:
        if message.role == ASSISTANT:
            return ""
        raise refused(f"{path}.content", "it is missing", "missing_field")
    return content if isinstance(content, str) else "".join(part.text for part in content)
