"""Which replicas may run a request; finds the one that kills engine processes.

A request that its engine process may have been computing when it crashed is a suspect until it has
got further. If a second process in a row dies with it, it is quarantined: such requests run one at
a time, each in a process that computes nothing else, so what this process dies of is certain. Three
rules keep a deadly request from taking all replicas down, one after the other:

* At most one replica at a time is sent suspects or quarantined requests.
* Another one is sent them only when the one before has acknowledged that it computes none.
* It is not the last one that serves while another one is being restarted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from octavo.server.engine_process.exchange import Loss
from octavo.server.engine_process.journal import Journal, OpenRequest, Pin
from octavo.server.engine_process.process import Death

# How often a process must die with a request alone in it. A kill from outside may be chance, or the
# system's answer to a request that takes too much memory; a crash is the request's own doing.
MAX_KILLS_ALONE = 3
MAX_CRASHES_ALONE = 1


class Place(Protocol):
    """What decides whether a replica may run a request."""

    number: int
    load: int

    @property
    def is_serving(self) -> bool:
        """Whether it takes requests now."""

    @property
    def is_coming(self) -> bool:
        """Whether it can be expected to serve soon."""

    @property
    def is_vacant(self) -> bool:
        """Whether its process computes nothing that it might die of."""


class Quarantine:
    """Owns the queue of requests that run alone. A request is quarantined when two processes in a
    row died that may have been computing it, and it had got no further in between."""

    def __init__(self, journal: Journal, places: Sequence[Place]) -> None:
        self._journal = journal
        self._places = places
        self._queue: deque[OpenRequest] = deque()
        self._suspects: set[OpenRequest] = set()  # and others that were at risk in some death
        self._ward: int | None = None  # the replica that runs the queue
        self._trial: int | None = None  # the one that runs suspects, if no other is at risk

    @property
    def first(self) -> OpenRequest | None:
        """The quarantined request that runs now, without the others and without new requests."""
        return self._queue[0] if self._queue else None

    @property
    def ward(self) -> int | None:
        """The replica that runs nothing but the quarantined requests, if there is one."""
        return self._ward

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits until a replica may be put at risk."""
        if self.first is not None:
            return self.first.replica is None
        return any(each.replica is None and self._is_open(each) for each in self._risky())

    # ---------------------------------------------------------------- where requests may run

    def allowed(self, entry: OpenRequest) -> list[int]:
        """The replicas that may run a request now; if there are none, it waits."""
        serving = [place for place in self._places if place.is_serving]
        numbers = [place.number for place in serving]
        if entry.is_quarantined:
            if entry is not self.first or self._at_risk():
                return []
            spared = _spared(serving, self._places)
            return [each.number for each in spared if each.number == self._ward and each.is_vacant]
        if entry.is_suspect:
            if self._queue:
                return []
            if self._trial in numbers:
                return [self._trial]
            if at_risk := self._at_risk():
                return [number for number in numbers if at_risk == {number}]
            return _elsewhere(_spared(serving, self._places), entry.last_death)
        return [number for number in numbers if number != self._ward]

    def allowed_for_pin(self, pin: Pin) -> list[int]:
        """The replicas that may compute a prefix for the first time. One at a time does."""
        serving = [each for each in self._places if each.is_serving and each.number != self._ward]
        if pin.num_deaths:
            return _elsewhere(_spared(serving, self._places), pin.last_death)
        return [place.number for place in serving]

    def placed(self, entry: OpenRequest, number: int) -> None:
        """A request was sent to a replica that was allowed."""
        if entry.is_suspect and not entry.is_quarantined:
            self._trial = number

    def in_the_way(self) -> list[OpenRequest]:
        """What must leave its replica before the first quarantined request can run: all that the
        replica has which is to run it, and suspects anywhere."""
        if self.first is None or self.first.replica is not None:
            return []
        if self._ward is None:
            self._ward = self._choose_ward(self.first)
        return [each for each in self._journal.requests.values() if self.is_in_the_way(each)]

    def is_in_the_way(self, entry: OpenRequest) -> bool:
        """Whether a request must leave its replica for that."""
        if self.first is None or self.first.replica is not None or entry.replica is None:
            return False
        return entry.replica == self._ward or entry.is_risky

    def leave(self, number: int) -> None:
        """A replica has lost its requests."""
        if self._ward == number:
            self._ward = None
        if self._trial == number:
            self._trial = None

    def _choose_ward(self, entry: OpenRequest) -> int | None:
        """A replica without requests; if there is none, and none will come by itself, the one with
        the least load."""
        serving = [place for place in self._places if place.is_serving]
        chosen = [place for place in _spared(serving, self._places) if place.is_vacant]
        if not chosen and not any(place.is_coming for place in self._places):
            chosen = sorted(serving, key=lambda place: place.load)
        return next(iter(_elsewhere(chosen, entry.last_death)), None)

    def _at_risk(self) -> set[int]:
        """The replicas whose processes may be computing suspects or quarantined requests."""
        return {each.replica for entry in self._risky() for each in entry.assignments}

    def _risky(self) -> list[OpenRequest]:
        return [entry for entry in self._suspects if entry.is_risky]

    def _is_open(self, entry: OpenRequest) -> bool:
        return self._journal.requests.get(entry.request_id) is entry

    # ---------------------------------------------------------------- deaths

    def note_death(self, number: int, death: Death, loss: Loss) -> OpenRequest | None:
        """A replica's process has died, and what it had is lost. Returns the request that must not
        be run again, if it is found."""
        self.leave(number)
        self._trial = None  # others may be at risk now
        for entry, assignment in loss.at_risk.items():
            entry.note_death(assignment, not death.is_kill_from_outside)
        killer, alone = None, loss.only_one
        if alone is not None and alone.is_quarantined and self._is_open(alone):
            alone.num_deaths_alone += 1
            limit = MAX_KILLS_ALONE if death.is_kill_from_outside else MAX_CRASHES_ALONE
            killer = alone if alone.num_deaths_alone >= limit else None
        self._suspects.update(each for each in loss.at_risk if each is not killer)
        # The first one stays the first.
        queue = [*self._queue, *(each for each in loss.at_risk if each not in self._queue)]
        self._queue = deque(
            each
            for each in queue
            if each.is_quarantined and each is not killer and self._is_open(each)
        )
        if not self._queue:
            self._ward = None
        return killer

    def release(self) -> bool:
        """Release the first if it has ended, or got past the place where processes died. True if
        any was released: another one is first now, or all requests may run. Suspects that have
        ended, and that no process may be computing, are forgotten."""
        if self._suspects:  # as a rule there are none, and this is called in every step
            self._suspects = {
                each for each in self._suspects if each.assignments or self._is_open(each)
            }
        was_released = False
        while self._queue:
            entry = self._queue[0]
            is_open = self._is_open(entry)
            if is_open and entry.position <= entry.position_at_death:
                break
            self._queue.popleft()
            if is_open:
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
