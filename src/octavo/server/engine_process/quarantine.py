"""Which replicas may run a request; finds the one that kills engine processes.

A request that was running when its engine process crashed is a suspect until it has got further.
If a second process in a row dies with it, it is quarantined: such requests run one at a time, each
without the others. Two rules keep a deadly request from taking all replicas down, one after the
other:

* At most one replica at a time runs suspects or quarantined requests.
* It is not the last one that serves while another one is being restarted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

from octavo.server.engine_process.journal import Journal, OpenRequest, Pin
from octavo.server.engine_process.process import Death

# How often a process must die with a request alone in it. A kill from outside may be chance, or the
# system's answer to a request that takes too much memory; a crash is the request's own doing.
MAX_KILLS_ALONE = 3
MAX_CRASHES_ALONE = 1


class Place(Protocol):
    """What decides whether a replica may run a request."""

    number: int

    @property
    def is_serving(self) -> bool:
        """Whether it takes requests now."""

    @property
    def is_coming(self) -> bool:
        """Whether it can be expected to serve soon."""


class Quarantine:
    """Owns the queue of requests that run alone. A request is quarantined when two processes in a
    row died while it was running and it had got no further in between."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._queue: deque[OpenRequest] = deque()
        self._ward: int | None = None  # the replica that runs the queue
        self._trial: int | None = None  # the one that runs suspects

    @property
    def first(self) -> OpenRequest | None:
        """The quarantined request that runs now, without the others and without new requests."""
        return self._queue[0] if self._queue else None

    @property
    def ward(self) -> int | None:
        """The replica that runs nothing but the quarantined requests, if there is one."""
        return self._ward

    # ---------------------------------------------------------------- where requests may run

    def allowed(self, entry: OpenRequest, places: Sequence[Place]) -> list[int]:
        """The replicas that may run a request now; if there are none, it waits."""
        serving = [place for place in places if place.is_serving]
        numbers = [place.number for place in serving]
        if entry.is_quarantined:
            if entry is not self.first:
                return []
            if self._ward in numbers:
                return [self._ward]
            busy = {other.replica for other in self._journal.requests.values()}
            empty = [place for place in _spared(serving, places) if place.number not in busy]
            return _elsewhere(empty, entry.last_death)
        if entry.is_suspect:
            if self._queue:
                return []
            if self._trial in numbers:
                return [self._trial]
            return _elsewhere(_spared(serving, places), entry.last_death)
        return [number for number in numbers if number != self._ward]

    def allowed_for_pin(self, pin: Pin, places: Sequence[Place]) -> list[int]:
        """The replicas that may compute a prefix for the first time. One at a time does."""
        serving = [place for place in places if place.is_serving and place.number != self._ward]
        if pin.num_deaths:
            return _elsewhere(_spared(serving, places), pin.last_death)
        return [place.number for place in serving]

    def placed(self, entry: OpenRequest, number: int) -> None:
        """A request was sent to a replica that was allowed."""
        if entry.is_quarantined:
            self._ward = number
        elif entry.is_suspect:
            self._trial = number

    def must_clear(self, places: Sequence[Place]) -> bool:
        """Whether the first quarantined request waits for a replica without other requests, and
        none will come by itself."""
        is_waiting = self.first is not None and self.first.replica is None
        return is_waiting and not any(place.is_coming for place in places)

    def contested(self) -> int | None:
        """The replica that runs suspects while the first quarantined request waits for one: only
        one of them may be at risk."""
        if self.first is None or self.first.replica is not None:
            return None
        entries = self._journal.requests.values()
        at_risk = (each.replica for each in entries if each.is_suspect)
        return next((number for number in at_risk if number is not None), None)

    def leave(self, number: int) -> None:
        """A replica has lost its requests."""
        if self._ward == number:
            self._ward = None
        if self._trial == number:
            self._trial = None

    # ---------------------------------------------------------------- deaths

    def note_death(
        self, number: int, death: Death, entries: Collection[OpenRequest]
    ) -> OpenRequest | None:
        """A replica's process has died that had these requests. Returns the one that must not be
        run again, if it is found."""
        # Requests are accepted in their order: the first that was not may be what it died of.
        in_hand = min(
            (entry for entry in entries if not entry.is_accepted),
            key=lambda entry: entry.ticket,
            default=None,
        )
        if in_hand is not None:
            in_hand.is_running = True
        running = [entry for entry in entries if entry.is_running]
        alone = running[0] if len(running) == 1 else self.first
        self.leave(number)
        for entry in entries:
            entry.note_death(not death.is_kill_from_outside)
        killer = None
        if alone is not None and alone in running and alone.is_quarantined:
            alone.num_deaths_alone += 1
            limit = MAX_KILLS_ALONE if death.is_kill_from_outside else MAX_CRASHES_ALONE
            killer = alone if alone.num_deaths_alone >= limit else None
        quarantined = [
            entry
            for entry in self._journal.requests.values()
            if entry.is_quarantined and entry is not killer
        ]
        # The first one stays the first: it may be running, and runs alone.
        waiting = [entry for entry in self._queue if entry in quarantined]
        self._queue = deque(waiting + [entry for entry in quarantined if entry not in waiting])
        if not self._queue:
            self._ward = None
        return killer

    def release(self) -> bool:
        """Release the first if it has ended, or got past the place where processes died. True if
        any was released: another one is first now, or all requests may run."""
        was_released = False
        while self._queue:
            entry = self._queue[0]
            is_open = self._journal.requests.get(entry.request_id) is entry
            if is_open and entry.position <= entry.position_at_death:
                break
            self._queue.popleft()
            entry.num_deaths = entry.num_deaths_alone = 0
            was_released = True
        if not self._queue:
            self._ward = None
        return was_released


def _spared(serving: list[Place], places: Sequence[Place]) -> list[Place]:
    """The replicas that may die: none if it is the last one while another is being restarted."""
    is_last = len(serving) == 1 and any(place.is_coming for place in places)
    return [] if is_last else serving


def _elsewhere(places: list[Place], last_death: int | None) -> list[int]:
    """The replicas other than the one in which a request's last process died, if there are any:
    a replica whose device is broken must not condemn requests."""
    numbers = [place.number for place in places]
    return [number for number in numbers if number != last_death] or numbers
