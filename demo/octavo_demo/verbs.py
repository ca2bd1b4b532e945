"""The verbs of the demo world: English forms, German forms, and what each verb takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from octavo_demo.lexicon import words

# English verbs whose past and participle are not made with -ed.
_IRREGULAR = {
    word.split(":")[0]: tuple(word.split(":")[1].split("/"))
    for word in [
        "sleep:slept/slept",
        "cry:cried/cried",
        "hurry:hurried/hurried",
        "sing:sang/sung",
        "swim:swam/swum",
        "get:got/got",
        "fall:fell/fallen",
        "wake:woke/woken",
        "come:came/come",
        "eat:ate/eaten",
        "drink:drank/drunk",
        "read:read/read",
        "write:wrote/written",
        "see:saw/seen",
        "hear:heard/heard",
        "find:found/found",
        "buy:bought/bought",
        "sell:sold/sold",
        "build:built/built",
        "lose:lost/lost",
        "steal:stole/stolen",
        "hide:hid/hidden",
        "throw:threw/thrown",
        "catch:caught/caught",
        "feed:fed/fed",
        "break:broke/broken",
        "have:had/had",
        "hold:held/held",
        "take:took/taken",
        "bring:brought/brought",
        "forget:forgot/forgotten",
        "know:knew/known",
        "understand:understood/understood",
        "cut:cut/cut",
        "light:lit/lit",
        "put:put/put",
        "give:gave/given",
        "show:showed/shown",
        "send:sent/sent",
        "lend:lent/lent",
        "go:went/gone",
        "run:ran/run",
        "fly:flew/flown",
        "drive:drove/driven",
        "sit:sat/sat",
        "stand:stood/stood",
        "lie:lay/lain",
        "think:thought/thought",
        "speak:spoke/spoken",
        "tell:told/told",
        "leave:left/left",
        "win:won/won",
        "say:said/said",
        "begin:began/begun",
        "draw:drew/drawn",
        "become:became/become",
        "hang:hung/hung",
        "lay:laid/laid",
        "meet:met/met",
        "hope:hoped/hoped",
        "try:tried/tried",
        "carry:carried/carried",
    ]
}
_DOUBLING = frozenset(words("swim get run sit cut put win forget begin hug plan travel"))


@dataclass(frozen=True, slots=True)
class EnglishVerb:
    """The five forms of an English verb; a particle ("get up") follows each of them."""

    base: str
    third: str
    past: str
    participle: str
    gerund: str


@cache
def english_verb(verb: str) -> EnglishVerb:
    head, _, particle = verb.replace("_", " ").partition(" ")
    tail = f" {particle}" if particle else ""
    third = (
        "has"
        if head == "have"
        else head + ("es" if head.endswith(("s", "sh", "ch", "x", "o")) else "s")
    )
    if head.endswith("y") and head[-2] not in "aeou":
        third = head[:-1] + "ies"
    stem = head + head[-1] if head in _DOUBLING else head
    if head in _IRREGULAR:
        past, participle = _IRREGULAR[head]
    elif head.endswith("e"):
        past = participle = head + "d"
    else:
        past = participle = stem + "ed"
    gerund = (
        head[:-2] + "ying"
        if head == "lie"
        else (head[:-1] if head.endswith("e") and head != "see" else stem) + "ing"
    )
    return EnglishVerb(head + tail, third + tail, past + tail, participle + tail, gerund + tail)


@dataclass(frozen=True, slots=True)
class GermanVerb:
    """The principal parts of a German verb, without its separable prefix."""

    infinitive: str
    ich: str
    du: str
    er: str
    preterite: str
    participle: str  # with prefix and ge-: "aufgestanden"
    prefix: str  # "auf" in "aufstehen", else empty
    reflexive: bool
    to_be: bool  # perfect with "sein"

    def present(self, person: str) -> str:
        return {"1s": self.ich, "2s": self.du, "3s": self.er}.get(person, self.infinitive)

    def past(self, person: str) -> str:
        if person in ("1s", "3s"):
            return self.preterite
        return self.preterite + ("n" if self.preterite.endswith("e") else "en")

    @property
    def joined(self) -> str:
        """The infinitive with its prefix: "aufstehen"."""
        return self.prefix + self.infinitive

    @property
    def zu(self) -> str:
        """The infinitive with zu: "aufzustehen", "zu schlafen"."""
        return f"{self.prefix}zu{self.infinitive}" if self.prefix else f"zu {self.infinitive}"

    @property
    def imperative(self) -> str:
        """The singular imperative: "iss", "öffne", "geh"."""
        stem = _stem(self.infinitive)
        changed = self.du[:-2] if self.du.endswith("st") else self.du[:-1]
        if self.du != _weak_du(self.infinitive) and not set(changed) & set("äöü"):
            return self.du[:-1] if stem.endswith(("s", "ss", "ß")) else changed
        return self.ich if _needs_e(stem) or self.infinitive.endswith(("eln", "ern")) else stem


def _stem(infinitive: str) -> str:
    return infinitive[:-2] if infinitive.endswith("en") else infinitive[:-1]


def _needs_e(stem: str) -> bool:
    return stem.endswith(("t", "d", "ffn", "chn", "gn", "tm"))


def _weak_du(infinitive: str) -> str:
    stem = _stem(infinitive)
    return stem + (
        "t" if stem.endswith(("s", "ß", "z", "x")) else "est" if _needs_e(stem) else "st"
    )


_INSEPARABLE = ("be", "ver", "er", "ent", "zer", "um")


@cache
def german_verb(spec: str) -> GermanVerb:
    """`kaufen` (weak), `singen sang gesungen` (strong), `sich aus|ruhen`, `gehen* ...`."""
    parts = spec.split()
    reflexive = parts[0] == "sich"
    infinitive, *forms = parts[1:] if reflexive else parts
    to_be = infinitive.endswith("*")
    prefix, _, infinitive = infinitive.rstrip("*").rpartition("|")
    stem, link = _stem(infinitive), "e" if _needs_e(_stem(infinitive)) else ""
    # ich lächle, ich füttere
    ich = stem[:-2] + "le" if infinitive.endswith("eln") else stem + "e"
    if len(forms) == 2:  # only the past is strong: "singen sang gesungen"
        forms = [_weak_du(infinitive), stem + link + "t", *forms]
    if not forms:
        ge = "" if infinitive.startswith(_INSEPARABLE) else "ge"
        ge = "" if infinitive.endswith("ieren") else ge
        forms = [
            _weak_du(infinitive),
            stem + link + "t",
            stem + link + "te",
            ge + stem + link + "t",
        ]
    du, er, preterite, participle = forms
    return GermanVerb(
        infinitive, ich, du, er, preterite, prefix + participle, prefix, reflexive, to_be
    )


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb in both languages, with its frame (see TABLE)."""

    en: EnglishVerb
    de: GermanVerb
    frame: str  # i, a, d, da, p, dir, loc, put
    objects: tuple[str, ...]  # categories of the object
    en_preposition: str
    de_preposition: str
    case: str
    stative: bool  # no progressive, no manner, no imperative, no passive


