"""Sampling and beam-search parameters: checked when they are created, never silently clamped.

Every bad value raises `InvalidRequest`, which names the field, the value and the limit. What
depends on the model (its vocabulary, the engine's `max_logprobs`) is checked by `check_against`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

import numpy as np

from octavo.core.step import Grammar, LogitBias, SamplingSpec, ThinkingSpec
from octavo.errors import InvalidRequest, shown
from octavo.structured.output import StructuredOutput

MAX_SEQUENCES = 16_384  # for n and beam_width
MAX_TEMPERATURE = 2.0
MIN_TEMPERATURE = 1e-5  # below, sampling is greedy
MAX_STOP_STRINGS = 16
MAX_STRING_LENGTH = 1_024  # characters of a stop string or a bad word
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1_024  # in all bad words together
MAX_BEAM_STOP_TOKENS = 128  # each of them is one candidate more for every beam
MAX_LOGIT_BIAS = 100.0
MAX_LENGTH_PENALTY = 32.0  # length ** penalty is a finite float up to 2 ** 31 tokens
INT64_MAX = (1 << 63) - 1
SMALLEST_NORM = 1e-12  # of an embedding; the zero vector stays what it is

# Which hidden states of a prompt become its embedding.
Pooling = Literal["mean", "last", "cls"]

T = TypeVar("T")


def _integer(field: str, value: object) -> int:
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequest(field, f"{shown(value)} is not an integer")
    return int(value)


def integer_in(field: str, value: object, low: int, high: int = INT64_MAX) -> int:
    """`value` as an int, if it is an integer from `low` to `high`."""
    # Larger ones fit neither into messages nor into tensors.
    number = _integer(field, value)
    if number < low:
        raise InvalidRequest(field, f"{shown(number)} is less than {low}")
    if number > high:
        raise InvalidRequest(field, f"{shown(number)} is more than {high}")
    return number


def _optional(check: Callable[[str, object], T]) -> Callable[[str, object], T | None]:
    return lambda field, value: None if value is None else check(field, value)


def _real(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequest(field, f"{shown(value)} is not a number")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(field, f"{shown(value)} is not finite")
    return number


def _real_in(field: str, value: object, low: float, high: float) -> float:
    number = _real(field, value)
    if not low <= number <= high:
        raise InvalidRequest(field, f"{number} is not between {low} and {high}")
    return number


def _boolean(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(field, f"{shown(value)} is not true or false")
    return value


def _items(field: str, value: object) -> tuple[Any, ...]:
    """The items of a list, tuple or set; None counts as empty."""
    if value is None:
        return ()
    if not isinstance(value, str | bytes | Mapping) and isinstance(value, Iterable):
        with suppress(TypeError):  # of an array that is a single number
            return tuple(value)
    raise InvalidRequest(field, f"{shown(value)} is not a list")


def _token_ids(field: str, value: object) -> tuple[int, ...]:
    """Each of them once."""
    items = _items(field, value)
    # JSON brings integers, of which a request may have a million, and copies of parameters are
    # checked again.
    if set(map(type, items)) <= {int}:
        items = tuple(dict.fromkeys(items))
        if min(items, default=0) >= 0 and max(items, default=0) <= INT64_MAX:
            return items
    return tuple(integer_in(field, token_id, 0) for token_id in items)


def _strings(field: str, value: object, limit: int) -> tuple[str, ...]:
    strings = _items(field, value)
    if len(strings) > limit:
        raise InvalidRequest(field, f"{len(strings)} strings are more than {limit}")
    for string in strings:
        if not valid_text(field, string):
            raise InvalidRequest(field, "an empty string matches everything")
        if len(string) > MAX_STRING_LENGTH:
            raise InvalidRequest(
                field,
                f"{string[:16]!r}... has {len(string)} characters, more than {MAX_STRING_LENGTH}",
            )
    return strings


def _stop_strings(field: str, value: object) -> tuple[str, ...]:
    return _strings(field, (value,) if isinstance(value, str) else value, MAX_STOP_STRINGS)


def _early_stopping(field: str, value: object) -> bool | str:
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise InvalidRequest(field, f"{shown(value)} is not true, false or 'never'")
    return value


def _pooling(field: str, value: object) -> str:
    if not isinstance(value, str) or value not in get_args(Pooling):
        raise InvalidRequest(field, f"{shown(value)} is none of {', '.join(get_args(Pooling))}")
    return value


def valid_text(field: str, value: object, limit: int | None = None) -> str:
    """`value`, if it is text that UTF-8 can write, of at most `limit` characters."""
    if not isinstance(value, str):
        raise InvalidRequest(field, f"{shown(value)} is not a string")
    if limit is not None and len(value) > limit:
        raise InvalidRequest(field, f"{len(value)} characters are more than {limit}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            field, f"{shown(value)} is not valid Unicode: {error.reason}"
        ) from None
    return value


def _logit_bias(field: str, value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequest(field, f"{shown(value)} is not a mapping of token ids to numbers")
    # As in _token_ids.
    if set(map(type, value)) <= {int} and set(map(type, value.values())) <= {int, float}:
        biases = {
            token_id: float(bias) for token_id, bias in value.items() if abs(bias) <= MAX_LOGIT_BIAS
        }
        fits = len(biases) == len(value)
        if fits and min(biases, default=0) >= 0 and max(biases, default=0) <= INT64_MAX:
            return biases
    return {
        integer_in(field, token_id, 0): _real_in(field, bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        for token_id, bias in value.items()
    }


def _structured(field: str, value: object) -> StructuredOutput:
    structured = StructuredOutput.of(field, value)
    structured.to_grammar()  # refuses what cannot be
    return structured


def _check_vocabulary(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise InvalidRequest(
                field, f"token id {token_id} is outside the vocabulary of {vocab_size}"
            )


# A check of each field: of its name and value, whose checked form it returns.
_CHECKS: dict[str, Callable[[str, object], object]] = {
    "n": partial(integer_in, low=1, high=MAX_SEQUENCES),
    "temperature": partial(_real_in, low=0.0, high=MAX_TEMPERATURE),
    "top_k": partial(integer_in, low=-1),
    "top_p": partial(_real_in, low=0.0, high=1.0),
    "min_p": partial(_real_in, low=0.0, high=1.0),
    "presence_penalty": partial(_real_in, low=-2.0, high=2.0),
    "frequency_penalty": partial(_real_in, low=-2.0, high=2.0),
    "repetition_penalty": _real,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _optional(_token_ids),
    "bad_words": partial(_strings, limit=MAX_BAD_WORDS),
    "min_tokens": partial(integer_in, low=0),
    "max_tokens": _optional(partial(integer_in, low=1)),
    "stop": _stop_strings,
    "stop_token_ids": _token_ids,
    "include_stop_str_in_output": _boolean,
    "ignore_eos": _boolean,
    "seed": _optional(partial(integer_in, low=-INT64_MAX - 1)),
    "logprobs": _optional(partial(integer_in, low=0)),
    "prompt_logprobs": _optional(partial(integer_in, low=0)),
    "prompt_logprobs_start": partial(integer_in, low=0),
    "skip_special_tokens": _boolean,
    "kept_special_tokens": _token_ids,
    "detokenize": _boolean,
    "beam_width": partial(integer_in, low=1, high=MAX_SEQUENCES),
    "length_penalty": partial(_real_in, low=-MAX_LENGTH_PENALTY, high=MAX_LENGTH_PENALTY),
    "early_stopping": _early_stopping,
    "structured": _optional(_structured),
    "num_return_sequences": _optional(partial(integer_in, low=1)),
    "pooling": _pooling,
    "dimensions": _optional(partial(integer_in, low=1)),
    "normalize": _boolean,
}


class _Parameters:
    """Checks all fields. Raises InvalidRequest for those that do not exist, too, and suggests the
    likely spelling."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __new__(cls, *args: object, **values: object) -> Self:
        for name in values:
            if name not in cls.__dataclass_fields__:
                close = get_close_matches(name, cls.__dataclass_fields__, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise InvalidRequest(name, f"{cls.__name__} has no such field{hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            object.__setattr__(self, name, _CHECKS[name](name, getattr(self, name)))
        self._check_together()

    def _check_together(self) -> None:
        """Check what one field alone does not show."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """How long a model may think: after `num_tokens` tokens, the end of its reasoning is forced.

    Raises:
        InvalidRequest: a value that cannot be.

    Example:
        >>> ThinkingLimit(500, is_open=True)
    """

    num_tokens: int
    """Tokens of reasoning, without its delimiters."""
    begin: str = "<think>"
    """What the model writes before it."""
    end: str = "</think>"
    """What the model writes after it."""
    is_open: bool = False
    """The prompt has the beginning already."""

    def __post_init__(self) -> None:
        integer_in("thinking.num_tokens", self.num_tokens, 0)
        for name in ("begin", "end"):
            if not valid_text(f"thinking.{name}", getattr(self, name)):
                raise InvalidRequest(f"thinking.{name}", "it is not a text")
        _boolean("thinking.is_open", self.is_open)


def _thinking(field: str, value: object) -> ThinkingLimit:
    if isinstance(value, ThinkingLimit):
        return value
    names = [each.name for each in fields(ThinkingLimit)]
    if not isinstance(value, Mapping) or not {"num_tokens"} <= set(value) <= set(names):
        raise InvalidRequest(field, f"{shown(value)} is not a ThinkingLimit: {', '.join(names)}")
    return ThinkingLimit(**value)


_CHECKS["thinking"] = _optional(_thinking)


@dataclass(frozen=True, slots=True)
class SamplingParams(_Parameters):
    """How `n` continuations of a prompt are drawn. The defaults are OpenAI's.

    Raises:
        InvalidRequest: a field does not exist, or has a value that cannot be; `field` names it.

    Example:
        >>> SamplingParams(temperature=0.8, top_p=0.95, max_tokens=100, stop=["\\n\\n"])
    """

    n: int = 1
    """Samples; they share the KV blocks of the prompt. At most 16,384, and at most the engine's
    `max_num_seqs`."""
    temperature: float = 1.0
    """0 to 2: the logits are divided by it. 0 is greedy, and so is anything below 0.00001."""
    top_k: int = 0
    """Draw from the `top_k` most likely tokens; 0 or -1: from all."""
    top_p: float = 1.0
    """Draw from the most likely tokens whose probabilities add up to this much; above 0, up to 1
    (all tokens)."""
    min_p: float = 0.0
    """0 to 1: leave out tokens less likely than this fraction of the most likely one."""
    presence_penalty: float = 0.0
    """-2 to 2: subtracted from the logits of tokens that the output already contains."""
    frequency_penalty: float = 0.0
    """-2 to 2: likewise, once for each time that the token occurs in the output."""
    repetition_penalty: float = 1.0
    """Above 0: logits of tokens seen in the prompt or the output are divided by it if they are
    positive, and multiplied if they are negative. 1 changes nothing."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> -100 to 100, added to its logit."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be drawn. None: all."""
    bad_words: Sequence[str] = ()
    """Texts whose tokens never appear in the output in that order; at most 128."""
    structured: StructuredOutput | Mapping[str, Any] | None = None
    """The form of the output, such as {"json_schema": {...}} (see StructuredOutput). It ends when
    it is complete; `min_tokens` and `bad_words` give way where it leaves nothing else."""
    min_tokens: int = 0
    """The output has at least this many tokens: until then, no end token is drawn."""
    max_tokens: int | None = 16
    """Longest output in tokens. None: up to the end of the model's context."""
    stop: str | Sequence[str] | None = None
    """Up to 16 texts that end the output, and are not part of it (see
    `include_stop_str_in_output`)."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the output, beside the model's own end tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the token that ended the output, at the end of the
    text."""
    ignore_eos: bool = False
    """Go on after the model's end tokens, up to `max_tokens`."""
    seed: int | None = None
    """Equal seeds give equal draws, whatever else runs. None: the engine chooses."""
    logprobs: int | None = None
    """Report log-probabilities of each drawn token, and of the `logprobs` most likely tokens at its
    position (0: of the drawn token only); at most the engine's `max_logprobs`. None: none."""
    prompt_logprobs: int | None = None
    """Likewise for each token of the prompt except the first."""
    prompt_logprobs_start: int = 0
    """The first token of the prompt that `prompt_logprobs` is about. What is before it may come
    from the prefix cache, so the end of a prompt is scored at less cost."""
    skip_special_tokens: bool = True
    """Leave special tokens (such as end of sequence) out of the text."""
    kept_special_tokens: Sequence[int] = ()
    """Special tokens that are in the text even so."""
    thinking: ThinkingLimit | Mapping[str, Any] | None = None
    """How long the model may think, such as {"num_tokens": 500} (see ThinkingLimit)."""
    detokenize: bool = True
    """Make text of the tokens; without, `text` stays empty."""

    def _check_together(self) -> None:
        if self.top_p == 0:
            raise InvalidRequest("top_p", "0.0 leaves no token; it must be more than 0")
        _check_penalty_and_lengths(self)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", "an empty list allows no token")
        if self.n > 1 and self.temperature < MIN_TEMPERATURE:
            raise InvalidRequest(
                "n", f"{self.n} greedy samples (temperature 0) would all be equal; n must be 1"
            )
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise InvalidRequest("prompt_logprobs_start", "it needs prompt_logprobs")
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop", "stop strings are found in text; they need detokenize")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The checked value of `stop`, always a tuple."""
        assert isinstance(self.stop, tuple), "__post_init__ makes it one"
        return self.stop

    def check_against(self, vocab_size: int, max_logprobs: int) -> None:
        """Check what depends on the model and the engine.

        Raises:
            InvalidRequest: a token id is outside the vocabulary, or too many log-probabilities.
        """
        _check_vocabulary("logit_bias", self.logit_bias or (), vocab_size)
        _check_vocabulary("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        _check_vocabulary("stop_token_ids", self.stop_token_ids, vocab_size)
        _check_vocabulary("kept_special_tokens", self.kept_special_tokens, vocab_size)
        for field in ("logprobs", "prompt_logprobs"):
            number = getattr(self, field)
            if number is not None and number > max_logprobs:
                raise InvalidRequest(field, f"{number} is more than max_logprobs ({max_logprobs})")
            if number is not None and number > vocab_size:
                raise InvalidRequest(field, f"{number} is more than the vocabulary ({vocab_size})")

    def to_spec(
        self,
        eos_ids: Sequence[int],
        bad_word_ids: Sequence[Sequence[int]] = (),
        thinking: ThinkingSpec | None = None,
    ) -> SamplingSpec:
        """The parameters that the worker needs.

        Args:
            eos_ids: tokens that end a sequence.
            bad_word_ids: `bad_words` as token ids; a word may have several spellings.
            thinking: `thinking` in token ids.

        Raises:
            InvalidRequest: the bad words have too many tokens, or no token is left to draw.
        """
        num_bad = sum(len(word) for word in bad_word_ids)
        if num_bad > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                "bad_words", f"{num_bad} tokens in all are more than {MAX_BAD_WORD_TOKENS}"
            )
        ends = _end_token_ids(self, eos_ids)
        grammar = _grammar(self, ends)
        allowed = tuple(self.allowed_token_ids or ())
        if self.min_tokens and allowed and set(ends).issuperset(allowed):
            raise InvalidRequest(
                "allowed_token_ids",
                f"only end tokens are allowed, which min_tokens ({self.min_tokens}) forbids",
            )
        return SamplingSpec(
            temperature=0.0 if self.temperature < MIN_TEMPERATURE else self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=LogitBias.of(self.logit_bias) if self.logit_bias else None,
            allowed_token_ids=allowed,
            bad_words=tuple(tuple(word) for word in bad_word_ids if word),
            min_tokens=self.min_tokens,
            grammar=grammar,
            num_begun=_num_begun(self),
            thinking=thinking,
            end_token_ids=ends if self.min_tokens or grammar else (),
            num_logprobs=self.logprobs,
            num_prompt_logprobs=self.prompt_logprobs,
            first_read=max(0, self.prompt_logprobs_start - 1),
        )


@dataclass(frozen=True, slots=True)
class BeamSearchParams(_Parameters):
    """Beam search as in transformers' `generate`: `beam_width` hypotheses kept at each token.

    Raises:
        InvalidRequest: a field does not exist, or has a value that cannot be; `field` names it.

    Example:
        >>> BeamSearchParams(beam_width=4, max_tokens=48, num_return_sequences=2)
    """

    beam_width: int
    """Hypotheses that are kept; at most 16,384, and at most the engine's `max_num_seqs`. 1 is a
    search, too, where transformers decodes greedily, as `SamplingParams(temperature=0)` does: its
    penalties and "never" act as in searches with more beams."""
    max_tokens: int | None = 16
    """Longest output in tokens. None: up to the end of the model's context."""
    length_penalty: float = 1.0
    """-32 to 32: a hypothesis' score is its log-probability / length ** length_penalty, so above 0
    favours long ones."""
    early_stopping: bool | Literal["never"] = False
    """When to stop: True: when `beam_width` hypotheses have ended. False: when the best running
    one, scored at its present length, cannot beat them. "never": when none can at any length."""
    num_return_sequences: int | None = None
    """Hypotheses that are returned, best first. None: `beam_width`."""
    ignore_eos: bool = False
    """Go on after the model's end tokens, up to `max_tokens`."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end a hypothesis, beside the model's own end tokens; at most 128."""
    structured: StructuredOutput | None = None
    """The form of all hypotheses, such as StructuredOutput(json_schema={...}), or a mapping with
    its fields."""
    skip_special_tokens: bool = True
    """Leave special tokens (such as end of sequence) out of the text."""
    kept_special_tokens: Sequence[int] = ()
    """Special tokens that are in the text even so."""
    detokenize: bool = True
    """Make text of the tokens; without, `text` stays empty."""
    min_tokens: int = 0
    """A hypothesis has at least this many tokens: until then, no end token continues it."""
    repetition_penalty: float = 1.0
    """Above 0: as in transformers, log-probabilities of tokens seen in the prompt or the hypothesis
    are multiplied by it. 1 changes nothing."""

    def _check_together(self) -> None:
        _check_penalty_and_lengths(self)
        if self.num_return_sequences is None:
            object.__setattr__(self, "num_return_sequences", self.beam_width)
        elif self.num_return_sequences > self.beam_width:
            raise InvalidRequest(
                "num_return_sequences",
                f"{self.num_return_sequences} is more than beam_width ({self.beam_width})",
            )
        if len(self.stop_token_ids) > MAX_BEAM_STOP_TOKENS:
            raise InvalidRequest(
                "stop_token_ids",
                f"{len(self.stop_token_ids)} are more than the {MAX_BEAM_STOP_TOKENS} that a beam "
                "search takes",
            )

    def check_against(self, vocab_size: int, max_logprobs: int) -> None:
        """Check what depends on the model; `max_logprobs` limits nothing here.

        Raises:
            InvalidRequest: a token id is outside the vocabulary.
        """
        _check_vocabulary("stop_token_ids", self.stop_token_ids, vocab_size)
        _check_vocabulary("kept_special_tokens", self.kept_special_tokens, vocab_size)

    def to_spec(
        self, eos_ids: Sequence[int], bad_word_ids: Sequence[Sequence[int]] = ()
    ) -> SamplingSpec:
        """The parameters that the worker needs: how many candidates each beam must have.

        If all end tokens are among a beam's candidates, `beam_width` others must still be left;
        more than that from one beam are never kept.
        """
        ends = _end_token_ids(self, eos_ids)
        grammar = _grammar(self, ends)
        return SamplingSpec(
            num_candidates=self.beam_width + max(self.beam_width, len(ends)),
            grammar=grammar,
            num_begun=_num_begun(self),
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_tokens,
            end_token_ids=ends if self.min_tokens or grammar else (),
        )


@dataclass(frozen=True, slots=True)
class PoolingParams(_Parameters):
    """How the hidden states of a prompt become one vector, its embedding.

    The hidden states are those of the model's last layer, after its last norm, from which logits
    are computed.

    Example:
        >>> [output] = llm.embed("A cat is a small animal.", PoolingParams(pooling="mean"))
        >>> len(output.embedding)
    """

    pooling: Pooling = "last"
    """"mean": the mean over all tokens. "last": the state of the last token, which has seen all.
    "cls": that of the first one, for models that were trained so."""
    dimensions: int | None = None
    """Keep so many of the first elements, for models that were trained for it (Matryoshka). None:
    all."""
    normalize: bool = True
    """Divide the vector by its length, so that scalar products are cosines."""

    def _check_together(self) -> None:
        """The fields have nothing to do with each other."""

    def check_against(self, hidden_size: int) -> None:
        """Check what depends on the model.

        Raises:
            InvalidRequest: it has fewer dimensions than are asked for.
        """
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise InvalidRequest(
                "dimensions", f"{self.dimensions} is more than the model's {hidden_size}"
            )

    def to_spec(self, num_tokens: int) -> SamplingSpec:
        """What the worker reads of a prompt of `num_tokens`; nothing is drawn."""
        first = num_tokens - 1 if self.pooling == "last" else 0
        end = 1 if self.pooling == "cls" else None
        return SamplingSpec(temperature=0.0, pools_prompt=True, first_read=first, end_read=end)

    def finish(self, values: bytes, num_tokens: int) -> array[float]:
        """The embedding, float32, from the sum of the hidden states that were read, float64, of a
        prompt of `num_tokens`."""
        vector = np.frombuffer(values)[: self.dimensions]
        if self.pooling == "mean":
            vector = vector / num_tokens
        if self.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), SMALLEST_NORM)
        return array("f", vector.astype(np.float32).tobytes())


