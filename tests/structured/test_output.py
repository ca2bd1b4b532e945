"""Structured output offline: what may be asked for, and that nothing but the form changes."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from threading import Event
from typing import Any

import numpy as np
import pytest

import model_zoo
from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.core.invariants import check_scheduler
from octavo.core.step import Grammar
from octavo.engine.validation import Params
from octavo.errors import InvalidRequest
from octavo.sampling_params import ThinkingLimit
from octavo.structured import guidance
from octavo.structured.constraint import MAX_NEW_TOKENS, num_words
from octavo.structured.output import MAX_CHOICES, MAX_GRAMMAR_BYTES, StructuredOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WORD = {"regex": "[a-f]{4,12}"}


def model() -> str:
    return str(model_zoo.model_directory("llama3"))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model(), device="cpu", num_blocks=300, block_size=8, max_num_seqs=32) as llm:
        yield llm


def say(llm: LLM, params: Params, prompt: Any = (5, 6, 7)) -> RequestOutput:
    stream = llm.client.make_request(list(prompt), params)
    llm.client.add_request(stream)
    while stream.output is None:
        llm.client.step()
    return stream.output


def rules(count: int, start: str = "") -> str:
    """A Lark grammar with so many alternatives at one place."""
    names = [f"r{i}" for i in range(count)]
    texts = [f'{name}: "{name}"' for name in names]
    return "\n".join([f"start: {start}any", f"any: {' | '.join(names)}", *texts])


def optional(count: int, prefix: str = "p") -> dict[str, Any]:
    """A schema of objects with so many optional properties."""
    properties = {f"{prefix}{i}": {"type": "integer"} for i in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[a-c]{3,5}-[0-9]{2}"}, "[a-c]{3,5}-[0-9]{2}"),
        ({"choice": ["yes", 'n"o', "möglich"]}, 'yes|n"o|möglich'),
        ({"grammar": 'start: "<" start ">" | /[a-z]{2}/'}, "(<*)[a-z]{2}(>*)"),
        ({"json_schema": {"enum": ["a", 1, None]}}, 'null|1|"a"'),
        ({"json_schema": '{"const": [true]}'}, r"\[\s*true\s*\]"),
        (StructuredOutput(choice=("x",)), "x"),
    ],
)  # fmt: skip
def test_the_output_has_its_form_and_ends_with_it(llm: LLM, structured: Any, pattern: str) -> None:
    for params in (
        SamplingParams(temperature=0, max_tokens=60, structured=structured),
        SamplingParams(n=3, seed=1, max_tokens=60, structured=structured, top_p=0.9),
        SamplingParams(seed=2, max_tokens=60, structured=structured, min_tokens=50),
        BeamSearchParams(3, max_tokens=60, structured=structured, length_penalty=0.0),
    ):
        output = say(llm, params)
        assert output.error is None
        assert output.outputs
        for sample in output.outputs:
            if sample.finish_reason == "stop":
                assert re.fullmatch(pattern, sample.text), sample.text
                assert sample.token_ids[-1] == model_zoo.EOS_ID
            else:
                assert len(sample.token_ids) == 60
    assert say(llm, SamplingParams(temperature=0, structured={"choice": ["ab"]})).outputs[0].text


def test_there_may_be_as_many_choices_as_are_allowed(llm: LLM) -> None:
    texts = [f"{i:04}" + "xy" * (i % 3) for i in range(MAX_CHOICES)]
    params = SamplingParams(structured={"choice": texts}, temperature=2, n=8, max_tokens=30)
    outputs = say(llm, params).outputs
    assert {sample.finish_reason for sample in outputs} == {"stop"}
    assert {sample.text for sample in outputs} <= set(texts)


@pytest.mark.parametrize(
    "structured",
    [
        {"regex": "[a-c]{3,5}-[0-9]{2}"},
        {"choice": ["abcdef", "abcxyz"]},
        {"grammar": 'start: "<<" start ">" | /[a-z]{4}/'},
        {"json_schema": {"type": "array", "items": {"const": "ab"}, "maxItems": 3}},
        {"parts": [{"name": "it", "kind": "regex", "source": "[a-f]{6}"}]},
    ],
)
def test_an_output_that_the_prompt_has_begun_goes_on_in_its_form(llm: LLM, structured: Any) -> None:
    greedy = {"temperature": 0, "max_tokens": 60}
    whole = say(llm, SamplingParams(structured=structured, **greedy)).outputs[0]
    assert whole.finish_reason == "stop"
    grammar = StructuredOutput(**structured).to_grammar()
    for begun in range(1, len(whole.token_ids)):
        rest = StructuredOutput.going_on(grammar, begun, "parent")
        assert rest.to_grammar() == grammar
        prompt = [5, 6, 7, *whole.token_ids[:begun]]
        for form in (rest, {**structured, "begun": begun}):
            output = say(llm, SamplingParams(structured=form, **greedy), prompt).outputs[0]
            assert output.token_ids == whole.token_ids[begun:]


def test_what_the_form_does_not_allow_cannot_have_begun(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"structured\.begun: the grammar cannot go on"):
        say(llm, SamplingParams(structured={"choice": ["abc"], "begun": 2}))


@pytest.mark.parametrize(
    ("bounds", "least", "most"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.25}, 0, 0.25),
        ({"minimum": 0, "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, 0, 0.5),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, 1, 1.5),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, -0.5, 0),
        ({"exclusiveMinimum": -1.5, "exclusiveMaximum": -1, "maximum": 3}, -1.5, -1),
    ],
)
def test_excluded_bounds_are_excluded(bounds: Any, least: float, most: float) -> None:
    library = guidance.Guidance(
        model_zoo.model_directory("llama3"), model_zoo.VOCAB_SIZE, [model_zoo.EOS_ID]
    )
    schema = json.dumps({"type": "array", "items": {"type": "number", **bounds}})
    matcher = library.compile(Grammar("json_schema", schema)).matcher
    tokenizer = library._tokenizer
    middle = (least + most) / 2
    for number in (least, most, middle):
        is_excluded = number in (bounds.get("exclusiveMinimum"), bounds.get("exclusiveMaximum"))
        for text in (f"{number:g}", f"{number:.1f}", f"-{number:g}"):
            tokens = tokenizer.tokenize_str(f"[{text}]")
            is_allowed = matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)
            assert not (is_allowed and (is_excluded or not least <= float(text) <= most)), text
            assert is_allowed or text != f"{middle:g}"


@pytest.mark.parametrize(
    ("bounds", "allowed", "forbidden"),
    [
        ({"minimum": 2**53 + 1, "maximum": 2**53 + 4}, [2**53 + 2, 2**53 + 4], [2**53]),
        ({"minimum": 2**53, "maximum": 2**53 + 1}, [2**53], [2**53 + 1, 2**53 + 2]),
        ({"exclusiveMinimum": 2**53, "maximum": 2**53 + 2}, [2**53 + 2], [2**53, 2**53 + 1]),
        ({"minimum": -(2**53), "exclusiveMaximum": -(2**53) + 4}, [-(2**53)], [-(2**53) + 4]),
        ({"minimum": 1, "maximum": 2**63 - 1}, [2**62, 5, 2**63 - 2048], [0, 2**63]),
        ({"minimum": 1, "exclusiveMaximum": 2**64}, [2**62, 5, 2**63 - 1], [0]),
    ],
)
def test_large_bounds_are_kept_to(
    bounds: dict[str, int], allowed: list[int], forbidden: list[int]
) -> None:
    library = guidance.Guidance(
        model_zoo.model_directory("llama3"), model_zoo.VOCAB_SIZE, [model_zoo.EOS_ID]
    )
    for kind in ("json_schema", "lenient_schema"):
        schema = json.dumps({"type": "array", "items": {"type": "integer", **bounds}})
        matcher = library.compile(Grammar(kind, schema)).matcher
        tokenizer = library._tokenizer
        for number in allowed + forbidden:
            tokens = tokenizer.tokenize_str(f"[{number}]")
            num_accepted = matcher.deep_copy().try_consume_tokens(tokens)
            assert (num_accepted == len(tokens)) == (number in allowed), number


def test_calls_leave_numbers_aside_that_would_be_others() -> None:
    library = guidance.Guidance(
        model_zoo.model_directory("llama3"), model_zoo.VOCAB_SIZE, [model_zoo.EOS_ID]
    )
    numbers = {"enum": [2**53 + 1]}, {"type": "integer", "minimum": 2**63}
    for schema in numbers:
        matcher = library.compile(Grammar("lenient_schema", json.dumps(schema))).matcher
        tokens = library._tokenizer.tokenize_str("17")
        assert matcher.try_consume_tokens(tokens) == len(tokens)


def test_calls_leave_patterns_aside_that_the_library_does_not_know() -> None:
    library = guidance.Guidance(
        model_zoo.model_directory("llama3"), model_zoo.VOCAB_SIZE, [model_zoo.EOS_ID]
    )
    properties = {
        "a": {"type": "string", "pattern": "[0-9]"},
        "b": {"type": "array", "items": {"type": "string", "pattern": "^(?!x)[0-9]"}},
        "pattern": {"type": "string", "pattern": r"\bword\b"},
    }
    whole = {"type": "object", "properties": properties, "additionalProperties": False}
    source = json.dumps(whole)
    with pytest.raises(InvalidRequest, match="look"):
        library.compile(Grammar("json_schema", source))
    matcher = library.compile(Grammar("lenient_schema", source)).matcher
    for text, is_allowed in (
        ('{"a": "1", "b": ["x"], "pattern": "x"}', True),
        ('{"a": "x"}', False),
        ('{"c": 1}', False),
    ):
        tokens = library._tokenizer.tokenize_str(text)
        num_accepted = matcher.deep_copy().try_consume_tokens(tokens)
        assert (num_accepted == len(tokens)) == is_allowed, text


@pytest.mark.parametrize("begun", [-1, True, 1.5, "2", 4])
def test_what_is_not_in_the_prompt_cannot_have_begun(llm: LLM, begun: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"structured\.begun"):
        say(llm, SamplingParams(structured={"regex": "a+", "begun": begun}))


def test_draws_stop_at_strings_and_tokens_and_are_scored(llm: LLM) -> None:
    params = SamplingParams(
        seed=5, max_tokens=90, structured={"json_schema": PERSON}, stop='"name"', logprobs=2
    )
    [sample] = say(llm, params).outputs
    assert sample.stop_reason == '"name"'
    assert sample.logprobs is not None
    # The model's own: what the form rules out is scored, too.
    first = sample.logprobs[0]
    assert llm.tokenizer is not None
    assert all(not llm.tokenizer.token_bytes(t).startswith(b"{") for t, _ in first.top)
    [end] = llm.tokenizer.encode("}", add_special_tokens=False)
    ends = SamplingParams(
        seed=5, max_tokens=99, ignore_eos=True, stop_token_ids=[9], structured={"regex": "[ab]{3}"}
    )
    [sample] = say(llm, ends).outputs
    assert (sample.finish_reason, sample.stop_reason) == ("stop", 9)
    assert end != 9


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_neither_preemption_nor_prefixes_nor_company_change_a_token(mode: str) -> None:
    """Also rows of several samples and beams; each alone in a large pool, then all in a small."""
    asks: list[tuple[list[int], Params]] = []
    system = model_zoo.random_token_ids(17, seed=9)
    for i in range(4):
        prompt = [*system, *model_zoo.random_token_ids(3 + 5 * i, seed=i)]
        schema = {"json_schema": PERSON}
        asks += [
            (prompt, SamplingParams(seed=i, n=2, max_tokens=40, structured=schema)),
            (prompt, SamplingParams(temperature=0, max_tokens=30, structured=WORD)),
            (prompt, BeamSearchParams(3, max_tokens=12, structured=WORD)),
            (prompt, SamplingParams(seed=i, max_tokens=20)),
        ]
    options = {"device": "cpu", "block_size": 8, "max_num_seqs": 32, "watermark": 0.0}
    with LLM(model(), num_blocks=300, **options) as alone:
        wanted = [[each.token_ids for each in say(alone, p, ids).outputs] for ids, p in asks]
    with LLM(
        model(),
        num_blocks=26,
        swap_space=8 << 20,
        preemption_mode=mode,
        max_model_len=128,
        **options,
    ) as llm:
        streams = [llm.client.make_request(ids, params) for ids, params in asks]
        for stream in streams:
            llm.client.add_request(stream)
        while llm.client.has_unfinished:
            llm.client.step()
            check_scheduler(llm.engine.scheduler)
        outputs = [stream.output for stream in streams]
        assert [None if o is None else o.error for o in outputs] == [None] * len(asks)
        got = [[each.token_ids for each in o.outputs] for o in outputs if o is not None]
        assert got == wanted
        assert llm.engine.scheduler.num_preemptions[mode] > 0
        assert any(o is not None and o.num_cached_tokens for o in outputs)


def test_reasoning_is_ended_at_its_limit_and_a_form_may_follow_it(llm: LLM) -> None:
    """By the text of its end, which has several tokens here; samples share the limit, not its
    place."""
    assert llm.tokenizer is not None
    end = llm.tokenizer.encode("</think>", add_special_tokens=False)
    assert len(end) > 2
    for is_open, begin in ((True, "<think>"), (False, "a")):
        limit = {"num_tokens": 5, "is_open": is_open, "begin": begin}
        params = SamplingParams(n=3, seed=1, max_tokens=30, thinking=limit, ignore_eos=True)
        for sample in say(llm, params).outputs:
            ids = sample.token_ids
            if is_open:
                assert ids[5 : 5 + len(end)] == end or "</think>" in sample.text[:40]
    lark = 'start: end /[0-9]{2}/\nend[lazy]: /(.|\\n)*/ "</think>"'
    parts = [{"name": "answer", "kind": "lark", "source": lark}]
    params = SamplingParams(
        seed=1,
        max_tokens=60,
        thinking=ThinkingLimit(4, is_open=True),
        structured={"parts": parts},
    )
    [sample] = say(llm, params).outputs
    assert sample.token_ids[4 : 4 + len(end)] == end
    assert re.fullmatch("</think>[0-9]{2}", sample.text[sample.text.index("</think>") :])


@pytest.mark.parametrize(
    ("thinking", "words"),
    [
        (5, "not a ThinkingLimit"),
        ({"tokens": 5}, "not a ThinkingLimit"),
        ({"num_tokens": -1}, "num_tokens: -1"),
        ({"num_tokens": 1, "end": ""}, "end: it is not a text"),
        ({"num_tokens": 1, "end": "\ud800"}, r"thinking\.end: .* is not valid Unicode"),
        ({"num_tokens": 1, "is_open": 1}, "is_open"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(thinking: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(thinking=thinking)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "not a list of grammars"),
        ([5], "has not name, kind and source"),
        ([{"name": "a", "kind": "yaml", "source": "b"}], "'yaml' is not one of lark"),
        ([{"name": "a", "kind": "lark", "source": ""}], "is not a text"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(structured={"parts": parts})


@pytest.mark.slow
def test_two_ranks_say_what_one_says(llm: LLM) -> None:
    asks = [
        SamplingParams(seed=1, n=2, max_tokens=40, structured={"json_schema": PERSON}),
        SamplingParams(temperature=0, max_tokens=20, structured=WORD, presence_penalty=1.0),
        BeamSearchParams(3, max_tokens=12, structured=WORD),
    ]
    wanted = [[each.token_ids for each in say(llm, params).outputs] for params in asks]
    with LLM(
        model(), device="cpu", num_blocks=300, block_size=8, tensor_parallel_size=2, overlap=True
    ) as shared:
        assert [[e.token_ids for e in say(shared, params).outputs] for params in asks] == wanted


def test_a_row_without_a_token_fails_beside_others(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=9, structured=WORD, allowed_token_ids=[5, 6]),
        SamplingParams(temperature=0, max_tokens=9, structured=WORD),
    ]
    streams = [llm.client.make_request([5, 6, 7], each) for each in params]
    for stream in streams:
        llm.client.add_request(stream)
    while llm.client.has_unfinished:
        llm.client.step()
    failed, fine = (stream.output for stream in streams)
    assert failed is not None
    assert fine is not None
    assert failed.error == (
        "after 0 tokens, the grammar and allowed_token_ids and the vocabulary together leave no "
        "token to draw"
    )
    assert fine.error is None
    assert fine.outputs[0].token_ids == say(llm, params[1]).outputs[0].token_ids


ENDLESS = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}
DEEP: Any = {}
for _ in range(150):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("structured", "field", "words"),
    [
        (5, "structured", "is not a StructuredOutput"),
        ({}, "structured", "nothing is given"),
        ({"json": {}}, "structured", "there is no 'json'"),
        ({"regex": "a", "choice": ["b"]}, "structured", "regex and choice is given"),
        ({"json_object": 1}, "structured.json_object", "1 is not true or false"),
        ({"json_schema": 5}, "structured.json_schema", "neither an object nor a boolean"),
        ({"json_schema": "{"}, "structured.json_schema", "it is not JSON"),
        ({"json_schema": "[" * 100_000}, "structured.json_schema", "it is not JSON"),
        ({"json_schema": {"const": float("nan")}}, "structured.json_schema", "it is not JSON"),
        ({"json_schema": {"const": {1, 2}}}, "structured.json_schema", "it is not JSON"),
        ({"json_schema": "{}" + " " * 300_000}, "structured.json_schema", "300002 characters"),
        ({"json_schema": {"description": "x" * (4 << 20)}}, "structured.json_schema", "more than"),
        ({"json_schema": False}, "structured.json_schema", "false allows no value"),
        ({"json_schema": {"enum": []}}, "structured.json_schema", "Unsatisfiable"),
        ({"json_schema": {"type": "no"}}, "structured.json_schema", "no"),
        (
            {"json_schema": {"properties": {"a": {"items": {"uniqueItems": True}}}}},
            "structured.json_schema",
            '#/properties/a/items: Unimplemented keys: ["uniqueItems"]',
        ),
        (
            {"json_schema": {"items": {"minProperties": 2}}},
            "structured.json_schema",
            "#/items: minProperties: the same name could be written more than once",
        ),
        ({"json_schema": {"$ref": "#"}}, "structured.json_schema", "recurses without end"),
        *(
            (
                {"json_schema": {"allOf": [{}], "$ref": f"#/allOf/{index}"}},
                "structured.json_schema",
                words,
            )
            for index, words in (("²", "Invalid URI"), ("9" * 5000, "Failed to parse array index"))
        ),
        ({"json_schema": {"type": ["object", {}]}}, "structured.json_schema", "type must be"),
        (
            {"json_schema": ENDLESS},
            "structured.json_schema",
            "recurses without end",
        ),
        ({"json_schema": DEEP}, "structured.json_schema", "nested more than 100"),
        (
            {"json_schema": {"items": {"enum": ["a", [2**53, 1e22, {"b": 2**53 + 1}]]}}},
            "structured.json_schema",
            "#/items: enum: 9007199254740993 has more digits than are kept",
        ),
        ({"json_schema": {"const": -(10**400)}}, "structured.json_schema", "#: const: -1000"),
        (
            {"json_schema": {"type": ["null", "integer"], "minimum": 2**63}},
            "structured.json_schema",
            "#: minimum: no integer of 64 bits is beyond 9223372036854775808",
        ),
        (
            {"json_schema": {"type": "integer", "exclusiveMaximum": -1e22}},
            "structured.json_schema",
            "#: exclusiveMaximum: no integer of 64 bits",
        ),
        ({"regex": "(("}, "structured.regex", "unclosed group"),
        ({"regex": "(?=a)b"}, "structured.regex", "look-around"),
        ({"regex": 7}, "structured.regex", "7 is not a text"),
        ({"regex": "\ud800"}, "structured.regex", "not valid Unicode"),
        ({"choice": "abc"}, "structured.choice", "is not a list"),
        ({"choice": [""]}, "structured.choice", "'' is not a text"),
        ({"choice": ["a"] * 5000}, "structured.choice", "5000 texts"),
        ({"grammar": "start: x"}, "structured.grammar", 'unknown name: "x"'),
        ({"grammar": rules(5000)}, "structured.grammar", "Current row has 5001 items"),
        ({"grammar": rules(5000, '"b" ')}, "structured.grammar", "Current row has 5001 items"),
        ({"json_schema": optional(1025)}, "structured.json_schema", "#: 1025 optional properties"),
        (
            {"json_schema": {"anyOf": [optional(700), optional(700, "q")]}},
            "structured.json_schema",
            "Current row has",
        ),
        ({"grammar": None}, "structured", "nothing is given"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(
    llm: LLM, structured: Any, field: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.client.make_request([5], SamplingParams(structured=structured))
    assert caught.value.field == field
    assert words in caught.value.reason
    assert len(caught.value.reason) < 700


def test_objects_may_have_many_optional_properties() -> None:
    library = guidance.Guidance(model_zoo.model_directory("llama3"), 320, [1])
    inner = {"type": "object", "properties": {"a": optional(1000)}, "required": ["a"]}
    for text, schema in (('{"p7": 1, "p999": 2}', optional(1000)), ('{"a":{"p1":3}}', inner)):
        grammar = Grammar("json_schema", json.dumps(schema))
        library.check(grammar)
        constraint = library.compile(grammar).fork()
        assert constraint.accept(library._tokenizer.tokenize_str(text)) == ""
        assert constraint.matcher.is_accepting()


def test_a_grammar_goes_on_however_many_outputs_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a matcher share a lexer, whose states are never given back: other outputs must not
    end an output, nor what begins after them."""
    monkeypatch.setattr(guidance, "SHARED_STATES", 400)
    monkeypatch.setattr(guidance, "MAX_STATES", 800)
    library = guidance.Guidance(model_zoo.model_directory("llama3"), 320, [1])
    grammar = Grammar("regex", "[ab]*a[ab]{24}")  # each output needs states of its own
    library.check(grammar)
    letters = library._tokenizer.tokenize_str("ab")
    rng, words = np.random.default_rng(0), np.empty((1, num_words(320)), np.int32)
    for _ in range(30):
        new_ids: list[list[int]] = [[], []]
        constraints = [library.compile(grammar).fork() for _ in new_ids]
        for _ in range(40):
            for constraint, new in zip(constraints, new_ids, strict=True):
                filled = library.fill([constraint], [new], [0], words).result()
                assert not filled.errors
                bits = np.unpackbits(words.view(np.uint8), bitorder="little")
                assert np.flatnonzero(bits).tolist() == sorted(letters)
                assert filled.is_accepting[0] == (constraint.token_ids[-25:-24] == letters[:1])
            new_ids = rng.choice(letters, (2, 1)).tolist()
    for _ in range(8):
        library.check(grammar, rng.choice(letters, 200).tolist())


