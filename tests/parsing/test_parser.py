# ruff: noqa: RUF001  (DeepSeek writes its delimiters with full-width bars)
"""Answers are read alike however their text is cut, and as transformers reads them."""

from __future__ import annotations

import json
import string
import sys
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from octavo.errors import ConfigError, ModelError
from octavo.parsing.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    joined,
)
from octavo.parsing.formats import CALL_FORMATS, AnswerFormat, find_format
from octavo.parsing.parser import MAX_HELD, MAX_READ, ResponseParser
from octavo.parsing.template import Delimiter, read_template
from octavo.parsing.values import parsed

PROPERTIES = {"f": {"x": {"type": "integer"}, "y": {"type": ["string", "null"]}}}


def call(number: int, name: str, arguments: str) -> list[Event]:
    return [
        ToolCallBegin(number, name),
        ToolCallArguments(number, arguments),
        ToolCallEnd(number),
    ]


def read(parser: ResponseParser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined(events + parser.finish())


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


TWO = [*call(0, "f", '{"x": 1}'), *call(1, "g", "{}")]

# Name of a format -> texts and what they mean.
EXAMPLES: dict[str, list[tuple[str, list[Event]]]] = {
    "hermes": [
        (
            'Well <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
            '<tool_call>{"arguments": {}, "name": "g"}</tool_call>',
            [Content("Well"), *TWO],
        ),
        # A delimiter in a string, arguments as a string, none at all.
        (
            '<tool_call>{"name": "f", "arguments": {"y": "</tool_call>"}}</tool_call> so',
            [*call(0, "f", '{"y": "</tool_call>"}'), Content("so")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>'
            '<tool_call>{"name": "g"}</tool_call>',
            TWO,
        ),
        # Cut off, and what is no call.
        (
            '<tool_call>{"name": "f", "arguments": {"x": ',
            [ToolCallBegin(0, "f"), ToolCallArguments(0, '{"x": '), ToolCallEnd(0)],
        ),
        (
            "a <tool_call>\n{nonsense}\n</tool_call> b",
            [
                Content("a <tool_call>\n{nonsense}\n</tool_call> b"),
            ],
        ),
        ("a <tool_call>[1]</tool_call>", [Content("a <tool_call>[1]</tool_call>")]),
        ("a <tool", [Content("a <tool")]),
        ("  plain \n", [Content("  plain \n")]),
    ],
    "qwen-tags": [
        (
            "Well\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n"
            "<parameter=y>\na\nb\n</parameter>\n</function>\n</tool_call>\n<function=g></function>",
            [Content("Well"), *call(0, "f", '{"x": 1, "y": "a\\nb"}'), *call(1, "g", "{}")],
        ),
    ],
    "seed": [
        (
            "Well\n<seed:tool_call>\n<function=f>\n<parameter=x>1</parameter>\n"
            "<parameter=y>\na\nb</parameter>\n</function>\n</seed:tool_call>\n"
            "<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>",
            [Content("Well"), *call(0, "f", '{"x": 1, "y": "\\na\\nb"}'), *call(1, "g", "{}")],
        ),
    ],
    "glm": [
        (
            "\nWell\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n"
            "<arg_key>y</arg_key>\n<arg_value>a\nb</arg_value>\n</tool_call>\n"
            "<tool_call>g\n</tool_call>",
            [Content("\nWell"), *call(0, "f", '{"x": 1, "y": "a\\nb"}'), *call(1, "g", "{}")],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', [Content('<tool_call>{"name": "f"}</tool_call>')]),
    ],
    "glm-v47": [
        (
            "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
            "<tool_call>g</tool_call>",
            TWO,
        ),
    ],
    "llama3-json": [
        (
            '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; '
            '{"type": "function", "name": "g", "parameters": {}}',
            TWO,
        ),
        ('{"a": 1}', [Content('{"a": 1}')]),
        (
            '{"name": "f", "parameters": {"x": 1}} and more',
            [*call(0, "f", '{"x": 1}'), Content("and more")],
        ),
    ],
    "mistral": [
        (
            'Well[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, '
            '{"name": "g", "arguments": {}, "id": "123456789"}]',
            [Content("Well"), *TWO],
        ),
    ],
    "mistral-call-id": [
        (
            'Well[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"x": 1}'
            "[TOOL_CALLS]g[CALL_ID]000000001[ARGS]{}",
            [Content("Well"), *TWO],
        ),
        ('[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', TWO),
        (
            '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"y": "[TOOL_CALLS]g[CALL_ID]1[ARGS]"}',
            call(0, "f", '{"y": "[TOOL_CALLS]g[CALL_ID]1[ARGS]"}'),
        ),
        (
            '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"x": ',
            [ToolCallBegin(0, "f"), ToolCallArguments(0, '{"x": '), ToolCallEnd(0)],
        ),
        ("[TOOL_CALLS]f[CALL_ID]{}", [Content("[TOOL_CALLS]f[CALL_ID]{}")]),
        ("[TOOL_CALLS]f[CALL_ID]", [Content("[TOOL_CALLS]f[CALL_ID]")]),
    ],
    "mistral-args": [('[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', TWO)],
    "deepseek": [
        (
            "Well<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
            '```json\n{"x": 1}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            [Content("Well"), *TWO],
        ),
    ],
    "deepseek-v31": [
        (
            'Well<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}'
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            [Content("Well"), *TWO],
        ),
    ],
    "pythonic": [
        ("[f(x=1), g()]", TWO),
        (
            '<|python_start|>[f(y="[)", z={"a": [True, None, false, -1.5]})]<|python_end|>',
            call(0, "f", '{"y": "[)", "z": {"a": [true, null, false, -1.5]}}'),
        ),
        ("[1, 2]", [Content("[1, 2]")]),
        ("[f(1)]", [Content("[f(1)]")]),
        ("[f(x=g())]", [Content("[f(x=g())]")]),
        # Names that are none in Python, and strings in which they are none.
        (
            "[a-b/c.d:e(from=1, x-y = -1.5, $z='say f(x=1)', @b=2), "
            """f (y='a\\'b(', w=(1, {"k": (2,)}))]""",
            [
                *call(0, "a-b/c.d:e", '{"from": 1, "x-y": -1.5, "$z": "say f(x=1)", "@b": 2}'),
                *call(1, "f", '{"y": "a\'b(", "w": [1, {"k": [2]}]}'),
            ],
        ),
        ('[f(x="""a "g(y=1)" b""")]', call(0, "f", '{"x": "a \\"g(y=1)\\" b"}')),
        ("[f(x=1, x=2)]", [Content("[f(x=1, x=2)]")]),
        (
            """[3d(x=1, **{"user id": 2, "a'b=c(": [3]}, **{}), g(**{})]""",
            [*call(0, "3d", """{"x": 1, "user id": 2, "a'b=c(": [3]}"""), *call(1, "g", "{}")],
        ),
        # A string in quotes is none of the other types that its schema has.
        ("[f(x='1', y='null')]", call(0, "f", '{"x": 1, "y": "null"}')),
        *((text, [Content(text)]) for text in ('[f(x=1, **{"x": 2})]', "[f(**[1])]")),
        # Escapes that only JSON has, in the quotes that it has.
        (
            r"""[f(x="a\\/b\/c\"\n\d", y='\/\'', z=r"\/\n")]""",
            call(0, "f", r"""{"x": "a\\/b/c\"\n\\d", "y": "\\/'", "z": "\\/\\n"}"""),
        ),
        ("[f(x='a, g(y=1)]", [Content("[f(x='a, g(y=1)]")]),
    ],
    "olmo3": [
        ("Well\n<function_calls>f(x=1)\ng()</function_calls>", [Content("Well"), *TWO]),
        ("<function_calls>\nf(x=1)\n\ng()\n</function_calls> so", [*TWO, Content("so")]),
        ("<function_calls>[f(x=1), g()]</function_calls>", TWO),
        (
            "<function_calls>f(y='a\\nb', z={\"a\": [true, false, null]})</function_calls>",
            call(0, "f", '{"y": "a\\nb", "z": {"a": [true, false, null]}}'),
        ),
        *(
            (text, [Content(text)])
            for text in (
                "<function_calls></function_calls>",
                "<function_calls>f(x=1)\nno call</function_calls>",
                "<function_calls>f(x=1)\ny = g()</function_calls>",
                "<function_calls>f(x=1",
                "<function_calls>f(1)</function_calls> so",
            )
        ),
    ],
    "granite": [
        (
            'Well <|tool_call|>[{"name": "f", "arguments": {"x": 1}}, '
            '{"name": "g", "arguments": {}}]',
            [Content("Well"), *TWO],
        ),
        ('<|tool_call|> [{"arguments": {"x": 1}, "name": "f"}, {"name": "g"}]\n', TWO),
        (
            '<|tool_call|>[{"name": "f", "arguments": {"x": ',
            [ToolCallBegin(0, "f"), ToolCallArguments(0, '{"x": '), ToolCallEnd(0)],
        ),
        (
            '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}] so',
            [*call(0, "f", '{"x": 1}'), Content("so")],
        ),
        ("a <|tool_call|>{nonsense}", [Content("a <|tool_call|>{nonsense}")]),
        ("<|tool_call|>[]", [Content("<|tool_call|>[]")]),
    ],
    "granite-v31": [
        (
            '<tool_call>[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
            TWO,
        ),
    ],
    "functools": [
        (
            'Well functools[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
            [Content("Well"), *TWO],
        ),
        ("import functools[1]; functools", [Content("import functools[1]; functools")]),
    ],
    "cohere": [
        (
            "<|START_ACTION|>[\n"
            '    {"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}},\n'
            '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n'
            "]<|END_ACTION|>",
            TWO,
        ),
        (
            'Well <|START_ACTION|>[{"parameters": {"y": "<|END_ACTION|>"}, "tool_name": "f"}]'
            "<|END_ACTION|>",
            [Content("Well"), *call(0, "f", '{"y": "<|END_ACTION|>"}')],
        ),
        (
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": ',
            [ToolCallBegin(0, "f"), ToolCallArguments(0, '{"x": '), ToolCallEnd(0)],
        ),
        (
            "<|START_ACTION|>[{nonsense}]<|END_ACTION|> so",
            [Content("<|START_ACTION|>[{nonsense}]<|END_ACTION|> so")],
        ),
        ("<|START_RESPONSE|>Well. So<|END_RESPONSE|>", [Content("Well. So")]),
        ("<|START_TEXT|>Well.\n<|END_TEXT|>", [Content("Well.")]),
        ("Well. <|START", [Content("Well. <|START")]),
    ],
    "harmony": [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
            [Reasoning("Hm."), *call(0, "f", '{"x": 1}')],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
            "<|message|>Well. ",
            [Reasoning("Hm."), Content("Well. ")],
        ),
    ],
}
CASES = [(name, *each) for name, examples in EXAMPLES.items() for each in examples]


def test_every_format_has_examples() -> None:
    assert set(EXAMPLES) == set(CALL_FORMATS)


@pytest.mark.parametrize(("name", "text", "events"), CASES)
@given(places=st.lists(st.integers(0, 400), max_size=30))
@settings(max_examples=25)
def test_any_cut_of_an_answer_gives_the_same_events(
    name: str, text: str, events: list[Event], places: list[int]
) -> None:
    format_ = find_format(None, calls=name)
    for pieces in (cut(text, places), list(text)):
        assert read(format_.parser("", PROPERTIES), pieces) == events


@pytest.mark.parametrize(
    ("name", "text"),
    [("llama3-json", '{"name": "f", "parameters": {"x": 1}}'), ("pythonic", "[f(x=1)]")],
)
@given(places=st.lists(st.integers(0, 400), max_size=30))
@settings(max_examples=6)
def test_calls_without_a_delimiter_may_follow_the_reasoning(
    name: str, text: str, places: list[int]
) -> None:
    """However long that is, and nothing else."""
    format_ = find_format(None, calls=name, reasoning="think")
    for thought in ("Hm.", f"Hm, {text}?" * 1_000):
        answer = f"<think>{thought}</think>\n\n{text}"
        for pieces in (cut(answer, places), list(answer)):
            events = read(format_.parser(""), pieces)
            assert events == [Reasoning(thought), *call(0, "f", '{"x": 1}')]
        answer = f"<think>{thought}</think>\n\nWell: {text}"
        events = read(format_.parser(""), cut(answer, places))
        assert events == [Reasoning(thought), Content(f"Well: {text}")]


@given(places=st.lists(st.integers(0, 400), max_size=30))
@settings(max_examples=25)
def test_what_cohere_thinks_is_neither_a_call_nor_the_text(places: list[int]) -> None:
    format_ = find_format("<|START_ACTION|> <|END_THINKING|>")
    thought = "<|START_THINKING|>Hm.<|END_THINKING|>"
    answers: list[tuple[str, list[Event]]] = [
        ("<|START_RESPONSE|>Well<|END_RESPONSE|>", [Content("Well")]),
        (
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]'
            "<|END_ACTION|>",
            call(0, "f", "{}"),
        ),
    ]
    for text, events in answers:
        for pieces in (cut(thought + text, places), list(thought + text)):
            assert read(format_.parser(""), pieces) == [Reasoning("Hm."), *events]


@given(places=st.lists(st.integers(0, 400), max_size=30))
@settings(max_examples=25)
def test_what_granite_responds_has_no_marks_around_it(places: list[int]) -> None:
    format_ = find_format(
        "<|start_of_role|> <|tool_call|> between <think></think> and between <response></response>"
    )
    assert format_.name == "granite"
    calls = '<|tool_call|>[{"name": "f", "arguments": {}}]'
    code = "Write <response>x</response>"
    answers: list[tuple[str, list[Event]]] = [
        (f"\n<response>\n{code} so.\n</response>\n", [Content(f"{code} so.")]),
        (f"<response>{code}</response>", [Content(code)]),
        (f"<response>{code} so", [Content(f"{code} so")]),
        (f"<response>Well</response>\n{calls}", [Content("Well"), *call(0, "f", "{}")]),
        (f"<response>{calls}", call(0, "f", "{}")),
        (f"\n{calls}", call(0, "f", "{}")),
        (f"So: {code}", [Content(f"So: {code}")]),
    ]
    for text, events in answers:
        whole = f"<think>Hm.</think>{text}"
        for pieces in (cut(whole, places), list(whole)):
            assert read(format_.parser(""), pieces) == [Reasoning("Hm."), *events]
    text = "<response>An XML document.</response>"
    assert read(format_.parser(""), cut(text, places)) == [Content(text)]


# Parts of delimiters, JSON and text in any order: what a model may say, and what it should not.
FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool", "_call>", "</", "\n", " "),
        *('{"name": "f", "arguments": ', '{"x": 1}', "}", '"', "\\", "{", "[", "]", ",", ":", "1"),
        *("[TOOL_CALLS]", "[ARGS]", "f", ";", "<function=f>", "</function>", "<parameter=x>", "é"),
        *("(", ")", "<arg_key>x</arg_key>", "<arg_value>", "</arg_value>"),
        *("[CALL_ID]", "<|tool_call|>", "<function_calls>", "f(x=1)", "</function_calls>"),
        *("<|START_ACTION|>", '{"tool_name": "f", "parameters": ', "<|END_ACTION|>"),
        *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ]
)


