"""When to plan the next step: late enough to include new requests, early enough that the device
never idles.

With overlap, the next step is planned while one computes. If it were planned at once, it would miss
every request that arrives meanwhile, which would then wait for one more step. How long planning and
decode steps take and what each prompt token adds is measured. Estimates are cautious: if a step
ends before the host has planned the next one, the device idles.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from octavo.core.step import StepPlan, StepResult

SMOOTHING = 0.2  # weight of the newest measurement
# Weights of the newest time to plan a step: where it is above the estimate, and where it is below.
# The host may have to prepare one step of 16 in full (worker/model_runner.py), which takes several
# times as long as the others do. If that takes up to 4 ms, it is done in time, thanks to MARGIN.
RISING, FALLING = 0.5, 0.005
MARGIN = 5e-4  # seconds, for variation between steps
MIN_PROMPT_TOKENS = 16  # steps with fewer prompt tokens say nothing about the cost of a token
# The cost per prompt token is learnt separately for two sizes of step per power of two: a few
# tokens cost little more than reading the weights.
SIZES_PER_OCTAVE = 2
CAUTION = 0.97  # share of the estimated cost that is relied upon
AT_ONCE = 3e-4  # seconds: a result that took no longer was ready before it was waited for
FORGETTING = 1.05, 1e-7  # how far the lowest cost may rise per step: a factor, and seconds


class TokenCost(NamedTuple):
    """The least time that a prompt token has added to steps of one size."""

    seconds: float
    num_steps: int


class Pacer:
    """Owns the measurements of past steps, and waits until the next one should be planned."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._started = clock()  # when the step that is computing now began
        self._asked = self._started  # when the host began to wait for its result
        self._planning = 0.0  # host seconds to plan and submit a decode step
        self._launching = 0.0  # host seconds until it is started, if that is not part of submitting
        self._computing = 0.0  # device seconds of the last decode step
        self._prompt_tokens = 0  # of the step that is computing now: tokens beyond one per sequence
        self._costs: dict[int, TokenCost] = {}  # by the size of the step

    def linger(self) -> None:
        """Return when the step in flight has little more left than it takes to start the next."""
        prompts = self._token_cost(self._prompt_tokens) * self._prompt_tokens
        end = self._started + self._computing + CAUTION * prompts
        left = end - self._planning - self._launching - MARGIN - self._clock()
        if left > 0:
            self._sleep(left)

    def began(self) -> float:
        """The time before planning, for `planned`."""
        return self._clock()

    def planned(self, plan: StepPlan, began: float, is_first: bool) -> None:
        """A step has been submitted; `is_first`: the device was idle before."""
        now = self._clock()
        self._prompt_tokens = _num_prompt_tokens(plan)
        if is_first:  # it began before its last kernel was launched
            self._started = min(now, began + self._planning)
        if plan.only_decodes:
            # What takes longer than that is no planning: something was compiled, say.
            taken = min(now - began, 2 * self._planning + MARGIN)
            weight = RISING if taken > self._planning else FALLING
            self._planning += weight * (taken - self._planning)

    def waits(self) -> None:
        """The host begins to wait for the result of the step that is computing now."""
        self._asked = self._clock()

    def finished(self, plan: StepPlan, result: StepResult) -> None:
        """That result is there; the device has gone on to the next step.

        It did so just now if the host had to wait. Otherwise the host was late: launching kernels
        outside of CUDA graphs can take longer than a step.
        """
        now = self._clock()
        if now - self._asked - result.following_seconds > AT_ONCE:
            self._started = now - result.following_seconds
        else:
            self._started = min(now, self._started + result.compute_seconds)
        if plan.only_decodes:
            self._computing = result.compute_seconds
            self._launching += SMOOTHING * (result.launch_seconds - self._launching)
        elif self._computing:
            self._learn_cost(_num_prompt_tokens(plan), result.compute_seconds - self._computing)

    def _learn_cost(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step took `seconds` longer than a decode step, for its prompt tokens."""
        if num_prompt_tokens < MIN_PROMPT_TOKENS:
            return
        size = _size(num_prompt_tokens)
        cost = max(0.0, seconds) / num_prompt_tokens
        old = self._costs.get(size)
        if old is not None:
            cost = min(cost, FORGETTING[0] * old.seconds + FORGETTING[1])
        self._costs[size] = TokenCost(cost, 1 if old is None else old.num_steps + 1)

    def _token_cost(self, num_prompt_tokens: int) -> float:
        """Estimated seconds per prompt token. Costs rise with the size of the step, so that of the
        next smaller known size is no overestimate. A size that was measured only once is not
        used: something else may have delayed that step."""
        if num_prompt_tokens < MIN_PROMPT_TOKENS:
            return 0.0
        limit = _size(num_prompt_tokens)
        known = [s for s, cost in self._costs.items() if s <= limit and cost.num_steps > 1]
        return self._costs[max(known)].seconds if known else 0.0


def _size(num_prompt_tokens: int) -> int:
    return math.floor(SIZES_PER_OCTAVE * math.log2(num_prompt_tokens))


def _num_prompt_tokens(plan: StepPlan) -> int:
    return plan.num_tokens + plan.num_encoder_tokens - len(plan.seq_ids)
