"""When to plan the next step: late enough for newcomers, early enough to keep the device busy.

With overlap the next step is planned while one computes. Planned at once, it would miss every
request that arrives meanwhile, and these would wait for a whole step more. What planning takes and
how long steps of decodes last is measured; a step with prompts lasts longer than these, so the
device never waits for the host because of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.core.step import StepPlan, StepResult

SMOOTHING = 0.2  # weight of the newest measurement
MARGIN = 5e-4  # seconds, for what varies


class Pacer:
    """Owns what has been measured of the steps so far."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._started = clock()  # when the step that computes now began, at the latest
        self._planning = 0.0  # seconds of the host to plan and start a step of decodes
        self._computing = 0.0  # seconds of the device for the last step of decodes

    def linger(self) -> None:
        """Return when the step under way has little more than the time of planning left."""
        end = self._started + self._computing - self._planning - MARGIN
        left = end - self._clock()
        if left > 0:
            self._sleep(left)

    def began(self) -> float:
        """The time before planning, for `planned`."""
        return self._clock()

    def planned(self, plan: StepPlan, began: float, is_first: bool) -> None:
        """A step has been started; `is_first`: the device had nothing to do before."""
        now = self._clock()
        if is_first:
            self._started = now
        if plan.only_decodes:
            self._planning += SMOOTHING * (now - began - self._planning)

    def finished(self, plan: StepPlan, result: StepResult) -> None:
        """The device has just gone on to the next step."""
        self._started = self._clock()
        if plan.only_decodes:
            self._computing = result.compute_seconds