@pytest.mark.parametrize("name", CALL_FORMATS)
@given(parts=st.lists(FRAGMENTS, max_size=14), places=st.lists(st.integers(0, 300), max_size=12))
@settings(max_examples=150)
def test_any_text_is_read_alike_however_it_is_cut(
    name: str, parts: list[str], places: list[int]
) -> None:
    text = "".join(parts)
    format_ = find_format(None, calls=name, reasoning="none" if name == "harmony" else "think")
    whole = read(format_.parser(""), [text])
    assert read(format_.parser(""), cut(text, places)) == whole
    assert read(format_.parser(""), list(text)) == whole
    begun = [event.number for event in whole if isinstance(event, ToolCallBegin)]
    ended = [event.number for event in whole if isinstance(event, ToolCallEnd)]
    assert begun == ended == list(range(len(begun)))


# ---------------------------------------------------------------- transformers as the oracle

HERMES = {
    "start_anchor": "<assistant>",
    "fields": {
        "content": {},
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}
GEMMA = {
    "start_anchor_pattern": r"<turn>model\n",
    "fields": {
        "content": {"close": ["<end>", "<end_turn>"]},
        "tool_calls": {
            "open_pattern": r"<call>(?P<name>\w+)",
            "close": "</call>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<|", "|>"]]},
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}
TAGS = {
    "start_anchor": "<assistant>",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<function=(?P<name>\w+)>",
            "close": "</function>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<p=(?P<key>\w+)>(?P<value>.*?)</p>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}
LIST = {
    "start_anchor": "[/INST]",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "close_pattern": r"(?<=\])\s*</s>",
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{arguments}"},
            },
            "transform_each": True,
        },
    },
}
NAMES = st.text(string.ascii_letters, min_size=1, max_size=5)
WORDS = st.text(string.ascii_letters + " .<\n", max_size=12)
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.text('ab{}[]"\\:, é', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=3)
BARE = st.dictionaries(NAMES, st.text("ab 1", max_size=4) | st.integers(0, 9), max_size=3)


