"""Where requests stand: waiting, swapped out or running."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from octavo.core.sequence import Request, Status


class Queues:
    """Owns the queues and the seats. It alone changes a request's status.

    A seat is for one running sequence; a request takes as many as it may come to have at once.
    """

    def __init__(self, num_seats: int) -> None:
        self.requests: dict[str, Request] = {}  # all that are not finished
        # Each in the order of the policy's rank.
        self.waiting: list[Request] = []
        self.swapped: list[Request] = []
        self.running: list[Request] = []
        self.num_free_seats = num_seats
        self._of = {
            Status.WAITING: self.waiting,
            Status.SWAPPED: self.swapped,
            Status.RUNNING: self.running,
        }

    @property
    def num_running_seqs(self) -> int:
        return sum(len(request.sequences) for request in self.running)

    def add(self, request: Request) -> None:
        """A new request, which waits."""
        assert request.request_id not in self.requests, f"{request} is known already"
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=_rank)

    def move(self, request: Request, status: Status) -> None:
        """Put a request into another queue, at the place of its rank."""
        self._leave(request)
        self._of[request.status].remove(request)
        if status is Status.RUNNING:
            self.num_free_seats -= request.method.max_sequences
        request.status = status
        insort(self._of[status], request, key=_rank)

    def retire(self, requests: Iterable[Request]) -> None:
        """Let those of `requests` go that have no live sequences."""
        left = set()
        for request in requests:
            if request.sequences or request.is_finished:
                continue
            left.add(request.status)
            self._leave(request)
            request.status = Status.FINISHED
            request.finished.sort(key=lambda seq: seq.sample_index)
            del self.requests[request.request_id]
        for status in left:  # one pass for all that left
            queue = self._of[status]
            queue[:] = [request for request in queue if not request.is_finished]

    def _leave(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self.num_free_seats += request.method.max_sequences


def _rank(request: Request) -> tuple[float, ...]:
    return request.rank
