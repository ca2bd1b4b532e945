"""The responses that can be forked: those that are being generated, and the latest that ended."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.core.step import Grammar
from octavo.engine.validation import PreparedRequest
from octavo.outputs import SequenceOutput
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.stream import RequestStream
from octavo.server.http.errors import ApiError, refused
from octavo.server.http.keys import Tenant
from octavo.server.http.shares import Shares

TOKEN_BYTES = 4
MAX_TOKENS = 1 << 22  # of all ended responses together; grammars count as tokens of their size


@dataclass(frozen=True, slots=True)
class Parent:
    """One choice of a response: the tokens that its children go on from."""

    prompt: Sequence[int]  # what the output continues
    output: Sequence[int]  # so far
    encoder_token_ids: tuple[int, ...]
    cache_salt: str
    grammar: Grammar | None  # holds the output
    form_start: int  # how many tokens are before what the grammar describes
    is_whole: bool  # an end token has ended the output
    finish_reason: str | None  # None while it runs
    replica: int | None  # that has it in its cache, if it still has
    running: tuple[OpenRequest, int] | None = None  # the request and the sample, until its end

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def num_begun(self, position: int) -> int:
        """How many of the first `position` tokens are the beginning of an output with a form, which
        whatever follows them must continue; 0 if they end before it or with the whole of it."""
        is_past = self.is_whole and position == self.num_tokens
        return 0 if self.grammar is None or is_past else max(0, position - self.form_start)

    def tokens_to(self, position: int) -> list[int]:
        """Its first `position` tokens."""
        return [*self.prompt, *self.output][:position]


@dataclass(slots=True, eq=False)
class Response:
    """What one id stands for."""

    key: tuple[str, str]  # the tenant's name and the id
    streams: Sequence[RequestStream]  # () once it has ended
    num_samples: int  # of each stream
    choices: Sequence[Parent] = ()  # once it has ended

    @property
    def num_tokens(self) -> int:
        """Tokens of its choices, and those that take as much memory as its grammars."""
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        return num_tokens + tokens_of_grammars(choice.grammar for choice in self.choices)


class Responses:
    """Owns what is known of responses. An id is its tenant's own: to another one it is unknown."""

    def __init__(self, max_ended: int) -> None:
        """`max_ended`: how many of each tenant are remembered after their end, those that ended or
        were asked for last."""
        self._max_ended = max_ended
        self._open: dict[tuple[str, str], Response] = {}
        self._ended: Shares[tuple[str, str], Response] = Shares(max_ended, MAX_TOKENS)

    def begin(
        self, response_id: str, tenant: Tenant, streams: Sequence[RequestStream], num_samples: int
    ) -> Response:
        """A response is being generated; a later one of the same id takes its place."""
        response = Response((tenant.name, response_id), streams, num_samples)
        self._open[response.key] = response
        return response

    def end(self, response: Response) -> None:
        """Keep the tokens of a response, and nothing else of it; its streams have ended."""
        response.choices = [
            choice for stream in response.streams for choice in _ended_choices(stream)
        ]
        response.streams = ()
        if self._open.get(response.key) is not response:
            return  # the id stands for a later one
        del self._open[response.key]
        self._ended.put(response.key[0], response.key, response, response.num_tokens)

    def find(self, response_id: str, tenant: Tenant, index: int) -> Parent:
        """A choice of a response. Raises ApiError: 404 if there is no such response of the tenant,
        or none any more; 400 if it has no such choice, or its beams are not known yet."""
        key = (tenant.name, response_id)
        response = self._open.get(key) or self._ended.get(key)
        if response is None:
            raise ApiError(
                404,
                f"parent: no response {response_id[:160]!r} can be forked: there was none, or it "
                f"is not one of the last {self._max_ended} that ended or were forked",
                "parent",
                "response_not_found",
            )
        num_choices = len(response.choices) or len(response.streams) * response.num_samples
        if index >= num_choices:
            raise refused("choice", f"{index} is not one of the response's {num_choices} choices")
        if response.choices:
            return response.choices[index]
        number, sample_index = divmod(index, response.num_samples)
        stream = response.streams[number]
        if not stream.samples:
            raise refused("parent", "the beams of a search are known at its end; fork it then")
        return _running_choice(stream, sample_index)


def tokens_of_grammars(grammars: Iterable[Grammar | None]) -> int:
    """How many tokens take as much memory as these grammars, of which some may be the same."""
    sources = {id(each.source): each.source for each in grammars if each is not None}
    return sum(map(sys.getsizeof, sources.values())) // TOKEN_BYTES


def _running_choice(stream: RequestStream, index: int) -> Parent:
    entry, sample = stream.entry, stream.samples[index]
    return Parent(
        entry.prompt_token_ids,
        sample.token_ids,
        entry.request.encoder_token_ids,
        entry.request.cache_salt,
        *_form(entry.request, sample.token_ids, sample.finish_reason),
        sample.finish_reason,
        entry.replica,
        (entry, index),
    )


def _ended_choices(stream: RequestStream) -> list[Parent]:
    """What can be forked of a response that has ended, in the order of its choices."""
    outputs: Sequence[SequenceOutput] = () if stream.output is None else stream.output.outputs
    if stream.samples:
        ends = [(sample.token_ids, sample.finish_reason) for sample in stream.samples]
    else:
        best_first = sorted(outputs, key=lambda each: (-(each.score or 0.0), each.index))
        ends = [(each.token_ids, each.finish_reason) for each in best_first]
    entry = stream.entry
    prompt = array("I", entry.prompt_token_ids)
    return [
        Parent(
            prompt,
            array("I", token_ids),
            entry.request.encoder_token_ids,
            entry.request.cache_salt,
            *_form(entry.request, token_ids, reason),
            reason or "abort",
            entry.replica,
        )
        for token_ids, reason in ends
    ]


def _form(
    request: PreparedRequest, output: Sequence[int], finish_reason: str | None
) -> tuple[Grammar | None, int, bool]:
    """The fields of a Parent about the form of its output."""
    spec = request.sampling
    ends = {*request.eos_ids, *request.stop_ids}
    is_whole = finish_reason == "stop" and len(output) > 0 and output[-1] in ends
    return spec.grammar, len(request.prompt_token_ids) - spec.num_begun, is_whole