@st.composite
def written(draw: st.DrawFn, kind: str) -> tuple[str, str]:
    """The end of a prompt and an answer to it, in one of the formats."""
    calls = draw(
        st.lists(st.tuples(NAMES, BARE if kind in ("tags", "gemma") else OBJECTS), max_size=3)
    )
    text = draw(WORDS)
    if kind == "hermes":
        thought = draw(st.none() | WORDS)
        prefix = draw(st.sampled_from(["", "x<assistant>", "<think> <assistant>\n"]))
        if thought is not None:
            text = f"<think>{thought}</think>{text}"
        for name, arguments in calls:
            inner = json.dumps(
                {"name": name, "arguments": arguments}, indent=draw(st.none() | st.just(1))
            )
            text += f"<tool_call>\n{inner}\n</tool_call>"
        return prefix, text
    if kind == "gemma":
        for name, arguments in calls:
            members = ",".join(
                f"{key}:{f'<|{each}|>' if isinstance(each, str) else each}"
                for key, each in arguments.items()
            )
            text += f"<call>{name}{{{members}}}</call>"
        return "<turn>model\n", text + draw(st.sampled_from(["", "<end>", "<end_turn>"]))
    if kind == "tags":
        for name, arguments in calls:
            inner = "".join(f"<p={key}>{each}</p>" for key, each in arguments.items())
            text += f"<function={name}>{inner}</function>"
        return "<assistant>", text
    if calls:
        entries = [{"name": name, "arguments": arguments} for name, arguments in calls]
        text += f"[TOOL_CALLS]{json.dumps(entries)}{draw(st.sampled_from(['', '</s>']))}"
    return "a[/INST]", text


