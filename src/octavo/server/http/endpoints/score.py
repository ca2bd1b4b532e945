"""POST /v1/score: how likely the model finds continuations of prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta
from pydantic import Field

from octavo.core.step import TokenLogprobs
from octavo.sampling_params import SamplingParams
from octavo.server.engine_process.stream import RequestStream
from octavo.server.http.bodies import WHOLE_FLOATS, Refused
from octavo.server.http.context import Context, context_of, reply, request_id_of
from octavo.server.http.errors import refused
from octavo.server.http.generation import PromptBody
from octavo.server.http.prompts import PromptField, prompt_list
from octavo.server.http.replies import PromptTokensDetails
from octavo.server.http.schema import documented
from octavo.server.http.streams import close, open_streams, results, while_connected
from octavo.server.http.token_texts import LOWEST, TokenTexts

router = APIRouter(tags=["OpenAI"])

MAX_PAIRS = 2_048
# Characters, or tokens where those are given, of all pairs together: a prompt that they share is
# counted for each, because it is tokenized with each continuation.
MAX_SIZE = 1 << 24
CLIENT_NAMES = {"prompt": "continuation", "max_tokens": "continuation"}
EXAMPLE = {"prompt": "The cat sat on the", "continuation": [" mat.", " moon."]}
_RERANKING = "scores of similarity need another kind of model; here it is prompt and continuation"


class ScoreBody(PromptBody):
    """POST /v1/score: pairs of a prompt and a continuation."""

    prompt: Annotated[PromptField, Field(union_mode="left_to_right"), WHOLE_FLOATS]
    """Text, token ids, or a list of either: one for all continuations, or one for each."""
    continuation: Annotated[PromptField, Field(union_mode="left_to_right"), WHOLE_FLOATS]
    """The same: one for all prompts, or one for each; at most 2,048 pairs. A text that follows a
    text is tokenized with it: what differs from the prompt's tokens is the continuation."""
    add_special_tokens: bool | None = None
    """Begin text prompts with what the model expects, such as BOS."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens as token_id:ID."""

    text_1: Annotated[object, Refused(_RERANKING)] = None
    text_2: Annotated[object, Refused(_RERANKING)] = None


class Score(msgspec.Struct, kw_only=True):
    """How likely a continuation is after its prompt."""

    object: Literal["score"] = "score"
    index: Annotated[int, Meta(description="Of the pair.")]
    score: Annotated[float, Meta(description="Sum of the log-probabilities.")]
    is_greedy: Annotated[bool, Meta(description="Whether each token is the likeliest one.")]
    tokens: list[str]
    token_logprobs: list[float]


