"""How a reply is written, whole or as a stream: what completions and chats have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Generic, TypeVar, cast

from fastapi import Request

from octavo.outputs import RequestOutput, SequenceDelta, SequenceOutput
from octavo.server.engine_process.client import RequestStream
from octavo.server.http.context import context_of, request_id_of
from octavo.server.http.replies import (
    ChatChunk,
    ChatChunkChoice,
    Completion,
    CompletionChoice,
    FinishReason,
    PromptTokensDetails,
    Usage,
)
from octavo.server.http.requests import GenerationBody
from octavo.server.http.streams import check_ended, event, merged

BodyT = TypeVar("BodyT", bound=GenerationBody)
ChoiceT = TypeVar("ChoiceT", CompletionChoice, ChatChunkChoice)


class Writer(ABC, Generic[BodyT, ChoiceT]):
    """Writes the reply to one HTTP request, which has a stream for each of its prompts."""

    id_prefix: str

    def __init__(
        self, request: Request, body: BodyT, model: str, streams: Sequence[RequestStream]
    ) -> None:
        self.request = request
        self.texts = context_of(request).texts
        self.body = body
        self.model = model
        self.streams = streams
        self.id = f"{self.id_prefix}-{request_id_of(request)}"
        self.created = int(time.time())
        self.num_samples = body.n or 1  # of each prompt
        self.num_output_tokens = 0

    @abstractmethod
    def chunk(self, choices: list[ChoiceT]) -> Completion | ChatChunk:
        """A piece of a stream."""

    @abstractmethod
    def delta_choices(self, prompt: int, delta: SequenceDelta) -> list[ChoiceT]:
        """What a step added to a sample, as pieces of a choice; [] if there is nothing to show."""

    @abstractmethod
    def beam_choices(self, prompt: int, output: RequestOutput) -> list[ChoiceT]:
        """Finished beams, as pieces of a stream."""

    async def events(self) -> AsyncIterator[bytes]:
        """The reply as server-sent events, all but the last one."""
        options = self.body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        async for prompt, item in merged(self.streams):
            if isinstance(item, SequenceDelta):
                choices = self.delta_choices(prompt, item)
            else:
                check_ended(item)
                is_beam = self.body.beam_width is not None
                choices = self.beam_choices(prompt, item) if is_beam else []
            if not choices:
                continue
            chunks = [self.chunk([choice]) for choice in choices]
            if wants_usage:
                for each in chunks:
                    each.usage = self.usage() if continuous else None
            yield b"".join(map(event, chunks))
        usage = self.usage()
        self.note(usage)
        if wants_usage:
            last = self.chunk([])
            last.usage = usage
            yield event(last)

    def usage(self) -> Usage:
        num_prompt = sum(len(each.prompt_token_ids) for each in self.streams)
        num_cached = sum(each.num_cached_tokens for each in self.streams)
        return Usage(
            num_prompt,
            self.num_output_tokens,
            num_prompt + self.num_output_tokens,
            PromptTokensDetails(num_cached),
        )

    def note(self, usage: Usage) -> None:
        """For the request log: counts, and nothing of what was said."""
        self.request.state.log = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
        if self.body.user is not None:
            self.request.state.log["user"] = self.body.user


def in_order(output: RequestOutput) -> list[SequenceOutput]:
    """Beams from best to worst, samples by number."""
    return sorted(output.outputs, key=lambda each: (-(each.score or 0.0), each.index))


def finish_reason(output: SequenceOutput | SequenceDelta) -> FinishReason | None:
    """None while it goes on, and for the rest of a stream that was cut off: an error follows it."""
    reason = output.finish_reason
    return None if reason == "abort" else cast("FinishReason | None", reason)