def message_of(events: list[Event]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for event in events:
        match event:
            case Content(text):
                message["content"] = message.get("content", "") + text
            case Reasoning(text):
                message["thinking"] = message.get("thinking", "") + text
            case ToolCallBegin(_, name):
                calls.append({"name": name, "arguments": ""})
            case ToolCallArguments(number, text):
                calls[number]["arguments"] += text
    for each in calls:
        each["arguments"] = json.loads(each["arguments"])
    message = {name: text.strip() for name, text in message.items() if text.strip()}
    return message | ({"calls": calls} if calls else {})


@pytest.mark.parametrize(
    ("kind", "template"),
    [("hermes", HERMES), ("gemma", GEMMA), ("tags", TAGS), ("list", LIST)],
)
@given(data=st.data(), places=st.lists(st.integers(0, 400), max_size=10))
@settings(max_examples=200)
def test_a_models_own_template_means_what_it_means_to_transformers(
    kind: str, template: dict[str, Any], data: st.DataObject, places: list[int]
) -> None:
    prefix, text = data.draw(written(kind))
    expected = parse_response(text, template, prefix=prefix)
    calls = [each["function"] for each in expected.pop("tool_calls", [])]
    expected = {name: each for name, each in expected.items() if each}
    own = read_template(template)
    events = read(ResponseParser(own, own.prefix(prefix)), cut(text, places))
    assert message_of(events) == expected | ({"calls": calls} if calls else {})


# ---------------------------------------------------------------- choosing a format


def chosen(source: str | None = None, **options: Any) -> AnswerFormat:
    return find_format(source, **options)


@pytest.mark.parametrize(
    ("source", "name", "thinking"),
    [
        ("{{ messages }}", "none", None),
        ("<tool_call> {{ tools }} </think>", "hermes", ("<think>", "</think>")),
        ("<tool_call> <function= {{ tools }}", "qwen-tags", None),
        (
            "'<seed:tool_call>' '<function=' '</seed:think>'",
            "seed",
            ("<seed:think>", "</seed:think>"),
        ),
        (
            "'<tool_call>' + tc.name\n<arg_key>{{ k }}</arg_key>\n<arg_value></think>",
            "glm",
            ("<think>", "</think>"),
        ),
        ("'<tool_call>' + tc.name <arg_key>{{ k }}</arg_key><arg_value>", "glm-v47", None),
        ("[TOOL_CALLS] {{ tools }}", "mistral", None),
        ("[TOOL_CALLS] [ARGS] [THINK] [/THINK]", "mistral-args", ("[THINK]", "[/THINK]")),
        ("'[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]'", "mistral-call-id", None),
        ("<|start_of_role|> respond only with <|tool_call|> followed by", "granite", None),
        ("<|start_of_role|> with <tool_call> followed by a JSON list", "granite-v31", None),
        ("<|start_of_role|> within <tool_call></tool_call> XML tags", "hermes", None),
        ("' <functions>' '</functions>' '<function_calls>' '</function_calls>'", "olmo3", None),
        (
            '<|END_THINKING|><|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>',
            "cohere",
            ("<|START_THINKING|>", "<|END_THINKING|>"),
        ),
        ("<｜tool▁call▁begin｜> ```json </think>", "deepseek", ("<think>", "</think>")),
        ("<｜tool▁call▁begin｜> </think>", "deepseek-v31", ("<think>", "</think>")),
        ("<|python_tag|>", "llama3-json", None),
        ('respond with {"name": function name, "parameters": {}}', "llama3-json", None),
        ('Action: ```json [{"tool_name": "f", "parameters": {}}]```', "none", None),
        ("[func_name1(params_name1=params_value1", "pythonic", None),
        ('functools[{"name": [function name], "arguments": {}}]', "functools", None),
        ("<|channel|> <|constrain|>", "harmony", ("<|channel|>analysis<|message|>", "<|end|>")),
    ],
)
def test_a_chat_template_shows_its_format(
    source: str, name: str, thinking: tuple[str, str] | None
) -> None:
    found = find_format(source)
    assert (found.name, found.thinking) == (name, thinking)


def test_options_and_the_models_own_template_go_first() -> None:
    assert find_format("<tool_call>", calls="mistral").name == "mistral"
    assert find_format("</think>", reasoning="none").thinking is None
    own = find_format("[TOOL_CALLS]", HERMES)
    assert (own.name, own.thinking) == ("model", ("<think>", "</think>"))
    assert own.calls is not None
    assert own.calls.begin == '<tool_call>{"name": "{name}", "arguments": '
    assert find_format("[TOOL_CALLS]", HERMES, calls="mistral").name == "mistral"
    assert find_format("", TAGS).calls is None, "its calls cannot be demanded, only read"
    for option in ("calls", "reasoning"):
        with pytest.raises(ConfigError, match="'x' is not one of auto, none"):
            find_format(None, **{option: "x"})
    with pytest.raises(ConfigError, match="the model has no response_template"):
        find_format(None, calls="model")


@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [
        ("hi<end>\n<assistant>", "possible"),
        ("<think>hi<end>\n<assistant>", "possible"),
        ("hi<end>\n<assistant><think>\n", "open"),
        ("hi<end>\n<assistant><think>\n\n</think>\n\n", "none"),
        ("hi", "possible"),
    ],
)
def test_whether_an_answer_begins_with_reasoning(prompt: str, thinking: str) -> None:
    format_ = find_format("</think>", header="<end>\n<assistant>")
    assert format_.thinks(prompt) == thinking
    expected: list[Event] = [Content("a\n</think>\n\nb")]
    if thinking == "open":
        expected = [Reasoning("a"), Content("b")]
    assert read(format_.parser(prompt), ["a\n</think>\n\nb"]) == expected


