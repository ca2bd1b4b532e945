"""The seam between the engine and a library that knows grammars.

Masks are packed words: bit `i % 32` of word `i // 32`, int32, says whether token `i` may come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.step import Grammar

Words = NDArray[np.int32]
# With which others a mask is computed: with all that are quick; or with others of which little is
# known yet; or with none, because masks took long lately, its own or those of constraints that it
# would have to wait for. Nobody else should wait for the latter two.
Company = Literal["quick", "new", "none"]
WORD_BITS = 32
# Tokens that may be accepted at once beside other constraints; more are those of an output that
# goes on elsewhere, and are accepted apart, as a library may hold the GIL for each of them.
MAX_NEW_TOKENS = 32


class TokenConstraint(Protocol):
    """What one sequence may still say. The state follows from the sequence's output tokens, so it
    is neither sent nor stored: whoever has the tokens can have it."""

    @property
    def company(self) -> Company:
        """The others beside which its next mask is computed."""

    def accept(self, token_ids: Sequence[int]) -> str:
        """Take in the next tokens of the output. Returns "", or why they cannot be."""

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens that were accepted."""

    def fork(self) -> TokenConstraint:
        """The same state for another sequence, which goes its own way."""


class Filled(NamedTuple):
    """What `ConstraintLibrary.fill` has found out."""

    is_accepting: NDArray[np.bool_]  # of each constraint: the output may end here
    # Index of a constraint -> why its token cannot be, or nothing can be said of what may follow.
    errors: dict[int, str]


class Filling(Protocol):
    """Masks that are being computed. Until `result` has returned, neither the constraints nor the
    words may be touched."""

    computed: Future[None]
    """Done as soon as `result` need not wait."""

    def note_late(self) -> None:
        """Called when rows sit a step out because the masks are not there."""

    def result(self) -> Filled:
        """Wait for the masks, once; raises what went wrong."""


class ConstraintLibrary(Protocol):
    """Owns a model's vocabulary in the form that its constraints need."""

    def load(self) -> None:
        """Read the vocabulary, which `compile` would do the first time: it takes up to a second.
        Raises InvalidRequest if that cannot be."""

    def compile(self, grammar: Grammar) -> TokenConstraint:
        """The constraint before the first token. An equal grammar is not compiled for each request.

        Takes milliseconds, releases the GIL, and gives up at limits which are the same in every
        process. Raises InvalidRequest if the grammar cannot be enforced.
        """

    def fill(
        self,
        constraints: Sequence[Any],
        token_ids: Sequence[Sequence[int]],
        places: Sequence[int],
        words: Words,
    ) -> Filling:
        """Accept tokens, and start to write which may come next, in threads, without the GIL.

        Args:
            constraints: this library's own, different objects, at least one, of the same company.
            token_ids: for each of them the next tokens of the output; more than MAX_NEW_TOKENS only
                where there is one constraint.
            places: for each of them the row of `words` that becomes its mask.
            words: [num_rows, num_words(vocab_size)], contiguous; other rows are left as they are.
                End tokens are not among the tokens of a mask.
        """

    def shutdown(self) -> None:
        """End the threads. A second call does nothing, nor does one where none was started."""


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // WORD_BITS)


def words_of(token_ids: Sequence[int], vocab_size: int) -> Words:
    """The mask of some tokens, which may be most of the vocabulary."""
    bits = np.zeros(num_words(vocab_size) * WORD_BITS, np.bool_)
    bits[np.asarray(token_ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def has_bit(words: Words, token_id: int) -> bool:
    """Whether a token is in a mask."""
    return bool(words[token_id // WORD_BITS] >> token_id % WORD_BITS & 1)


def set_bits(words: Words, token_ids: Sequence[int]) -> None:
    """Add tokens to a mask."""
    ids = np.asarray(token_ids, np.int64)
    np.bitwise_or.at(words.view(np.uint32), ids // WORD_BITS, _bits(ids))


def clear_bits(words: Words, token_ids: Sequence[int]) -> None:
    """Take tokens out of a mask."""
    ids = np.asarray(token_ids, np.int64)
    np.bitwise_and.at(words.view(np.uint32), ids // WORD_BITS, ~_bits(ids))


def _bits(ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    return np.uint32(1) << (ids % WORD_BITS).astype(np.uint32)
