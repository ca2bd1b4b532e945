"""Grammars enforced by llguidance, which is loaded when the first one is asked for.

Its limits count work, not time, so all processes refuse the same grammars, and ranks that compute
the same rows compute the same masks.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event, Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.step import Grammar
from octavo.errors import InvalidRequest
from octavo.host_memory import num_cpus
from octavo.model_files import open_files
from octavo.structured.constraint import WORD_BITS, Filled, Words, num_words
from octavo.structured.schemas import move_excluded_bounds, place_of, refusal

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_THREADS = 32
MAX_COMPILED = 256  # grammars that stay compiled
# Copies of a matcher share a lock, which each holds while it computes a mask. Several matchers of
# one grammar let several threads compute masks for it; each is compiled, if that is quick.
MATCHERS_PER_THREAD = 4
MAX_MATCHERS = 64  # of a grammar; some hundred KB each
MAX_REPEATED_SECONDS = 0.02
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
MAX_MESSAGE = 400  # characters of the library's own words


class GuidanceConstraint:
    """See TokenConstraint."""

    __slots__ = ("lock_id", "matcher")

    def __init__(self, matcher: LLMatcher, lock_id: int) -> None:
        """`lock_id`: the same for constraints whose masks cannot be computed at the same time."""
        self.matcher = matcher
        self.lock_id = lock_id

    def accept(self, token_ids: Sequence[int]) -> str:
        if self.matcher.consume_tokens(list(token_ids)):
            return ""
        return _message(self.matcher.get_error())

    def rollback(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)

    def fork(self) -> GuidanceConstraint:
        return GuidanceConstraint(self.matcher.deep_copy(), self.lock_id)


class GuidanceFilling(NamedTuple):
    """See Filling."""

    computed: Future[None]
    constraints: Sequence[GuidanceConstraint]
    places: NDArray[np.int64]
    masks: Words  # the library's
    words: Words  # the caller's, perhaps the same
    end_ids: Sequence[int]
    vocab_size: int

    def result(self) -> Filled:
        self.computed.result()
        masks, words, places = self.masks, self.words, self.places
        unsigned = masks.view(np.uint32)
        end = self.end_ids[0]
        accepts = (unsigned[places, end // WORD_BITS] >> np.uint32(end % WORD_BITS)) & 1
        for token_id in self.end_ids:
            unsigned[places, token_id // WORD_BITS] &= ~np.uint32(1 << token_id % WORD_BITS)
        if masks is not words:
            words[places] = masks[places, : words.shape[1]]
        beyond = self.vocab_size % WORD_BITS
        if beyond:
            words.view(np.uint32)[places, -1] &= np.uint32((1 << beyond) - 1)
        errors = {}
        for i in np.flatnonzero(accepts).tolist():  # after an error, the mask is that of the end
            matcher = self.constraints[i].matcher
            if matcher.is_error():
                errors[i] = _message(matcher.get_error())
        return Filled(accepts.astype(np.bool_), errors)


@dataclass(slots=True)
class _Compiled:
    """A grammar, as often as it was compiled."""

    constraints: list[GuidanceConstraint] = field(default_factory=list)
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
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._lock_ids = count()
        self._lock = Lock()
        self._loading = Lock()
        self._tokenizer: Any = None
        self._executor: Any = None
        self._thread: ThreadPoolExecutor | None = None  # that waits for the library's own threads
        self._num_words = 0  # of the library's masks; the tokenizer may have more than the model
        self._end_ids: list[int] = []  # that stand for the end of the output in them

    def compile(self, grammar: Grammar) -> GuidanceConstraint:
        most = min(MATCHERS_PER_THREAD * self._num_threads, MAX_MATCHERS)
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                num = len(known.constraints)
                if num >= most or known.seconds > MAX_REPEATED_SECONDS:
                    known.num_uses += 1
                    return known.constraints[known.num_uses % num]
        self.load(grammar.field)
        began = perf_counter()
        compiled = self._compile(grammar)
        with self._lock:
            # Only what compiles takes a place: refused grammars do not drive others out.
            known = self._compiled.setdefault(grammar, _Compiled())
            known.seconds = perf_counter() - began
            known.constraints.append(compiled)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def check(self, grammar: Grammar, begun: Sequence[int] = ()) -> None:
        """Raises InvalidRequest if a grammar cannot be enforced, or if the tokens `begun` are not
        the beginning of an output that it allows."""
        constraint = self.compile(grammar)
        reason = constraint.fork().accept(begun) if begun else ""
        if reason:
            raise InvalidRequest("structured.begun", f"the grammar cannot go on: {reason}")

    def fill(
        self,
        constraints: Sequence[GuidanceConstraint],
        token_ids: Sequence[int | None],
        places: Sequence[int],
        words: Words,
    ) -> GuidanceFilling:
        """See ConstraintLibrary.fill.

        The thread does nothing but call the library, which needs no GIL. If it had to take the
        GIL again, it could wait for as long as the interpreter's switch interval (5 ms).
        """
        assert self._thread is not None, "a grammar was compiled"
        matchers = [constraint.matcher for constraint in constraints]
        for matcher, token_id in zip(matchers, token_ids, strict=True):
            if token_id is not None:
                matcher.consume_token(token_id)
        # Each of the library's threads takes neighbours, which should not be in the way of others.
        locks = [constraint.lock_id for constraint in constraints]
        order = sorted(range(len(locks)), key=locks.__getitem__)
        pairs = [(matchers[i], places[i]) for i in order]
        # The tokenizer may have more tokens than the model: then masks are cut.
        fits = words.shape[1] == self._num_words
        masks = words if fits else np.empty((len(words), self._num_words), np.int32)
        has_begun = Event()

        def compute() -> None:
            has_begun.set()
            self._executor.unsafe_compute_mask_ptr(
                pairs, masks.ctypes.data, masks.strides[0], len(masks)
            )

        future = self._thread.submit(compute)
        has_begun.wait()  # without the GIL, which the thread needs to begin
        return GuidanceFilling(
            future, constraints, np.array(places), masks, words, self._end_ids, self._vocab_size
        )

    def shutdown(self) -> None:
        """See ConstraintLibrary.shutdown."""
        if self._thread is not None:
            self._thread.shutdown()

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
                raise InvalidRequest(field, "the model has no tokenizer to read texts with")
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
            self._tokenizer = tokenizer

    def _compile(self, grammar: Grammar) -> GuidanceConstraint:
        from llguidance import LLMatcher, LLParserLimits

        schema: Any = None
        parts = [["grammar", grammar.kind, grammar.source]]
        if grammar.kind == "parts":
            parts = json.loads(grammar.source)
        grammars = []
        for name, kind, source in parts:
            if kind in ("json_schema", "lenient_schema"):
                schema = json.loads(source)
                reason = refusal(schema)
                if reason is not None:
                    raise InvalidRequest(grammar.field, reason)
            grammars.append({"name": name, **_in_library_form(kind, source)})
        if len(parts) > 1:
            schema = None  # which of them is meant is not known
        text = json.dumps({"grammars": grammars})
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some limits are met only here
        if matcher.is_error():
            message = _message(matcher.get_error())
            place = "" if schema is None else place_of(schema, message)
            raise InvalidRequest(grammar.field, f"{place}{message}")
        return GuidanceConstraint(matcher, next(self._lock_ids))


def _in_library_form(kind: str, source: str) -> dict[str, Any]:
    """A grammar as llguidance has it in a list of grammars."""
    from llguidance import LLMatcher

    if kind == "regex":
        [grammar] = json.loads(LLMatcher.grammar_from_regex(source))["grammars"]
        return {"lark_grammar": grammar["lark_grammar"]}
    if kind == "choice":
        # One terminal: of rules, the library's parser takes at most 2,000 at a place.
        texts = " | ".join(map(json.dumps, json.loads(source)))
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}
    if kind == "lark":
        return {"lark_grammar": source}
    schema = json.loads(source)
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


def _message(text: str) -> str:
    """What the library says, in one line."""
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}..."
