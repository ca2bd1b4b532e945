"""An endless, seeded corpus: stories, translations, questions about a text; plain or as chat.

A document is a list of segments; a segment says how much the model is trained to write it (an
answer, a story), or that it only reads it (a question, an instruction: 0). `is_held_out` of each
skill keeps test material out of training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from random import Random

from octavo_demo.facts import Quiz, quiz
from octavo_demo.patterns import Pair
from octavo_demo.sentences import passage_pair
from octavo_demo.stories import request, story
from octavo_demo.tools import (
    Definition,
    Offer,
    call_parts,
    definitions_text,
    exchange,
    offers,
    unanswerable,
)

EOS, IM_START, IM_END, PAD = "<|eos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = (EOS, IM_START, IM_END, PAD)

Segment = tuple[str, int]
Document = list[Segment]

# What a token counts in the loss. A story's words are free to choose; an answer is right or wrong.
_READ, _TELL, _TRANSLATE, _ANSWER = 0, 1, 3, 7

INSTRUCTIONS = (
    "Translate English to German.",
    "Translate English to German:",
    "Translate the sentences from English to German.",
    "English => German",
    "Translate from English into German.",
)

# Every user's turn that the model was trained on begins with a capital letter and has no white
# space around it; to "hello" it would answer nonsense, to "Hello" it says hello. So the template
# writes turns as the model knows them. Of a tool it first writes the words by which to find it, and
# then what to call: the model is good at finding what follows known words, and bad at finding what
# precedes them. Calls are written as in the format of Hermes.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% for tool in tools %}{% set function = tool['function'] or tool %}"
    "{{ function['name'] | replace('_', ' ') }}"
    "{% if function['description'] %}{{ ': ' + function['description'] }}{% endif %}"
    "{% set parameters = function['parameters'] or {} %}"
    "{% set json = {'name': function['name'], 'parameters': parameters} | tojson %}"
    "{{ '\n' + json + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% set text = message['content'] %}"
    "{% if message['role'] == 'user' %}"
    "{% set text = text.strip() %}{% set text = text[:1] | upper + text[1:] %}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + text }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set json = {'name': call.function.name, 'arguments': call.function.arguments} | tojson %}"
    "{{ '<tool_call>\n' + json + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful, friendly assistant.",
    "You tell stories, translate and answer questions.",
    "Answer as well as you can.",
    "You are octavo's demo model.",
)


def _turn(role: str, text: str) -> str:
    return f"{IM_START}{role}\n{text}{IM_END}\n"


def chat_prompt(*turns: str, system: str = "", tools: Sequence[Definition] = ()) -> str:
    """What the chat template makes of a chat, up to the assistant's next word.

    Args:
        turns: of user and assistant in turn. What comes after a call is its result.
        system: a message before them.
        tools: that the assistant may call.
    """
    text = _turn("system", definitions_text(tools)) if tools else ""
    text += _turn("system", system) if system else ""
    is_called = False
    for index, turn in enumerate(turns):
        role = "assistant" if index % 2 else "tool" if is_called else "user"
        is_called = role == "assistant" and turn.startswith("<tool_call>")
        text += _turn(role, turn)
    return f"{text}{IM_START}assistant\n"


def _chat(rng: Random, turns: list[tuple[str, str]], weight: int) -> Document:
    document: Document = []
    start = _turn("system", rng.choice(_SYSTEM)) if rng.random() < 0.2 else ""
    for question, answer in turns:
        document.append(
            (f"{start}{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n", False)
        )
        document.append((f"{answer}{IM_END}", weight))
        start = "\n"
    return [*document, (f"\n{EOS}", _READ)]


def translation_prompt(
    examples: list[tuple[str, str]], english: str, instruction: str = INSTRUCTIONS[0]
) -> str:
    """The prompt of the paper's section 6.4: an instruction, examples, a sentence to translate."""
    lines = [f"{source} => {target}" for source, target in examples]
    return "\n".join([instruction, *lines, f"{english} =>"])


def _pair(rng: Random, held_out: bool) -> Pair:
    """Now and then without the full stop, on both sides."""
    english, german = passage_pair(rng, held_out)
    if rng.random() < 0.05 and english.endswith(".") and german.endswith("."):
        return english[:-1], german[:-1]
    return english, german


