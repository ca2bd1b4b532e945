"""The words of the demo world, in English and German: small tables, parsed once on import.

Each English word has exactly one German counterpart, so that a sentence has one right translation.
"""

from __future__ import annotations

from dataclasses import dataclass, field


def words(text: str) -> tuple[str, ...]:
    """A table of words, parted by spaces."""
    return tuple(text.split())


@dataclass(frozen=True, slots=True)
class Noun:
    """A noun: English and German forms, German gender, and what English calls one of its kind."""

    en: str
    en_plural: str
    de: str
    de_plural: str
    gender: str  # m, f, n
    weak: bool  # n-declension: der Junge, den Jungen
    pronoun: str  # he, she, it


@dataclass(frozen=True, slots=True)
class Adjective:
    """An adjective: German predicative form, stem before endings, comparative, superlative."""

    en: str
    de: str
    stem: str
    comparative: str
    superlative: str
    en_comparative: str
    en_superlative: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where something can be and go: English and German prepositions around one noun."""

    noun: Noun
    en_at: str
    de_at: str
    en_to: str
    de_to: str
    to_case: str


def _english_plural(word: str) -> str:
    if word.endswith(("s", "x", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


def _noun(line: str) -> Noun:
    """`boy Junge m* Jungen`, `man/men Mann m Männer`: m* is the n-declension, n=she the pronoun."""
    english, german, gender, plural = line.split()
    singular, _, irregular = english.replace("_", " ").partition("/")
    gender, _, pronoun = gender.partition("=")
    return Noun(
        en=singular,
        en_plural=irregular or _english_plural(singular),
        de=german,
        de_plural=german if plural == "-" else plural,
        gender=gender[0],
        weak=gender.endswith("*"),
        pronoun=pronoun or {"m": "he", "f": "she", "n": "it"}[gender[0]],
    )


def _nouns(table: str) -> tuple[Noun, ...]:
    return tuple(_noun(line) for row in table.strip().splitlines() for line in row.split(","))


PERSONS = _nouns("""
man/men Mann m Männer, woman/women Frau f Frauen, boy Junge m* Jungen, girl Mädchen n=she -
child/children Kind n Kinder, baby Baby n Babys, father Vater m Väter, mother Mutter f Mütter
brother Bruder m Brüder, sister Schwester f Schwestern, grandfather Großvater m Großväter
grandmother Großmutter f Großmütter, uncle Onkel m -, aunt Tante f Tanten, teacher Lehrer m -
doctor Arzt m Ärzte, baker Bäcker m -, farmer Bauer m* Bauern, gardener Gärtner m -
king König m Könige, queen Königin f Königinnen, princess Prinzessin f Prinzessinnen
prince Prinz m* Prinzen, witch Hexe f Hexen, pirate Pirat m* Piraten, giant Riese m* Riesen
dwarf Zwerg m Zwerge, knight Ritter m -, neighbour Nachbar m* Nachbarn, friend Freund m Freunde
guest Gast m Gäste, thief/thieves Dieb m Diebe, sailor Matrose m* Matrosen, hunter Jäger m -
cook Koch m Köche, painter Maler m -, pupil Schüler m -, shepherd Hirte m* Hirten
wizard Zauberer m -, postman/postmen Postbote m* Postboten, captain Kapitän m Kapitäne
miller Müller m -, tailor Schneider m -, nurse Krankenschwester f Krankenschwestern
""")

ANIMALS = _nouns("""
dog Hund m=it Hunde, cat Katze f=it Katzen, mouse/mice Maus f=it Mäuse, bird Vogel m=it Vögel
horse Pferd n Pferde, cow Kuh f=it Kühe, pig Schwein n Schweine, goat Ziege f=it Ziegen
duck Ente f=it Enten, goose/geese Gans f=it Gänse, chicken Huhn n Hühner, rooster Hahn m=it Hähne
rabbit Kaninchen n -, hare Hase m*=it Hasen, fox Fuchs m=it Füchse, wolf/wolves Wolf m=it Wölfe
bear Bär m*=it Bären, lion Löwe m*=it Löwen, elephant Elefant m*=it Elefanten
monkey Affe m*=it Affen, frog Frosch m=it Frösche, snail Schnecke f=it Schnecken
bee Biene f=it Bienen, butterfly Schmetterling m=it Schmetterlinge, owl Eule f=it Eulen
raven Rabe m*=it Raben, squirrel Eichhörnchen n -, hedgehog Igel m=it -, donkey Esel m=it -
dragon Drache m*=it Drachen, turtle Schildkröte f=it Schildkröten, snake Schlange f=it Schlangen
spider Spinne f=it Spinnen, ant Ameise f=it Ameisen, swan Schwan m=it Schwäne
crow Krähe f=it Krähen, badger Dachs m=it Dachse, beaver Biber m=it -, calf/calves Kalb n Kälber
""")

FOODS = _nouns("""
apple Apfel m=it Äpfel, pear Birne f=it Birnen, cake Kuchen m=it -, egg Ei n Eier
carrot Karotte f=it Karotten, cherry Kirsche f=it Kirschen
potato/potatoes Kartoffel f=it Kartoffeln, roll Brötchen n -, biscuit Keks m=it Kekse
plum Pflaume f=it Pflaumen, nut Nuss f=it Nüsse, lemon Zitrone f=it Zitronen
orange Orange f=it Orangen, pancake Pfannkuchen m=it -, strawberry Erdbeere f=it Erdbeeren
sausage Wurst f=it Würste, tomato/tomatoes Tomate f=it Tomaten, mushroom Pilz m=it Pilze
""")

# Eaten or drunk without an article; no plural.
MASS_FOODS = _nouns("""
bread Brot n -, cheese Käse m=it -, soup Suppe f=it -, rice Reis m=it -, honey Honig m=it -
butter Butter f=it -, chocolate Schokolade f=it -, ice_cream Eis n -, salad Salat m=it -
jam Marmelade f=it -
""")
DRINKS = _nouns("""
milk Milch f=it -, water Wasser n -, tea Tee m=it -, juice Saft m=it -, coffee Kaffee m=it -
lemonade Limonade f=it -, cocoa Kakao m=it -
""")

THINGS = _nouns("""
book Buch n Bücher, letter Brief m=it Briefe, ball Ball m=it Bälle, key Schlüssel m=it -
basket Korb m=it Körbe, box Kiste f=it Kisten, bag Tasche f=it Taschen, ring Ring m=it Ringe
lamp Lampe f=it Lampen, candle Kerze f=it Kerzen, clock Uhr f=it Uhren, picture Bild n Bilder
map Landkarte f=it Landkarten, knife/knives Messer n -, spoon Löffel m=it -
fork Gabel f=it Gabeln, plate Teller m=it -, cup Tasse f=it Tassen, glass Glas n Gläser
bottle Flasche f=it Flaschen, bucket Eimer m=it -, broom Besen m=it -, ladder Leiter f=it Leitern
rope Seil n Seile, hammer Hammer m=it Hämmer, umbrella Regenschirm m=it Regenschirme
blanket Decke f=it Decken, pillow Kissen n -, mirror Spiegel m=it -, brush Pinsel m=it -
pencil Bleistift m=it Bleistifte, doll Puppe f=it Puppen, drum Trommel f=it Trommeln
guitar Gitarre f=it Gitarren, violin Geige f=it Geigen, flute Flöte f=it Flöten
coin Münze f=it Münzen, stone Stein m=it Steine, flower Blume f=it Blumen, rose Rose f=it Rosen
leaf/leaves Blatt n Blätter, feather Feder f=it Federn, present Geschenk n Geschenke
newspaper Zeitung f=it Zeitungen, camera Kamera f=it Kameras, sword Schwert n Schwerter
crown Krone f=it Kronen, lantern Laterne f=it Laternen, pearl Perle f=it Perlen
""")
CLOTHES = _nouns("""
hat Hut m=it Hüte, coat Mantel m=it Mäntel, shirt Hemd n Hemden, dress Kleid n Kleider
jacket Jacke f=it Jacken, scarf/scarves Schal m=it Schals, cap Mütze f=it Mützen
belt Gürtel m=it -, skirt Rock m=it Röcke
""")
VEHICLES = _nouns("""
bicycle Fahrrad n Fahrräder, boat Boot n Boote, cart Wagen m=it -, car Auto n Autos
ship Schiff n Schiffe, sledge Schlitten m=it -, train Zug m=it Züge, bus Bus m=it Busse
""")
FURNITURE = _nouns("""
chair Stuhl m=it Stühle, table Tisch m=it Tische, bed Bett n Betten, bench Bank f=it Bänke
sofa Sofa n Sofas, shelf/shelves Regal n Regale, cupboard Schrank m=it Schränke
carpet Teppich m=it Teppiche, oven Ofen m=it Öfen, chest Truhe f=it Truhen, tent Zelt n Zelte
tree Baum m=it Bäume, fence Zaun m=it Zäune, wall Mauer f=it Mauern
""")
OPENABLE = _nouns("""
door Tür f=it Türen, window Fenster n -, gate Tor n Tore
""")


def _place(line: str) -> Place:
    """`garden Garten m Gärten : in`: the kind after the colon says which prepositions it takes."""
    noun, kind = line.split(":")
    forms = {
        "in": ("in", "in", "into", "in", "acc"),
        "zu": ("in", "in", "to", "zu", "dat"),
        "on": ("on", "auf", "onto", "auf", "acc"),
        "markt": ("at", "auf", "to", "zu", "dat"),
        "feld": ("in", "auf", "to", "zu", "dat"),
        "bahnhof": ("at", "an", "to", "zu", "dat"),
    }[kind.strip()]
    return Place(_noun(noun), *forms)


PLACES = tuple(
    _place(item)
    for row in """
