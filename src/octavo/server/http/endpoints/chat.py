"""POST /v1/chat/completions"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, UnsetType

from octavo.core.step import TokenLogprobs
from octavo.engine.validation import Prompt
from octavo.errors import InvalidRequest
from octavo.outputs import RequestOutput, SequenceDelta, SequenceOutput
from octavo.parsing.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    joined,
)
from octavo.parsing.parser import ResponseParser
from octavo.server.engine_process.stream import RequestStream
from octavo.server.http.answers import AnswerReader, answer_params, answer_reader
from octavo.server.http.bodies import FAIL_FAST, NOT_SUPPORTED, UNSUPPORTED, Integer, Refused
from octavo.server.http.context import Context
from octavo.server.http.conversations import (
    ASSISTANT,
    Messages,
    conversation_prompt,
    message_text,
)
from octavo.server.http.dialect import Dialect, Writer, finish_reason, in_order, note_end
from octavo.server.http.errors import refused
from octavo.server.http.generation import (
    INT64_MAX,
    GenerationBody,
    NonNegative,
    Params,
    generation_params,
)
from octavo.server.http.replies import (
    ChatTokenLogprob,
    Choice,
    CompletionTokensDetails,
    PromptLogprobs,
    Reply,
    Usage,
)
from octavo.server.http.schema import documented
from octavo.server.http.tools import ToolChoice, Tools, ToolUse, tool_use

router = APIRouter(tags=["OpenAI"])

ChoiceT = TypeVar("ChoiceT", bound=Choice)

# What the engine calls a field -> what a chat calls it.
CLIENT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
EXAMPLE = {"messages": [{"role": "user", "content": "What is a cat?"}], "max_tokens": 40}

_USE_TOOLS = "use tools"
REASONING = "What the model thought; only if it did."
SAME_REASONING = "The same as reasoning_content."


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: Annotated[int, Integer(1, INT64_MAX)] | None = None
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
    documents: Annotated[list[dict[str, Any]], FAIL_FAST] | None = None
    """For templates that show documents: objects such as {"title": ..., "text": ...}."""
    chat_template: str | None = None
    """A Jinja template for this request; only where the server allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the template, such as enable_thinking."""

    tools: Tools | None = None
    """The functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """none: no tool is called, or shown to the model; auto, or not given: if the model wants to;
    required: some tool is; or the one that is; or, with the type allowed_tools, those of them that
    may be."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls; not given: true."""
    reasoning_effort: Effort | None = None
    """How much the model thinks, if its chat template knows reasoning_effort or enable_thinking."""
    thinking_token_budget: Annotated[int, Integer(0, INT64_MAX)] | None = None
    """The longest reasoning, in tokens: then it is ended."""

    functions: Annotated[object, Refused(_USE_TOOLS, ([],))] = None
    function_call: Annotated[object, Refused(_USE_TOOLS, ("none", "auto"))] = None
    modalities: Annotated[object, Refused("octavo answers in text", (["text"],))] = None
    audio: Annotated[object, Refused("octavo answers in text")] = None
    prediction: Annotated[object, Refused(NOT_SUPPORTED)] = None
    verbosity: Annotated[object, Refused(NOT_SUPPORTED, ("medium",))] = None
    web_search_options: Annotated[object, Refused(NOT_SUPPORTED)] = None
    moderation: Annotated[object, Refused(NOT_SUPPORTED)] = None
    # SGLang's.
    separate_reasoning: Annotated[object, Refused("it always is", (True,))] = None
    stream_reasoning: Annotated[object, Refused("it always is", (True,))] = None
    include_reasoning: Annotated[object, Refused("it always is", (True,))] = None  # vLLM's
    prompt: Annotated[object, Refused("prompts go to /v1/completions")] = None


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of the tokens of a choice, or of a piece of it."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """The function that a call names, and its arguments."""

    name: str
    arguments: Annotated[str, Meta(description="A JSON object, as the model wrote it.")]


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    """A whole answer."""

    content: Annotated[str | None, Meta(description="null: there are calls of tools alone.")]
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: Annotated[str | UnsetType, Meta(description=REASONING)] = UNSET
    reasoning: Annotated[str | UnsetType, Meta(description=SAME_REASONING)] = UNSET


class ChatChoice(Choice, kw_only=True):
    """One of the answers to a conversation."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Reply, kw_only=True):
    """The reply to a conversation, if it is not a stream."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None = None


class FunctionCallDelta(msgspec.Struct):
    """A piece of a call's arguments; the first one has the function's name."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct):
    """The beginning of a call has its id, type and name; what follows, more of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta = msgspec.field(default_factory=FunctionCallDelta)


class ChatDelta(msgspec.Struct):
    """What a chunk adds to an answer."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: Annotated[str | UnsetType, Meta(description=REASONING)] = UNSET
    reasoning: Annotated[str | UnsetType, Meta(description=SAME_REASONING)] = UNSET


