"""Scheduling policies: the order of the queues, fair shares, and a policy made by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.worlds import World, sampling
from octavo.config import SchedulerConfig
from octavo.core.policies import FairShare, SchedulingPolicy
from octavo.core.queues import ReadyQueue
from octavo.core.sequence import Request, Sequence, Status
from octavo.core.step import SamplingSpec
from octavo.registry import POLICIES


def request(number: int, tenant: str = "", num_prompt_tokens: int = 4) -> Request:
    prompt = [1] * num_prompt_tokens
    made = Request(
        f"r{number}", prompt, sampling(1, 100), SamplingSpec(), arrival_time=number, tenant=tenant
    )
    made.number, made.order = number, (float(number), number)
    return made


class Counting(SchedulingPolicy):
    """Flows by tenant; a flow's key is raised by hand."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.served: dict[str, float] = {}
        self.num_keys = 0

    def flow(self, request: Request) -> str:
        return request.tenant

    def key(self, request: Request, now: float) -> tuple[float, ...]:
        self.num_keys += 1
        return (self.served.get(request.tenant, 0.0), *request.order)


# -------------------------------------------------------------------- the queue


@settings(max_examples=150, derandomize=True)
@given(seed=st.integers(0, 1 << 30))
def test_a_ready_queue_is_in_the_order_of_its_keys(seed: int) -> None:
    """Whatever is added, removed, passed or served, between two iterations or within one."""
    rng = random.Random(seed)
    policy = Counting(SchedulerConfig())
    queue = ReadyQueue(policy, lambda: 0.0)
    present: list[Request] = []
    for number in range(60):
        if rng.random() < 0.6:
            added = request(rng.randrange(1000) * 100 + number, rng.choice("abcd"))
            queue.add(added)
            present.append(added)
        elif present:
            removed = present.pop(rng.randrange(len(present)))
            queue.discard(removed)
            queue.discard(removed)  # a second time has no effect
        if rng.random() < 0.5:
            tenant = rng.choice("abcd")
            policy.served[tenant] = policy.served.get(tenant, 0.0) + 3 * rng.random()
        expected = sorted(present, key=lambda r: policy.key(r, 0.0))
        assert list(queue) == expected
        assert queue.first() == (expected[0] if expected else None)
        assert len(queue) == len(present)
        # Serve one after having passed a few: the order of the rest follows from its new key.
        for place, each in enumerate(queue):
            if place == 3:
                queue.discard(each)
                present.remove(each)
                policy.served[each.tenant] = policy.served.get(each.tenant, 0.0) + 5.0
                break


def test_a_step_evaluates_few_keys_of_a_long_queue() -> None:
    policy = Counting(SchedulerConfig())
    queue = ReadyQueue(policy, lambda: 0.0)
    for number in range(5000):
        queue.add(request(number, f"tenant {number % 1000}"))
    policy.num_keys = 0
    for _ in range(100):
        first = queue.first()
        assert first is not None
        queue.discard(first)
        policy.served[first.tenant] = policy.served.get(first.tenant, 0.0) + 1.0
    assert policy.num_keys <= 4 * 100


# -------------------------------------------------------------------- virtual token counters


def fair(**limits: int) -> FairShare:
    policy = FairShare(SchedulerConfig(policy="fair"))
    for name, value in limits.items():
        setattr(policy, name, value)
    return policy


def serve(policy: FairShare, served: Request, num_output_tokens: int = 0) -> None:
    policy.started(served, 0.0)
    policy.generated([Sequence(0, served, [1])] * num_output_tokens)


def test_prompts_and_outputs_are_charged_by_their_weights() -> None:
    policy = fair()
    first = request(0, "a", 10)
    policy.arrived(first)
    serve(policy, first, 3)
    assert policy.counters() == {"a": 10 + 2 * 3}
    serve(policy, first)  # it was preempted: its prompt is not charged again
    assert policy.counters() == {"a": 16}


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    policy = fair()
    busy = [request(i, "busy", 100) for i in range(3)]
    for each in busy:
        policy.arrived(each)
    lazy = request(5, "lazy", 1)
    policy.arrived(lazy)
    serve(policy, lazy)
    for each in busy[:2]:
        serve(policy, each)
    assert policy.counters() == {"busy": 200, "lazy": 1}
    policy.arrived(request(6, "lazy", 1))
    assert policy.counters() == {"busy": 200, "lazy": 200}
    policy.arrived(request(7, "new", 1))
    assert policy.counters()["new"] == 200


def test_a_tenant_that_finds_an_empty_queue_starts_where_the_last_one_left() -> None:
    policy = fair()
    first = request(0, "a", 50)
    policy.arrived(first)
    serve(policy, first, 5)
    policy.arrived(request(1, "b"))
    assert policy.counters() == {"a": 60, "b": 60}


@pytest.mark.parametrize("is_crowded", [False, True])
def test_idle_tenants_are_forgotten_without_gaining_by_it(is_crowded: bool) -> None:
    """Many of them come and go, alone or beside one that always has requests waiting, so that the
    floor does not rise by itself."""
    policy = fair(max_idle_tenants=100)
    number = 0
    if is_crowded:
        policy.arrived(request(-1, "waiting"))
    for number in range(20_000):
        guest = request(number, f"guest {number}", 10)
        policy.arrived(guest)
        serve(policy, guest)
        policy.finished(guest)
        assert len(policy.counters()) <= 102
        assert len(policy._idle) <= 101
        assert len(policy._lowest) <= 20
    policy.arrived(request(number + 1, "guest 0"))
    counters = policy.counters()
    assert counters["guest 0"] >= max(counters.values()) - 10