def test_a_long_output_is_accepted_again_and_one_that_cannot_be_ends_no_other() -> None:
    """As after a preemption. The library limits a lexer's work from one mask to the next, and
    copies of a matcher share the lexer."""
    library = guidance.Guidance(model_zoo.model_directory("llama3"), 320, [1])
    grammar = Grammar("regex", "([ab]*a[ab]{1,200}){2}c")
    library.check(grammar)
    letters = library._tokenizer.tokenize_str("ab")
    begun, others = np.random.default_rng(0).choice(letters, (2, 1000)).tolist()
    library.check(grammar, begun)
    constraint, words = library.compile(grammar).fork(), np.empty((1, num_words(320)), np.int32)
    assert not library.fill([constraint], [begun], [0], words).result().errors
    other = constraint.fork()
    assert not constraint.fork().matcher.consume_tokens(others), "without a mask between them"
    shared = other.matcher
    for _ in range(3):
        assert not library.fill([other], [letters[:1]], [0], words).result().errors
    assert other.matcher is not shared
    library.check(grammar, begun)


def test_many_tokens_are_accepted_in_a_thread_for_slow_masks() -> None:
    library = guidance.Guidance(model_zoo.model_directory("llama3"), 320, [1])
    constraint = library.compile(Grammar("regex", "(ab){100}c?")).fork()
    goes_on, words = Event(), np.empty((1, num_words(320)), np.int32)
    library._apart[0].submit(goes_on.wait)
    new_ids = library._tokenizer.tokenize_str("ab" * 100)
    assert len(new_ids) > MAX_NEW_TOKENS
    filling = library.fill([constraint], [new_ids], [0], words)
    assert not constraint.matcher.is_accepting()
    goes_on.set()
    assert not filling.result().errors
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    assert allowed == library._tokenizer.tokenize_str("c")


