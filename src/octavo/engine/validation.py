"""Validates requests and resolves them to token ids and plain values, for the scheduler.

Errors in a request are found here, before anything is queued or sent; only the scheduler can tell
whether it fits into the KV cache.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NotRequired, TypedDict

from octavo.config import EngineConfig
from octavo.core.decoding import BeamSearch, PromptReader, Sampling
from octavo.core.sequence import DecodingMethod
from octavo.core.step import Grammar, SamplingSpec, ThinkingSpec
from octavo.engine.tokenizer import Room, Tokenizer
from octavo.errors import InvalidRequest, shown
from octavo.models.config import DecodingRules, ModelConfig
from octavo.sampling_params import (
    INT64_MAX,
    BeamSearchParams,
    PoolingParams,
    SamplingParams,
    ThinkingLimit,
    integer_in,
    valid_text,
)
from octavo.structured.guidance import Guidance
from octavo.structured.output import StructuredOutput

MAX_CACHE_SALT = 4_096  # characters
MAX_TENANT = 256  # characters


class PromptParts(TypedDict):
    """A prompt with what the decoder of an encoder-decoder model starts with."""

    prompt: str | list[int]
    decoder_input_ids: NotRequired[list[int]]
    """After decoder_start_token_id, which is put in front of them if they do not begin with it."""


Prompt = str | list[int] | PromptParts
Params = SamplingParams | BeamSearchParams | PoolingParams


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request in token ids. The same values give the same tokens in every engine."""

    prompt_token_ids: list[int]  # with an encoder, what the decoder starts with
    sampling: SamplingSpec
    max_length: int  # tokens, prompt included
    n: int  # samples; 1 for beam search
    seed: int
    eos_ids: tuple[int, ...]  # end tokens of the model; () if they are ignored
    stop_ids: tuple[int, ...]  # end tokens of the client
    beam: BeamSearchParams | None = None  # None: sampling
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    encoder_token_ids: tuple[int, ...] = ()  # the encoder's input

    @property
    def input_token_ids(self) -> list[int]:
        """What the client calls the prompt: the encoder's input, if there is one."""
        return list(self.encoder_token_ids) or self.prompt_token_ids

    @property
    def width(self) -> int:
        """Samples or beams."""
        return self.n if self.beam is None else self.beam.beam_width

    def method(self) -> DecodingMethod:
        """A new decoding method for one run of the request."""
        if self.sampling.pools_prompt:
            return PromptReader(len(self.prompt_token_ids))
        eos_ids, stop_ids = frozenset(self.eos_ids), frozenset(self.stop_ids)
        if self.beam is None:
            return Sampling(self.n, self.max_length, eos_ids, stop_ids)
        return BeamSearch(
            self.width,
            self.max_length,
            eos_ids | stop_ids,
            self.beam.length_penalty,
            self.beam.early_stopping,
            self.beam.num_return_sequences,
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest if a token id is outside the model's vocabulary: on a device, it
        would crash the whole batch."""
        spec = self.sampling
        fields: dict[str, Iterable[int]] = {
            "prompt": self.input_token_ids,
            "decoder_input_ids": self.prompt_token_ids,
            "logit_bias": array("q", spec.logit_bias.token_ids if spec.logit_bias else b""),
            "allowed_token_ids": spec.allowed_token_ids,
            "bad_words": [token_id for word in spec.bad_words for token_id in word],
            "stop_token_ids": spec.end_token_ids,
        }
        for field, token_ids in fields.items():
            for worst in (min(token_ids, default=0), max(token_ids, default=0)):
                if not 0 <= worst < vocab_size:
                    raise InvalidRequest(
                        field, f"token id {worst} is outside the vocabulary of {vocab_size}"
                    )

    def without_prompt_logprobs(self) -> PreparedRequest:
        """The same request without log-probabilities of the prompt, which are known already."""
        return replace(self, sampling=replace(self.sampling, num_prompt_logprobs=None))


def parts_of(prompt: Prompt) -> tuple[str | list[int], list[int] | None]:
    """A prompt, and the decoder's tokens that came with it. Raises InvalidRequest about a mapping
    with other keys than those of PromptParts."""
    if not isinstance(prompt, Mapping):
        return prompt, None
    for name in prompt:
        if name not in PromptParts.__annotations__:
            known = ", ".join(PromptParts.__annotations__)
            raise InvalidRequest("prompt", f"it has no field {shown(name)}, only {known}")
    if "prompt" not in prompt:
        raise InvalidRequest("prompt", "it is missing beside decoder_input_ids")
    return prompt["prompt"], prompt.get("decoder_input_ids")


def check_cache_salt(cache_salt: object) -> None:
    """Raises InvalidRequest if it is not text, which the scheduler could not hash."""
    valid_text("cache_salt", cache_salt, MAX_CACHE_SALT)


class RequestPreparer:
    """Owns the rules for requests to one model, and chooses seeds for requests without one."""

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        check_grammar: Callable[[Grammar, Sequence[int]], None] | None = None,
    ) -> None:
        """`check_grammar` raises InvalidRequest if a grammar cannot be enforced, or cannot go on
        after these token ids. None: by compiling it here."""
        self._model_config = model_config
        self._vocab_size = model_config.vocab_size
        self._eos_ids = tuple(sorted(set(model_config.eos_token_ids)))
        self._tokenizer = tokenizer
        self._max_logprobs = config.max_logprobs
        self._max_num_batched_tokens = config.scheduler.max_num_batched_tokens
        if check_grammar is None:
            # Only for this check: the worker has a library of its own.
            check_grammar = Guidance(
                model_config.path, model_config.vocab_size, self._eos_ids
            ).check
        self._check_grammar = check_grammar
        self._seeds = random.Random(config.seed)

    def prepare(
        self,
        prompt: Prompt,
        params: Params,
        max_model_len: int,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
    ) -> PreparedRequest:
        """Check a request for an engine whose sequences have at most `max_model_len` tokens.

        Raises InvalidRequest (RequestTooLong if the prompt leaves no room), naming the field.
        """
        if not isinstance(params, Params):
            raise InvalidRequest(
                "params",
                f"{shown(params)} is neither SamplingParams, BeamSearchParams nor PoolingParams",
            )
        priority = integer_in("priority", priority, -INT64_MAX - 1)
        check_cache_salt(cache_salt)
        valid_text("tenant", tenant, MAX_TENANT)
        if isinstance(params, PoolingParams):
            return self._prepare_reading(
                prompt, params, max_model_len, priority, cache_salt, tenant
            )
        params.check_against(self._vocab_size, self._max_logprobs)
        token_ids, encoder_token_ids = self._inputs(prompt, params, max_model_len)
        num_left = max_model_len - len(token_ids)
        max_tokens = num_left if params.max_tokens is None else min(params.max_tokens, num_left)
        n, seed, beam = 1, 0, None
        if isinstance(params, BeamSearchParams):
            beam = replace(params, structured=None)  # which the spec has
        else:
            n = params.n
            seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        spec = self._spec(params)
        if spec.first_read:
            spec = replace(spec, first_read=min(spec.first_read, len(token_ids) - 1))
        spec = self._with_rules(spec, len(token_ids), max_tokens)
        self._check_form(spec, token_ids)
        if len(spec.end_token_ids) == self._vocab_size:
            raise InvalidRequest("min_tokens", "every token of the vocabulary ends the output")
        return PreparedRequest(
            prompt_token_ids=token_ids,
            sampling=spec,
            max_length=len(token_ids) + max_tokens,
            n=n,
            seed=seed,
            eos_ids=() if params.ignore_eos else self._eos_ids,
            stop_ids=tuple(params.stop_token_ids),
            beam=beam,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            encoder_token_ids=encoder_token_ids,
        )

    def _inputs(
        self, prompt: Prompt, params: SamplingParams | BeamSearchParams, max_model_len: int
    ) -> tuple[list[int], tuple[int, ...]]:
        """The tokens that the decoder starts with, and the encoder's input, if there is one."""
        given, decoder_input_ids = parts_of(prompt)
        token_ids = self.tokenize(given, self.room(max_model_len))
        encoder_token_ids: tuple[int, ...] = ()
        if self.has_encoder:
            if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
                raise InvalidRequest("prompt_logprobs", "an encoder does not predict its input")
            encoder_token_ids = tuple(token_ids)
            token_ids = self._decoder_start(decoder_input_ids, max_model_len)
        elif decoder_input_ids is not None:
            raise InvalidRequest("decoder_input_ids", "the model has no encoder")
        forced = self._forced_before_form(params, len(token_ids))
        if forced:
            token_ids = token_ids + forced
            Room.before_output(max_model_len).check("prompt", len(token_ids))
        return token_ids, encoder_token_ids

    def _spec(self, params: SamplingParams | BeamSearchParams) -> SamplingSpec:
        """The parameters with strings as token ids, before the model's own rules."""
        if isinstance(params, BeamSearchParams):
            return params.to_spec(self._eos_ids)
        if params.stop_strings and self._tokenizer is None:
            raise InvalidRequest("stop", "the model has no tokenizer to find strings with")
        return params.to_spec(self._eos_ids, self._bad_word_ids(params), self._thinking(params))

    def _prepare_reading(
        self,
        prompt: Prompt,
        params: PoolingParams,
        max_model_len: int,
        priority: int,
        cache_salt: str,
        tenant: str,
    ) -> PreparedRequest:
        """Check a request for an embedding; its prompt may fill the whole context."""
        if self.has_encoder:
            raise InvalidRequest("prompt", "a model with an encoder has no embeddings of prompts")
        params.check_against(self._model_config.hidden_size)
        given, decoder_input_ids = parts_of(prompt)
        if decoder_input_ids is not None:
            raise InvalidRequest("decoder_input_ids", "the model has no encoder")
        token_ids = self.tokenize(given, Room.whole(max_model_len))
        spec = params.to_spec(len(token_ids))
        length = len(token_ids)
        return PreparedRequest(
            token_ids, spec, length, 1, 0, (), (), None, priority, cache_salt, tenant
        )

    def check_structured(
        self, params: SamplingParams | BeamSearchParams, prompt: str | list[int] = ""
    ) -> None:
        """Find out whether what `params.structured` asks for can be enforced, after what the prompt
        has begun of it, so that `prepare` knows: it may take seconds. May be called in any thread.
        Raises InvalidRequest."""
        spec = params.to_spec(self._eos_ids)
        token_ids = self.tokenize(prompt, Room.whole(len(prompt))) if spec.num_begun else []
        self._check_form(spec, token_ids)

    def _check_form(self, spec: SamplingSpec, token_ids: list[int]) -> None:
        if spec.num_begun > len(token_ids):
            raise InvalidRequest(
                "structured.begun",
                f"{spec.num_begun} is more than the {len(token_ids)} tokens of the prompt",
            )
        if spec.grammar is not None:
            self._check_grammar(spec.grammar, token_ids[len(token_ids) - spec.num_begun :])

    @property
    def has_encoder(self) -> bool:
        """Whether prompts are the encoder's input."""
        return self._model_config.encoder is not None

    def room(self, max_model_len: int) -> Room:
        """How many tokens a prompt may have."""
        encoder = self._model_config.encoder
        if encoder is not None:
            most = self._model_config.longest_encoder_input(self._max_num_batched_tokens)
            return Room.of_encoder(most, is_of_steps=most < encoder.max_model_len)
        return Room.before_output(max_model_len)

    def whole_blocks(
        self, prefix: str | list[int], max_model_len: int, block_size: int
    ) -> list[int]:
        """The token ids of a prefix to pin: only whole blocks can be found by prefix.

        Raises InvalidRequest if it is shorter than a block, or if the model has an encoder;
        RequestTooLong if it leaves no room.
        """
        if self.has_encoder:
            raise InvalidRequest(
                "prefix", "inputs of an encoder are found as a whole, so it has no prefixes to pin"
            )
        token_ids = self.tokenize(prefix, self.room(max_model_len), "prefix")
        del token_ids[len(token_ids) // block_size * block_size :]
        if not token_ids:
            raise InvalidRequest("prefix", f"it is shorter than one block of {block_size} tokens")
        return token_ids

    def tokenize(self, prompt: object, room: Room, field: str = "prompt") -> list[int]:
        """At least one token id, all in the vocabulary, and no more than there is room for.

        Raises InvalidRequest or RequestTooLong about `field`.
        """
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequest(field, "the model has no tokenizer; give token ids")
            token_ids = self._tokenizer.encode(prompt, field=field, room=room)
        elif isinstance(prompt, list | tuple):
            room.check(field, len(prompt))
            token_ids = list(prompt)
        else:
            raise InvalidRequest(field, f"{shown(prompt)} is neither text nor a list of token ids")
        if not token_ids:
            raise InvalidRequest(field, "it is empty")
        if set(map(type, token_ids)) != {int}:
            wrong = next(each for each in token_ids if type(each) is not int)
            raise InvalidRequest(field, f"{shown(wrong)} is not a token id")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            raise InvalidRequest(
                field, f"token id {shown(worst)} is outside the vocabulary of {self._vocab_size}"
            )
        return token_ids

    def _decoder_start(self, given: object, max_model_len: int) -> list[int]:
        """What the decoder starts with. As in transformers, tokens that do not begin with
        decoder_start_token_id come after it."""
        start = self._model_config.decoder_start_token_id
        assert start is not None, "a model with an encoder has one"
        if given is None:
            return [start]
        field, room = "decoder_input_ids", Room.before_output(max_model_len)
        if not isinstance(given, list | tuple):
            raise InvalidRequest(field, f"{shown(given)} is not a list of token ids")
        token_ids = self.tokenize(given, room, field)
        if token_ids[0] != start:
            token_ids.insert(0, start)
            room.check(field, len(token_ids))
        return token_ids

    def _forced_before_form(
        self, params: SamplingParams | BeamSearchParams, num_tokens: int
    ) -> list[int]:
        """The token that the model would force first, if a form begins after it."""
        token_id = self._model_config.decoding_rules.first_token_id
        structured = params.structured
        if token_id is None or structured is None or num_tokens > 1:
            return []
        assert isinstance(structured, StructuredOutput), "__post_init__ makes it one"
        return [] if structured.begun else [token_id]

    def _with_rules(self, spec: SamplingSpec, num_tokens: int, max_tokens: int) -> SamplingSpec:
        """The parameters with what the model demands of every request: forced tokens, repeated
        n-grams and bad words. The sequence starts with `num_tokens`.

        The first token is forced only after a single one, as in transformers. The last one is not
        forced where a form would not be complete, so that it is cut off, and said to be.
        """
        rules = self._model_config.decoding_rules
        if rules == DecodingRules():
            return spec
        forced: list[tuple[int, tuple[int, ...]]] = []
        if rules.first_token_id is not None and num_tokens == 1:
            forced.append((0, (rules.first_token_id,)))
        if rules.last_token_ids and spec.grammar is None:
            forced.append((max_tokens - 1, rules.last_token_ids))
        return replace(
            spec,
            forced_tokens=tuple(forced),
            no_repeat_ngram_size=rules.no_repeat_ngram_size,
            bad_sequences=rules.bad_words,
            renormalises=rules.renormalises,
        )

    def _thinking(self, params: SamplingParams) -> ThinkingSpec | None:
        """The limit of reasoning in tokens."""
        limit = params.thinking
        if limit is None:
            return None
        assert isinstance(limit, ThinkingLimit), "__post_init__ makes it one"
        if self._tokenizer is None:
            raise InvalidRequest("thinking", "the model has no tokenizer to encode the end with")
        begin, end = (
            tuple(self._tokenizer.encode(text, add_special_tokens=False))
            for text in (limit.begin, limit.end)
        )
        for name, token_ids in (("begin", begin), ("end", end)):
            if not token_ids:
                text = shown(getattr(limit, name))
                raise InvalidRequest(f"thinking.{name}", f"{text} is no token of the tokenizer")
        if max(*begin, *end) >= self._vocab_size:
            raise InvalidRequest("thinking", "its delimiters are not in the model's vocabulary")
        return ThinkingSpec(limit.num_tokens, begin, end, limit.is_open)

    def _bad_word_ids(self, params: SamplingParams) -> Sequence[Sequence[int]]:
        """Bad words as tokens, each as at the beginning of a text and as after a space."""
        if not params.bad_words:
            return []
        if self._tokenizer is None:
            raise InvalidRequest("bad_words", "the model has no tokenizer to encode them with")
        spellings: list[list[int]] = []
        for word in params.bad_words:
            for spelling in (word, " " + word.lstrip()):
                token_ids = self._tokenizer.encode(spelling, add_special_tokens=False)
                # A tokenizer may have tokens that the model lacks, and so never generates.
                can_come = bool(token_ids) and max(token_ids) < self._vocab_size
                if can_come and token_ids not in spellings:
                    spellings.append(token_ids)
        return spellings
