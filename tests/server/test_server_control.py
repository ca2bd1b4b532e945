"""What operators and platforms ask of a server: ping, load, invocations, aborts, an empty cache."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import Request

from octavo.server.engine_process.placement import Replication
from octavo.server.http.app import create_app
from octavo.server.http.batch import post
from octavo.server.http.endpoints.invocations import invoke
from octavo.server.http.errors import ClientGone
from octavo.server.http.keys import ApiKeys
from octavo.server.http.settings import ServerSettings
from server.clients import run, symbolic_client
from server.live_server import LiveServer

PROMPT = list(range(1, 40))


async def ask(app: Any, path: str, **body: Any) -> tuple[int, Any]:
    status, _, data = await post(app, path, json.dumps(body).encode())
    return status, json.loads(data)


def test_aborted_requests_end_and_their_clients_are_told() -> None:
    async def test() -> None:
        async with symbolic_client("step=0.002") as client:
            app = create_app(client, ServerSettings(("demo",)))

            def begin(request_id: str, **fields: Any) -> asyncio.Task[tuple[int, Any]]:
                body = {"max_tokens": 1500, "ignore_eos": True, "request_id": request_id} | fields
                return asyncio.create_task(ask(app, "/v1/completions", **body))

            tasks = [
                begin("one", prompt=PROMPT),
                begin("two", prompt=[PROMPT, PROMPT]),
                begin("two", prompt=PROMPT),
                begin("two~", prompt=PROMPT),  # no id that a client may have
                begin("three", prompt=PROMPT, max_tokens=300),
            ]
            requests = client.open_requests
            while len(requests) < 5 or not all(
                each.assignment is not None and each.assignment.is_accepted
                for each in requests.values()
            ):
                await asyncio.sleep(0.001)
            status, reply = await ask(
                app, "/abort_requests", request_ids=["cmpl-one", "two", "none", "two"]
            )
            assert status == 200
            assert reply == {"aborted": ["cmpl-one", "two"], "unknown": ["none"]}
            *aborted, refused, whole = await asyncio.gather(*tasks)
            for status, reply in aborted:
                assert (status, reply["error"]["code"]) == (503, "aborted")
            assert (refused[0], refused[1]["error"]["param"]) == (400, "request_id")
            assert whole[0] == 200
            for wrong in ([], [1], "one", None, ["x"] * 5000):
                status, reply = await ask(app, "/abort_requests", request_ids=wrong)
                assert status == 400
                assert reply["error"]["param"].startswith("request_ids")

    run(test())


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_emptied_cache_finds_nothing(num_replicas: int) -> None:
    async def test() -> None:
        async with symbolic_client(replication=Replication(replicas=num_replicas)) as client:
            app = create_app(client, ServerSettings(("demo",)))

            async def num_cached() -> int:
                status, reply = await ask(app, "/v1/completions", prompt=PROMPT, max_tokens=1)
                assert status == 200
                cached: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                return cached

            pin = await client.pin_prefix(list(range(100, 116)), "kept")
            assert [await num_cached(), await num_cached() > 0] == [0, True]
            assert (await ask(app, "/reset_prefix_cache"))[0] == 200
            assert [await num_cached(), await num_cached() > 0] == [0, True]
            _, reply = await ask(app, "/v1/completions", prompt=[*range(100, 116), 5], max_tokens=1)
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == pin.num_tokens

    run(test())


def test_admin_endpoints_need_the_admin_key() -> None:
    async def test() -> None:
        async with symbolic_client() as client:
            settings = ServerSettings(
                ("demo",), api_keys=ApiKeys(["user-key"]), admin_keys=ApiKeys(["admin-key"])
            )
            app = create_app(client, settings)
            for path in ("/abort_requests", "/reset_prefix_cache", "/load"):
                status, reply = await ask(app, path, request_ids=["a"])
                assert (status, reply["error"]["code"]) == (401, "invalid_api_key")

    run(test())


def test_ping_and_load(server: LiveServer) -> None:
    assert server.get("/ping").json() == server.get("/health").json()
    assert server.post("/ping", {}).status_code == 200
    load = server.get("/load").json()
    assert load.keys() == {"server_load", "num_running", "num_waiting"}
    assert load["server_load"] == 0


def test_invocations_are_told_apart_by_their_fields(server: LiveServer) -> None:
    completion = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
    expected = server.post("/v1/completions", completion).json()["choices"]
    assert server.post("/invocations", completion).json()["choices"] == expected
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    expected = server.post("/v1/chat/completions", chat).json()["choices"]
    assert server.post("/invocations", chat).json()["choices"] == expected
    nulls = {"messages": None, "input": None}
    expected = server.post("/v1/completions", completion).json()["choices"]
    assert server.post("/invocations", nulls | completion).json()["choices"] == expected
    for body, param in (
        *(({}, None), ([1], None), ({"prompt": 5}, "prompt"), ({"x": 1}, None)),
        ({"messages": None}, None),
    ):
        reply = server.post("/invocations", body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_client_that_leaves_in_the_middle_of_an_invocation_is_no_error() -> None:
    async def leaving() -> Any:
        return {"type": "http.disconnect"}

    async def test() -> None:
        async with symbolic_client() as client:
            app = create_app(client, ServerSettings(("demo",)))
            request = Request({"type": "http", "headers": [], "app": app}, leaving)
            with pytest.raises(ClientGone):
                await invoke(request)

    run(test())
