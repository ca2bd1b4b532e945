"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from octavo.core.step import TokenLogprobs
from octavo.errors import InvalidRequest
from octavo.outputs import RequestOutput, SequenceDelta, SequenceOutput
from octavo.server.engine_process.stream import RequestStream
from octavo.server.http.bodies import Integer, Refused
from octavo.server.http.context import Context
from octavo.server.http.conversations import (
    ASSISTANT,
    Messages,
    conversation_prompt,
    message_text,
)
from octavo.server.http.dialect import Dialect, Writer, finish_reason, in_order, note_end
from octavo.server.http.errors import refused
from octavo.server.http.generation import GenerationBody, NonNegative, Params, generation_params
from octavo.server.http.replies import (
    ChatTokenLogprob,
    Choice,
    PromptLogprobs,
    Reply,
    Usage,
)
from octavo.server.http.schema import documented

router = APIRouter(tags=["OpenAI"])

ChoiceT = TypeVar("ChoiceT", bound=Choice)

# What the engine calls a field -> what a chat calls it.
CLIENT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
EXAMPLE = {"messages": [{"role": "user", "content": "What is a cat?"}], "max_tokens": 40}

_NO_TOOLS = "octavo does not support tool calls"
_NO_REASONING = "octavo leaves reasoning in the text"
_UNSUPPORTED = "octavo does not support it"


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: Annotated[int, Integer(1)] | None = None
    """The newer name of max_tokens; not given: what the context holds."""
    logprobs: bool | None = None
    """Score the output's tokens."""
    top_logprobs: NonNegative | None = None
    """With logprobs: also the k likeliest tokens at each place."""
    add_generation_prompt: bool | None = None
    """End the prompt where the assistant begins; not given: true."""
    continue_final_message: bool | None = None
    """Continue the last message instead of answering it."""
    add_special_tokens: bool | None = None
    """Put what the model expects, such as BOS, before what the template writes; it often has it."""
    echo: bool | None = None
    """Begin the answer with the last message, which must be the assistant's."""
    documents: list[dict[str, Any]] | None = None
    """For templates that show documents: objects such as {"title": ..., "text": ...}."""
    chat_template: str | None = None
    """A Jinja template for this request; only where the server allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the template, such as enable_thinking."""

    tools: Annotated[object, Refused(_NO_TOOLS, ([],))] = None
    tool_choice: Annotated[object, Refused(_NO_TOOLS, ("none", "auto"))] = None
    parallel_tool_calls: Annotated[object, Refused(_NO_TOOLS, (True, False))] = None
    functions: Annotated[object, Refused(_NO_TOOLS, ([],))] = None
    function_call: Annotated[object, Refused(_NO_TOOLS, ("none", "auto"))] = None
    modalities: Annotated[object, Refused("octavo answers in text", (["text"],))] = None
    audio: Annotated[object, Refused("octavo answers in text")] = None
    prediction: Annotated[object, Refused(_UNSUPPORTED)] = None
    reasoning_effort: Annotated[
        object, Refused("use chat_template_kwargs, if the model's template knows it")
    ] = None
    verbosity: Annotated[object, Refused(_UNSUPPORTED, ("medium",))] = None
    web_search_options: Annotated[object, Refused(_UNSUPPORTED)] = None
    # SGLang's: without a reasoning parser, they change nothing there either.
    separate_reasoning: Annotated[object, Refused(_NO_REASONING, (True, False))] = None
    stream_reasoning: Annotated[object, Refused(_NO_REASONING, (True, False))] = None
    prompt: Annotated[object, Refused("prompts go to /v1/completions")] = None


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Choice, kw_only=True):
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Reply, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(msgspec.Struct):
    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET


