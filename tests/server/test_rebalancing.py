"""What a replica that serves again takes from the others, in what order, and what stays."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.draining import DrainOrder
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.process import Death
from octavo.server.engine_process.replica import Replica
from processes import engines
from server.clients import sampling
from server.fleet_world import World, run
from server.live_server import live_server
from server.symbolic_engine import RAISING, expected_tokens
from server.test_replicas_live import texts

KILL = Death("it was ended by signal 9 (SIGKILL)", is_kill_from_outside=True)
NUM_TOKENS = 60


async def complete(client: EngineClient, number: int, tenant: str = "", priority: int = 0) -> None:
    """A request of usual length without a prefix in common with others."""
    prompt = [7 + number] * 8
    stream = await client.generate(
        prompt,
        sampling(NUM_TOKENS),
        request_id=f"r{number}",
        tenant=tenant,
        priority=priority,
    )
    output = await stream.result()
    assert output.outputs[0].token_ids == expected_tokens(prompt, 0, 0, NUM_TOKENS)


def numbers(entries: list[OpenRequest]) -> list[int]:
    return sorted(int(entry.request_id[1:]) for entry in entries)


def waiting(replica: Replica) -> list[int]:
    return numbers(replica.movable())


async def crowd(
    world: World, tenants: str = "a", priorities: tuple[int, ...] = (0,)
) -> list[asyncio.Task[None]]:
    """Of two replicas, the first is dead; the second runs some of 24 requests, and the others
    wait there."""
    first, second = world.client.replicas
    process = world.process_of(first)
    assert process is not None
    process.die(KILL)
    while first.is_serving:
        await asyncio.sleep(0)
    tasks = []
    for number in range(24):
        tenant, priority = (
            tenants[number * len(tenants) // 24],
            priorities[number % len(priorities)],
        )
        coming = complete(world.client, number, tenant, priority)
        tasks.append(asyncio.create_task(coming))
        await world.turn(second)
    await world.turn(second)
    assert not first.is_serving
    assert len(waiting(second)) > 10
    return tasks


async def until_back(replica: Replica) -> None:
    while not replica.is_serving:
        await asyncio.sleep(0.1)


def test_a_replica_that_comes_back_takes_the_first_that_wait() -> None:
    async def test() -> None:
        world = World(num_blocks=200)
        async with world.serve(2, max_num_seqs=4) as client:
            tasks = await crowd(world)
            first, second = client.replicas
            assert waiting(second) == [*range(4, 24)]
            await until_back(first)
            # Of 24 requests of equal size 12 are taken, less one for hysteresis: the first ones.
            had = numbers([*second.exchange.open.values()])
            assert had == [*range(4), *range(15, 24)]
            assert numbers([*first.exchange.open.values()]) == [*range(4, 15)]
            client._fleet._share_with(first)
            client._fleet._share_with(second)
            assert numbers([*second.exchange.open.values()]) == had, "nothing wanders"
            await world.turn(first)
            process = world.process_of(first)
            assert process is not None
            started = process.engine.scheduler.running
            assert [request.request_id for request in started] == ["r4", "r5", "r6", "r7"]
            await world.finish(tasks)
            for task in tasks:
                task.result()
            await world.check_nothing_is_left()

    run(test())


def test_tenants_share_alike_what_moves_under_fair_shares() -> None:
    """The first of two tenants has asked for everything before the second."""

    async def test() -> None:
        for policy, expected in (("fcfs", {"a": 8, "b": 3}), ("fair", {"a": 6, "b": 5})):
            world = World(num_blocks=200)
            async with world.serve(2, max_num_seqs=4, policy=policy) as client:
                tasks = await crowd(world, tenants="ab")
                first, _ = client.replicas
                await until_back(first)
                moved = [*first.exchange.open.values()]
                tenants = [entry.request.tenant for entry in moved]
                assert {name: tenants.count(name) for name in "ab"} == expected
                await world.finish(tasks)
                for task in tasks:
                    task.result()

    run(test())


def test_urgent_requests_move_first_under_priorities() -> None:
    async def test() -> None:
        world = World(num_blocks=200)
        async with world.serve(2, max_num_seqs=4, policy="priority") as client:
            tasks = await crowd(world, priorities=(2, 1, 0))
            first, second = client.replicas
            were_waiting = waiting(second)
            await until_back(first)
            moved = numbers([*first.exchange.open.values()])
            left = [number for number in were_waiting if number not in moved]
            assert max(2 - number % 3 for number in moved) <= min(2 - number % 3 for number in left)
            assert len(moved) > 5
            await world.finish(tasks)

    run(test())


def test_after_a_drain_each_replica_has_its_share() -> None:
    async def test() -> None:
        world = World(num_blocks=200)
        async with world.serve(3, max_num_seqs=2) as client:
            tasks = [asyncio.create_task(complete(client, number)) for number in range(60)]
            while len(client.open_requests) < 60:
                await asyncio.sleep(0)
            for replica in client.replicas:
                await world.turn(replica)
            client.drainer.begin(DrainOrder([0, 1, 2]))
            while client.drainer.is_running:
                for replica in client.replicas:
                    process = world.process_of(replica)
                    if process is not None:
                        process.accept()
                await asyncio.sleep(0.1)
            counts = sorted(len(replica.exchange.open) for replica in client.replicas)
            assert sum(counts) == 60
            assert counts[2] - counts[0] <= 3, counts
            await world.finish(tasks)
            for task in tasks:
                task.result()
            await world.check_nothing_is_left()

    run(test())


def test_a_replica_that_has_computed_nothing_takes_one_request_first() -> None:
    """It may die again at once: then one request was lost to it, not half of those that wait."""

    async def test() -> None:
        world = World(num_blocks=200)
        async with world.serve(2, max_num_seqs=4) as client:
            first, second = client.replicas
            dying = asyncio.create_task(complete(client, 100))
            while not first.exchange.open:
                await asyncio.sleep(0)
            process = world.process_of(first)
            assert process is not None
            process.die(KILL)  # it had work, and had done none of it
            while first.is_serving:
                await asyncio.sleep(0)
            assert first.is_unproven
            tasks = [dying]
            for number in range(23):
                tasks.append(asyncio.create_task(complete(client, number)))
                await world.turn(second)
            await until_back(first)
            assert len(first.exchange.open) == 1
            await world.turn(first)  # accepts it
            await world.turn(first)
            assert not first.is_unproven
            assert len(first.exchange.open) > 8
            await world.finish(tasks)
            for task in tasks:
                task.result()

    run(test())


def test_a_replica_in_which_nothing_waits_takes_work_from_a_slow_one() -> None:
    """The slow one keeps what it runs; each request moves once."""

    async def test() -> None:
        for num_slow_steps in (0, 3):
            world = World(num_blocks=200)
            async with world.serve(2, max_num_seqs=2) as client:
                fast, slow = client.replicas
                tasks = [asyncio.create_task(complete(client, number)) for number in range(24)]
                while len(client.open_requests) < 24:
                    await asyncio.sleep(0)
                entries = [*client.open_requests.values()]
                process = world.process_of(slow)
                assert process is not None
                process.accept()
                for _ in range(num_slow_steps):
                    await world.turn(slow)
                stuck = [entry for entry in entries if entry.replica == 1][: min(2, num_slow_steps)]
                assert len(slow.exchange.open) == 12
                while len(client.open_requests) > len(stuck):
                    await world.turn(fast)
                    await asyncio.sleep(0.01)
                assert [*slow.exchange.open.values()] == stuck
                assert {entry.num_replays for entry in entries} == {0, 1}
                await world.finish(tasks)
                for task in tasks:
                    task.result()
                await world.check_nothing_is_left()

    run(test())


def test_nothing_moves_between_replicas_that_are_equally_fast() -> None:
    async def test() -> None:
        world = World(num_blocks=200)
        async with world.serve(3, max_num_seqs=2) as client:
            tasks = [asyncio.create_task(complete(client, number)) for number in range(60)]
            while len(client.open_requests) < 60:
                await asyncio.sleep(0)
            entries = [*client.open_requests.values()]
            await world.finish(tasks)
            assert {entry.num_replays for entry in entries} == {0}

    run(test())


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_what_killed_two_replicas_is_tried_at_one_at_a_time(num_replicas: int) -> None:
    """Innocents go on elsewhere meanwhile, and wait at no replica that tries it."""

    async def test() -> None:
        world = World(num_blocks=200)
        deaths: list[int] = []
        async with world.serve(num_replicas, max_num_seqs=4) as client:
            innocents = [asyncio.create_task(complete(client, number)) for number in range(12)]
            deadly = asyncio.create_task(client.generate([RAISING], sampling(5)))
            stream = None
            alive = {process.pid for process in world.processes}
            while not all(task.done() for task in innocents) or world.client.open_requests:
                for replica in client.replicas:
                    await world.turn(replica)
                    world.check()
                await asyncio.sleep(0.05)
                now = {process.pid for process in world.processes}
                deaths += [pid for pid in alive if pid not in now]
                alive = now
                serving = [replica for replica in client.replicas if replica.is_serving]
                assert serving, "a deadly request never takes all replicas down"
                if deadly.done() and stream is None:
                    stream = await deadly
            for task in innocents:
                task.result()
            assert stream is not None
            with pytest.raises(Exception, match="not tried again"):
                await stream.result()
            assert len(deaths) <= 3
            await world.check_nothing_is_left()

    run(test())


NUM_LIVE = 48


@pytest.mark.slow
def test_waiting_requests_move_to_a_server_s_replica_that_is_back() -> None:
    """Live: two replicas of three sequences each, 48 streams of all kinds, one replica killed.

    So many that most still wait when the replica is back, however long it takes to start.
    """
    options = ("--replicas", "2", "--max-num-seqs", "3", "--max-num-batched-tokens", "64")
    with live_server(*options) as server, ThreadPoolExecutor(NUM_LIVE) as pool:
        expected = [*pool.map(lambda number: texts(server, number), range(NUM_LIVE))]
        streams = [pool.submit(texts, server, number) for number in range(NUM_LIVE)]

        def replicas() -> list[dict[str, int]]:
            found: list[dict[str, int]] = server.get("/admin/drain").json()["replicas"]
            return found

        while sum(each["num_open"] for each in replicas()) < NUM_LIVE:
            time.sleep(0.005)
        os.kill(engines(server.process.pid)[0], signal.SIGKILL)
        while not any(each["num_restarts"] for each in replicas()):
            time.sleep(0.005)
        [back] = [each for each in replicas() if each["num_restarts"]]
        num_taken = back["num_open"]
        assert [stream.result() for stream in streams] == expected
        assert num_taken > 0