class ScoreUsage(msgspec.Struct):
    """How many tokens the pairs had."""

    prompt_tokens: Annotated[int, Meta(description="Prompts and continuations.")]
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Scores(msgspec.Struct, kw_only=True):
    """The scores of all pairs of a request."""

    object: Literal["list"] = "list"
    id: str
    created: int
    model: str
    data: list[Score]
    usage: ScoreUsage


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt with its continuation, in token ids."""

    token_ids: list[int]
    start: int  # of the continuation


@router.post("/v1/score", **documented(ScoreBody, Scores, example=EXAMPLE))
async def create_scores(request: Request) -> Response:
    """Log-probabilities of continuations of prompts. A prompt that several continuations share is
    computed once."""
    body = await context_of(request).body(request, ScoreBody)
    if body.request_id is not None:
        request.state.request_id = body.request_id
    return await while_connected(request.receive, _respond(request, body))


async def _respond(request: Request, body: ScoreBody) -> Response:
    context = context_of(request)
    model = context.model_name(body.model)
    if context.client.model_config.encoder is not None:
        raise refused("prompt", "a model with an encoder does not predict its input")
    if body.truncate_prompt_tokens is not None or body.truncation_side is not None:
        raise refused("truncate_prompt_tokens", "a prompt without its end is another one")
    pairs = await _pairs(context, body)
    texts = context.token_ids if body.return_tokens_as_token_ids else context.texts
    offload = context.client.offload
    data: list[Score] = []
    num_tokens = num_cached = num_entries = 0
    width = context.settings.max_prompts
    for begin in range(0, len(pairs), width):  # a request may not fill the queue for all
        part = pairs[begin : begin + width]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=1,
                detokenize=False,
                prompt_logprobs=0,
                prompt_logprobs_start=pair.start,
            )
            for pair in part
        ]
        prompts = [pair.token_ids for pair in part]
        streams = await open_streams(request, body, prompts, params, CLIENT_NAMES)
        try:
            outputs = await results(streams)
            size = sum(1 + len(pair.token_ids) - pair.start for pair in part)
            data += await offload.reply(size, partial(_scores, len(data), part, streams, texts))
            num_entries += size
            num_tokens += sum(len(pair.token_ids) for pair in part)
            num_cached += sum(output.num_cached_tokens for output in outputs)
        finally:
            close(streams)
    request.state.log = {"prompt_tokens": num_tokens, "cached_tokens": num_cached}
    if body.end_user is not None:
        request.state.log["user"] = body.end_user
    whole = Scores(
        id=f"score-{request_id_of(request)}",
        created=int(time.time()),
        model=model,
        data=data,
        usage=ScoreUsage(num_tokens, num_tokens, PromptTokensDetails(num_cached)),
    )
    return await offload.reply(num_entries, partial(reply, whole))


async def _pairs(context: Context, body: ScoreBody) -> list[Pair]:
    """All pairs, each of which can be computed."""
    prompts, continuations = prompt_list(body.prompt), prompt_list(body.continuation)
    count = max(len(prompts), len(continuations))
    for name, given in (("prompt", prompts), ("continuation", continuations)):
        if len(given) not in (1, count):
            raise refused(name, f"{len(given)} for {count} of the other; give one, or as many")
    if count > MAX_PAIRS:
        name = "prompt" if len(prompts) == count else "continuation"
        raise refused(name, f"{count} are more than {MAX_PAIRS}")
    size = sum(sum(map(len, given)) * (count // len(given)) for given in (prompts, continuations))
    if size > MAX_SIZE:
        what = "characters" if isinstance(prompts[0], str) else "tokens"
        raise refused(
            "prompt", f"the pairs have {size} {what} together; at most {MAX_SIZE} are allowed"
        )
    own_heads = heads = await _encoded(context, body, prompts)
    if len(heads) == 1:
        prompts, heads = [*prompts] * count, heads * count
    if len(continuations) == 1:
        continuations = [*continuations] * count
    encoded, is_whole = await _continued(context, body, prompts, continuations)

    def paired() -> list[Pair]:
        context.client.check_prompts(own_heads, "prompt")
        make = _split if is_whole else _joined
        pairs = [make(head, ids) for head, ids in zip(heads, encoded, strict=True)]
        context.client.check_prompts([pair.token_ids for pair in pairs], "continuation")
        for index, pair in enumerate(pairs):
            name = "continuation" if count == 1 else f"continuation[{index}]"
            if pair.start == len(pair.token_ids):
                raise refused(name, "it adds no token to its prompt")
            if pair.start == 0:
                raise refused("prompt", "it has no token before the continuation")
        return pairs

    return await context.client.offload.text(size, paired)


async def _encoded(
    context: Context, body: ScoreBody, prompts: Sequence[str | list[int]]
) -> list[list[int]]:
    texts = [each for each in prompts if isinstance(each, str)]
    if not texts:
        return [each for each in prompts if isinstance(each, list)]
    return await context.client.encode(texts, "prompt", body.add_special_tokens is not False)


async def _continued(
    context: Context,
    body: ScoreBody,
    prompts: Sequence[str | list[int]],
    continuations: Sequence[str | list[int]],
) -> tuple[list[list[int]], bool]:
    """The tokens of each continuation, and whether those of its prompt stand before them."""
    if not isinstance(continuations[0], str):  # then none is
        return [each for each in continuations if isinstance(each, list)], False
    texts = [each for each in continuations if isinstance(each, str)]
    encode = context.client.encode
    if not isinstance(prompts[0], str):
        return await encode(texts, "continuation", add_special_tokens=False), False
    # Tokens may reach from the prompt into the continuation, so that both are tokenized together.
    whole = [f"{prompt}{text}" for prompt, text in zip(prompts, texts, strict=True)]
    return await encode(whole, "continuation", body.add_special_tokens is not False), True


def _joined(head: list[int], tail: list[int]) -> Pair:
    return Pair(head + tail, len(head))


def _split(head: list[int], whole: list[int]) -> Pair:
    return Pair(whole, _num_equal(head, whole))


def _num_equal(head: Sequence[int], ids: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(head, ids, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(head), len(ids)))


def _scores(
    first: int, pairs: Sequence[Pair], streams: Sequence[RequestStream], texts: TokenTexts
) -> list[Score]:
    """The scores of pairs, of which the first has this number, from streams that have ended."""
    found = []
    for index, (pair, stream) in enumerate(zip(pairs, streams, strict=True), start=first):
        scores = [each for each in stream.prompt_logprobs or () if each is not None]
        tokens = [texts.text(token_id) for token_id in pair.token_ids[pair.start :]]
        found.append(_score(index, scores, tokens))
    return found


def _score(index: int, scores: Sequence[TokenLogprobs], tokens: list[str]) -> Score:
    logprobs = [max(each.logprob, LOWEST) for each in scores]
    is_greedy = all(each.rank == 1 for each in scores)
    return Score(
        index=index,
        score=sum(logprobs),
        is_greedy=is_greedy,
        tokens=tokens,
        token_logprobs=logprobs,
    )
