"""Kinds of tools: how they may be defined, what one asks for them, what they give and what is then
the answer."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from octavo_demo.fact_kinds import (
    CITIES,
    COLOURS,
    JOBS,
    MONTHS,
    NAMES,
    PLACES,
    THINGS,
    WEEKDAYS,
)
from octavo_demo.lexicon import ANIMALS, FOODS, PERSONS, words
from octavo_demo.sentences import sentence_pair

QUESTION_HELD_OUT_EVERY = 16
NAME_HELD_OUT_EVERY = 8

Scalar = str | int
Value = Scalar | Mapping[str, Scalar]  # what a tool gives: one thing, or fields


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of a tool: what it may be called, how it may be described, its JSON schema."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a tool."""

    question: str
    values: tuple[Scalar, ...]  # one for each parameter
    value: Value
    answer: str


@dataclass(frozen=True, slots=True)
class ToolKind:
    """Tools that can do the same, under many names.

    Attributes:
        covers: what it can do; two tools of one chat never cover the same.
        names: of the function.
        descriptions: of the function.
        parameters: in the order of `Use.values`.
        keys: what its result may be called, where that is an object.
        use: makes a use of it.
    """

    covers: tuple[str, ...]
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    keys: tuple[str, ...]
    use: Callable[[Random], Use]


def is_question_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % QUESTION_HELD_OUT_EVERY == 0


def is_name_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % NAME_HELD_OUT_EVERY == 0


_TEXT: Mapping[str, Any] = {"type": "string"}
_INTEGER: Mapping[str, Any] = {"type": "integer"}

_ASK = words("get find fetch look_up show check read query search retrieve lookup tell")

_ONSETS = words("b c d f g h j k l m n p r s t v w z br cl dr fl gr kl pr sh st tr th ch qu sk")
_VOWELS = words("a e i o u a e i o u ai ea ee oo ou y")
_CODAS = ("", "", "", *words("n r l s t m nd rt st x ck ng"))


