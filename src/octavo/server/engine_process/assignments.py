"""Which requests an engine process may be computing, as far as its messages show.

Commands arrive in order, and the process acknowledges them (`Acknowledged`). Until then
a request that was taken away from the process, or aborted by its client, may still crash it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from octavo.server.engine_process.journal import Assignment, OpenRequest


class Assignments:
    """Owns the assignments of one engine process. Its messages must be passed on in their order."""

    def __init__(self) -> None:
        self._unanswered: dict[int, Assignment] = {}  # by ticket, in the order of the commands
        self._accepted: dict[str, Assignment] = {}  # by the request id that the process knows
        self._leaving: deque[Assignment] = deque()  # taken away, in the order of the commands
        self._ended: list[Assignment] = []  # in the last step, while the next one was in flight

    @property
    def is_empty(self) -> bool:
        """Whether the process cannot be computing any request."""
        return not (self._unanswered or self._accepted or self._leaving or self._ended)

    def begin(self, assignment: Assignment) -> None:
        """Called when a request is sent to the process."""
        self._unanswered[assignment.ticket] = assignment
        assignment.entry.assignments.add(assignment)

    def leave(self, assignment: Assignment) -> None:
        """Called when a request has ended for its client, or continues elsewhere. The process has
        reported its end, or will, or it was sent the command number `left_at`."""
        is_known = self._accepted.get(assignment.entry.request_id) is assignment
        if assignment.left_at and (is_known or assignment.ticket in self._unanswered):
            assignment.last_position = assignment.entry.position
            self._leaving.append(assignment)

    def clear(self) -> None:
        """Called when the process is gone."""
        for table in (self._unanswered.values(), self._accepted.values()):
            self._finish(table)
        self._finish(self._leaving)
        self._finish(self._ended)
        for each in (self._unanswered, self._accepted, self._leaving, self._ended):
            each.clear()

    # ---------------------------------------------------------------- messages of the process

    def answer(self, ticket: int, is_accepted: bool) -> Assignment | None:
        """Called when the process accepts or refuses a ticket; None if it is not a request's."""
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
        """Called when the process starts a request: the last one of this id that it accepted. None
        if the request is not a client's."""
        assignment = self._accepted.get(request_id)
        if assignment is not None:
            assignment.is_running = True
        return assignment

    def end(self, request_ids: Iterable[str], is_computing: bool) -> None:
        """Called when requests end; if `is_computing`, a step in flight may still have them."""
        self._finish(self._ended)
        ends = [self._accepted.pop(each) for each in request_ids if each in self._accepted]
        self._ended = ends if is_computing else []
        if not is_computing:
            self._finish(ends)

    def acknowledge(self, num_commands: int) -> bool:
        """Called when the process has executed so many commands. True if that freed requests."""
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
