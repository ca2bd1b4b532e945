"""Which tokens a row may draw next: allowed tokens, grammars, bad words, end tokens too early.

All of them become one mask per row, in packed words (structured/constraint.py), which the sampler
takes before it draws. Where a mask depends on the row's text, it is filled when that is known,
while the device computes.

What gives way if it would leave no token at all: first bad words, and where a grammar is complete,
`min_tokens`. A row for which nothing is left even so ends with an error of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.step import SamplingSpec, ThinkingSpec
from octavo.errors import NoTokenLeft, OctavoError, RequestFailed
from octavo.structured.constraint import (
    ConstraintLibrary,
    TokenConstraint,
    Words,
    clear_bits,
    num_words,
    set_bits,
    words_of,
)

Int32s = NDArray[np.int32]

COMPILING_THREADS = 2
MAX_BEFORE_THINKING = 8  # tokens, such as line ends


def has_mask(spec: SamplingSpec) -> bool:
    """Whether a row has a mask at every token."""
    words = spec.bad_words or spec.bad_sequences
    rules = words or spec.no_repeat_ngram_size or spec.thinking
    return bool(rules or spec.allowed_token_ids or spec.grammar)


def has_first_masks(spec: SamplingSpec) -> bool:
    """Whether a row has masks for some tokens by their number: the first `min_tokens`, and those
    that are forced."""
    return bool((spec.min_tokens and spec.end_token_ids) or spec.forced_tokens)


def has_mask_at(spec: SamplingSpec, num_output_tokens: int) -> bool:
    """Whether the token after so many is one of those."""
    if num_output_tokens < spec.min_tokens and spec.end_token_ids:
        return True
    return any(number == num_output_tokens for number, _ in spec.forced_tokens)


def mask_follows_text(spec: SamplingSpec) -> bool:
    """Whether a row's mask depends on the tokens so far, rather than on their number alone."""
    has_words = any(len(word) > 1 for word in spec.bad_words + spec.bad_sequences)
    return bool(has_words or spec.no_repeat_ngram_size or spec.grammar or spec.thinking)


class MaskedRow(NamedTuple):
    """A row whose next token needs a mask."""

    logits_row: int
    row: int
    num_tokens: int  # prompt and output so far
    num_prompt_tokens: int


class Masks(NamedTuple):
    """The masks of some rows, and why some rows have none; those may draw anything."""

    words: Words  # [num_masked_rows, num_words]
    errors: dict[int, RequestFailed]  # by index in the logits


@dataclass(slots=True)
class _State:
    """What a row's masks are made of."""

    spec: SamplingSpec
    allowed: Words | None
    compiled: Future[TokenConstraint] | None  # of the grammar, before the first token
    constraint: TokenConstraint | None = None  # behind `num_begun` and the tokens accepted since
    num_accepted: int = 0  # output tokens


