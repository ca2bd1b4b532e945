"""Fair shares over HTTP: a flood from one API key does not delay another key's requests."""

from __future__ import annotations

import asyncio
from typing import Literal

import httpx
import pytest

from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.supervision import Supervision
from octavo.server.http.app import create_app
from octavo.server.http.keys import ApiKeys
from octavo.server.http.settings import ServerSettings
from server.clients import kill, run, symbolic_client
from server.symbolic_engine import expected_tokens

FLOOD, SLOW = "key-of-the-flood", "key-of-the-slow-one"
SETTINGS = ServerSettings(("demo",), ApiKeys([FLOOD, f"{SLOW}:slow"]))
Policy = Literal["fcfs", "fair"]


class Clients:
    """One client for both keys."""

    def __init__(self, client: EngineClient) -> None:
        app = httpx.ASGITransport(create_app(client, SETTINGS))
        self._http = httpx.AsyncClient(transport=app, base_url="http://localhost")
        self.engine = client
        self.num_done = {FLOOD: 0, SLOW: 0}

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
        self.num_done[key] += 1

    def flood(self, count: int, num_tokens: int) -> list[asyncio.Task[None]]:
        calls = [self.complete(FLOOD, number, num_tokens) for number in range(count)]
        return [asyncio.ensure_future(call) for call in calls]

    async def until_waiting(self, count: int) -> None:
        while self.engine.gauges.num_waiting < count:
            await asyncio.sleep(0.001)


def num_flooded(policy: Policy, num_kills: int = 0) -> list[int]:
    """How many of 60 requests of the flood are done when each of 5 other requests is."""

    async def test() -> list[int]:
        async with symbolic_client("step=0.002", policy=policy, max_num_seqs=2) as engine:
            clients = Clients(engine)
            flood = clients.flood(60, 20)
            await clients.until_waiting(50)
            if num_kills:
                await kill(engine, num_kills, 5)
            done = []
            for number in range(5):
                await clients.complete(SLOW, number, 10)
                done.append(clients.num_done[FLOOD])
            await asyncio.gather(*flood)
            return done

    return run(test())


def test_a_flood_does_not_delay_another_key() -> None:
    """One of the flood's two running requests ends before each other request starts."""
    fair, fcfs = num_flooded("fair"), num_flooded("fcfs")
    assert fair[0] <= 8
    assert fair[-1] <= 24
    assert fcfs[0] >= 50


def test_shares_survive_a_restart_of_the_engine() -> None:
    assert num_flooded("fair", num_kills=2)[-1] <= 30


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