def test_a_tenant_above_the_floor_is_remembered() -> None:
    policy = fair()
    waiting = request(0, "waiting", 100)
    policy.arrived(waiting)
    greedy = request(1, "greedy", 500)
    policy.arrived(greedy)
    serve(policy, greedy)
    policy.finished(greedy)
    policy.arrived(request(2, "greedy", 1))
    assert policy.counters() == {"waiting": 0, "greedy": 500}


def test_tenants_without_requests_at_the_floor_are_forgotten() -> None:
    policy = fair()
    first = request(0, "a", 10)
    policy.arrived(first)
    serve(policy, first)
    policy.finished(first)
    assert policy.counters() == {}
    again = request(1, "a", 10)
    policy.arrived(again)
    assert policy.counters() == {"a": 10}
    policy.finished(again)  # aborted while it waits
    assert (policy.counters(), policy.num_requests()) == ({}, 0)


def flood(world: World, tenant: str, count: int, **lengths: int) -> list[Request]:
    return [world.add(f"{tenant}{i}", tenant=tenant, **lengths) for i in range(count)]


def test_two_backlogged_tenants_get_equal_service() -> None:
    """Whatever their requests look like, their counters differ by at most the bound: the longest
    prompt, or what the KV cache can hold."""
    world = World(
        num_blocks=30, policy="fair", max_num_seqs=6, enable_prefix_caching=False, watermark=0.01
    )
    policy = world.scheduler.policy
    assert isinstance(policy, FairShare)
    a = flood(world, "a", 60, num_prompt_tokens=20, num_output_tokens=4)
    b = flood(world, "b", 60, num_prompt_tokens=4, num_output_tokens=20)
    bound = max(policy.input_weight * 20, policy.output_weight * 30 * 4)
    counters = []
    while any(r.status is Status.WAITING for r in a) and any(r.status is Status.WAITING for r in b):
        world.step()
        counters.append(policy.counters())
    assert all(abs(each["a"] - each["b"]) <= bound for each in counters)
    assert len(counters) > 100
    service = {name: counters[-1][name] - counters[20][name] for name in "ab"}
    assert min(service.values()) > 500
    assert abs(service["a"] - service["b"]) <= 2 * bound
    world.run()


def test_a_late_tenant_is_next() -> None:
    world = World(num_blocks=40, policy="fair", max_num_seqs=2)
    flood(world, "flood", 20)
    world.step()
    late = world.add("late", tenant="late")
    while late.status is Status.WAITING:
        world.step()
    assert len([r for r in world.scheduler.waiting if r.tenant == "flood"]) >= 16
    world.run()


def test_requests_of_a_tenant_are_served_in_order_of_arrival() -> None:
    world = World(num_blocks=40, policy="fair", max_num_seqs=1, enable_prefix_caching=False)
    for i in range(4):
        for tenant in "ab":
            world.add(f"{tenant}{i}", tenant=tenant)
    finished = [request.request_id for request in world.run()]
    assert [name for name in finished if name[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert all(x[0] != y[0] for x, y in pairwise(finished)), "the tenants take turns"


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_tenant_that_has_most_is_preempted_and_passed(mode: str) -> None:
    """It came first; the other one's requests do not wait until it is back."""
    world = World(
        num_blocks=8,
        num_swap_blocks=8,
        policy="fair",
        preemption_mode=mode,
        enable_prefix_caching=False,
    )
    [rich] = flood(world, "rich", 1, num_prompt_tokens=14, num_output_tokens=14)
    world.step()
    poor = flood(world, "poor", 1, num_prompt_tokens=8, num_output_tokens=12)[0]
    policy = world.scheduler.policy
    assert isinstance(policy, FairShare)
    policy._tenants["poor"].counter = 0.0
    while not rich.num_preemptions:
        world.step()
    assert poor.num_preemptions == 0
    assert (rich.status, poor.status) == (
        Status.SWAPPED if mode == "swap" else Status.WAITING,
        Status.RUNNING,
    )
    late = world.add("late", 2, 1, tenant="poor")
    world.step()
    assert (rich.num_preemptions, late.status) == (1, Status.FINISHED)
    world.run()


# -------------------------------------------------------------------- docs/extending.md


class EarliestDeadlineFirst(SchedulingPolicy):
    """A deadline, `priority` seconds after arrival. Requests that have missed theirs come last."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._chunk = config.max_num_batched_tokens // 2

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.arrival_time + request.priority, request.number)

    def flow(self, request: Request) -> str:
        return request.request_id  # any two may change places

    def key(self, request: Request, now: float) -> tuple[float, ...]:
        return (now > request.order[0], *request.order)

    def prefill_quota(self, waiting: Seq[Request]) -> int | None:
        return self._chunk


def test_a_policy_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that come closer, miss, and a quota of their own, in one class."""
    monkeypatch.setitem(POLICIES._entries, "deadline", EarliestDeadlineFirst)
    world = World(num_blocks=40, policy="deadline", max_num_seqs=1, enable_prefix_caching=False)
    for name, seconds in [("running", 2), ("late", 100), ("missed", 3), ("soon", 20)]:
        world.add(name, 4, 6, priority=seconds)
    finished = [request.request_id for request in world.run()]
    assert finished == ["running", "soon", "late", "missed"]
    world = World(
        num_blocks=40, policy="deadline", max_num_batched_tokens=16, enable_prefix_caching=False
    )
    for name in "abc":
        world.add(name, 4, 2, priority=9)
    plan, _ = world.step()
    assert plan.num_scheduled_tokens == [4, 4]