def test_arguments_come_as_they_are_written() -> None:
    parser = chosen(calls="hermes").parser("")
    assert parser.feed('<tool_call>{"name": "f", "arguments": {')[-1] == ToolCallArguments(0, "{")
    for piece in ('"y": ', '"b"', ", ", '"a', '": ', '"c"'):
        assert joined(parser.feed(piece)) == [ToolCallArguments(0, piece)]
    assert joined(parser.finish()) == [ToolCallEnd(0)]  # cut off


def test_a_prompt_may_have_the_beginning_of_a_call() -> None:
    own = read_template(HERMES)
    prefix = own.prefix('x<assistant>Well <tool_call>{"name": "f", "arguments": {')
    assert read(ResponseParser(own, prefix), ['"x": 1}}</tool_call>']) == call(0, "f", '{"x": 1}')


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (5, "not an object"),
        ({"version": 2}, "version 2 is not 1"),
        ({"regions": {}}, "no field 'regions'"),
        ({"fields": {}}, "fields is not an object"),
        ({"fields": {"a": 5}}, "fields.a: it is not an object"),
        ({"fields": {"a": {"opens": "x"}}}, "no field 'opens'"),
        ({"fields": {"a": {}, "b": {}}}, "more than one field"),
        ({"fields": {"a": {"open": ""}}}, "an empty one"),
        ({"fields": {"a": {"open": []}}}, "neither a text nor a list"),
        ({"fields": {"a": {"open": "x", "open_pattern": "x"}}}, "contradict"),
        ({"fields": {"a": {"open_pattern": "("}}}, "no regular expression"),
        ({"fields": {"a": {"content": "yaml"}}}, "'yaml' is not one of"),
        ({"fields": {"a": {"content": "python-calls"}}}, "is not one of"),
        ({"fields": {"a": {"content": "xml-inline"}}}, "tag_pattern is not a text"),
        ({"fields": {"a": {"transform": {"b": ["x{content}"]}}}}, "text beside a placeholder"),
        ({"start_anchor": None}, "start_anchor is missing"),
    ],
)
def test_a_broken_template_is_refused(change: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        find_format(None, HERMES | change if isinstance(change, dict) else change)


class Counted:
    """A pattern that counts the characters in which it is searched."""

    def __init__(self, pattern: regex.Pattern[str]) -> None:
        self.pattern, self.num_characters = pattern, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pattern, name)

    def search(self, text: str, place: int, partial: bool) -> regex.Match[str] | None:
        self.num_characters += len(text) - place
        return self.pattern.search(text, place, partial=partial)


