"""Noun phrases in both languages: articles, adjective endings, genders, numbers and cases."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from octavo_demo.lexicon import Adjective, Noun

CASES = ("nom", "acc", "dat", "gen")

# Endings by (gender or p for plural) in the order of CASES.
_DER = {"m": "er en em es", "f": "e e er er", "n": "es es em es", "p": "e e en er"}
_EIN = {"m": " en em es", "f": "e e er er", "n": "  em es", "p": "e e en er"}
_WEAK = {"m": "e en en en", "f": "e e en en", "n": "e e en en", "p": "en en en en"}
_MIXED = {"m": "er en en en", "f": "e e en en", "n": "es es en en", "p": "en en en en"}
_STRONG = {"m": "er en em en", "f": "e e er er", "n": "es es em en", "p": "e e en er"}
_DEFINITE = {
    "m": "der den dem des",
    "f": "die die der der",
    "n": "das das dem des",
    "p": "die die den der",
}
_RELATIVE = {"m": "der den dem", "f": "die die der", "n": "das das dem", "p": "die die denen"}

# English determiner -> German stem; the second group inflects like "ein", the first like "der".
_DER_WORDS = {"this": "dies", "these": "dies", "every": "jed"}
_EIN_WORDS = {
    "a": "ein",
    "no": "kein",
    "my": "mein",
    "your": "dein",
    "his": "sein",
    "her": "ihr",
    "our": "unser",
    "their": "ihr",
}
_PLURAL_WORDS = {"many": "viel", "some": "einig"}
_CONTRACTIONS = {
    ("in", "dem"): "im",
    ("in", "das"): "ins",
    ("an", "dem"): "am",
    ("zu", "dem"): "zum",
    ("zu", "der"): "zur",
    ("von", "dem"): "vom",
    ("bei", "dem"): "beim",
}

Forms = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Nominal:
    """A noun phrase, name or pronoun in both languages."""

    en: str
    en_object: str
    de: Forms  # nominative, accusative, dative, genitive
    person: str  # 1s 2s 3s 1p 3p
    pronoun: str  # what stands for it in English: he she it they, or the pronoun itself
    gender: str  # m f n, or p for plural
    article: str = ""  # the English determiner
    human: bool = True
    is_pronoun: bool = False

    def case(self, case: str) -> str:
        return self.de[CASES.index(case)]

    def after(self, preposition: str, case: str) -> str:
        """With a German preposition: "im Garten", "mit der Katze"."""
        phrase = self.case(case)
        head, _, rest = phrase.partition(" ")
        short = _CONTRACTIONS.get((preposition, head)) if rest else None
        return f"{short} {rest}" if short else f"{preposition} {phrase}"

    @property
    def relative(self) -> Forms:
        """The relative pronoun that refers to it."""
        nominative, accusative, dative = _RELATIVE[self.gender].split(" ")
        return nominative, accusative, dative, ""


def _pronoun(en: str, en_object: str, de: str, person: str, gender: str) -> Nominal:
    nominative, accusative, dative = de.split()
    return Nominal(
        en, en_object, (nominative, accusative, dative, ""), person, en, gender, is_pronoun=True
    )


PRONOUNS = {
    "I": _pronoun("I", "me", "ich mich mir", "1s", "m"),
    "you": _pronoun("you", "you", "du dich dir", "2s", "m"),
    "he": _pronoun("he", "him", "er ihn ihm", "3s", "m"),
    "she": _pronoun("she", "her", "sie sie ihr", "3s", "f"),
    "it": _pronoun("it", "it", "es es ihm", "3s", "n"),
    "we": _pronoun("we", "us", "wir uns uns", "1p", "p"),
    "they": _pronoun("they", "them", "sie sie ihnen", "3p", "p"),
}
_OF_GENDER = {"m": "er ihn ihm", "f": "sie sie ihr", "n": "es es ihm", "p": "sie sie ihnen"}


def pronoun_for(nominal: Nominal) -> Nominal:
    """What refers back to it: English by nature, German by grammar ("it" -> "sie", die Katze)."""
    if nominal.is_pronoun or nominal.pronoun in ("they", "he", "she"):
        return PRONOUNS[nominal.pronoun]
    return _pronoun("it", "it", _OF_GENDER[nominal.gender], "3s", nominal.gender)


def name(word: str, girl: bool) -> Nominal:
    return Nominal(
        word,
        word,
        (word, word, word, word + "s"),
        "3s",
        "she" if girl else "he",
        "f" if girl else "m",
    )


def _genitive(noun: Noun) -> str:
    if noun.gender == "f":
        return noun.de
    if noun.de_plural == noun.de + "s":
        return noun.de + "s"
    if noun.de.endswith(("s", "ß", "x", "z", "sch")):
        return noun.de + ("ses" if noun.de == "Bus" else "es")
    vowels = "aeiouäöüy"
    syllables = sum(
        a in vowels and b not in vowels
        for a, b in zip(noun.de.lower(), noun.de.lower()[1:] + " ", strict=True)
    )
    short = syllables == 1 and noun.de[-1] not in vowels
    return noun.de + ("es" if short else "s")


def _noun_forms(noun: Noun, plural: bool) -> Forms:
    if plural:
        dative = noun.de_plural if noun.de_plural.endswith(("n", "s")) else noun.de_plural + "n"
        return noun.de_plural, noun.de_plural, dative, noun.de_plural
    if noun.weak:
        oblique = noun.de + ("n" if noun.de.endswith(("e", "er", "ar")) else "en")
        return noun.de, oblique, oblique, oblique
    return noun.de, noun.de, noun.de, _genitive(noun)


def _articles(determiner: str, slot: str) -> tuple[list[str], dict[str, str]]:
    """The four forms of the determiner and the adjective endings that go with it."""
    if determiner == "the":
        return _DEFINITE[slot].split(" "), _WEAK
    if determiner in _DER_WORDS:
        return [_DER_WORDS[determiner] + ending for ending in _DER[slot].split(" ")], _WEAK
    if determiner in _EIN_WORDS:
        return [_EIN_WORDS[determiner] + ending for ending in _EIN[slot].split(" ")], _MIXED
    if determiner in _PLURAL_WORDS:
        return [_PLURAL_WORDS[determiner] + ending for ending in _STRONG["p"].split(" ")], _STRONG
    # A number, a name's genitive ("Annas") or nothing at all.
    german = determiner.partition("=")[2]
    return [german] * 4, _STRONG


def article_of(word: str) -> str:
    return "an" if word[0] in "aeiouAEIOU" else "a"


@lru_cache(maxsize=400_000)
def noun_phrase(
    noun: Noun,
    determiner: str,
    adjective: Adjective | None = None,
    plural: bool = False,
    degree: str = "positive",
) -> Nominal:
    """`determiner` is an English word, or nothing, or `two=zwei` for what does not inflect."""
    slot = "p" if plural else noun.gender
    articles, endings = _articles(determiner, slot)
    stem = ""
    english_adjective = ""
    if adjective:
        stem = adjective.superlative if degree == "superlative" else adjective.stem
        english_adjective = adjective.en_superlative if degree == "superlative" else adjective.en
    forms = []
    for article, ending, form in zip(
        articles, endings[slot].split(" "), _noun_forms(noun, plural), strict=True
    ):
        forms.append(
            " ".join(word for word in (article, stem + ending if stem else "", form) if word)
        )
    english_noun = noun.en_plural if plural else noun.en
    rest = f"{english_adjective} {english_noun}" if english_adjective else english_noun
    english = determiner.partition("=")[0]
    if english == "a":
        english = article_of(rest)
    text = f"{english} {rest}" if english else rest
    return Nominal(
        text,
        text,
        (forms[0], forms[1], forms[2], forms[3]),
        "3p" if plural else "3s",
        "they" if plural else noun.pronoun,
        slot,
        determiner,
        human=noun.pronoun != "it" or noun.en in ("child", "baby"),
    )


def possessed(owner: Nominal, thing: Nominal) -> Nominal:
    """ "the girl's dog": "der Hund des Mädchens". `thing` has the definite article in German."""
    forms = tuple(f"{form} {owner.case('gen')}" for form in thing.de)
    bare = thing.en.removeprefix("the ")
    ending = "'" if owner.person == "3p" and owner.en.endswith("s") else "'s"
    english = f"{owner.en}{ending} {bare}"
    return Nominal(
        english,
        english,
        (forms[0], forms[1], forms[2], forms[3]),
        thing.person,
        thing.pronoun,
        thing.gender,
        "the",
        thing.human,
    )
