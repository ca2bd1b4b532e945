"""Sentences of one clause, each with its one German translation."""

from __future__ import annotations

from random import Random

from octavo_demo import lexicon as lx
from octavo_demo import scenes
from octavo_demo.clauses import BE, SEIN, Clause, Modal, english_be, german_finite
from octavo_demo.german import PRONOUNS, Nominal, noun_phrase
from octavo_demo.verbs import VERBS, Verb

Pair = tuple[str, str]

TRANSITIVE = tuple(verb for verb in VERBS if verb.frame == "a" and " " not in verb.en.base)
ACTIVE = tuple(verb for verb in TRANSITIVE if not verb.stative)
_COMMANDS = tuple(
    verb
    for verb in VERBS
    if not verb.stative
    and verb.frame in ("a", "d", "da", "dir", "put", "p")
    and not verb.de.reflexive
)
GOING = tuple(verb for verb in VERBS if verb.frame == "dir")
_STAYING = tuple(verb for verb in VERBS if verb.frame == "loc")
_DATIVE = tuple(verb for verb in VERBS if verb.frame == "d" and " " not in verb.en.base)


def sentence(text: str, mark: str = ".") -> str:
    text = text.removesuffix(",") + mark
    return text[0].upper() + text[1:]


def a_period(rng: Random) -> str:
    return "past" if rng.random() < 0.4 else "present"


def agree(nominal: Nominal, third: str, other: str) -> str:
    return third if nominal.person == "3s" else other


def statement(rng: Random) -> Pair:
    clause = scenes.scene(rng, scenes.somebody(rng))
    return sentence(clause.english()), sentence(clause.german())


def fronted(rng: Random) -> Pair:
    """ "Today the boy reads a book": the verb stays second in German."""
    clause = scenes.scene(rng, scenes.somebody(rng), a_period(rng) if rng.random() < 0.8 else None)
    if clause.place[0] and not clause.time[0] and rng.random() < 0.7:
        english = f"{clause.place[0]} {clause.english(place=False)}"
        return sentence(english), sentence(
            f"{clause.place[1]} {clause.german_inverted(place=False)}"
        )
    time = rng.choice(lx.TIMES)
    if clause.tense not in time.tenses:
        return sentence(f"then {clause.english()}"), sentence(f"dann {clause.german_inverted()}")
    clause.time = (time.en, time.de)
    english = f"{time.en} {clause.english(time=False)}"
    return sentence(english), sentence(f"{time.de} {clause.german_inverted(time=False)}")


def question(rng: Random) -> Pair:
    clause = scenes.scene(rng, scenes.somebody(rng))
    clause.negated = clause.negated and not clause.kein and clause.subject.is_pronoun
    if clause.kein:
        return statement(rng)
    return sentence(clause.english_question(), "?"), sentence(clause.german_inverted(), "?")


def _who(case: str) -> Nominal:
    forms = ("wer", "wen", "wem", "")
    return Nominal("who", "whom", forms, "3s", "he", "m")


def wh_question(rng: Random) -> Pair:
    kind = rng.randrange(7)
    if kind == 0:
        clause = scenes.scene(rng, _who("nom"))
        return sentence(clause.english(), "?"), sentence(clause.german(), "?")
    period = a_period(rng)
    if kind == 1:
        english, german, verb = "where", "wo", rng.choice(_STAYING)
    elif kind == 2:
        english, german, verb = "where", "wohin", rng.choice(GOING)
    elif kind == 3:
        english, german, verb = "whom", "wem", rng.choice(_DATIVE)
    elif kind == 4:
        english, german, verb = "what", "was", rng.choice(ACTIVE)
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
        return sentence(f"{english} {clause.english_question()}", "?"), sentence(
            f"{german} {clause.german_inverted()}", "?"
        )
    clause = Clause(scenes.somebody(rng), verb.en, verb.de)
    scenes.set_tense(rng, clause, period, verb.stative)
    clause.negated = False
    scenes.add_time(rng, clause)
    return sentence(f"{english} {clause.english_question()}", "?"), sentence(
        f"{german} {clause.german_inverted()}", "?"
    )


