"""Whole sentences with their one German translation: statements, questions, commands, subordinate clauses."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from random import Random

from octavo.demo import lexicon as lx
from octavo.demo import scenes
from octavo.demo.clauses import (
    BE,
    SEIN,
    WISSEN,
    Clause,
    Modal,
    english_be,
    german_finite,
    modal_form,
)
from octavo.demo.german import Nominal, article_of, noun_phrase, pronoun_for
from octavo.demo.verbs import VERBS, Verb, english_verb, german_verb

Pair = tuple[str, str]

HELD_OUT_EVERY = 64

_TRANSITIVE = tuple(verb for verb in VERBS if verb.frame == "a" and " " not in verb.en.base)
_ACTIVE = tuple(verb for verb in _TRANSITIVE if not verb.stative)
_COMMANDS = tuple(
    verb
    for verb in VERBS
    if not verb.stative
    and verb.frame in ("a", "d", "da", "dir", "put", "p")
    and not verb.de.reflexive
)
_GOING = tuple(verb for verb in VERBS if verb.frame == "dir")
_STAYING = tuple(verb for verb in VERBS if verb.frame == "loc")
_DATIVE = tuple(verb for verb in VERBS if verb.frame == "d" and " " not in verb.en.base)


def is_held_out(english: str) -> bool:
    """Whether a sentence belongs to the test set. Decided by its text alone, so no training sentence is in it."""
    return zlib.crc32(english.encode()) % HELD_OUT_EVERY == 0


def _sentence(text: str, mark: str = ".") -> str:
    text = text.removesuffix(",") + mark
    return text[0].upper() + text[1:]


def _period(rng: Random) -> str:
    return "past" if rng.random() < 0.4 else "present"


def statement(rng: Random) -> Pair:
    clause = scenes.scene(rng, scenes.somebody(rng))
    return _sentence(clause.english()), _sentence(clause.german())


def fronted(rng: Random) -> Pair:
    """ "Today the boy reads a book": the verb stays second in German."""
    clause = scenes.scene(rng, scenes.somebody(rng), _period(rng) if rng.random() < 0.8 else None)
    if clause.place[0] and not clause.time[0] and rng.random() < 0.7:
        english = f"{clause.place[0]} {clause.english(place=False)}"
        return _sentence(english), _sentence(
            f"{clause.place[1]} {clause.german_inverted(place=False)}"
        )
    time = rng.choice(lx.TIMES)
    if clause.tense not in time.tenses:
        return _sentence(f"then {clause.english()}"), _sentence(f"dann {clause.german_inverted()}")
    clause.time = (time.en, time.de)
    english = f"{time.en} {clause.english(time=False)}"
    return _sentence(english), _sentence(f"{time.de} {clause.german_inverted(time=False)}")


def question(rng: Random) -> Pair:
    clause = scenes.scene(rng, scenes.somebody(rng))
    clause.negated = clause.negated and not clause.kein and clause.subject.is_pronoun
    if clause.kein:
        return statement(rng)
    return _sentence(clause.english_question(), "?"), _sentence(clause.german_inverted(), "?")


def _who(case: str) -> Nominal:
    forms = ("wer", "wen", "wem", "")
    return Nominal("who", "whom", forms, "3s", "he", "m")


def wh_question(rng: Random) -> Pair:
    kind = rng.randrange(7)
    if kind == 0:
        clause = scenes.scene(rng, _who("nom"))
        return _sentence(clause.english(), "?"), _sentence(clause.german(), "?")
    period = _period(rng)
    if kind == 1:
        english, german, verb = "where", "wo", rng.choice(_STAYING)
    elif kind == 2:
        english, german, verb = "where", "wohin", rng.choice(_GOING)
    elif kind == 3:
        english, german, verb = "whom", "wem", rng.choice(_DATIVE)
    elif kind == 4:
        english, german, verb = "what", "was", rng.choice(_ACTIVE)
        if not set(verb.objects) & {
            "thing",
            "food",
            "readable",
            "drink",
            "cookable",
            "bakeable",
            "clothes",
            "vehicle",
        }:
            return wh_question(rng)
    else:
        english, german = ("when", "wann") if kind == 5 else ("why", "warum")
        clause = scenes.action(rng, scenes.somebody(rng), period)
        clause.time = ("", "")
        if clause.negated:
            return statement(rng)
        return _sentence(f"{english} {clause.english_question()}", "?"), _sentence(
            f"{german} {clause.german_inverted()}", "?"
        )
    clause = Clause(scenes.somebody(rng), verb.en, verb.de)
    scenes.set_tense(rng, clause, period, verb.stative)
    clause.negated = False
    scenes.add_time(rng, clause)
    return _sentence(f"{english} {clause.english_question()}", "?"), _sentence(
        f"{german} {clause.german_inverted()}", "?"
    )


_CONJUNCTIONS = (
    ("because", "weil"), ("although", "obwohl"), ("if", "falls"), ("while", "während"), ("before", "bevor"),
    ("until", "bis"), ("when", "wenn"),
)  # fmt: skip


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
    period = _period(rng)
    main, sub = _two_clauses(rng, period)
    english, german = _conjunction(rng, period)
    _settle(sub, english)
    return (
        _sentence(f"{main.english()} {english} {sub.english()}"),
        _sentence(f"{main.german()}, {german} {sub.german_final()}"),
    )


def subordinate_first(rng: Random) -> Pair:
    period = _period(rng)
    sub, main = _two_clauses(rng, period)
    english, german = _conjunction(rng, period)
    _settle(sub, english)
    return (
        _sentence(f"{english} {sub.english()}, {main.english()}"),
        _sentence(f"{german} {sub.german_final()}, {main.german_inverted()}"),
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
    period = _period(rng)
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
        _sentence(f"{main.english()} {english} {sub.english()}"),
        _sentence(f"{main.german()}, {german} {sub.german_final()}"),
    )


def direct_speech(rng: Random) -> Pair:
    speaker = scenes.somebody(rng, pronouns=False)
    past = rng.random() < 0.5
    clause = scenes.scene(rng, scenes.somebody(rng), "present")
    english = f'"{_sentence(clause.english(), ",")}" {"said" if past else _agree(speaker, "says", "say")} {speaker.en}.'
    finite = german_finite(german_verb("sagen"), speaker.person, past)
    return english, f'"{_sentence(clause.german(), "")}", {finite} {speaker.case("nom")}.'


def _agree(nominal: Nominal, third: str, other: str) -> str:
    return third if nominal.person == "3s" else other


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
    period = _period(rng)
    head = _head(rng)
    inside = replace(head, en="who" if head.human else "that", de=head.relative)
    sub = scenes.scene(rng, inside, period)
    sub.time = ("", "")
    main = scenes.scene(rng, _with_relative(head, sub.english(), sub.german_final()), period)
    main.negated = main.negated and not main.kein
    if main.kein:
        return statement(rng)
    return _sentence(main.english()), _sentence(main.german())


def relative_object(rng: Random) -> Pair:
    """ "The girl eats the cake that the boy baked": the object comes last, its relative clause after it."""
    verb = rng.choice(_ACTIVE)
    head = scenes.thing_of(rng, verb.objects)
    if head.is_pronoun or head.article not in ("the", "a"):
        return relative_object(rng)
    past = rng.random() < 0.5
    makers = [v for v in _TRANSITIVE if set(v.objects) & set(verb.objects)]
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
    return _sentence(main.english()), _sentence(main.german())


def _relative_final(clause: Clause) -> str:
    """Verb-final with the relative pronoun, which is the clause's accusative, in front."""
    pronoun, clause.de_accusative = clause.de_accusative, ""
    return f"{pronoun} {clause.german_final()}"


