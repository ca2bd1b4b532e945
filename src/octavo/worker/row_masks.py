"""Which tokens a row may draw next: allowed tokens, grammars, bad words, end tokens too early.

All of them become one mask per row, in packed words (structured/constraint.py), which the sampler
takes before it draws. Where a mask depends on the row's text, it is filled when that is known,
while the device computes.

Masks of grammars that may take long are filled apart from others. Where one is not there when its
step is drawn, its row is late: nothing is drawn for it, and it keeps the mask for a later step.

What gives way if it would leave no token at all: first bad words, and where a grammar is complete,
`min_tokens`. A row for which nothing is left even so ends with an error of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.step import SamplingSpec
from octavo.errors import NoTokenLeft, OctavoError, RequestFailed
from octavo.structured.constraint import (
    ConstraintLibrary,
    Filled,
    Filling,
    TokenConstraint,
    Words,
    num_words,
    set_bits,
    words_of,
)
from octavo.worker.mask_rules import apply_rules, has_first_masks, has_mask, nothing_left

logger = logging.getLogger(__name__)

Int32s = NDArray[np.int32]

COMPILING_THREADS = 2
FIRST_WORDS = 64  # of a mask


class MaskedRow(NamedTuple):
    """A row whose next token needs a mask."""

    logits_row: int
    row: int
    num_tokens: int  # prompt and output so far
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


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
    has_rules: bool  # the mask of the grammar, if there is one, is not the row's
    constraint: TokenConstraint | None = None  # behind `num_begun` and the tokens accepted since
    num_accepted: int = 0  # output tokens
    # The mask of the constraint as it is, if it was started ahead or apart from others, and its
    # place there.
    ahead: tuple[_Filling, int] | None = None
    is_void: bool = False  # its last token was not drawn: the mask was late

    @property
    def is_late(self) -> bool:
        """Whether its grammar is being compiled, or its mask computed, apart from those of others.
        Masks that were started ahead take no longer than those that are started now."""
        if self.compiled is None:
            return False
        if self.constraint is None:
            return not self.compiled.done()
        return self.ahead is not None and self.ahead[0].is_apart and not self.ahead[0].is_done

    @property
    def awaited(self) -> Future[Any]:
        """What is done when it may not be late any more."""
        if self.constraint is None or self.ahead is None:
            assert self.compiled is not None, "it has a grammar"
            return self.compiled
        return self.ahead[0].computed

    def settle(self) -> None:
        """Do without the mask that was started ahead, because the constraint changes: wait for it,
        or where that may take long, have the constraint made again."""
        if self.ahead is None:
            return
        if self.is_late:
            self.give_up()
            self.constraint, self.num_accepted = None, 0
        else:
            self.ahead[0].finish()
        self.ahead = None

    def give_up(self) -> None:
        """Nobody needs the mask any more if it is late."""
        if self.ahead is not None and self.is_late and len(self.ahead[0].states) == 1:
            self.ahead[0].computed.cancel()


class _Filling:
    """Masks of which a library may still compute those of grammars."""

    def __init__(self, words: Words, is_apart: bool = False) -> None:
        """
        Args:
            words: [num_masks, num_words]: memory for them, contiguous.
            is_apart: they may take long, so that nobody else should wait for them.
        """
        self.words = words
        self.is_apart = is_apart
        self.places: list[int] = []  # of those of grammars
        self.states: list[_State] = []  # of their rows
        self.reasons: dict[int, str] = {}  # place -> why the mask cannot be
        self._library: ConstraintLibrary | None = None
        self._pending: Filling | None = None

    def begin(self, library: ConstraintLibrary, new_ids: Sequence[Sequence[int]]) -> None:
        """Accept the next tokens of the rows, and start to compute their masks."""
        constraints = [state.constraint for state in self.states]
        self._library = library
        self._pending = library.fill(constraints, new_ids, self.places, self.words)

    @property
    def computes(self) -> bool:
        """Whether a library may still compute masks."""
        return self._pending is not None

    @property
    def is_done(self) -> bool:
        """Whether `finish` need not wait."""
        return self._pending is None or self._pending.computed.done()

    @property
    def computed(self) -> Future[None]:
        """See Filling.computed, before `finish`."""
        assert self._pending is not None, "it was begun"
        return self._pending.computed

    def note_late(self) -> None:
        """See Filling.note_late."""
        if self._pending is not None:
            self._pending.note_late()

    def finish(self) -> dict[int, str]:
        """Wait for the masks. Returns why some of them cannot be, by place."""
        pending, self._pending = self._pending, None
        if pending is None:
            return self.reasons
        which = range(len(self.places))
        try:
            self._take(pending.result(), which)
        except Exception as error:
            logger.exception("the library has not computed masks")
            for i in which:
                if len(which) > 1:
                    self._compute_alone(i)
                else:
                    self.fail(self.places[i], f"{type(error).__name__}: {error}")
        return self.reasons

    def fail(self, place: int, reason: str) -> None:
        """Note why the grammar of a row has no mask."""
        self.reasons[place] = f"the grammar cannot go on: {reason}"

    def _compute_alone(self, i: int) -> None:
        """Compute one of several masks, so that its row alone may fail."""
        assert self._library is not None, "it was begun"
        state, place = self.states[i], self.places[i]
        try:
            filled = self._library.fill([state.constraint], [()], [place], self.words).result()
            self._take(filled, [i])
        except Exception as error:
            logger.exception("a mask cannot be computed")
            self.fail(place, f"{type(error).__name__}: {error}")

    def _take(self, filled: Filled, which: Sequence[int]) -> None:
        """Take in what was found out of some of the masks."""
        for k in np.flatnonzero(filled.is_accepting).tolist():
            i = which[k]
            set_bits(self.words[self.places[i]], self.states[i].spec.end_token_ids)
        for k, reason in filled.errors.items():
            self.fail(self.places[which[k]], reason)


class PendingMasks:
    """Masks of which a library may still compute those of grammars. Until `result` is called, their
    rows must not change."""

    def __init__(
        self,
        owner: RowMasks,
        rows: Sequence[MaskedRow],
        states: Sequence[_State],
        token_ids: Int32s,
        words: Words,
    ) -> None:
        """See RowMasks.start, which makes them."""
        self.rows = rows
        self._owner = owner
        self._states = states
        self._token_ids = token_ids
        self._filling = _Filling(words)
        # Places of masks that were started ahead, and where they are.
        self._ahead: dict[_Filling, list[tuple[int, int]]] = {}
        # Places of those that may be late: void ones, and what is compiled or computed apart.
        self._apart: list[int] = []
        fresh = []
        for place, (row, state) in enumerate(zip(rows, states, strict=True)):
            if state.is_void:
                self._apart.append(place)
            elif state.ahead is not None and state.num_accepted == row.num_output_tokens:
                filling, there = state.ahead
                if filling.is_apart:
                    self._apart.append(place)
                else:
                    self._ahead.setdefault(filling, []).append((place, there))
            else:
                fresh.append(place)
        self._apart += owner.fill(self._filling, fresh, rows, token_ids)

    @property
    def computes(self) -> bool:
        """Whether a library may still compute some of them."""
        return self._filling.computes or bool(self._ahead or self._apart)

    @property
    def follow_grammars(self) -> bool:
        """Whether some of them do, which may be late. All ranks agree on it."""
        return any(state.compiled is not None for state in self._states)

    def late(self) -> list[int]:
        """Indices of the rows whose masks nobody should wait for."""
        self._begin_compiled()
        states = self._states
        late = [place for place in self._apart if states[place].is_void or states[place].is_late]
        aheads = [states[place].ahead for place in late if not states[place].is_void]
        for filling in {ahead[0] for ahead in aheads if ahead is not None}:
            filling.note_late()
        return late

    def wait_for_one(self) -> None:
        """Return when one of the masks is there that may be late. Those of void rows never are."""
        states = [self._states[place] for place in self._apart]
        states = [state for state in states if not state.is_void]
        while states and all(state.is_late for state in states):
            wait([state.awaited for state in states], return_when=FIRST_COMPLETED)
            self._begin_compiled()

    def result(self, late: Collection[int] = ()) -> Masks:
        """Wait for the masks, once.

        Args:
            late: indices of the rows whose masks are not waited for. They may draw anything, and
                that is void: the rows take no further part until their last token is rewritten.
        """
        late = set(late)
        words, reasons = self._filling.words, self._filling.finish()
        for earlier, pairs in self._ahead.items():
            known = earlier.finish()
            places, there = zip(*pairs, strict=True)
            words[list(places)] = earlier.words[list(there)]
            reasons |= {place: known[there] for place, there in pairs if there in known}
        for place in self._apart:
            if place in late:
                self._owner.put_off(self.rows[place].row)
            else:
                reasons |= self._take_apart(place)
        if late:
            words[list(late)] = self._owner.all_tokens
        return self._owner.finish(self.rows, self._states, self._token_ids, words, reasons, late)

    def _take_apart(self, place: int) -> dict[int, str]:
        """Take a mask that was computed apart. Returns why it cannot be, by place."""
        state = self._states[place]
        while state.is_late:  # where another rank has decided that it is not
            wait([state.awaited])
        self._begin_compiled()
        while state.is_late:
            wait([state.awaited])
        assert state.ahead is not None, "it was begun"
        filling, there = state.ahead
        known = filling.finish()
        self._filling.words[place] = filling.words[there]
        return {place: known[there]} if there in known else {}

    def _begin_compiled(self) -> None:
        """Start to fill masks of grammars that have been compiled meanwhile."""
        for place in self._apart:
            state = self._states[place]
            if state.constraint is None and state.ahead is None and not state.is_void:
                self._owner.fill_by_itself(self.rows[place], self._token_ids)


class RowMasks:
    """Owns the states of all rows that may need masks."""

    def __init__(
        self, num_rows: int, vocab_size: int, library: Callable[[], ConstraintLibrary]
    ) -> None:
        """`library` is called when the first grammar comes."""
        self._vocab_size = vocab_size
        self._num_words = num_words(vocab_size)
        self.all_tokens = words_of(range(vocab_size), vocab_size)
        self._make_library = library
        self._library: ConstraintLibrary | None = None
        self._compiling: ThreadPoolExecutor | None = None
        self._states: list[_State | None] = [None] * num_rows
        self._late: dict[int, _State] = {}  # rows that wait for their masks

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
        state = self._states[row]
        if state is not None and self._late.pop(row, None) is not None:
            state.give_up()
        self._states[row] = None

    def copy(self, child: int, parent: int) -> None:
        """`child` becomes a copy of `parent`."""
        state = self._states[parent]
        if state is None:
            self._states[child] = None
            return
        copy = _State(state.spec, state.allowed, state.compiled, state.has_rules)
        self._states[child] = copy
        if state.constraint is not None and not state.is_late:  # else the copy makes its own
            state.settle()
            copy.constraint, copy.num_accepted = state.constraint.fork(), state.num_accepted

    def rewind(self, row: int, num_output: int) -> None:
        """Only so many output tokens are still there; others may come after them."""
        state = self._states[row]
        if state is None:
            return
        state.is_void = False
        if state.constraint is not None and state.num_accepted > num_output:
            state.settle()
        if state.constraint is not None and state.num_accepted > num_output:
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
            rows: whose tokens so far are known, unless they are void.
            token_ids: [num_rows, ...]: those tokens, by row.
            words: [len(rows), num_words]: memory for the masks, contiguous.
        """
        return PendingMasks(self, rows, [self._state(row) for row in rows], token_ids, words)

    def start_ahead(self, rows: Sequence[MaskedRow], token_ids: Int32s) -> None:
        """Start to fill masks of grammars before it is known which rows need one next: `start`
        takes those that it can use. See there."""
        states = map(self._state, rows)
        begun = [
            row
            for row, state in zip(rows, states, strict=True)
            if state.constraint is not None and not state.is_void
        ]
        filling = _Filling(np.empty((len(begun), self._num_words), np.int32))
        self.fill(filling, range(len(begun)), begun, token_ids)
        for place, state in zip(filling.places, filling.states, strict=True):
            state.ahead = filling, place

    def waiting(self) -> set[int]:
        """Rows whose masks were late when a token was to be drawn, and still are."""
        for row in [row for row, state in self._late.items() if not state.is_late]:
            del self._late[row]
        return set(self._late)

    # What PendingMasks needs.

    def fill(
        self,
        filling: _Filling,
        places: Sequence[int],
        rows: Sequence[MaskedRow],
        token_ids: Int32s,
    ) -> list[int]:
        """Start to fill the masks of those of the rows that are at `places`. Returns the places of
        those that are compiled first, or computed apart, as their `ahead`."""
        picked = [rows[place] for place in places]
        ends = [row.row for row in picked], [row.num_tokens - 1 for row in picked]
        lasts: list[int] = token_ids[ends].tolist()
        new_ids: list[Sequence[int]] = []
        apart: list[int] = []
        trial: list[tuple[_State, Sequence[int]]] = []  # of new constraints
        for place, row, last in zip(places, picked, lasts, strict=True):
            state = self._state(row)
            if state.ahead is not None:
                state.settle()
            num_output = row.num_output_tokens
            new: Sequence[int] = ()
            if state.constraint is not None and num_output == state.num_accepted + 1:
                if last in state.spec.end_token_ids:  # it is computed once too often
                    filling.words[place] = self.all_tokens
                    continue
                new = (last,)
                state.num_accepted = num_output
            elif state.constraint is None or num_output != state.num_accepted:
                if state.compiled is None:
                    filling.words[place] = self.all_tokens
                    continue
                if state.constraint is None and not state.compiled.done():
                    apart.append(place)
                    continue
                try:
                    new = self._new_tokens(state, row, token_ids[row.row])
                except Exception as error:  # its checks were passed elsewhere
                    if not isinstance(error, OctavoError):
                        logger.exception("a grammar cannot be compiled")
                    filling.fail(place, str(error) or type(error).__name__)
                if state.constraint is None or _has_ended(state, new, num_output):
                    filling.words[place] = self.all_tokens
                    continue
                state.num_accepted = num_output
            assert state.constraint is not None, "it was compiled"
            company = state.constraint.company
            if company != "quick":
                if company == "none":
                    self._fill_apart([state], [new])
                else:
                    trial.append((state, new))
                apart.append(place)
                continue
            filling.places.append(place)
            filling.states.append(state)
            new_ids.append(new)
        if trial:
            self._fill_apart(*zip(*trial, strict=True))
        if filling.places:
            filling.begin(self._used(), new_ids)
        return apart

    def fill_by_itself(self, row: MaskedRow, token_ids: Int32s) -> None:
        """Start to fill a row's mask ahead, if its grammar was compiled."""
        filling = _Filling(np.empty((1, self._num_words), np.int32))
        if not self.fill(filling, [0], [row], token_ids):
            self._state(row).ahead = filling, 0

    def put_off(self, row: int) -> None:
        """No token is drawn for a row, because its mask is late."""
        state = self._states[row]
        assert state is not None, f"row {row} has no mask"
        state.is_void = True
        self._late[row] = state

    def _fill_apart(self, states: Sequence[_State], new_ids: Sequence[Sequence[int]]) -> None:
        """Start to fill masks that nobody else should wait for."""
        filling = _Filling(np.empty((len(states), self._num_words), np.int32), is_apart=True)
        filling.places, filling.states = list(range(len(states))), list(states)
        filling.begin(self._used(), new_ids)
        for place, state in enumerate(states):
            state.ahead = filling, place

    def _used(self) -> ConstraintLibrary:
        assert self._library is not None, "a grammar was compiled"
        return self._library

    def _state(self, row: MaskedRow) -> _State:
        state = self._states[row.row]
        assert state is not None, f"row {row.row} has no mask"
        return state

    def _new_tokens(self, state: _State, row: MaskedRow, text: Int32s) -> Sequence[int]:
        """The tokens that a row's constraint, which is made here, has yet to accept."""
        num_prompt = row.num_prompt_tokens
        first = num_prompt + state.num_accepted
        if state.constraint is None:
            assert state.compiled is not None, "the row has a grammar"
            state.constraint = state.compiled.result().fork()
            first = num_prompt - state.spec.num_begun
        new: list[int] = text[first : row.num_tokens].tolist()
        return new

    def finish(
        self,
        rows: Sequence[MaskedRow],
        states: Sequence[_State],
        token_ids: Int32s,
        words: Words,
        reasons: dict[int, str],
        late: Collection[int],
    ) -> Masks:
        """The masks, once those of grammars are filled, but for those that are `late`; `reasons`:
        why some cannot be."""
        for place in [place for place, state in enumerate(states) if state.has_rules]:
            if place in late:
                continue
            row = rows[place]
            text = token_ids[row.row, : row.num_tokens]
            spec, allowed = states[place].spec, states[place].allowed
            apply_rules(words[place], spec, allowed, text, row.num_prompt_tokens)
        # Nearly every mask has a token in its first words: the others are looked at as a whole.
        suspects = np.flatnonzero(~words[:, :FIRST_WORDS].any(axis=1))
        for place in suspects[~words[suspects].any(axis=1)].tolist():
            num_output = rows[place].num_tokens - rows[place].num_prompt_tokens
            reasons.setdefault(place, nothing_left(states[place].spec, num_output))
        words[list(reasons)] = self.all_tokens
        errors: dict[int, RequestFailed] = {
            rows[place].logits_row: NoTokenLeft(reason) for place, reason in reasons.items()
        }
        return Masks(words, errors)


def _has_ended(state: _State, new_ids: Sequence[int], num_output: int) -> bool:
    """Whether an output of `num_output` tokens, of which some of `new_ids` are the last that its
    constraint does not know, is computed once too often. What it began with does not end it."""
    num_begun = len(new_ids) - (num_output - state.num_accepted)
    return any(token_id in new_ids[num_begun:] for token_id in state.spec.end_token_ids)