def _few_shot(rng: Random, held_out: bool) -> Document:
    """The German is trained, and its end; the line break after an example is the user's."""
    count = 1 if rng.random() < 0.3 else rng.randint(2, 12)
    pairs = [_pair(rng, held_out) for _ in range(count)]
    instruction = rng.choice(INSTRUCTIONS) if rng.random() < 0.5 else INSTRUCTIONS[0]
    instruction = f"{instruction}\n" if rng.random() < 0.95 else ""
    document: Document = []
    line_break = "\n"
    for index, (english, german) in enumerate(pairs):
        document.append((f"{instruction if index == 0 else line_break}{english} =>", _READ))
        document.append((f" {german}", _TRANSLATE))
    return [*document, (EOS, _TRANSLATE)]


_ASKING = (
    "Translate to German: {}",
    "Translate into German: {}",
    "Translate to German:\n{}",
    "Please translate into German: {}",
    'How do you say "{}" in German?',
    'What is "{}" in German?',
    "English to German: {}",
    "In German, please: {}",
    "Translate this sentence into German: {}",
    "{}\nTranslate that into German.",
)


def _translation_chat(rng: Random, held_out: bool) -> Document:
    turns: list[tuple[str, str]] = []
    asking = rng.choice(_ASKING)
    bare = rng.random() < 0.3
    for index in range(1 if rng.random() < 0.3 else rng.randint(2, 8)):
        english, german = _pair(rng, held_out)
        if rng.random() < 0.15:
            examples = [passage_pair(rng, held_out) for _ in range(rng.randint(0, 5))]
            turns.append((translation_prompt(examples, english), german))
            continue
        asking = asking if bare else rng.choice(_ASKING)
        turns.append((english if bare and index else asking.format(english), german))
    return _chat(rng, turns, _TRANSLATE)


def _story(rng: Random, held_out: bool) -> Document:
    text = story(rng, held_out).text
    if rng.random() < 0.1:  # from the middle
        text = text[text.index(". ") + 2 :]
    return [(f"{text}{EOS}", _TELL)]


_CONTINUING = (
    "Continue this story: ",
    "Continue: ",
    "How does this story go on? ",
    "Go on with this story:\n",
    "Finish this story: ",
)


def _story_chat(rng: Random, held_out: bool) -> Document:
    first = story(rng, held_out)
    turns = [(request(rng, first), first.text)]
    if rng.random() < 0.12:  # the beginning is given
        at = rng.choice([match.end() for match in re.finditer(r"\. ", first.text)][:6])
        turns = [(f"{rng.choice(_CONTINUING)}{first.text[:at].strip()}", first.text[at:])]
    elif rng.random() < 0.15:
        second = story(rng, held_out)
        turns.append((request(rng, second, another=True), second.text))
    return _chat(rng, turns, _TELL)


def question_prompt(text: str, question: str) -> str:
    return f"{text}\nQuestion: {question}\nAnswer:"


def _quiz(rng: Random, held_out: bool) -> Quiz:
    """Mostly short texts with many questions: what is learned there holds for the long ones."""
    size = (
        rng.randint(15, 110)
        if rng.random() < 0.6
        else int(math.exp(rng.uniform(math.log(100), math.log(1550))))
    )
    return quiz(rng, size, rng.randint(2, 12), held_out)


def _questions(rng: Random, held_out: bool) -> Document:
    asked = _quiz(rng, held_out)
    document: Document = [(asked.text, _READ)]
    for question, answer in asked.questions:
        document += [
            ("\nQuestion:", _READ),
            (f" {question}", _TELL),
            ("\nAnswer:", _READ),
            (f" {answer}.", _ANSWER),
        ]
    return [*document, (EOS, _ANSWER)]


def _questions_chat(rng: Random, held_out: bool) -> Document:
    asked = _quiz(rng, held_out)
    (first, answer), *others = asked.questions
    roll = rng.random()
    if roll < 0.1:
        opening = f"{first}\n{asked.text}"
    elif roll < 0.25:
        opening = question_prompt(asked.text, first)
    else:
        opening = f"{asked.text}\n{first}"
    turns = [(opening, f"{answer}."), *((question, f"{answer}.") for question, answer in others)]
    return _chat(rng, turns, _ANSWER)