def counted(format_: AnswerFormat) -> tuple[AnswerFormat, list[Counted]]:
    """The format with patterns that count."""
    patterns: list[Any] = []

    def of(delimiter: Delimiter | None) -> Delimiter | None:
        if delimiter is None:
            return None
        patterns.append(Counted(delimiter.pattern))
        return replace(delimiter, pattern=patterns[-1])

    regions = tuple(
        replace(each, opening=of(each.opening), closing=of(each.closing))
        for each in format_.template.regions
    )
    return replace(format_, template=replace(format_.template, regions=regions)), patterns


BEGUN = [
    *(" to=functions.", " to=functions.f<|channel|>analysis", "<function=", "<tool_call>", "[", ""),
    *("[TOOL_CALLS]", "<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
    *("<|channel|>final", "<|python_tag|>", "{", "<seed:tool_call>", "<tool_call>f"),
    *("[TOOL_CALLS]f[CALL_ID]", "<|tool_call|>", "<function_calls>", "<|START_RESPONSE|>"),
]


@pytest.mark.parametrize("name", CALL_FORMATS)
@pytest.mark.parametrize("filling", ["a", " ", "\n"])
def test_little_is_held_back_of_what_never_becomes_a_delimiter(name: str, filling: str) -> None:
    for begun in BEGUN:
        parser = find_format(None, calls=name, reasoning="think").parser("")
        events = parser.feed(begun)
        for _ in range(800):
            events += parser.feed(filling)
            assert len(parser._buffer) - parser._place < 500


def test_no_more_is_held_back_whatever_a_models_own_template_says() -> None:
    fields = {"content": {}, "tool_calls": {"open_pattern": r"<f=([^>]+)>", "content": "json"}}
    text = "<f=" + "a" * 3 * MAX_HELD
    parser = ResponseParser(read_template({"fields": fields}))
    events: list[Event] = []
    for character in text:
        events += parser.feed(character)
        assert len(parser._buffer) - parser._place <= MAX_HELD
    assert joined(events + parser.finish()) == [Content(text)]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":{}}</tool_call>'),
        ("hermes", "<think></think>"),
        ("qwen-tags", "<function=f>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>f\n</tool_call>"),
        ("mistral-args", "[TOOL_CALLS]f[ARGS]{}"),
        ("olmo3", "<function_calls>f()</function_calls>"),
        ("cohere", "<|START_RESPONSE|>a<|END_RESPONSE|>"),
        ("harmony", "<|channel|>analysis<|message|>a<|end|>"),
    ],
)
def test_a_text_with_many_delimiters_is_searched_a_few_times(name: str, part: str) -> None:
    """Each delimiter is searched again behind each other one: not in all of a long text."""
    format_, patterns = counted(find_format(None, calls=name, reasoning="think"))
    text = part * (40 * MAX_READ // len(part))
    parser = format_.parser("")
    parser.feed(text)
    parser.finish()
    most = max(pattern.num_characters for pattern in patterns)
    assert most < 4 * len(text) * MAX_READ / len(part)


def test_parameters_that_are_never_closed_are_read_once() -> None:
    body = "<parameter=a>" * 1_000
    pattern = CALL_FORMATS["qwen-tags"][0]["content_args"]["tag_pattern"]
    [match] = regex.finditer(pattern, body, flags=regex.DOTALL)
    assert match.end() == len(body)
    text = f"<function=f><parameter=x>1</parameter>{body}</function>"
    parser = find_format(None, calls="qwen-tags").parser("", PROPERTIES)
    assert read(parser, [text]) == call(0, "f", '{"x": 1}')


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("qwen-tags", r'["\ud83d"]', r'{"z": ["\ud83d"]}'),
        ("qwen-tags", r'["\ud83d\ude00", "é"]', '{"z": ["\N{GRINNING FACE}", "é"]}'),
        ("pythonic", r'"\ud83d\ude00é"', r'{"z": "\ud83d\ude00\u00e9"}'),
        ("qwen-tags", "[1e999]", None),
        ("pythonic", "1e999", None),
        ("hermes", r'"\ud83d"', r'"\ud83d"'),
    ],
)
def test_what_a_call_says_can_be_written_as_json(
    name: str, text: str, arguments: str | None
) -> None:
    whole = {
        "qwen-tags": f"<function=f><parameter=z>{text}</parameter></function>",
        "pythonic": f"[f(z={text})]",
        "hermes": f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>',
    }[name]
    events = read(chosen(calls=name).parser("", {"f": {"z": {"type": "array"}}}), [whole])
    assert events == ([Content(whole)] if arguments is None else call(0, "f", arguments))
    for event in events:
        "".join(map(str, event)).encode()


