"""Several engine processes behind one client: one dies, its requests go on at another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.symbolic import EOS, Ask, expected_beams
from octavo.errors import EngineFailed, RequestFailed
from octavo.sampling_params import BeamSearchParams
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.placement import Replication
from octavo.server.engine_process.process import EngineProcess
from octavo.server.engine_process.replica import Replica
from octavo.server.engine_process.supervision import Supervision
from server.clients import assert_nothing_is_held, complete, run, sampling, symbolic_client
from server.symbolic_engine import DEADLY, HANGING, RAISING, UNACCEPTABLE

TWO, THREE = Replication(2), Replication(3)


async def search(client: EngineClient, prompt: list[int], num_tokens: int) -> None:
    """A beam search, which must find what is right."""
    params = BeamSearchParams(3, max_tokens=num_tokens, ignore_eos=True, stop_token_ids=[EOS])
    output = await (await client.generate(prompt, params)).result()
    beams = expected_beams(Ask("r", tuple(prompt), "beam", 3, num_tokens, 0))
    assert [prompt + beam.token_ids for beam in output.outputs] == [prompt + beam for beam in beams]


async def load_of_requests(client: EngineClient, count: int = 30, num_tokens: int = 90) -> None:
    """One, two and three samples, and beam searches; all must be right."""
    await asyncio.gather(
        *[
            search(client, [3, 1, i], 40)
            if i % 5 == 0
            else complete(client, [i % 7] * (20 + i), num_tokens, i, 1 + i % 3)
            for i in range(count)
        ]
    )


@contextlib.asynccontextmanager
async def ceaseless_load(client: EngineClient) -> AsyncIterator[None]:
    """The same again and again, so that replicas are busy however long this process is held up.
    What is under way at the end is waited for."""
    is_over = asyncio.Event()

    async def load() -> None:
        while not is_over.is_set():
            await load_of_requests(client)

    loading = asyncio.create_task(load())
    yield
    is_over.set()
    await loading


def is_busy(replica: Replica) -> bool:
    """Whether it runs a request that is open now; its gauges are those of its last step."""
    assigned = [entry.assignment for entry in replica.exchange.open.values()]
    return any(each is not None and each.is_running for each in assigned)


async def until_busy(replica: Replica) -> None:
    while not is_busy(replica):
        await asyncio.sleep(0.001)


def kill(replica: Replica) -> None:
    assert replica.info is not None
    os.kill(replica.info.pid, signal.SIGKILL)


async def watch_num_serving(client: EngineClient, numbers: list[int]) -> None:
    """Note how many replicas serve at once, for ever."""
    while True:
        numbers.append(sum(replica.is_serving for replica in client.replicas))
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_what_a_killed_replica_computed_goes_on_at_another(num_replicas: int) -> None:
    async def test() -> None:
        replication = Replication(num_replicas)
        async with symbolic_client("step=0.003", replication=replication) as client:
            async with ceaseless_load(client):
                for number, replica in enumerate(client.replicas):
                    await until_busy(replica)
                    others = [each.exchange for each in client.replicas if each is not replica]
                    taken = set(replica.exchange.open)
                    kill(replica)
                    while replica.is_serving or replica.exchange.open:
                        await asyncio.sleep(0)
                    # Before it is started again, the others have what it had and has not ended.
                    assert taken
                    elsewhere = set().union(*(each.open for each in others))
                    assert taken & client.open_requests.keys() <= elsewhere
                    assert client.health.healthy
                    while not replica.is_serving:
                        await asyncio.sleep(0.005)
                    assert replica.num_restarts == 1, number
            assert client.open_requests == {}
            await assert_nothing_is_held(client)

    run(test())


def test_killed_all_at_once_they_all_come_back() -> None:
    async def test() -> None:
        async with symbolic_client("step=0.003", replication=THREE) as client:
            async with ceaseless_load(client):
                for replica in client.replicas:
                    await until_busy(replica)
                for replica in client.replicas:
                    kill(replica)
            await assert_nothing_is_held(client)

    run(test())


@pytest.mark.parametrize(
    ("token", "num_replicas"),
    [(UNACCEPTABLE, 2), pytest.param(RAISING, 3, marks=pytest.mark.slow)],
)
def test_a_deadly_request_never_takes_the_last_replica_down(token: int, num_replicas: int) -> None:
    async def test() -> None:
        replication = Replication(num_replicas)
        numbers: list[int] = []
        async with symbolic_client("step=0.002", replication=replication) as client:
            watching = asyncio.create_task(watch_num_serving(client, numbers))
            load = asyncio.create_task(load_of_requests(client, num_tokens=300))
            await until_busy(client.replicas[0])
            with pytest.raises(RequestFailed):
                await complete(client, [1, token, 2], 10)
            await load
            watching.cancel()
            assert min(numbers) >= 1
            deaths = sum(replica.num_restarts for replica in client.replicas)
            assert deaths <= 3
            assert client.health.healthy
            while not all(replica.is_serving for replica in client.replicas):
                await asyncio.sleep(0.01)
            await complete(client, [1, 2], 10)
            await assert_nothing_is_held(client)

    run(test())


def test_a_replica_that_hangs_is_replaced_and_its_requests_go_on() -> None:
    async def test() -> None:
        patience = Supervision(stall_seconds=0.4, hang_seconds=1.0)
        async with symbolic_client("step=0.002", supervision=patience, replication=THREE) as client:
            load = asyncio.create_task(load_of_requests(client, num_tokens=200))
            await until_busy(client.replicas[0])
            with pytest.raises(RequestFailed):
                await complete(client, [HANGING], 10)
            await load
            await assert_nothing_is_held(client)

    run(test())


def test_a_replica_whose_process_does_not_end_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its devices may not let go of it: the other one does its work meanwhile."""
    is_late, can_end = asyncio.Event(), asyncio.Event()
    ends = EngineProcess.ends

    async def late(process: EngineProcess) -> bool:
        await is_late.wait()
        await asyncio.sleep(0.01)
        return can_end.is_set() and await ends(process)

    async def test() -> None:
        monkeypatch.setattr(EngineProcess, "ends", late)
        async with symbolic_client("step=0.002", replication=TWO) as client:
            suspects = asyncio.create_task(load_of_requests(client, num_tokens=300))
            for replica in client.replicas:
                await until_busy(replica)
            poison = asyncio.create_task(complete(client, [1, RAISING, 2], 10))
            while all(replica.is_serving for replica in client.replicas):
                await asyncio.sleep(0.001)
            poison.cancel()
            await load_of_requests(client, count=5, num_tokens=10)
            is_late.set()
            await suspects  # which spare the last one for as long as the other may come soon
            assert sum(replica.is_serving for replica in client.replicas) == 1
            can_end.set()
            await assert_nothing_is_held(client)

    run(test())