class RowMasks:
    """Owns the states of all rows that may need masks."""

    def __init__(
        self, num_rows: int, vocab_size: int, library: Callable[[], ConstraintLibrary]
    ) -> None:
        """`library` is called when the first grammar comes."""
        self._vocab_size = vocab_size
        self._num_words = num_words(vocab_size)
        self._all = words_of(range(vocab_size), vocab_size)
        self._make_library = library
        self._library: ConstraintLibrary | None = None
        self._compiling: ThreadPoolExecutor | None = None
        self._states: list[_State | None] = [None] * num_rows

    def prepare(self) -> None:
        """Let the library read the vocabulary now, in a thread; whether it can is said later."""
        library, threads = self._loaded()
        threads.submit(library.load)

    # ---------------------------------------------------------------- rows

    def open(self, row: int, spec: SamplingSpec) -> None:
        """A row begins; its grammar is compiled meanwhile."""
        if not (has_mask(spec) or has_first_masks(spec)):
            self._states[row] = None
            return
        allowed = None
        if spec.allowed_token_ids:
            allowed = words_of(spec.allowed_token_ids, self._vocab_size)
        compiled = None
        if spec.grammar is not None:
            library, threads = self._loaded()
            compiled = threads.submit(library.compile, spec.grammar)
        self._states[row] = _State(spec, allowed, compiled)

    def close(self, row: int) -> None:
        """A row is over."""
        self._states[row] = None

    def copy(self, child: int, parent: int) -> None:
        """`child` becomes a copy of `parent`."""
        state = self._states[parent]
        if state is None:
            self._states[child] = None
            return
        constraint = None if state.constraint is None else state.constraint.fork()
        self._states[child] = _State(
            state.spec, state.allowed, state.compiled, constraint, state.num_accepted
        )

    def rewind(self, row: int, num_output: int) -> None:
        """Output tokens from this place on are written again."""
        state = self._states[row]
        if state is not None and state.constraint is not None and state.num_accepted > num_output:
            state.constraint.rollback(state.num_accepted - num_output)
            state.num_accepted = num_output

    def _loaded(self) -> tuple[ConstraintLibrary, ThreadPoolExecutor]:
        if self._library is None or self._compiling is None:
            self._library = self._make_library()
            self._compiling = ThreadPoolExecutor(COMPILING_THREADS, "grammars")
        return self._library, self._compiling

    # ---------------------------------------------------------------- masks

    def fill(self, rows: Sequence[MaskedRow], texts: Sequence[Int32s]) -> Masks:
        """The masks of the next tokens of rows with these tokens."""
        outputs = [t[row.num_prompt_tokens :] for row, t in zip(rows, texts, strict=True)]
        words = np.empty((len(rows), self._num_words), np.int32)
        words[:] = self._all
        states = [self._state(row) for row in rows]
        beginnings = [
            t[row.num_prompt_tokens - state.spec.num_begun : row.num_prompt_tokens]
            for row, t, state in zip(rows, texts, states, strict=True)
        ]
        reasons = self._fill_grammars(states, beginnings, outputs, words)
        for place, (state, output) in enumerate(zip(states, outputs, strict=True)):
            if state.allowed is not None:
                words[place] &= state.allowed
            if len(output) < state.spec.min_tokens:
                has_grammar = state.spec.grammar is not None
                _take_out(words[place], state.spec.end_token_ids, gives_way=has_grammar)
            bad = endings(state.spec.bad_words, output)
            bad += endings(state.spec.bad_sequences, texts[place])
            if state.spec.no_repeat_ngram_size:
                bad += repeating(texts[place], state.spec.no_repeat_ngram_size)
            if bad:
                _take_out(words[place], bad)
            ending = end_of_thinking(state.spec.thinking, output)
            if ending is not None:
                words[place] = words_of([ending], self._vocab_size)
            for number, token_id in state.spec.forced_tokens:
                if number == len(output):
                    words[place] = words_of([token_id], self._vocab_size)
        for place in np.flatnonzero(~words.any(axis=1)).tolist():
            reasons.setdefault(place, _nothing_left(states[place].spec, len(outputs[place])))
        words[list(reasons)] = self._all
        errors: dict[int, RequestFailed] = {
            rows[place].logits_row: NoTokenLeft(reason) for place, reason in reasons.items()
        }
        return Masks(words, errors)

    def _state(self, row: MaskedRow) -> _State:
        state = self._states[row.row]
        assert state is not None, f"row {row.row} has no mask"
        return state

    def _fill_grammars(
        self,
        states: Sequence[_State],
        beginnings: Sequence[Int32s],
        outputs: Sequence[Int32s],
        words: Words,
    ) -> dict[int, str]:
        """Fill the masks of rows with grammars. Returns what is wrong with some of them."""
        reasons: dict[int, str] = {}
        places: list[int] = []
        constraints: list[TokenConstraint] = []
        for place, (state, beginning, output) in enumerate(
            zip(states, beginnings, outputs, strict=True)
        ):
            if state.compiled is None:
                continue
            reason = self._advance(state, beginning, output)
            if reason:
                reasons[place] = f"the grammar cannot go on: {reason}"
            elif state.constraint is not None and state.num_accepted == len(output):
                places.append(place)
                constraints.append(state.constraint)
            # Else the output has ended, and the row is computed once too often.
        if not places:
            return reasons
        assert self._library is not None, "a grammar was compiled"
        masks = np.empty((len(places), self._num_words), np.int32)
        filled = self._library.fill(constraints, masks)
        for i in np.flatnonzero(filled.is_accepting).tolist():
            set_bits(masks[i], states[places[i]].spec.end_token_ids)
        words[places] = masks
        for place, reason in zip(places, filled.errors, strict=True):
            if reason:
                reasons[place] = f"the grammar cannot go on: {reason}"
        return reasons

    def _advance(self, state: _State, beginning: Int32s, output: Int32s) -> str:
        """Bring a row's constraint up to the end of its output, unless that has ended. Returns why
        it cannot be."""
        if state.constraint is None:
            assert state.compiled is not None, "the row has a grammar"
            try:
                constraint = state.compiled.result().fork()
            except OctavoError as error:  # its checks were passed elsewhere
                return str(error)
            reason = constraint.accept(beginning.tolist()) if len(beginning) else ""
            if reason:
                return reason
            state.constraint = constraint
        new = output[state.num_accepted :].tolist()
        if not new or not set(state.spec.end_token_ids).isdisjoint(new):
            return ""
        reason = state.constraint.accept(new)
        if not reason:
            state.num_accepted = len(output)
        return reason


