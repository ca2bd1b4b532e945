"""Random clauses of the demo world: who can do what, to whom, where and when."""

from __future__ import annotations

from random import Random

from octavo_demo import lexicon as lx
from octavo_demo.clauses import BE, BLEIBEN, MODALS, SEIN, WERDEN, Clause
from octavo_demo.german import PRONOUNS, Nominal, name, noun_phrase, possessed
from octavo_demo.verbs import VERBS, Verb, english_verb


def _named(*words: str) -> tuple[lx.Noun, ...]:
    return tuple(
        noun for noun in (*lx.THINGS, *lx.FOODS, *lx.MASS_FOODS, *lx.FURNITURE) if noun.en in words
    )


_CATEGORIES: dict[str, tuple[lx.Noun, ...]] = {
    "living": lx.PERSONS + lx.ANIMALS,
    "person": lx.PERSONS,
    "animal": lx.ANIMALS,
    "thing": lx.THINGS,
    "food": lx.FOODS,
    "massfood": lx.MASS_FOODS,
    "drink": lx.DRINKS,
    "clothes": lx.CLOTHES,
    "vehicle": lx.VEHICLES,
    "furniture": lx.FURNITURE,
    "openable": lx.OPENABLE,
    "place": tuple(place.noun for place in lx.PLACES),
    "readable": _named("book", "letter", "newspaper"),
    "cookable": _named("soup", "rice", "egg", "potato", "sausage", "carrot", "tomato"),
    "bakeable": _named("cake", "bread", "roll", "biscuit", "pancake"),
    "container": _named("box", "bag", "chest", "bottle", "letter", "present", "tent"),
    "throwable": _named("ball", "stone", "apple", "coin", "nut"),
    "countable": _named(
        "stone", "coin", "leaf", "flower", "nut", "apple", "book", "feather", "pearl"
    ),
    "breakable": _named("cup", "glass", "plate", "mirror", "bottle", "lamp", "egg", "pencil"),
    "pickable": _named("flower", "rose", "apple", "pear", "cherry", "plum", "strawberry"),
    "lightable": _named("candle", "lamp", "lantern"),
    "sendable": _named("letter", "present", "book", "picture", "map"),
    "toy": _named("ball", "doll", "drum"),
}
_MASS = frozenset(lx.MASS_FOODS + lx.DRINKS)
_ADJECTIVES = {
    **dict.fromkeys(lx.PERSONS + lx.ANIMALS, lx.LIVING_ADJECTIVES),
    **dict.fromkeys(lx.FOODS, lx.FOOD_ADJECTIVES + lx.SIZES + lx.COLOURS[:3]),
    **dict.fromkeys(lx.MASS_FOODS + lx.DRINKS, lx.FOOD_ADJECTIVES),
    **dict.fromkeys((place.noun for place in lx.PLACES), lx.PLACE_ADJECTIVES + lx.SIZES[:4]),
}
_OTHER_ADJECTIVES = lx.THING_ADJECTIVES + lx.SIZES + lx.COLOURS
_POSSESSIVES = ("my", "your", "his", "her", "our", "their")
_PREPOSITIONS = (  # under, behind, in front of, next to: where furniture and trees are
    ("under", "unter"),
    ("behind", "hinter"),
    ("in front of", "vor"),
    ("next to", "neben"),
    ("on", "auf"),
)
_ON = _named("table", "bed", "bench", "sofa", "shelf", "carpet", "chair")
_QUANTIFIERS = frozenset({"every", "many", "some", *(english for english, _ in lx.NUMBERS)})
_FRAMES_WITH_MANNER = ("i", "a", "dir", "put", "d")


def adjective_for(rng: Random, noun: lx.Noun) -> lx.Adjective:
    return rng.choice(_ADJECTIVES.get(noun, _OTHER_ADJECTIVES))


