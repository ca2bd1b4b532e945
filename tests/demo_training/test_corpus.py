"""The corpus: the same for the same seed, and free of what is kept for the test."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from random import Random

import jsonschema
import pytest

from octavo.engine.chat_template import ChatTemplate
from octavo_demo import fact_kinds, sentences, stories, tool_kinds
from octavo_demo.corpus import (
    CHAT_TEMPLATE,
    EOS,
    IM_END,
    IM_START,
    SKILLS,
    chat_prompt,
    documents,
    text_of,
)
from octavo_demo.evaluate import chat_items, question_items, tool_items, translation_items
from octavo_demo.facts import quiz
from octavo_demo.templates import fill
from octavo_demo.tools import call_text, exchange, offers

_DIGEST = """
import hashlib, itertools
from octavo_demo.corpus import documents
digest = hashlib.sha256()
for document in itertools.islice(documents("digest"), 200):
    digest.update(repr(document).encode())
print(digest.hexdigest())
"""


def test_same_seed_same_documents_in_any_process() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1
    assert list(islice(documents("a"), 5)) != list(islice(documents("b"), 5))


def test_no_training_sentence_is_held_out() -> None:
    rng = Random("training side")
    training = {sentences.sentence_pair(rng)[0] for _ in range(20_000)}
    test = {item.prompt.splitlines()[-1].removesuffix(" =>") for item in translation_items(300, 0)}
    assert not training & test
    assert all(sentences.is_held_out(english) for english in test)
    assert not any(sentences.is_held_out(english) for english in training)


def test_no_training_text_states_a_held_out_fact() -> None:
    rng = Random("facts")
    for _ in range(100):
        asked = quiz(rng, 200, 3)
        lines = asked.text.replace(". ", ".\n").splitlines()
        statements = [line.removeprefix("- ") for line in lines]
        assert not any(
            fact_kinds.is_held_out(line)
            for line in statements
            if line.startswith(("The ", "On ", "In ")) or "'s" in line
        )
    for item in question_items(20, (50, 120)):
        assert any(fact_kinds.is_held_out(line) for line in _statements(item.prompt))


def _statements(prompt: str) -> list[str]:
    return [line.removeprefix("- ") for line in prompt.replace(". ", ".\n").splitlines()]


def test_no_training_story_is_held_out() -> None:
    rng = Random("stories")
    assert not any(stories.is_held_out(stories.story(rng).text) for _ in range(200))
    assert stories.is_held_out(stories.story(rng, held_out=True).text)


@pytest.mark.parametrize("skill", SKILLS)
def test_documents_end_and_have_something_to_learn(skill: str) -> None:
    for document in islice(documents("shape", skill), 60):
        text = text_of(document)
        assert text.endswith(EOS)
        assert text.count(EOS) == 1
        assert text.count(IM_START) == text.count(IM_END)
        assert any(weight for _, weight in document)
        assert ("{" in text) <= (skill == "tools")
        assert "|" not in text.replace(EOS, "").replace(IM_START, "").replace(IM_END, "")


def test_a_question_is_answered_by_its_text() -> None:
    for item in question_items(50, (100, 300)):
        assert item.answer.removesuffix(".").lower() in item.prompt.lower()


def test_chat_prompt() -> None:
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert chat_prompt("Hi", system="Be kind.") == expected
    assert chat_items(1)[0].prompt.startswith("<|im_start|>user\nTranslate to German: ")


def test_the_chat_template_writes_tools_and_calls_as_in_training() -> None:
    rng = Random("template")
    template = ChatTemplate(CHAT_TEMPLATE, {})
    for _ in range(20):
        offered = offers(rng, 3)
        tools = [each.definition for each in offered]
        made = exchange(rng, offered, held_out=False)
        function = {"name": made.call.name, "arguments": made.call.arguments}
        messages = [
            {"role": "user", "content": made.question},
            {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
            {"role": "tool", "content": made.call.result},
        ]
        turns = (made.question, call_text(made.call), made.call.result)
        expected = template.render(messages, True, {"tools": tools})
        assert chat_prompt(*turns, tools=tools) == expected


def test_calls_keep_to_the_definitions_of_their_tools() -> None:
    rng = Random("calls")
    for _ in range(300):
        offered = offers(rng, rng.randint(1, 6))
        made = exchange(rng, offered, held_out=False)
        [called] = [each for each in offered if each.name == made.call.name]
        jsonschema.validate(made.call.arguments, called.definition["function"]["parameters"])
        is_calculator = len(called.kind.covers) > 1  # "3 plus 4" becomes "3 + 4"
        for value in made.call.arguments.values():
            assert is_calculator or str(value) in made.question


def asks_held_out(question: str) -> bool:
    """Its question mark may have been left out."""
    return any(map(tool_kinds.is_question_held_out, (question, f"{question}?")))


def test_no_training_tool_and_no_question_for_it_is_held_out() -> None:
    rng = Random("tools")
    for _ in range(300):
        offered = offers(rng, 4)
        assert not any(tool_kinds.is_name_held_out(each.name) for each in offered)
        with_arguments = [each for each in offered if each.kind.parameters]
        question = exchange(rng, with_arguments, held_out=False).question
        assert not tool_kinds.is_question_held_out(question) or question[-1] != "?"
    for item in tool_items(40):
        assert tool_kinds.is_name_held_out(item.call.name)
        assert asks_held_out(item.prompt.split("user\n")[-1].split(IM_END)[0])


def test_templates_nest() -> None:
    rng = Random(0)
    found = {fill(rng, "[a|b [c|{d}]] e", {"d": "x"}) for _ in range(50)}
    assert found == {"a e", "b c e", "b x e"}
