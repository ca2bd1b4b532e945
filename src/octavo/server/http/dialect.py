"""What an endpoint that generates text consists of, and how it answers: whole or as a stream.

Completions and chats are two dialects of one conversation with the engine. A third one is a
`Dialect` of its own: a body, and functions and a `Writer` that say what it means.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast

from fastapi import Request, Response

from octavo.engine.validation import Prompt
from octavo.outputs import RequestOutput, SequenceDelta, SequenceOutput
from octavo.server.engine_process.stream import RequestStream, StreamEvent
from octavo.server.http.answers import PLAIN, AnswerReader
from octavo.server.http.context import Context, context_of, reply, request_id_of, tenant_of
from octavo.server.http.errors import as_api_error, log_internal
from octavo.server.http.generation import GenerationBody, Params
from octavo.server.http.prompts import truncated
from octavo.server.http.replies import Choice, FinishReason, PromptTokensDetails, Usage
from octavo.server.http.streams import (
    DONE,
    EventStream,
    check_ended,
    close,
    event,
    merged,
    open_streams,
    results,
    while_connected,
)
from octavo.server.offload import LARGE_REPLY

BodyT = TypeVar("BodyT", bound=GenerationBody)
ChoiceT = TypeVar("ChoiceT")


class ReplyWriter(ABC, Generic[BodyT]):
    """Writes the reply to one HTTP request, which has a stream for each of its prompts."""

    id_prefix: str
    reader: AnswerReader = PLAIN  # of the outputs; the dialect's `reading` chooses another one

    def __init__(
        self, request: Request, body: BodyT, model: str, streams: Sequence[RequestStream]
    ) -> None:
        self.request = request
        context = context_of(request)
        self.texts = context.token_ids if body.return_tokens_as_token_ids else context.texts
        self.body = body
        self.streams = streams
        self.id = f"{self.id_prefix}{request_id_of(request)}"
        # The fields of `Reply`.
        self.head: dict[str, Any] = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": context.fingerprint,
        }
        self.num_samples = body.n or 1  # of each prompt
        self.num_output_tokens = 0

    @abstractmethod
    async def respond(self, outputs: Sequence[RequestOutput]) -> Response:
        """Reply with the whole of outputs that have no log-probabilities of their tokens yet."""

    @abstractmethod
    def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events; those that come together are one item."""

    async def count(self) -> None:
        """Count what the end of the reply tells of the outputs, which are whole, and no log."""

    async def tokenized_again(self, texts: Sequence[str]) -> int | None:
        """How many tokens these parts of the outputs have: no more than all of the outputs, though
        text may have more tokens than it was written with. None if that cannot be counted, for
        which no finished reply is given up."""
        client = context_of(self.request).client
        # Work that is dropped as the server ends counts as failed, too; a request that is
        # cancelled itself still raises that.
        [encoded] = await asyncio.gather(
            client.encode(texts, "output", add_special_tokens=False, any_length=True),
            return_exceptions=True,
        )
        if isinstance(encoded, BaseException):
            log_internal(f"the reasoning of {self.id} cannot be counted", encoded)
            return None
        return min(sum(map(len, encoded)), self.num_output_tokens)

    def usage(self) -> Usage:
        """What has been read and written so far."""
        num_prompt = sum(len(each.prompt_token_ids) for each in self.streams)
        num_cached = sum(each.num_cached_tokens for each in self.streams)
        return Usage(
            num_prompt,
            self.num_output_tokens,
            num_prompt + self.num_output_tokens,
            PromptTokensDetails(num_cached),
        )

    def log(self, usage: Usage) -> None:
        """Note the counts for the request log, and nothing of what was said."""
        self.request.state.log = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
        if self.body.end_user is not None:
            self.request.state.log["user"] = self.body.end_user