def phrase(rng: Random, noun: lx.Noun, definite: bool = False, singular: bool = False) -> Nominal:
    """A noun with a determiner and perhaps an adjective."""
    roll = rng.random()
    if noun in _MASS:
        adjective = adjective_for(rng, noun) if rng.random() < 0.35 else None
        return noun_phrase(noun, rng.choice(("", "", "the", rng.choice(_POSSESSIVES))), adjective)
    adjective = adjective_for(rng, noun) if rng.random() < 0.36 else None
    if roll < 0.46 or (definite and roll < 0.7):
        if adjective and adjective in lx.LIVING_ADJECTIVES and rng.random() < 0.12:
            return noun_phrase(noun, "the", adjective, degree="superlative")
        return noun_phrase(noun, "the", adjective)
    if roll < 0.64 or (definite and singular):
        return noun_phrase(noun, "this" if definite else "a", adjective)
    if roll < 0.78:
        return noun_phrase(
            noun, rng.choice(_POSSESSIVES), adjective, plural=not singular and rng.random() < 0.2
        )
    if roll < 0.82:
        owner = rng.choice(lx.BOYS + lx.GIRLS)
        return noun_phrase(noun, f"{owner}'s={owner}s", adjective)
    if roll < 0.85:
        return noun_phrase(noun, "this", adjective)
    if roll < 0.87 and not definite:
        return noun_phrase(noun, "every", adjective)
    if roll < 0.89:
        owner_noun = rng.choice(lx.PERSONS)
        return possessed(noun_phrase(owner_noun, "the"), noun_phrase(noun, "the", adjective))
    if singular:
        return noun_phrase(noun, "a", adjective)
    if roll < 0.92:
        return noun_phrase(noun, "the", adjective, plural=True)
    if roll < 0.94:
        return noun_phrase(noun, "these", adjective, plural=True)
    if roll < 0.97 and not definite:
        return noun_phrase(noun, rng.choice(("many", "some", "")), adjective, plural=True)
    return noun_phrase(noun, "=".join(rng.choice(lx.NUMBERS)), adjective, plural=True)


def person_name(rng: Random) -> Nominal:
    girl = rng.random() < 0.5
    return name(rng.choice(lx.GIRLS if girl else lx.BOYS), girl)


def somebody(rng: Random, pronouns: bool = True) -> Nominal:
    """A subject that can act."""
    roll = rng.random()
    if pronouns and roll < 0.2:
        return PRONOUNS[rng.choice(("I", "you", "he", "she", "we", "they"))]
    if roll < 0.38:
        return person_name(rng)
    return phrase(rng, rng.choice(lx.PERSONS if roll < 0.72 else lx.ANIMALS))


def thing_of(rng: Random, categories: tuple[str, ...]) -> Nominal:
    """An object for a verb."""
    category = rng.choice(categories)
    if category == "living" and rng.random() < 0.15:
        return person_name(rng)
    return phrase(rng, rng.choice(_CATEGORIES[category]))


def place_at(rng: Random) -> tuple[str, str]:
    """Where: "in the garden", "under the old tree"."""
    if rng.random() < 0.7:
        place = rng.choice(lx.PLACES)
        nominal = _place_phrase(rng, place)
        return f"{place.en_at} {nominal.en}", nominal.after(place.de_at, "dat")
    english, german = rng.choice(_PREPOSITIONS)
    nominal = phrase(
        rng, rng.choice(_ON if english == "on" else lx.FURNITURE), definite=True, singular=True
    )
    return f"{english} {nominal.en}", nominal.after(german, "dat")


def goal(rng: Random, for_things: bool = False) -> tuple[str, str]:
    """Where to: "into the garden", "to the school", "through the dark forest"."""
    roll = rng.random()
    if for_things and roll < 0.5:
        furniture = phrase(rng, rng.choice(_ON), definite=True, singular=True)
        return f"onto {furniture.en}", furniture.after("auf", "acc")
    place = rng.choice(lx.PLACES)
    nominal = _place_phrase(rng, place)
    if not for_things and roll < 0.08:
        return f"through {nominal.en}", nominal.after("durch", "acc")
    if for_things and place.en_to == "to":
        return f"into {nominal.en}", nominal.after("in", "acc")
    return f"{place.en_to} {nominal.en}", nominal.after(place.de_to, place.to_case)


