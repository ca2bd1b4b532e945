"""All kinds of sentences with their translations, and which of them are kept for the test."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from random import Random

from octavo_demo import nesting, patterns
from octavo_demo.patterns import Pair

HELD_OUT_EVERY = 64


def is_held_out(english: str) -> bool:
    """Whether a sentence is for the test. Its text alone decides, so no training sentence is."""
    return zlib.crc32(english.encode()) % HELD_OUT_EVERY == 0


PATTERNS: dict[Callable[[Random], Pair], int] = {
    patterns.statement: 30,
    patterns.fronted: 10,
    patterns.question: 6,
    patterns.wh_question: 7,
    nesting.subordinate: 8,
    nesting.subordinate_first: 5,
    nesting.reported: 5,
    nesting.direct_speech: 3,
    nesting.relative_subject: 5,
    nesting.relative_object: 4,
    nesting.coordination: 5,
    nesting.purpose: 4,
    nesting.infinitive: 4,
    patterns.passive: 4,
    patterns.command: 4,
    patterns.comparison: 4,
    patterns.identity: 2,
    patterns.existence: 3,
    patterns.thing_state: 4,
    patterns.gladly: 3,
    patterns.longing: 3,
}
_CHOICES = tuple(pattern for pattern, weight in PATTERNS.items() for _ in range(weight))


def sentence_pair(rng: Random, held_out: bool = False) -> Pair:
    """An English sentence and its German translation, for training or from the held-out side."""
    while True:
        english, german = rng.choice(_CHOICES)(rng)
        if is_held_out(english) == held_out:
            return english, german


def passage_pair(rng: Random, held_out: bool = False, max_sentences: int = 3) -> Pair:
    """Mostly one sentence, sometimes two or three."""
    count = 1 if rng.random() < 0.93 else rng.randint(2, max_sentences)
    pairs = [sentence_pair(rng, held_out) for _ in range(count)]
    return " ".join(english for english, _ in pairs), " ".join(german for _, german in pairs)
