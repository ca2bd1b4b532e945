"""Sentences of several clauses: subordinate and relative clauses, speech, infinitives with zu."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from octavo_demo import lexicon as lx
from octavo_demo import scenes
from octavo_demo.clauses import WISSEN, Clause, german_finite
from octavo_demo.german import Nominal, noun_phrase, pronoun_for
from octavo_demo.patterns import (
    ACTIVE,
    GOING,
    TRANSITIVE,
    Pair,
    a_period,
    agree,
    infinitive_clause,
    sentence,
    statement,
)
from octavo_demo.verbs import Verb, english_verb, german_verb

_CONJUNCTIONS = (
    ("because", "weil"),
    ("although", "obwohl"),
    ("if", "falls"),
    ("while", "während"),
    ("before", "bevor"),
    ("until", "bis"),
    ("when", "wenn"),
)


def _two_clauses(rng: Random, period: str) -> tuple[Clause, Clause]:
    """Two clauses, the second often about the first's subject."""
    first = scenes.scene(rng, scenes.somebody(rng), period)
    same = rng.random() < 0.6
    other = pronoun_for(first.subject) if same else scenes.somebody(rng)
    return first, scenes.scene(rng, other, period)


def _conjunction(rng: Random, period: str) -> Pair:
    english, german = rng.choice(_CONJUNCTIONS)
    return english, "als" if english == "when" and period == "past" else german


def _settle(sub: Clause, conjunction: str) -> None:
    """ "before it did not sleep" says nothing: such clauses are positive."""
    if conjunction in ("before", "until") and not sub.kein:
        sub.negated = False


def subordinate(rng: Random) -> Pair:
    period = a_period(rng)
    main, sub = _two_clauses(rng, period)
    english, german = _conjunction(rng, period)
    _settle(sub, english)
    return (
        sentence(f"{main.english()} {english} {sub.english()}"),
        sentence(f"{main.german()}, {german} {sub.german_final()}"),
    )


def subordinate_first(rng: Random) -> Pair:
    period = a_period(rng)
    sub, main = _two_clauses(rng, period)
    english, german = _conjunction(rng, period)
    _settle(sub, english)
    return (
        sentence(f"{english} {sub.english()}, {main.english()}"),
        sentence(f"{german} {sub.german_final()}, {main.german_inverted()}"),
    )


_SPEECH = (
    (english_verb("say"), german_verb("sagen"), "that", "dass"),
    (english_verb("think"), german_verb("glauben"), "that", "dass"),
    (english_verb("hope"), german_verb("hoffen"), "that", "dass"),
    (english_verb("know"), WISSEN, "that", "dass"),
    (english_verb("see"), german_verb("sehen siehst sieht sah gesehen"), "that", "dass"),
    (english_verb("dream"), german_verb("träumen"), "that", "dass"),
    (english_verb("ask"), german_verb("fragen"), "whether", "ob"),
)


def reported(rng: Random) -> Pair:
    """ "Anna says that the dog sleeps"."""
    period = a_period(rng)
    subject = scenes.somebody(rng)
    en_verb, de_verb, english, german = rng.choice(_SPEECH)
    main = Clause(subject, en_verb, de_verb)
    if period == "past" and subject.person != "2s":
        main.tense = "past"
    elif rng.random() < 0.1 and en_verb.base == "know":
        main.negated, english, german = True, "whether", "ob"
    inner = pronoun_for(subject) if rng.random() < 0.3 else scenes.somebody(rng)
    sub = scenes.scene(rng, inner, period)
    return (
        sentence(f"{main.english()} {english} {sub.english()}"),
        sentence(f"{main.german()}, {german} {sub.german_final()}"),
    )


def direct_speech(rng: Random) -> Pair:
    speaker = scenes.somebody(rng, pronouns=False)
    past = rng.random() < 0.5
    clause = scenes.scene(rng, scenes.somebody(rng), "present")
    says = "said" if past else agree(speaker, "says", "say")
    english = f'"{sentence(clause.english(), ",")}" {says} {speaker.en}.'
    finite = german_finite(german_verb("sagen"), speaker.person, past)
    return english, f'"{sentence(clause.german(), "")}", {finite} {speaker.case("nom")}.'


def _head(rng: Random) -> Nominal:
    noun = rng.choice(lx.PERSONS + lx.ANIMALS)
    adjective = scenes.adjective_for(rng, noun) if rng.random() < 0.25 else None
    return noun_phrase(noun, rng.choice(("the", "the", "the", "a")), adjective, plural=False)


