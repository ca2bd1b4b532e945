"""What it costs to take a request off the device is learnt from the steps that have run, and its
sequences are rebuilt the way they were forked."""

from __future__ import annotations

import pytest

from core.worlds import World, preempt, sampling
from octavo.core.block_table import BlockTable
from octavo.core.preemption import (
    SMOOTHING,
    PreemptionCosts,
    prepare_rebuild,
    rebuild_goals,
    take_ready_forks,
)
from octavo.core.sequence import Request, Sequence
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