def _place_phrase(rng: Random, place: lx.Place) -> Nominal:
    adjective = adjective_for(rng, place.noun) if rng.random() < 0.2 else None
    determiner = "the" if rng.random() < 0.75 else rng.choice(("a", *_POSSESSIVES))
    return noun_phrase(place.noun, determiner, adjective)


def set_tense(rng: Random, clause: Clause, period: str | None, stative: bool = False) -> None:
    """A tense of the period ("present" or "past"; None: any), and perhaps a modal or a negation."""
    person, verb = clause.subject.person, clause.en_verb
    # "they read", "you put": English does not tell past from present; these stay in the present.
    past_is_clear = (verb.base != verb.past or person == "3s") and (person != "2s" or verb is BE)
    if period is None:
        roll = rng.random()
        period = (
            "past"
            if roll < 0.38
            else "present"
            if roll < 0.78
            else "perfect"
            if roll < 0.9
            else "future"
        )
    roll = rng.random()
    modal_share = 0.05 if stative else 0.16
    if period in ("perfect", "future"):
        clause.tense = period
    elif period == "past":
        if roll < modal_share or not past_is_clear:
            _set_modal(rng, clause, past=True)
        else:
            clause.tense = "past"
    elif roll < modal_share:
        _set_modal(rng, clause, past=False)
    elif roll > 0.88 and not stative and verb is not BE:
        clause.tense = "progressive"
    quantified = clause.subject.article.partition("=")[0] in _QUANTIFIERS
    if rng.random() < 0.13 and (clause.modal is None or clause.modal.negatable) and not quantified:
        clause.negated = True


def _set_modal(rng: Random, clause: Clause, past: bool) -> None:
    clause.tense = "modal"
    clause.modal = rng.choice([modal for modal in MODALS if modal.past == past])


def _is_indefinite(nominal: Nominal) -> bool:
    return nominal.article == "a" or (
        nominal.article == "" and not nominal.is_pronoun and nominal.en[0].islower()
    )


def _set_accusative(clause: Clause, nominal: Nominal) -> None:
    """ "does not eat an apple": "isst keinen Apfel"; an indefinite object carries the negation."""
    if nominal.article.partition("=")[0] in _QUANTIFIERS:
        clause.negated = False  # "not every", "not many" have word orders of their own
    clause.kein = clause.negated and _is_indefinite(nominal)
    clause.de_accusative = _kein(nominal, "acc") if clause.kein else nominal.case("acc")


def _kein(nominal: Nominal, case: str) -> str:
    form = nominal.case(case)
    if nominal.article == "a":
        return "k" + form
    ending = {"m": {"acc": "en"}, "n": {"acc": ""}}.get(nominal.gender, {"acc": "e"})[case]
    head, *rest = form.split(" ")
    if rest:  # "kalte Milch" -> "keine kalte Milch", "frische Äpfel" -> "keine frischen Äpfel"
        head = head + "n" if nominal.gender == "p" else head
    return " ".join([f"kein{ending}", head, *rest])