class ChatChunkChoice(Choice, kw_only=True):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(Reply, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


def chat_params(body: ChatBody, defaults: Mapping[str, Any]) -> Params:
    """The engine's parameters.

    Raises:
        InvalidRequest, ApiError: a value that cannot be, or that contradicts another; named.
    """
    if body.top_logprobs is not None and not body.logprobs and body.top_logprobs != 0:
        raise refused("top_logprobs", "it needs logprobs: true")
    if body.echo and body.messages[-1].role != ASSISTANT:
        raise refused("echo", f"the last message is not the {ASSISTANT}'s")
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    elif body.max_tokens not in (None, max_tokens):
        raise refused(
            "max_tokens", f"{body.max_tokens} contradicts max_completion_tokens ({max_tokens})"
        )
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return generation_params(body, defaults, max_tokens, num_logprobs)


async def _prompts(context: Context, body: ChatBody) -> list[list[int]]:
    """The conversation's token ids, as the one prompt of a chat."""
    prompt = await conversation_prompt(
        context,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template=body.chat_template,
        variables=body.chat_template_kwargs,
        documents=body.documents,
        add_special_tokens=bool(body.add_special_tokens),
        any_length=body.truncate_prompt_tokens is not None,
    )
    if not prompt:
        raise InvalidRequest("messages", "the chat template makes nothing of them")
    return [prompt]


class ChatWriter(Writer[ChatBody, ChatChunkChoice]):
    """Writes the answers of a chat. A choice's stream begins with its role."""

    id_prefix = "chatcmpl"

    def __init__(
        self, request: Request, body: ChatBody, model: str, streams: Sequence[RequestStream]
    ) -> None:
        super().__init__(request, body, model, streams)
        self._begun: set[int] = set()  # choices
        self._shows_prompt = bool(body.return_token_ids)  # in the next chunk
        # What each choice begins with.
        self._echo = message_text(body.messages[-1], "messages[-1]") if body.echo else ""

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        [output] = outputs
        [stream] = self.streams
        choices = [self._whole_choice(i, each) for i, each in enumerate(in_order(output))]
        whole = ChatCompletion(**self.head, choices=choices, usage=self.usage())
        if self.body.return_token_ids:
            whole.prompt_token_ids = stream.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            scores = stream.prompt_logprobs or []
            whole.prompt_logprobs = self.texts.prompt_logprobs(scores, self.body.prompt_logprobs)
        self.log(whole.usage)
        return whole

    def chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(**self.head, choices=choices)
        if self._shows_prompt:
            chunk.prompt_token_ids = self.streams[0].prompt_token_ids
            self._shows_prompt = False
        return chunk

    def delta_choices(self, prompt: int, delta: SequenceDelta) -> list[ChatChunkChoice]:
        self.num_output_tokens += len(delta.token_ids)
        piece = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(delta.text) if delta.text else ChatDelta(),
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=finish_reason(delta),
        )
        if piece.finish_reason is not None:
            piece.stop_reason = delta.stop_reason
        if self.body.return_token_ids:
            piece.token_ids = delta.token_ids
        is_empty = not delta.text and piece.logprobs is None and not self.body.return_token_ids
        if is_empty and piece.finish_reason is None:
            return self._opening(delta.index)
        return [*self._opening(delta.index), piece]

    def beam_choices(self, prompt: int, output: RequestOutput) -> list[ChatChunkChoice]:
        pieces = []
        for index, each in enumerate(in_order(output)):
            piece = ChatChunkChoice(index=index, delta=ChatDelta(each.text))
            pieces += [*self._opening(index), self._ended(piece, each)]
        return pieces

    def _opening(self, index: int) -> list[ChatChunkChoice]:
        """The first piece of a choice says who speaks."""
        if index in self._begun:
            return []
        self._begun.add(index)
        return [ChatChunkChoice(index=index, delta=ChatDelta(self._echo, "assistant"))]

    def _whole_choice(self, index: int, output: SequenceOutput) -> ChatChoice:
        logprobs = self._logprobs(output.logprobs or [])
        message = AssistantMessage(self._echo + output.text)
        return self._ended(ChatChoice(index=index, message=message, logprobs=logprobs), output)

    def _ended(self, choice: ChoiceT, output: SequenceOutput) -> ChoiceT:
        self.num_output_tokens += len(output.token_ids)
        if self.body.return_token_ids:
            choice.token_ids = output.token_ids
        note_end(choice, output)
        return choice

    def _logprobs(self, scores: list[TokenLogprobs]) -> ChatLogprobs | None:
        if not self.body.logprobs or not scores:
            return None
        return ChatLogprobs(self.texts.chat_logprobs(scores))


DIALECT = Dialect(ChatBody, chat_params, _prompts, ChatWriter, CLIENT_NAMES)


@router.post(
    "/v1/chat/completions",
    **documented(ChatBody, ChatCompletion, example=EXAMPLE, streams=ChatChunk),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    return await DIALECT.respond(request)
