"""Replicas are restarted or stopped under load; no request fails, and no token changes."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.errors import InvalidRequest
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.draining import DrainOrder, DrainRunning, Requests
from octavo.server.engine_process.placement import Replication
from octavo.server.engine_process.supervision import Supervision
from octavo.server.observability.totals import EngineTotals
from processes import assert_gone, engines
from server.clients import assert_nothing_is_held, complete, run, symbolic_client
from server.live_server import LiveServer, live_server
from server.test_replicas import THREE, TWO, kill, load_of_requests, until_busy
from server.test_replicas_live import texts

# Texts are compared that may come from several batches; see test_replicas_live.py.
EXACT = ("--dtype", "float32")
NUM_STREAMS = 6  # one of each kind
ADMIN = {"authorization": "Bearer admin-key-1234"}
USER = {"authorization": "Bearer user-key-1234"}


async def until_drained(client: EngineClient) -> None:
    while client.drainer.is_running:
        await asyncio.sleep(0.01)
    assert client.drainer.error is None


async def ceaseless_load(client: EngineClient) -> None:
    """Requests that come while others go, for ever; each must be right."""
    for round_number in itertools.count():
        await complete(client, [round_number % 9, 1, 2], 40, round_number, 1 + round_number % 3)


def metric(client: EngineClient, name: str) -> float:
    """The value of a gauge, as Prometheus gets it."""
    [family] = [each for each in EngineTotals(client, "demo").collect() if each.name == name]
    [sample] = family.samples
    return float(sample.value)


@pytest.mark.parametrize(
    ("num_replicas", "requests"), [(1, "move"), (1, "finish"), (2, "finish"), (3, "move")]
)
def test_a_rolling_restart_under_load(num_replicas: int, requests: Requests) -> None:
    async def test() -> None:
        replication = Replication(num_replicas)
        async with symbolic_client("step=0.002", replication=replication) as client:
            pids = [replica.pid for replica in client.replicas]
            coming = [asyncio.create_task(ceaseless_load(client)) for _ in range(8)]
            load = asyncio.create_task(load_of_requests(client))
            await until_busy(client.replicas[0])
            client.drainer.begin(DrainOrder(range(num_replicas), requests))
            with pytest.raises(DrainRunning):
                client.drainer.begin(DrainOrder([0]))
            await until_drained(client)
            await load
            assert not any(task.done() for task in coming), "one has failed"
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)
            assert all(replica.num_restarts == 1 for replica in client.replicas)
            assert not set(pids) & {replica.pid for replica in client.replicas}
            while client.open_requests or client.gauges.num_running:
                await asyncio.sleep(0.01)
            await assert_nothing_is_held(client)

    run(test())


def test_requests_that_may_finish_are_not_moved() -> None:
    async def test() -> None:
        async with symbolic_client("step=0.002", replication=TWO) as client:
            first, second = client.replicas
            load = asyncio.create_task(load_of_requests(client, num_tokens=60))
            await until_busy(first)
            await until_busy(second)
            had = [*first.exchange.open.values()]
            client.drainer.begin(DrainOrder([0], "finish"))
            assert first.state == "ready", "the drain begins with the next turn of the loop"
            while first.state == "ready" and client.drainer.is_running:
                await asyncio.sleep(0)
            held = metric(client, "octavo_kv_blocks_held")
            gauges = [replica.gauges.num_free_blocks for replica in client.replicas]
            assert held == 2 * client.info.num_blocks - sum(gauges)
            assert first.state == "draining"
            await until_drained(client)
            await load
            assert had
            assert {entry.num_replays for entry in had} == {0}
            late = asyncio.create_task(load_of_requests(client, count=6, num_tokens=500))
            await until_busy(first)
            had = [*first.exchange.open.values()]
            client.drainer.begin(DrainOrder([0], "finish", seconds=0.1))
            await until_drained(client)
            assert any(entry.num_replays == 1 for entry in had), "they took too long"
            await late

    run(test())


def test_a_replica_is_stopped_and_started_again() -> None:
    async def test() -> None:
        async with symbolic_client("step=0.002", replication=TWO) as client:
            first = client.replicas[0]
            load = asyncio.create_task(load_of_requests(client))
            await until_busy(first)
            client.drainer.begin(DrainOrder([0], then="stop"))
            await until_drained(client)
            assert (first.state, first.pid, client.health.healthy) == ("stopped", None, True)
            await load
            for numbers in ([1], [0, 1]):
                with pytest.raises(InvalidRequest, match="no replica that serves"):
                    client.drainer.begin(DrainOrder(numbers, then="stop"))
            with pytest.raises(InvalidRequest, match="2 is not one of the 2 replicas"):
                client.drainer.begin(DrainOrder([2]))
            pinning = asyncio.create_task(client.pin_prefix([5] * 40, "system"))
            await pinning
            client.drainer.begin(DrainOrder([0]))
            await until_drained(client)
            assert first.is_serving
            while not (await client.snapshot(0)).pins:
                await asyncio.sleep(0.01)
            await load_of_requests(client, count=8, num_tokens=20)
            await client.unpin_prefix("system")
            await assert_nothing_is_held(client)

    run(test())


def test_a_replica_that_dies_while_it_is_drained() -> None:
    async def test() -> None:
        async with symbolic_client("step=0.002", replication=TWO) as client:
            load = asyncio.create_task(load_of_requests(client, num_tokens=120))
            await until_busy(client.replicas[0])
            client.drainer.begin(DrainOrder([0], "finish"))
            while client.replicas[0].state != "draining":
                await asyncio.sleep(0.001)
            kill(client.replicas[0])
            await until_drained(client)
            await load
            await assert_nothing_is_held(client)

    run(test())


def test_a_replica_that_does_not_come_back_ends_the_drain(tmp_path: object) -> None:
    async def test() -> None:
        obstacle = f"{tmp_path}/obstacle"
        patience = Supervision(max_fruitless_restarts=1, revival_seconds=60)
        async with symbolic_client(
            "step=0.002", f"exit-if={obstacle}", supervision=patience, replication=TWO
        ) as client:
            load = asyncio.create_task(load_of_requests(client))
            await until_busy(client.replicas[0])
            with open(obstacle, "w"):
                pass
            client.drainer.begin(DrainOrder([0, 1]))
            while client.drainer.is_running:
                await asyncio.sleep(0.01)
            assert "replica 0 did not come back" in str(client.drainer.error)
            assert client.replicas[1].is_serving, "the next one was not touched"
            await load

    run(test())


@pytest.mark.slow
def test_two_thousand_streams_survive_a_rolling_restart_and_a_kill() -> None:
    """A thousand run and a thousand wait when the restart begins; one replica is killed in it."""

    async def test() -> None:
        async with symbolic_client(
            *("step=0.002", "blocks=20000"),
            supervision=Supervision(max_waiting=4096),
            replication=THREE,
            max_num_seqs=333,
        ) as client:
            load = [
                asyncio.create_task(complete(client, [i % 7] * (20 + i % 50), 100, i))
                for i in range(2000)
            ]
            while client.gauges.num_running < 900 or len(client.open_requests) < 1900:
                assert not any(task.done() and task.exception() for task in load)
                await asyncio.sleep(0.01)
            num_waiting = len(client.open_requests) - client.gauges.num_running
            client.drainer.begin(DrainOrder([0, 1, 2]))
            while client.replicas[0].num_restarts == 0:
                await asyncio.sleep(0.001)
            kill(client.replicas[2])
            await until_drained(client)
            await asyncio.gather(*load)
            assert num_waiting > 800
            while client.gauges.num_running:
                await asyncio.sleep(0.01)
            await assert_nothing_is_held(client)

    run(test(), 600)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("--replicas", "2", *EXACT, OCTAVO_ADMIN_KEY="admin-key-1234") as running:
        yield running


def test_over_http(server: LiveServer) -> None:
    before = engines(server.process.pid)
    state = server.get("/admin/drain", **ADMIN).json()
    assert [each["pid"] in before for each in state["replicas"]] == [True, True]
    restarts = [each["num_restarts"] for each in state["replicas"]]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        expected = [*pool.map(lambda number: texts(server, number), range(NUM_STREAMS))]
        reply = server.post("/admin/drain", {"replica": "all"}, **ADMIN)
        assert (reply.status_code, reply.json()["is_draining"]) == (202, True)
        while server.get("/admin/drain", **ADMIN).json()["is_draining"]:
            found = [*pool.map(lambda number: texts(server, number), range(NUM_STREAMS))]
            assert found == expected
            assert server.get("/health").status_code == 200
            time.sleep(1.0)  # without rest, streams leave few cores no time to start an engine
    state = server.get("/admin/drain", **ADMIN).json()
    assert state["error"] is None
    assert [each["num_restarts"] for each in state["replicas"]] == [n + 1 for n in restarts]
    assert not set(engines(server.process.pid)) & set(before)


def test_bad_orders(server: LiveServer) -> None:
    for headers in ({}, USER):
        assert server.get("/admin/drain", **headers).status_code == 401
        assert server.post("/admin/drain", {"replica": 0}, **headers).status_code == 401
    for fields, where in (
        ({}, "replica"),
        ({"replica": 2}, "replica"),
        ({"replica": -1}, "replica"),
        ({"replica": "both"}, "replica"),
        ({"replica": "1"}, "replica"),
        ({"replica": 0.5}, "replica"),
        ({"replica": None}, "replica"),
        ({"replica": [0]}, "replica"),
        ({"replica": {}}, "replica"),
        ({"replica": 10**30}, "replica"),
        ({"replica": 0, "requests": 1}, "requests"),
        ({"replica": 0, "then": True}, "then"),
        ({"replica": 0, "then": ["stop"]}, "then"),
        ({"replica": 0, "seconds": "5"}, "seconds"),
        ({"replica": 0, "seconds": True}, "seconds"),
        ({"replica": 0, "seconds": 1e9}, "seconds"),
        ({"replica": 0, "seconds": -1}, "seconds"),
        ({"replica": True}, "replica"),
        ({"replica": 0, "requests": "drop"}, "requests"),
        ({"replica": 0, "then": "explode"}, "then"),
        ({"replica": "all", "then": "stop"}, "then"),
        ({"replica": 0, "seconds": 0}, "seconds"),
        ({"replica": 0, "force": True}, "force"),
    ):
        reply = server.post("/admin/drain", fields, **ADMIN)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, where), reply.text


def test_closing_in_the_middle_of_a_rolling_restart() -> None:
    """As SIGTERM does: the restart ends, and requests that are running end with an error."""

    async def test() -> None:
        async with symbolic_client("step=0.002", replication=TWO) as client:
            load = [asyncio.create_task(complete(client, [i], 2000, i)) for i in range(8)]
            await until_busy(client.replicas[0])
            client.drainer.begin(DrainOrder([0, 1]))
            while client.replicas[0].state != "restarting":
                await asyncio.sleep(0.001)
            pids = [replica.pid for replica in client.replicas if replica.pid is not None]
            assert pids
        assert not client.drainer.is_running
        ends = await asyncio.gather(*load, return_exceptions=True)
        assert all(isinstance(end, BaseException) for end in ends)
        assert_gone(pids)

    run(test())


@pytest.mark.slow  # a server of its own; by day, the client is closed in the middle of one
def test_sigterm_in_the_middle_of_a_rolling_restart() -> None:
    with live_server("--replicas", "2", *EXACT) as running:
        assert running.post("/admin/drain", {"replica": "all"}).status_code == 202
        time.sleep(0.2)
        assert running.stop() == 0


@pytest.mark.slow
def test_an_engine_killed_during_a_rolling_restart(server: LiveServer) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        expected = [*pool.map(lambda number: texts(server, number), range(NUM_STREAMS))]
        assert server.post("/admin/drain", {"replica": 0}, **ADMIN).status_code == 202
        streams = [pool.submit(texts, server, number) for number in range(NUM_STREAMS)]
        os.kill(engines(server.process.pid)[-1], signal.SIGKILL)
        assert [stream.result() for stream in streams] == expected
