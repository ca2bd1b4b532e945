"""Work in slices: how much of it the event loop does between two turns of everything else."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.server.engine_process import messages as m
from octavo.server.engine_process.draining import DrainOrder
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.process import Death
from octavo.server.engine_process.slices import SLICE_TOKENS, SLICE_UNITS, Slices
from octavo.server.engine_process.supervision import Supervision
from server.fleet_world import JumpingLoop, World, WorldProcess, run
from server.test_fleet_worlds import ask

KILL = Death("it was ended by signal 9 (SIGKILL)", is_kill_from_outside=True)


def test_a_slice_is_bounded_in_units_and_tokens_and_works_follow_one_another() -> None:
    async def test() -> None:
        slices, done = Slices(), []

        def work(name: str, cost: int, then: str = "") -> Iterator[int]:
            for _ in range(100):
                done.append(name)
                yield cost
            if then:
                slices.begin(work(then, SLICE_TOKENS // 3))

        slices.begin(work("a", 1, then="c"))
        slices.begin(work("b", 1))
        counts = [Counter(done)]
        while len(done) < 300:
            await asyncio.sleep(0)
            counts.append(Counter(done))
        turns = [after - before for before, after in pairwise(counts)]
        assert counts[0] == {"a": SLICE_UNITS}
        assert max(turn.total() for turn in turns) == SLICE_UNITS
        # Three units of "c" are as many tokens as a slice may have, and the first is over it.
        assert {turn["c"] for turn in turns if turn["c"] and not turn["b"]} <= {1, 3, 4}
        assert done == ["a"] * 100 + ["b"] * 100 + ["c"] * 100

    run(test())


def test_output_that_is_sent_again_counts_in_a_slice() -> None:
    """An engine that goes on with a request is sent all of it."""
    request: Any = SimpleNamespace(input_token_ids=[1, 2, 3])
    samples: list[Any] = [SimpleNamespace(token_ids=[4] * num) for num in (5, 0, 7)]
    assert OpenRequest("r", request, None, 0.0, samples).num_tokens == 15


def test_work_that_fails_does_not_stop_what_comes_after_it() -> None:
    async def test() -> None:
        slices, done = Slices(), []

        def fail() -> Iterator[int]:
            yield SLICE_TOKENS
            raise RuntimeError("it has a bug")

        def work() -> Iterator[int]:
            done.append(True)
            yield 0

        errors: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        slices.begin(fail())
        slices.begin(work())
        while not done:
            await asyncio.sleep(0)
        assert [str(error) for error in errors] == ["it has a bug"]

    run(test())


def test_moving_a_thousand_requests_leaves_the_event_loop_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process is killed and comes back, a replica drains, all die: in each turn of the loop,
    hardly more requests are sent or taken than a slice has."""
    sent = Counter[int]()
    send = WorldProcess.send

    def counting_send(self: WorldProcess, command: m.Command) -> None:
        if isinstance(command, m.Add | m.Abort):
            loop = asyncio.get_running_loop()
            assert isinstance(loop, JumpingLoop)
            sent[loop.num_turns] += 1
        send(self, command)

    async def test() -> None:
        world = World(7, num_blocks=4000)
        async with world.serve(
            3, Supervision(max_waiting=1 << 20), max_num_seqs=16, overlap=True
        ) as client:
            asked = [ask(world.draw) for _ in range(1000)]
            tasks = [asyncio.create_task(each.check(client)) for each in asked]
            while len(client.open_requests) < len(asked):
                await asyncio.sleep(0)

            async def settle(num_least: int) -> None:
                for _ in range(3):
                    for process in [*world.processes]:
                        process.accept()
                    for _ in range(200):
                        await asyncio.sleep(0)
                assert sum(sent.values()) > num_least, "many were moved"
                # A request that is moved is an Abort and an Add. Work that takes no more than a
                # slice, such as one of few requests, is done at once, beside another slice.
                assert max(sent.values()) <= 2 * (SLICE_UNITS + 16)
                sent.clear()

            for _ in range(200):
                await asyncio.sleep(0)
            sent.clear()
            first, second, _ = client.replicas
            process = world.process_of(first)
            assert process is not None
            monkeypatch.setattr(WorldProcess, "send", counting_send)
            process.die(KILL)
            await settle(250)
            while not first.is_serving:
                await asyncio.sleep(0.1)
            await world.turn(first)  # it has computed something, so it gets its share
            await settle(100)
            client.drainer.begin(DrainOrder([second.number]))
            await settle(400)
            while client.drainer.is_running:
                await asyncio.sleep(0.1)
            await settle(100)
            for process in [*world.processes]:
                process.die(KILL)
            while any(replica.is_serving for replica in client.replicas):
                await asyncio.sleep(0)
            while not all(replica.is_serving for replica in client.replicas):
                await asyncio.sleep(0.1)
            await settle(900)
            await world.finish(tasks)
            for task in tasks:
                task.result()
            await world.check_nothing_is_left()

    run(test())
