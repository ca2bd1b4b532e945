# ruff: noqa: E501  (a row of a table reads better on one line)
"""The German of the demo corpus against tables that were checked by hand."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from octavo_demo import lexicon as lx
from octavo_demo.german import Nominal, noun_phrase, pronoun_for
from octavo_demo.sentences import PATTERNS, sentence_pair
from octavo_demo.verbs import VERBS

REVIEWED = Path(__file__).with_name("sentences.txt")

NOUNS = {
    noun.en: noun
    for noun in (
        *lx.PERSONS,
        *lx.ANIMALS,
        *lx.FOODS,
        *lx.MASS_FOODS,
        *lx.DRINKS,
        *lx.THINGS,
        *lx.FURNITURE,
        *lx.VEHICLES,
        *(place.noun for place in lx.PLACES),
    )
}
ADJECTIVES = {
    adjective.en: adjective
    for adjective in (*lx.LIVING_ADJECTIVES, *lx.FOOD_ADJECTIVES, *lx.PLACE_ADJECTIVES, *lx.SIZES)
}


def phrase(text: str, plural: bool = False, degree: str = "positive") -> Nominal:
    """`the old dog`: determiner (or -), adjective (or nothing), noun."""
    determiner, *adjective, noun = text.split()
    return noun_phrase(
        NOUNS[noun],
        "" if determiner == "-" else determiner,
        ADJECTIVES[adjective[0]] if adjective else None,
        plural,
        degree,
    )


@pytest.mark.parametrize(
    ("english", "nominative", "accusative", "dative", "genitive"),
    [
        ("the old dog", "der alte Hund", "den alten Hund", "dem alten Hund", "des alten Hundes"),
        ("a old dog", "ein alter Hund", "einen alten Hund", "einem alten Hund", "eines alten Hundes"),
        ("the boy", "der Junge", "den Jungen", "dem Jungen", "des Jungen"),
        ("a small bear", "ein kleiner Bär", "einen kleinen Bären", "einem kleinen Bären", "eines kleinen Bären"),
        ("his neighbour", "sein Nachbar", "seinen Nachbarn", "seinem Nachbarn", "seines Nachbarn"),
        ("the prince", "der Prinz", "den Prinzen", "dem Prinzen", "des Prinzen"),
        ("the big cat", "die große Katze", "die große Katze", "der großen Katze", "der großen Katze"),
        ("our young queen", "unsere junge Königin", "unsere junge Königin", "unserer jungen Königin", "unserer jungen Königin"),
        ("a small child", "ein kleines Kind", "ein kleines Kind", "einem kleinen Kind", "eines kleinen Kindes"),
        ("this house", "dieses Haus", "dieses Haus", "diesem Haus", "dieses Hauses"),
        ("every clever girl", "jedes kluge Mädchen", "jedes kluge Mädchen", "jedem klugen Mädchen", "jedes klugen Mädchens"),
        ("- cold milk", "kalte Milch", "kalte Milch", "kalter Milch", "kalter Milch"),
        ("- fresh bread", "frisches Brot", "frisches Brot", "frischem Brot", "frischen Brotes"),
        ("the dark forest", "der dunkle Wald", "den dunklen Wald", "dem dunklen Wald", "des dunklen Waldes"),
        ("her sour apple", "ihr saurer Apfel", "ihren sauren Apfel", "ihrem sauren Apfel", "ihres sauren Apfels"),
        ("the tired king", "der müde König", "den müden König", "dem müden König", "des müden Königs"),
        ("a park", "ein Park", "einen Park", "einem Park", "eines Parks"),
        ("the bus", "der Bus", "den Bus", "dem Bus", "des Busses"),
        ("the lake", "der See", "den See", "dem See", "des Sees"),
    ],
)  # fmt: skip
def test_singular_declension(
    english: str, nominative: str, accusative: str, dative: str, genitive: str
) -> None:
    if english.startswith("- "):  # nothing without an article stands in the genitive
        assert phrase(english).de[:3] == (nominative, accusative, dative)
    else:
        assert phrase(english).de == (nominative, accusative, dative, genitive)


@pytest.mark.parametrize(
    ("english", "nominative", "dative"),
    [
        ("the old dog", "die alten Hunde", "den alten Hunden"),
        ("my small child", "meine kleinen Kinder", "meinen kleinen Kindern"),
        ("two=zwei brave girl", "zwei mutige Mädchen", "zwei mutigen Mädchen"),
        ("many small mouse", "viele kleine Mäuse", "vielen kleinen Mäusen"),
        ("some car", "einige Autos", "einigen Autos"),
        ("- red apple", "rote Äpfel", "roten Äpfeln"),
        ("these lion", "diese Löwen", "diesen Löwen"),
    ],
)
def test_plural_declension(english: str, nominative: str, dative: str) -> None:
    ADJECTIVES.update({colour.en: colour for colour in lx.COLOURS})
    found = phrase(english, plural=True)
    assert (found.case("nom"), found.case("acc"), found.case("dat")) == (
        nominative,
        nominative,
        dative,
    )


def test_english_side_of_phrases() -> None:
    assert phrase("a old dog").en == "an old dog"
    assert phrase("a old mouse", plural=False).en == "an old mouse"
    assert phrase("the small mouse", plural=True).en == "the small mice"
    assert phrase("the brave knight", degree="superlative").en == "the bravest knight"
    assert phrase("the brave knight", degree="superlative").case("acc") == "den mutigsten Ritter"


@pytest.mark.parametrize(
    ("preposition", "case", "english", "german"),
    [
        ("in", "dat", "the forest", "im Wald"),
        ("in", "acc", "the house", "ins Haus"),
        ("in", "acc", "the forest", "in den Wald"),
        ("zu", "dat", "the school", "zur Schule"),
        ("zu", "dat", "the castle", "zum Schloss"),
        ("an", "dat", "the river", "am Fluss"),
        ("von", "dat", "the girl", "vom Mädchen"),
        ("von", "dat", "a girl", "von einem Mädchen"),
        ("auf", "acc", "the table", "auf den Tisch"),
        ("mit", "dat", "the cat", "mit der Katze"),
    ],
)
def test_prepositions(preposition: str, case: str, english: str, german: str) -> None:
    assert phrase(english).after(preposition, case) == german


def test_pronouns_follow_grammatical_gender_of_animals() -> None:
    assert pronoun_for(phrase("the cat")).de[:3] == ("sie", "sie", "ihr")
    assert pronoun_for(phrase("the dog")).de[:3] == ("er", "ihn", "ihm")
    assert pronoun_for(phrase("the girl")).case("nom") == "sie"
    assert pronoun_for(phrase("the child")).case("nom") == "es"
    assert pronoun_for(phrase("the cat")).en == "it"


@pytest.mark.parametrize(
    ("english", "ich", "du", "er", "past_plural", "participle", "zu", "imperative"),
    [
        ("sleep", "schlafe", "schläfst", "schläft", "schliefen", "geschlafen", "zu schlafen", "schlaf"),
        ("eat", "esse", "isst", "isst", "aßen", "gegessen", "zu essen", "iss"),
        ("read", "lese", "liest", "liest", "lasen", "gelesen", "zu lesen", "lies"),
        ("take", "nehme", "nimmst", "nimmt", "nahmen", "genommen", "zu nehmen", "nimm"),
        ("get up", "stehe", "stehst", "steht", "standen", "aufgestanden", "aufzustehen", "steh"),
        ("invite", "lade", "lädst", "lädt", "luden", "eingeladen", "einzuladen", "lade"),
        ("work", "arbeite", "arbeitest", "arbeitet", "arbeiteten", "gearbeitet", "zu arbeiten", "arbeite"),
        ("open", "öffne", "öffnest", "öffnet", "öffneten", "geöffnet", "zu öffnen", "öffne"),
        ("collect", "sammle", "sammelst", "sammelt", "sammelten", "gesammelt", "zu sammeln", "sammle"),
        ("feed", "füttere", "fütterst", "füttert", "fütterten", "gefüttert", "zu füttern", "füttere"),
        ("dance", "tanze", "tanzt", "tanzt", "tanzten", "getanzt", "zu tanzen", "tanz"),
        ("repair", "repariere", "reparierst", "repariert", "reparierten", "repariert", "zu reparieren", "reparier"),
        ("visit", "besuche", "besuchst", "besucht", "besuchten", "besucht", "zu besuchen", "besuch"),
        ("hug", "umarme", "umarmst", "umarmt", "umarmten", "umarmt", "zu umarmen", "umarm"),
        ("bring", "bringe", "bringst", "bringt", "brachten", "gebracht", "zu bringen", "bring"),
    ],
)  # fmt: skip
def test_verb_forms(
    english: str,
    ich: str,
    du: str,
    er: str,
    past_plural: str,
    participle: str,
    zu: str,
    imperative: str,
) -> None:
    verb = next(verb.de for verb in VERBS if verb.en.base == english)
    forms = (verb.ich, verb.du, verb.er, verb.past("3p"), verb.participle, verb.zu, verb.imperative)
    assert forms == (ich, du, er, past_plural, participle, zu, imperative)


@pytest.mark.parametrize(
    ("base", "third", "past", "participle", "gerund"),
    [
        ("cry", "cries", "cried", "cried", "crying"),
        ("swim", "swims", "swam", "swum", "swimming"),
        ("wash", "washes", "washed", "washed", "washing"),
        ("lie", "lies", "lay", "lain", "lying"),
        ("see", "sees", "saw", "seen", "seeing"),
        ("put on", "puts on", "put on", "put on", "putting on"),
        ("hurry", "hurries", "hurried", "hurried", "hurrying"),
        ("smile", "smiles", "smiled", "smiled", "smiling"),
    ],
)
def test_english_verb_forms(base: str, third: str, past: str, participle: str, gerund: str) -> None:
    verb = next(verb.en for verb in VERBS if verb.en.base == base)
    assert (verb.third, verb.past, verb.participle, verb.gerund) == (
        third,
        past,
        participle,
        gerund,
    )


def test_sentences_that_were_read_and_found_right() -> None:
    """Six sentences of each kind; whoever changes the grammar reads them again."""
    written = []
    for pattern in PATTERNS:
        rng = Random(f"reviewed/{pattern.__name__}")
        written += [" => ".join(pattern(rng)) for _ in range(6)]
    assert written == REVIEWED.read_text(encoding="utf-8").splitlines()


def test_no_sentence_has_two_translations() -> None:
    rng = Random("one right answer")
    translations: dict[str, str] = {}
    for _ in range(30_000):
        english, german = sentence_pair(rng)
        assert translations.setdefault(english, german) == german
        assert "  " not in english + german
        assert english[-1] in '.?!"'
        assert german[-1] in '.?!"'
