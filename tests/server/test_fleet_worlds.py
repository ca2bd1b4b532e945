"""Random worlds of a fleet: requests come and leave, replicas die, drain and return in any order of
messages; every request gets its tokens, once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass

import pytest

from octavo.errors import InvalidRequest, RequestFailed
from octavo.sampling_params import SamplingParams
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.draining import DrainOrder, DrainRunning
from octavo.server.engine_process.process import Death
from octavo.server.engine_process.supervision import Supervision
from server.fleet_world import World, run
from server.symbolic_engine import RAISING, UNACCEPTABLE, expected_tokens

MAX_CRASHES = 3  # in which one deadly request may take part: in company, as a suspect, alone
KILL = Death("it was ended by signal 9 (SIGKILL)", is_kill_from_outside=True)


@dataclass
class Asked:
    """A request, and what must come of it."""

    prompt: list[int]
    num_tokens: int
    seed: int
    n: int
    tenant: str
    priority: int
    leaves_after: int | None  # its client leaves after so many events

    @property
    def is_deadly(self) -> bool:
        return RAISING in self.prompt or UNACCEPTABLE in self.prompt

    async def check(self, client: EngineClient) -> None:
        params = SamplingParams(
            max_tokens=self.num_tokens, seed=self.seed, n=self.n, ignore_eos=True
        )
        expected = [
            expected_tokens(self.prompt, self.seed, i, self.num_tokens) for i in range(self.n)
        ]
        stream = await client.generate(
            self.prompt, params, tenant=self.tenant, priority=self.priority
        )
        if self.leaves_after is not None:
            for _ in range(self.leaves_after):
                await anext(stream, None)
            stream.abort()
            return
        output = await stream.result()
        assert [sample.token_ids for sample in output.outputs] == expected


def ask(draw: random.Random, harm: int | None = None) -> Asked:
    prompt = [draw.randrange(3)] * draw.randrange(40) + draw.choices(range(50), k=5)
    if harm is not None:
        prompt.append(harm)
    return Asked(
        prompt,
        num_tokens=draw.randrange(1, 30),
        seed=draw.randrange(1000),
        n=draw.choice((1, 1, 2, 3)),
        tenant=draw.choice("abc"),
        priority=draw.randrange(3),
        leaves_after=draw.randrange(4) if draw.random() < 0.15 else None,
    )


def disturb(world: World) -> None:
    """Kill a process, drain a replica, or let the next start fail."""
    draw, client = world.draw, world.client
    what = draw.random()
    if what < 0.5 and world.processes:
        draw.choice(world.processes).die(KILL)
    elif what < 0.9:
        numbers = draw.sample(range(len(client.replicas)), draw.randint(1, len(client.replicas)))
        requests = draw.choice(("move", "finish"))
        order = DrainOrder(numbers, requests, draw.choice(("restart", "restart", "stop")), 5.0)
        with contextlib.suppress(DrainRunning, InvalidRequest):  # a stop would leave none
            client.drainer.begin(order)
    else:
        world.num_bad_starts += 1


async def live(seed: int, num_requests: int, num_deadly: int) -> None:
    world = World(seed, slice_units=random.Random(seed).choice((1, 2, 64)))
    world.ends_late = seed % 2 == 1
    draw = world.draw
    num_replicas = draw.choice((1, 2, 3, 4))
    policy = draw.choice(("fcfs", "priority", "fair"))
    overlap = draw.random() < 0.5
    deadly = {
        number: draw.choice((RAISING, UNACCEPTABLE))
        for number in draw.sample(range(num_requests), num_deadly)
    }
    async with world.serve(num_replicas, max_num_seqs=4, policy=policy, overlap=overlap) as client:
        tasks: dict[asyncio.Task[None], Asked] = {}
        for number in range(num_requests):
            asked = ask(draw, deadly.get(number))
            tasks[asyncio.create_task(asked.check(client))] = asked
            for _ in range(draw.randrange(40)):
                await world.happen()
                world.check()
            if draw.random() < 0.15:
                disturb(world)
        while client.drainer.is_running:
            await world.happen()
            world.check()
        await world.finish([*tasks])
        for task, asked in tasks.items():
            if asked.is_deadly and asked.leaves_after is None:
                assert isinstance(task.exception(), RequestFailed)
            elif not asked.is_deadly:
                task.result()
        assert world.num_crashes <= MAX_CRASHES * num_deadly
        await world.check_nothing_is_left()


# By night there are a thousand more, too.
SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed >= 7 else ()) for seed in range(12)]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_gets_its_tokens_whatever_happens(seed: int) -> None:
    run(live(seed, num_requests=25, num_deadly=0))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_deadly_request_fails_alone(seed: int) -> None:
    run(live(1000 + seed, num_requests=20, num_deadly=1 + seed % 2))


def test_requests_that_come_while_the_only_replica_restarts_wait() -> None:
    async def test() -> None:
        world = World()
        async with world.serve(1) as client:
            [replica] = client.replicas
            client.drainer.begin(DrainOrder([0]))
            tasks: list[asyncio.Task[None]] = []
            seen = {replica.state}
            while client.drainer.is_running:
                asked = Asked([1, 2, 3], 5, len(tasks), 1, "", 0, None)
                tasks.append(asyncio.create_task(asked.check(client)))
                await asyncio.sleep(0)
                seen.add(replica.state)
                if len(tasks) > 20:
                    await asyncio.sleep(0.1)
            assert seen == {"ready", "restarting"}
            await world.finish(tasks)
            for task in tasks:
                task.result()

    run(test())


@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_moved_away_may_still_be_what_a_process_dies_of(overlap: bool) -> None:
    """A deadly request is moved twice, each time too late; its neighbor is not blamed."""

    async def test() -> None:
        world = World()
        draw = random.Random(1)
        async with world.serve(1, max_num_seqs=4, overlap=overlap) as client:
            [replica] = client.replicas
            innocent, deadly = ask(draw), ask(draw, RAISING)
            innocent.leaves_after = deadly.leaves_after = None
            tasks = [asyncio.create_task(each.check(client)) for each in (innocent, deadly)]
            while len(client.open_requests) < 2:
                await asyncio.sleep(0)
            entries = [*client.open_requests.values()]
            for num_crashes in (1, 2):
                while not replica.is_serving:
                    await asyncio.sleep(0.1)
                process = world.process_of(replica)
                assert process is not None
                process.accept()
                client._fleet._take(entries[1])
                assert [*replica.exchange.open.values()] == entries[:1]
                while not process.gone.done():
                    process.step()
                while replica.is_serving:
                    await asyncio.sleep(0)
                assert [entry.num_deaths for entry in entries] == [num_crashes] * 2
            await world.finish(tasks)
            tasks[0].result()
            assert isinstance(tasks[1].exception(), RequestFailed)
            assert world.num_crashes == MAX_CRASHES
            await world.check_nothing_is_left()

    run(test())


@pytest.mark.slow
def test_many_worlds() -> None:
    for seed in range(2000, 3000):
        run(live(seed, num_requests=30, num_deadly=seed % 3))


@pytest.mark.slow
def test_thousands_wait_while_replicas_die_and_drain() -> None:
    """Three of them are deadly; a tenth of the clients leave while the requests move."""
    num_requests, harms = 10_000, {3000: RAISING, 5000: UNACCEPTABLE, 9995: RAISING}

    async def test() -> None:
        world = World(7, num_blocks=4000)
        patience = Supervision(max_waiting=1 << 20)
        async with world.serve(3, patience, max_num_seqs=64, overlap=True) as client:
            asked = [ask(world.draw, harms.get(number)) for number in range(num_requests)]
            for number in harms:
                asked[number].leaves_after = None
            tasks = [asyncio.create_task(each.check(client)) for each in asked]
            while len(client.open_requests) < num_requests:
                await asyncio.sleep(0)
            leaving = world.draw.sample([*set(range(num_requests)) - harms.keys()], 1000)
            client.drainer.begin(DrainOrder([0, 1, 2]))
            for event in range(4000):
                await world.happen()
                if event % 4 == 0:
                    tasks[leaving.pop()].cancel()
                if event % 400 == 50 and world.processes:
                    world.draw.choice(world.processes).die(KILL)
                if event % 500 == 0:
                    world.check()
            await world.finish(tasks)
            assert client.drainer.error is None
            assert not client.drainer.is_running
            ends = [None if task.cancelled() else task.exception() for task in tasks]
            assert {number for number, end in enumerate(ends) if end is not None} == harms.keys()
            assert world.num_crashes <= MAX_CRASHES * len(harms)
            await world.check_nothing_is_left()

    run(test())
