"""What all endpoints that generate text take, and the engine's parameters that it becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from octavo.errors import InvalidRequest
from octavo.sampling_params import (
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_SEQUENCES,
    MAX_STOP_STRINGS,
    MAX_TEMPERATURE,
    BeamSearchParams,
    SamplingParams,
    beam_defaults,
)
from octavo.server.http.bodies import (
    FAIL_FAST,
    NOT_SUPPORTED,
    WHOLE_FLOATS,
    Body,
    Integer,
    Refused,
    same_json,
    without_nulls,
)
from octavo.server.http.errors import refused
from octavo.server.http.gate import REQUEST_ID
from octavo.server.http.keys import MAX_SALT
from octavo.server.http.structured import ResponseFormat, StructuredOutputs, structured_output
from octavo.structured.output import StructuredOutput

Params = SamplingParams | BeamSearchParams

INT64_MAX = (1 << 63) - 1

NonNegative = Annotated[int, Integer(0)]
Int64 = Annotated[int, Integer(-INT64_MAX - 1, INT64_MAX)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], FAIL_FAST]
ShortText = Annotated[str, Field(max_length=MAX_SALT)]
MAX_USER = 512  # characters; coding assistants put several ids into one
UserName = Annotated[str, Field(max_length=MAX_USER)]
# The engine checks that they are in the vocabulary: a constraint on the items would double the time
# that a list takes, and a body may have a million of them.
TokenId = Annotated[int, Field(json_schema_extra={"minimum": 0})]
TokenIds = Annotated[list[TokenId], FAIL_FAST]
NonEmptyIds = Annotated[list[TokenId], Field(min_length=1), FAIL_FAST]
# Validated by SamplingParams: pydantic would list an error for every bad entry.
Biases = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {
                "type": ["number", "null"],
                "minimum": -MAX_LOGIT_BIAS,
                "maximum": MAX_LOGIT_BIAS,
            },
        }
    ),
]

_STRUCTURED = "use structured_outputs or response_format"
_STATELESS = "octavo keeps no requests"


class StreamOptions(Body):
    """What a stream says of its usage."""

    include_usage: bool | None = None
    """Send a last chunk with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far with every chunk; needs include_usage."""
    include_obfuscation: Annotated[object, Refused(NOT_SUPPORTED, (False,))] = None


class PromptBody(Body):
    """The fields that every endpoint has which takes prompts."""

    model: str | None = None
    """A name in /v1/models; not given: the model served."""
    truncate_prompt_tokens: Annotated[int, Integer(-1)] | None = None
    """Use so many tokens of a longer prompt; -1: what leaves room for the output."""
    truncation_side: Literal["left", "right"] | None = None
    """Where a prompt that is too long loses tokens; not given: "left", its beginning."""
    priority: Int64 | None = None
    """Smaller runs first; for the priority policy."""
    cache_salt: ShortText | None = None
    """Share cached prefixes only with requests of the same salt."""
    user: UserName | None = None
    """Your name for the end user; goes to the request log, if it is on."""
    safety_identifier: UserName | None = None
    """The newer name of user."""
    prompt_cache_key: str | None = None
    """A hint that is not needed: equal prefixes are shared by themselves."""
    prompt_cache_options: dict[str, Any] | None = None
    """Hints that are not needed: prefixes of any length are cached by themselves."""
    prompt_cache_retention: str | None = None
    """A hint that is not needed: what is cached stays while there is room."""
    request_id: Annotated[str, Field(pattern=f"^{REQUEST_ID.pattern}$")] | None = None
    """Names the request, as the header X-Request-Id does, over which it takes precedence."""

    @property
    def end_user(self) -> str | None:
        """The user, by whichever name the client calls them."""
        return self.safety_identifier if self.user is None else self.user


class GenerationBody(PromptBody):
    """The fields that every endpoint that generates text has."""

    max_tokens: NonNegative | None = None
    """The longest output, in tokens."""
    min_tokens: NonNegative | None = None
    """No end before this many tokens."""
    n: Annotated[int, Integer(1, MAX_SEQUENCES)] | None = None
    """How many outputs of each prompt."""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Draw from the likeliest tokens that have this probability together."""
    top_k: Annotated[int, Integer(-1)] | None = None
    """Draw from the k likeliest; 0 or -1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Draw from tokens this likely, relative to the likeliest one."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Against tokens that the output has already."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """The same, once for each time that the output has them."""
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Divides the scores of tokens seen in prompt and output."""
    logit_bias: Biases | None = None
    """Token id -> what is added to its score, from -100 to 100."""
    allowed_token_ids: Annotated[NonEmptyIds | None, WHOLE_FLOATS] = None
    """Draw from these tokens alone."""
    bad_words: Texts | None = None
    """Words that must not come up."""
    seed: Int64 | None = None
    """Makes draws repeatable."""
    stop: Text | Annotated[Texts, Field(max_length=MAX_STOP_STRINGS)] | None = None
    """End at one of these strings."""
    stop_token_ids: Annotated[TokenIds | None, WHOLE_FLOATS] = None
    """End at one of these tokens."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string or token in the text."""
    ignore_eos: bool | None = None
    """Go on after the end-of-sequence token."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; not given: true."""
    prompt_logprobs: NonNegative | None = None
    """Score the prompt's tokens, with the k likeliest at each."""
    beam_width: Annotated[int, Integer(1, MAX_SEQUENCES)] | None = None
    """Beam search with this many beams."""
    length_penalty: (
        Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None
    ) = None
    """Beam search: above 0 favours long outputs. Not given: 1."""
    early_stopping: bool | Literal["never"] | None = None
    """Beam search: when to stop looking for better ones."""
    stream: bool | None = None
    """Send the output as server-sent events."""
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Also give the token ids of prompt and output."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens in log-probabilities as token_id:ID."""
    response_format: ResponseFormat | None = None
    """The form of the output: a JSON object, or JSON that keeps to a schema, strict or not."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the output: one of json (a schema), json_object, regex, choice and grammar."""

    best_of: Annotated[object, Refused("use n, or beam_width for beam search", (1,))] = None
    use_beam_search: Annotated[object, Refused("use beam_width, the number of beams", (False,))] = (
        None
    )
    # SGLang's, which its router sends with every request.
    no_stop_trim: Annotated[object, Refused("use include_stop_str_in_output", (False,))] = None
    return_hidden_states: Annotated[object, Refused(NOT_SUPPORTED, (False,))] = None
    regex: Annotated[object, Refused(_STRUCTURED)] = None
    ebnf: Annotated[object, Refused(_STRUCTURED)] = None
    json_schema: Annotated[object, Refused(_STRUCTURED)] = None
    lora_path: Annotated[object, Refused("octavo has no adapters")] = None
    session_params: Annotated[object, Refused(_STATELESS)] = None
    service_tier: Annotated[object, Refused(NOT_SUPPORTED, ("auto", "default"))] = None
    store: Annotated[object, Refused(_STATELESS, (False,))] = None
    metadata: Annotated[object, Refused(_STATELESS, ({},))] = None
    guided_json: Annotated[object, Refused(_STRUCTURED)] = None
    guided_regex: Annotated[object, Refused(_STRUCTURED)] = None
    guided_choice: Annotated[object, Refused(_STRUCTURED)] = None
    guided_grammar: Annotated[object, Refused(_STRUCTURED)] = None
    spaces_between_special_tokens: Annotated[object, Refused(NOT_SUPPORTED, (True,))] = None
    logits_processors: Annotated[object, Refused(NOT_SUPPORTED)] = None


