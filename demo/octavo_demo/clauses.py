"""One clause in both languages: what is said once, then worded in English and in German word order.

German order is fixed, so that each English sentence has one translation: pronouns, time, dative,
accusative, "nicht", manner, place, prepositional object, goal.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo_demo.german import Nominal
from octavo_demo.verbs import EnglishVerb, GermanVerb

SEIN = GermanVerb("sein", "bin", "bist", "ist", "war", "gewesen", "", False, True)
WERDEN = GermanVerb("werden", "werde", "wirst", "wird", "wurde", "geworden", "", False, True)
BLEIBEN = GermanVerb(
    "bleiben", "bleibe", "bleibst", "bleibt", "blieb", "geblieben", "", False, True
)
WISSEN = GermanVerb("wissen", "weiß", "weißt", "weiß", "wusste", "gewusst", "", False, False)
HABEN = GermanVerb("haben", "habe", "hast", "hat", "hatte", "gehabt", "", False, False)
BE = EnglishVerb("be", "is", "was", "been", "being")

_REFLEXIVE = {"1s": "mich", "2s": "dich", "1p": "uns"}


@dataclass(frozen=True, slots=True)
class Modal:
    """A modal verb. `lexical` ones take do-support in English ("does not want to")."""

    en: str
    en_third: str
    de: tuple[str, str, str]  # ich/er, du, plural
    past: bool
    lexical: bool = False
    negatable: bool = True


MODALS = (
    Modal("can", "can", ("kann", "kannst", "können"), past=False),
    Modal("could", "could", ("konnte", "konntest", "konnten"), past=True),
    Modal("must", "must", ("muss", "musst", "müssen"), past=False, negatable=False),
    Modal(
        "have to",
        "had to",
        ("musste", "musstest", "mussten"),
        past=True,
        lexical=True,
        negatable=False,
    ),
    Modal("may", "may", ("darf", "darfst", "dürfen"), past=False),
    Modal("should", "should", ("sollte", "solltest", "sollten"), past=False),
    Modal("want to", "wants to", ("will", "willst", "wollen"), past=False, lexical=True),
    Modal("want to", "wanted to", ("wollte", "wolltest", "wollten"), past=True, lexical=True),
)


def modal_form(modal: Modal, person: str) -> str:
    return modal.de[{"1s": 0, "3s": 0, "2s": 1}.get(person, 2)]


def german_finite(verb: GermanVerb, person: str, past: bool) -> str:
    if not past:
        return "sind" if verb is SEIN and person in ("1p", "3p") else verb.present(person)
    return verb.preterite + "st" if person == "2s" else verb.past(person)


def english_be(person: str, past: bool) -> str:
    if past:
        return "was" if person in ("1s", "3s") else "were"
    return {"1s": "am", "3s": "is"}.get(person, "are")


@dataclass(slots=True)
class Clause:
    """Who does what, when, how and where. Empty strings are what the clause doesn't have."""

    subject: Nominal
    en_verb: EnglishVerb
    de_verb: GermanVerb
    tense: str = (
        "present"  # present, past, perfect, future, modal, progressive, passive, past passive
    )
    modal: Modal | None = None
    negated: bool = False
    en_object: str = ""  # everything that follows the English verb, up to the manner
    de_pronoun: str = ""
    de_dative: str = ""
    de_accusative: str = ""
    de_preposition: str = ""  # prepositional object, or the agent of a passive
    de_goal: str = ""  # goal or predicate
    kein: bool = False  # the negation sits in the object
    frequency: tuple[str, str] = ("", "")
    manner: tuple[str, str] = ("", "")
    place: tuple[str, str] = ("", "")
    time: tuple[str, str] = ("", "")

    @property
    def past(self) -> bool:
        return self.tense in ("past", "past passive") or (
            self.modal is not None and self.modal.past
        )

    def _english_verb(self, support: bool) -> tuple[str, str]:
        """Auxiliary (may be empty) and the rest of the verb; `support` asks for do-support."""
        person, verb = self.subject.person, self.en_verb
        third = person == "3s"
        if self.tense == "modal" and self.modal:
            if not self.modal.lexical:
                return self.modal.en, verb.base
            if support:
                return "did" if self.modal.past else (
                    "does" if third else "do"
                ), f"{self.modal.en} {verb.base}"
            word = self.modal.en_third if third or self.modal.past else self.modal.en
            return "", f"{word} {verb.base}"
        if self.tense == "perfect":
            return "has" if third else "have", verb.participle
        if self.tense == "future":
            return "will", verb.base
        if self.tense == "progressive":
            return english_be(person, False), verb.gerund
        if self.tense.endswith("passive"):
            return english_be(person, self.past), verb.participle
        if verb is BE:
            return english_be(person, self.past), ""
        if support:
            return "did" if self.past else ("does" if third else "do"), verb.base
        return "", verb.past if self.past else (verb.third if third else verb.base)

    def _english_tail(self, rest: str, time: bool = True, place: bool = True) -> list[str]:
        parts = [rest, self.en_object, self.manner[0]]
        return [*parts, self.place[0] if place else "", self.time[0] if time else ""]

    def english(self, time: bool = True, place: bool = True) -> str:
        auxiliary, rest = self._english_verb(support=self.negated)
        if self.negated:
            start = (
                [self.subject.en, "cannot"]
                if auxiliary == "can"
                else [self.subject.en, auxiliary, "not"]
            )
        else:
            start = [self.subject.en, auxiliary, self.frequency[0]]
        return " ".join(part for part in (*start, *self._english_tail(rest, time, place)) if part)

    def english_question(self, time: bool = True, place: bool = True) -> str:
        auxiliary, rest = self._english_verb(support=True)
        start = [auxiliary, self.subject.en, "not" if self.negated else self.frequency[0]]
        return " ".join(part for part in (*start, *self._english_tail(rest, time, place)) if part)

    def english_infinitive(self) -> str:
        return " ".join(part for part in ("to", *self._english_tail(self.en_verb.base)) if part)

    def _german_verb(self) -> tuple[str, str]:
        """The finite verb and what closes the verbal bracket."""
        person, verb = self.subject.person, self.de_verb
        if self.tense == "modal" and self.modal:
            return modal_form(self.modal, person), verb.joined
        if self.tense == "perfect":
            return german_finite(SEIN if verb.to_be else HABEN, person, False), verb.participle
        if self.tense == "future":
            return german_finite(WERDEN, person, False), verb.joined
        if self.tense.endswith("passive"):
            return german_finite(WERDEN, person, self.past), verb.participle
        return german_finite(verb, person, self.past), verb.prefix

    def _reflexive(self) -> str:
        return _REFLEXIVE.get(self.subject.person, "sich") if self.de_verb.reflexive else ""

    def _german_middle(
        self, time: bool = True, place: bool = True, reflexive: bool = True
    ) -> list[str]:
        return [
            self._reflexive() if reflexive else "",
            self.de_pronoun,
            "gerade" if self.tense == "progressive" else "",
            self.time[1] if time else "",
            self.frequency[1],
            self.de_dative,
            self.de_accusative,
            "nicht" if self.negated and not self.kein else "",
            self.manner[1],
            self.place[1] if place else "",
            self.de_preposition,
            self.de_goal,
        ]

    def german(self, time: bool = True, place: bool = True) -> str:
        finite, end = self._german_verb()
        return _join(self.subject.case("nom"), finite, *self._german_middle(time, place), end)

    def german_inverted(self, time: bool = True, place: bool = True) -> str:
        """The finite verb first: questions, and what follows a fronted part."""
        finite, end = self._german_verb()
        reflexive = self._reflexive()
        subject = self.subject.case("nom")
        # "Heute freut sich der Junge", but "Heute freut er sich".
        start = (
            [finite, subject, reflexive]
            if self.subject.is_pronoun
            else [finite, reflexive, subject]
        )
        return _join(*start, *self._german_middle(time, place, reflexive=False), end)

    def german_final(self) -> str:
        """The finite verb last: subordinate clauses."""
        finite, end = self._german_verb()
        joined = end + finite if end and end == self.de_verb.prefix else f"{end} {finite}"
        return _join(self.subject.case("nom"), *self._german_middle(), joined.strip())

    def german_zu(self) -> str:
        return _join(*self._german_middle(), self.de_verb.zu)

    def german_imperative(self) -> str:
        middle = self._german_middle()
        return _join(self.de_verb.imperative, *middle, self.de_verb.prefix)


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)
