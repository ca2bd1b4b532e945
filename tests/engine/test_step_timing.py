"""The pacer on a clock of its own."""

from __future__ import annotations

from octavo.core.step import StepPlan, StepResult
from octavo.engine.step_timing import CAUTION, FORGETTING, MARGIN, Pacer

DECODES = StepPlan(0, [1, 2], [1, 1], [1, 2], [])
PROMPT = StepPlan(1, [1, 3], [1, 101], [1, 3], [])  # 100 tokens more than decodes have


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def test_planning_waits_until_the_step_is_nearly_over() -> None:
    clock = Clock()
    pacer = Pacer(clock, clock.sleep)
    pacer.linger()
    assert clock.now == 0.0  # nothing is known yet
    for _ in range(60):  # planning takes 1 ms, a step 10 ms
        began = pacer.began()
        clock.now += 0.001
        pacer.planned(DECODES, began, is_first=False)
        clock.now += 0.009
        pacer.finished(DECODES, StepResult(0, [5, 5], compute_seconds=0.010))
    started = clock.now
    pacer.linger()
    assert abs(clock.now - started - (0.010 - 0.001 - MARGIN)) < 1e-5
    pacer.linger()  # the time has come already
    assert clock.now - started < 0.010


def test_planning_is_in_time_for_steps_that_the_host_prepares() -> None:
    """Of 17 steps the device goes on with 16 by itself; for one step something is compiled."""
    clock = Clock()
    pacer = Pacer(clock, clock.sleep)
    end = lingered = 0.0  # of the step that computes
    for step in range(340):
        taken = 0.0012 if step % 17 == 0 else 0.0003
        before = clock.now
        pacer.linger()
        lingered = clock.now - before
        began = pacer.began()
        clock.now += 2.0 if step == 20 else taken
        is_late = clock.now > end
        assert not is_late or step < 52, "the device need not wait"
        pacer.planned(DECODES, began, is_first=is_late)
        pacer.waits()
        clock.now = max(clock.now, end)
        pacer.finished(DECODES, StepResult(step, [5, 5], compute_seconds=0.005))
        end = max(clock.now, end) + 0.005
    assert lingered > 0.005 - 0.0012 - MARGIN


def test_a_step_that_another_process_starts_is_planned_earlier() -> None:
    clock = Clock()
    pacer = Pacer(clock, clock.sleep)
    for _ in range(60):
        pacer.planned(DECODES, pacer.began(), is_first=False)
        clock.now += 0.010
        result = StepResult(0, [5, 5], compute_seconds=0.010, launch_seconds=0.002)
        pacer.finished(DECODES, result)
    started = clock.now
    pacer.linger()
    assert abs(clock.now - started - (0.010 - 0.002 - MARGIN)) < 1e-5


def test_a_prompt_tells_nothing_before_decodes_do() -> None:
    clock = Clock()
    pacer = Pacer(clock, clock.sleep)
    began = pacer.began()
    clock.now += 1.0
    pacer.planned(PROMPT, began, is_first=True)
    pacer.finished(PROMPT, StepResult(1, [5, 5], compute_seconds=2.0))
    started = clock.now
    pacer.linger()
    assert clock.now == started


def test_a_step_with_prompts_is_waited_for_by_the_least_that_they_have_taken() -> None:
    clock = Clock()
    pacer = Pacer(clock, clock.sleep)
    pacer.finished(DECODES, StepResult(0, [5, 5], compute_seconds=0.010))
    for seconds in (0.900, 0.060, 0.070):  # the first one compiled something
        pacer.planned(PROMPT, pacer.began(), is_first=False)
        pacer.finished(PROMPT, StepResult(1, [5, 5], compute_seconds=seconds))
    pacer.planned(PROMPT, pacer.began(), is_first=False)
    started = clock.now
    pacer.linger()
    waited = clock.now - started
    assert waited + 1e-9 >= 0.010 + CAUTION * 0.050 - MARGIN
    assert waited < 0.010 + CAUTION * FORGETTING[0] * 0.051
    pacer.planned(DECODES, pacer.began(), is_first=True)
    started = clock.now
    pacer.linger()
    assert abs(clock.now - started - (0.010 - MARGIN)) < 1e-9


def test_short_and_long_prompts_have_prices_of_their_own() -> None:
    clock = Clock()
    pacer = Pacer(clock, clock.sleep)
    long_prompt = StepPlan(1, [1, 3], [1, 1001], [1, 3], [])
    longer_prompt = StepPlan(2, [1, 3], [1, 2001], [1, 3], [])
    pacer.finished(DECODES, StepResult(0, [5, 5], compute_seconds=0.010))
    for plan, seconds in ((PROMPT, 0.011), (long_prompt, 0.050)) * 2:  # 10 and 40 us a token
        pacer.finished(plan, StepResult(1, [5, 5], compute_seconds=seconds))
    pacer.finished(longer_prompt, StepResult(2, [5, 5], compute_seconds=9.0))  # once is not enough
    for plan, seconds in ((PROMPT, 0.001), (long_prompt, 0.040), (longer_prompt, 0.080)):
        pacer.planned(plan, pacer.began(), is_first=True)
        started = clock.now
        pacer.linger()
        assert abs(clock.now - started - (0.010 + CAUTION * seconds - MARGIN)) < 1e-9


def test_a_host_that_was_late_knows_when_the_step_began() -> None:
    clock = Clock()
    pacer = Pacer(clock, clock.sleep)
    pacer.finished(DECODES, StepResult(0, [5, 5], compute_seconds=0.010))
    began = pacer.began()
    clock.now += 0.040  # launching this step took longer than the step before did
    pacer.planned(DECODES, began, is_first=False)
    pacer.waits()
    pacer.finished(DECODES, StepResult(1, [5, 5], compute_seconds=0.010))
    late = clock.now
    pacer.linger()
    assert clock.now == late, "it began 30 ms ago"
    pacer.waits()
    clock.now += 0.005
    pacer.finished(DECODES, StepResult(2, [5, 5], compute_seconds=0.030))
    pacer.linger()
    assert clock.now > late + 0.005, "it has begun just now"


def test_a_prompt_that_seemed_to_cost_nothing_is_forgotten() -> None:
    clock = Clock()
    pacer = Pacer(clock, clock.sleep)
    for computing, steps in ((0.080, 1), (0.010, 150)):  # many decodes, then few
        pacer.finished(DECODES, StepResult(0, [5, 5], compute_seconds=computing))
        for _ in range(steps):
            pacer.finished(PROMPT, StepResult(1, [5, 5], compute_seconds=0.060))
    pacer.planned(PROMPT, pacer.began(), is_first=True)
    started = clock.now
    pacer.linger()
    assert abs(clock.now - started - (0.010 + CAUTION * 0.050 - MARGIN)) < 1e-9