# The values that sampling fields may have beside a beam width: clients send them by default.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
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


def generation_params(
    body: GenerationBody,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    num_logprobs: int | None,
) -> Params:
    """The engine's parameters, of sampling or of beam search.

    Args:
        defaults: the model's own, for fields that are not given.
        max_tokens, num_logprobs: endpoints have different names and defaults for them.

    Raises:
        InvalidRequest, ApiError: a value that cannot be, or that contradicts another; named.
    """
    _check_streaming(body)
    structured = structured_output(body.response_format, body.structured_outputs)
    if body.beam_width is not None:
        return _beam_search_params(body, defaults, max_tokens, structured)
    for name in ("length_penalty", "early_stopping"):
        if getattr(body, name) is not None:
            raise refused(name, "it needs beam_width")
    values = {**defaults, **_given(body, SamplingParams)}
    values["logit_bias"] = _logit_bias(body.logit_bias)
    limits = {"max_tokens": max_tokens, "logprobs": num_logprobs}
    return SamplingParams(**{**values, **limits, "structured": structured})


def _check_streaming(body: GenerationBody) -> None:
    """Refuse what contradicts `stream`."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise refused("stream_options", "they need stream: true")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise refused("stream_options.continuous_usage_stats", "it needs include_usage")
    if body.stream and body.prompt_logprobs is not None:
        raise refused("prompt_logprobs", "they cannot be streamed")


def _beam_search_params(
    body: GenerationBody,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    structured: StructuredOutput | None,
) -> BeamSearchParams:
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, None)
        if value is not None and not any(same_json(value, each) for each in neutral):
            raise refused(name, "beam search does not sample, so it has no use")
    count = 1 if body.n is None else body.n
    values = beam_defaults(defaults) | _given(body, BeamSearchParams)
    if count > values["beam_width"]:
        raise InvalidRequest("n", f"{count} is more than beam_width ({values['beam_width']})")
    values |= {"max_tokens": max_tokens, "structured": structured}
    return BeamSearchParams(**values, num_return_sequences=count)


def _given(body: GenerationBody, kind: type[Params]) -> dict[str, Any]:
    """The parameters of a `kind` that a body brings under their own names."""
    names = {field.name for field in fields(kind)} & GenerationBody.model_fields.keys()
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def _logit_bias(value: Mapping[str, Any] | None) -> dict[int, Any] | None:
    """Token ids as numbers: JSON has only strings for keys. A null counts as not given."""
    if value is None:
        return None
    given = without_nulls(value)
    bad = next((key for key in given if re.fullmatch(r"[0-9]{1,10}", key) is None), None)
    if bad is not None:
        raise InvalidRequest("logit_bias", f"{bad[:32]!r} is not a token id")
    return {int(key): bias for key, bias in given.items()}