class ChatChunkChoice(Choice, kw_only=True):
    """A piece of one of the answers."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(Reply, kw_only=True):
    """An event of a stream."""

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
    tools = _tools(body)
    prompt = await conversation_prompt(
        context,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template=body.chat_template,
        variables=_variables(context, body),
        documents=body.documents,
        tools=None if tools is None else tools.shown,
        add_special_tokens=bool(body.add_special_tokens),
        any_length=body.truncate_prompt_tokens is not None,
    )
    if not prompt:
        raise InvalidRequest("messages", "the chat template makes nothing of them")
    return [prompt]


class ChatWriter(Writer[ChatBody, ChatChunkChoice]):
    """Writes the answers of a chat. A choice's stream begins with its role."""

    id_prefix = "chatcmpl-"

    def __init__(
        self, request: Request, body: ChatBody, model: str, streams: Sequence[RequestStream]
    ) -> None:
        super().__init__(request, body, model, streams)
        self._parsers: dict[int, ResponseParser] = {}  # of choices that have begun
        self._shows_prompt = bool(body.return_token_ids)  # in the next chunk
        # What each choice begins with.
        self._echo = message_text(body.messages[-1], "messages[-1]") if body.echo else ""
        options = body.stream_options
        self._tells_usage = not body.stream or (options is not None and bool(options.include_usage))
        # What of the answers is reasoning, by choices, if the usage is told.
        self._thoughts: defaultdict[int, list[str]] = defaultdict(list)
        self._num_thought: int | None = None  # tokens of them

    async def count(self) -> None:
        if self._thoughts:
            texts = ["".join(pieces) for pieces in self._thoughts.values()]
            self._num_thought = await self.tokenized_again(texts)

    def usage(self) -> Usage:
        usage = super().usage()
        if self._num_thought is not None:
            usage.completion_tokens_details = CompletionTokensDetails(self._num_thought)
        return usage

    def whole(self, outputs: Iterable[RequestOutput]) -> ChatCompletion:
        [output] = outputs
        [stream] = self.streams
        choices = [self._whole_choice(i, each) for i, each in enumerate(in_order(output))]
        whole = ChatCompletion(**self.head, choices=choices, usage=self.usage())
        if self.body.return_token_ids:
            whole.prompt_token_ids = stream.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            scores = stream.prompt_logprobs or []
            whole.prompt_logprobs = self.texts.prompt_logprobs(scores, self.body.prompt_logprobs)
        return whole

    def chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(**self.head, choices=choices)
        if self._shows_prompt:
            chunk.prompt_token_ids = self.streams[0].prompt_token_ids
            self._shows_prompt = False
        return chunk

    def delta_choices(self, prompt: int, delta: SequenceDelta) -> list[ChatChunkChoice]:
        self.num_output_tokens += len(delta.token_ids)
        opening = self._opening(delta.index)
        parser = self._parsers[delta.index]
        events = parser.feed(delta.text)
        if delta.finish_reason is not None:
            events += parser.finish()
        self._note_thoughts(delta.index, events)
        reason = self.reader.finish_reason(finish_reason(delta), parser)
        logprobs = self._logprobs(delta.logprobs)
        deltas = self._deltas(events)
        has_more = reason is not None or logprobs is not None or self.body.return_token_ids
        if not deltas and has_more:
            deltas = [ChatDelta()]
        pieces = [ChatChunkChoice(index=delta.index, delta=each) for each in deltas]
        if pieces and has_more:
            pieces[0].logprobs = logprobs
            if self.body.return_token_ids:
                pieces[0].token_ids = delta.token_ids
            if reason is not None:
                pieces[-1].finish_reason, pieces[-1].stop_reason = reason, delta.stop_reason
        return opening + pieces

    def beam_choices(self, prompt: int, output: RequestOutput) -> list[ChatChunkChoice]:
        pieces = []
        for index, each in enumerate(in_order(output)):
            pieces += self._opening(index)
            parser = self._parsers[index]
            events = parser.feed(each.text) + parser.finish()
            self._note_thoughts(index, events)
            deltas = self._deltas(events) or [ChatDelta()]
            added = [ChatChunkChoice(index=index, delta=delta) for delta in deltas]
            self._ended(added[-1], each, parser)
            pieces += added
        return pieces

    def _opening(self, index: int) -> list[ChatChunkChoice]:
        """The first piece of a choice says who speaks."""
        if index in self._parsers:
            return []
        self._parsers[index] = self.reader.parser()
        return [ChatChunkChoice(index=index, delta=ChatDelta(self._echo, "assistant"))]

    def _whole_choice(self, index: int, output: SequenceOutput) -> ChatChoice:
        logprobs = self._logprobs(output.logprobs or [])
        parser = self.reader.parser()
        events = parser.feed(output.text) + parser.finish()
        self._note_thoughts(index, events)
        message = self._message(events)
        choice = ChatChoice(index=index, message=message, logprobs=logprobs)
        return self._ended(choice, output, parser)

    def _ended(self, choice: ChoiceT, output: SequenceOutput, parser: ResponseParser) -> ChoiceT:
        self.num_output_tokens += len(output.token_ids)
        if self.body.return_token_ids:
            choice.token_ids = output.token_ids
        note_end(choice, output)
        choice.finish_reason = self.reader.finish_reason(choice.finish_reason, parser)
        return choice

    def _note_thoughts(self, index: int, events: Iterable[Event]) -> None:
        for event in events:
            if self._tells_usage and isinstance(event, Reasoning):
                self._thoughts[index].append(event.text)

    def _deltas(self, events: Iterable[Event]) -> list[ChatDelta]:
        """Events as pieces of a message."""
        deltas = []
        for event in joined(events):
            match event:
                case Content(text):
                    deltas.append(ChatDelta(text))
                case Reasoning(text):
                    deltas.append(ChatDelta(reasoning_content=text, reasoning=text))
                case ToolCallBegin(index, name):
                    call_id, function = self.reader.new_call_id(), FunctionCallDelta(name)
                    begun = ToolCallDelta(index, call_id, "function", function)
                    deltas.append(ChatDelta(tool_calls=[begun]))
                case ToolCallArguments(index, text):
                    more = ToolCallDelta(index, function=FunctionCallDelta(arguments=text))
                    deltas.append(ChatDelta(tool_calls=[more]))
        return deltas

    def _message(self, events: Iterable[Event]) -> AssistantMessage:
        """Events as a whole message."""
        contents, thoughts, calls = [self._echo], [], list[ToolCall]()
        for event in events:
            match event:
                case Content(text):
                    contents.append(text)
                case Reasoning(text):
                    thoughts.append(text)
                case ToolCallBegin(_, name):
                    calls.append(ToolCall(self.reader.new_call_id(), FunctionCall(name, "")))
                case ToolCallArguments(index, text):
                    calls[index].function.arguments += text
        content = "".join(contents)
        message = AssistantMessage(content if content or not calls else None)
        if calls:
            message.tool_calls = calls
        if thoughts:
            message.reasoning_content = message.reasoning = "".join(thoughts)
        return message

    def _logprobs(self, scores: list[TokenLogprobs]) -> ChatLogprobs | None:
        if not self.body.logprobs or not scores:
            return None
        return ChatLogprobs(self.texts.chat_logprobs(scores))


