"""Requests made from our own description of the API: none may break the server."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from octavo.server.http.schema import EXAMPLE_ORIGIN
from server.live_server import OPEN, TIMEOUT, LiveServer

CHECKS = [
    not_a_server_error,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.status_code_conformance,
    checks.unsupported_method,
    checks.negative_data_rejection,
]
MAX_TOKENS = 4  # longer outputs take time and tell nothing more


def keep_short(body: Any) -> None:
    if isinstance(body, dict) and ("prompt" in body or "messages" in body):
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(name), int):
                body[name] = min(body[name], MAX_TOKENS)


def make_what_examples_name(server: LiveServer) -> None:
    """A request, a fork and a response that the examples ask about."""
    named = {"X-Request-Id": "my-request"}
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, **named).raise_for_status()
    fork = {"parent": "cmpl-my-request", "max_tokens": 1, "background": True}
    server.post("/v1/forks", fork, **named).raise_for_status()
    response = {"input": "a", "max_output_tokens": 1}
    server.post("/v1/responses", response, **named).raise_for_status()


def test_every_curl_line_of_the_description_works(server: LiveServer) -> None:
    make_what_examples_name(server)
    description = server.get("/openapi.json").json()
    assert "POST" not in json.dumps(description["paths"]["/health"]["get"]["x-codeSamples"])
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            sample, _ = operation["x-codeSamples"]
            program, *words = shlex.split(sample["source"].replace(EXAMPLE_ORIGIN, server.url))
            headers, body, asked, url = {}, None, None, None
            while words:
                match words.pop(0):
                    case "-H":
                        name, _, value = words.pop(0).partition(": ")
                        headers[name] = value
                    case "-d":
                        body = words.pop(0)
                    case "-X":
                        asked = words.pop(0)
                    case url:
                        pass
            asked = asked or ("GET" if body is None else "POST")
            assert (program, asked) == ("curl", method.upper())
            assert url is not None
            reply = httpx.request(asked, url, headers=headers, content=body, **OPEN)
            assert reply.is_success, (method, path, reply.text)
            while path == "/admin/drain" and server.get(path).json()["is_draining"]:
                time.sleep(0.05)


@pytest.mark.slow
def test_every_program_of_the_description_works(server: LiveServer) -> None:
    make_what_examples_name(server)
    description = server.get("/openapi.json").json()
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            _, sample = operation["x-codeSamples"]
            replies: dict[str, Any] = {}
            exec(sample["source"].replace(EXAMPLE_ORIGIN, server.url), replies)
            assert replies["reply"].is_success, (method, path, replies["reply"].text)
            while path == "/admin/drain" and server.get(path).json()["is_draining"]:
                time.sleep(0.05)


# Of each endpoint, good and bad.
@pytest.mark.parametrize("num_examples", [4, pytest.param(24, marks=pytest.mark.slow)])
def test_no_request_breaks_the_server(server: LiveServer, num_examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    names = []
    for result in schema.get_all_operations():
        operation = result.ok()
        names.append(operation.label)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue  # there is nothing to get wrong
            if mode is GenerationMode.POSITIVE and operation.label == "POST /admin/drain":
                continue  # it would restart the engine again and again; see test_draining.py

            @hypothesis.settings(
                max_examples=num_examples,
                derandomize=True,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def try_out(case: Any) -> None:
                keep_short(case.body)
                case.call_and_validate(checks=CHECKS, timeout=TIMEOUT)

            try_out()
    assert "POST /v1/completions" in names
    for prefix in server.get("/v1/prefixes").json()["data"]:
        url = f"{server.url}/v1/prefixes/{prefix['name']}"
        httpx.delete(url, **OPEN).raise_for_status()
    assert server.complete("Once upon a time", max_tokens=2)["choices"][0]["text"]
