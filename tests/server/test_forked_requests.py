"""Requests that go on from another one's tokens, while engine processes die and replicas change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from octavo.outputs import RequestOutput, SequenceDelta
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.placement import Replication
from octavo.server.engine_process.stream import RequestStream
from octavo.server.http import forks, responses
from octavo.server.http.app import create_app
from octavo.server.http.endpoints.completions import CompletionWriter
from octavo.server.http.errors import ApiError
from octavo.server.http.keys import Tenant
from octavo.server.http.settings import ServerSettings
from octavo.server.http.token_texts import CompletionScores
from octavo.server.offload import LARGE_REPLY, Offload
from octavo.structured.output import StructuredOutput
from server.clients import (
    assert_nothing_is_held,
    complete,
    keep_busy,
    kill,
    run,
    sampling,
    symbolic_client,
)
from server.symbolic_engine import expected_tokens

PROMPT = [1, 2, 3, 4, 5] * 8
BASE = "http://octavo"


def http(client: EngineClient) -> httpx.AsyncClient:
    app = create_app(client, ServerSettings(("demo",)))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE, timeout=60.0)


def body(**fields: Any) -> dict[str, Any]:
    return {"ignore_eos": True, "return_token_ids": True, "seed": 3, **fields}


def check(reply: dict[str, Any], num_prompts: int, n: int, num_tokens: int, seed: int = 3) -> None:
    """All choices have the tokens that their prompts get alone."""
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    assert [choice["index"] for choice in choices] == list(range(num_prompts * n))
    for choice in choices:
        expected = expected_tokens(
            choice["prompt_token_ids"], seed, choice["index"] % n, num_tokens
        )
        assert choice["token_ids"] == expected
        assert choice["finish_reason"] == "length"


async def begin(client: EngineClient, num_tokens: int, until: int) -> RequestStream:
    """A parent that runs, when some of its tokens have come."""
    stream = await client.generate(PROMPT, sampling(num_tokens))
    while len(stream.samples[0].token_ids) < until:
        assert isinstance(await anext(stream), SequenceDelta)
    return stream


@pytest.mark.parametrize("is_fork", [False, True])
def test_replies_with_many_outputs_keep_no_other_request_waiting(
    monkeypatch: pytest.MonkeyPatch, is_fork: bool
) -> None:
    """They are written in a thread, in which Python lets the event loop run in between."""
    threads: list[int] = []
    whole = CompletionWriter.whole

    def noted(self: CompletionWriter, outputs: Iterable[RequestOutput]) -> Any:
        threads.append(threading.get_ident())
        return whole(self, outputs)

    monkeypatch.setattr(CompletionWriter, "whole", noted)

    async def test() -> None:
        async with symbolic_client() as client, http(client) as requests:
            parent = (
                await requests.post("/v1/completions", json=body(prompt=PROMPT, max_tokens=2))
            ).json()
            for count in (2, LARGE_REPLY // 2 + 1):
                if is_fork:
                    fields = {"parent": parent["id"], "children": [{}] * count}
                    path = "/v1/forks"
                else:
                    fields, path = {"prompt": [PROMPT] * count}, "/v1/completions"
                reply = await requests.post(path, json=body(**fields, n=2, max_tokens=2))
                check(reply.json(), count, 2, 2)
        main = threading.get_ident()
        assert [each == main for each in threads] == [True, True, False]

    run(test())


def test_streams_that_begin_with_long_scores_keep_no_other_request_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scores of a prompt are made once for all choices, and written in a thread, as those of a
    child are that is joined at its end."""
    threads: list[int] = []
    delta_choices, scored = CompletionWriter.delta_choices, CompletionScores.prompt
    prompts: list[int] = []

    def noted(self: CompletionWriter, prompt: int, delta: SequenceDelta) -> Any:
        threads.append(threading.get_ident())
        return delta_choices(self, prompt, delta)

    def counted(self: CompletionScores, *args: Any) -> Any:
        prompts.append(1)
        return scored(self, *args)

    monkeypatch.setattr(CompletionWriter, "delta_choices", noted)
    monkeypatch.setattr(CompletionScores, "prompt", counted)

    async def test() -> None:
        async with symbolic_client() as client, http(client) as requests:
            fields = body(prompt=PROMPT * 7, n=3, max_tokens=2, echo=True, logprobs=1)
            whole = (await requests.post("/v1/completions", json=fields)).json()["choices"]
            assert len(prompts) == 1
            reply = await requests.post("/v1/completions", json={**fields, "stream": True})
            assert len(prompts) == 2
            events = [line.removeprefix("data: ") for line in reply.text.split("\n\n")[:-2]]
            parts = [choice for each in events for choice in json.loads(each)["choices"]]
            for expected in whole:
                own = [part for part in parts if part["index"] == expected["index"]]
                assert "".join(part["text"] for part in own) == expected["text"]
                for name, values in expected["logprobs"].items():
                    assert [each for part in own for each in part["logprobs"][name]] == values
            main = threading.get_ident()
            assert sum(each != main for each in threads) == 3
            threads.clear()
            fields = body(max_tokens=LARGE_REPLY + 1, logprobs=1, background=True)
            parent = (
                await requests.post("/v1/completions", json=body(prompt=PROMPT, max_tokens=2))
            ).json()["id"]
            fork = (await requests.post("/v1/forks", json={"parent": parent, **fields})).json()
            child = (await requests.get(f"/v1/forks/{fork['id']}/0")).json()["choices"][0]
            assert len(child["logprobs"]["tokens"]) == LARGE_REPLY + 1
            assert len(threads) == 1
            assert threads != [main]

    run(test())