def passive(rng: Random) -> Pair:
    """ "The cake is baked by the girl": wird vom Mädchen gebacken."""
    verb = rng.choice(ACTIVE)
    patient = scenes.thing_of(rng, verb.objects)
    clause = Clause(patient, verb.en, verb.de, tense=rng.choice(("passive", "past passive")))
    if rng.random() < 0.7:
        agent = scenes.somebody(rng, pronouns=False)
        clause.en_object, clause.de_preposition = f"by {agent.en_object}", agent.after("von", "dat")
    if rng.random() < 0.3:
        time = rng.choice(lx.TIMES)
        if ("past" if clause.past else "present") in time.tenses:
            clause.time = (time.en, time.de)
    return sentence(clause.english()), sentence(clause.german())


def infinitive_clause(rng: Random, subject: Nominal) -> Clause:
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
        filled.de_accusative,
        filled.de_preposition,
        filled.de_goal,
    )


def command(rng: Random) -> Pair:
    clause = infinitive_clause(rng, PRONOUNS["you"])
    english = clause.english_infinitive().removeprefix("to ")
    if rng.random() < 0.4:
        return sentence(f"please {english}"), sentence(f"bitte {clause.german_imperative()}")
    return sentence(english, "!"), sentence(clause.german_imperative(), "!")


def gladly(rng: Random) -> Pair:
    """ "The dog likes to sleep": schläft gern."""
    subject = scenes.somebody(rng)
    verb = rng.choice(
        [verb for verb in VERBS if not verb.stative and verb.frame in ("i", "a", "p", "d")]
    )
    clause = Clause(subject, verb.en, verb.de)
    _fill(rng, clause, verb)
    english = f"{subject.en} {agree(subject, 'likes', 'like')} {clause.english_infinitive()}"
    clause.manner = ("", "gern")
    return sentence(english), sentence(clause.german())


def longing(rng: Random) -> Pair:
    """ "I would like to visit the castle": ich möchte das Schloss besuchen."""
    subject = scenes.somebody(rng)
    clause = infinitive_clause(rng, subject)
    wish = Modal("would like to", "would like to", ("möchte", "möchtest", "möchten"), past=False)
    clause.modal, clause.tense = wish, "modal"
    english = f"{subject.en} would like {clause.english_infinitive()}"
    return sentence(english), sentence(clause.german())


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
            sentence(f"{start_en} {adjective.en_comparative} than {other.en}"),
            sentence(f"{start_de} {adjective.comparative} als {other.case('nom')}"),
        )
    negation = rng.random() < 0.25 and subject.article != "every"
    return (
        sentence(f"{start_en} {'not ' if negation else ''}as {adjective.en} as {other.en}"),
        sentence(
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
    if subject.person not in ("1s", "2s", "3s") or (
        subject.pronoun == "she" and not subject.is_pronoun
    ):
        return statement(rng)
    past = rng.random() < 0.35
    adjective = rng.choice(lx.LIVING_ADJECTIVES)
    role = noun_phrase(rng.choice(_ROLES), rng.choice(("a", "a", "my", "his", "our")), adjective)
    return (
        sentence(f"{subject.en} {english_be(subject.person, past)} {role.en}"),
        sentence(
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
            sentence(f"{be} there {nominal.en} {place[0]}", "?"),
            sentence(f"{verb} es {nominal.case('acc')} {place[1]}", "?"),
        )
    return sentence(f"there {be} {nominal.en} {place[0]}"), sentence(
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
        return sentence(clause.english_question(), "?"), sentence(clause.german_inverted(), "?")
    clause.negated = rng.random() < 0.15 and subject.article in ("the", "this", "my", "his", "her")
    return sentence(clause.english()), sentence(clause.german())
