"""From a request's fields to the engine's parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.errors import InvalidRequest
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.http.errors import refused
from octavo.server.http.requests import ChatBody, CompletionBody, GenerationBody

Params = SamplingParams | BeamSearchParams

DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI's; a chat may fill the context
# Fields of drawing, under the names that SamplingParams has, too.
DRAWING = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
# The same for BeamSearchParams.
SEARCHING = (
    "length_penalty",
    "early_stopping",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
)
# What fields of drawing may hold beside a beam width: clients send such values without being asked.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_tokens": (0,),
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "seed": (),
    "stop": ([],),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
}


def completion_params(body: CompletionBody, defaults: Mapping[str, Any]) -> Params:
    """Raises InvalidRequest or ApiError, which name the field.

    `max_tokens` 0 becomes 1: the engine draws a token to score the prompt, and it is not shown.
    """
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0:
        if not body.echo:
            raise refused("max_tokens", "0 gives nothing, unless echo is on")
        max_tokens = 1
    if body.beam_width is not None:
        return _beam_params(body, max_tokens)
    params = _sampling_params(body, defaults, max_tokens, body.logprobs, body.prompt_logprobs)
    if not body.echo or params.logprobs is None:
        return params
    return replace(params, prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))


def chat_params(body: ChatBody, defaults: Mapping[str, Any]) -> Params:
    """Raises InvalidRequest or ApiError, which name the field."""
    if body.top_logprobs is not None and not body.logprobs and body.top_logprobs != 0:
        raise refused("top_logprobs", "it needs logprobs: true")
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    elif max_tokens < 1:
        raise refused("max_completion_tokens", f"{max_tokens} is less than 1")
    elif body.max_tokens not in (None, max_tokens):
        raise refused("max_tokens", "it contradicts max_completion_tokens")
    if body.beam_width is not None:
        return _beam_params(body, max_tokens)
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _sampling_params(body, defaults, max_tokens, num_logprobs, body.prompt_logprobs)


def check_streaming(body: GenerationBody) -> None:
    """Refuse what contradicts `stream`."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise refused("stream_options", "they need stream: true")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise refused("stream_options.continuous_usage_stats", "it needs include_usage")
    if body.stream and body.prompt_logprobs is not None:
        raise refused("prompt_logprobs", "they cannot be streamed")


def _sampling_params(
    body: GenerationBody,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
) -> SamplingParams:
    for name in ("length_penalty", "early_stopping"):
        if getattr(body, name) is not None:
            raise refused(name, "it needs beam_width")
    given = {name: getattr(body, name) for name in DRAWING}
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(
        **{**defaults, **given},
        max_tokens=max_tokens,
        logit_bias=_logit_bias(body.logit_bias),
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
    )


def _beam_params(body: GenerationBody, max_tokens: int | None) -> BeamSearchParams:
    assert body.beam_width is not None
    if body.beam_width < 1:
        raise refused("beam_width", f"{body.beam_width} is less than 1")
    for name, harmless in NEUTRAL.items():
        value = getattr(body, name, None)
        if value is not None and not any(_same(value, each) for each in harmless):
            raise refused(name, "beam search does not draw, so it has no use")
    count = 1 if body.n is None else body.n
    if count < 1:
        raise InvalidRequest("n", f"{count} is less than 1")
    if count > body.beam_width:
        raise InvalidRequest("n", f"{count} is more than beam_width ({body.beam_width})")
    given = {name: getattr(body, name) for name in SEARCHING if getattr(body, name) is not None}
    return BeamSearchParams(
        body.beam_width, max_tokens=max_tokens, num_return_sequences=count, **given
    )


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal as JSON: 1 and 1.0 are, 0 and false are not."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _logit_bias(value: dict[str, float] | None) -> dict[int, float] | None:
    """Token ids as numbers: JSON has only strings for keys."""
    if value is None:
        return None
    bad = [key for key in value if re.fullmatch(r"[0-9]{1,10}", key) is None]
    if bad:
        raise InvalidRequest("logit_bias", f"{bad[0][:32]!r} is not a token id")
    return {int(key): bias for key, bias in value.items()}
