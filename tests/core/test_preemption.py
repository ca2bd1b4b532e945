"""What it costs to take a request off the device is learnt from the steps that have run."""

from __future__ import annotations

import pytest

from octavo.core.preemption import SMOOTHING, PreemptionCosts
from octavo.core.step import StepPlan, StepResult


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
