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
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.step import SamplingSpec, ThinkingSpec
from octavo.errors import NoTokenLeft, OctavoError, RequestFailed
from octavo.structured.constraint import (
    ConstraintLibrary,
    Filling,
    TokenConstraint,
    Words,
    clear_bits,
    num_words,
    set_bits,
    words_of,
)

Int32s = NDArray[np.int32]

COMPILING_THREADS = 2
FIRST_WORDS = 64  # of a mask
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


class PendingMasks(NamedTuple):
    """Masks of which a library may still compute those of grammars. Until `result` is called, their
    rows must not change."""

    computes: bool
    result: Callable[[], Masks]  # waits, once; raises what went wrong


@dataclass(slots=True)
class _State:
    """What a row's masks are made of."""

    spec: SamplingSpec
    allowed: Words | None
    compiled: Future[TokenConstraint] | None  # of the grammar, before the first token
    has_rules: bool  # the mask of the grammar, if there is one, is not the row's
    constraint: TokenConstraint | None = None  # behind `num_begun` and the tokens accepted since
    num_accepted: int = 0  # output tokens
    # The mask of the constraint as it is, if it was started ahead, and its place there.
    ahead: tuple[_Filling, int] | None = None

    def settle(self) -> None:
        """Wait for the mask that was started ahead, and do without it: the constraint changes."""
        if self.ahead is not None:
            self.ahead[0].finish()
            self.ahead = None


