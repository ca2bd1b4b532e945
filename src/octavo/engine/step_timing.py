"""When to plan the next step: late enough for newcomers, early enough to keep the device busy.

With overlap the next step is planned while one computes. Planned at once, it would miss every
request that arrives meanwhile, and these would wait for a whole step more. What planning takes, how
long steps of decodes last and what each prompt token adds is measured, the last with care: a step
that is over before the host has planned the next one leaves the device without work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from octavo.core.step import StepPlan, StepResult

SMOOTHING = 0.2  # weight of the newest measurement
MARGIN = 5e-4  # seconds, for what varies
MIN_PROMPT_TOKENS = 16  # of a step whose price is learnt
SIZES_AN_OCTAVE = 2  # each with its price: few tokens cost little more than reading the weights
CAUTION = 0.97  # share of the price that is counted on
AT_ONCE = 3e-4  # seconds: a result that took no longer was there before it was asked for
FORGETTING = 1.05, 1e-7  # how the lowest price may rise with a step: times, and plus seconds


class Price(NamedTuple):
    """The least that a prompt token has added to steps of one size."""

    seconds: float
    num_steps: int


class Pacer:
    """Owns what has been measured of the steps so far."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._started = clock()  # when the step that computes now began
        self._asked = self._started  # when its result was asked for
        self._planning = 0.0  # seconds of the host to plan and start a step of decodes
        self._computing = 0.0  # seconds of the device for the last step of decodes
        self._prompt_tokens = 0  # of the step that computes now, beyond one a sequence
        self._prices: dict[int, Price] = {}  # by the size of the step

    def linger(self) -> None:
        """Return when the step under way has little more than the time of planning left."""
        prompts = self._price(self._prompt_tokens) * self._prompt_tokens
        end = self._started + self._computing + CAUTION * prompts - self._planning - MARGIN
        left = end - self._clock()
        if left > 0:
            self._sleep(left)

    def began(self) -> float:
        """The time before planning, for `planned`."""
        return self._clock()

    def planned(self, plan: StepPlan, began: float, is_first: bool) -> None:
        """A step has been started; `is_first`: the device had nothing to do before."""
        now = self._clock()
        self._prompt_tokens = _num_prompt_tokens(plan)
        if is_first:  # it has begun before the last of it was launched
            self._started = min(now, began + self._planning)
        if plan.only_decodes:
            self._planning += SMOOTHING * (now - began - self._planning)

    def waits(self) -> None:
        """The host has nothing to do before it has the result of the step that computes now."""
        self._asked = self._clock()

    def finished(self, plan: StepPlan, result: StepResult) -> None:
        """That result is there; the device has gone on to the next step.

        It did so just now if the host had to wait. Else the host was late: launching what is not
        captured can take it longer than a step.
        """
        now = self._clock()
        if now - self._asked > AT_ONCE:
            self._started = now
        else:
            self._started = min(now, self._started + result.compute_seconds)
        if plan.only_decodes:
            self._computing = result.compute_seconds
        elif self._computing:
            self._learn_price(_num_prompt_tokens(plan), result.compute_seconds - self._computing)

    def _learn_price(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step took so much longer for its prompts."""
        if num_prompt_tokens < MIN_PROMPT_TOKENS:
            return
        size = _size(num_prompt_tokens)
        price = max(0.0, seconds) / num_prompt_tokens
        old = self._prices.get(size)
        if old is not None:
            price = min(price, FORGETTING[0] * old.seconds + FORGETTING[1])
        self._prices[size] = Price(price, 1 if old is None else old.num_steps + 1)

    def _price(self, num_prompt_tokens: int) -> float:
        """Of each, seconds. Prices rise with the size: what is known of smaller steps is not too
        much. One step alone tells nothing; something else may have kept it up."""
        if num_prompt_tokens < MIN_PROMPT_TOKENS:
            return 0.0
        limit = _size(num_prompt_tokens)
        known = [s for s, price in self._prices.items() if s <= limit and price.num_steps > 1]
        return self._prices[max(known)].seconds if known else 0.0


def _size(num_prompt_tokens: int) -> int:
    return math.floor(SIZES_AN_OCTAVE * math.log2(num_prompt_tokens))


def _num_prompt_tokens(plan: StepPlan) -> int:
    return plan.num_tokens - len(plan.seq_ids)