garden Garten m=it Gärten :in, kitchen Küche f=it Küchen :in, forest Wald m=it Wälder :in
house Haus n Häuser :in, tower Turm m=it Türme :in, cellar Keller m=it - :in
attic Dachboden m=it Dachböden :in, room Zimmer n - :in, barn Scheune f=it Scheunen :in
stable Stall m=it Ställe :in, cave Höhle f=it Höhlen :in, hut Hütte f=it Hütten :in
valley Tal n Täler :in, bathroom Badezimmer n - :in, school Schule f=it Schulen :zu
village Dorf n Dörfer :zu, church Kirche f=it Kirchen :zu, castle Schloss n Schlösser :zu
library Bibliothek f=it Bibliotheken :zu, museum Museum n Museen :zu
bakery Bäckerei f=it Bäckereien :zu, theatre Theater n - :zu, park Park m=it Parks :zu
shop Laden m=it Läden :zu, hospital Krankenhaus n Krankenhäuser :zu, hill Hügel m=it - :on
roof Dach n Dächer :on, bridge Brücke f=it Brücken :on, island Insel f=it Inseln :on
mountain Berg m=it Berge :on, market Markt m=it Märkte :markt
station Bahnhof m=it Bahnhöfe :bahnhof, lake See m=it Seen :bahnhof
river Fluss m=it Flüsse :bahnhof, meadow Wiese f=it Wiesen :feld, field Feld n Felder :feld
farm Bauernhof m=it Bauernhöfe :markt
""".strip().splitlines()
    for item in row.split(",")
)

# Names that both languages share, none ending in s, x or z (the genitive would need an apostrophe).
BOYS = words("""
Paul Leon Ben Finn Noah Oskar Anton Emil Jonathan Jakob Karl Peter Martin Simon David Robert Tim
Tom Oliver Theo Adam Daniel Philipp Hugo Konrad Ludwig Otto Ivan Milo Arthur Henry Gustav Viktor
Erik
""")
GIRLS = words("""
Anna Emma Mia Lena Clara Ida Marie Sofia Laura Julia Nina Paula Greta Frieda Martha Sarah Eva Lisa
Hanna Lucy Rosa Olga Vera Alma Ella Nora Elsa Tina Carla Helena Luisa Johanna Maja Wilma
""")


def _en_degree(word: str) -> tuple[str, str]:
    irregular = {"good": ("better", "best"), "bad": ("worse", "worst")}
    if word in irregular:
        return irregular[word]
    if word in _LONG_ADJECTIVES:
        return f"more {word}", f"most {word}"
    if word.endswith("e"):
        return word + "r", word + "st"
    if word.endswith("y"):
        return word[:-1] + "ier", word[:-1] + "iest"
    if word in ("big", "thin", "hot", "sad", "wet"):
        return word + word[-1] + "er", word + word[-1] + "est"
    return word + "er", word + "est"


_LONG_ADJECTIVES = frozenset(
    words("""