def coordination(rng: Random) -> Pair:
    period = _period(rng)
    first, second = _two_clauses(rng, period)
    if rng.random() < 0.5:
        return _sentence(f"{first.english()} and {second.english()}"), _sentence(
            f"{first.german()} und {second.german()}"
        )
    return _sentence(f"{first.english()}, but {second.english()}"), _sentence(
        f"{first.german()}, aber {second.german()}"
    )


def _infinitive(rng: Random, subject: Nominal) -> Clause:
    verb = rng.choice(_COMMANDS)
    clause = Clause(subject, verb.en, verb.de)
    _fill(rng, clause, verb)
    return clause


def _fill(rng: Random, clause: Clause, verb: Verb) -> None:
    """Objects of a clause without tense."""
    filled = scenes.action(rng, clause.subject, "present", plain=True, verb=verb)
    clause.en_object, clause.de_pronoun, clause.de_dative = (
        filled.en_object,
        filled.de_pronoun,
        filled.de_dative,
    )
    clause.de_accusative, clause.de_preposition, clause.de_goal = (
        filled.de_accusative, filled.de_preposition, filled.de_goal,
    )  # fmt: skip


def purpose(rng: Random) -> Pair:
    """ "The boy goes to the market to buy a cake": um ... zu."""
    subject = scenes.somebody(rng)
    verb = rng.choice(_GOING)
    main = scenes.action(rng, subject, _period(rng), plain=True, verb=verb)
    aim = _infinitive(rng, subject)
    return (
        _sentence(f"{main.english()} {aim.english_infinitive()}"),
        _sentence(f"{main.german()}, um {aim.german_zu()}"),
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
    aim = _infinitive(rng, subject)
    return _sentence(f"{main.english()} {aim.english_infinitive()}"), _sentence(
        f"{main.german()}, {aim.german_zu()}"
    )


def passive(rng: Random) -> Pair:
    """ "The cake is baked by the girl": wird vom Mädchen gebacken."""
    verb = rng.choice(_ACTIVE)
    patient = scenes.thing_of(rng, verb.objects)
    clause = Clause(patient, verb.en, verb.de, tense=rng.choice(("passive", "past passive")))
    if rng.random() < 0.7:
        agent = scenes.somebody(rng, pronouns=False)
        clause.en_object, clause.de_preposition = f"by {agent.en_object}", agent.after("von", "dat")
    if rng.random() < 0.3:
        time = rng.choice(lx.TIMES)
        if ("past" if clause.past else "present") in time.tenses:
            clause.time = (time.en, time.de)
    return _sentence(clause.english()), _sentence(clause.german())


def command(rng: Random) -> Pair:
    clause = _infinitive(rng, scenes.PRONOUNS["you"])
    english = clause.english_infinitive().removeprefix("to ")
    if rng.random() < 0.4:
        return _sentence(f"please {english}"), _sentence(f"bitte {clause.german_imperative()}")
    return _sentence(english, "!"), _sentence(clause.german_imperative(), "!")


def _definite(rng: Random, nouns: tuple[lx.Noun, ...]) -> Nominal:
    return scenes.phrase(rng, rng.choice(nouns), definite=True, singular=True)


def comparison(rng: Random) -> Pair:
    """ "The bear is bigger than the wolf", "as brave as a lion"."""
    subject = scenes.somebody(rng)
    adjective = rng.choice(lx.LIVING_ADJECTIVES)
    other = (
        scenes.person_name(rng) if rng.random() < 0.3 else _definite(rng, lx.PERSONS + lx.ANIMALS)
    )
    past = rng.random() < 0.35
    be, sein = english_be(subject.person, past), german_finite(SEIN, subject.person, past)
    start_en, start_de = f"{subject.en} {be}", f"{subject.case('nom')} {sein}"
    if rng.random() < 0.6:
        return (
            _sentence(f"{start_en} {adjective.en_comparative} than {other.en}"),
            _sentence(f"{start_de} {adjective.comparative} als {other.case('nom')}"),
        )
    negation = rng.random() < 0.25 and subject.article != "every"
    return (
        _sentence(f"{start_en} {'not ' if negation else ''}as {adjective.en} as {other.en}"),
        _sentence(
            f"{start_de} {'nicht ' if negation else ''}so {adjective.de} wie {other.case('nom')}"
        ),
    )


_ROLES = tuple(
    noun
    for noun in lx.PERSONS
    if noun.en
    in ("friend", "king", "thief", "teacher", "cook", "painter", "neighbour", "hunter", "wizard")
)


def identity(rng: Random) -> Pair:
    """ "Paul is a good cook": both sides in the nominative."""
    subject = scenes.somebody(rng)
    if (
        subject.person not in ("1s", "2s", "3s")
        or subject.pronoun == "she"
        and not subject.is_pronoun
    ):
        return statement(rng)
    past = rng.random() < 0.35
    adjective = rng.choice(lx.LIVING_ADJECTIVES)
    role = noun_phrase(rng.choice(_ROLES), rng.choice(("a", "a", "my", "his", "our")), adjective)
    return (
        _sentence(f"{subject.en} {english_be(subject.person, past)} {role.en}"),
        _sentence(
            f"{subject.case('nom')} {german_finite(SEIN, subject.person, past)} {role.case('nom')}"
        ),
    )


def existence(rng: Random) -> Pair:
    """ "There is a dog in the garden": es gibt einen Hund im Garten."""
    noun = rng.choice(lx.ANIMALS + lx.PERSONS + lx.THINGS + lx.FOODS)
    adjective = scenes.adjective_for(rng, noun) if rng.random() < 0.45 else None
    plural = rng.random() < 0.4
    determiner = rng.choice(("many", "some", "=".join(rng.choice(lx.NUMBERS)))) if plural else "a"
    nominal = noun_phrase(noun, determiner, adjective, plural)
    place = scenes.place_at(rng)
    past = rng.random() < 0.4
    be = english_be("3p" if plural else "3s", past)
    verb = "gab" if past else "gibt"
    if rng.random() < 0.2:
        return (
            _sentence(f"{be} there {nominal.en} {place[0]}", "?"),
            _sentence(f"{verb} es {nominal.case('acc')} {place[1]}", "?"),
        )
    return _sentence(f"there {be} {nominal.en} {place[0]}"), _sentence(
        f"es {verb} {nominal.case('acc')} {place[1]}"
    )


def thing_state(rng: Random) -> Pair:
    """ "The key is in the old box", "My shoes are wet": things, not people."""
    noun = rng.choice(lx.THINGS + lx.CLOTHES + lx.FOODS + lx.VEHICLES)
    subject = scenes.phrase(rng, noun)
    past = rng.random() < 0.4
    clause = Clause(subject, BE, SEIN, "past" if past else "present")
    if rng.random() < 0.5:
        clause.place = scenes.place_at(rng)
    else:
        adjective = scenes.adjective_for(rng, noun)
        clause.en_object, clause.de_goal = adjective.en, adjective.de
    if rng.random() < 0.2:
        return _sentence(clause.english_question(), "?"), _sentence(clause.german_inverted(), "?")
    clause.negated = rng.random() < 0.15 and subject.article in ("the", "this", "my", "his", "her")
    return _sentence(clause.english()), _sentence(clause.german())


def gladly(rng: Random) -> Pair:
    """ "The dog likes to sleep": schläft gern."""
    subject = scenes.somebody(rng)
    verb = rng.choice(
        [verb for verb in VERBS if not verb.stative and verb.frame in ("i", "a", "p", "d")]
    )
    clause = Clause(subject, verb.en, verb.de)
    _fill(rng, clause, verb)
    english = f"{subject.en} {_agree(subject, 'likes', 'like')} {clause.english_infinitive()}"
    clause.manner = ("", "gern")
    return _sentence(english), _sentence(clause.german())


def longing(rng: Random) -> Pair:
    """ "I would like to visit the castle": ich möchte das Schloss besuchen."""
    subject = scenes.somebody(rng)
    clause = _infinitive(rng, subject)
    wish = Modal("would like to", "would like to", ("möchte", "möchtest", "möchten"), past=False)
    clause.modal, clause.tense = wish, "modal"
    english = f"{subject.en} would like {clause.english_infinitive()}"
    assert modal_form(wish, subject.person)
    return _sentence(english), _sentence(clause.german())


PATTERNS: dict[Callable[[Random], Pair], int] = {
    statement: 30, fronted: 10, question: 6, wh_question: 7, subordinate: 8, subordinate_first: 5, reported: 5,
    direct_speech: 3, relative_subject: 5, relative_object: 4, coordination: 5, purpose: 4, infinitive: 4,
    passive: 4, command: 4, comparison: 4, identity: 2, existence: 3, thing_state: 4, gladly: 3, longing: 3,
}  # fmt: skip
_CHOICES = tuple(pattern for pattern, weight in PATTERNS.items() for _ in range(weight))


def sentence_pair(rng: Random, held_out: bool = False) -> Pair:
    """An English sentence and its German translation, from the training or from the held-out side."""
    while True:
        english, german = rng.choice(_CHOICES)(rng)
        if is_held_out(english) == held_out:
            return english, german


def passage_pair(rng: Random, held_out: bool = False, max_sentences: int = 3) -> Pair:
    """Mostly one sentence, sometimes two or three."""
    count = 1 if rng.random() < 0.93 else rng.randint(2, max_sentences)
    pairs = [sentence_pair(rng, held_out) for _ in range(count)]
    return " ".join(english for english, _ in pairs), " ".join(german for _, german in pairs)


__all__ = [
    "HELD_OUT_EVERY",
    "PATTERNS",
    "Pair",
    "article_of",
    "is_held_out",
    "passage_pair",
    "sentence_pair",
]