def _verb(line: str) -> Verb:
    """`wait | warten | p:for>auf+acc | living`; a trailing ! marks a stative verb."""
    english, german, frame, *objects = (part.strip() for part in line.split("|"))
    stative = frame.endswith("!")
    frame, _, preposition = frame.rstrip("!").partition(":")
    en_preposition, _, rest = preposition.partition(">")
    de_preposition, _, case = rest.partition("+")
    return Verb(
        english_verb(english),
        german_verb(german.replace("~", "|")),
        frame,
        tuple(objects[0].split()) if objects else (),
        en_preposition,
        de_preposition,
        case,
        stative,
    )


# Frames: i nothing, a accusative, d dative, da dative and accusative, p preposition, dir a goal,
# loc a place, put accusative and a goal. In the German column ~ parts a separable prefix and * asks
# for "sein".
TABLE = """
sleep | schlafen schläfst schläft schlief geschlafen | i
laugh | lachen | i
cry | weinen | i
dance | tanzen | i
sing | singen sang gesungen | i
work | arbeiten | i
wait | warten | i
swim | schwimmen* schwamm geschwommen | i
smile | lächeln | i
whistle | pfeifen pfiff gepfiffen | i
sneeze | niesen | i
practise | üben | i
get_up | auf~stehen* stand gestanden | i
arrive | an~kommen* kam gekommen | i
fall_asleep | ein~schlafen* schläfst schläft schlief geschlafen | i
wake_up | auf~wachen* | i
come_back | zurück~kommen* kam gekommen | i
leave | weg~gehen* ging gegangen | i
rest | sich aus~ruhen | i
hurry | sich beeilen | i
win | gewinnen gewann gewonnen | i
stumble | stolpern* | i
eat | essen isst isst aß gegessen | a | food massfood
drink | trinken trank getrunken | a | drink
read | lesen liest liest las gelesen | a | readable
write | schreiben schrieb geschrieben | a | readable
see | sehen siehst sieht sah gesehen | a! | living thing vehicle
hear | hören | a! | living
find | finden fand gefunden | a | thing clothes living
look_for | suchen | a | thing clothes living
carry | tragen trägst trägt trug getragen | a | thing food
buy | kaufen | a | thing food massfood drink clothes vehicle
sell | verkaufen | a | thing food clothes vehicle
love | lieben | a! | living
visit | besuchen | a | person
draw | zeichnen | a | living place thing
paint | malen | a | thing living
repair | reparieren | a | vehicle furniture openable
build | bauen | a | vehicle furniture
wash | waschen wäschst wäscht wusch gewaschen | a | living clothes vehicle food
cook | kochen | a | cookable
bake | backen bäckst bäckt backte gebacken | a | bakeable
open | öffnen | a | openable container
close | schließen schloss geschlossen | a | openable container
lose | verlieren verlor verloren | a | thing clothes
steal | stehlen stiehlst stiehlt stahl gestohlen | a | thing food clothes
hide | verstecken | a | thing food
throw | werfen wirfst wirft warf geworfen | a | throwable
catch | fangen fängst fängt fing gefangen | a | animal throwable
count | zählen | a | countable
feed | füttern | a | animal
stroke | streicheln | a | animal
greet | begrüßen | a | person
invite | ein~laden lädst lädt lud geladen | a | living
call | an~rufen rief gerufen | a | person
clean | putzen | a | furniture openable vehicle
break | zerbrechen zerbrichst zerbricht zerbrach zerbrochen | a | breakable
pull | ziehen zog gezogen | a | vehicle
push | schieben schob geschoben | a | vehicle
need | brauchen | a! | thing clothes food vehicle
hold | halten hältst hält hielt gehalten | a | thing animal
take | nehmen nimmst nimmt nahm genommen | a | thing food clothes
forget | vergessen vergisst vergisst vergaß vergessen | a! | thing clothes person
know | kennen kannte gekannt | a! | living
understand | verstehen verstand verstanden | a! | living
collect | sammeln | a | countable
pick | pflücken | a | pickable
cut | schneiden schnitt geschnitten | a | food
light | an~zünden | a | lightable
put_on | an~ziehen zog gezogen | a | clothes
take_off | aus~ziehen zog gezogen | a | clothes
save | retten | a | living
protect | beschützen | a | living
hug | umarmen | a | living
kiss | küssen | a | living
ask | fragen | a | living
wake | wecken | a | living
admire | bewundern | a! | living thing
follow | folgen* | d | living
help | helfen hilfst hilft half geholfen | d | living
thank | danken | d | living
answer | antworten | d | living
trust | vertrauen | d! | living
listen_to | zu~hören | d | living
give | geben gibst gibt gab gegeben | da | thing food clothes
show | zeigen | da | thing animal clothes
send | schicken | da | sendable
lend | leihen lieh geliehen | da | thing clothes vehicle
bring | bringen brachte gebracht | da | thing food clothes
wait | warten | p:for>auf+acc | living
think | denken dachte gedacht | p:of>an+acc! | living
talk | sprechen sprichst spricht sprach gesprochen | p:about>über+acc | living thing
laugh | lachen | p:about>über+acc | living
dream | träumen | p:of>von+dat | living food thing
look_at | an~schauen | a | living thing
play | spielen | p:with>mit+dat | living toy
dance | tanzen | p:with>mit+dat | living
speak | reden | p:with>mit+dat | living
work | arbeiten | p:for>für+acc | person
remember | sich erinnern | p:>an+acc! | living
go | gehen* ging gegangen | dir
run | laufen* läufst läuft lief gelaufen | dir
come | kommen* kam gekommen | dir
fly | fliegen* flog geflogen | dir
drive | fahren* fährst fährt fuhr gefahren | dir
hurry | eilen* | dir
climb | klettern* | dir
live | wohnen | loc
sit | sitzen saß gesessen | loc
stand | stehen stand gestanden | loc
lie | liegen lag gelegen | loc
play | spielen | loc
lay | legen | put | thing food clothes
hang | hängen | put | clothes
throw | werfen wirfst wirft warf geworfen | put | throwable
carry | tragen trägst trägt trug getragen | put | thing food furniture
"""
VERBS = tuple(_verb(line) for line in TABLE.strip().splitlines())
