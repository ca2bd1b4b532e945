"""The parts of replies that several endpoints share. UNSET fields are left out of the JSON.

Replies are msgspec structures: a chunk is written for each token, and msgspec encodes one in a
fraction of the time that pydantic takes. A reply may have millions of those that are about one
token; the garbage collector, for which all threads wait, leaves them out (`gc=False`), as it can
because they are in no cycles.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
FINISH = (
    "stop: an end or a stop string; length: max_tokens or the end of the context; tool_calls: the "
    "end of an output that calls tools; cancelled: of a fork, by DELETE."
)
REASONING_TOKENS = (
    "Of the reasoning's text, when it is tokenized again, but no more than those of the outputs"
)
STOPPED_BY = "The stop string or token id that ended the output; null for the model's own end."


class PromptTokensDetails(msgspec.Struct):
    """How many tokens of the prompts were cached."""

    cached_tokens: Annotated[int, Meta(description="Found in the prefix cache.")]


class CompletionTokensDetails(msgspec.Struct):
    """What tokens of the outputs were for."""

    reasoning_tokens: Annotated[int, Meta(description=REASONING_TOKENS + ".")]


class Usage(msgspec.Struct):
    """How many tokens a request has taken."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Annotated[
        CompletionTokensDetails | UnsetType,
        Meta(description="Of whole chats whose answers have reasoning, if it can be counted."),
    ] = UNSET


class Choice(msgspec.Struct, kw_only=True):
    """One output, or a piece of it, as all endpoints give it."""

    index: int
    finish_reason: Annotated[FinishReason | None, Meta(description=FINISH)] = None
    stop_reason: Annotated[int | str | UnsetType | None, Meta(description=STOPPED_BY)] = None
    token_ids: list[int] | UnsetType = UNSET
    cumulative_logprob: Annotated[
        float | UnsetType, Meta(description="Of a beam: the sum of its logprobs.")
    ] = UNSET
    score: Annotated[
        float | UnsetType, Meta(description="Of a beam: the sum / length ** length_penalty.")
    ] = UNSET


class Reply(msgspec.Struct, kw_only=True):
    """What all replies of outputs, and all chunks of their streams, begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: Annotated[
        str, Meta(description="Changes with whatever may change outputs: version, model, devices.")
    ]


class ScoredToken(msgspec.Struct, gc=False):
    """A token of the vocabulary at one place of a prompt."""

    logprob: float
    rank: Annotated[int, Meta(description="1 is the likeliest.")]
    decoded_token: str


# The first token has no predecessor and is null.
PromptLogprobs = list[dict[str, ScoredToken] | None]


class CompletionLogprobs(msgspec.Struct):
    """One entry per token. A token that is not text by itself is written as bytes:\\x.."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Annotated[
        list[int], Meta(description="Where in the choice's text each token begins.")
    ]


class TopLogprob(msgspec.Struct, gc=False):
    """A token that is among the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, gc=False):
    """A token of an answer, with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]