@given(places=st.lists(st.integers(0, 400), max_size=10))
@settings(max_examples=10)
def test_json_that_names_none_of_the_tools_is_content(places: list[int]) -> None:
    """As a form may demand it, where calls have no delimiter."""
    text = '{"age": [{"name": 5}], "parameters": {}, "name": "Bob"}\n'
    for format_ in (chosen(calls="llama3-json"), chosen("</think>", calls="llama3-json")):
        for whole in (f'{{"name": "Bob", {text[1:]}', '{"type": "function", "name": "g", "x": 1}'):
            parser = format_.parser("", PROPERTIES, names=["f"])
            assert read(parser, cut(whole, places)) == [Content(whole)]
        parser = format_.parser("", PROPERTIES, names=["f"])
        written = '{"name": "f", "parameters": {"x": 1}}'
        assert read(parser, cut(written, places)) == call(0, "f", '{"x": 1}')


def test_half_a_character_is_no_name() -> None:
    text = r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>'
    assert read(chosen(calls="hermes").parser(""), [text]) == [Content(text)]


def test_the_strings_of_a_call_are_put_in_their_places_at_once() -> None:
    strings = [f"{number} and more" for number in range(300)]
    text = "{" + ",".join(f"a{i}:<|{each}|>" for i, each in enumerate(strings)) + "}"
    arguments = {"string_delims": [["<|", "|>"]], "unquoted_keys": True}
    num_replaced = 0

    def profile(frame: Any, event: str, called: Any) -> None:
        nonlocal num_replaced
        num_replaced += event == "c_call" and called.__name__ == "replace"

    sys.setprofile(profile)
    try:
        value = parsed("json", text, arguments)
    finally:
        sys.setprofile(None)
    assert list(value.values()) == strings
    assert num_replaced < 10


