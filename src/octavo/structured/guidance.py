"""Grammars enforced by llguidance, which is loaded when the first one is asked for.

Its limits count work, not time, so all processes refuse the same grammars, and ranks that compute
the same rows compute the same masks.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event, Lock
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.step import Grammar
from octavo.errors import InvalidRequest
from octavo.host_memory import num_cpus
from octavo.model_files import open_files
from octavo.structured.constraint import (
    MAX_NEW_TOKENS,
    WORD_BITS,
    Company,
    Filled,
    Words,
    num_words,
)
from octavo.structured.schemas import (
    leave_lost_numbers_aside,
    leave_patterns_aside,
    move_excluded_bounds,
    move_large_bounds,
    patterns_of,
    place_of,
    refusal,
    refusal_of_numbers,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_THREADS = 32
MAX_COMPILED = 256  # grammars that stay compiled
# Copies of a matcher share a lock, which each holds while it computes a mask. Several matchers of
# one grammar let several threads compute masks for it; each is compiled, if that is quick.
MATCHERS_PER_THREAD = 4
MAX_MATCHERS = 64  # of a grammar; some hundred KB each, as a rule
MAX_REPEATED_SECONDS = 0.02
# A mask that takes longer is slow, and those of its matcher and of all copies are computed apart
# from others, until so many in a row were not; each time that they turn out slow again, twice as
# many must be.
SLOW_SECONDS = 4e-3
NUM_TRIED = 256  # masks of a grammar that are computed beside those of other new ones
NUM_QUICK, MAX_NUM_QUICK = 8, 1024
MAX_APART = 4  # threads that compute slow masks, at most
UNWRITTEN = -0x21524111  # the first word of a mask that was not computed yet, and of hardly another
# White space between the parts of a JSON text: a space, or a new line and what it is indented by.
# Some models would write it for ever.
WHITE_SPACE = r" |\r?\n[ \t]{0,32}"
# Sets of tokens that llguidance allows as a whole: white space, and what JSON strings consist of,
# by length. Its own sets know lengths of 10 and 30 only, so that in a string with a `maxLength`, it
# looks at more tokens one by one.
_STRING_LENGTHS = (1, 2, 3, 4, 6, 8, 10, 14, 20, 30)
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRING}{{1,{length}}}" for length in _STRING_LENGTHS),
    f"{_IN_STRING}+",
]
# Ways to go on that the library follows at a place of the output: each alternative is one, and each
# optional property of an object four. It accepts a token in 10 ms where there are so many.
MAX_WAYS = 4_500
# Limits are met only where they apply: a check writes the first tokens of an output that the
# grammar allows, not counting those that it forces.
NUM_TRIED_TOKENS = 16
MAX_FORCED_TOKENS = 1_024  # that are written on the way
# States of the lexer of a matcher and its copies, which share it: they are made as outputs need
# them, up to a KB each, and never given back. Beyond so many, no copy can go on, and it is given a
# matcher of its own, with room for more.
SHARED_STATES, MAX_STATES = 50_000, 250_000
# What a tried output would rather go on with: it comes to the parts of objects and lists early.
_OPENING = (b"{", b"[", b'"', b"}", b"]")
# What is said of a limit. Other errors say that no token is left, which may be so here only.
_ABOUT_LIMITS = re.compile("max is|limit|too (many|complex)", re.IGNORECASE)
_OUT_OF_STATES = "too many states"
MAX_MESSAGE = 400  # characters of the library's own words


@dataclass(slots=True)
class Trial:
    """What is known of a grammar."""

    num_masks: int = 0  # since it was compiled, at most NUM_TRIED


class Pace:
    """How long the masks take of a matcher and its copies, which share a lock: no two are computed
    at the same time."""

    __slots__ = ("_lock", "_num_apart", "_num_needed", "_num_quick", "is_slow", "number", "trial")

    def __init__(self, number: int) -> None:
        """`number`: different for each."""
        self.number = number
        self.trial = Trial()  # the same for all matchers of a grammar
        self.is_slow = False
        self._lock = Lock()
        self._num_apart = 0  # masks under way that are computed apart from others
        self._num_quick = 0  # of those before them, the last ones
        self._num_needed = NUM_QUICK // 2

    def note_slow(self) -> None:
        """A mask took long."""
        with self._lock:
            if not self.is_slow:
                self._num_needed = min(2 * self._num_needed, MAX_NUM_QUICK)
            self.is_slow, self._num_quick = True, 0

    def begin_apart(self) -> None:
        """A mask is to be computed apart from others."""
        with self._lock:
            self._num_apart += 1

    def end_apart(self, seconds: float) -> None:
        """It was computed, in so many seconds of a CPU's time."""
        with self._lock:
            self._num_apart -= 1
            self._num_quick = self._num_quick + 1 if seconds < SLOW_SECONDS else 0
            if self._num_quick >= self._num_needed and not self._num_apart:
                self.is_slow = False


