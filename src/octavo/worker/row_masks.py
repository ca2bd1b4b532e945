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
    MAX_NEW_TOKENS,
    ConstraintLibrary,
    Filled,
    Filling,
    TokenConstraint,
    Words,
    has_bit,
    num_words,
    words_of,
)
from octavo.worker.mask_rules import (
    BadWords,
    apply_rules,
    bad_words_of,
    has_first_masks,
    has_mask,
    nothing_left,
)

logger = logging.getLogger(__name__)

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

COMPILING_THREADS = 2
FIRST_WORDS = 64  # of a mask
NO_CONSTRAINT = -(1 << 40)  # less than any number of tokens


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows whose next tokens need masks: int64 [num_masked_rows] each."""

    logits_rows: Int64s
    rows: Int64s
    num_tokens: Int64s  # prompt and output so far
    num_prompt_tokens: Int64s

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, places: Int64s | Sequence[int]) -> MaskedRows:
        """Some of them."""
        index = np.asarray(places, np.int64)
        return MaskedRows(
            self.logits_rows[index],
            self.rows[index],
            self.num_tokens[index],
            self.num_prompt_tokens[index],
        )

    @property
    def num_output_tokens(self) -> Int64s:
        return self.num_tokens - self.num_prompt_tokens


class Masks(NamedTuple):
    """The masks of some rows, and why some rows have none; those may draw anything."""

    words: Words  # [num_masked_rows, num_words]
    errors: dict[int, RequestFailed]  # by index in the logits


@dataclass(slots=True)
class _State:
    """What a row's masks are made of, besides what RowMasks has of all rows in arrays."""

    spec: SamplingSpec
    allowed: Words | None
    ends: Words  # of the end tokens, of which a client may give most of the vocabulary
    bad_words: BadWords
    compiled: Future[TokenConstraint] | None  # of the grammar, before the first token
    constraint: TokenConstraint | None = None  # behind `num_begun` and the tokens accepted since
    # The mask of the constraint as it is, if it was started apart from others, and its place there.
    apart: tuple[_Filling, int] | None = None

    @property
    def is_late(self) -> bool:
        """Whether its grammar is being compiled, or its mask computed, apart from those of others.
        Masks that were started ahead take no longer than those that are started now."""
        if self.compiled is None:
            return False
        if self.constraint is None:
            return not self.compiled.done()
        return self.apart is not None and self.apart[0].is_apart and not self.apart[0].is_done

    @property
    def awaited(self) -> Future[Any]:
        """What is done when it may not be late any more."""
        if self.constraint is None or self.apart is None:
            assert self.compiled is not None, "it has a grammar"
            return self.compiled
        return self.apart[0].computed

    def give_up(self) -> None:
        """Nobody needs the mask any more if it is late."""
        if self.apart is not None and self.is_late and len(self.apart[0].states) == 1:
            self.apart[0].computed.cancel()


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
            self.words[self.places[i]] |= self.states[i].ends
        for k, reason in filled.errors.items():
            self.fail(self.places[which[k]], reason)


