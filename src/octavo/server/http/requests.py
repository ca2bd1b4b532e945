"""The bodies of requests: every field that octavo honours, and those it refuses by name.

Types are checked when a body is decoded. Ranges are checked where the values are at home
(`octavo.sampling_params`); the limits given here are for the schema that clients read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from octavo.sampling_params import (
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_SEQUENCES,
    MAX_STOP_STRINGS,
    MAX_TEMPERATURE,
)
from octavo.server.http.bodies import Body, Refusal
from octavo.server.http.keys import MAX_SALT

INT64_MAX = (1 << 63) - 1
# Where more about a field stands until the description is put together:
EXACTLY = "x-exactly"  # its own schema
REQUIRED = "x-required"  # the same, of a field that must be there although decoding lets it lack
MAX_ROLE = 64  # characters
PREFIX_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # "." and ".." mean others in a URL


def _doc(text: str, **schema: Any) -> Meta:
    """A field's description and its limits, as the schema shows them."""
    return Meta(description=text, extra_json_schema=schema)


def _exactly(text: str, *kinds: dict[str, Any]) -> Meta:
    """A field whose schema says more than its Python type: it is one of `kinds`."""
    return _doc(text, **{EXACTLY: list(kinds)})


def _required(text: str, **schema: Any) -> Meta:
    """A text that must be there; `octavo.server.http.conversations` says so if it is not."""
    return _doc(text, **{REQUIRED: {"type": "string", **schema}})


def _between(low: float, high: float, text: str) -> Meta:
    return _doc(text, minimum=low, maximum=high)


def _at_least(low: float, text: str) -> Meta:
    return _doc(text, minimum=low)


NULL = {"type": "null"}
TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
TOKEN_ID = {"type": "integer", "minimum": 0}
TOKEN_IDS = {"type": "array", "items": TOKEN_ID, "minItems": 1}
STOPS = {"type": "array", "items": TEXT, "maxItems": MAX_STOP_STRINGS}
BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {
        "type": "number",
        "minimum": -MAX_LOGIT_BIAS,
        "maximum": MAX_LOGIT_BIAS,
    },
}

Int64 = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
ShortText = Annotated[str, Meta(max_length=MAX_SALT)]
Prompt = str | list[str | int | list[int]]
Unread = Raw | UnsetType  # JSON that is not decoded, because only its absence is supported


class StreamOptions(Body, kw_only=True):
    include_usage: Annotated[
        bool | None, _doc("Send a last chunk with the usage and no choices.")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, _doc("Send the usage so far with every chunk; needs include_usage.")
    ] = None


