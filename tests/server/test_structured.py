"""Structured output over HTTP: whole and streamed, beside others, and when the engine dies."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from typing import Any

import httpx
import pytest

from processes import wait_for_engines
from server.live_server import LiveServer, live_server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 12},
        "kind": {"enum": ["cat", "dog", "größer"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA},
}
# 3,000 references in each other, for which the library's stack is too small.
CHAIN = {
    "$ref": "#/$defs/0",
    "$defs": {
        f"{i}": {"required": ["x"], "properties": {"x": {"$ref": f"#/$defs/{i + 1}"}}}
        for i in range(2_500)
    }
    | {"2500": {"type": "null"}},
}
ASK = {"prompt": "Once upon a time", "max_tokens": 120, "seed": 3, "temperature": 1.0}


SLOW = {"type": "integer", "multipleOf": 999_983}
HELLO = [{"role": "user", "content": "Hello"}]


def tool(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "kind", "legs"}
    assert value["kind"] in ("cat", "dog", "größer")


def streamed(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "asked", [{"response_format": FORMAT}, {"structured_outputs": {"json": SCHEMA}}]
)
def test_completions_whole_and_streamed(server: LiveServer, asked: dict[str, Any]) -> None:
    body = {**ASK, **asked, "n": 2, "logprobs": 1, "return_token_ids": True}
    whole = server.complete(**body)
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop", "stop"]
    for text in texts:
        check(text)
    pieces = ["", ""]
    for event in streamed(server, "/v1/completions", body):
        for choice in event["choices"]:
            pieces[choice["index"]] += choice["text"]
    assert pieces == texts


def test_chats_and_beams(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 120, "seed": 1}
    reply = server.post("/v1/chat/completions", {**body, "response_format": FORMAT}).json()
    check(reply["choices"][0]["message"]["content"])
    deltas = streamed(server, "/v1/chat/completions", {**body, "response_format": FORMAT})
    pieces = [choice["delta"].get("content", "") for e in deltas for choice in e["choices"]]
    assert "".join(pieces) == reply["choices"][0]["message"]["content"]
    choice = {"structured_outputs": {"choice": ["yes", "no"]}, "beam_width": 2}
    reply = server.post("/v1/chat/completions", {**body, **choice, "seed": None}).json()
    assert reply["choices"][0]["message"]["content"] in ("yes", "no")


def test_what_cannot_be_enforced_is_a_400_and_nobody_waits(server: LiveServer) -> None:
    """Schemas at the limits, refused and accepted, beside a stream that must not stand still."""
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "(a" * 900}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"title": "x" * 4_000_000}}}, "structured_outputs.json"),
        (  # the library takes a minute
            {"structured_outputs": {"json": SLOW}},
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"json": CHAIN}}, "structured_outputs.json"),
        *[
            (
                {"prompt": None, "messages": HELLO, "tools": tools},
                field,
            )
            for tools, field in (
                ([tool({"title": "x" * 4_000_000})], "tools[0].function.parameters"),
                ([tool({}, f"f{i}") for i in range(5_000)], "tools"),
                ([tool({}, f"f{i % 500}") for i in range(512)], "tools[0].function.name"),
            )
        ],
    ]
    lines: list[str] = []

    def read() -> None:
        body = {**ASK, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as reply:
            lines.extend(reply.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    for fields, param in refused:
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        response = server.post(path, {**ASK, **fields})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param, response.text
    reader.join()
    assert len(lines) > 400


FOUR = {"type": "array", "items": SCHEMA, "minItems": 4, "maxItems": 4}
CALL_FOUR = tool({"properties": {"a": FOUR}, "required": ["a"], "additionalProperties": False})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (
            "/v1/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": FOUR}}},
        ),
        (
            "/v1/chat/completions",
            {
                "prompt": None,
                "messages": HELLO,
                "tools": [CALL_FOUR],
                "tool_choice": "required",
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_kills_in_the_middle_of_a_stream_change_no_token(path: str, asked: dict[str, Any]) -> None:
    body = {**ASK, "n": 2, "max_tokens": 400, "return_token_ids": True, **asked}
    # In bfloat16, a token may depend on the batch in which it is computed.
    with live_server("--log-level", "error", "--dtype", "float32") as server:
        reply = server.post(path, body).raise_for_status().json()
        wanted = [choice["token_ids"] for choice in reply["choices"]]
        pieces: list[list[int]] = [[], []]
        num_kills = 0
        with httpx.stream(
            "POST", f"{server.url}{path}", json={**body, "stream": True}, timeout=120
        ) as response:
            for count, line in enumerate(response.iter_lines()):
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    pieces[choice["index"]] += choice.get("token_ids", [])
                if count in (60, 200):
                    [engine] = wait_for_engines(server.process.pid)
                    os.kill(engine, signal.SIGKILL)
                    num_kills += 1
        assert num_kills == 2
        assert pieces == wanted
        if "tools" in asked:
            for choice in reply["choices"]:
                [call] = choice["message"]["tool_calls"]
                assert len(json.loads(call["function"]["arguments"])["a"]) == 4


def test_an_output_with_a_form_is_forked_where_it_is_whole(server: LiveServer) -> None:
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    parent = server.complete("Once upon a time", max_tokens=16, return_token_ids=True, **form)
    assert parent["choices"][0]["finish_reason"] == "stop"
    num_prompt = parent["usage"]["prompt_tokens"]
    for position in (None, num_prompt):
        body = {"parent": parent["id"], "position": position, "max_tokens": 16, **form}
        assert server.post("/v1/forks", body).json()["choices"][0]["text"] in ("yes", "no")


def test_a_fork_inside_an_output_with_a_form_goes_on_with_the_form(server: LiveServer) -> None:
    """From any place: greedily the same output, sampled or searched another one of the form."""
    asked = {"return_token_ids": True, "max_tokens": 60}
    form = {"structured_outputs": {"regex": "[a-z]{8,12} [0-9]{4}(, [a-z]{4}){2}"}}
    parent = server.complete("Once upon a time", temperature=0, **asked, **form)
    [choice] = parent["choices"]
    assert choice["finish_reason"] == "stop"
    tokens, start = choice["token_ids"], parent["usage"]["prompt_tokens"]

    def fork(parent: str, num_kept: int, **fields: Any) -> Any:
        body = {"parent": parent, "position": start + num_kept, **asked, **fields}
        return server.post("/v1/forks", body).json()

    def output(child: Any) -> str:
        token_ids = [*child["prompt_token_ids"][start:], *child["token_ids"]]
        text = server.post("/detokenize", {"tokens": token_ids}).json()["prompt"]
        return str(text.partition("<|")[0])  # without the end token

    for num_kept in range(1, len(tokens)):
        [child] = fork(parent["id"], num_kept, temperature=0)["choices"]
        assert (child["token_ids"], child["finish_reason"]) == (tokens[num_kept:], "stop")
    pattern = form["structured_outputs"]["regex"]
    for kind in ({"temperature": 1, "seed": 1, "n": 4}, {"beam_width": 3, "n": 3}):
        forked = fork(parent["id"], 5, **kind)
        again = fork(forked["id"], 8, choice=1, temperature=0)
        prompt = forked["choices"][0]["prompt_token_ids"]
        for child in (*forked["choices"], *again["choices"]):
            assert re.fullmatch(pattern, output({"prompt_token_ids": prompt, **child}))
    # A suffix is a part of the output, and one that the form does not allow is refused.
    [child] = fork(parent["id"], len(tokens) - 1, suffix=[tokens[-1]], temperature=0)["choices"]
    assert child["finish_reason"] == "stop"
    for fields, param, words in [
        ({"suffix": "!!"}, "suffix", "the grammar cannot go on"),
        ({"suffix": "!!", "stream": True}, "suffix", "the grammar cannot go on"),
        ({"suffix": [1 << 40]}, "suffix", "outside the vocabulary"),
        ({"children": [{}, {"suffix": "!!"}], "stream": True}, "children[1]", "cannot go on"),
    ]:
        error = fork(parent["id"], 5, **fields)["error"]
        assert (error["param"], words in error["message"]) == (param, True)
    for fields, param in [
        (form, "structured_outputs.regex"),
        (
            {"children": [{}, {"response_format": {"type": "json_object"}}]},
            "children[1].response_format",
        ),
        ({"ignore_eos": True}, "parent"),
    ]:
        assert fork(parent["id"], 5, **fields)["error"]["param"] == param
    # What a stop string has cut off is not whole; before its first token, and behind its end token,
    # there is no form.
    cut = server.complete("Once upon a time", temperature=0, stop=[" "], **asked, **form)
    assert cut["choices"][0]["finish_reason"] == "stop"
    num_cut = len(cut["choices"][0]["token_ids"])
    [child] = fork(cut["id"], num_cut, temperature=0)["choices"]
    assert child["token_ids"] == tokens[num_cut:]
    for num_kept in (0, len(tokens)):
        [child] = fork(parent["id"], num_kept, temperature=0, **form)["choices"]
        assert re.fullmatch(pattern, child["text"])


def test_a_fork_inside_a_call_of_a_tool_ends_the_call(server: LiveServer) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "London", "Rome"]}}}
    parameters["required"] = ["city"]
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    asked = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    body = {"messages": [{"role": "user", "content": "Hi"}], **asked, "temperature": 0}
    chat = server.post("/v1/chat/completions", body).json()
    assert chat["choices"][0]["finish_reason"] == "tool_calls"
    usage = chat["usage"]
    for num_kept in range(1, usage["completion_tokens"], 3):
        body = {"parent": chat["id"], "position": usage["prompt_tokens"] + num_kept, "n": 2}
        for choice in server.post("/v1/forks", {**body, "max_tokens": 60}).json()["choices"]:
            assert choice["finish_reason"] == "stop"
            text = choice["text"].rstrip()
            assert text.endswith("</tool_call>") or "</tool_call>".endswith(text)
