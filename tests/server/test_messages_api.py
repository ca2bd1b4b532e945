"""/v1/messages: the events of Anthropic's API, tools, and what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from octavo.engine.tokenizer import Tokenizer
from octavo.server.http.app import create_app
from octavo.server.http.batch import post
from octavo.server.http.endpoints import messages as messages_endpoints
from octavo.server.http.endpoints import responses as responses_endpoints
from octavo.server.http.endpoints.blocks import chat_body
from octavo.server.http.keys import ApiKeys
from octavo.server.http.settings import ServerSettings
from octavo.server.offload import LARGE_BODY
from server.live_server import LiveServer
from server.scripted import ScriptedClient, scripted_app

HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"name": "add", "input_schema": {"type": "object", "properties": {"a": {}}}},
    {"name": "now", "description": "The time", "input_schema": {"type": "object"}},
]

FORMAT = {"type": "json_schema", "schema": {"enum": ["cat", "dog"]}}


def asked(
    *bodies: dict[str, Any], path: str = "/v1/messages", **script: Any
) -> tuple[list[tuple[int, bytes]], ScriptedClient]:
    """Replies to bodies, by an application that says what it is told to."""
    app, scripted = scripted_app()
    for name, value in script.items():
        setattr(scripted, name, value)

    async def ask() -> list[tuple[int, bytes]]:
        replies = []
        for body in bodies:
            whole = {"messages": HI} | body
            if path == "/v1/messages":
                whole = {"max_tokens": 50} | whole
            if "input" in body:
                del whole["messages"]
            status, _, data = await post(app, path, json.dumps(whole).encode())
            replies.append((status, data))
        await scripted.close()
        return replies

    return asyncio.run(ask()), scripted


def events_of(data: bytes) -> list[dict[str, Any]]:
    events = []
    for text in data.decode().strip().split("\n\n"):
        name, _, payload = text.partition("\n")
        event = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a client puts together."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                delta = dict(event["delta"])
                kind = delta.pop("type")
                name = {"input_json_delta": "json", "text_delta": "text"}.get(kind, "thinking")
                blocks[-1][name] += next(iter(delta.values()))
            case "content_block_stop":
                written = blocks[-1].pop("json")
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(written or "{}")
    return blocks


def test_streams_have_the_events_of_anthropic_s_api() -> None:
    [(status, data)], _ = asked({"tools": TOOLS})
    whole = json.loads(data)
    assert status == 200
    assert [each["type"] for each in whole["content"]] == [
        *("thinking", "text", "tool_use", "tool_use")
    ]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    assert whole["content"][2]["input"] == {"a": 1, "b": "x<y"}
    assert whole["usage"]["cache_read_input_tokens"] == 3
    for seed in range(10):
        [(status, data)], _ = asked({"tools": TOOLS, "stream": True}, seed=seed)
        events = events_of(data)
        assert events[0]["type"] == "message_start"
        assert events[0]["message"]["content"] == []
        blocks = blocks_of(events)
        for block, expected in zip(blocks, whole["content"], strict=True):
            assert block | {"id": ""} == expected | {"id": ""}
        assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        usage = events[-2]["usage"]
        assert usage["input_tokens"] == whole["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("script", "stop_reason", "stop_sequence"),
    [
        ({"text": "a", "reason": "stop"}, "end_turn", None),
        ({"text": "a", "reason": "length"}, "max_tokens", None),
        ({"text": "a", "reason": "stop", "stop": "END"}, "stop_sequence", "END"),
        ({"text": "", "reason": "stop"}, "end_turn", None),
    ],
)
def test_why_an_answer_ended(
    script: dict[str, Any], stop_reason: str, stop_sequence: str | None
) -> None:
    body = {"stop_sequences": ["END"]}
    [(_, whole), (_, stream)], scripted = asked(body, body | {"stream": True}, **script)
    reply = json.loads(whole)
    assert (reply["stop_reason"], reply["stop_sequence"]) == (stop_reason, stop_sequence)
    assert reply["content"] == [{"type": "text", "text": script["text"]}]
    assert events_of(stream)[-2]["delta"]["stop_reason"] == stop_reason
    assert scripted.params[0].stop_strings == ("END",)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (r'{"a": "\ud83d", "b": 1}', r'{"a": "\ud83d", "b": 1}'),
        ('{"a": 1e999, "b": -0.0}', '{"a": 1e999, "b": -0.0}'),
        ('{\n  "a": 1\n}', '{\n  "a": 1\n}'),
        ('{"a": ', "{}"),
        ('{"a": NaN}', "{}"),
        ("[1]", "{}"),
        ('{"a": ' + "[" * 20_000, "{}"),
    ],
)
def test_arguments_are_shown_as_they_were_written(written: str, shown: str) -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {written}'
    [(status, data)], _ = asked({"tools": TOOLS}, text=text)
    assert status == 200
    assert f'"input":{shown}'.encode() in data


def test_a_conversation_goes_on_with_what_tools_return() -> None:
    [(_, data)], _ = asked({"tools": TOOLS})
    answer = json.loads(data)["content"]
    calls = [each["id"] for each in answer if each["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0], "content": "2"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1],
            "content": [{"type": "text", "text": "noon"}],
            "is_error": False,
        },
        {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
    ]
    body = {
        "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        "messages": [
            *HI,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": results},
        ],
        "tools": TOOLS,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled"},
    }
    more = {"metadata": {"user_id": "u" * 512}}
    [(status, data), (_, count)], scripted = asked(body | more, body, text="Done.")
    assert status == 200, data
    prompt = scripted.prompts[0]
    assert prompt.startswith("<|system|>Be\n\nbrief.<|user|>hi<|assistant|><think>hm, hm</think>")
    assert f"<|tool|>2[{calls[0]}]<|tool|>noon[{calls[1]}]<|user|>go on" in prompt
    assert "thinks" in prompt
    [(status, data)], _ = asked(body, path="/v1/messages/count_tokens")
    usage = json.loads(count)["usage"]
    expected = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert (status, json.loads(data)) == (200, {"input_tokens": expected})


def test_large_bodies_are_translated_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def recording(**fields: Any) -> Any:
        threads.append(threading.current_thread())
        return chat_body(**fields)

    for module in (messages_endpoints, responses_endpoints):
        monkeypatch.setattr(module, "chat_body", recording)
    for is_large in (False, True):
        text = "a" * (LARGE_BODY if is_large else 10)
        conversation = [{"role": "user", "content": text}]
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses"):
            fields = {"input": text} if "resp" in path else {"messages": conversation}
            asked(fields, path=path)
            assert (threads.pop() is threading.current_thread()) is not is_large


def test_an_answer_can_be_begun_for_the_assistant() -> None:
    messages = [*HI, {"role": "assistant", "content": "A cat"}]
    [(status, _)], scripted = asked({"messages": messages}, text=" is")
    assert status == 200
    assert scripted.prompts[0].endswith("A cat")


TOOL_USE = {"type": "tool_use", "id": "t", "name": "add", "input": {}}


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        (said(), "messages[0].content"),
        (said({"type": "image", "source": {}}), "messages[0].content[0].type"),
        (said({"type": "text"}), "messages[0].content[0].text"),
        (said({"type": "text", "text": 5}), "messages[0].content[0].text"),
        (said(TOOL_USE), "messages[0].content[0].type"),
        (said({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        (said({"type": "tool_result", "tool_use_id": "t"}), "messages[0].content[0].tool_use_id"),
        (said(TOOL_USE | {"input": "a"}, role="assistant"), "messages[0].content[0].input"),
        (said(TOOL_USE | {"name": ""}, role="assistant"), "messages[0].content[0].name"),
        (said(TOOL_USE | {"id": ""}, role="assistant"), "messages[0].content[0].id"),
        (said(TOOL_USE, role="assistant"), "messages"),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, "messages"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "tools[0].type"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[0].name"),
        (
            {"tools": [{"name": "a", "input_schema": {"type": "array"}}]},
            "tools[0].input_schema.type",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": ""}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x" * 2000]}, "stop_sequences"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1 << 63}}, "thinking.budget_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"max_token": 5}, "max_token"),
        ({"container": "x"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        (
            {"output_config": {"format": {**FORMAT, "schema": {"title": "x" * 300_000}}}},
            "output_config.format.schema",
        ),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        (
            {"output_config": {"format": FORMAT}, "output_format": FORMAT},
            "output_config.format",
        ),
    ],
)
def test_bad_messages_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    [(status, data)], scripted = asked(fields)
    reply = json.loads(data)
    error = reply["error"]
    assert (status, reply["type"], error["param"]) == (400, "error", param), error
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param)
    assert not scripted.prompts


def test_the_form_may_come_as_either_version_of_anthropic_s_clients_sends_it(
    server: LiveServer,
) -> None:
    body = {"messages": HI, "max_tokens": 20}
    for fields in ({"output_format": FORMAT}, {"output_config": {"format": FORMAT}}):
        reply = server.post("/v1/messages", body | fields)
        assert reply.json()["content"][0]["text"] in ('"cat"', '"dog"'), reply.text
    # The demo model's template does not know it.
    reply = server.post("/v1/messages", body | {"output_config": {"effort": "max"}})
    assert reply.json()["error"]["param"] == "output_config.effort"


def test_the_template_is_told_how_much_to_think_in_the_client_s_word() -> None:
    old = ScriptedClient().tokenizer
    assert old is not None
    knowing = Tokenizer(old._backend, old.special_tokens, "{{ messages }}{{ reasoning_effort }}")
    for path, fields in (
        ("/v1/messages", {"output_config": {"effort": "max"}}),
        ("/v1/chat/completions", {"reasoning_effort": "max"}),
    ):
        [(status, data)], scripted = asked(fields, path=path, tokenizer=knowing)
        assert status == 200, data
        assert scripted.prompts[0].endswith("max")


def test_the_key_may_come_as_anthropic_s_clients_send_it() -> None:
    client = ScriptedClient()
    keys = ApiKeys(["a-key-of-mine"])
    app = create_app(client, ServerSettings(("demo",), api_keys=keys))

    async def ask(**headers: str) -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"messages": HI, "max_tokens": 5}
            return (await http.post("/v1/messages", json=body, headers=headers)).status_code

    assert asyncio.run(ask(**{"x-api-key": "a-key-of-mine"})) == 200
    assert asyncio.run(ask(**{"x-api-key": "another-key"})) == 401
    assert asyncio.run(ask()) == 401
    asyncio.run(client.close())


def test_a_message_of_a_real_model(server: LiveServer) -> None:
    fields = {"max_tokens": 8, "temperature": 0}
    messages = [{"role": "user", "content": "What is a cat?"}]
    chat = server.post("/v1/chat/completions", fields | {"messages": messages}).json()
    whole = server.post("/v1/messages", fields | {"messages": messages}).json()
    text = chat["choices"][0]["message"]["content"]
    assert whole["content"] == [{"type": "text", "text": text}]
    assert whole["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    stream = server.post("/v1/messages", fields | {"messages": messages, "stream": True})
    assert blocks_of(events_of(stream.content)) == [{"type": "text", "text": text}]
    count = server.post("/v1/messages/count_tokens", {"messages": messages}).json()
    assert count == {"input_tokens": chat["usage"]["prompt_tokens"]}