def coined(rng: Random) -> str:
    """A word that is in no lexicon."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.choice((1, 2, 2, 2, 3)))
    )


def _typed(rng: Random, subject: str) -> str:
    """Now and then in small letters; arguments are as they are in the question."""
    return subject.lower() if rng.random() < 0.06 else subject


def _somebody(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.8 else coined(rng).capitalize()


def _somewhere(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.65:
        return rng.choice(CITIES)
    city = coined(rng).capitalize()
    return city if roll < 0.88 else f"{rng.choice(words('New San Old Port Saint Los'))} {city}"


def _something(rng: Random) -> str:
    thing = rng.choice(THINGS) if rng.random() < 0.8 else coined(rng)
    return f"{rng.choice(COLOURS)} {thing}" if rng.random() < 0.5 else thing


def _number(rng: Random) -> int:
    return rng.randrange(10 ** rng.randint(1, 4))


def _clock(rng: Random) -> str:
    return f"{rng.randrange(24)}:{rng.randrange(60):02}"


def _day(rng: Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"


def _names(verbs: tuple[str, ...], nouns: tuple[str, ...]) -> tuple[str, ...]:
    """Every verb before every noun, and the nouns alone."""
    return (*(f"{verb}_{noun}" for verb in verbs for noun in nouns), *nouns)


_PERSON = Parameter(
    words("name person who friend user first_name"),
    ("The name of the person.", "Whose it is.", "The person, for example Anna.", "A first name."),
    _TEXT,
)
_CITY = Parameter(
    words("city location place town where"),
    (
        "The city.",
        "The name of the city.",
        "The name of a city",
        "A place, for example Rome.",
        "Where.",
        "The city and state, e.g. San Francisco, CA",
        "City and country, e.g. Paris, France",
    ),
    _TEXT,
)
_THING = Parameter(
    words("thing item object what product"),
    ("The thing.", "What it is about.", "The name of the thing.", "For example red key."),
    _TEXT,
)


def _about(
    topic: str,
    nouns: str,
    descriptions: tuple[str, ...],
    parameter: Parameter,
    subject: Callable[[Random], str],
    questions: tuple[str, ...],
    value: Callable[[Random], Value],
    answer: str,
) -> ToolKind:
    """A tool that knows one thing about each subject."""

    def use(rng: Random) -> Use:
        about, found = _typed(rng, subject(rng)), value(rng)
        question = rng.choice(questions).format(about)
        return Use(question, (about,), found, answer.format(about, found))

    return ToolKind(
        (topic,),
        _names(_ASK, words(nouns)),
        descriptions,
        (parameter,),
        (*words(nouns), "result", "value", "answer"),
        use,
    )


_SKIES = words("""
sunny rainy cloudy foggy windy snowy stormy cold warm hot dry wet bright grey mild clear freezing
""")


def _weather(rng: Random) -> Use:
    city, sky, degrees = _typed(rng, _somewhere(rng)), rng.choice(_SKIES), rng.randint(-15, 38)
    question = rng.choice(
        (
            "What is the weather like in {}?",
            "What is the weather in {}?",
            "What's the weather like in {}?",
            "What's the weather in {}?",
            "How is the weather in {}?",
            "How's the weather in {} today?",
            "What is the weather like in {} today?",
            "Tell me the weather in {}.",
            "Is it raining in {}?",
            "Is it warm in {}?",
            "Do I need an umbrella in {}?",
            "How cold is it in {}?",
        )
    ).format(city)
    warmth = rng.choice(words("temperature degrees celsius temp"))
    told = rng.choice(words("weather sky condition conditions description"))
    both = f"{sky} and {degrees} degrees"
    results: tuple[tuple[Value, str], ...] = (
        (sky, sky),
        (both, both),
        (f"{degrees} degrees", f"{degrees} degrees"),
        ({told: sky}, sky),
        ({warmth: degrees}, f"{degrees} degrees"),
        ({told: sky, warmth: degrees}, both),
        ({warmth: degrees, told: sky}, both),
    )
    value, text = rng.choice(results)
    if isinstance(value, Mapping) and rng.random() < 0.3:
        value = {"city": city, **value}
    if isinstance(value, Mapping) and rng.random() < 0.2:
        value = {**value, "unit": "celsius"}
    return Use(question, (city,), value, f"It is {text} in {city}.")


def _message(rng: Random) -> Use:
    who = _somebody(rng)
    text = sentence_pair(rng)[0]
    question = rng.choice(
        (
            "Send {} this message: {}",
            "Send a message to {}: {}",
            "Write to {}: {}",
            "Send {} the message: {}",
            "Text {}: {}",
        )
    ).format(who, text)
    return Use(question, (who, text), rng.choice(_DONE), f"I have sent your message to {who}.")


_DONE = ("ok", "done", "sent", "success", "true", "yes")


def _light(rng: Random) -> Use:
    room, state = rng.choice(PLACES), rng.choice(("on", "off"))
    question = rng.choice(
        (
            "Turn {1} the light in the {0}.",
            "Switch {1} the light in the {0}.",
            "Please turn {1} the lamp in the {0}.",
            "Turn the light in the {0} {1}.",
            "Light {1} in the {0}, please.",
        )
    ).format(room, state)
    return Use(question, (room, state), rng.choice(_DONE), f"The light in the {room} is {state}.")


def _timer(rng: Random) -> Use:
    minutes = rng.randint(2, 120)
    question = rng.choice(
        (
            "Set a timer for {} minutes.",
            "Wake me in {} minutes.",
            "Start a timer of {} minutes.",
            "Remind me in {} minutes.",
        )
    ).format(minutes)
    return Use(question, (minutes,), rng.choice(_DONE), f"The timer is set to {minutes} minutes.")


def _shopping(rng: Random) -> Use:
    food = rng.choice(FOODS).en_plural if rng.random() < 0.8 else coined(rng)
    question = rng.choice(
        (
            "Put {} on the shopping list.",
            "Add {} to the shopping list.",
            "Write {} on my list.",
            "We need {}, put that on the list.",
        )
    ).format(food)
    return Use(question, (food,), rng.choice(_DONE), f"I have put {food} on the list.")


def _translated(rng: Random) -> Use:
    noun = rng.choice(ANIMALS + PERSONS + FOODS)
    word, german = (noun.en, noun.de) if rng.random() < 0.6 else (coined(rng), coined(rng))
    question = rng.choice(
        (
            "What is the German word for {}?",
            "Look up {} in the dictionary.",
            "Which German word means {}?",
            "Look up the German word for {}.",
        )
    ).format(word)
    return Use(question, (word,), german, f"The German word for {word} is {german}.")


_OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", operator.add),
    "minus": ("-", operator.sub),
    "times": ("*", operator.mul),
}
_SUMS = ("What is {} {} {}?", "How much is {} {} {}?", "Calculate {} {} {}.", "{} {} {}, please.")


def _operands(rng: Random) -> tuple[int, int]:
    return _number(rng) + 1, _number(rng) + 1


def _arithmetic(word: str) -> Callable[[Random], Use]:
    sign, compute = _OPERATIONS[word]

    def use(rng: Random) -> Use:
        a, b = _operands(rng)
        question = rng.choice(_SUMS).format(a, word if rng.random() < 0.7 else sign, b)
        found = compute(a, b)
        return Use(question, (a, b), found, f"{a} {word} {b} is {found}.")

    return use


def _expression(rng: Random) -> Use:
    a, b = _operands(rng)
    word, (sign, compute) = rng.choice(list(_OPERATIONS.items()))
    question = rng.choice(_SUMS).format(a, word if rng.random() < 0.6 else sign, b)
    found = compute(a, b)
    return Use(question, (f"{a} {sign} {b}",), found, f"{a} {sign} {b} is {found}.")


_FIRST = Parameter(words("a x first left"), ("The first number.", "A number."), _INTEGER)
_SECOND = Parameter(words("b y second right"), ("The second number.", "Another one."), _INTEGER)


def _two_numbers(
    word: str, names: tuple[str, ...], descriptions: tuple[str, ...], keys: str
) -> ToolKind:
    return ToolKind(
        (_OPERATIONS[word][0],),
        names,
        descriptions,
        (_FIRST, _SECOND),
        (*words(keys), "result", "value", "answer"),
        _arithmetic(word),
    )


def _without_arguments(
    topic: str,
    nouns: str,
    verbs: str,
    descriptions: tuple[str, ...],
    questions: tuple[str, ...],
    value: Callable[[Random], Scalar],
    answer: str,
) -> ToolKind:
    def use(rng: Random) -> Use:
        found = value(rng)
        return Use(rng.choice(questions), (), found, answer.format(found))

    names = _names(words(verbs), words(nouns))
    return ToolKind((topic,), names, descriptions, (), (*words(nouns), "result", "value"), use)


KINDS: tuple[ToolKind, ...] = (
    ToolKind(
        ("weather",),
        _names(_ASK, words("weather current_weather weather_forecast weather_report forecast")),
        (
            "Get the current weather in a city.",
            "Get the current weather in a given location",
            "Get current temperature for a given location.",
            "Tells what the weather is like in a city.",
            "The weather of a place.",
            "Gives the weather for a place today.",
            "Get the weather.",
        ),
        (_CITY,),
        words("weather forecast result report"),
        _weather,
    ),
    _about(
        "time",
        "time local_time clock current_time",
        ("Tells what time it is in a city.", "The local time of a place.", "Get the time."),
        _CITY,
        _somewhere,
        ("What time is it in {}?", "How late is it in {}?", "Tell me the time in {}."),
        _clock,
        "It is {1} in {0}.",
    ),
    _about(
        "age",
        "age years person_age",
        ("Tells how old a person is.", "The age of a person, in years.", "Get someone's age."),
        _PERSON,
        _somebody,
        ("How old is {}?", "What is the age of {}?", "Tell me the age of {}.", "What is {}'s age?"),
        lambda rng: rng.randint(3, 99),
        "{0} is {1} years old.",
    ),
    _about(
        "home",
        "home address residence city_of",
        (
            "Tells in which city a person lives.",
            "Where a person lives.",
            "The home of somebody.",
        ),
        _PERSON,
        _somebody,
        ("Where does {} live?", "In which city does {} live?", "Where is the home of {}?"),
        _somewhere,
        "{0} lives in {1}.",
    ),
    _about(
        "job",
        "job profession work occupation",
        ("Tells what a person works as.", "The job of a person.", "Get the profession."),
        _PERSON,
        _somebody,
        ("What is {}'s job?", "What does {} work as?", "What is the job of {}?"),
        lambda rng: rng.choice(JOBS),
        "{0} works as a {1}.",
    ),
    _about(
        "birthday",
        "birthday birth_date day_of_birth",
        ("Tells when a person has a birthday.", "The birthday of somebody.", "Get a birthday."),
        _PERSON,
        _somebody,
        ("When is {}'s birthday?", "When was {} born?", "On which day was {} born?"),
        _day,
        "{0}'s birthday is on {1}.",
    ),
    _about(
        "telephone",
        "phone_number phone telephone",
        ("The phone number of a person.", "Looks up a telephone number.", "How to call somebody."),
        _PERSON,
        _somebody,
        ("What is {}'s phone number?", "How can I call {}?", "What is the phone number of {}?"),
        lambda rng: str(rng.randrange(10_000, 10_000_000)),
        "The phone number of {0} is {1}.",
    ),
    _about(
        "place",
        "place object_place thing location_of",
        ("Tells where a thing is.", "Finds a lost thing.", "The place where a thing is kept."),
        _THING,
        _something,
        ("Where is the {}?", "Where can I find the {}?", "Find the {}.", "Where did I put the {}?"),
        lambda rng: f"in the {rng.choice(PLACES)}",
        "The {0} is {1}.",
    ),
    _about(
        "price",
        "price cost product_price",
        ("Tells what a thing costs.", "The price of a product, in coins.", "Get the price."),
        _THING,
        _something,
        ("How much is the {}?", "What does the {} cost?", "How much does the {} cost?"),
        lambda rng: rng.randint(2, 999),
        "The {0} costs {1} coins.",
    ),
    _about(
        "count",
        "count number_of stock inventory",
        ("Counts things.", "Tells how many of a thing there are.", "How many are in stock."),
        Parameter(words("thing item object what things"), ("What to count.", "The thing."), _TEXT),
        lambda rng: rng.choice(ANIMALS + FOODS + PERSONS).en_plural,
        ("How many {} are there?", "Count the {}.", "How many {} do we have?"),
        lambda rng: rng.randint(2, 500),
        "There are {1} {0}.",
    ),
    ToolKind(
        ("dictionary",),
        _names(
            words("look_up translate find get lookup search"),
            words("word german_word in_dictionary dictionary translation vocabulary"),
        ),
        (
            "Looks up the German word for an English word.",
            "An English and German dictionary.",
            "Gives the German word.",
        ),
        (
            Parameter(
                words("word english term text entry"),
                ("The English word.", "The word to look up."),
                _TEXT,
            ),
        ),
        words("german word translation result entry"),
        _translated,
    ),
    ToolKind(
        ("message",),
        _names(
            words("send write deliver post"), words("message text letter mail sms text_message")
        ),
        ("Sends a message to a person.", "Writes to somebody.", "Send a text to a friend."),
        (
            Parameter(
                words("to name recipient person receiver"),
                ("Who gets the message.", "The name of the person."),
                _TEXT,
            ),
            Parameter(
                words("text message content body"), ("The message.", "What to write."), _TEXT
            ),
        ),
        words("status result state"),
        _message,
    ),
    ToolKind(
        ("light",),
        _names(words("switch set turn control change"), words("light lamp lights lighting")),
        ("Turns a light on or off.", "Switches the light in a room.", "Controls the lights."),
        (
            Parameter(words("room place where location"), ("The room.", "Where it is."), _TEXT),
            Parameter(
                words("state mode value on_or_off"),
                ("On or off.", "What to do."),
                {"type": "string", "enum": ["on", "off"]},
            ),
        ),
        words("status result state"),
        _light,
    ),
    ToolKind(
        ("timer",),
        _names(words("set start make create"), words("timer alarm reminder countdown")),
        ("Sets a timer.", "Starts a timer, in minutes.", "Reminds you after some minutes."),
        (Parameter(words("minutes duration time in_minutes"), ("In minutes.",), _INTEGER),),
        words("status result state"),
        _timer,
    ),
    ToolKind(
        ("shopping",),
        _names(
            words("add_to put_on write_on append_to"), words("shopping_list list groceries cart")
        ),
        ("Puts something on the shopping list.", "Adds an item to the list of what to buy."),
        (Parameter(words("item thing food what product"), ("What to buy.", "The item."), _TEXT),),
        words("status result state"),
        _shopping,
    ),
    _two_numbers(
        "plus",
        words("add add_numbers sum plus addition add_up sum_of get_sum compute_sum"),
        ("Adds two numbers.", "The sum of two numbers.", "Add a number to another one."),
        "sum total",
    ),
    _two_numbers(
        "minus",
        words("subtract minus difference subtraction take_away subtract_numbers get_difference"),
        ("Subtracts a number from another one.", "The difference of two numbers."),
        "difference rest",
    ),
    _two_numbers(
        "times",
        words("multiply times product multiplication multiply_numbers product_of get_product"),
        ("Multiplies two numbers.", "The product of two numbers."),
        "product",
    ),
    ToolKind(
        ("+", "-", "*"),
        words("calculate calculator compute evaluate solve do_math calc eval_expression math"),
        ("Calculates.", "Evaluates an expression.", "A calculator.", "Computes a result."),
        (
            Parameter(
                words("expression formula term input calculation"),
                ("What to calculate.", "For example 2 + 3."),
                _TEXT,
            ),
        ),
        words("result value answer"),
        _expression,
    ),
    _without_arguments(
        "today",
        "date today current_date day",
        "get show tell find current",
        ("Tells what day it is.", "The date of today."),
        ("What day is it today?", "What is the date?", "What is today's date?", "Which day is it?"),
        lambda rng: f"{rng.choice(WEEKDAYS)}, {_day(rng)}",
        "Today is {}.",
    ),
    _without_arguments(
        "die",
        "die dice number random_number",
        "roll throw draw random pick",
        ("Rolls a die.", "Gives a random number."),
        ("Roll a die.", "Throw the dice.", "Roll the dice.", "Give me a random number."),
        lambda rng: rng.randint(1, 6),
        "It is a {}.",
    ),
)

_ATTRIBUTES = words("""
population height size weight colour capacity mayor king length depth width distance area rating
score status balance salary title author owner version speed power rank level shape taste smell
language currency flag code password street email age_group grade team coach winner record
temperature altitude phone_model insurance department manager birth_year best_friend favourite_song
favourite_book shoe_size account_balance room_number house_number opening_time
""")
_KEYS = Parameter(
    words("name city id item key subject entity what of person place country object title"),
    ("The name.", "What it is about.", "Whose it is.", "The one to look up.", "Its name."),
    _TEXT,
)


def attribute_kind(rng: Random) -> ToolKind:
    """A tool that knows one attribute, of any name, of anything: it can be found by its words."""
    roll = rng.random()
    if roll < 0.4:
        attribute = rng.choice(_ATTRIBUTES)
    elif roll < 0.6:
        attribute = rng.choice(ANIMALS + FOODS + PERSONS).en.replace(" ", "_")
    else:
        attribute = coined(rng) if roll < 0.85 else f"{coined(rng)}_{coined(rng)}"
    spoken = attribute.replace("_", " ")
    subject = rng.choice((_somebody, _somewhere, _somewhere, _capital))
    value = rng.choice((_number, coined, _measure, _clock, _somebody, _somewhere))
    return _about(
        attribute,
        attribute,
        (
            f"Gives the {spoken}.",
            f"The {spoken} of something.",
            f"Tells the {spoken} of it.",
            f"Looks up the {spoken}.",
        ),
        _KEYS,
        subject,
        (
            f"What is the {spoken} of {{}}?",
            f"Tell me the {spoken} of {{}}.",
            f"Give me the {spoken} of {{}}.",
            f"Look up the {spoken} of {{}}.",
            f"Which {spoken} does {{}} have?",
            f"What is {{}}'s {spoken}?",
        ),
        value,
        f"The {spoken} of {{0}} is {{1}}.",
    )


def _capital(rng: Random) -> str:
    return " ".join(coined(rng).capitalize() for _ in range(rng.randint(1, 2)))


def _measure(rng: Random) -> str:
    unit = rng.choice(words("metres kilometres grams litres points coins euros years percent"))
    return f"{_number(rng)} {unit}"