def test_children_outlive_engine_processes() -> None:
    """Killed again and again, engines give the children of running and ended parents their tokens;
    and forks in the background can be joined after it."""

    async def test() -> None:
        async with symbolic_client("step=0.002") as client, http(client) as api:
            ended = (
                await api.post("/v1/completions", json=body(prompt=PROMPT, max_tokens=9))
            ).json()
            running = asyncio.create_task(
                api.post(
                    "/v1/completions",
                    json=body(prompt=PROMPT, max_tokens=120, seed=4),
                    headers={"x-request-id": "running"},
                )
            )
            while "running" not in client.open_requests:
                await asyncio.sleep(0.001)
            killing = asyncio.create_task(kill(client, 3, 20))
            forks = []
            for i, parent in enumerate([ended["id"], "cmpl-running"] * 4):
                asked = body(parent=parent, suffix=[i], n=1 + i % 3, max_tokens=60)
                forks.append(asyncio.create_task(api.post("/v1/forks", json=asked)))
                await asyncio.sleep(0.02)
            asked = body(parent=ended["id"], children=[{}, {"suffix": [5]}], max_tokens=80)
            started = (await api.post("/v1/forks", json={**asked, "background": True})).json()
            for i, fork in enumerate(forks):
                reply = (await fork).json()
                check(reply, 1, 1 + i % 3, 60)
            await keep_busy(client, killing)
            joined = (await api.get(f"/v1/forks/{started['id']}")).json()
            check(joined, 2, 1, 80)
            check((await running).json(), 1, 1, 120, seed=4)
            assert client.info.num_restarts == 3
            await assert_nothing_is_held(client)

    run(test())


def test_a_fork_goes_to_the_replica_of_its_parent() -> None:
    """However busy that one is; and elsewhere if it is gone."""

    async def test() -> None:
        replication = Replication(2, "load")
        async with symbolic_client("step=0.002", replication=replication) as client:
            parent = await begin(client, 1900, 20)
            home = parent.entry.replica
            assert home is not None
            tokens = [*PROMPT, *parent.samples[0].token_ids]
            num_known = len(tokens) - 1
            others = [asyncio.create_task(complete(client, [i] * 20, 30, i)) for i in range(6)]
            await asyncio.sleep(0.01)
            client.offer_tail(parent.entry, 0)
            child = await client.generate([*tokens, 6], sampling(8), home=home)
            assert child.entry.replica == home
            output = await child.result()
            assert output.outputs[0].token_ids == expected_tokens([*tokens, 6], 0, 0, 8)
            assert output.num_cached_tokens >= num_known
            replica = client.replicas[home]
            assert replica.pid is not None
            os.kill(replica.pid, signal.SIGKILL)
            while replica.is_serving:
                await asyncio.sleep(0)
            late = await client.generate([*tokens, 5], sampling(8), home=home)
            assert late.entry.replica == 1 - home
            assert (await late.result()).outputs[0].token_ids == expected_tokens(
                [*tokens, 5], 0, 0, 8
            )
            await asyncio.gather(*others)
            parent.abort()
            while not all(each.is_serving for each in client.replicas):
                await asyncio.sleep(0.01)

    run(test())