class GuidanceConstraint:
    """See TokenConstraint."""

    __slots__ = ("grammar", "matcher", "pace", "token_ids")

    def __init__(
        self, grammar: Grammar, matcher: LLMatcher, pace: Pace, token_ids: Sequence[int] = ()
    ) -> None:
        """
        Args:
            pace: the same for copies of one matcher.
            token_ids: what was accepted.
        """
        self.grammar = grammar
        self.matcher = matcher
        self.pace = pace
        self.token_ids = list(token_ids)

    @property
    def company(self) -> Company:
        if self.pace.is_slow:
            return "none"
        return "new" if self.pace.trial.num_masks < NUM_TRIED else "quick"

    def accept(self, token_ids: Sequence[int]) -> str:
        self.token_ids += token_ids
        for i, token_id in enumerate(token_ids):
            if i and i % MAX_NEW_TOKENS == 0:
                # The library limits a lexer's work from one mask to the next. A long output that
                # goes on after a preemption would exceed that if it was accepted as a whole.
                self.matcher.compute_bitmask()
            if not self.matcher.consume_token(token_id):
                return _message(self.matcher.get_error())
        return ""

    def rollback(self, num_tokens: int) -> None:
        del self.token_ids[len(self.token_ids) - num_tokens :]
        self.matcher.rollback(num_tokens)

    def fork(self) -> GuidanceConstraint:
        matcher = self.matcher.deep_copy()
        return GuidanceConstraint(self.grammar, matcher, self.pace, self.token_ids)