async def _reading(
    context: Context, body: ChatBody, params: Params, prompts: Sequence[Prompt]
) -> tuple[Params, AnswerReader]:
    """Parameters that keep the outputs to what the model writes for calls, and their reader."""
    [prompt] = prompts
    assert isinstance(prompt, list), "_prompts makes token ids"
    reader = answer_reader(context, prompt, _tools(body))
    return await answer_params(context, params, reader, body.thinking_token_budget), reader


def _tools(body: ChatBody) -> ToolUse | None:
    return tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)


def _variables(context: Context, body: ChatBody) -> Mapping[str, Any] | None:
    """What the chat template is told, beside the conversation. Raises ApiError."""
    variables, effort = body.chat_template_kwargs, body.reasoning_effort
    if effort is None:
        return variables
    known = context.tokenizer("messages").template_variables
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort, **(variables or {})}
    if "enable_thinking" in known:
        return {"enable_thinking": effort != "none", **(variables or {})}
    raise refused("reasoning_effort", "the chat template does not know it", UNSUPPORTED)


DIALECT = Dialect(ChatBody, chat_params, _prompts, ChatWriter, CLIENT_NAMES, _reading)


@router.post(
    "/v1/chat/completions",
    **documented(ChatBody, ChatCompletion, example=EXAMPLE, streams=ChatChunk),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    return await DIALECT.respond(request)
