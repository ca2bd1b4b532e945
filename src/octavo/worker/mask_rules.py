"""What forbids a row tokens besides its grammar, by the tokens so far: bad words, repetitions, end
tokens too early, and what is forced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from octavo.core.step import SamplingSpec, ThinkingSpec
from octavo.structured.constraint import Words, clear_bits, set_bits, words_of

Int32s = NDArray[np.int32]

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


def apply_rules(
    words: Words,
    spec: SamplingSpec,
    allowed: Words | None,
    ends: Words,
    bad_words: BadWords,
    text: Int32s,
    num_prompt: int,
) -> None:
    """Take out of a mask what a row's rules forbid.

    Args:
        words: [num_words].
        allowed: the words of `spec.allowed_token_ids`.
        ends: those of `spec.end_token_ids`.
        bad_words: of `spec`.
        text: the tokens so far, of which `num_prompt` are the prompt.
    """
    output = text[num_prompt:]
    if allowed is not None:
        words &= allowed
    if len(output) < spec.min_tokens:
        _take_out(words, (), gives_way=spec.grammar is not None, others=~ends)
    bad = bad_words.of_output.at(output) + bad_words.of_text.at(text)
    if spec.no_repeat_ngram_size:
        bad += repeating(text, spec.no_repeat_ngram_size)
    if bad or bad_words.others is not None:
        _take_out(words, bad, others=bad_words.others)
    ending = end_of_thinking(spec.thinking, output)
    if ending is not None:
        _allow_only(words, [ending])
    for number, token_ids in spec.forced_tokens:
        if number == len(output):
            _allow_only(words, token_ids)


def _allow_only(words: Words, token_ids: Sequence[int]) -> None:
    words[:] = 0
    set_bits(words, token_ids)


def _take_out(
    words: Words, token_ids: Sequence[int], gives_way: bool = True, others: Words | None = None
) -> None:
    """Clear the bits of some tokens, and of all but `others`."""
    before = words.copy() if gives_way else None
    clear_bits(words, token_ids)
    if others is not None:
        words &= others
    if before is not None and not words.any():
        words[:] = before


def nothing_left(spec: SamplingSpec, num_output_tokens: int) -> str:
    """What is said of a row for whose next token nothing is left."""
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


class BadWords:
    """The words that must not occur in an output, and those that must not in a text with its
    prompt. Of those that are single tokens, which may be most of the vocabulary, there is a mask:
    they are forbidden at every token.

    Attributes:
        others: [num_words], the tokens that are no such word; None: all.
    """

    def __init__(
        self,
        of_output: tuple[tuple[int, ...], ...],
        of_text: tuple[tuple[int, ...], ...],
        vocab_size: int,
    ) -> None:
        self.of_output, self.of_text = (
            Endings([word for word in words if len(word) > 1]) for words in (of_output, of_text)
        )
        tokens = [word[0] for word in of_output + of_text if len(word) == 1]
        self.others = ~words_of(tokens, vocab_size) if tokens else None


# Most requests have none, or those of the model.
bad_words_of = lru_cache(maxsize=256)(BadWords)


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
    size = len(spec.end_ids)
    # At the limit the end is forced, so it is there soon after, and is not looked for later.
    if start is None or not 0 <= len(output) - start - spec.num_tokens < 2 * size:
        return None
    part = output[start:]
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
    if size == 1:
        every: list[int] = token_ids.tolist()
        return every
    # The last token stands at few other places, and behind the same one at fewer.
    places = np.flatnonzero(token_ids[size - 2 : -1] == token_ids[-1:]) + size - 1
    for back in range(2, size):
        if not len(places):
            break
        places = places[token_ids[places - back] == token_ids[-back]]
    last: list[int] = token_ids[places].tolist()
    return last
