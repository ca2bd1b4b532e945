"""From a conversation to the prompt that the model's chat template makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.chat_template import ChatTemplate
from octavo.errors import InvalidRequest, ModelError
from octavo.server.api.context import Context
from octavo.server.api.errors import refused
from octavo.server.api.requests import ChatMessage

# Variables that octavo sets itself; `self` is Jinja's.
RESERVED = frozenset({"messages", "add_generation_prompt", "self"})
# Stands for where the last message ends; templates may trim white space around it.
END_MARK = "\ue0ff"
MESSAGE_SIZE = 32  # a template takes as long for a message as tokenizing takes for so many letters


async def conversation_prompt(
    context: Context,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    add_special_tokens: bool = False,
    any_length: bool = False,
) -> list[int]:
    """Token ids of a conversation that the assistant is to continue.

    `any_length`: also if they leave no room for an answer. Raises InvalidRequest or ApiError, which
    name the field.
    """
    reserved = sorted(RESERVED.intersection(variables or ()))
    if reserved:
        raise refused(f"chat_template_kwargs.{reserved[0]}", "it is not yours to set")
    plain = [_plain(message) for message in messages]
    if continue_final_message:
        if add_generation_prompt:
            raise refused("add_generation_prompt", "it contradicts continue_final_message")
        plain[-1]["content"] += END_MARK
    render = _renderer(context, template)
    begins_answer = not continue_final_message and add_generation_prompt is not False
    size = sum(MESSAGE_SIZE + len(message["content"]) for message in plain)
    text = await context.client.text_work.run(
        size, lambda: render(plain, begins_answer, variables or {})
    )
    if continue_final_message:
        text, mark, _ = text.rpartition(END_MARK)
        if not mark:
            raise refused(
                "continue_final_message", "the chat template does not show the last message"
            )
    [token_ids] = await context.client.encode([text], "messages", add_special_tokens, any_length)
    return token_ids


def _renderer(context: Context, template: str | None) -> Any:
    tokenizer = context.tokenizer("messages")
    if template is None:
        return lambda messages, begins, variables: tokenizer.render_chat(
            messages, begins, **variables
        )
    if not context.settings.trust_request_chat_template:
        raise refused(
            "chat_template",
            "this server takes none from requests (--trust-request-chat-template)",
            "unsupported_field",
        )
    try:
        compiled = ChatTemplate(template, tokenizer.special_tokens)
    except ModelError as error:
        raise InvalidRequest("chat_template", str(error)) from error
    return compiled.render


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: its content as one text."""
    content = message.content
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = "".join(part.text for part in content)
    plain = {"role": message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    return plain