def _add_object(rng: Random, clause: Clause, verb: Verb) -> None:
    """Fill the object slots that the verb's frame asks for."""
    if verb.frame == "a":
        if rng.random() < 0.1 and "living" in verb.objects:
            pronoun = PRONOUNS[rng.choice(("he", "she", "they"))]
            if clause.subject.person in ("1s", "2s", "1p") or clause.subject.pronoun != pronoun.en:
                clause.en_object, clause.de_pronoun = pronoun.en_object, pronoun.case("acc")
                return
        nominal = thing_of(rng, verb.objects)
        clause.en_object = nominal.en_object
        _set_accusative(clause, nominal)
    elif verb.frame in ("d", "da"):
        receiver: Nominal
        if rng.random() < 0.2:
            receiver = PRONOUNS[
                rng.choice(
                    [p for p in ("I", "you", "he", "she", "we", "they") if p != clause.subject.en]
                )
            ]
            clause.de_pronoun = receiver.case("dat")
        else:
            receiver = thing_of(rng, ("living",))
            clause.de_dative = receiver.case("dat")
            if _is_indefinite(receiver) or receiver.article.partition("=")[0] in _QUANTIFIERS:
                clause.negated = False
        clause.en_object = receiver.en_object
        if verb.frame == "da":
            gift = thing_of(rng, verb.objects)
            clause.en_object += f" {gift.en_object}"
            _set_accusative(clause, gift)
    elif verb.frame == "p":
        nominal = thing_of(rng, verb.objects)
        clause.en_object = f"{verb.en_preposition} {nominal.en_object}".strip()
        clause.de_preposition = nominal.after(verb.de_preposition, verb.case)
    elif verb.frame == "dir":
        clause.en_object, clause.de_goal = goal(rng)
    elif verb.frame == "put":
        nominal = phrase(rng, rng.choice(_CATEGORIES[rng.choice(verb.objects)]), definite=True)
        target = goal(rng, for_things=True)
        clause.en_object = f"{nominal.en_object} {target[0]}"
        clause.de_goal = target[1]
        _set_accusative(clause, nominal)


def action(
    rng: Random,
    subject: Nominal,
    period: str | None = None,
    plain: bool = False,
    verb: Verb | None = None,
) -> Clause:
    """A clause with a full verb. `plain` leaves out adverbials, negation and compound tenses."""
    verb = verb or rng.choice(VERBS)
    clause = Clause(subject, verb.en, verb.de)
    set_tense(rng, clause, period, verb.stative)
    if plain:
        clause.negated = False
    _add_object(rng, clause, verb)
    if verb.frame == "loc":
        clause.place = place_at(rng)
    if plain:
        return clause
    if verb.frame in ("i", "a", "p", "d") and not verb.stative and rng.random() < 0.25:
        clause.place = place_at(rng)
    if clause.negated:
        clause.place = clause.place if verb.frame == "loc" else ("", "")
        return clause
    if (
        verb.frame in _FRAMES_WITH_MANNER
        and not verb.stative
        and not clause.place[0]
        and rng.random() < 0.15
    ):
        manner = rng.choice(lx.MANNERS)
        clause.manner = (manner.en, manner.de)
    add_time(rng, clause, verb.stative)
    return clause


def add_time(rng: Random, clause: Clause, stative: bool = False) -> None:
    roll = rng.random()
    if roll < 0.22 and clause.tense in ("present", "past", "future"):
        time = rng.choice(lx.TIMES)
        if clause.tense in time.tenses:
            clause.time = (time.en, time.de)
    elif roll < 0.34 and clause.tense in ("present", "past", "perfect"):
        frequency = rng.choice(lx.FREQUENCIES)
        clause.frequency = (frequency.en, frequency.de)


_STATES = (
    (BE, SEIN),
    (BE, SEIN),
    (BE, SEIN),
    (english_verb("become"), WERDEN),
    (english_verb("stay"), BLEIBEN),
)


def state(rng: Random, subject: Nominal, period: str | None = None, plain: bool = False) -> Clause:
    """A clause that says how somebody is, becomes or stays: "The old dog is always tired"."""
    english, german = rng.choice(_STATES)
    clause = Clause(subject, english, german)
    set_tense(rng, clause, period, stative=True)
    if plain:
        clause.negated = False
    adjective = rng.choice(lx.LIVING_ADJECTIVES)
    clause.en_object, clause.de_goal = adjective.en, adjective.de
    if not plain and not clause.negated:
        add_time(rng, clause, stative=True)
    return clause


def scene(rng: Random, subject: Nominal, period: str | None = None, plain: bool = False) -> Clause:
    return (state if rng.random() < 0.18 else action)(rng, subject, period, plain)
