"""Fair shares over HTTP: a flood from one API key does not delay another key's requests."""

from __future__ import annotations

import asyncio
from typing import Literal

import httpx
import pytest

from octavo.outputs import RequestOutput
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.listening import Listener
from octavo.server.engine_process.supervision import Supervision
from octavo.server.http.app import create_app
from octavo.server.http.keys import ApiKeys
from octavo.server.http.settings import ServerSettings
from server.clients import kill, run, symbolic_client
from server.symbolic_engine import expected_tokens

FLOOD, SLOW = "key-of-the-flood", "key-of-the-slow-one"
SLOW_TENANT = "salt slow"
SETTINGS = ServerSettings(("demo",), ApiKeys([FLOOD, f"{SLOW}:slow"]))
Policy = Literal["fcfs", "fair"]


class Flooded(Listener):
    """How many requests of the flood end until each other one does: in the order of what the engine
    says, whenever clients hear of it."""

    def __init__(self) -> None:
        self.since_it_came: list[int] = []
        self.in_all: list[int] = []
        self._num_ended = self._num_before = 0

    def request_added(self, request: OpenRequest) -> None:
        if request.request.tenant == SLOW_TENANT:
            self._num_before = self._num_ended

    def request_finished(self, request: OpenRequest, output: RequestOutput) -> None:
        if request.request.tenant == SLOW_TENANT:
            self.since_it_came.append(self._num_ended - self._num_before)
            self.in_all.append(self._num_ended)
        else:
            self._num_ended += 1


class Clients:
    """One client for both keys."""

    def __init__(self, client: EngineClient) -> None:
        app = httpx.ASGITransport(create_app(client, SETTINGS))
        self._http = httpx.AsyncClient(transport=app, base_url="http://localhost")
        self.engine = client

    async def post(self, key: str, prompt: list[int], num_tokens: int) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "seed": 0}
        body |= {"return_token_ids": True}
        headers = {"Authorization": f"Bearer {key}"}
        return await self._http.post("/v1/completions", json=body, headers=headers, timeout=50)

    async def complete(self, key: str, number: int, num_tokens: int) -> None:
        prompt = [1 + number, 2, 3]
        reply = await self.post(key, prompt, num_tokens)
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        assert choice["token_ids"] == expected_tokens(prompt, 0, 0, num_tokens)

    def flood(self, count: int, num_tokens: int) -> list[asyncio.Task[None]]:
        calls = [self.complete(FLOOD, number, num_tokens) for number in range(count)]
        return [asyncio.ensure_future(call) for call in calls]

    async def until_waiting(self, count: int) -> None:
        while self.engine.gauges.num_waiting < count:
            await asyncio.sleep(0.001)


def flooded(policy: Policy, num_kills: int = 0) -> Flooded:
    """What 5 requests wait for that come after a flood of 60, one after the other."""

    async def test() -> Flooded:
        heard = Flooded()
        async with symbolic_client(
            "step=0.002", policy=policy, max_num_seqs=2, listeners=(heard,)
        ) as engine:
            clients = Clients(engine)
            flood = clients.flood(60, 20)
            await clients.until_waiting(50)
            if num_kills:
                await kill(engine, num_kills, 5)
            for number in range(5):
                await clients.complete(SLOW, number, 10)
            await asyncio.gather(*flood)
            return heard

    return run(test())


def test_a_flood_does_not_delay_another_key() -> None:
    """One of the flood's two running requests ends before each other request starts."""
    fair, fcfs = flooded("fair"), flooded("fcfs")
    assert max(fair.since_it_came) <= 4
    assert fcfs.in_all[0] >= 50


def test_shares_survive_a_restart_of_the_engine() -> None:
    assert max(flooded("fair", num_kills=2).since_it_came) <= 4


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_flood_does_not_fill_the_queue_for_another_key(policy: Policy) -> None:
    async def test() -> None:
        patience = Supervision(max_waiting=6)
        async with symbolic_client(
            "step=0.01", policy=policy, max_num_seqs=1, supervision=patience
        ) as engine:
            clients = Clients(engine)
            flood = clients.flood(1, 300)
            while engine.gauges.num_running < 1:
                await asyncio.sleep(0.001)
            flood += clients.flood(6, 1)
            await clients.until_waiting(6)
            assert (await clients.post(FLOOD, [1], 1)).status_code == 429
            others = [asyncio.ensure_future(clients.post(SLOW, [1, i], 1)) for i in range(4)]
            replies = await asyncio.gather(*others)
            accepted = [reply.status_code for reply in replies].count(200)
            assert accepted == (3 if policy == "fair" else 0)  # a half of `max_waiting`
            await asyncio.gather(*flood)

    run(test())
