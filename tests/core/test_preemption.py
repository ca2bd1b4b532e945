"""What it costs to take a request off the device is learnt from the steps that have run, and its
sequences are rebuilt the way they were forked."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from core.worlds import World, compute, make_manager, make_sequence, preempt, sampling
from octavo.core.block_table import BlockTable
from octavo.core.kv import manager
from octavo.core.kv.specs import FullAttention, KVSpec, SlidingWindow
from octavo.core.policies import FairShare
from octavo.core.preemption import (
    SMOOTHING,
    PreemptionCosts,
    prepare_rebuild,
    rebuild_goals,
    take_ready_forks,
)
from octavo.core.sequence import Request, Sequence, Status
from octavo.core.step import SamplingSpec, StepPlan, StepResult


def step(
    num_tokens: list[int],
    num_moved: int = 0,
    compute_seconds: float = 0.0,
    swap_seconds: float = 0.0,
) -> tuple[StepPlan, StepResult]:
    moves = [(i, i) for i in range(num_moved)]
    plan = StepPlan(
        0, list(range(len(num_tokens))), num_tokens, [], [], swap_out=moves[1:], swap_in=moves[:1]
    )
    result = StepResult(0, [], compute_seconds=compute_seconds, swap_seconds=swap_seconds)
    return plan, result


def test_costs_move_towards_what_was_measured() -> None:
    """Of three blocks moved in 3 s, two went out and one came in."""
    costs = PreemptionCosts(seconds_per_token=0.5, seconds_per_block=0.25)
    costs.observe(*step([1, 9], num_moved=3, compute_seconds=20.0, swap_seconds=3.0))
    assert costs.seconds_per_token == pytest.approx(0.5 + SMOOTHING * (2.0 - 0.5))
    assert costs.seconds_per_block == pytest.approx(0.25 + SMOOTHING * (1.0 - 0.25))


@pytest.mark.parametrize(
    ("num_tokens", "num_moved", "compute_seconds", "swap_seconds"),
    [
        ([4, 4], 0, 20.0, 3.0),  # hardly more than decodes, and nothing moved
        ([9], 3, 0.0, 0.0),  # nothing was measured
        ([], 0, 0.0, 0.0),
    ],
)
def test_steps_that_say_nothing_about_costs(
    num_tokens: list[int], num_moved: int, compute_seconds: float, swap_seconds: float
) -> None:
    costs = PreemptionCosts()
    costs.observe(*step(num_tokens, num_moved, compute_seconds, swap_seconds))
    assert costs == PreemptionCosts()


def test_swapping_goes_both_ways() -> None:
    costs = PreemptionCosts(seconds_per_token=0.5, seconds_per_block=0.25)
    assert costs.recompute_seconds(6) == 3.0
    assert costs.swap_seconds(6) == 3.0


@pytest.mark.parametrize(
    ("specs", "seconds_per_block", "mode"),
    [
        ([FullAttention()], 2.5, "recompute"),  # 12 blocks, twice: 60 s
        ([FullAttention()], 1.5, "swap"),
        ([FullAttention(), *[SlidingWindow(100)] * 6], 0.5, "recompute"),  # 84 blocks: 84 s
        ([SlidingWindow(8)], 2.5, "swap"),  # 2 blocks: 10 s
    ],
)
def test_tokens_are_recomputed_once_whatever_blocks_they_are_in(
    specs: list[KVSpec], seconds_per_block: float, mode: str
) -> None:
    """Samples share 48 of them; groups have blocks of their own, and windows have left some."""
    kv = make_manager(100, num_swap_blocks=100, specs=specs)
    first, *others = [make_sequence(number, [1] * 48) for number in range(4)]
    compute(kv, first)
    kv.settle(first, 48)
    for other in others:
        kv.fork(first, other)
    assert PreemptionCosts(1.0, seconds_per_block).choose([first, *others], kv) == mode


class Token(int):
    """A token that counts how often it is compared."""

    num_compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Token.num_compared += 1
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other


def test_samples_are_rebuilt_with_few_looks_at_what_they_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of 32 samples is compared with the one that it follows, behind their prompt; every
    fourth begins like the first one of its kind, for 100 tokens."""
    monkeypatch.setattr(Token, "num_compared", 0)
    prompt = list(range(2000))
    request = Request("r", prompt, sampling(32, 4000), SamplingSpec())
    for index in range(32):
        output = [index % 4] * 100 + [10 + index] * 100
        token_ids: list[int] = [Token(token_id) for token_id in prompt + output]
        request.sequences.append(Sequence(index, request, token_ids, index))
    leader, *others = request.sequences
    prepare_rebuild(request)
    assert rebuild_goals(request.sequences)[leader] == 2000
    leader.table, leader.num_computed_tokens = BlockTable(1), 2000
    ready = take_ready_forks(request.sequences)
    assert [follower.sample_index for _, follower in ready] == [1, 2, 3]
    assert [seq.leader for seq in others[3:]] == [request.sequences[i % 4] for i in range(4, 32)]
    assert {seq.branch_at for seq in others[3:]} == {2100}
    assert Token.num_compared < 2 * 32 * 400  # in two rounds


