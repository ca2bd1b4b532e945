"""Requests that wait for what another one computes: however many, they cost a step little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from core.worlds import BLOCK_SIZE, World
from octavo.core import plan_builder
from octavo.core.invariants import check_scheduler
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_cache import sha256_128
from octavo.core.kv.prefix_matcher import PrefixHit
from octavo.core.plan_builder import PlanBuilder
from octavo.core.scheduler import MAX_DEFERRALS
from octavo.core.sequence import Request, Sequence, Status

SHARED = [3] * 10 * BLOCK_SIZE


def crowd(world: World, size: int) -> list[Request]:
    """The first computes the prefix that all share, in the first step."""
    return [
        world.add(
            f"r{i}", prompt=[*SHARED, i % 7, i // 7 % 7], num_output_tokens=30 if i == 0 else 1
        )
        for i in range(size)
    ]


def start_step(world: World) -> None:
    """Plan and compute a step whose result is taken in later."""
    plan = world.scheduler.schedule()
    check_scheduler(world.scheduler)
    assert plan is not None
    world.under_way.append((plan, world.executor.execute(plan)))


def deferred_crowd(size: int) -> tuple[World, list[Request]]:
    """All but the first wait for it."""
    world = World(num_blocks=200, max_num_seqs=16)
    requests = crowd(world, size)
    for _ in range(size // MAX_DEFERRALS + 1):
        start_step(world)
    assert world.names("waiting") == [request.request_id for request in requests[1:]]
    assert not world.scheduler.queues.ready
    world.depth = len(world.under_way)
    return world, requests


def test_a_step_looks_at_few_that_wait_for_a_prefix_and_at_none_of_them_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor do they keep a stranger waiting who comes after them."""
    names: list[str] = []
    original = KVCacheManager.lookup

    def lookup(self: KVCacheManager, seq: Sequence, *limits: int | None) -> PrefixHit:
        names.append(seq.request.request_id)
        return original(self, seq, *limits)

    monkeypatch.setattr(KVCacheManager, "lookup", lookup)
    world = World(num_blocks=200, max_num_seqs=16)
    crowd(world, 9 * MAX_DEFERRALS)
    stranger = world.add("stranger", prompt=[5, 5], num_output_tokens=9)
    for number in range(1, 13):
        start_step(world)
        assert len(names) <= number * (MAX_DEFERRALS + 1)
        assert stranger.status is (Status.WAITING if number < 9 else Status.RUNNING)
    assert sorted(names) == sorted(world.scheduler.requests)
    world.depth = len(world.under_way)
    assert len(world.run()) == 9 * MAX_DEFERRALS + 1
    assert world.executor.num_computed < 2000  # the prefix once