_ABOUT_ME = (
    "I am the demo model of octavo, a very small language model. I can tell stories, translate"
    " simple English sentences into German,"
    " and answer questions about a text that you give me."
)
SORRY = (
    "I am a very small model and do not know that. I can tell a story, translate a simple sentence"
    " into German, or answer questions about a text."
)
_SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello!", "Hi!", "Hello", "Hi there!", "Good morning!", "Hey"),
        "Hello! Shall I tell you a story, translate a sentence into German,"
        " or answer a question about a text?",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What can you do?",
            "What is your name?",
            "Help",
            "How can you help me?",
            "What is octavo?",
        ),
        _ABOUT_ME,
    ),
    (
        ("How are you?", "How are you today?"),
        "I am well, thank you. What would you like: a story, a translation,"
        " or a question about a text?",
    ),
    (("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much."), "You are welcome!"),
    (
        ("Goodbye!", "Bye!", "Good night!", "See you!"),
        "Goodbye! Come back when you want to hear another story.",
    ),
    (
        (
            "What is the capital of France?",
            "Who won the world cup?",
            "What is two plus two?",
            "Write a Python program.",
            "What is the weather like?",
            "Explain quantum physics.",
            "What is the meaning of life?",
            "Who is the president?",
            "Solve this equation.",
            "Write an email to my boss.",
        ),
        SORRY,
    ),
)


def _talk(rng: Random) -> tuple[str, str]:
    """What one says, with and without its last mark, and the answer."""
    asked, answer = rng.choice(_SMALL_TALK)
    text = rng.choice(asked)
    return (text.rstrip("!?.") if rng.random() < 0.4 else text), answer


def _small_talk(rng: Random, held_out: bool) -> Document:
    turns = [_talk(rng) for _ in range(rng.randint(1, 3))]
    return _chat(rng, turns, _TELL)


def _tools(rng: Random, held_out: bool) -> Document:
    """A chat that offers tools: some questions need one of them, others none."""
    offered = offers(rng, rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6)))
    start = _turn("system", definitions_text([each.definition for each in offered]))
    start = start if offered else ""
    start += _turn("system", rng.choice(_SYSTEM)) if rng.random() < 0.2 else ""
    document: Document = []
    for _ in range(rng.choice((1, 2, 3, 4)) if offered else 1):
        if offered and rng.random() < 0.7:
            made = exchange(rng, offered, held_out)
            beginning, arguments = call_parts(made.call)  # the former is hard, the latter easy
            document += _said(start, "user", made.question, beginning, _ANSWER)
            document += [(f"{arguments}{IM_END}", _TRANSLATE)]
            document += _said("\n", "tool", made.call.result, f"{made.answer}{IM_END}", _TRANSLATE)
        else:
            question, answer, weight = _without_tool(rng, offered, held_out)
            document += _said(start, "user", question, f"{answer}{IM_END}", weight)
        start = "\n"
    return [*document, (f"\n{EOS}", _READ)]


def _said(start: str, role: str, text: str, answer: str, weight: int) -> Document:
    """A turn, and what the assistant answers."""
    return [(f"{start}{_turn(role, text)}{IM_START}assistant\n", _READ), (answer, weight)]


def _without_tool(rng: Random, offered: list[Offer], held_out: bool) -> tuple[str, str, int]:
    """What none of the tools is for: question, answer, and what its tokens count."""
    roll = rng.random()
    if roll < 0.5:
        return unanswerable(rng, offered, held_out), SORRY, _ANSWER
    if roll < 0.6:
        return *_talk(rng), _TRANSLATE
    if roll < 0.8:
        english, german = passage_pair(rng, held_out)
        return rng.choice(_ASKING).format(english), german, _TRANSLATE
    if roll < 0.95:
        asked_of = quiz(rng, rng.randint(15, 110), 1, held_out)
        question, answer = asked_of.questions[0]
        return f"{asked_of.text}\n{question}", f"{answer}.", _ANSWER
    first = story(rng, held_out)
    return request(rng, first), first.text, _TELL


Writer = Callable[[Random, bool], Document]
SKILLS: dict[str, tuple[tuple[Writer, int], ...]] = {
    "stories": ((_story, 10), (_story_chat, 8)),
    "translation": ((_few_shot, 17), (_translation_chat, 12)),
    "questions": ((_questions, 28), (_questions_chat, 22)),
    "small talk": ((_small_talk, 4),),
    "tools": ((_tools, 60),),
}
_MIX = [writer for writers in SKILLS.values() for writer, weight in writers for _ in range(weight)]


def documents(seed: str, skill: str = "", held_out: bool = False) -> Iterator[Document]:
    """Documents without end, the same for the same seed; of one skill, or the mix of all."""
    rng = Random(seed)
    mix = [writer for writer, weight in SKILLS[skill] for _ in range(weight)] if skill else _MIX
    while True:
        yield rng.choice(mix)(rng, held_out)


def text_of(document: Document) -> str:
    return "".join(text for text, _ in document)
