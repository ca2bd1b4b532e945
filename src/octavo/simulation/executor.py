"""The executor of a simulation: made-up tokens, and the time from the cost model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from octavo.core.step import Candidates, StepPlan, StepResult
from octavo.executor.base import KVCapacity
from octavo.simulation.cost_model import CostModel
from octavo.simulation.step_shape import StepShape

TOKEN = 0  # what every sequence says, all the time


class VirtualClock:
    """Seconds from the start of a simulation; called like `time.monotonic`, and settable."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ShapeTracker(Protocol):
    """Sees every plan and says how much work it is."""

    def follow(self, plan: StepPlan) -> StepShape: ...


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step under way. The clock runs on to its end when its result is asked for."""

    outcome: StepResult
    end: float
    clock: VirtualClock

    def result(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.end)
        return self.outcome


class SimulatedExecutor:
    """Obeys no plan, but says how long it would have taken: a step begins when it is submitted and
    the one before it is over.

    Sampled tokens are all the same, so outputs must be forced to their lengths. Parallel samples
    begin with different tokens, as they part at once.

    Beams: a candidate's surprise (its negative log-probability) is that of the beam's likeliest
    token, drawn from an exponential distribution of mean 1, plus the gaps down to the candidate,
    each exponential with mean `beam_spacing`. Near 0, all survivors descend from one beam; if it is
    large, every beam goes on by itself.
    """

    def __init__(
        self,
        capacity: KVCapacity,
        cost_model: CostModel,
        clock: VirtualClock,
        tracker: ShapeTracker,
        beam_spacing: float = 1.0,
        seed: int = 0,
        is_asynchronous: bool = False,
    ) -> None:
        self.capacity = capacity
        self.is_asynchronous = is_asynchronous
        self.spans: list[tuple[float, float]] = []  # when each step began and ended
        # The number of running requests: set by the engine's owner, as a plan knows only sequences.
        self.count_requests: Callable[[], int] = lambda: 0
        self._cost_model = cost_model
        self._clock = clock
        self._tracker = tracker
        self._beam_spacing = beam_spacing
        self._last_end = 0.0
        self._random = random.Random(seed)
        self._num_draws: dict[int, int] = {}  # for rows that will draw more than one token
        self._num_candidates: dict[int, int] = {}  # for beams

    def submit(self, plan: StepPlan) -> SimulatedStep:
        shape = replace(self._tracker.follow(plan), num_requests=self.count_requests())
        result = StepResult(
            plan.step_id,
            [TOKEN] * len(plan.sampled),
            compute_seconds=self._cost_model.compute_seconds(shape),
            swap_seconds=self._cost_model.swap_seconds(shape),
        )
        self._follow_rows(plan)
        if self._num_draws:
            for seq_id in self._num_draws.keys() & set(plan.sampled):
                result.draws[seq_id] = list(range(self._num_draws.pop(seq_id)))
        if plan.expanded:
            number = max(self._num_candidates[seq_id] for seq_id in plan.expanded)
            logprobs = np.array([self._candidates(number) for _ in plan.expanded])
            token_ids = np.broadcast_to(np.arange(number), logprobs.shape)
            result.candidates = Candidates(token_ids, logprobs)
        start = max(self._clock.now, self._last_end)
        self._last_end = start + result.compute_seconds + result.swap_seconds
        self.spans.append((start, self._last_end))
        return SimulatedStep(result, self._last_end, self._clock)

    def check(self) -> None:
        """Nothing can fail."""

    def shutdown(self) -> None:
        """There is nothing to give back."""

    def _follow_rows(self, plan: StepPlan) -> None:
        for fork in plan.forks:
            if fork.parent_id in self._num_candidates:
                self._num_candidates[fork.child_id] = self._num_candidates[fork.parent_id]
        for seq_id in plan.closed:
            self._num_draws.pop(seq_id, None)
            self._num_candidates.pop(seq_id, None)
        for opened in plan.opened:
            if opened.num_draws > 1:
                self._num_draws[opened.seq_id] = opened.num_draws
            if opened.sampling.num_candidates:
                self._num_candidates[opened.seq_id] = opened.sampling.num_candidates

    def _candidates(self, count: int) -> list[float]:
        """Log-probabilities, best first; the ids of the tokens are their ranks."""
        draw = self._random.expovariate
        logprobs = [-draw(1.0)]
        for _ in range(1, count):
            logprobs.append(logprobs[-1] - draw(1.0) * self._beam_spacing)
        return logprobs