@pytest.mark.parametrize("is_chunked", [True, False])
def test_without_a_free_slot_no_waiting_request_is_looked_up(
    is_chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one that would have a step without the running requests."""
    world = World(max_num_seqs=1, max_num_batched_tokens=4, enable_chunked_prefill=is_chunked)
    world.add("running")
    world.add("waiting")
    looked_up: list[str] = []
    original = KVCacheManager.lookup

    def lookup(self: KVCacheManager, seq: Sequence, *limits: Any) -> PrefixHit:
        looked_up.append(seq.request.request_id)
        return original(self, seq, *limits)

    monkeypatch.setattr(KVCacheManager, "lookup", lookup)
    world.step()
    world.step()
    assert looked_up == ["running"]


def test_only_as_many_are_recalled_as_a_step_could_admit() -> None:
    world, _ = deferred_crowd(300)
    queues = world.scheduler.queues
    world.scheduler.update(*world.under_way.popleft())  # the prefix is there
    slots = queues.num_free_slots
    world.scheduler.schedule()
    num_started = slots - queues.num_free_slots
    assert num_started > 0
    assert len(queues.ready) + num_started <= slots + MAX_DEFERRALS


def test_requests_that_have_ended_do_not_delay_those_behind_them() -> None:
    world, requests = deferred_crowd(300)
    for request in requests[1:-1]:
        world.scheduler.abort(request.request_id)
    world.scheduler.update(*world.under_way.popleft())  # the prefix is there
    world.scheduler.schedule()
    assert world.names("running") == ["r0", "r299"]


def end_by_abort(world: World, leader: Request) -> None:
    world.scheduler.abort(leader.request_id)


def end_by_preemption(world: World, leader: Request) -> None:
    builder = PlanBuilder(0)
    builder.in_flight = world.scheduler.in_flight[max(world.scheduler.in_flight)]
    world.scheduler._preempt(leader, builder)


@pytest.mark.parametrize("end", [end_by_abort, end_by_preemption])
def test_a_crowd_goes_on_without_the_one_that_it_waited_for(
    end: Callable[[World, Request], None],
) -> None:
    """Its prefix is computed once more, by the next of them."""
    world, requests = deferred_crowd(100)
    before = world.executor.num_computed
    end(world, requests[0])
    check_scheduler(world.scheduler)
    world.depth = 1
    while world.under_way:
        world.scheduler.update(*world.under_way.popleft())
    finished = world.run()
    assert set(requests[1:]) <= set(finished)
    assert world.executor.num_computed - before < 2 * len(SHARED) + 100 * 3 + 30


def test_one_that_is_aborted_while_it_waits_is_not_looked_at_again() -> None:
    world, requests = deferred_crowd(10)
    for request in requests[3:7]:
        world.scheduler.abort(request.request_id)
    check_scheduler(world.scheduler)
    assert {r.request_id for r in world.run()} == {"r0", "r1", "r2", "r7", "r8", "r9"}


def test_a_long_prompt_is_named_over_several_steps_while_others_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(num_blocks=60)
    world.add("first", prompt=SHARED, num_output_tokens=1)
    world.run()
    world.add("decoding", 2, 20)
    world.step()
    monkeypatch.setattr(plan_builder, "MAX_HASHES", 3)
    again = world.add("again", prompt=[*SHARED, 0], num_output_tokens=1)
    [leader] = again.sequences
    for num_named in (3, 6, 9):
        plan, _ = world.step()
        assert plan.num_scheduled_tokens == [1]
        assert (again.status, len(leader.prefix_nodes)) == (Status.WAITING, num_named)
    world.step()
    assert (again.status, again.num_cached_tokens) == (Status.FINISHED, len(SHARED))
    world.run()
    alone = world.add("alone", prompt=[*SHARED, 0], num_output_tokens=1)
    world.step()  # no one waits for it to be named
    assert alone.num_cached_tokens == len(SHARED)


def test_names_that_one_prompt_leaves_go_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(num_blocks=60)
    cached = [SHARED, [4] * 10 * BLOCK_SIZE]
    for number, prompt in enumerate(cached):
        world.add(f"first {number}", prompt=prompt, num_output_tokens=1)
    world.run()
    world.add("decoding", 2, 20)
    world.step()
    monkeypatch.setattr(plan_builder, "MAX_HASHES", 6)
    prompts = [world.add(f"r{i}", prompt=[*prompt, i]) for i, prompt in enumerate(cached)]
    named = []
    for _ in range(2):
        world.step()
        named.append([len(request.sequences[0].prefix_nodes) for request in prompts])
    assert named == [[6, 0], [10, 2]]
    world.run()


def test_many_prompts_of_a_long_cached_prefix_start_together() -> None:
    """200 prompts of 64 cached blocks each: a step starts 40 or more of them."""
    world = World(num_blocks=2000, max_num_seqs=600, max_num_batched_tokens=8192)
    prefix = [3] * 64 * BLOCK_SIZE
    world.add("first", prompt=prefix, num_output_tokens=1)
    world.run()
    world.add("decoding", 2, 40)
    world.step()
    for i in range(200):
        world.add(f"r{i}", prompt=[*prefix, 100 + i], num_output_tokens=6)
    for _ in range(4):
        plan, _ = world.step()
        assert len(plan.opened) >= 40
    world.run()


def test_a_waiting_prompt_is_hashed_once() -> None:
    """It is looked up whenever a block comes free."""
    hashed: list[bytes] = []

    def digest(content: bytes) -> bytes:
        hashed.append(content)
        return sha256_128(content)

    world = World(num_blocks=12, max_num_seqs=8, preemption_mode="recompute")
    world.kv.prefix_cache._digest = digest
    for i in range(6):
        world.add(f"r{i}", prompt=[i] * 10, num_output_tokens=6)
    world.run()
    assert max(r for r in world.scheduler.num_preemptions.values()) > 0
    blocks = [content for content in hashed if not content.startswith(b"octavo ")]
    assert len(blocks) == len(set(blocks))


def test_one_that_was_refused_may_share_the_blocks_of_another_that_has_started_since() -> None:
    """It then needs fewer than it was refused with, which need not come free first."""
    world = World(num_blocks=24)
    world.add("long", 4, 60)
    short = world.add("short", 24, 4)
    world.step()
    refused = world.add("refused", prompt=[*SHARED, *[1] * 6 * BLOCK_SIZE])
    world.step()
    num_free = world.kv.num_free_blocks
    assert num_free < 16
    other = world.add("other", prompt=[*SHARED, 2], num_output_tokens=40)
    while not short.is_finished:
        world.step()
    world.step()
    assert world.kv.num_free_blocks < num_free
    assert (refused.status, other.status) == (Status.RUNNING, Status.RUNNING)
    world.run()