def test_a_sample_that_ends_where_others_branch_leads_none_of_them() -> None:
    """Its last token is theirs, too, but is still to be computed."""
    request = Request("r", [1, 2], sampling(4, 10), SamplingSpec())
    for index, output in enumerate([[5, 6], [7], [7, 8, 9], [7, 8, 4]]):
        request.sequences.append(Sequence(index, request, [1, 2, *output], index))
    leader, short, first, second = request.sequences
    prepare_rebuild(request)
    leader.table, leader.num_computed_tokens = BlockTable(1), 2
    assert take_ready_forks(request.sequences) == [(leader, short), (leader, first)]
    assert second.leader is first
    assert second.branch_at == 4


def test_each_sample_is_looked_at_a_few_times_in_a_step_that_rebuilds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All 64 have forked off, and compute what each of them had drawn."""
    num_samples, num_looks = 64, 0
    world = World(num_blocks=2000, max_num_seqs=num_samples, max_num_batched_tokens=100)
    gang = world.add("gang", 8, 40, n=num_samples)
    while gang.sequences[0].num_output_tokens < 20:
        world.step()
    preempt(world, gang, "recompute")
    while any(seq.table is None for seq in gang.sequences):
        world.step()
    assert gang.catching_up
    slot = Sequence.leader

    def counted(seq: Sequence) -> Sequence | None:
        nonlocal num_looks
        num_looks += 1
        leader: Sequence | None = slot.__get__(seq)
        return leader

    monkeypatch.setattr(Sequence, "leader", property(counted, slot.__set__))
    world.scheduler.schedule()
    assert num_looks <= 3 * num_samples


def test_blocks_of_a_swapped_request_are_not_looked_at_while_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(num_blocks=8, num_swap_blocks=8, enable_prefix_caching=False)
    world.add("first", 8, 24)
    second = world.add("second", 8, 8)
    world.step()
    preempt(world, second, "swap")
    num_looks = 0

    def counted(seqs: list[Sequence]) -> list[int]:
        nonlocal num_looks
        num_looks += 1
        return distinct(seqs)

    distinct = manager._distinct
    monkeypatch.setattr(manager, "_distinct", counted)
    monkeypatch.setattr(world.scheduler, "_watermark", 8)  # it does not come back meanwhile
    for _ in range(5):
        world.step()
    assert second.status is Status.SWAPPED
    assert num_looks == 0
    world.run()
    assert num_looks == 1


def test_swapped_requests_are_sorted_once_for_all_that_may_pass_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(11, num_swap_blocks=11, policy="fair", enable_prefix_caching=False)
    world.add("first", 16, 20, tenant="a")
    second = world.add("second", 20, 20, tenant="a")
    world.step()
    preempt(world, second, "swap")
    monkeypatch.setattr(world.scheduler, "_watermark", 1)
    others = [world.add(f"r{i}", 2, 2, tenant="b") for i in range(4)]
    policy, num_sorted = world.scheduler.policy, 0
    assert isinstance(policy, FairShare)
    policy._tenants["a"].counter += 100
    victims = policy.victims

    def counted(requests: list[Request]) -> Seq[Request]:
        nonlocal num_sorted
        num_sorted += requests is world.scheduler.swapped
        return victims(requests)

    monkeypatch.setattr(policy, "victims", counted)
    world.step()
    assert second.status is Status.SWAPPED
    assert all(other.status is not Status.WAITING for other in others)
    assert num_sorted == 3  # to resume some, to displace running ones, and to admit waiting ones
    world.run()