beautiful careful curious dangerous expensive colourful famous tired hard-working patient modern
important
""")
)


def _adjective(item: str) -> Adjective:
    """`old alt älter ältest`; degrees left out are regular; `dark dunkel=dunkl` gives the stem."""
    parts = item.split()
    german, _, stem = parts[1].partition("=")
    stem = stem or german
    regular_superlative = german + (
        "est" if german.endswith(("t", "d", "ß", "z", "sch", "s", "eu", "au")) else "st"
    )
    comparative = (
        parts[2] if len(parts) > 2 else (stem if not stem.endswith("e") else stem[:-1]) + "er"
    )
    superlative = parts[3] if len(parts) > 3 else regular_superlative
    return Adjective(parts[0], german, stem, comparative, superlative, *_en_degree(parts[0]))


def _adjectives(table: str) -> tuple[Adjective, ...]:
    return tuple(_adjective(item) for row in table.strip().splitlines() for item in row.split(","))


SIZES = _adjectives("""
big groß größer größt, small klein, old alt älter ältest, new neu, tiny winzig, huge riesig
""")
LIVING_ADJECTIVES = _adjectives("""
young jung jünger jüngst, old alt älter ältest, big groß größer größt, small klein
beautiful schön, strong stark stärker stärkst, weak schwach schwächer schwächst, fast schnell
slow langsam, happy glücklich, sad traurig, tired müde=müd, hungry hungrig, thirsty durstig
angry wütend wütender wütendst, brave mutig, friendly freundlich, clever klug klüger klügst
lazy faul, hard-working fleißig, rich reich, poor arm ärmer ärmst, sick krank kränker kränkst
healthy gesund gesünder gesündest, curious neugierig, careful vorsichtig, funny lustig
dangerous gefährlich, proud stolz, famous berühmt berühmter berühmtest, lonely einsam, kind nett
quiet still, patient geduldig, polite höflich, shy schüchtern
""")
COLOURS = _adjectives("""
red rot röter rötest, blue blau, green grün, yellow gelb, black schwarz schwärzer schwärzest
white weiß, brown braun, grey grau
""")
THING_ADJECTIVES = _adjectives("""
long lang länger längst, short kurz kürzer kürzest, thin dünn, thick dick, clean sauber
dirty schmutzig, heavy schwer, light leicht, empty leer, expensive teuer=teur, cheap billig
round rund, soft weich, hard hart härter härtest, strange seltsam, colourful bunt bunter buntest
beautiful schön, ugly hässlich, wet nass nasser nassest, modern modern, important wichtig
pretty hübsch
""")
FOOD_ADJECTIVES = _adjectives("""
sweet süß, sour sauer=saur, fresh frisch, hot heiß, cold kalt kälter kältest, good gut besser best
bad schlecht, warm warm wärmer wärmst
""")
PLACE_ADJECTIVES = _adjectives("""
dark dunkel=dunkl, bright hell, warm warm wärmer wärmst, cold kalt kälter kältest, beautiful schön
quiet still, old alt älter ältest
""")


@dataclass(frozen=True, slots=True)
class Phrase:
    """A fixed adverbial in both languages; `tenses` says which tenses it goes with (empty: any)."""

    en: str
    de: str
    tenses: tuple[str, ...] = field(default=())


_PRESENT, _PAST, _FUTURE = ("present",), ("past", "perfect"), ("future",)
TIMES = (
    Phrase("today", "heute", ("present", "past", "future")),
    Phrase("yesterday", "gestern", ("past",)),
    Phrase("tomorrow", "morgen", _FUTURE),
    Phrase("now", "jetzt", _PRESENT),
    Phrase("in the morning", "am Morgen", ("present", "past")),
    Phrase("in the evening", "am Abend", ("present", "past")),
    Phrase("at night", "in der Nacht", ("present", "past")),
    Phrase("at noon", "am Mittag", ("present", "past")),
    Phrase("every day", "jeden Tag", ("present", "past")),
    Phrase("every evening", "jeden Abend", ("present", "past")),
    Phrase("this week", "diese Woche", ("present", "past", "future")),
    Phrase("last week", "letzte Woche", ("past",)),
    Phrase("last night", "letzte Nacht", ("past",)),
    Phrase("next week", "nächste Woche", _FUTURE),
    Phrase("soon", "bald", _FUTURE),
    Phrase("tonight", "heute Abend", _FUTURE),
    Phrase("in summer", "im Sommer", ("present", "past")),
    Phrase("in winter", "im Winter", ("present", "past")),
    Phrase("in spring", "im Frühling", ("present", "past")),
    Phrase("in autumn", "im Herbst", ("present", "past")),
    *(
        Phrase(f"on {english}", f"am {german}", ("present", "past", "future"))
        for english, german in zip(
            words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
            words("Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag"),
            strict=True,
        )
    ),
)
# Before the verb in English, among the times in German.
FREQUENCIES = (
    Phrase("often", "oft"),
    Phrase("always", "immer"),
    Phrase("sometimes", "manchmal"),
    Phrase("never", "nie"),
    Phrase("usually", "meistens"),
    Phrase("rarely", "selten"),
)
MANNERS = tuple(
    Phrase(item.partition(":")[0], item.partition(":")[2])
    for item in words("""
quickly:schnell slowly:langsam quietly:leise loudly:laut happily:fröhlich carefully:vorsichtig
alone:allein secretly:heimlich bravely:tapfer patiently:geduldig proudly:stolz
""")
)
NUMBERS = tuple(
    zip(
        words("two three four five six seven eight nine ten eleven twelve"),
        words("zwei drei vier fünf sechs sieben acht neun zehn elf zwölf"),
        strict=True,
    )
)