def _with_relative(head: Nominal, english: str, german: str) -> Nominal:
    """The noun phrase with a relative clause behind it, closed by a comma in German."""
    forms = tuple(f"{form}, {german}," for form in head.de)
    text = f"{head.en} {english}"
    return replace(head, en=text, en_object=text, de=(forms[0], forms[1], forms[2], forms[3]))


def relative_subject(rng: Random) -> Pair:
    """ "The dog that sleeps in the garden is tired"."""
    period = a_period(rng)
    head = _head(rng)
    inside = replace(head, en="who" if head.human else "that", de=head.relative)
    sub = scenes.scene(rng, inside, period)
    sub.time = ("", "")
    main = scenes.scene(rng, _with_relative(head, sub.english(), sub.german_final()), period)
    main.negated = main.negated and not main.kein
    if main.kein:
        return statement(rng)
    return sentence(main.english()), sentence(main.german())


def relative_object(rng: Random) -> Pair:
    """ "The girl eats the cake that the boy baked": the object comes last."""
    verb = rng.choice(ACTIVE)
    head = scenes.thing_of(rng, verb.objects)
    if head.is_pronoun or head.article not in ("the", "a"):
        return relative_object(rng)
    past = rng.random() < 0.5
    makers = [v for v in TRANSITIVE if set(v.objects) & set(verb.objects)]
    maker: Verb = rng.choice(makers)
    inner = Clause(scenes.somebody(rng), maker.en, maker.de)
    scenes.set_tense(rng, inner, "past" if past else "present", maker.stative)
    inner.negated = False
    inner.de_accusative = head.relative[1]
    main = Clause(scenes.somebody(rng), verb.en, verb.de)
    scenes.set_tense(rng, main, "past" if past else "present", verb.stative)
    if main.tense not in ("present", "past", "progressive") or verb.de.prefix:
        return relative_object(rng)
    main.negated = False
    relativizer = "whom" if head.human else "that"
    main.en_object = f"{head.en_object} {relativizer} {inner.english()}"
    final = _relative_final(inner)
    main.de_accusative = f"{head.case('acc')}, {final}"
    return sentence(main.english()), sentence(main.german())


def _relative_final(clause: Clause) -> str:
    """Verb-final with the relative pronoun, which is the clause's accusative, in front."""
    pronoun, clause.de_accusative = clause.de_accusative, ""
    return f"{pronoun} {clause.german_final()}"


def coordination(rng: Random) -> Pair:
    period = a_period(rng)
    first, second = _two_clauses(rng, period)
    if rng.random() < 0.5:
        return sentence(f"{first.english()} and {second.english()}"), sentence(
            f"{first.german()} und {second.german()}"
        )
    return sentence(f"{first.english()}, but {second.english()}"), sentence(
        f"{first.german()}, aber {second.german()}"
    )


def purpose(rng: Random) -> Pair:
    """ "The boy goes to the market to buy a cake": um ... zu."""
    subject = scenes.somebody(rng)
    verb = rng.choice(GOING)
    main = scenes.action(rng, subject, a_period(rng), plain=True, verb=verb)
    aim = infinitive_clause(rng, subject)
    return (
        sentence(f"{main.english()} {aim.english_infinitive()}"),
        sentence(f"{main.german()}, um {aim.german_zu()}"),
    )


_TRYING = (
    (english_verb("try"), german_verb("versuchen")),
    (english_verb("begin"), german_verb("beginnen begann begonnen")),
    (english_verb("forget"), german_verb("vergessen vergisst vergisst vergaß vergessen")),
    (english_verb("hope"), german_verb("hoffen")),
    (
        english_verb("promise"),
        german_verb("versprechen versprichst verspricht versprach versprochen"),
    ),
    (english_verb("decide"), german_verb("beschließen beschloss beschlossen")),
)


def infinitive(rng: Random) -> Pair:
    """ "The girl tries to open the door": versucht, die Tür zu öffnen."""
    subject = scenes.somebody(rng)
    en_verb, de_verb = rng.choice(_TRYING)
    main = Clause(subject, en_verb, de_verb)
    if subject.person != "2s":
        main.tense = rng.choice(("present", "past"))
    aim = infinitive_clause(rng, subject)
    return sentence(f"{main.english()} {aim.english_infinitive()}"), sentence(
        f"{main.german()}, {aim.german_zu()}"
    )
