"""What a client gets back."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from octavo.core.step import TokenLogprobs


@dataclass(slots=True)
class SequenceOutput:
    """One continuation of a prompt: a sample or a beam."""

    index: int
    token_ids: list[int]  # of the output alone, with the token that ended it
    text: str  # "" if the engine has no tokenizer or was asked not to detokenize
    finish_reason: str  # "stop", "length", "abort", or "error" if the request has failed
    stop_reason: int | str | None = None  # the stop id or string; None for the model's own end
    logprobs: list[TokenLogprobs] | None = None  # one per token, if asked for
    cumulative_logprob: float | None = None  # known for beams, and if logprobs were asked for
    score: float | None = None  # of a beam: cumulative logprob / length ** length_penalty


@dataclass(slots=True)
class RequestOutput:
    """All that came of one request. Times are seconds on the engine's clock."""

    request_id: str
    prompt: str | None  # as it was given; None if token ids were given
    prompt_token_ids: list[int]
    outputs: list[SequenceOutput]
    # Entry i scores prompt token i; the first has no predecessor and is None.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_preemptions: int = 0
    arrival_time: float = 0.0
    first_token_time: float | None = None
    finish_time: float = 0.0
    error: str | None = None  # why it could not be computed to its end


class SequenceDelta(msgspec.Struct):
    """What a step added to one sequence."""

    request_id: str
    index: int
    text: str  # may be empty while a character or a stop string is incomplete
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