class Writer(ReplyWriter[BodyT], Generic[BodyT, ChoiceT]):
    """Writes replies that have choices, and streams of their pieces.

    `ChoiceT` is a piece of a choice in a chunk of a stream.
    """

    @abstractmethod
    def whole(self, outputs: Iterable[RequestOutput]) -> Any:
        """The whole reply, of an output for each prompt; its `usage` is set afterwards. Of several
        outputs, or of tokens with log-probabilities, it may be written in a thread."""

    @abstractmethod
    def chunk(self, choices: list[ChoiceT]) -> Any:
        """A piece of a stream; its `usage` is set afterwards."""

    @abstractmethod
    def delta_choices(self, prompt: int, delta: SequenceDelta) -> list[ChoiceT]:
        """What a step added to a sample, as pieces of a choice; [] if there is nothing to show."""

    @abstractmethod
    def beam_choices(self, prompt: int, output: RequestOutput) -> list[ChoiceT]:
        """Finished beams, as pieces of a stream."""

    async def respond(self, outputs: Sequence[RequestOutput]) -> Response:
        def written() -> Any:
            # One after the other, because log-probabilities take much more memory here than in the
            # streams.
            pairs = zip(self.streams, outputs, strict=True)
            return self.whole(stream.scored(output) for stream, output in pairs)

        size = sum(each.num_entries for each in self.streams)
        offload = context_of(self.request).client.offload
        whole = await offload.reply(size, written)
        self.log(self.usage())
        await self.count()
        whole.usage = self.usage()
        return await offload.reply(size, partial(reply, whole))

    def items(self) -> AsyncIterator[tuple[int, StreamEvent]]:
        """What comes of the prompts, each item with the number of its prompt."""
        return merged(self.streams)

    def num_scores(self, prompt: int, item: StreamEvent) -> int:
        """How many tokens with log-probabilities are written of an item."""
        return len(item.logprobs) if isinstance(item, SequenceDelta) else 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events; those that come together are one item."""
        offload = context_of(self.request).client.offload
        try:
            async for prompt, item in self.items():
                size = self.num_scores(prompt, item)
                if size <= LARGE_REPLY:
                    written = self._events(prompt, item)
                else:
                    written = await offload.reply(size, partial(self._events, prompt, item))
                if written:
                    yield written
            self.log(self.usage())
            options = self.body.stream_options
            if options is not None and options.include_usage:
                await self.count()
                last = self.chunk([])
                last.usage = self.usage()
                yield event(last)
        except Exception as error:
            # The status is on its way already, so the error is an event of its own.
            yield event(as_api_error(error).reply)
        yield DONE

    def _events(self, prompt: int, item: StreamEvent) -> bytes:
        """What is written of an item, perhaps in a thread; nothing else is written meanwhile."""
        if isinstance(item, SequenceDelta):
            choices = self.delta_choices(prompt, item)
        else:
            check_ended(item)
            is_beam = self.body.beam_width is not None
            choices = self.beam_choices(prompt, item) if is_beam else []
        chunks = [self.chunk([choice]) for choice in choices]
        options = self.body.stream_options
        if options is not None and options.include_usage:
            for each in chunks:
                each.usage = self.usage() if options.continuous_usage_stats else None
        return b"".join(map(event, chunks))


@dataclass(frozen=True, slots=True)
class Dialect(Generic[BodyT]):
    """An endpoint that generates text.

    Attributes:
        body: the model of its requests.
        params: from a body and the model's default sampling parameters to the engine's parameters.
        prompts: each prompt of a body, in token ids.
        writer: writes its replies.
        client_names: the engine's name of a field -> the client's, where that is another one.
        reading: from the parameters and the prompts to parameters that keep the outputs to a
            format, and a reader of them. None: they are plain text.
    """

    body: type[BodyT]
    params: Callable[[BodyT, Mapping[str, Any]], Params]
    prompts: Callable[[Context, BodyT], Awaitable[Sequence[Prompt]]]
    writer: Callable[[Request, BodyT, str, Sequence[RequestStream]], ReplyWriter[BodyT]]
    client_names: Mapping[str, str] = field(default_factory=dict)
    reading: (
        Callable[[Context, BodyT, Params, Sequence[Prompt]], Awaitable[tuple[Params, AnswerReader]]]
        | None
    ) = None

    async def respond(self, request: Request) -> Response:
        """Answer a request. Raises ApiError or InvalidRequest, which name the field, before
        anything is computed."""
        body = await context_of(request).body(request, self.body)
        if body.request_id is not None:
            request.state.request_id = body.request_id
        return await while_connected(request.receive, self.answer(request, body))

    async def answer(self, request: Request, body: BodyT) -> Response:
        """Answer a request that has this body, which may be another's translation."""
        context = context_of(request)
        model = context.model_name(body.model)
        params = self.params(body, context.client.model_config.sampling_defaults)
        info = context.client.info
        length = info.max_prompt_len
        # Truncation leaves this much of the context. An encoder's input takes nothing of it.
        reserved = max(1, params.max_tokens or 1) if info.max_encoder_len is None else 0
        prompts = truncated(await self.prompts(context, body), body, length, reserved)
        reader = PLAIN
        if self.reading is not None:
            params, reader = await self.reading(context, body, params, prompts)
        streams = await open_streams(request, body, prompts, params, self.client_names)
        writer = self.writer(request, body, model, streams)
        writer.reader = reader
        response = context.responses.begin(
            writer.id, tenant_of(request), streams, writer.num_samples
        )

        def end() -> None:
            close(streams)
            context.responses.end(response)

        if body.stream:
            return EventStream(writer.events(), context.settings.ping_seconds, end)
        try:
            return await writer.respond(await results(streams))
        finally:
            end()


def in_order(output: RequestOutput) -> list[SequenceOutput]:
    """Beams from best to worst, samples by number."""
    return sorted(output.outputs, key=lambda each: (-(each.score or 0.0), each.index))


def note_end(choice: Choice, output: SequenceOutput) -> None:
    """Set why a finished sample or beam has ended, and a beam's scores."""
    choice.finish_reason = finish_reason(output)
    choice.stop_reason = output.stop_reason
    if output.score is not None:
        choice.score = output.score
        choice.cumulative_logprob = output.cumulative_logprob or 0.0


def finish_reason(output: SequenceOutput | SequenceDelta) -> FinishReason | None:
    """None while it goes on, and for the rest of a stream that was cut off: an error follows it."""
    reason = output.finish_reason
    return None if reason == "abort" else cast("FinishReason | None", reason)
