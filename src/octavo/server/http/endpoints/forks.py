"""Forks: requests that go on from any place in the tokens of a response, and share its KV."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Annotated, Literal, cast

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta
from pydantic import Field

from octavo.engine.validation import Prompt
from octavo.errors import InvalidRequest
from octavo.server.engine_process.stream import StreamEvent
from octavo.server.http.bodies import FAIL_FAST, WHOLE_FLOATS, Integer, Refused, without_nulls
from octavo.server.http.context import Context, context_of, reply, tenant_of
from octavo.server.http.endpoints.blocks import Words
from octavo.server.http.endpoints.completions import (
    Completion,
    CompletionBody,
    CompletionWriter,
    completion_params,
)
from octavo.server.http.errors import ApiError, refused
from octavo.server.http.forks import Fork
from octavo.server.http.generation import GenerationBody, NonEmptyIds, NonNegative, Params, Text
from octavo.server.http.responses import Parent
from octavo.server.http.schema import documented
from octavo.server.http.streams import (
    EventStream,
    check_ended,
    close,
    open_streams,
    while_connected,
)
from octavo.structured.output import StructuredOutput

router = APIRouter(prefix="/v1/forks", tags=["Forks"])

MAX_ID = 256  # characters: a prefix, and an X-Request-Id of 128
EXAMPLE = {
    "parent": "cmpl-my-request",
    "children": [{"suffix": " The end."}, {"suffix": " But then", "temperature": 0}],
    "max_tokens": 8,
    "seed": 1,
}
_OF_ALL = "it holds for all children"
_OF_PARENT = "a fork has that of its parent"
_POSITION = "use position"


class ForkChild(GenerationBody):
    """What one child has of its own, instead of what the fork says."""

    suffix: Annotated[Text | NonEmptyIds | None, WHOLE_FLOATS] = None
    """What comes after the parent's tokens: text or token ids."""

    model: Annotated[object, Refused(_OF_ALL)] = None  # type: ignore[assignment]
    n: Annotated[object, Refused(_OF_ALL)] = None  # type: ignore[assignment]
    beam_width: Annotated[object, Refused(_OF_ALL)] = None  # type: ignore[assignment]
    prompt_logprobs: Annotated[object, Refused(_OF_ALL)] = None  # type: ignore[assignment]
    skip_special_tokens: Annotated[object, Refused(_OF_ALL)] = None  # type: ignore[assignment]
    return_token_ids: Annotated[object, Refused(_OF_ALL)] = None  # type: ignore[assignment]
    priority: Annotated[object, Refused(_OF_ALL)] = None  # type: ignore[assignment]
    user: Annotated[object, Refused(_OF_ALL)] = None  # type: ignore[assignment]
    stream: Annotated[object, Refused(_OF_ALL)] = None  # type: ignore[assignment]
    stream_options: Annotated[object, Refused(_OF_ALL)] = None  # type: ignore[assignment]
    request_id: Annotated[object, Refused(_OF_ALL)] = None  # type: ignore[assignment]
    return_tokens_as_token_ids: Annotated[object, Refused(_OF_ALL)] = None  # type: ignore[assignment]
    truncate_prompt_tokens: Annotated[object, Refused(_POSITION)] = None  # type: ignore[assignment]
    truncation_side: Annotated[object, Refused(_POSITION)] = None  # type: ignore[assignment]
    cache_salt: Annotated[object, Refused(_OF_PARENT)] = None  # type: ignore[assignment]


class ForkBody(CompletionBody):
    """POST /v1/forks: beside these, the fields of completions, for all children."""

    parent: Annotated[str, Field(min_length=1, max_length=MAX_ID)]
    """The id of a response that is being generated, or has ended not long ago."""
    choice: NonNegative | None = None
    """Which of its choices; not given: 0."""
    position: Annotated[int, Integer(1)] | None = None
    """How many of the tokens of prompt and output to keep; not given: all that there are."""
    suffix: Annotated[Text | NonEmptyIds | None, WHOLE_FLOATS] = None
    """What comes after them: text or token ids."""
    children: Annotated[list[ForkChild], Field(min_length=1), FAIL_FAST] | None = None
    """Instead of one child, several, each with what it has of its own."""
    background: bool | None = None
    """Reply at once; the children are joined by GET."""

    prompt: Annotated[object, Refused("a fork has its parent's tokens, and suffix")] = None  # type: ignore[assignment]
    echo: Annotated[object, Refused("a fork gives what comes after it", (False,))] = None  # type: ignore[assignment]
    add_special_tokens: Annotated[object, Refused("a suffix has none", (False,))] = None  # type: ignore[assignment]
    decoder_input_ids: Annotated[object, Refused(_OF_PARENT)] = None  # type: ignore[assignment]
    truncate_prompt_tokens: Annotated[object, Refused(_POSITION)] = None  # type: ignore[assignment]
    truncation_side: Annotated[object, Refused(_POSITION)] = None  # type: ignore[assignment]
    cache_salt: Annotated[object, Refused(_OF_PARENT)] = None  # type: ignore[assignment]