@pytest.mark.parametrize("num_tokens", [0, 7])
def test_a_sample_is_cancelled_alone(num_tokens: int) -> None:
    """Before it has begun, too: then it ends with its first token."""

    async def test() -> None:
        async with symbolic_client("step=0.002") as client:
            stream = await client.generate(PROMPT, sampling(300, n=3))
            while len(stream.samples[1].token_ids) < num_tokens:
                await anext(stream)
            stream.cancel(1)
            stream.cancel(1)
            output = await stream.result()
            reasons = [sample.finish_reason for sample in output.outputs]
            assert reasons == ["length", "cancelled", "length"]
            for index, sample in enumerate(output.outputs):
                expected = expected_tokens(PROMPT, 0, index, len(sample.token_ids))
                assert sample.token_ids == expected
            assert len(output.outputs[1].token_ids) < 300
            await assert_nothing_is_held(client)

    run(test())


def test_a_stream_of_a_fork_that_is_closed_ends_its_children() -> None:
    async def test() -> None:
        async with symbolic_client("step=0.002") as client, http(client) as api:
            parent = (
                await api.post("/v1/completions", json=body(prompt=PROMPT, max_tokens=9))
            ).json()
            asked = body(parent=parent["id"], n=4, max_tokens=60, stream=True)
            reply = await api.post("/v1/forks", json=asked)
            events = [
                json.loads(line.removeprefix("data: "))
                for line in reply.text.split("\n\n")
                if "{" in line
            ]
            pieces: list[list[int]] = [[] for _ in range(4)]
            for event in events:
                for choice in event["choices"]:
                    pieces[choice["index"]] += choice["token_ids"]
            whole = expected_tokens(PROMPT, 3, 0, 9)
            prompt = [*PROMPT, *whole]
            assert pieces == [expected_tokens(prompt, 3, index, 60) for index in range(4)]
            background = {**asked, "stream": False, "background": True}
            fork_id = (await api.post("/v1/forks", json=background)).json()["id"]
            joining = asyncio.create_task(api.get(f"/v1/forks/{fork_id}?stream=true"))
            await asyncio.sleep(0.03)
            joining.cancel()  # whoever joins takes nothing with him
            joined = (await api.get(f"/v1/forks/{fork_id}")).json()
            check(joined, 1, 4, 60)
            await assert_nothing_is_held(client)

    run(test())


def test_grammars_of_ended_responses_and_forks_count_as_tokens_of_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large grammars leave room for fewer responses and forks that are remembered."""
    monkeypatch.setattr(responses, "MAX_TOKENS", 5000)
    monkeypatch.setattr(forks, "MAX_TOKENS", 5000)

    async def test() -> None:
        async with symbolic_client() as client:
            tenant, known, kept = Tenant(""), responses.Responses(100), forks.Forks(100)
            for number in range(4):
                form = StructuredOutput(choice=["x" * 8000])
                stream = await client.generate(
                    PROMPT, sampling(2, structured=form, stop_token_ids=(0,))
                )
                response = known.begin(f"r{number}", tenant, [stream], 1)
                fork = forks.Fork({"id": f"f{number}"}, None, tenant, [stream], 1, Offload())
                kept.add(fork, is_kept=True)
                await fork.ended
                known.end(response)
            await asyncio.sleep(0)
            known.find("r3", tenant, 0)
            kept.find("f3", tenant)
            for number in range(2):
                with pytest.raises(ApiError, match="no response"):
                    known.find(f"r{number}", tenant, 0)
                with pytest.raises(ApiError, match="no fork"):
                    kept.find(f"f{number}", tenant)

    run(test())


def test_a_tenant_has_no_responses_and_forks_of_others_forgotten() -> None:
    async def test() -> None:
        known, kept, offload = responses.Responses(2), forks.Forks(2), Offload()
        first, other = Tenant("", "key 1"), Tenant("", "key 2")
        for tenant, number in [(first, 0), *((other, number) for number in range(5))]:
            known.end(known.begin(f"r{number}", tenant, [], 1))
            fork = forks.Fork({"id": f"f{number}"}, None, tenant, [], 1, offload)
            kept.add(fork, is_kept=True)
            await fork.ended
            await asyncio.sleep(0)
        for tenant, number, is_kept in [(first, 0, True), (other, 2, False), (other, 4, True)]:
            # A response that is known has no choices here, which is another error.
            with pytest.raises(ApiError, match="0 choices" if is_kept else "no response"):
                known.find(f"r{number}", tenant, 0)
            with contextlib.nullcontext() if is_kept else pytest.raises(ApiError, match="no fork"):
                kept.find(f"f{number}", tenant)
        offload.close()

    run(test())
