"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from octavo.core.step import TokenLogprobs
from octavo.errors import InvalidRequest
from octavo.outputs import RequestOutput, SequenceDelta, SequenceOutput
from octavo.server.engine_process.client import RequestStream
from octavo.server.http.context import context_of, reply
from octavo.server.http.conversations import conversation_prompt
from octavo.server.http.params import chat_params, check_streaming
from octavo.server.http.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
)
from octavo.server.http.requests import ChatBody
from octavo.server.http.schema import documented
from octavo.server.http.streams import EventStream, close, open_streams, results, while_connected
from octavo.server.http.writer import Writer, finish_reason, in_order

router = APIRouter(tags=["OpenAI"])

# What the engine calls a field -> what a chat calls it.
ENGINE_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
EXAMPLE = {"messages": [{"role": "user", "content": "What is a cat?"}], "max_tokens": 40}


@router.post(
    "/v1/chat/completions",
    **documented(ChatBody, ChatCompletion, example=EXAMPLE, streams=ChatChunk),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    body = await context_of(request).body(request, ChatBody)
    return await while_connected(request.receive, _answer(request, body))


async def _answer(request: Request, body: ChatBody) -> Response:
    context = context_of(request)
    model = context.model_name(body.model)
    check_streaming(body)
    params = chat_params(body, context.client.model_config.sampling_defaults)
    prompt = await conversation_prompt(
        context,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template=body.chat_template,
        variables=body.chat_template_kwargs,
    )
    if not prompt:
        raise InvalidRequest("messages", "the chat template makes nothing of them")
    streams = await open_streams(request, body, [prompt], params, ENGINE_NAMES)
    writer = ChatWriter(request, body, model, streams)
    if body.stream:
        return EventStream(writer.events(), streams)
    try:
        [output] = await results(streams)
        return reply(writer.completion(output))
    finally:
        close(streams)


class ChatWriter(Writer[ChatBody, ChatChunkChoice]):
    """Writes the answers of a chat. A choice's stream begins with its role."""

    id_prefix = "chatcmpl"

    def __init__(
        self, request: Request, body: ChatBody, model: str, streams: Sequence[RequestStream]
    ) -> None:
        super().__init__(request, body, model, streams)
        self._begun: set[int] = set()  # choices
        self._shows_prompt = bool(body.return_token_ids)  # in the next chunk

    def completion(self, output: RequestOutput) -> ChatCompletion:
        """The whole reply."""
        [stream] = self.streams
        choices = [self._whole_choice(i, each) for i, each in enumerate(in_order(output))]
        whole = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.usage(),
        )
        if self.body.return_token_ids:
            whole.prompt_token_ids = stream.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            scores = stream.prompt_logprobs or []
            whole.prompt_logprobs = self.texts.prompt_logprobs(scores, self.body.prompt_logprobs)
        self.note(whole.usage)
        return whole

    def chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(id=self.id, created=self.created, model=self.model, choices=choices)
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
            self.num_output_tokens += len(each.token_ids)
            piece = ChatChunkChoice(
                index=index,
                delta=ChatDelta(each.text),
                finish_reason=finish_reason(each),
                stop_reason=each.stop_reason,
                score=UNSET if each.score is None else each.score,
                cumulative_logprob=UNSET
                if each.cumulative_logprob is None
                else each.cumulative_logprob,
            )
            if self.body.return_token_ids:
                piece.token_ids = each.token_ids
            pieces += [*self._opening(index), piece]
        return pieces

    def _opening(self, index: int) -> list[ChatChunkChoice]:
        """The first piece of a choice says who speaks."""
        if index in self._begun:
            return []
        self._begun.add(index)
        return [ChatChunkChoice(index=index, delta=ChatDelta("", "assistant"))]

    def _whole_choice(self, index: int, output: SequenceOutput) -> ChatChoice:
        self.num_output_tokens += len(output.token_ids)
        choice = ChatChoice(
            index=index,
            message=AssistantMessage(output.text),
            logprobs=self._logprobs(output.logprobs or []),
            finish_reason=finish_reason(output),
            stop_reason=output.stop_reason,
        )
        if self.body.return_token_ids:
            choice.token_ids = output.token_ids
        if output.score is not None:
            choice.score = output.score
            choice.cumulative_logprob = output.cumulative_logprob or 0.0
        return choice

    def _logprobs(self, scores: list[TokenLogprobs]) -> ChatLogprobs | None:
        if not self.body.logprobs or not scores:
            return None
        return ChatLogprobs(self.texts.chat_logprobs(scores))
