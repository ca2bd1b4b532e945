"""Finds the request that kills engine processes, by running the possible ones one at a time."""

from __future__ import annotations

from collections import deque

from octavo.server.engine_process.journal import Journal, OpenRequest
from octavo.server.engine_process.process import Death

# How often a process must die with a request alone in it. A kill from outside may be chance, or the
# system's answer to a request that takes too much memory; a crash is the request's own doing.
MAX_KILLS_ALONE = 3
MAX_CRASHES_ALONE = 1


class Quarantine:
    """Owns the queue of requests that run alone. A request is quarantined when two processes in a
    row died while it was running and it had got no further in between."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._queue: deque[OpenRequest] = deque()

    @property
    def first(self) -> OpenRequest | None:
        """The quarantined request that runs now, without the others and without new requests."""
        return self._queue[0] if self._queue else None

    def note_death(self, death: Death) -> OpenRequest | None:
        """A process has died. Returns the request that must not be run again, if one is found."""
        entries = self._journal.requests.values()
        # Requests are accepted in their order: the first that was not may be what it died of.
        in_hand = next((e for e in entries if e.is_sent and not e.is_accepted), None)
        if in_hand is not None:
            in_hand.is_running = True
        running = [entry for entry in entries if entry.is_running]
        alone = running[0] if len(running) == 1 else self.first
        for entry in entries:
            entry.note_death()
        killer = None
        if alone in running and alone.is_quarantined:
            alone.num_deaths_alone += 1
            limit = MAX_KILLS_ALONE if death.is_kill_from_outside else MAX_CRASHES_ALONE
            killer = alone if alone.num_deaths_alone >= limit else None
        self._queue = deque(e for e in entries if e.is_quarantined and e is not killer)
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
        return was_released
