"""The pacer on a clock of its own."""

from __future__ import annotations

from octavo.core.step import StepPlan, StepResult
from octavo.engine.pacing import MARGIN, Pacer

DECODES = StepPlan(0, [1, 2], [1, 1], [1, 2], [])
PROMPT = StepPlan(1, [1, 3], [1, 50], [1, 3], [])


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


def test_steps_with_prompts_teach_nothing() -> None:
    clock = Clock()
    pacer = Pacer(clock, clock.sleep)
    began = pacer.began()
    clock.now += 1.0
    pacer.planned(PROMPT, began, is_first=True)
    pacer.finished(PROMPT, StepResult(1, [5, 5], compute_seconds=2.0))
    started = clock.now
    pacer.linger()
    assert clock.now == started