def test_schemas_that_recurse_to_an_end_are_accepted(llm: LLM) -> None:
    tree = {
        "type": "object",
        "properties": {
            "sub": {"type": "array", "items": {"$ref": "#"}},
            "up": {"$ref": "#/$defs/n"},
        },
        "required": ["sub", "up"],
        "$defs": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    }
    llm.client.make_request([5], SamplingParams(structured={"json_schema": tree}))


def test_a_form_needs_a_token_that_ends_it(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"structured.regex: no token ends the output"):
        llm.client.make_request([5], SamplingParams(structured=WORD, ignore_eos=True))


def test_without_the_library_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    library = guidance.constraint_library(model_zoo.model_directory("llama3"), 320, [1])
    with pytest.raises(InvalidRequest, match="pip install llguidance"):
        library.compile(Grammar("regex", "a"))


def test_compiled_grammars_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "MAX_COMPILED", 2)
    monkeypatch.setattr(guidance, "MATCHERS_PER_THREAD", 1)
    library = guidance.Guidance(model_zoo.model_directory("llama3"), 320, [1])
    a, b, c = (Grammar("regex", text) for text in "abc")
    first = library.compile(a)
    assert library.compile(Grammar("regex", "a", "another field")) is first
    library.compile(b)
    assert library.compile(a) is first
    library.compile(c)
    assert library.compile(a) is first
    for text in ("a(", "b(", "c("):  # what is refused drives nothing out
        with pytest.raises(InvalidRequest):
            library.compile(Grammar("regex", text))
    assert library.compile(a) is first
    library.compile(b)
    library.compile(c)
    assert library.compile(a) is not first
    assert MAX_GRAMMAR_BYTES == 262_144


