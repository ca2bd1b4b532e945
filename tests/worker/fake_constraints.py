"""Masks without a library: a toy grammar, in which every token must be larger than the last."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from octavo.core.step import Grammar
from octavo.errors import InvalidRequest
from octavo.structured.constraint import Company, Filled, Words, words_of
from octavo.worker.row_masks import RowMasks


class Rising:
    """See TokenConstraint."""

    def __init__(self, tokens: list[int], is_slow: bool = False) -> None:
        self.tokens = tokens
        self.company: Company = "none" if is_slow else "quick"
        self.is_filling = False  # a mask; until that ends, nothing else may use it

    def accept(self, token_ids: Sequence[int]) -> str:
        assert not self.is_filling
        for token_id in token_ids:
            if self.tokens and token_id <= self.tokens[-1]:
                return f"{token_id} is not more than {self.tokens[-1]}"
            self.tokens.append(token_id)
        return ""

    def rollback(self, num_tokens: int) -> None:
        assert not self.is_filling
        del self.tokens[len(self.tokens) - num_tokens :]

    def fork(self) -> Rising:
        assert not self.is_filling
        return Rising(list(self.tokens), self.company == "none")


class RisingFilling(NamedTuple):
    """See Filling. Masks are written when they are asked for, so that whoever uses them before does
    not find them."""

    computed: Future[None]
    constraints: Sequence[Rising]
    places: Sequence[int]
    words: Words
    vocab_size: int
    errors: dict[int, str]

    def note_late(self) -> None:
        pass

    def result(self) -> Filled:
        self.computed.result()
        for constraint, place in zip(self.constraints, self.places, strict=True):
            constraint.is_filling = False
            least = constraint.tokens[-1] + 1 if constraint.tokens else 1
            self.words[place] = words_of(range(least, self.vocab_size), self.vocab_size)
        is_accepting = np.array([len(each.tokens) >= 3 for each in self.constraints])
        return Filled(is_accepting, self.errors)


class RisingLibrary:
    """See ConstraintLibrary: an output may end after three tokens, and must after the last one.

    Masks of the grammar "slow" are there when the test completes their futures.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.slow: list[Future[None]] = []  # of slow masks, in their order

    def load(self) -> None:
        pass

    def compile(self, grammar: Grammar) -> Rising:
        if grammar.source == "bad":
            raise InvalidRequest(grammar.field, "it is bad")
        return Rising([], is_slow=grammar.source == "slow")

    def fill(
        self,
        constraints: Sequence[Rising],
        token_ids: Sequence[Sequence[int]],
        places: Sequence[int],
        words: Words,
    ) -> RisingFilling:
        errors, computed = {}, Future[None]()
        for i, (constraint, new_ids) in enumerate(zip(constraints, token_ids, strict=True)):
            reason = constraint.accept(new_ids)
            if reason:
                errors[i] = reason
            constraint.is_filling = True
        if constraints[0].company == "none":
            assert len(constraints) == 1
            self.slow.append(computed)
        else:
            computed.set_result(None)
        return RisingFilling(computed, constraints, places, words, self.vocab_size, errors)

    def shutdown(self) -> None:
        pass


def rising_masks(num_rows: int, vocab_size: int) -> RowMasks:
    return RowMasks(num_rows, vocab_size, lambda: RisingLibrary(vocab_size))


def no_grammars(num_rows: int, vocab_size: int) -> RowMasks:
    """For rows without grammars."""

    def refuse() -> RisingLibrary:
        raise AssertionError("there is no grammar")

    return RowMasks(num_rows, vocab_size, refuse)