class ForkStarted(msgspec.Struct, kw_only=True):
    """The reply of a fork in the background."""

    id: str
    object: Literal["fork"] = "fork"
    num_children: Annotated[int, Meta(description="GET and DELETE /v1/forks/ID/0, 1, ...")]


class Cancelled(msgspec.Struct, kw_only=True):
    """A fork's children have been ended."""

    id: str
    object: Literal["fork"] = "fork"
    cancelled: Annotated[int, Meta(description="Children that had not ended.")]


class ForkWriter(CompletionWriter):
    """Writes what has come of children, from their beginning, as completions are written."""

    id_prefix = "fork-"
    fork: Fork[ForkBody]
    only: int | None = None  # one child; None: all

    def items(self) -> AsyncIterator[tuple[int, StreamEvent]]:
        return self.fork.items(self.only)

    async def joined(self) -> Response:
        """The whole reply, once the children have ended."""
        if self.only is None:
            outputs = await self.fork.results()
            for output in outputs:
                if output.outputs:
                    check_ended(output)
            return await self.respond(outputs)
        prompt, delta = await self.fork.result(self.only)

        def written() -> Response:
            whole = self.chunk(self.delta_choices(prompt, delta))
            whole.usage = self.usage()
            self.log(whole.usage)
            return reply(whole)

        offload = context_of(self.request).client.offload
        return await offload.reply(len(delta.logprobs), written)


async def fork_of(request: Request, body: ForkBody) -> ForkWriter:
    """Start the children that a body asks for. Raises ApiError or InvalidRequest, which name the
    field, before anything is computed."""
    context, tenant = context_of(request), tenant_of(request)
    model = context.model_name(body.model)
    if body.background and body.stream:
        raise refused("background", "its stream is read with GET /v1/forks/ID?stream=true")
    parent = context.responses.find(body.parent, tenant, body.choice or 0)
    position = _position(body, parent)
    suffixes, params, words = await _children(context, body)
    tokens = parent.tokens_to(position)
    for index, suffix in enumerate(suffixes):
        try:
            params[index] = _going_on(parent, position, params[index], suffix)
        except ApiError as error:
            raise words[index].of(error) from error
    prompts: list[Prompt] = [[*tokens, *suffix] for suffix in suffixes]
    if parent.encoder_token_ids:
        encoder = list(parent.encoder_token_ids)
        prompts = [
            {"prompt": encoder, "decoder_input_ids": [*tokens, *suffix]} for suffix in suffixes
        ]
    if parent.running is not None:
        context.client.offer_tail(*parent.running)
    field = "suffix" if body.children is None else "children"
    names = dict.fromkeys(("prompt", "decoder_input_ids", "structured.begun"), field)
    rewords = [each.of for each in words]
    streams = await open_streams(request, body, prompts, params, names, parent, rewords)
    writer = ForkWriter(request, body, model, streams)
    writer.fork = Fork(
        writer.head, body, tenant, streams, writer.num_samples, context.client.offload
    )
    return writer


def _position(body: ForkBody, parent: Parent) -> int:
    """How many of the parent's tokens are kept."""
    position = parent.num_tokens if body.position is None else body.position
    if position > parent.num_tokens:
        raise refused(
            "position",
            f"{position} is more than the {parent.num_tokens} tokens that there are: "
            f"{len(parent.prompt)} of the prompt and {len(parent.output)} of the output",
        )
    return position


def _going_on(parent: Parent, position: int, params: Params, suffix: Sequence[int]) -> Params:
    """A child's parameters with the form that its parent's output has, if the place of the fork is
    inside of it."""
    num_begun = parent.num_begun(position)
    if parent.grammar is None or not num_begun:
        return params
    if isinstance(params.structured, StructuredOutput):
        raise refused(
            params.structured.field,
            f"the place of the fork, {position}, is inside an output that has a form, which goes "
            f"on; fork it at its end, or at {parent.form_start}, where the form begins",
        )
    structured = StructuredOutput.going_on(parent.grammar, num_begun + len(suffix), field="parent")
    return replace(params, structured=structured)