def test_a_broken_replica_condemns_no_request(tmp_path: Path) -> None:
    """One replica crashes in each first step, whatever it computes: nothing fails for it."""

    async def test() -> None:
        patience = Supervision(max_fruitless_restarts=2, revival_seconds=60)
        async with symbolic_client(
            "step=0.002",
            f"broken={tmp_path / 'broken'}",
            supervision=patience,
            replication=THREE,
        ) as client:
            for _ in range(4):
                await load_of_requests(client, count=12, num_tokens=30)
            while not all(replica.is_serving for replica in client.replicas):
                await asyncio.sleep(0.01)
            broken = [replica for replica in client.replicas if replica.num_restarts]
            assert len(broken) == 1
            assert client.health.healthy

    run(test())


def test_a_replica_that_cannot_start_again_does_without(tmp_path: Path) -> None:
    async def test() -> None:
        obstacle = tmp_path / "obstacle"
        patience = Supervision(max_fruitless_restarts=1, revival_seconds=0.5)
        async with symbolic_client(
            "step=0.002", f"exit-if={obstacle}", supervision=patience, replication=TWO
        ) as client:
            load = asyncio.create_task(load_of_requests(client))
            first, second = client.replicas
            await until_busy(first)
            obstacle.touch()
            kill(first)
            while first.state != "failed":
                await asyncio.sleep(0.005)
            assert client.health.healthy
            await load
            stream = await client.generate([1, 2, 3], sampling(2000))
            kill(second)
            with pytest.raises(EngineFailed, match="2 times in a row"):
                await stream.result()
            assert not client.health.healthy
            assert "replica 0: the engine is given up" in str(client.health.reason)
            obstacle.unlink()
            while not first.is_serving or not second.is_serving:
                await asyncio.sleep(0.01)
            await load_of_requests(client, count=5, num_tokens=10)

    run(test())


def test_a_prefix_is_pinned_in_all_replicas() -> None:
    async def test() -> None:
        async with symbolic_client(replication=TWO) as client:
            prefix = [5] * 40
            await client.pin_prefix(prefix, "system")
            for replica in client.replicas:
                pins = (await client.snapshot(replica.number)).pins
                assert [pin.name for pin in pins] == ["system"]
            kill(client.replicas[1])
            while client.replicas[1].num_restarts == 0:
                await asyncio.sleep(0.01)
            while not (await client.snapshot(1)).pins:
                await asyncio.sleep(0.01)
            await client.unpin_prefix("system")
            await assert_nothing_is_held(client)
            with pytest.raises(RequestFailed, match="died twice"):
                await client.pin_prefix([DEADLY] * 16, "poison")
            while not all(replica.is_serving for replica in client.replicas):
                await asyncio.sleep(0.01)
            assert client.list_prefixes() == []
            await assert_nothing_is_held(client)

    run(test())


def test_requests_with_one_prefix_go_where_it_is() -> None:
    async def test() -> None:
        async with symbolic_client(replication=THREE) as client:
            prefixes = [[i] * 64 for i in range(6)]
            for turn in range(3):
                outputs = [await complete(client, [*prefix, 10 + turn], 5) for prefix in prefixes]
                hits = {output.num_cached_tokens for output in outputs}
                assert hits == ({0} if turn == 0 else {64})
            assert all(replica.counters.num_steps for replica in client.replicas)

    run(test())


def test_one_process_measures_what_quantization_loses(tmp_path: Path) -> None:
    """Neither the other replicas nor processes that replace it do so again."""

    async def test() -> None:
        measured = tmp_path / "measured"
        flag = f"measured={measured}"
        async with symbolic_client(flag, replication=THREE, quantization="int8") as client:
            first, last = client.replicas[0], client.replicas[-1]
            pids = [first.pid]
            for replica in (first, last, first):
                num_restarts = replica.num_restarts
                kill(replica)
                while replica.num_restarts == num_restarts or replica.state != "ready":
                    await asyncio.sleep(0.01)
            assert [*map(int, measured.read_text().split())] == pids

    run(test())


def test_all_engines_keep_the_quantization_that_the_first_one_chose(tmp_path: Path) -> None:
    async def test() -> None:
        flag = f"memory={tmp_path / 'taken'}"
        async with symbolic_client(flag, replication=THREE, quantization="auto") as client:
            first = client.replicas[0]
            kill(first)
            while first.num_restarts == 0 or first.state != "ready":
                await asyncio.sleep(0.01)
            infos = [replica.info for replica in client.replicas]
            assert [info and info.quantization for info in infos] == ["fp8"] * 3

    run(test())