def test_what_follows_a_broken_call_is_not_copied_at_each_piece() -> None:
    parser = chosen(calls="hermes").parser("")
    text = "<tool_call>no" + "a" * 100_000
    assert parser.feed(text) == []
    tracemalloc.start()
    assert parser.feed("b") == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000
    assert joined(parser.finish()) == [Content(f"{text}b")]


@pytest.mark.parametrize(
    "value",
    [
        "a" * 100_000,
        '"' + '\\"' * 50_000,
        "0x" + "f" * 10_000,
        "-" * 100_000 + "1",
        "not " * 50_000 + "1",
        "1+" * 50_000 + "1",
    ],
)
def test_python_that_cannot_be_read_is_no_call(value: str) -> None:
    text = f"[f(x={value})]"
    assert read(find_format(None, calls="pythonic").parser("", PROPERTIES), [text]) == [
        Content(text)
    ]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array"},
        *({"anyOf": 5}, {"type": 5}, {"oneOf": {}}, {"allOf": 5}, {"enum": 5}, {"enum": []}),
        *({"$ref": 5}, {"$ref": "#/$defs/a", "$defs": 5}, {"$ref": "#"}, {"anyOf": [5, None]}),
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_arguments_that_fit_no_type_stay_texts(schema: dict[str, Any]) -> None:
    value = "[" * 5_000 + "]" * 5_000
    text = f"<function=f><parameter=x>{value}</parameter></function>"
    parser = find_format(None, calls="qwen-tags").parser("", {"f": {"x": schema}})
    assert read(parser, [text]) == call(0, "f", json.dumps({"x": value}))