async def _children(
    context: Context, body: ForkBody
) -> tuple[list[list[int]], list[Params], list[Words]]:
    """The suffix and the parameters of each child, and what errors about those are to name."""
    defaults = context.client.model_config.sampling_defaults
    shared = completion_params(body, defaults)
    if body.children is None:
        return [await _suffix(context, body.suffix, "suffix")], [shared], [Words({})]
    limit = context.settings.max_prompts
    if len(body.children) > limit:
        raise refused("children", f"{len(body.children)} children are more than {limit}")
    if body.suffix is not None:
        raise refused("suffix", "give it to each of the children")
    suffixes, params, words = [], [], []
    for i, child in enumerate(body.children):
        given = without_nulls({name: getattr(child, name) for name in child.model_fields_set})
        suffixes.append(await _suffix(context, given.pop("suffix", None), f"children[{i}].suffix"))
        words.append(Words({rf"{name}\b": f"children[{i}].{name}" for name in given}))
        try:
            params.append(completion_params(body.model_copy(update=given), defaults))
        except (ApiError, InvalidRequest) as error:
            raise words[i].of(error) from error
    return suffixes, params, words


async def _suffix(context: Context, suffix: str | list[int] | None, field: str) -> list[int]:
    """The token ids of a suffix."""
    if isinstance(suffix, str):
        [suffix] = await context.client.encode([suffix], field, add_special_tokens=False)
    return suffix or []


def _find(request: Request, fork_id: str, index: int | None = None) -> Fork[ForkBody]:
    return cast(
        "Fork[ForkBody]", context_of(request).forks.find(fork_id, tenant_of(request), index)
    )


async def _answer(request: Request, body: ForkBody) -> Response:
    context = context_of(request)
    writer = await fork_of(request, body)
    fork = writer.fork
    response = context.responses.begin(
        writer.id, tenant_of(request), fork.streams, writer.num_samples
    )
    fork.ended.add_done_callback(lambda _: context.responses.end(response))
    context.forks.add(fork, is_kept=bool(body.background))
    if body.background:
        return reply(ForkStarted(id=writer.id, num_children=len(fork.children)), 202)

    def end() -> None:
        close(fork.streams)
        context.forks.remove(fork)

    if body.stream:
        return EventStream(writer.events(), context.settings.ping_seconds, end)
    try:
        return await writer.joined()
    finally:
        end()


async def _join(
    request: Request, fork: Fork[ForkBody], index: int | None, stream: bool
) -> Response:
    """What has come and comes of a fork's children, or of one."""
    writer = ForkWriter(request, fork.body, fork.head["model"], fork.streams)
    writer.fork, writer.only = fork, index
    writer.id, writer.head = fork.head["id"], fork.head
    if stream:
        return EventStream(writer.events(), context_of(request).settings.ping_seconds)
    return await while_connected(request.receive, writer.joined())


_CREATED = documented(ForkBody, Completion, example=EXAMPLE, streams=Completion)
_CREATED["responses"] |= documented(None, ForkStarted, status=202)["responses"]


@router.post("", **_CREATED)
async def create_fork(request: Request) -> Response:
    """Go on from a place in the tokens of a response, in one or several ways."""
    body = await context_of(request).body(request, ForkBody)
    if body.request_id is not None:
        request.state.request_id = body.request_id
    return await while_connected(request.receive, _answer(request, body))


@router.get("/{fork_id}", **documented(None, Completion, streams=Completion))
async def join_fork(request: Request, fork_id: str, stream: bool = False) -> Response:
    """Wait for all children of a fork, or follow them from their beginning."""
    return await _join(request, _find(request, fork_id), None, stream)


@router.delete("/{fork_id}", **documented(None, Cancelled))
async def cancel_fork(request: Request, fork_id: str) -> Response:
    """End all children of a fork, with what there is."""
    return reply(Cancelled(id=fork_id, cancelled=_find(request, fork_id).cancel()))


@router.get("/{fork_id}/{index}", **documented(None, Completion, streams=Completion))
async def join_child(request: Request, fork_id: str, index: int, stream: bool = False) -> Response:
    """Wait for one child of a fork, or follow it from its beginning."""
    return await _join(request, _find(request, fork_id, index), index, stream)


@router.delete("/{fork_id}/{index}", **documented(None, Cancelled))
async def cancel_child(request: Request, fork_id: str, index: int) -> Response:
    """End one child of a fork, with what there is; the others go on."""
    return reply(Cancelled(id=fork_id, cancelled=_find(request, fork_id, index).cancel(index)))