def test_masks_of_one_grammar_are_computed_under_several_locks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However busy the machine is, no grammar takes long to compile, and no mask is slow.
    monkeypatch.setattr(guidance, "MAX_REPEATED_SECONDS", 1e9)
    monkeypatch.setattr(guidance.Pace, "note_slow", lambda pace: None)
    library = guidance.Guidance(model_zoo.model_directory("llama3"), 320, [1], num_threads=3)
    quick = Grammar("regex", "[a-z]{3}")
    states = [library.compile(quick).fork() for _ in range(30)]
    assert sorted(Counter(each.pace.number for each in states).values()) == [2] * 6 + [3] * 6
    first = np.empty((1, num_words(320)), np.int32)
    library.fill(states[:1], [()], [0], first).result()
    token_id = int(np.flatnonzero(np.unpackbits(first.view(np.uint8), bitorder="little"))[0])
    tokens = [token_id, token_id]
    for number, state in enumerate(states):  # masks are those of the states, in their order
        assert not state.accept(tokens[: number % 3])
    words = np.empty((30, num_words(320)), np.int32)
    new = [(token_id,) if number % 2 and number % 3 < 2 else () for number in range(30)]
    filled = library.fill(states, new, range(30), words).result()
    assert not filled.errors
    alone = np.empty((1, num_words(320)), np.int32)
    for number in range(30):
        library.fill([states[number]], [()], [0], alone).result()
        assert (words[number] == alone[0]).all()
    # What takes long to compile is compiled once.
    monkeypatch.setattr(guidance, "MAX_REPEATED_SECONDS", 0.0)
    slow = Grammar("regex", "[a-z]{4}")
    assert len({library.compile(slow).pace.number for _ in range(9)}) == 1


