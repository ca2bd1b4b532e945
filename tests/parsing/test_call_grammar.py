# ruff: noqa: RUF001  (DeepSeek writes its delimiters with full-width bars)
"""Random outputs that keep to a format's grammar are read as what was demanded."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.parsing.argument_schemas import (
    MAX_LISTED,
    listed_values,
    may_be_text,
    properties_of,
)
from octavo.parsing.call_grammar import CallForm, answer_grammars
from octavo.parsing.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    joined,
)
from octavo.parsing.formats import CALL_FORMATS, AnswerFormat, find_format
from octavo.structured.constraint import num_words
from octavo.structured.guidance import Guidance
from octavo.structured.output import StructuredOutput

MARKS = (
    (
        "<think>|</think>|[THINK]|[/THINK]|<tool_call>|</tool_call>|<|python_tag|>|[TOOL_CALLS]|[ARGS]|"
        "<｜tool▁calls▁begin｜>|<｜tool▁calls▁end｜>|<｜tool▁call▁begin｜>|<｜tool▁call▁end｜>|"
        "<｜tool▁sep｜>|<|channel|>|<|message|>|<|start|>|<|end|>|<|constrain|>|"
        "<seed:tool_call>|</seed:tool_call>|[CALL_ID]|<function_calls>|</function_calls>|"
        "<|tool_call|>|<|START_ACTION|>|<|END_ACTION|>|<|START_RESPONSE|>|<|END_RESPONSE|>|"
        "<|START_THINKING|>|<|END_THINKING|>"
    )
    .replace("<|", "<:")
    .replace("|>", ":>")
    .split("|")
)
TOKENS = [mark.replace("<:", "<|").replace(":>", "|>") for mark in MARKS]
EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "word": {"type": "string", "pattern": "^[a-c]{1,3}$"},
        "from": {"type": "boolean"},
    },
    "required": ["x"],
    "additionalProperties": False,
}
CALLS = [
    CallForm("f", SCHEMA),
    CallForm("get-g.h", {"type": "object", "maxProperties": 0}),
]
MAX_TOKENS = 600


class World:
    """A vocabulary of bytes, with or without the delimiters as tokens, and what can be said."""

    def __init__(self, directory: Path, tokens: Sequence[str]) -> None:
        vocabulary = {"<eos>": EOS}
        for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
            vocabulary[character] = len(vocabulary)
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<eos>"])
        backend.add_tokens([AddedToken(each, special=i % 2 == 0) for i, each in enumerate(tokens)])
        backend.save(str(directory / "tokenizer.json"))
        self.tokenizer = Tokenizer.from_directory(directory)
        self.size = self.tokenizer.vocab_size
        self.library = Guidance(directory, self.size, [EOS])

    def say(self, seed: int, parts: list[dict[str, str]], said: str = "") -> str:
        """A random output that keeps to a grammar, and begins with what is `said`: tokens for
        delimiters are likely, and so is an end; of text there is little. "" if it has no end."""
        rng = random.Random(seed)
        constraint = self.library.compile(StructuredOutput(parts=parts).to_grammar()).fork()
        detokenizer = self.tokenizer.detokenizer([], skip_special_tokens=False)
        words = np.empty((1, num_words(self.size)), np.int32)
        text = said
        assert constraint.accept(self.tokenizer.encode(said)) == ""
        for _ in range(MAX_TOKENS):
            filled = self.library.fill([constraint], [()], [0], words).result()
            assert not filled.errors
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self.size]
            allowed = np.flatnonzero(bits).tolist()
            if filled.is_accepting[0] and (not allowed or rng.random() < 0.1):
                return text + detokenizer.finish()
            marks = [each for each in allowed if each > 256]
            token_id = rng.choice(marks if marks and rng.random() < 0.2 else allowed)
            assert constraint.accept([token_id]) == ""
            text += detokenizer.add(token_id)
        return ""


@pytest.fixture(scope="module", params=[TOKENS, []], ids=["tokens", "bytes"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), request.param)


def read(format_: AnswerFormat, prompt: str, text: str) -> list[Event]:
    parser = format_.parser(prompt, {"f": SCHEMA["properties"]})  # type: ignore[dict-item]
    return joined([*parser.feed(text), *parser.finish()])


def check_calls(events: list[Event]) -> int:
    """All calls keep to their schemas; returns how many there are."""
    names = [event.name for event in events if isinstance(event, ToolCallBegin)]
    arguments = {e.number: e.text for e in events if isinstance(e, ToolCallArguments)}
    assert set(arguments) == set(range(len(names)))
    for number, name in enumerate(names):
        value: Any = json.loads(arguments[number])
        assert name in ("f", "get-g.h")
        jsonschema.validate(value, SCHEMA if name == "f" else {"maxProperties": 0})
    return len(names)


def formats() -> list[str]:
    return list(CALL_FORMATS)


@pytest.mark.parametrize("name", formats())
def test_demanded_calls_are_calls_and_nothing_else(world: World, name: str) -> None:
    format_ = find_format(None, calls=name, reasoning="none")
    tokens = world.tokenizer.added_tokens
    counts = []
    for seed in range(12):
        is_parallel = seed % 2 == 0
        parts = answer_grammars(format_, tokens, "none", CALLS, True, is_parallel)
        text = world.say(seed, parts)
        events = read(format_, "", text)
        counts.append(check_calls(events) if text else 1)
        assert not any(isinstance(event, Content | Reasoning) for event in events), text
        assert counts[-1] == 1 or is_parallel
    assert min(counts) == 1
    assert max(counts) > 1 or name == "harmony"


@pytest.mark.parametrize("name", formats())
def test_a_call_that_is_begun_in_a_text_is_whole(world: World, name: str) -> None:
    format_ = find_format(None, calls=name, reasoning="none")
    tokens = world.tokenizer.added_tokens
    counts = []
    for seed in range(15):
        parts = answer_grammars(format_, tokens, "none", CALLS, is_parallel=seed % 2 == 0)
        text = world.say(seed, parts)
        counts.append(check_calls(read(format_, "", text)))
        assert counts[-1] <= 1 or seed % 2 == 0
    assert min(counts) == 0
    # By chance alone, bytes would not say that a call begins.
    if format_.calls is not None and format_.calls.trigger in tokens:
        assert max(counts) > 0


@pytest.mark.parametrize(
    ("name", "reasoning"),
    [
        ("hermes", "think"),
        ("llama3-json", "think"),
        ("mistral", "mistral"),
        ("pythonic", "think"),
        ("cohere", "cohere"),
        ("harmony", "auto"),
    ],
)
@pytest.mark.parametrize("thinking", ["open", "possible"])
def test_reasoning_comes_before_calls_and_forms(
    world: World, name: str, reasoning: str, thinking: Any
) -> None:
    format_ = find_format(None, calls=name, reasoning=reasoning, header="<a>")
    tokens = world.tokenizer.added_tokens
    assert format_.thinking is not None
    prompt = "<a>" if thinking == "possible" else f"<a>{format_.thinking[0]}"
    if name == "harmony":
        prompt = prompt.replace("<a>", "<|start|>assistant")
    assert format_.thinks(prompt) == thinking
    num_thoughts = num_ended = 0
    for seed in range(12):
        form = ("json_schema", json.dumps(SCHEMA)) if seed % 2 else None
        calls = [] if form else CALLS
        parts = answer_grammars(format_, tokens, thinking, calls, not form, True, form)
        # By chance alone, bytes would not say that the reasoning has ended.
        opening, closing = format_.thinking
        said = f"a{closing}" if thinking == "open" else f"{opening}a{closing}" * (seed % 4 < 2)
        text = world.say(seed, parts, said)
        if not text:
            continue
        num_ended += 1
        events = read(format_, prompt, text)
        num_thoughts += isinstance(events[0], Reasoning)
        rest = [event for event in events if not isinstance(event, Reasoning)]
        if form is None:
            assert check_calls(rest) > 0
            assert not any(isinstance(event, Content) for event in rest)
        else:
            [content] = rest
            assert isinstance(content, Content)
            jsonschema.validate(json.loads(content.text), SCHEMA)
    assert num_ended > 4
    assert num_thoughts > 0


@pytest.mark.parametrize("is_required", [True, False])
def test_a_line_may_end_before_the_reasoning(world: World, is_required: bool) -> None:
    format_ = find_format("<tool_call></think>")
    tokens = world.tokenizer.added_tokens
    parts = answer_grammars(format_, tokens, "possible", CALLS, is_required)
    said = '\n<think>a</think>\n\n<tool_call>\n{"name": "get-g.h", "arguments": {}}\n</tool_call>'
    constraint = world.library.compile(StructuredOutput(parts=parts).to_grammar()).fork()
    assert constraint.accept(world.tokenizer.encode(said)) == ""
    events = read(format_, "", said)
    assert events[0] == Reasoning("a")
    assert check_calls(events[1:]) == 1


@pytest.mark.parametrize("name", formats())
def test_names_of_tools_and_arguments_are_read_as_they_are_demanded(
    world: World, name: str
) -> None:
    format_ = find_format(None, calls=name, reasoning="none")
    names = ("user id", "a'b", 'c"d', " e=", "é-f")
    members = {each: {"type": "integer", "enum": [7, 8]} for each in names}
    schema = {"type": "object", "properties": members, "required": list(names)}
    schema["additionalProperties"] = False
    for tool in ("3d", "a:b/c.d-e"):
        call = CallForm(tool, schema, is_strict=True)
        parts = answer_grammars(format_, world.tokenizer.added_tokens, "none", [call], True, False)
        text = next(filter(None, (world.say(seed, parts) for seed in range(40))))
        parser = format_.parser("", {tool: members})
        begin, arguments, _ = joined([*parser.feed(text), *parser.finish()])
        assert begin == ToolCallBegin(0, tool)
        assert isinstance(arguments, ToolCallArguments)
        jsonschema.validate(json.loads(arguments.text), schema)


DEFINITIONS = {
    "unit": {"type": "string", "enum": ["C", "F"]},
    "place": {"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"]},
    "either": {"anyOf": [{"enum": ["F"]}, {"type": "null"}]},
}


def refers(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string", "enum": ["C", "F", ""]}, ["C", ""], ["C", ""]),
        ({"enum": [1, "x", None, True, "1"]}, ["1", "x", "null", "true"], [1, "x", None, True]),
        ({"const": 7}, ["7"], [7]),
        ({"enum": [f"x{i}" for i in range(MAX_LISTED)]}, ["x77"], ["x77"]),
        (refers("unit"), ["F"], ["F"]),
        (refers("either/anyOf/0"), ["F"], ["F"]),
        ({"allOf": [refers("unit")], "description": "C or F"}, ["F"], ["F"]),
        ({"anyOf": [refers("unit"), {"type": "null"}]}, ["F", "null"], ["F", None]),
        (refers("place"), ['{"z": 1}'], [{"z": 1}]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["5", "null"], [5, None]),
    ],
)
def test_a_value_in_tags_is_one_that_its_schema_has(
    world: World, schema: dict[str, Any], written: list[str], value: list[Any]
) -> None:
    format_ = find_format(None, calls="qwen-tags")
    whole = {
        **{"type": "object", "properties": {"k": schema}, "required": ["k"]},
        "$defs": DEFINITIONS,
    }
    for is_referred in (False, True):
        if is_referred:
            whole = {"$ref": "#/$defs/whole", "$defs": {**whole.pop("$defs"), "whole": whole}}
        call = CallForm("f", whole, is_strict=True)
        parts = answer_grammars(format_, world.tokenizer.added_tokens, "none", [call], True)
        constraint = world.library.compile(StructuredOutput(parts=parts).to_grammar())
        bad = "<tool_call>\n<function=f>\n<parameter=k>\nz"
        assert constraint.fork().accept(world.tokenizer.encode(bad)) != ""
        for text, meant in zip(written, value, strict=True):
            said = bad[:-1] + f"{text}\n</parameter>\n</function>\n</tool_call>"
            assert constraint.fork().accept(world.tokenizer.encode(said)) == ""
            parser = format_.parser("", {"f": properties_of(whole)})
            [_, arguments, _] = joined([*parser.feed(said), *parser.finish()])
            assert isinstance(arguments, ToolCallArguments)
            assert json.loads(arguments.text) == {"k": meant}


def test_a_schema_is_followed_a_few_steps_however_often_it_branches() -> None:
    for steps, ends in ((20, True), (2_000, False)):
        ways = {str(i): {"anyOf": [refers(str(i + 1))] * 2} for i in range(steps)}
        schema = {**refers("0"), "$defs": {**ways, str(steps): {"enum": [1, None]}}}
        assert list(listed_values(schema)) == (["1", "null"] if ends else [])
        assert may_be_text(schema) is not ends, "what it is may not be known"
    many: dict[str, Any] = {"anyOf": [{"type": "integer"}] * 1_000}
    assert may_be_text(many)
    assert not listed_values({"anyOf": [{"enum": ["a"] * (MAX_LISTED // 2)}] * 3})


@pytest.mark.parametrize("name", ["pythonic", "qwen-tags"])
def test_definitions_are_not_repeated_for_more_arguments_than_there_is_room_for(name: str) -> None:
    number = {"type": "integer", "description": "a" * 10_000}
    properties = {f"a{i}": refers("number") for i in range(100_000)}
    schema = {"type": "object", "properties": properties, "$defs": {"number": number}}
    call = CallForm("f", schema, field="tools[0].parameters")
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="more than 200000 bytes") as caught:
            answer_grammars(find_format(None, calls=name), {}, "none", [call], max_bytes=200_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.field == "tools[0].parameters"
    assert peak < 100 * 10_000 + 100_000 * 500


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"k": {"type": "string", "pattern": "^a"}}, "'k': pattern cannot be enforced"),
        ({"k": {"anyOf": [{"type": "string", "maxLength": 2}, {}]}}, "'k': maxLength cannot be"),
        ({"a>b": {"type": "integer"}}, "'a>b': the model's calls have no way to write this name"),
        ({"k": {"enum": [str(i) for i in range(2_000)]}}, "'k': enum cannot be enforced"),
        ({"a" * 300: {}}, "no way to write this name"),
    ],
)
def test_what_cannot_be_enforced_in_tags_is_refused(properties: dict[str, Any], words: str) -> None:
    schema = {"type": "object", "properties": properties}
    call = CallForm("f", schema, is_strict=True, field="tools[0].parameters")
    with pytest.raises(InvalidRequest, match=re.escape(words)) as caught:
        answer_grammars(find_format(None, calls="qwen-tags"), {}, "none", [call])
    assert caught.value.field == "tools[0].parameters"


@pytest.mark.parametrize("name", formats())
def test_a_property_that_is_no_schema_is_refused(world: World, name: str) -> None:
    call = CallForm("f", {"type": "object", "properties": {"x": None}})
    tokens = world.tokenizer.added_tokens
    parts = answer_grammars(find_format(None, calls=name), tokens, "none", [call])
    with pytest.raises(InvalidRequest, match="schema must be an object or boolean"):
        world.library.compile(StructuredOutput(parts=parts).to_grammar())


def test_a_form_or_a_call(world: World) -> None:
    format_ = find_format("<tool_call>")
    form = ("regex", "[0-9]{3}")
    parts = answer_grammars(format_, world.tokenizer.added_tokens, "none", CALLS, form=form)
    found = set()
    for seed in range(30):
        text = world.say(seed, parts)
        if not text:
            continue
        events = read(format_, "", text)
        num_calls = check_calls(events)
        if not num_calls:
            [content] = events
            assert isinstance(content, Content)
            assert len(content.text) == 3
            assert content.text.isdigit()
        found.add(num_calls > 0)
    assert found == {True, False}


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("mistral-call-id", r"\[CALL_ID\]([a-zA-Z0-9]{9})\["), ("cohere", r'_id": "([0-9]{1,4})"')],
)
def test_a_call_has_an_id_where_its_format_has_one(world: World, name: str, pattern: str) -> None:
    format_ = find_format(None, calls=name)
    parts = answer_grammars(format_, world.tokenizer.added_tokens, "none", CALLS, is_required=True)
    ids = set()
    for seed in range(12):
        text = world.say(seed, parts)
        found = re.findall(pattern, text)
        assert len(found) == check_calls(read(format_, "", text))
        ids.update(found)
    assert len(ids) > 1, "the model chooses it"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("olmo3", "<function_calls>f(x=1)\nget-g.h()</function_calls>"),
        ("olmo3", "<function_calls>\nf(x=1)\n</function_calls>"),
        (
            "cohere",
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}]'
            "<|END_ACTION|>",
        ),
        (
            "cohere",
            '<|START_ACTION|>[\n    {"tool_call_id": "10", "tool_name": "f", "parameters": '
            '{"x":1}},\n    {"tool_call_id": "11", "tool_name": "get-g.h", "parameters": {}}\n]'
            "<|END_ACTION|>",
        ),
        (
            "granite",
            '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}, '
            '{"name": "get-g.h", "arguments": {}}]',
        ),
        ("granite-v31", '<tool_call>[{"name": "f", "arguments": {"x": 1}}]'),
        (
            "functools",
            'functools[{"name": "f", "arguments": {"x": 1}}, {"name": "get-g.h", "arguments": {}}]',
        ),
        ("mistral-call-id", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"x": 1}'),
    ],
)
@pytest.mark.parametrize("is_required", [True, False])
def test_calls_may_be_written_as_models_write_them(
    world: World, name: str, said: str, is_required: bool
) -> None:
    format_ = find_format(None, calls=name)
    parts = answer_grammars(format_, world.tokenizer.added_tokens, "none", CALLS, is_required)
    constraint = world.library.compile(StructuredOutput(parts=parts).to_grammar()).fork()
    assert constraint.accept(world.tokenizer.encode(said)) == ""
    assert check_calls(read(format_, "", said)) > 0


def test_the_text_of_an_answer_may_be_delimited(world: World) -> None:
    format_ = find_format(None, calls="cohere", reasoning="cohere")
    tokens = world.tokenizer.added_tokens
    form = ("regex", "[0-9]{3}")
    for calls, text_form in (([], form), (CALLS, form), (CALLS, None)):
        parts = answer_grammars(format_, tokens, "possible", calls, form=text_form)
        said = "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>123<|END_RESPONSE|>"
        constraint = world.library.compile(StructuredOutput(parts=parts).to_grammar()).fork()
        assert constraint.accept(world.tokenizer.encode(said)) == ""
        assert read(format_, "", said) == [Reasoning("a"), Content("123")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral-call-id", "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}"),
        ("olmo3", "<function_calls>f()</function_calls>"),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]'),
        (
            "cohere",
            '<|START_THINKING|>a<|END_THINKING|><|START_ACTION|>[{"tool_name": "f", "parameters": '
            "{}}]<|END_ACTION|>",
        ),
        ("cohere", "<|START_RESPONSE|>a<|END_RESPONSE|>"),
    ],
)
def test_an_answer_is_read_alike_whether_special_tokens_are_skipped(
    tmp_path: Path, name: str, text: str
) -> None:
    """Those of the format's delimiters are kept in any case."""
    format_ = find_format(None, calls=name, reasoning="cohere")
    for tokens in (TOKENS, ["<pad>", *TOKENS]):  # every other one is special
        tokenizer = World(tmp_path, tokens).tokenizer
        kept = [
            token_id
            for token, token_id in tokenizer.added_tokens.items()
            if token in format_.delimiters
        ]
        detokenizer = tokenizer.detokenizer([], skip_special_tokens=True, kept=kept)
        shown = "".join(map(detokenizer.add, tokenizer.encode(f"{text}<eos>")))
        assert shown + detokenizer.finish() == text