class _Filling:
    """Masks of which a library may still compute those of grammars."""

    def __init__(self, words: Words) -> None:
        """words: [num_masks, num_words]: memory for them, contiguous."""
        self.words = words
        self.places: list[int] = []  # of those of grammars
        self.states: list[_State] = []  # of their rows
        self.pending: Filling | None = None
        self.reasons: dict[int, str] = {}  # place -> why the mask cannot be

    def finish(self) -> dict[int, str]:
        """Wait for the masks. Returns why some of them cannot be, by place."""
        pending, self.pending = self.pending, None
        if pending is not None:
            filled = pending.result()
            for i in np.flatnonzero(filled.is_accepting).tolist():
                set_bits(self.words[self.places[i]], self.states[i].spec.end_token_ids)
            for i, reason in filled.errors.items():
                self.fail(self.places[i], reason)
        return self.reasons

    def fail(self, place: int, reason: str) -> None:
        """Note why the grammar of a row has no mask."""
        self.reasons[place] = f"the grammar cannot go on: {reason}"


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
        words = spec.bad_words or spec.bad_sequences or spec.no_repeat_ngram_size
        other = words or spec.thinking or spec.forced_tokens or spec.min_tokens
        has_rules = bool(other or compiled is None or allowed is not None)
        self._states[row] = _State(spec, allowed, compiled, has_rules)

    def close(self, row: int) -> None:
        """A row is over."""
        self._states[row] = None

    def copy(self, child: int, parent: int) -> None:
        """`child` becomes a copy of `parent`."""
        state = self._states[parent]
        if state is None:
            self._states[child] = None
            return
        state.settle()
        constraint = None if state.constraint is None else state.constraint.fork()
        self._states[child] = _State(
            *(state.spec, state.allowed, state.compiled, state.has_rules),
            *(constraint, state.num_accepted),
        )

    def rewind(self, row: int, num_output: int) -> None:
        """Output tokens from this place on are written again."""
        state = self._states[row]
        if state is not None and state.constraint is not None and state.num_accepted > num_output:
            state.settle()
            state.constraint.rollback(state.num_accepted - num_output)
            state.num_accepted = num_output

    def _loaded(self) -> tuple[ConstraintLibrary, ThreadPoolExecutor]:
        if self._library is None or self._compiling is None:
            self._library = self._make_library()
            self._compiling = ThreadPoolExecutor(COMPILING_THREADS, "grammars")
        return self._library, self._compiling

    def shutdown(self) -> None:
        """End the threads. No row may be opened or filled any more."""
        if self._compiling is not None and self._library is not None:
            self._compiling.shutdown(cancel_futures=True)
            self._library.shutdown()

    # ---------------------------------------------------------------- masks

    def has_compiled(self, rows: Sequence[MaskedRow]) -> bool:
        """Whether `start` has no grammars to wait for."""
        states = map(self._state, rows)
        compiled = [s.compiled for s in states if s.compiled is not None and s.constraint is None]
        return all(each.done() for each in compiled)

    def start(self, rows: Sequence[MaskedRow], token_ids: Int32s, words: Words) -> PendingMasks:
        """Start to fill the masks of the next tokens of rows.

        Args:
            rows: whose tokens so far are known.
            token_ids: [num_rows, ...]: those tokens, by row.
            words: [len(rows), num_words]: memory for the masks, contiguous.
        """
        states = [self._state(row) for row in rows]
        filling, ahead = _Filling(words), dict[_Filling, list[tuple[int, int]]]()
        fresh = []
        for place, (row, state) in enumerate(zip(rows, states, strict=True)):
            is_ahead = state.num_accepted == row.num_tokens - row.num_prompt_tokens
            if state.ahead is not None and is_ahead:
                earlier, there = state.ahead
                ahead.setdefault(earlier, []).append((place, there))
            else:
                fresh.append(place)
        self._fill(filling, fresh, rows, token_ids)

        def result() -> Masks:
            reasons = filling.finish()
            for earlier, pairs in ahead.items():
                known = earlier.finish()
                places, there = zip(*pairs, strict=True)
                words[list(places)] = earlier.words[list(there)]
                reasons |= {place: known[there] for place, there in pairs if there in known}
            return self._finish(rows, states, token_ids, words, reasons)

        return PendingMasks(bool(filling.pending or ahead), result)

    def start_ahead(self, rows: Sequence[MaskedRow], token_ids: Int32s) -> None:
        """Start to fill masks of grammars before it is known which rows need one next: `start`
        takes those that it can use. See there."""
        begun = [row for row in rows if self._state(row).constraint is not None]
        filling = _Filling(np.empty((len(begun), self._num_words), np.int32))
        self._fill(filling, range(len(begun)), begun, token_ids)
        for place, state in zip(filling.places, filling.states, strict=True):
            state.ahead = filling, place

    def _fill(
        self,
        filling: _Filling,
        places: Sequence[int],
        rows: Sequence[MaskedRow],
        token_ids: Int32s,
    ) -> None:
        """Start to fill the masks of those of the rows that are at `places`."""
        picked = [rows[place] for place in places]
        ends = [row.row for row in picked], [row.num_tokens - 1 for row in picked]
        lasts: list[int] = token_ids[ends].tolist()
        new_ids: list[int | None] = []
        for place, row, last in zip(places, picked, lasts, strict=True):
            state = self._state(row)
            num_output = row.num_tokens - row.num_prompt_tokens
            if state.ahead is not None:
                state.settle()
            num_new = num_output - state.num_accepted
            if state.compiled is not None and (state.constraint is None or num_new > 1):
                reason = self._catch_up(state, row, token_ids[row.row])
                if reason:
                    filling.fail(place, reason)
                num_new = num_output - state.num_accepted
            has_ended = num_new and last in state.spec.end_token_ids
            if state.constraint is None or has_ended or num_new > 1:
                filling.words[place] = self._all
                continue
            filling.places.append(place)
            filling.states.append(state)
            new_ids.append(last if num_new else None)
            state.num_accepted = num_output
        if filling.places:
            assert self._library is not None, "a grammar was compiled"
            constraints = [state.constraint for state in filling.states]
            filling.pending = self._library.fill(
                constraints, new_ids, filling.places, filling.words
            )

    def _state(self, row: MaskedRow) -> _State:
        state = self._states[row.row]
        assert state is not None, f"row {row.row} has no mask"
        return state

    def _catch_up(self, state: _State, row: MaskedRow, text: Int32s) -> str:
        """Bring a row's constraint up to the last token of its output, unless the output, which is
        then computed once too often, has ended before. Returns why it cannot be."""
        num_prompt = row.num_prompt_tokens
        if state.constraint is None:
            assert state.compiled is not None, "the row has a grammar"
            try:
                constraint = state.compiled.result().fork()
            except OctavoError as error:  # its checks were passed elsewhere
                return str(error)
            beginning = text[num_prompt - state.spec.num_begun : num_prompt].tolist()
            reason = constraint.accept(beginning) if beginning else ""
            if reason:
                return reason
            state.constraint = constraint
        new = text[num_prompt + state.num_accepted : row.num_tokens - 1].tolist()
        if not new or not set(new).isdisjoint(state.spec.end_token_ids):
            return ""
        reason = state.constraint.accept(new)
        if not reason:
            state.num_accepted += len(new)
        return reason

    def _finish(
        self,
        rows: Sequence[MaskedRow],
        states: Sequence[_State],
        token_ids: Int32s,
        words: Words,
        reasons: dict[int, str],
    ) -> Masks:
        """The masks, once those of grammars are filled; `reasons`: why some cannot be."""
        for place in [place for place, state in enumerate(states) if state.has_rules]:
            row = rows[place]
            text = token_ids[row.row, : row.num_tokens]
            self._apply_rules(words[place], states[place], text, row.num_prompt_tokens)
        # Nearly every mask has a token in its first words: the others are looked at as a whole.
        suspects = np.flatnonzero(~words[:, :FIRST_WORDS].any(axis=1))
        for place in suspects[~words[suspects].any(axis=1)].tolist():
            num_output = rows[place].num_tokens - rows[place].num_prompt_tokens
            reasons.setdefault(place, _nothing_left(states[place].spec, num_output))
        words[list(reasons)] = self._all
        errors: dict[int, RequestFailed] = {
            rows[place].logits_row: NoTokenLeft(reason) for place, reason in reasons.items()
        }
        return Masks(words, errors)

    def _apply_rules(self, words: Words, state: _State, text: Int32s, num_prompt: int) -> None:
        """Take out of a mask [num_words] what the row's other rules forbid."""
        spec, output = state.spec, text[num_prompt:]
        if state.allowed is not None:
            words &= state.allowed
        if len(output) < spec.min_tokens:
            _take_out(words, spec.end_token_ids, gives_way=spec.grammar is not None)
        bad = endings(spec.bad_words).at(output) + endings(spec.bad_sequences).at(text)
        if spec.no_repeat_ngram_size:
            bad += repeating(text, spec.no_repeat_ngram_size)
        if bad:
            _take_out(words, bad)
        ending = end_of_thinking(spec.thinking, output)
        if ending is not None:
            words[:] = words_of([ending], self._vocab_size)
        for number, token_id in spec.forced_tokens:
            if number == len(output):
                words[:] = words_of([token_id], self._vocab_size)


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


class Endings:
    """Finds the tokens that would complete a word, without a look at every word."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._last: dict[tuple[int, ...], list[int]] = {}  # tokens of a word but the last -> that
        for *prefix, last in words:
            self._last.setdefault(tuple(prefix), []).append(last)
        self._sizes = sorted({len(prefix) for prefix in self._last})

    def at(self, text: Int32s) -> list[int]:
        """Tokens with which one of the words would be complete at the end of a text."""
        found: list[int] = []
        for size in self._sizes:
            if size <= len(text):
                found += self._last.get(tuple(text[len(text) - size :].tolist()), ())
        return found


@lru_cache(maxsize=256)  # most requests have none, or those of the model
def endings(words: tuple[tuple[int, ...], ...]) -> Endings:
    """See Endings."""
    return Endings(words)


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