def beam_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a model's defaults that beam search has, too."""
    own = {each.name for each in fields(BeamSearchParams)}
    return {name: value for name, value in defaults.items() if name in own}


def _check_penalty_and_lengths(params: SamplingParams | BeamSearchParams) -> None:
    """Check what both kinds have of them. Raises InvalidRequest."""
    if params.repetition_penalty <= 0:
        raise InvalidRequest(
            "repetition_penalty", f"{params.repetition_penalty} is not more than 0"
        )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            "min_tokens", f"{params.min_tokens} is more than max_tokens ({params.max_tokens})"
        )


def _end_token_ids(
    params: SamplingParams | BeamSearchParams, eos_ids: Sequence[int]
) -> tuple[int, ...]:
    """All tokens that end an output, ascending."""
    own = () if params.ignore_eos else eos_ids
    return tuple(sorted({*params.stop_token_ids, *own}))


def _grammar(
    params: SamplingParams | BeamSearchParams, end_token_ids: Sequence[int]
) -> Grammar | None:
    """What `structured` means. Raises InvalidRequest if no token could end the output."""
    if params.structured is None:
        return None
    assert isinstance(params.structured, StructuredOutput), "__post_init__ makes it one"
    grammar = params.structured.to_grammar()
    if not end_token_ids:
        raise InvalidRequest(
            grammar.field,
            "no token ends the output when it is complete: the model has no end token, or "
            "ignore_eos is on; give stop_token_ids",
        )
    return grammar


def _num_begun(params: SamplingParams | BeamSearchParams) -> int:
    """How many tokens of the prompt `structured` is about."""
    return params.structured.begun if isinstance(params.structured, StructuredOutput) else 0
