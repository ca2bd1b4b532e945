"""Single facts: how they are stated, how one asks for them, and what the answer is."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from octavo_demo.lexicon import BOYS, GIRLS, words

HELD_OUT_EVERY = 16

NAMES = (
    BOYS
    + GIRLS
    + words("""
Bruno Felix Matteo Samuel Fritz Heinrich Kurt Walter Rolf Uwe Stefan Georg Albert Edgar Aaron
Pablo Ravi Kenji Omar Yusuf Nadia Amira Yuki Mei Ingrid Astrid Sigrid Katja Petra Ute Heike Birgit
Renate Monika Sabine Claudia Theresa Amelie Charlotte Valerie Isabel Carmen Lucia Fatima Zoe Chloe
Ruby Daisy Ivy Hazel
""")
)
CITIES = words("""
Bremen Hamburg Berlin Munich Cologne Dresden Leipzig Vienna Zurich Basel Paris Lyon London Oxford
York Dublin Rome Milan Naples Madrid Seville Lisbon Porto Oslo Bergen Stockholm Helsinki Warsaw
Prague Budapest Athens Cairo Nairobi Lima Quito Boston Chicago Denver Toronto Sydney Tokyo Kyoto
Seoul Delhi
""")
COLOURS = words("red blue green yellow black white brown grey orange purple pink silver golden")
_PETS = words("""
dog cat parrot rabbit hamster pony turtle canary goldfish snake mouse ferret goat donkey
""")
JOBS = words("""
baker teacher doctor painter farmer gardener sailor tailor cook pilot nurse carpenter lawyer
dentist librarian plumber fisherman singer writer clockmaker judge postman
""")
_INSTRUMENTS = words("""
piano violin flute guitar drum trumpet harp cello organ clarinet accordion banjo
""")
_FOODS = words("""
pancakes soup apples pizza rice noodles cherries cheese salad potatoes plums dumplings waffles
fish
""")
THINGS = words("""
key ring letter map lamp coin book camera umbrella hammer violin mirror candle crown drum kite
scarf flute sword lantern ladder rope clock compass telescope whistle notebook passport wallet
necklace
""")
PLACES = words("""
attic cellar kitchen garden garage library barn tower wardrobe drawer cupboard chest stable bakery
museum school harbour station church mill tent basket suitcase safe shed
""")
_CONTAINERS = words("box safe locker door chest suitcase gate drawer cabinet room")
MONTHS = words("""
January February March April May June July August September October November December
""")
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_SYLLABLES = words("""
ba be bo da do fa fi ga go ka ki ko la lo ma mi mu na no pa po ra ri ro sa so ta ti to va vo za zu
""")


@dataclass(frozen=True, slots=True)
class Fact:
    """One statement, and questions whose whole answer it holds."""

    key: tuple[str, ...]  # what it is about: two facts of a text never share it
    statement: str
    questions: tuple[tuple[str, str], ...]  # question, answer
    reverse: tuple[str, str, str] | None = (
        None  # (value that must be unique in the text, question, answer)
    )


def _digits(rng: Random, count: int) -> str:
    return "".join(str(rng.randrange(10)) for _ in range(count))


def _coined(rng: Random) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4)))


def _home(rng: Random) -> Fact:
    who, city = rng.choice(NAMES), rng.choice(CITIES)
    text = rng.choice(
        (
            f"{who} lives in {city}.",
            f"{who}'s house is in {city}.",
            f"The home of {who} is in {city}.",
        )
    )
    return Fact(
        ("home", who),
        text,
        ((f"Where does {who} live?", city), (f"In which city does {who} live?", city)),
        ("home" + city, f"Who lives in {city}?", who),
    )


def _pet(rng: Random) -> Fact:
    who, pet, its = rng.choice(NAMES), rng.choice(_PETS), rng.choice(NAMES)
    text = rng.choice(
        (
            f"{who} has a {pet} called {its}.",
            f"{who}'s {pet} is called {its}.",
            f"The {pet} of {who} has the name {its}.",
        )
    )
    return Fact(
        ("pet", who, pet),
        text,
        (
            (f"What is {who}'s {pet} called?", its),
            (f"What is the name of the {pet} of {who}?", its),
        ),
    )


def _colour(rng: Random) -> Fact:
    who, colour = rng.choice(NAMES), rng.choice(COLOURS)
    text = rng.choice(
        (
            f"{who}'s favourite colour is {colour}.",
            f"{who} likes {colour} best of all colours.",
            f"The colour that {who} loves is {colour}.",
        )
    )
    return Fact(
        ("colour", who),
        text,
        (
            (f"What is {who}'s favourite colour?", colour),
            (f"Which colour does {who} like best?", colour),
        ),
        ("colour" + colour, f"Whose favourite colour is {colour}?", who),
    )


def _job(rng: Random) -> Fact:
    who, job = rng.choice(NAMES), rng.choice(JOBS)
    text = rng.choice(
        (f"{who} works as a {job}.", f"{who} is a {job}.", f"{who} earns money as a {job}.")
    )
    return Fact(
        ("job", who),
        text,
        ((f"What is {who}'s job?", job), (f"What does {who} work as?", job)),
        ("job" + job, f"Who works as a {job}?", who),
    )


def _keeps(rng: Random) -> Fact:
    who, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    colour = rng.choice(COLOURS)
    thing = f"{colour} {thing}" if rng.random() < 0.5 else thing
    text = rng.choice(
        (
            f"{who} keeps the {thing} in the {place}.",
            f"{who} has put the {thing} in the {place}.",
            f"In the {place}, {who} keeps the {thing}.",
        )
    )
    return Fact(
        ("keeps", who, thing),
        text,
        (
            (f"Where does {who} keep the {thing}?", f"in the {place}"),
            (f"Where is {who}'s {thing}?", f"in the {place}"),
        ),
    )


def _code(rng: Random) -> Fact:
    container, colour, code = (
        rng.choice(_CONTAINERS),
        rng.choice(COLOURS),
        _digits(rng, rng.randint(3, 6)),
    )
    text = rng.choice(
        (
            f"The code of the {colour} {container} is {code}.",
            f"You open the {colour} {container} with the number {code}.",
            f"The {colour} {container} has the code {code}.",
        )
    )
    return Fact(
        ("code", container, colour),
        text,
        (
            (f"What is the code of the {colour} {container}?", code),
            (f"Which number opens the {colour} {container}?", code),
        ),
    )


def _word(rng: Random) -> Fact:
    who, word = rng.choice(NAMES), _coined(rng)
    text = rng.choice(
        (
            f"The password of {who} is {word}.",
            f"{who}'s password is {word}.",
            f"{who} uses the password {word}.",
        )
    )
    return Fact(
        ("word", who),
        text,
        ((f"What is the password of {who}?", word), (f"Which password does {who} use?", word)),
    )


def _birthday(rng: Random) -> Fact:
    who, day = rng.choice(NAMES), f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"
    text = rng.choice(
        (
            f"{who}'s birthday is on {day}.",
            f"{who} was born on {day}.",
            f"On {day}, {who} has a birthday.",
        )
    )
    return Fact(
        ("birthday", who),
        text,
        ((f"When is {who}'s birthday?", day), (f"On which day was {who} born?", day)),
    )


def _age(rng: Random) -> Fact:
    who, age = rng.choice(NAMES), str(rng.randint(5, 99))
    text = rng.choice((f"{who} is {age} years old.", f"{who}'s age is {age}."))
    return Fact(
        ("age", who), text, ((f"How old is {who}?", age), (f"What is the age of {who}?", age))
    )


def _food(rng: Random) -> Fact:
    who, food = rng.choice(NAMES), rng.choice(_FOODS)
    text = rng.choice((f"{who} likes to eat {food}.", f"{who}'s favourite food is {food}."))
    return Fact(
        ("food", who),
        text,
        ((f"What does {who} like to eat?", food), (f"What is {who}'s favourite food?", food)),
    )


def _instrument(rng: Random) -> Fact:
    who, instrument = rng.choice(NAMES), rng.choice(_INSTRUMENTS)
    text = rng.choice(
        (f"{who} plays the {instrument}.", f"{who} practises the {instrument} every day.")
    )
    return Fact(
        ("plays", who),
        text,
        (
            (f"Which instrument does {who} play?", instrument),
            (f"What does {who} play?", instrument),
        ),
        ("plays" + instrument, f"Who plays the {instrument}?", who),
    )


def _price(rng: Random) -> Fact:
    thing, colour, price = rng.choice(THINGS), rng.choice(COLOURS), str(rng.randint(2, 999))
    text = rng.choice(
        (
            f"The {colour} {thing} costs {price} coins.",
            f"The price of the {colour} {thing} is {price} coins.",
        )
    )
    return Fact(
        ("price", thing, colour),
        text,
        (
            (f"How many coins does the {colour} {thing} cost?", price),
            (f"What is the price of the {colour} {thing}?", f"{price} coins"),
        ),
    )


def _meeting(rng: Random) -> Fact:
    who, other, day = rng.choice(NAMES), rng.choice(NAMES), rng.choice(WEEKDAYS)
    text = rng.choice((f"On {day}, {who} meets {other}.", f"{who} meets {other} on {day}."))
    return Fact(
        ("meets", who),
        text,
        ((f"Whom does {who} meet?", other), (f"On which day does {who} meet {other}?", day)),
    )


KINDS: tuple[Callable[[Random], Fact], ...] = (
    _home,
    _pet,
    _colour,
    _job,
    _keeps,
    _keeps,
    _code,
    _code,
    _word,
    _birthday,
    _age,
    _food,
    _instrument,
    _price,
    _meeting,
)


def is_held_out(statement: str) -> bool:
    return zlib.crc32(statement.encode()) % HELD_OUT_EVERY == 0
