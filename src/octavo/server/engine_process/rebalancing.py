"""The order in which a replica that serves again, or in which nothing waits, is offered what waits
at the others.

The busiest replica offers first, and its requests in the order in which it would begin with them.
So those that have waited longest are helped first, and under the policy "fair" all tenants alike.
Whether a request moves is up to the router.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Protocol, TypeVar

from octavo.config import SchedulerConfig
from octavo.server.engine_process.journal import OpenRequest


class Donor(Protocol):
    """A replica that may have too much to do."""

    load: int

    def movable(self) -> Iterable[OpenRequest]:
        """The requests that may leave it without losing anything."""


D = TypeVar("D", bound=Donor)


def offers(donors: Sequence[D], scheduling: SchedulerConfig) -> Iterator[tuple[D, OpenRequest]]:
    """Every waiting request once, with the replica that has it: the next one of the replica with
    the highest load at the moment, which the caller changes by moving requests."""
    queues = [(donor, deque(in_turn(donor.movable(), scheduling))) for donor in donors]
    while queues := [(donor, queue) for donor, queue in queues if queue]:
        donor, queue = max(queues, key=lambda each: each[0].load)
        yield donor, queue.popleft()


def in_turn(entries: Iterable[OpenRequest], scheduling: SchedulerConfig) -> Iterator[OpenRequest]:
    """Requests in the order in which an engine that has none but these would begin with them.

    Under "fair", tenants take turns by the tokens of their requests; the requests of each, and all
    of them under the other policies, come in order of arrival, corrected by their priorities under
    "priority".
    """
    seconds_per_level = scheduling.aging_seconds if scheduling.policy == "priority" else 0.0
    ordered = sorted(
        entries, key=lambda each: each.request.priority * seconds_per_level + each.arrival_time
    )
    if scheduling.policy != "fair":
        yield from ordered
        return
    queues: dict[str, deque[OpenRequest]] = {}
    for entry in ordered:
        queues.setdefault(entry.request.tenant, deque()).append(entry)
    turns = [(0, place, queue) for place, queue in enumerate(queues.values())]  # a heap
    while turns:
        num_tokens, place, queue = heappop(turns)
        entry = queue.popleft()
        if queue:
            heappush(turns, (num_tokens + entry.load, place, queue))
        yield entry