def test_a_mask_that_others_wait_for_is_computed_apart_until_it_is_quick_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that computes masks is held up at the third of five until that was noticed."""
    llguidance = pytest.importorskip("llguidance")
    executor, note_slow = llguidance.LLExecutor, guidance.Pace.note_slow
    is_held_up, is_noticed = Event(), Event()

    class Executor:
        def __init__(self, num_threads: int) -> None:
            self._own = executor(num_threads)

        def unsafe_compute_mask_ptr(self, pairs: list[Any], *where: int) -> None:
            self._own.unsafe_compute_mask_ptr(pairs[:2], *where)
            if len(pairs) > 2:
                is_held_up.set()
                is_noticed.wait()
                self._own.unsafe_compute_mask_ptr(pairs[2:], *where)

    def notice(pace: guidance.Pace) -> None:
        if not is_noticed.is_set():  # later ones are of a busy machine
            note_slow(pace)
            is_noticed.set()

    monkeypatch.setattr(llguidance, "LLExecutor", Executor)
    monkeypatch.setattr(guidance.Pace, "note_slow", notice)
    monkeypatch.setattr(guidance, "thread_time", lambda: 0.0)
    library = guidance.Guidance(model_zoo.model_directory("llama3"), 320, [1])
    states = [library.compile(Grammar("regex", f"[a-{c}]{{3}}")).fork() for c in "bcdef"]
    words = np.empty((5, num_words(320)), np.int32)
    filling = library.fill(states, [()] * 5, range(5), words)
    is_held_up.wait()
    filling.result()
    assert [state.pace.is_slow for state in states] == [False, False, True, False, False]
    third, copy = states[2], states[2].fork()
    assert copy.company == "none"
    for number in range(guidance.NUM_QUICK):
        assert third.company == "none"
        alone = np.empty((1, num_words(320)), np.int32)
        filling = library.fill([copy if number % 2 else third], [()], [0], alone)
        assert not filling.result().errors
        assert (alone[0] == words[2]).all()
    assert third.company == "new"
    note_slow(third.pace)
    for _ in range(2 * guidance.NUM_QUICK):  # twice as long, the second time
        assert copy.company == "none"
        library.fill([third], [()], [0], words).result()
    assert not copy.pace.is_slow
    for _ in range(guidance.NUM_TRIED - 1):
        assert copy.company == "new"
        library.fill([third], [()], [0], words).result()
    assert copy.company == "quick"
    library.shutdown()