def _take_out(words: Words, token_ids: Sequence[int], gives_way: bool = True) -> None:
    """Clear the bits of some tokens."""
    before = words.copy() if gives_way else None
    clear_bits(words, token_ids)
    if before is not None and not words.any():
        words[:] = before


def _nothing_left(spec: SamplingSpec, num_output_tokens: int) -> str:
    kinds = {
        "the grammar": spec.grammar,
        "allowed_token_ids": spec.allowed_token_ids,
        "min_tokens": spec.min_tokens,
        "the vocabulary": True,
    }
    names = [name for name, is_set in kinds.items() if is_set]
    return (
        f"after {num_output_tokens} tokens, {' and '.join(names)} together leave no token to draw"
    )


def endings(words: Sequence[Sequence[int]], text: Int32s) -> list[int]:
    """Tokens with which one of the words would be complete at the end of a text."""
    found = []
    for *prefix, last in words:
        start = len(text) - len(prefix)
        if start >= 0 and text[start:].tolist() == prefix:
            found.append(last)
    return found


def end_of_thinking(spec: ThinkingSpec | None, output: Int32s) -> int | None:
    """The token that must come next because the reasoning in an output has reached its limit.

    Tokens of the end that the output has already, by itself or because they were forced, are not
    repeated.
    """
    if spec is None:
        return None
    # Reasoning is what an output begins with.
    first = output[: len(spec.begin_ids) + MAX_BEFORE_THINKING]
    start = 0 if spec.is_open else _end_of(spec.begin_ids, first)
    if start is None or len(output) < start + spec.num_tokens:
        return None
    # At the limit the end is forced, so it is in this part of the output, or in none.
    size = len(spec.end_ids)
    part = output[start : start + spec.num_tokens + 2 * size]
    if _end_of(spec.end_ids, part) is not None:
        return None
    for num_there in range(min(size - 1, len(part)), -1, -1):
        if part[len(part) - num_there :].tolist() == list(spec.end_ids[:num_there]):
            return spec.end_ids[num_there]
    raise AssertionError("no token is there, at least")


def _end_of(token_ids: Sequence[int], output: Int32s) -> int | None:
    """The place behind the first occurrence of some tokens; None if there is none."""
    size = len(token_ids)
    if len(output) < size:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(output, size)
    places = np.flatnonzero((windows == np.asarray(token_ids)).all(axis=1))
    return int(places[0]) + size if len(places) else None


def repeating(token_ids: Int32s, size: int) -> list[int]:
    """What came after earlier occurrences of the last size - 1 tokens, prompt included."""
    num_earlier = len(token_ids) - size + 1
    if num_earlier < 1:
        return []
    ngrams = np.lib.stride_tricks.sliding_window_view(token_ids, size)
    is_same = (ngrams[:, : size - 1] == token_ids[num_earlier:]).all(axis=1)
    last: list[int] = ngrams[is_same, size - 1].tolist()
    return last