class GenerationBody(Body, kw_only=True):
    """What completions and chat have in common. A null counts as not given."""

    model: Annotated[str | None, _doc("A name in /v1/models; not given: the model served.")] = None
    max_tokens: Annotated[int | None, _at_least(0, "The longest output, in tokens.")] = None
    min_tokens: Annotated[int | None, _at_least(0, "No end before this many tokens.")] = None
    n: Annotated[int | None, _between(1, MAX_SEQUENCES, "How many outputs of each prompt.")] = None
    temperature: Annotated[float | None, _between(0, MAX_TEMPERATURE, "0 is greedy.")] = None
    top_p: Annotated[
        float | None,
        _doc(
            "Draw from the likeliest tokens that have this probability together.",
            exclusiveMinimum=0,
            maximum=1,
        ),
    ] = None
    top_k: Annotated[int | None, _at_least(-1, "Draw from the k likeliest; 0 or -1: all.")] = None
    min_p: Annotated[
        float | None, _between(0, 1, "Draw from tokens this likely, relative to the likeliest.")
    ] = None
    presence_penalty: Annotated[
        float | None, _between(-2, 2, "Against tokens that the output has already.")
    ] = None
    frequency_penalty: Annotated[float | None, _between(-2, 2, "The same, once for each time.")] = (
        None
    )
    repetition_penalty: Annotated[
        float | None,
        _doc("Divides the scores of tokens seen in prompt and output.", exclusiveMinimum=0),
    ] = None
    logit_bias: Annotated[
        dict[str, float] | None,
        _exactly(
            f"Token id -> what is added to its score, at most {MAX_LOGIT_BIAS:.0f} either way.",
            BIASES,
            NULL,
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None, _exactly("Draw from these tokens alone.", TOKEN_IDS, NULL)
    ] = None
    bad_words: Annotated[
        list[str] | None, _exactly("Words that must not come up.", TEXTS, NULL)
    ] = None
    seed: Annotated[int | None, _between(-INT64_MAX - 1, INT64_MAX, "Makes draws repeatable.")] = (
        None
    )
    stop: Annotated[
        str | list[str] | None,
        _exactly("End at one of these strings.", TEXT, STOPS, NULL),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, _exactly("End at one of these tokens.", TOKEN_IDS, NULL)
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, _doc("Keep the stop string or token in the text.")
    ] = None
    ignore_eos: Annotated[bool | None, _doc("Go on after the end-of-sequence token.")] = None
    skip_special_tokens: Annotated[
        bool | None, _doc("Leave special tokens out of the text; not given: true.")
    ] = None
    prompt_logprobs: Annotated[
        int | None, _at_least(0, "Score the prompt's tokens, with the k likeliest at each.")
    ] = None
    beam_width: Annotated[
        int | None, _between(1, MAX_SEQUENCES, "Beam search with this many beams.")
    ] = None
    length_penalty: Annotated[
        float | None,
        _between(
            -MAX_LENGTH_PENALTY,
            MAX_LENGTH_PENALTY,
            "Beam search: above 0 favours long outputs. Not given: 1.",
        ),
    ] = None
    early_stopping: Annotated[
        bool | Literal["never"] | None, _doc("Beam search: when to stop looking for better ones.")
    ] = None
    stream: Annotated[bool | None, _doc("Send the output as server-sent events.")] = None
    stream_options: StreamOptions | None = None
    priority: Annotated[Int64 | None, _doc("Smaller runs first; for the priority policy.")] = None
    cache_salt: Annotated[
        ShortText | None, _doc("Share cached prefixes only with requests of the same salt.")
    ] = None
    return_token_ids: Annotated[
        bool | None, _doc("Also give the token ids of prompt and output.")
    ] = None
    user: Annotated[
        ShortText | None,
        _doc("Your name for the end user; goes to the request log, if it is on."),
    ] = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return SHARED_REFUSALS


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions"""

    prompt: Annotated[
        Prompt,
        _exactly(
            "Text, token ids, or a list of either.",
            TEXT,
            TOKEN_IDS,
            TEXTS,
            {"type": "array", "items": TOKEN_IDS, "minItems": 1},
        ),
    ]
    echo: Annotated[bool | None, _doc("Put the prompt in front of the output.")] = None
    logprobs: Annotated[
        int | None, _at_least(0, "Score the output's tokens, with the k likeliest at each.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, _doc("Begin text prompts with what the model expects, such as BOS.")
    ] = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return COMPLETION_REFUSALS


class ContentPart(Struct, kw_only=True):
    """A part of a message's content: text. Other fields are ignored."""

    type: Annotated[str | None, _required("octavo reads text alone.", const="text")] = None
    text: Annotated[str | None, _required("The text.")] = None


class ChatMessage(Struct, kw_only=True):
    """One message of a conversation. Fields that octavo does not know are ignored: clients send
    back the messages that other servers have given them, with whatever those contain."""

    role: Annotated[
        str | None,
        _required(
            "Which roles there are is for the model's chat template to say.",
            minLength=1,
            maxLength=MAX_ROLE,
        ),
    ] = None
    content: Annotated[
        str | list[ContentPart] | None,
        _doc("Text, or parts of type text; only an assistant's message may have none."),
    ] = None
    name: Annotated[str | None, _doc("For templates that show it.")] = None
    tool_calls: Unread = UNSET
    tool_call_id: Unread = UNSET
    function_call: Unread = UNSET
    audio: Unread = UNSET
    refusal: Unread = UNSET
    annotations: Unread = UNSET


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[
        int | None, _at_least(1, "The newer name of max_tokens; not given: what the context holds.")
    ] = None
    logprobs: Annotated[bool | None, _doc("Score the output's tokens.")] = None
    top_logprobs: Annotated[
        int | None, _at_least(0, "With logprobs: also the k likeliest tokens at each place.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, _doc("End the prompt where the assistant begins; not given: true.")
    ] = None
    continue_final_message: Annotated[
        bool | None, _doc("Continue the last message instead of answering it.")
    ] = None
    chat_template: Annotated[
        str | None, _doc("A Jinja template for this request; only where the server allows it.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, _doc("Variables for the template, such as enable_thinking.")
    ] = None

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        return CHAT_REFUSALS


class TokenizeBody(Body, kw_only=True):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: Annotated[
        bool | None, _doc("Not given: true for a prompt, false for a conversation.")
    ] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Annotated[bool | None, _doc("Also give each token as text.")] = None


class DetokenizeBody(Body, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[int], _exactly("Token ids.", {"type": "array", "items": TOKEN_ID})]
    skip_special_tokens: Annotated[bool | None, _doc("Not given: false.")] = None


class PrefixBody(Body, kw_only=True):
    """POST /v1/prefixes: a prefix to compute once and keep in the cache."""

    model: str | None = None
    prefix: Annotated[
        str | list[int],
        _exactly("Text or token ids; whole blocks of it are kept.", TEXT, TOKEN_IDS),
    ]
    name: Annotated[
        str | None,
        _doc("Not given: the server makes one.", pattern=f"^{PREFIX_NAME.pattern}$"),
    ] = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[ShortText | None, _doc("As in the requests that are to find it.")] = None


_UNSUPPORTED = "octavo does not support it"
_TOOLS = "octavo does not support tool calls"
SHARED_REFUSALS = {
    "response_format": Refusal(
        "octavo does not constrain the output's format", ({"type": "text"},)
    ),
    "best_of": Refusal("use n, or beam_width for beam search", (1,)),
    "use_beam_search": Refusal("use beam_width, the number of beams", (False,)),
    "service_tier": Refusal(_UNSUPPORTED, ("auto", "default")),
    "store": Refusal("octavo keeps no requests", (False,)),
    "metadata": Refusal("octavo keeps no requests", ({},)),
    "safety_identifier": Refusal("use user"),
    "prompt_cache_key": Refusal("use cache_salt; equal prefixes are shared by themselves"),
    "guided_json": Refusal("octavo does not constrain the output's format"),
    "guided_regex": Refusal("octavo does not constrain the output's format"),
    "guided_choice": Refusal("octavo does not constrain the output's format"),
    "guided_grammar": Refusal("octavo does not constrain the output's format"),
    "structured_outputs": Refusal("octavo does not constrain the output's format"),
    "truncate_prompt_tokens": Refusal("send a prompt that fits"),
    "spaces_between_special_tokens": Refusal(_UNSUPPORTED, (True,)),
    "logits_processors": Refusal(_UNSUPPORTED),
}
COMPLETION_REFUSALS = SHARED_REFUSALS | {
    "suffix": Refusal("octavo does not fill in the middle", ("",)),
    "prompt_embeds": Refusal("give text or token ids"),
    "messages": Refusal("conversations go to /v1/chat/completions"),
    "max_completion_tokens": Refusal("in completions it is called max_tokens"),
    "top_logprobs": Refusal("in completions it is logprobs that says how many"),
}
CHAT_REFUSALS = SHARED_REFUSALS | {
    "tools": Refusal(_TOOLS, ([],)),
    "tool_choice": Refusal(_TOOLS, ("none", "auto")),
    "parallel_tool_calls": Refusal(_TOOLS, (True, False)),
    "functions": Refusal(_TOOLS, ([],)),
    "function_call": Refusal(_TOOLS, ("none", "auto")),
    "modalities": Refusal("octavo answers in text", (["text"],)),
    "audio": Refusal("octavo answers in text"),
    "prediction": Refusal(_UNSUPPORTED),
    "reasoning_effort": Refusal("use chat_template_kwargs, if the model's template knows it"),
    "verbosity": Refusal(_UNSUPPORTED, ("medium",)),
    "web_search_options": Refusal(_UNSUPPORTED),
    "documents": Refusal("use chat_template_kwargs, if the model's template knows them"),
    "echo": Refusal("octavo does not echo conversations", (False,)),
    "prompt": Refusal("prompts go to /v1/completions"),
}
MESSAGE_REFUSALS = {
    "tool_calls": Refusal(_TOOLS, ([],)),
    "tool_call_id": Refusal(_TOOLS),
    "function_call": Refusal(_TOOLS),
    "audio": Refusal("octavo reads text"),
    "refusal": Refusal("octavo's models do not have it"),
    "annotations": Refusal("octavo's models do not have it", ([],)),
}
