"""Where requests stand: waiting, swapped out or running."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable

from octavo.core.sequence import Request, Status


class Queues:
    """Owns the queues and the seats. It alone changes a request's status.

    A seat is for one running sequence; a request takes as many as it may come to have at once.

    Waiting requests are *ready* to be looked at, or *deferred* until a prefix that a running
    request is computing is there: however many wait for the same, they cost nothing meanwhile.
    """

    def __init__(self, num_seats: int) -> None:
        self.requests: dict[str, Request] = {}  # all that are not finished
        # Each in the order of the policy's rank.
        self.waiting: list[Request] = []
        self.ready: list[Request] = []  # of those that wait
        self.swapped: list[Request] = []
        self.running: list[Request] = []
        self.num_free_seats = num_seats
        self._of = {
            Status.WAITING: self.waiting,
            Status.SWAPPED: self.swapped,
            Status.RUNNING: self.running,
        }
        # By the key of the block that they wait for; then, those whose wait is over. Finished
        # requests may be among them.
        self._deferred: dict[bytes, list[Request]] = {}
        self._recalled: deque[Request] = deque()

    @property
    def num_running_seqs(self) -> int:
        return sum(len(request.sequences) for request in self.running)

    def add(self, request: Request) -> None:
        """A new request, which waits."""
        assert request.request_id not in self.requests, f"{request} is known already"
        self._enter_waiting(request)
        self.requests[request.request_id] = request

    def move(self, request: Request, status: Status) -> None:
        """Put a request into another queue, at the place of its rank."""
        self._leave(request)
        request.status = status
        if status is Status.WAITING:
            self._enter_waiting(request)
            return
        if status is Status.RUNNING:
            self.num_free_seats -= request.method.max_sequences
        insort(self._of[status], request, key=_rank)

    def defer(self, request: Request, key: bytes) -> None:
        """Do not look at a waiting request until the block of this key is computed, or given up."""
        _remove(self.ready, request)
        self._deferred.setdefault(key, []).append(request)

    def recall(self, is_in_progress: Callable[[bytes], bool], at_most: int) -> None:
        """Make deferred requests ready whose block is no longer in progress: `at_most` of them at
        once, however many have waited for it."""
        for key in [key for key in self._deferred if not is_in_progress(key)]:
            self._recalled.extend(self._deferred.pop(key))
        for _ in range(min(at_most, len(self._recalled))):
            request = self._recalled.popleft()
            if not request.is_finished:
                insort(self.ready, request, key=_rank)

    def retire(self, requests: Iterable[Request]) -> None:
        """Let those of `requests` go that have no live sequences."""
        left = set()
        for request in requests:
            if request.sequences or request.is_finished:
                continue
            if request.status in (Status.RUNNING, Status.SWAPPED):
                left.add(request.status)
                self._give_seats_back(request)
            else:
                self._leave(request)
            request.status = Status.FINISHED
            request.finished.sort(key=lambda seq: seq.sample_index)
            del self.requests[request.request_id]
        for status in left:  # one pass for all that left
            queue = self._of[status]
            queue[:] = [request for request in queue if not request.is_finished]

    def _enter_waiting(self, request: Request) -> None:
        insort(self.waiting, request, key=_rank)
        insort(self.ready, request, key=_rank)

    def _leave(self, request: Request) -> None:
        """Take a request out of its queue."""
        if request.status is Status.WAITING:
            was_there = _remove(self.waiting, request)
            assert was_there, f"{request} has lost its place"
            _remove(self.ready, request)  # where it is, unless it is deferred
        else:
            self._of[request.status].remove(request)
        self._give_seats_back(request)

    def _give_seats_back(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self.num_free_seats += request.method.max_sequences


def _rank(request: Request) -> tuple[float, ...]:
    return request.rank


def _remove(queue: list[Request], request: Request) -> bool:
    """Take a request out of a queue in the order of rank; False if it is not there."""
    place = bisect_left(queue, request.rank, key=_rank)
    is_there = place < len(queue) and queue[place] is request
    if is_there:
        del queue[place]
    return is_there