@dataclass(slots=True)
class GuidanceFilling:
    """See Filling."""

    computed: Future[None]
    constraints: Sequence[GuidanceConstraint]
    order: NDArray[np.int64]  # in which the library takes the constraints
    places: NDArray[np.int64]
    masks: Words  # the library's
    words: Words  # the caller's, perhaps the same
    end_ids: Sequence[int]
    vocab_size: int
    renew: Callable[[GuidanceConstraint], bool]  # see Guidance
    busy: set[int] = field(default_factory=set)  # with which constraints, at the last look

    def result(self) -> Filled:
        self._wait()
        masks, words, places = self.masks, self.words, self.places
        unsigned = masks.view(np.uint32)
        accepts = self._accepts()
        for i in np.flatnonzero(accepts).tolist():  # after an error, the mask is that of the end
            if self.renew(self.constraints[i]):
                mask = masks[places[i]]
                matcher = self.constraints[i].matcher
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                accepts = self._accepts()
        for token_id in self.end_ids:
            unsigned[places, token_id // WORD_BITS] &= ~_bit(token_id)
        if masks is not words:
            words[places] = masks[places, : words.shape[1]]
        beyond = self.vocab_size % WORD_BITS
        if beyond:
            words.view(np.uint32)[places, -1] &= np.uint32((1 << beyond) - 1)
        errors = {}
        for i in np.flatnonzero(accepts).tolist():
            matcher = self.constraints[i].matcher
            if matcher.is_error():
                errors[i] = _message(matcher.get_error())
        return Filled(accepts, errors)

    def _accepts(self) -> NDArray[np.bool_]:
        """Whether each output may end here."""
        end, masks = self.end_ids[0], self.masks.view(np.uint32)
        found: NDArray[np.bool_] = masks[self.places, end // WORD_BITS] & _bit(end) > 0
        return found

    def note_late(self) -> None:
        """See Filling.note_late. Slow are those masks that are being computed twice in a row, when
        it is looked at what was written. Nothing else relies on what was."""
        if self.constraints[0].company == "none":
            return
        now = self._being_computed()
        for i in now & self.busy:
            self.constraints[i].pace.note_slow()
        self.busy = now

    def _wait(self) -> None:
        """Wait, and note which masks are waited for."""
        while True:
            try:
                return self.computed.result(SLOW_SECONDS)
            except TimeoutError:
                self.note_late()

    def _being_computed(self) -> set[int]:
        """Constraints with whose masks the library's threads are likely to be busy: each thread
        takes neighbours, one after the other."""
        is_there = self.masks[self.places[self.order], 0] != UNWRITTEN
        began = np.concatenate([[True], is_there[:-1]])
        return set(self.order[began & ~is_there].tolist())


@dataclass(slots=True)
class _Compiled:
    """A grammar, as often as it was compiled."""

    most: int  # that are kept
    constraints: list[GuidanceConstraint] = field(default_factory=list)
    trial: Trial = field(default_factory=Trial)
    num_uses: int = 0
    seconds: float = 0.0  # that it took the last time


class Guidance:
    """Owns llguidance's form of one vocabulary, and the grammars that were used last.

    See ConstraintLibrary. Calls may come from several threads.
    """

    def __init__(
        self,
        path: Path,
        vocab_size: int,
        eos_ids: Sequence[int],
        num_threads: int = 1,
    ) -> None:
        """
        Args:
            path: of the model; its tokenizer is read when the first grammar comes.
            vocab_size: of the model, in which tokens are drawn.
            eos_ids: the model's end tokens.
            num_threads: that fill masks.
        """
        self._files = open_files(path)
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._num_threads = num_threads
        self._most_matchers = min(MATCHERS_PER_THREAD * num_threads, MAX_MATCHERS)
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._numbers = count()
        self._lock = Lock()
        self._loading = Lock()
        self._tokenizer: Any = None
        self._executor: Any = None
        self._thread: ThreadPoolExecutor | None = None  # that waits for the library's own threads
        self._new_executor: Any = None  # with threads of its own
        self._new_threads: ThreadPoolExecutor | None = None
        self._apart: list[ThreadPoolExecutor] = []  # of one thread each, for slow masks
        self._num_words = 0  # of the library's masks; the tokenizer may have more than the model
        self._end_ids: list[int] = []  # that stand for the end of the output in them

    def compile(self, grammar: Grammar) -> GuidanceConstraint:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                num = len(known.constraints)
                if num >= known.most or (num and known.seconds > MAX_REPEATED_SECONDS):
                    known.num_uses += 1
                    return known.constraints[known.num_uses % num]
        self.load(grammar.field)
        began = perf_counter()
        compiled = self._compile(grammar)
        with self._lock:
            # Only what compiles takes a place: refused grammars do not drive others out.
            known = self._compiled.setdefault(grammar, _Compiled(self._most_matchers))
            known.seconds = perf_counter() - began
            known.constraints.append(compiled)
            compiled.pace.trial = known.trial
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def check(self, grammar: Grammar, begun: Sequence[int] = ()) -> None:
        """Raises InvalidRequest if a grammar cannot be enforced, or if the tokens `begun` are not
        the beginning of an output that it allows."""
        constraint = self.compile(grammar)
        trial = constraint.fork()
        reason = self._limit_met(trial.matcher)
        if reason and self.renew(trial):
            reason = self._limit_met(trial.matcher)
        if reason:
            raise InvalidRequest(grammar.field, f"it is beyond the library's limits: {reason}")
        if not begun:
            return
        beginning = constraint.fork()
        reason = beginning.accept(begun)
        if reason and not self.renew(beginning):
            raise InvalidRequest("structured.begun", f"the grammar cannot go on: {reason}")

    def renew(self, constraint: GuidanceConstraint) -> bool:
        """Give a constraint that cannot go on a matcher that it shares with no other. False if that
        could not go on either, or if it can.

        Later outputs begin with a new one, too. There is no more than one from then on, because
        those of a grammar that needs so many states are large.
        """
        if not constraint.matcher.is_error():
            return False
        own = self._compile(constraint.grammar, is_shared=False)
        own.accept(constraint.token_ids)
        own.matcher.compute_bitmask()
        if own.matcher.is_error():
            return False
        with self._lock:
            known = self._compiled.get(constraint.grammar)
            if known is not None:
                known.constraints.clear()
                known.most = 1
        constraint.matcher, constraint.pace = own.matcher, own.pace
        return True

    def fill(
        self,
        constraints: Sequence[GuidanceConstraint],
        token_ids: Sequence[Sequence[int]],
        places: Sequence[int],
        words: Words,
    ) -> GuidanceFilling:
        """See ConstraintLibrary.fill.

        The thread does nothing but call the library, which needs no GIL. If it had to take the
        GIL again, it could wait for as long as the interpreter's switch interval (5 ms).
        """
        assert self._thread is not None, "a grammar was compiled"
        # The tokenizer may have more tokens than the model: then masks are cut.
        fits = words.shape[1] == self._num_words
        masks = words if fits else np.empty((len(words), self._num_words), np.int32)
        where = np.array(places, np.int64)
        # Each of the library's threads takes neighbours, which should not be in the way of others.
        numbers = [constraint.pace.number for constraint in constraints]
        order = np.argsort(numbers, kind="stable")
        company = constraints[0].company
        masks[where, 0] = UNWRITTEN
        if company == "none" or max(map(len, token_ids)) > MAX_NEW_TOKENS:
            assert len(constraints) == 1, "nobody waits for it"
            future = self._compute_apart(constraints[0], token_ids[0], masks[places[0]])
        else:
            for constraint, new_ids in zip(constraints, token_ids, strict=True):
                constraint.accept(new_ids)  # an error is found in the mask
            matchers = [constraint.matcher for constraint in constraints]
            for constraint in constraints if company == "new" else ():
                constraint.pace.trial.num_masks += 1
            pairs = list(
                zip(map(matchers.__getitem__, order.tolist()), where[order].tolist(), strict=True)
            )
            future = self._compute(pairs, masks, is_new=company == "new")
        return GuidanceFilling(
            *(future, constraints, order, where, masks, words),
            *(self._end_ids, self._vocab_size, self.renew),
        )

    def _compute(
        self, pairs: list[tuple[LLMatcher, int]], masks: Words, is_new: bool
    ) -> Future[None]:
        """Start to compute masks, and return when they are being computed, unless they are of new
        grammars, which others may keep waiting."""
        thread, executor = self._thread, self._executor
        if is_new:
            thread, executor = self._new_threads, self._new_executor
        assert thread is not None, "a grammar was compiled"
        has_begun = Event()

        def compute() -> None:
            has_begun.set()
            executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.strides[0], len(masks))

        future = thread.submit(compute)
        if not is_new:
            has_begun.wait()  # without the GIL, which the thread needs to begin
        return future

    def _compute_apart(
        self, constraint: GuidanceConstraint, token_ids: Sequence[int], mask: Words
    ) -> Future[None]:
        """Accept tokens and compute a mask in a thread for slow ones, always the same one for
        copies of one matcher: else one would wait for another's lock, and hold the GIL."""
        pace, matcher = constraint.pace, constraint.matcher

        def compute() -> None:
            seconds = SLOW_SECONDS
            try:
                constraint.accept(token_ids)  # one by one: others may run between two of them
                began = thread_time()
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                seconds = thread_time() - began
            finally:
                pace.end_apart(seconds)

        def skipped(future: Future[None]) -> None:
            if future.cancelled():
                pace.end_apart(SLOW_SECONDS)

        pace.begin_apart()
        future = self._apart[pace.number % len(self._apart)].submit(compute)
        future.add_done_callback(skipped)
        return future

    def shutdown(self) -> None:
        """See ConstraintLibrary.shutdown."""
        for thread in [self._thread, self._new_threads, *self._apart]:
            if thread is not None:
                thread.shutdown(cancel_futures=True)

    def load(self, field: str = "structured") -> None:
        """Read the vocabulary, which takes up to a second; nothing happens the second time.

        Raises:
            InvalidRequest: about `field`: llguidance is not installed, or the model's tokenizer
                is not one that it reads.
        """
        with self._loading:
            if self._tokenizer is not None:
                return
            try:
                from llguidance import LLExecutor, LLTokenizer
            except ImportError:
                raise InvalidRequest(
                    field, "it needs llguidance, which is not installed: pip install llguidance"
                ) from None
            source = self._files.tokenizer_source()
            if source is None:
                raise InvalidRequest(field, "the model has no tokenizer that llguidance reads")
            try:
                eos_ids = self._eos_ids or None
                tokenizer = LLTokenizer(source, eos_token=eos_ids, slices=SLICES)
                if tokenizer.vocab_size < self._vocab_size:  # the model's has padding
                    tokenizer = LLTokenizer(
                        source, n_vocab=self._vocab_size, eos_token=eos_ids, slices=SLICES
                    )
            except ValueError as error:
                raise InvalidRequest(
                    field, f"llguidance cannot read the model's tokenizer: {_message(str(error))}"
                ) from None
            self._num_words = num_words(tokenizer.vocab_size)
            self._end_ids = tokenizer.eos_tokens
            self._executor = LLExecutor(self._num_threads)
            self._thread = ThreadPoolExecutor(1, "masks")
            num_apart = max(1, min(MAX_APART, self._num_threads // 4))
            self._apart = [ThreadPoolExecutor(1, "slow masks") for _ in range(num_apart)]
            self._new_executor = LLExecutor(max(1, self._num_threads // 2))
            self._new_threads = ThreadPoolExecutor(MAX_APART, "new masks")
            self._tokenizer = tokenizer

    def _limit_met(self, matcher: LLMatcher) -> str:
        """What the library says of a limit that the first tokens of an output meet; "" if none."""
        tokenizer = self._tokenizer
        opening = [ids[0] for ids in map(tokenizer.tokenize_bytes, _OPENING) if len(ids) == 1]
        num_forced = 0
        for _ in range(NUM_TRIED_TOKENS):
            forced = matcher.compute_ff_tokens()
            num_forced += len(forced)
            if num_forced > MAX_FORCED_TOKENS or matcher.is_stopped():
                break
            matcher.consume_tokens(forced)
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed[tokenizer.eos_tokens] = 0
            token_id = next((each for each in opening if allowed[each]), int(allowed.argmax()))
            if matcher.is_stopped() or not allowed[token_id]:
                break
            matcher.consume_token(token_id)
        message = _message(matcher.get_error())
        return message if _ABOUT_LIMITS.search(message) else ""

    def _compile(self, grammar: Grammar, is_shared: bool = True) -> GuidanceConstraint:
        """is_shared: by outputs, so that it is to have few states, if an output can begin so."""
        schema: Any = None
        parts = [["grammar", grammar.kind, grammar.source]]
        if grammar.kind == "parts":
            parts = json.loads(grammar.source)
        for _, kind, source in parts:
            if kind in ("json_schema", "lenient_schema"):
                schema = json.loads(source)
                reason = refusal(schema)
                if reason is None and kind == "json_schema":
                    reason = refusal_of_numbers(schema)
                if reason is not None:
                    raise InvalidRequest(grammar.field, reason)
        matcher = self._matcher(parts, is_shared)
        if matcher.is_error() and self._leave_patterns_aside(parts):
            matcher = self._matcher(parts, is_shared)
        if matcher.is_error():
            message = _message(matcher.get_error())
            # Of several schemas, which is meant is not known.
            place = "" if schema is None or len(parts) > 1 else place_of(schema, message)
            raise InvalidRequest(grammar.field, f"{place}{message}")
        return GuidanceConstraint(grammar, matcher, Pace(next(self._numbers)))

    def _matcher(self, parts: Sequence[Sequence[str]], is_shared: bool) -> LLMatcher:
        """A matcher of grammars with their names and kinds, perhaps in an error. See _compile."""
        from llguidance import LLMatcher, LLParserLimits

        grammars = [
            {"name": name, **_in_library_form(kind, source)} for name, kind, source in parts
        ]
        text = json.dumps({"grammars": grammars})
        for most in (SHARED_STATES, MAX_STATES) if is_shared else (MAX_STATES,):
            limit = LLParserLimits(
                max_items_in_row=MAX_WAYS, max_lexer_states=most, verbose_errors=False
            )
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limit)
            if not matcher.is_error():
                matcher.compute_bitmask()  # some limits are met only here
            if _OUT_OF_STATES not in matcher.get_error():
                break
        return matcher

    def _leave_patterns_aside(self, parts: list[list[str]]) -> bool:
        """Take out of lenient schemas the patterns that the library does not know, such as those
        with look-around. False if there are none."""
        has_some = False
        for part in parts:
            _, kind, source = part
            if kind != "lenient_schema":
                continue
            schema = json.loads(source)
            patterns = patterns_of(schema)
            unknown = {each for each in patterns if not self._knows_pattern(each)}
            if unknown:
                has_some = True
                leave_patterns_aside(schema, unknown)
                part[2] = json.dumps(schema)
        return has_some

    def _knows_pattern(self, pattern: str) -> bool:
        schema = json.dumps({"type": "string", "pattern": pattern})
        return not self._matcher([["pattern", "json_schema", schema]], is_shared=True).is_error()


def _in_library_form(kind: str, source: str) -> dict[str, Any]:
    """A grammar as llguidance has it in a list of grammars."""
    from llguidance import LLMatcher

    if kind == "regex":
        [grammar] = json.loads(LLMatcher.grammar_from_regex(source))["grammars"]
        return {"lark_grammar": grammar["lark_grammar"]}
    if kind == "choice":
        # One terminal, as rules would all be ways to go on.
        texts = " | ".join(map(json.dumps, json.loads(source)))
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}
    if kind == "lark":
        return {"lark_grammar": source}
    schema = json.loads(source)
    if kind == "lenient_schema":
        leave_lost_numbers_aside(schema)
    move_large_bounds(schema)
    move_excluded_bounds(schema)
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": kind == "lenient_schema"}
    return {"json_schema": {**({} if schema is True else schema), "x-guidance": options}}


def constraint_library(
    path: Path, vocab_size: int, eos_ids: Sequence[int], num_sharers: int = 1
) -> Guidance:
    """What enforces grammars for a model, with the CPUs of this machine, which `num_sharers`
    processes share, except one for the steps that are prepared meanwhile; see Guidance."""
    num_threads = max(1, min(MAX_THREADS, num_cpus() // num_sharers - 1))
    return Guidance(path, vocab_size, eos_ids, num_threads)


def _bit(token_id: int) -> np.uint32:
    """A token's bit in its word of a mask."""
    return np.uint32(1 << token_id % WORD_BITS)


def _message(text: str) -> str:
    """What the library says, in one line."""
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}..."
