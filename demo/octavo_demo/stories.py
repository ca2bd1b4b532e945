# ruff: noqa: E501  (a template reads better on one line)
"""Short English stories: a hero, a place, a plot with causes and effects, dialogue, and an end."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from random import Random

from octavo_demo.lexicon import BOYS, GIRLS, words
from octavo_demo.plots import PLOTS_ONE, Plot
from octavo_demo.plots_two import PLOTS_TWO
from octavo_demo.templates import fill

PLOTS = PLOTS_ONE + PLOTS_TWO
HELD_OUT_EVERY = 64

KINDS = words("""
fox bear rabbit hedgehog mouse squirrel owl badger otter cat dog hare frog duck goose pony lamb
beaver raven mole lion elephant monkey penguin dragon turtle donkey wolf hen kitten sparrow snail
""")
_CHILDREN = (
    ("boy", False),
    ("girl", True),
    ("shepherd boy", False),
    ("miller's daughter", True),
    ("prince", False),
    ("princess", True),
    ("young sailor", False),
    ("little witch", True),
    ("young wizard", False),
    ("fisherman's son", False),
    ("baker's daughter", True),
    ("gardener", False),
    ("seamstress", True),
)
_TRAITS = words("""
curious brave shy clever kind cheerful quiet patient stubborn friendly dreamy careful lively
gentle
""")
_SIZES = ("little", "small", "young", "tiny", "", "", "big", "clever little")
_SETTINGS = (
    "a small village by the sea",
    "the valley behind the seven hills",
    "a village at the edge of the forest",
    "the old harbour town",
    "the quiet town by the river",
    "a green valley",
    "the forest of tall pines",
    "the land of the small islands",
    "the mountains",
    "a hamlet between two hills",
    "the town with the crooked tower",
    "the meadows by the lake",
    "the land of the thousand lakes",
)
_DAYTIMES = (
    "morning",
    "evening",
    "afternoon",
    "Sunday morning",
    "summer evening",
    "winter morning",
    "spring day",
    "autumn day",
)
_WEATHERS = (
    "sunny",
    "rainy",
    "windy",
    "cold",
    "bright",
    "foggy",
    "warm",
    "grey",
    "snowy",
    "stormy",
)
_SEASONS = ("spring", "summer", "autumn", "winter")
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_OPENINGS = (
    "Once upon a time there was {a_hero} {named} {hero}, who lived in {place}.",
    "Once upon a time, in {place}, there lived {a_hero} {named} {hero}.",
    "Long ago, {a_hero} {named} {hero} lived in {place}.",
    "In {place} lived {a_hero} {named} {hero}.",
    "There was once {a_hero} {named} {hero}.",
    "{Hero} was {a_hero} who lived in {place}.",
    "Have you ever heard of {hero}? {He} was {a_hero} from {place}.",
    "Not so long ago, {a_hero} {named} {hero} lived in {place}.",
    "[One day|One {daytime}|On a {weather} {daytime}], {a_hero} {named} {hero} was sitting in front of the house in {place}.",
    "This is the story of {hero}, {a_hero} from {place}.",
    "It was a {weather} {daytime} in {place}. {Hero}, {a_hero}, had just woken up.",
    "{Hero} and {friend} lived in {place}. {Hero} was {a_hero}.",
    "Far away, in {place}, there lived {a_hero} whose name was {hero}.",
)
_DESCRIPTIONS = (
    "{He} was {third_trait} and [loved|liked] [long walks|warm bread|the smell of rain|songs|stories|the first snow|strawberries].",
    "Everybody knew {him}, because {he} was so {trait}.",
    "{He} lived in a [little|crooked|yellow|stone|wooden] house [with a red roof|under an old oak|beside the mill|at the end of the lane].",
    "{His} best friend was {a_friend} {named} {friend}.",
    "{He} had a friend {named} {friend}, {a_friend}, and the two of them were [always together|never bored].",
    "[Most days|Usually] {he} [helped the neighbours|sat by the river|looked after the garden|sang to {himself}].",
    "{He} was not [rich|tall|famous], but {he} was {other_trait}.",
)
_WHO_FRIEND = (
    "{friend}, {a_friend}, lived [next door|on the other side of the river|just around the corner]."
)
_ENDINGS = (
    "",
    "",
    "",
    "The end.",
    "And that is the end of the story.",
    "And so they lived happily for many years.",
    "And if you go to {place}, you can still hear people tell it.",
    "{Hero} slept well that night.",
    "That evening {hero} and {friend} [watched the stars|sat by the fire|shared a pot of tea] and were happy.",
)


@dataclass(frozen=True, slots=True)
class Story:
    """A story, with what a request for it could mention."""

    text: str
    hero: str
    kind: str
    friend: str
    place: str
    about: str


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _definite(phrase: str) -> str:
    article, _, rest = phrase.partition(" ")
    return f"the {rest}" if article in ("a", "an") else phrase


def _character(rng: Random, role: str, slots: dict[str, str], taken: str) -> str:
    """Fill the slots of a character and return its kind."""
    if rng.random() < 0.62:
        kind, girl = rng.choice(KINDS), rng.random() < 0.5
    else:
        kind, girl = rng.choice(_CHILDREN)
    name = taken
    while name == taken:
        name = rng.choice(GIRLS if girl else BOYS)
    he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
    size = "" if " " in kind else rng.choice(_SIZES)
    slots |= {role: name, role.capitalize(): name, f"a_{role}": _article(f"{size} {kind}".strip())}
    prefix = "" if role == "hero" else "f"
    slots |= {
        f"{prefix}he": he,
        f"{prefix}him": him,
        f"{prefix}his": his,
        f"{prefix}himself": f"{him}self" if girl else "himself",
    }
    slots |= {f"{prefix.upper()}He": he.capitalize(), f"{prefix.upper()}His": his.capitalize()}
    return kind


def _slots(rng: Random, plot: Plot) -> tuple[dict[str, str], str]:
    slots = {
        "place": rng.choice(_SETTINGS),
        "daytime": rng.choice(_DAYTIMES),
        "weather": rng.choice(_WEATHERS),
        "season": rng.choice(_SEASONS),
        "weekday": rng.choice(_WEEKDAYS),
        "named": rng.choice(("named", "called")),
        "bhis": "his",
        "its": "its",
    }
    slots |= zip(("trait", "other_trait", "third_trait"), rng.sample(_TRAITS, 3), strict=True)
    kind = _character(rng, "hero", slots, "")
    _character(rng, "friend", slots, slots["hero"])
    bundle = rng.choice(plot.bundles)
    slots |= bundle
    slots |= {
        key.capitalize(): value[0].upper() + value[1:]
        for key, value in bundle.items()
        if key in ("rival", "answer")
    }
    slots |= {
        f"the_{key}": _definite(value)
        for key, value in bundle.items()
        if key in ("guide", "helper")
    }
    return slots, kind


def _write(rng: Random) -> Story:
    plot = rng.choice(PLOTS)
    slots, kind = _slots(rng, plot)
    opening = rng.choice(_OPENINGS)
    intro = [opening, *rng.sample(_DESCRIPTIONS, rng.randrange(0, 3))]
    friend_is_known = any("{friend}" in part for part in intro)
    beats = [
        beat.removeprefix("?")
        for beat in plot.beats
        if not beat.startswith("?") or rng.random() < 0.5
    ]
    if not friend_is_known and any("{friend}" in beat for beat in beats):
        intro.append(
            _WHO_FRIEND if rng.random() < 0.6 else "{His} best friend was {friend}, {a_friend}."
        )
    beats.append(rng.choice(_ENDINGS))
    sentences = [fill(rng, " ".join(intro), slots)]
    slots["place"] = _definite(slots["place"])
    sentences += [fill(rng, beat, slots).strip() for beat in beats if beat]
    text = sentences[0]
    for position, sentence in enumerate(sentences[1:]):
        # A new paragraph every two or three beats.
        text += ("\n" if position in (1, 4, 6) else " ") + sentence
    return Story(
        text,
        slots["hero"],
        kind,
        slots["friend"],
        slots["place"],
        fill(rng, rng.choice(plot.about), slots),
    )


def is_held_out(text: str) -> bool:
    return zlib.crc32(text.encode()) % HELD_OUT_EVERY == 0


def story(rng: Random, held_out: bool = False) -> Story:
    """A story from the training or from the held-out side."""
    while True:
        told = _write(rng)
        if is_held_out(told.text) == held_out:
            return told


_REQUESTS = (
    "[Tell me|Write|Please tell me|Can you tell me|Write me|Make up] a [short story|story|little story] about {about}.",
    "[Tell me|Write|Please tell me|I would like] a [short story|story] about {a_kind}.",
    "[Tell me|Write|Please write] a [short story|story] about {a_kind} [named|called] {hero}.",
    "[Tell me|Write] a [short story|story] about {a_kind} and {about}.",
    "[Tell me|Write] a [short story|story] about {hero} and {friend}.",
    "[Tell me|Write] a story that [takes place|happens] in {place}.",
    "[Tell me a story.|Tell me a story, please.|Write a short story.|A story, please!|I want to hear a story.|Do you know a good story?|Can you tell me a story?]",
    "[Tell me a bedtime story|Write a story for children] about {hero} the {kind}.",
)
ANOTHER = (
    "[Tell me another one.|Another story, please!|And one more?|Tell me a different story.]",
    "[Another one about|Now one about|And now a story about] {about}.",
    "[Now tell me a story about|And one about] {a_kind} [named|called] {hero}.",
)


def request(rng: Random, told: Story, another: bool = False) -> str:
    """What somebody might say to hear this story."""
    slots = {
        "about": told.about,
        "hero": told.hero,
        "friend": told.friend,
        "kind": told.kind,
        "place": told.place,
        "a_kind": _article(told.kind),
    }
    return fill(rng, rng.choice(ANOTHER if another else _REQUESTS), slots)
