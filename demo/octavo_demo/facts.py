"""Facts stated in a text, and questions about them: what Anna keeps in the attic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from octavo_demo.fact_kinds import KINDS, Fact, is_held_out
from octavo_demo.stories import story


@dataclass(frozen=True, slots=True)
class Quiz:
    """A text of facts, with questions and their answers."""

    text: str
    questions: tuple[tuple[str, str], ...]


def _tokens(statement: str) -> int:
    """About how many tokens: one a word, a digit and a full stop, three a coined word."""
    return (
        statement.count(" ") + 2 + sum(map(str.isdigit, statement)) + 2 * ("password" in statement)
    )


def _gather(
    rng: Random, size: int, kinds: tuple[Callable[[Random], Fact], ...], held_out: bool
) -> list[Fact]:
    """Facts of about `size` tokens together. Training texts hold no held-out fact."""
    facts: dict[tuple[str, ...], Fact] = {}
    length = misses = 0
    while length < size and misses < 200:
        fact = rng.choice(kinds)(rng)
        misses += 1
        if fact.key in facts or (not held_out and is_held_out(fact.statement)):
            continue
        facts[fact.key] = fact
        length += _tokens(fact.statement)
        misses = 0
    return list(facts.values())


def _questions(
    rng: Random, facts: list[Fact], count: int, held_out: bool, who_share: float
) -> list[tuple[str, str]]:
    values = [fact.reverse[0] for fact in facts if fact.reverse]
    candidates = [fact for fact in facts if is_held_out(fact.statement)] if held_out else facts
    asked = []
    for fact in rng.sample(candidates, min(count, len(candidates))):
        if fact.reverse and rng.random() < who_share and values.count(fact.reverse[0]) == 1:
            asked.append(fact.reverse[1:])
        else:
            asked.append(rng.choice(fact.questions))
    return asked


_HEADS = (
    "",
    "",
    "Read this text.",
    "Notes:",
    "Here are some facts.",
    "Remember the following.",
    "This is what we know.",
    "Diary:",
)


def _held_out_fact(rng: Random, kinds: tuple[Callable[[Random], Fact], ...]) -> Fact:
    while True:
        fact = rng.choice(kinds)(rng)
        if is_held_out(fact.statement):
            return fact


def quiz(
    rng: Random,
    size: int,
    num_questions: int,
    held_out: bool = False,
    who_share: float = 0.5,
) -> Quiz:
    """A text of about `size` tokens. Asked facts are held-out ones if, and only if, `held_out`.

    `who_share` of the facts that allow it are asked for their owner ("Who lives in Oslo?").
    """
    while True:
        kinds = KINDS if rng.random() < 0.7 else tuple(rng.sample(KINDS, rng.randint(2, 5)))
        facts = _gather(rng, size, kinds, held_out)
        if held_out and not any(is_held_out(fact.statement) for fact in facts):
            planted = _held_out_fact(rng, kinds)
            facts = [fact for fact in facts if fact.key != planted.key] + [planted]
            rng.shuffle(facts)
        questions = _questions(rng, facts, num_questions, held_out, who_share)
        if questions:
            return Quiz(_layout(rng, [fact.statement for fact in facts]), tuple(questions))


def _layout(rng: Random, statements: list[str]) -> str:
    head = rng.choice(_HEADS)
    roll = rng.random()
    if roll < 0.3:
        body = "\n".join(f"- {statement}" for statement in statements)
    elif roll < 0.5:
        body = "\n".join(statements)
    elif roll < 0.65 and len(statements) > 4:
        return f"{head}\n{_hidden_in_story(rng, statements)}".strip()
    else:
        body = " ".join(statements)
    return f"{head}\n{body}".strip()


def _hidden_in_story(rng: Random, statements: list[str]) -> str:
    """The facts, with the first paragraph of a story somewhere between them."""
    sentences = story(rng).text.split("\n")
    at = rng.randrange(len(statements))
    return " ".join(statements[:at]) + "\n" + sentences[0] + "\n" + " ".join(statements[at:])
