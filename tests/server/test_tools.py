"""Tools over HTTP: calls demanded by a grammar, whole and streamed, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import tokenizers

from octavo.engine.tokenizer import Tokenizer
from octavo.server.http.answers import format_of
from server.live_server import LiveServer

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
    "tools": [WEATHER, CLOCK],
    "max_tokens": 200,
    "seed": 4,
}
NAMED = {"type": "function", "function": {"name": "weather"}}
PATH = "/v1/chat/completions"


def test_the_template_for_tools_may_show_how_calls_are_written() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    plain, for_tools = "{{ messages }}", "<tool_call>{{ messages }}"
    for template, tool_template, calls in (
        (plain, for_tools, "hermes"),
        (for_tools, None, "hermes"),
        (plain, None, "none"),
        (None, None, "none"),
    ):
        tokenizer = Tokenizer(backend, {}, template, tool_template=tool_template)
        assert format_of(tokenizer).name == calls


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def check_call(call: dict[str, Any]) -> None:
    function = call["function"]
    assert (call["type"], call["id"][:5]) == ("function", "call_")
    assert function["name"] in ("weather", "clock")
    arguments = json.loads(function["arguments"])
    if function["name"] == "weather":
        jsonschema.validate(arguments, PARAMETERS)
    else:
        assert arguments == {}, "it has no parameters"


def chunks_of(server: LiveServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    events = server.post(PATH, body | {"stream": True}).raise_for_status().text
    *data, done = events.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(each.removeprefix("data: ")) for each in data]


def added_up(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str | None]:
    """The message of the first choice and its finish reason, as a client puts them together."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = None
    for chunk in chunks:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        assert reason is None, "the end comes last"
        reason = choice["finish_reason"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert set(call) == {"index", "id", "type", "function"}
                assert call["function"]["arguments"] == ""
                message["tool_calls"].append({k: v for k, v in call.items() if k != "index"})
            else:
                assert (set(call), set(call["function"])) == ({"index", "function"}, {"arguments"})
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: each for name, each in call.items() if name != "id"} for call in calls]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"weather", "clock"}),
        ({"tool_choice": NAMED, "parallel_tool_calls": False}, {"weather"}),
        ({"tool_choice": NAMED, "temperature": 0}, {"weather"}),
    ],
)
def test_a_demanded_call_keeps_to_its_schema_whole_and_streamed(
    server: LiveServer, fields: dict[str, Any], names: set[str]
) -> None:
    body = ASK | fields
    [choice] = server.post(PATH, body).raise_for_status().json()["choices"]
    message = choice["message"]
    calls = message["tool_calls"]
    if choice["finish_reason"] == "length":
        calls.pop()  # cut off
    else:
        assert choice["finish_reason"] == "tool_calls"
    assert message["content"] is None
    assert {call["function"]["name"] for call in calls} <= names
    for call in calls:
        check_call(call)
    if fields.get("parallel_tool_calls") is False:
        assert len(calls) == 1
        streamed, reason = added_up(chunks_of(server, body))
        assert reason == "tool_calls"
        assert without_ids(streamed["tool_calls"]) == without_ids(calls)
        assert len({call["id"] for call in streamed["tool_calls"] + calls}) == 2


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_only_the_allowed_tools_are_called(server: LiveServer, mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "clock"}}]}
    body = ASK | {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    choice = server.post(PATH, body).raise_for_status().json()["choices"][0]
    called = [call["function"]["name"] for call in choice["message"].get("tool_calls", [])]
    assert "weather" not in called
    assert called or mode == "auto"


def test_without_a_call_the_answer_is_text(server: LiveServer) -> None:
    plain = {"messages": ASK["messages"], "max_tokens": 30, "temperature": 0}
    for fields in ({"tool_choice": "none"}, {"tools": []}):
        reply = server.post(PATH, ASK | plain | fields).raise_for_status().json()
        expected = server.post(PATH, plain).raise_for_status().json()
        assert reply["choices"] == expected["choices"], "none: the tools are not shown"
        assert "tool_calls" not in reply["choices"][0]["message"]
    other = [{"role": "user", "content": "Translate to German: The dog sleeps."}]
    body = ASK | {"messages": other, "temperature": 0}
    [choice] = server.post(PATH, body).raise_for_status().json()["choices"]
    assert choice["message"]["content"] == "Der Hund schläft."
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_the_model_calls_a_tool_by_itself_and_tells_its_result(server: LiveServer) -> None:
    """Whole and streamed, `tool_choice` being "auto" where it is not given."""
    question = {"role": "user", "content": "What is the weather like in Paris?"}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    body = {
        "messages": [question],
        "tools": [tool("get_weather", parameters), CLOCK],
        "temperature": 0,
    }
    [choice] = server.post(PATH, body).raise_for_status().json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    streamed, reason = added_up(chunks_of(server, body))
    assert [each["function"] for each in streamed["tool_calls"]] == [call["function"]]
    assert reason == "tool_calls"
    said = {"role": "tool", "tool_call_id": call["id"], "content": '{"weather": "rainy"}'}
    more = body | {"messages": [question, choice["message"], said]}
    [choice] = server.post(PATH, more).raise_for_status().json()["choices"]
    assert choice["message"]["content"] == "It is rainy in Paris."
    assert choice["finish_reason"] == "stop"


def test_what_a_tool_says_can_be_sent_back(server: LiveServer) -> None:
    body = ASK | {"tool_choice": NAMED, "parallel_tool_calls": False}
    [choice] = server.post(PATH, body).raise_for_status().json()["choices"]
    call = choice["message"]["tool_calls"][0]
    said = {"role": "tool", "tool_call_id": call["id"], "content": '{"degrees": 20}'}
    more = ASK | {"messages": [*ASK["messages"], choice["message"], said], "max_tokens": 8}
    assert server.post(PATH, more).raise_for_status().json()["choices"][0]["message"]


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [WEATHER, CLOCK, WEATHER]}, "tools[0].function.name", "2 tools are called"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "match pattern"),
        ({"tools": [tool("a" * 200)]}, "tools[0].function.name", "at most 128 characters"),
        ({"tools": [WEATHER, {"type": "x"}]}, "tools[1].type", "'function'"),
        ({"tools": [tool(f"f{i}") for i in range(10_000)]}, "tools", "at most 512 items"),
        ({"tool_choice": "some"}, "tool_choice", "'none', 'auto' or 'required'"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sun"}}},
            "tool_choice.function.name",
            "no tool 'sun'",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "auto",
                        "tools": [NAMED, {"type": "function", "function": {"name": "sun"}}],
                    },
                }
            },
            "tool_choice.allowed_tools.tools[1].function.name",
            "no tool 'sun'",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "it needs tools"),
        *[
            ({"tools": [WEATHER, tool("f", schema)]}, f"tools[1].function.parameters{path}", words)
            for schema, path, words in (
                ({"type": "array"}, ".type", "an object"),
                ({"properties": 5}, ".properties", "not an object"),
                ({"required": "a"}, ".required", "not a list"),
                ({"properties": {"a": {"type": 5}}}, "", "type must be"),
                ({"properties": {"a": {"type": "sting"}}}, "", "sting"),
                ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "", "b"),
                (DEEP, "", "nested more than 100 levels"),
                ({"required": ["a"], "properties": {"a": {"$ref": "#"}}}, "", "without end"),
                ({"description": "a" * 3_900_000}, "", "bytes are more than"),
            )
        ],
        *(
            (
                {
                    "tools": [
                        {
                            "type": "function",
                            "function": {
                                "name": "f",
                                "strict": True,
                                "parameters": {"properties": {"a": schema}},
                            },
                        }
                    ]
                },
                "tools[0].function.parameters",
                words,
            )
            for schema, words in (
                ({"uniqueItems": True}, "uniqueItems"),
                ({"pattern": "(?=a)"}, "look-around"),
            )
        ),
        ({"beam_width": 2, "seed": None}, "tools", "beam search"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "does not know it"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "mark its reasoning"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    server: LiveServer, fields: dict[str, Any], param: str, words: str
) -> None:
    reply = server.post(PATH, ASK | fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


def test_a_schema_that_is_not_strict_may_have_what_cannot_be_enforced(server: LiveServer) -> None:
    items = {"type": "string", "pattern": r"^(?!x)\bword\b"}  # the library knows no look-around
    array = {"type": "array", "items": items, "uniqueItems": True, "maxItems": 2}
    parameters = {"properties": {"a": array}}
    body = ASK | {"tools": [tool("f", parameters)], "tool_choice": "required", "max_tokens": 300}
    reply = server.post(PATH, body).raise_for_status().json()
    assert reply["choices"][0]["message"]["tool_calls"]
