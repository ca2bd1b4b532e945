"""The bodies of replies, and the pieces of streams. UNSET fields are left out of the JSON."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

FinishReason = Literal["stop", "length"]
FINISH = "stop: an end or a stop string; length: max_tokens or the end of the context."
STOPPED_BY = "The stop string or token id that ended the output; null for the model's own end."


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: Annotated[int, Meta(description="Found in the prefix cache.")]


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ScoredToken(msgspec.Struct):
    """A token of the vocabulary at one place of a prompt."""

    logprob: float
    rank: Annotated[int, Meta(description="1 is the likeliest.")]
    decoded_token: str


# The first token has no predecessor and is null.
PromptLogprobs = list[dict[str, ScoredToken] | None]


class CompletionLogprobs(msgspec.Struct):
    """One entry a token. A token that is no text by itself is written as bytes:\\x.."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Annotated[
        list[int], Meta(description="Where in the choice's text each token begins.")
    ]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Annotated[FinishReason | None, Meta(description=FINISH)] = None
    stop_reason: Annotated[int | str | None, Meta(description=STOPPED_BY)] = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    cumulative_logprob: Annotated[
        float | UnsetType, Meta(description="Of a beam: the sum of its logprobs.")
    ] = UNSET
    score: Annotated[
        float | UnsetType, Meta(description="Of a beam: the sum / length ** length_penalty.")
    ] = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Annotated[FinishReason | None, Meta(description=FINISH)]
    stop_reason: Annotated[int | str | None, Meta(description=STOPPED_BY)] = None
    token_ids: list[int] | UnsetType = UNSET
    cumulative_logprob: float | UnsetType = UNSET
    score: float | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class ChatDelta(msgspec.Struct):
    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    cumulative_logprob: float | UnsetType = UNSET
    score: float | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: Annotated[str, Meta(description="The name that the model is reported by.")]
    max_model_len: Annotated[int, Meta(description="Tokens, prompt and output together.")]


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(msgspec.Struct):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class TokenizerInfo(msgspec.Struct):
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    vocab_size: int
    model_max_length: int


class Text(msgspec.Struct):
    prompt: str


class PinnedPrefix(msgspec.Struct, kw_only=True):
    name: str
    object: Literal["prefix"] = "prefix"
    num_tokens: Annotated[int, Meta(description="Whole blocks of the prefix.")]
    num_blocks: int


class PrefixList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[PinnedPrefix]


class Deleted(msgspec.Struct, kw_only=True):
    name: str
    object: Literal["prefix"] = "prefix"
    deleted: bool = True


class Health(msgspec.Struct):
    status: Literal["ok"] = "ok"


class Version(msgspec.Struct):
    version: str