class PendingMasks:
    """Masks of which a library may still compute those of grammars. Until `result` is called, their
    rows must not change."""

    def __init__(self, owner: RowMasks, rows: MaskedRows, token_ids: Int32s, words: Words) -> None:
        """See RowMasks.start, which makes them."""
        self.rows = rows
        self._owner = owner
        self._states = owner.states(rows)
        self._token_ids = token_ids
        self._filling = _Filling(words)
        # Masks that were started ahead: which they are here, and where they are there.
        self._ahead, there = owner.ahead(rows)
        self._from_ahead = np.flatnonzero(there >= 0)
        self._there = there[self._from_ahead]
        # Places of those that may be late: void ones, and what is compiled or computed apart.
        is_apart = owner.may_be_apart(rows)
        for place in np.flatnonzero(is_apart).tolist():
            is_apart[place] = self._is_void(place) or self._states[place].apart is not None
        self._apart: list[int] = np.flatnonzero(is_apart).tolist()
        fresh = np.flatnonzero((there < 0) & ~is_apart)
        self._apart += owner.fill(self._filling, fresh, rows, token_ids)

    @property
    def computes(self) -> bool:
        """Whether a library may still compute some of them."""
        return self._filling.computes or bool(len(self._from_ahead) or self._apart)

    @property
    def follow_grammars(self) -> bool:
        """Whether some of them do, which may be late. All ranks agree on it."""
        return any(state.compiled is not None for state in self._states)

    def late(self) -> list[int]:
        """Indices of the rows whose masks nobody should wait for."""
        self._begin_compiled()
        late, aparts = list[int](), set[_Filling]()
        for place in self._apart:
            if self._is_void(place):
                late.append(place)
            elif self._is_awaited(place):
                late.append(place)
                apart = self._states[place].apart
                if apart is not None:
                    aparts.add(apart[0])
        for filling in aparts:
            filling.note_late()
        return late

    def wait_for_one(self) -> None:
        """Return when one of the masks is there that may be late. Those of void rows never are."""
        places = [place for place in self._apart if not self._is_void(place)]
        while places and all(map(self._is_awaited, places)):
            awaited = [self._states[place].awaited for place in places]
            wait(awaited, return_when=FIRST_COMPLETED)
            self._begin_compiled()

    def result(self, late: Collection[int] = ()) -> Masks:
        """Wait for the masks, once.

        Args:
            late: indices of the rows whose masks are not waited for. They may draw anything, and
                that is void: the rows take no further part until their last token is rewritten.
        """
        late = set(late)
        words, reasons = self._filling.words, self._filling.finish()
        if len(self._from_ahead):
            assert self._ahead is not None, "masks were started there"
            known = self._ahead.finish()
            words[self._from_ahead] = self._ahead.words[self._there]
            if known:
                pairs = zip(self._from_ahead.tolist(), self._there.tolist(), strict=True)
                reasons |= {place: known[there] for place, there in pairs if there in known}
        for place in self._apart:
            if place in late:
                self._owner.put_off(int(self.rows.rows[place]))
            else:
                reasons |= self._take_apart(place)
        if late:
            words[list(late)] = self._owner.all_tokens
        return self._owner.finish(self.rows, self._states, self._token_ids, words, reasons, late)

    def _take_apart(self, place: int) -> dict[int, str]:
        """Take a mask that was computed apart. Returns why it cannot be, by place."""
        state = self._states[place]
        while self._is_awaited(place):  # where another rank has decided that it is not late
            wait([state.awaited])
            self._begin_compiled()
        assert state.apart is not None, "it was begun"
        filling, there = state.apart
        known = filling.finish()
        self._filling.words[place] = filling.words[there]
        return {place: known[there]} if there in known else {}

    def _begin_compiled(self) -> None:
        """Start to fill masks of grammars that have been compiled meanwhile."""
        for place in self._apart:
            state = self._states[place]
            if state.constraint is None and state.apart is None and not self._is_void(place):
                self._owner.fill_by_itself(self.rows.at([place]), self._token_ids)

    def _is_awaited(self, place: int) -> bool:
        """Whether a mask that may be late is not there. That of a grammar which has been compiled
        since `_begin_compiled` is not even begun."""
        state = self._states[place]
        return state.apart is None or state.is_late

    def _is_void(self, place: int) -> bool:
        return self._owner.is_void(int(self.rows.rows[place]))


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
        # What every step asks of all its rows.
        self._num_accepted = np.full(num_rows, NO_CONSTRAINT)  # output tokens
        self._is_void = np.zeros(num_rows, np.bool_)  # its last token was not drawn: it was late
        self._has_rules = np.zeros(num_rows, np.bool_)  # its mask is not its grammar's alone
        # Masks that were started ahead; each is that of a row's constraint as it is, or -1.
        self._ahead: _Filling | None = None
        self._ahead_places = np.full(num_rows, -1)

    def prepare(self) -> None:
        """Let the library read the vocabulary now, in a thread; whether it can is said later."""
        library, threads = self._loaded()
        threads.submit(library.load)

    # ---------------------------------------------------------------- rows

    def open(self, row: int, spec: SamplingSpec) -> None:
        """A row begins; its grammar is compiled meanwhile."""
        if not (has_mask(spec) or has_first_masks(spec)):
            self._reset(row, None, False)
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
        bad_words = bad_words_of(spec.bad_words, spec.bad_sequences, self._vocab_size)
        ends = words_of(spec.end_token_ids, self._vocab_size)
        self._reset(row, _State(spec, allowed, ends, bad_words, compiled), has_rules)

    def _reset(self, row: int, state: _State | None, has_rules: bool) -> None:
        self._states[row] = state
        self._num_accepted[row] = NO_CONSTRAINT
        self._ahead_places[row] = -1
        self._is_void[row], self._has_rules[row] = False, has_rules

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
            self._reset(child, None, False)
            return
        copy = _State(state.spec, state.allowed, state.ends, state.bad_words, state.compiled)
        self._reset(child, copy, bool(self._has_rules[parent]))
        if state.constraint is not None and not state.is_late:  # else the copy makes its own
            self._settle(parent, state)
            copy.constraint = state.constraint.fork()
            self._num_accepted[child] = self._num_accepted[parent]

    def rewind(self, row: int, num_output: int) -> None:
        """Only so many output tokens are still there; others may come after them."""
        state = self._states[row]
        if state is None:
            return
        self._is_void[row] = False
        if self._num_accepted[row] > num_output:
            self._settle(row, state)
        if self._num_accepted[row] > num_output:
            assert state.constraint is not None, "it has accepted tokens"
            state.constraint.rollback(int(self._num_accepted[row]) - num_output)
            self._num_accepted[row] = num_output

    def _settle(self, row: int, state: _State) -> None:
        """Do without the mask that was started, because the constraint changes: wait for it, or
        where that may take long, have the constraint made again."""
        if self._ahead_places[row] >= 0:
            self._settle_ahead(np.array([row]))
        if state.apart is None:
            return
        if state.is_late:
            state.give_up()
            state.constraint, self._num_accepted[row] = None, NO_CONSTRAINT
        else:
            state.apart[0].finish()
        state.apart = None

    def _settle_ahead(self, rows: Int64s) -> None:
        """Wait for masks that were started ahead, and do without those of some rows."""
        if (self._ahead_places[rows] >= 0).any():
            assert self._ahead is not None, "masks were started there"
            self._ahead.finish()
            self._ahead_places[rows] = -1

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

    def has_compiled(self, rows: MaskedRows) -> bool:
        """Whether `start` has no grammars to wait for."""
        for row in rows.rows[self._num_accepted[rows.rows] == NO_CONSTRAINT].tolist():
            state = self._state(row)
            if state.compiled is not None and not state.compiled.done():
                return False
        return True

    def start(self, rows: MaskedRows, token_ids: Int32s, words: Words) -> PendingMasks:
        """Start to fill the masks of the next tokens of rows.

        Args:
            rows: whose tokens so far are known, unless they are void.
            token_ids: [num_rows, ...]: those tokens, by row.
            words: [len(rows), num_words]: memory for the masks, contiguous.
        """
        return PendingMasks(self, rows, token_ids, words)

    def start_ahead(self, rows: MaskedRows, token_ids: Int32s) -> None:
        """Start to fill masks of grammars before it is known which rows need one next: `start`
        takes those that it can use. See there. Those that were started before are forgotten."""
        self._settle_ahead(np.arange(len(self._states)))
        has_begun = (self._num_accepted[rows.rows] >= 0) & ~self._is_void[rows.rows]
        begun = rows.at(np.flatnonzero(has_begun))
        filling = _Filling(np.empty((len(begun), self._num_words), np.int32))
        self.fill(filling, np.arange(len(begun)), begun, token_ids)
        self._ahead = filling
        self._ahead_places[begun.rows[filling.places]] = filling.places

    def waiting(self) -> set[int]:
        """Rows whose masks were late when a token was to be drawn, and still are."""
        for row in [row for row, state in self._late.items() if not state.is_late]:
            del self._late[row]
        return set(self._late)

    # What PendingMasks needs.

    def states(self, rows: MaskedRows) -> list[_State]:
        return list(map(self._state, rows.rows.tolist()))

    def is_void(self, row: int) -> bool:
        return bool(self._is_void[row])

    def ahead(self, rows: MaskedRows) -> tuple[_Filling | None, Int64s]:
        """The masks that were started ahead, and where those of the rows are, or -1."""
        is_other = self._num_accepted[rows.rows] != rows.num_output_tokens
        is_other |= self._is_void[rows.rows]
        return self._ahead, np.where(is_other, -1, self._ahead_places[rows.rows])

    def may_be_apart(self, rows: MaskedRows) -> NDArray[np.bool_]:
        """Which rows are void, or may have a mask, or have it soon, that was started apart."""
        is_same = self._num_accepted[rows.rows] == rows.num_output_tokens
        may_be: NDArray[np.bool_] = is_same & (self._ahead_places[rows.rows] < 0)
        return may_be | self._is_void[rows.rows]

    def fill(
        self, filling: _Filling, places: Int64s, rows: MaskedRows, token_ids: Int32s
    ) -> list[int]:
        """Start to fill the masks of those of the rows that are at `places`. Returns the places of
        those that are compiled first, or computed apart, as their `apart`."""
        if not len(places):  # as where all were started ahead
            return []
        picked = rows.at(places)
        lasts = token_ids[picked.rows, picked.num_tokens - 1].tolist()
        num_output = picked.num_output_tokens
        self._settle_ahead(picked.rows)
        follows = self._num_accepted[picked.rows] + 1 == num_output
        states = self.states(picked)
        new_ids: list[Sequence[int]] = []
        begun: list[int] = []  # of those picked
        apart: list[int] = []
        trial: list[tuple[_State, Sequence[int]]] = []  # of new constraints
        columns = places.tolist(), states, lasts, follows.tolist()
        for i, (place, state, last, is_next) in enumerate(zip(*columns, strict=True)):
            new: Sequence[int] | None
            if is_next and state.apart is None and not has_bit(state.ends, last):
                new = (last,)
            else:
                row = int(picked.rows[i])
                self._settle(row, state)
                if state.constraint is None and state.is_late:
                    apart.append(place)
                    continue
                try:
                    new = self._new_tokens(state, picked.at([i]), token_ids[row])
                except Exception as error:  # its checks were passed elsewhere
                    if not isinstance(error, OctavoError):
                        logger.exception("a grammar cannot be compiled")
                    filling.fail(place, str(error) or type(error).__name__)
                    new = None
                if new is None:
                    filling.words[place] = self.all_tokens
                    continue
            assert state.constraint is not None, "it was compiled"
            begun.append(i)
            company = "none" if len(new) > MAX_NEW_TOKENS else state.constraint.company
            if company == "quick":
                filling.places.append(place)
                filling.states.append(state)
                new_ids.append(new)
                continue
            if company == "none":
                self._fill_apart([state], [new])
            else:
                trial.append((state, new))
            apart.append(place)
        self._num_accepted[picked.rows[begun]] = num_output[begun]
        if trial:
            self._fill_apart(*zip(*trial, strict=True))
        if filling.places:
            filling.begin(self._used(), new_ids)
        return apart

    def fill_by_itself(self, row: MaskedRows, token_ids: Int32s) -> None:
        """Start to fill the mask of one row apart, if its grammar was compiled."""
        filling = _Filling(np.empty((1, self._num_words), np.int32))
        if not self.fill(filling, np.zeros(1, np.int64), row, token_ids):
            self._state(int(row.rows[0])).apart = filling, 0

    def put_off(self, row: int) -> None:
        """No token is drawn for a row, because its mask is late."""
        state = self._states[row]
        assert state is not None, f"row {row} has no mask"
        self._is_void[row] = True
        self._late[row] = state

    def _fill_apart(self, states: Sequence[_State], new_ids: Sequence[Sequence[int]]) -> None:
        """Start to fill masks that nobody else should wait for."""
        filling = _Filling(np.empty((len(states), self._num_words), np.int32), is_apart=True)
        filling.places, filling.states = list(range(len(states))), list(states)
        filling.begin(self._used(), new_ids)
        for place, state in enumerate(states):
            state.apart = filling, place

    def _used(self) -> ConstraintLibrary:
        assert self._library is not None, "a grammar was compiled"
        return self._library

    def _state(self, row: int) -> _State:
        state = self._states[row]
        assert state is not None, f"row {row} has no mask"
        return state

    def _new_tokens(self, state: _State, row: MaskedRows, text: Int32s) -> Sequence[int] | None:
        """The tokens that a row's constraint, which is made here if there is none, has yet to
        accept; None if the row has no grammar, or has ended, being computed once too often."""
        if state.compiled is None:
            return None
        num_accepted = int(self._num_accepted[row.rows[0]])
        first = num_prompt = int(row.num_prompt_tokens[0])
        constraint = state.constraint
        if constraint is None:
            constraint = state.compiled.result().fork()
            first -= state.spec.num_begun
        else:
            first += num_accepted
        new: list[int] = text[first : int(row.num_tokens[0])].tolist()
        output = new[max(0, num_prompt - first) :]  # what it began with does not end it
        if any(has_bit(state.ends, token_id) for token_id in output):
            return None
        state.constraint = constraint
        return new

    def finish(
        self,
        rows: MaskedRows,
        states: Sequence[_State],
        token_ids: Int32s,
        words: Words,
        reasons: dict[int, str],
        late: Collection[int],
    ) -> Masks:
        """The masks, once those of grammars are filled, but for those that are `late`; `reasons`:
        why some cannot be."""
        for place in np.flatnonzero(self._has_rules[rows.rows]).tolist():
            if place in late:
                continue
            num_prompt = int(rows.num_prompt_tokens[place])
            text = token_ids[rows.rows[place], : rows.num_tokens[place]]
            state = states[place]
            masks = state.allowed, state.ends, state.bad_words
            apply_rules(words[place], state.spec, *masks, text, num_prompt)
        # Nearly every mask has a token in its first words: the others are looked at as a whole.
        suspects = np.flatnonzero(~words[:, :FIRST_WORDS].any(axis=1))
        for place in suspects[~words[suspects].any(axis=1)].tolist():
            num_output = int(rows.num_output_tokens[place])
            reasons.setdefault(place, nothing_left(states[place].spec, num_output))
        words[list(reasons)] = self.all_tokens
        errors: dict[int, RequestFailed] = {
            int(rows.logits_rows[place]): NoTokenLeft(reason) for place, reason in reasons.items()
        }
        return Masks(words, errors)
