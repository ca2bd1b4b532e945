"""Which requests an engine process may be computing, as exactly as its messages tell.

Commands arrive in order, and the process acknowledges them (`Acknowledged`). A request that was
taken away from it, or that its client has given up, may be what the process dies of until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from octavo.server.engine_process.journal import Assignment, OpenRequest


class Assignments:
    """Owns the assignments of one engine process. What the process says is to be passed on in the
    order in which it says so."""

    def __init__(self) -> None:
        self._unanswered: dict[int, Assignment] = {}  # by ticket, in the order of the commands
        self._accepted: dict[str, Assignment] = {}  # by the request id that the process knows
        self._leaving: deque[Assignment] = deque()  # taken away, in the order of the commands
        self._ended: list[Assignment] = []  # in a step during which the next one was begun

    @property
    def is_empty(self) -> bool:
        """Whether the process cannot be computing any request."""
        return not (self._unanswered or self._accepted or self._leaving or self._ended)

    def begin(self, assignment: Assignment) -> None:
        """The process is sent a request."""
        self._unanswered[assignment.ticket] = assignment
        assignment.entry.assignments.add(assignment)

    def leave(self, assignment: Assignment) -> None:
        """A request has ended for its client, or goes on elsewhere. Unless the process has said so
        itself, it was told by the command number `left_at`, or will say so."""
        is_known = self._accepted.get(assignment.entry.request_id) is assignment
        if assignment.left_at and (is_known or assignment.ticket in self._unanswered):
            assignment.last_position = assignment.entry.position
            self._leaving.append(assignment)

    def clear(self) -> None:
        """The process is gone."""
        for table in (self._unanswered.values(), self._accepted.values()):
            self._finish(table)
        self._finish(self._leaving)
        self._finish(self._ended)
        for each in (self._unanswered, self._accepted, self._leaving, self._ended):
            each.clear()

    # ---------------------------------------------------------------- what the process says

    def answer(self, ticket: int, is_accepted: bool) -> Assignment | None:
        """It has accepted or refused what was sent with a ticket; None if that was no request."""
        assignment = self._unanswered.pop(ticket, None)
        if assignment is None:
            return None
        assignment.is_accepted = is_accepted
        if is_accepted:
            self._accepted[assignment.entry.request_id] = assignment
        else:
            self._finish([assignment])
        return assignment

    def admit(self, request_id: str) -> Assignment | None:
        """It begins to compute a request: the last one of this name that it has accepted. None if
        it is no client's."""
        assignment = self._accepted.get(request_id)
        if assignment is not None:
            assignment.is_running = True
        return assignment

    def end(self, request_ids: Iterable[str], is_computing: bool) -> None:
        """It reports the ends of requests; with `is_computing`, the next step may have them yet."""
        self._finish(self._ended)
        ends = [self._accepted.pop(each) for each in request_ids if each in self._accepted]
        self._ended = ends if is_computing else []
        if not is_computing:
            self._finish(ends)

    def acknowledge(self, num_commands: int) -> bool:
        """It has taken in so many commands. True if it has let go of requests."""
        leaving, has_any = self._leaving, False
        while leaving and leaving[0].left_at <= num_commands:
            assignment = leaving.popleft()
            has_any = True
            self._finish([assignment])
            if self._accepted.get(assignment.entry.request_id) is assignment:
                del self._accepted[assignment.entry.request_id]
        return has_any

    # ---------------------------------------------------------------- its death

    def at_risk(self) -> dict[OpenRequest, Assignment]:
        """What the process may have been computing, in the order of the commands. The first request
        that was neither accepted nor refused counts: it may die of that, too."""
        found = {each for each in self._accepted.values() if each.is_running}
        found.update(each for each in (*self._leaving, *self._ended) if each.is_running)
        found.update([*self._unanswered.values()][:1])
        return {each.entry: each for each in sorted(found, key=lambda each: each.ticket)}

    def _finish(self, assignments: Iterable[Assignment]) -> None:
        for assignment in assignments:
            assignment.is_running = False
            assignment.entry.assignments.discard(assignment)
