"""In which order requests run, and which of them may push another one out."""

from __future__ import annotations

from typing import Protocol

from octavo.config import SchedulerConfig
from octavo.core.sequence import Request


class SchedulingPolicy(Protocol):
    """Decides order; the scheduler decides what fits. Extend here: one class, one line below."""

    displaces: bool  # whether a waiting request may ever displace a running one

    def rank(self, request: Request) -> tuple[float, ...]:
        """The lowest rank runs first and is preempted last. Constant while a request lives."""

    def level(self, request: Request, now: float) -> float:
        """The urgency that a request is admitted with, and keeps while it runs."""

    def may_displace(self, waiting: Request, running: Request) -> bool:
        """Whether `running` may be preempted to make room for `waiting`."""


class FirstComeFirstServed:
    """Requests run in the order of arrival, the last to come is preempted (paper section 4.5)."""

    displaces = False

    def __init__(self, config: SchedulerConfig) -> None:
        pass

    def rank(self, request: Request) -> tuple[float, ...]:
        return (request.arrival_time, request.number)

    def level(self, request: Request, now: float) -> float:
        return 0.0

    def may_displace(self, waiting: Request, running: Request) -> bool:
        return False


class Priority:
    """The lowest `priority` runs first; waiting raises it one level every `aging_seconds`.

    Two waiting requests age at the same pace, so their order never changes and the rank is
    constant. A request keeps the level that it was admitted with: it is displaced only by one
    whose own priority is better than that, never by one that has merely waited long.
    """

    displaces = True

    def __init__(self, config: SchedulerConfig) -> None:
        self._aging_seconds = config.aging_seconds

    def rank(self, request: Request) -> tuple[float, ...]:
        return (request.priority * self._aging_seconds + request.arrival_time, request.number)

    def level(self, request: Request, now: float) -> float:
        waited = max(0.0, now - request.arrival_time)
        return request.priority - waited // self._aging_seconds

    def may_displace(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.level


POLICIES: dict[str, type[FirstComeFirstServed] | type[Priority]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
}
