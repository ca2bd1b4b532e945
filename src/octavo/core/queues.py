"""The queues that requests stand in: waiting, swapped out or running."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import TypeAlias

from sortedcontainers import SortedKeyList

from octavo.core.policies import SchedulingPolicy
from octavo.core.sequence import Request, Status

Key = tuple[float, ...]
Requests: TypeAlias = "SortedKeyList[Request, Key]"


class Queues:
    """Owns the queues and the sequence slots. Only this class changes a request's status, and it
    tells the policy about it.

    A slot is for one running sequence; a request takes as many as it may come to have at once.

    A waiting request is *ready* to be considered, or *deferred* until a prefix that a running
    request is computing is in the cache. However many requests wait for the same prefix, they cost
    nothing meanwhile.
    """

    def __init__(
        self, num_slots: int, policy: SchedulingPolicy, clock: Callable[[], float]
    ) -> None:
        self.requests: dict[str, Request] = {}  # all unfinished ones
        # Each sorted by `Request.order`.
        self.waiting: Requests = SortedKeyList(key=_order)
        self.swapped: list[Request] = []
        self.running: list[Request] = []
        self.ready = ReadyQueue(policy, clock)
        self.num_free_slots = num_slots
        self._policy = policy
        self._clock = clock
        self._queue_of = {
            Status.SWAPPED: self.swapped,
            Status.RUNNING: self.running,
        }
        # By the key of the block that they wait for, and those whose wait is over. Both may contain
        # requests that have finished.
        self._deferred: dict[bytes, list[Request]] = {}
        self._recalled: deque[Request] = deque()

    @property
    def num_running_seqs(self) -> int:
        return sum(len(request.sequences) for request in self.running)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or is to come back from the swap tier."""
        return not (self.running or self.swapped)

    def add(self, request: Request) -> None:
        """Let a new request wait."""
        assert request.request_id not in self.requests, f"{request} is known already"
        self._policy.arrived(request)
        self._enter_waiting(request)
        self.requests[request.request_id] = request

    def move(self, request: Request, status: Status) -> None:
        """Put a request into another queue."""
        self._leave(request)
        request.status = status
        if status is Status.WAITING:
            self._enter_waiting(request)
            return
        if status is Status.RUNNING:
            self.num_free_slots -= request.method.max_sequences
            self._policy.started(request, self._clock())
        insort(self._queue_of[status], request, key=_order)

    def defer(self, request: Request, key: bytes) -> None:
        """Do not consider a ready request until the block of this key is computed or abandoned."""
        self.ready.discard(request)
        self._deferred.setdefault(key, []).append(request)

    def recall(self, is_in_progress: Callable[[bytes], bool], at_most: int) -> None:
        """Make deferred requests ready whose block is no longer in progress; `at_most` at once,
        however many have waited for it."""
        for key in [key for key in self._deferred if not is_in_progress(key)]:
            self._recalled.extend(self._deferred.pop(key))
        while self._recalled and at_most > 0:
            request = self._recalled.popleft()
            if not request.is_finished:
                self.ready.add(request)
                at_most -= 1

    def deferred(self) -> list[Request]:
        """Waiting requests that are not ready; for inspection."""
        lists = [*self._deferred.values(), self._recalled]
        return [request for each in lists for request in each if not request.is_finished]

    def retire(self, requests: Iterable[Request]) -> None:
        """Remove those of `requests` that have no live sequences."""
        left = set()
        for request in requests:
            if request.sequences or request.is_finished:
                continue
            if request.status in (Status.RUNNING, Status.SWAPPED):
                left.add(request.status)
                self._release_slots(request)
            else:
                self._leave(request)
            request.status = Status.FINISHED
            request.finished.sort(key=lambda seq: seq.sample_index)
            del self.requests[request.request_id]
            self._policy.finished(request)
        for status in left:  # one pass for all that left
            queue = self._queue_of[status]
            queue[:] = [request for request in queue if not request.is_finished]

    def _enter_waiting(self, request: Request) -> None:
        self.waiting.add(request)
        self.ready.add(request)

    def _leave(self, request: Request) -> None:
        """Remove a request from its queue."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
            self.ready.discard(request)  # where it is, unless it is deferred
        else:
            self._queue_of[request.status].remove(request)
        self._release_slots(request)

    def _release_slots(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self.num_free_slots += request.method.max_sequences


class ReadyQueue:
    """Waiting requests that may be admitted now, in the policy's order.

    The requests of each flow are sorted by their fixed order, and the flows by the key of their
    first request. Keys only grow, so an outdated entry comes too early, never too late, and is
    corrected when it comes first: iterating costs as much as the requests that it yields and the
    flows that have moved, whatever the length of the queue.
    """

    def __init__(self, policy: SchedulingPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._flows: dict[str, Requests] = {}
        self._heads: list[tuple[Key, str]] = []  # sorted: key of a flow's first request, and flow
        self._key_of: dict[str, Key] = {}  # the key of each flow's entry in `_heads`

    def __len__(self) -> int:
        return sum(map(len, self._flows.values()))

    def __bool__(self) -> bool:
        return bool(self._flows)

    def flows(self) -> list[Requests]:
        """The requests of each flow, the flows in the order of their entries; for inspection."""
        return [self._flows[flow] for _, flow in self._heads]

    def first(self) -> Request | None:
        """The request to be admitted first."""
        return next(iter(self), None)

    def add(self, request: Request) -> None:
        flow = self._policy.flow(request)
        requests = self._flows.setdefault(flow, SortedKeyList(key=_order))
        requests.add(request)
        if requests[0] is request:
            self._place(flow, requests)

    def discard(self, request: Request) -> None:
        """Remove a request if it is there."""
        flow = self._policy.flow(request)
        requests = self._flows.get(flow)
        if requests is None:
            return
        requests.discard(request)  # if it was the first, the flow's entry is now outdated
        if not requests:
            del self._flows[flow]
            self._remove_head(flow)

    def __iter__(self) -> Iterator[Request]:
        """Each request in order. The one yielded last may be removed before the next one is asked
        for, and nothing else may change."""
        now = self._clock()
        num_passed = 0  # leading flows whose first request was yielded and is still there
        passed: list[tuple[Key, str, int]] = []  # heap: next request of these flows, and its place
        while True:
            head = self._correct(num_passed, now)
            if passed and (head is None or passed[0][0] < head[0]):
                _, flow, place = heappop(passed)
            elif head is not None:
                flow, place = head[1], 0
            else:
                return
            requests = self._flows[flow]
            request = requests[place]
            yield request
            if place < len(requests) and requests[place] is request:
                num_passed += place == 0
                place += 1
            if 0 < place < len(requests):
                heappush(passed, (self._policy.key(requests[place], now), flow, place))

    def _correct(self, start: int, now: float) -> tuple[Key, str] | None:
        """The first entry from `start` on that is up to date, now at `start`."""
        heads = self._heads
        while start < len(heads):
            key, flow = heads[start]
            current = self._policy.key(self._flows[flow][0], now)
            if current == key:
                return heads[start]
            del heads[start]
            self._key_of[flow] = current
            insort(heads, (current, flow), lo=start)
        return None

    def _place(self, flow: str, requests: Requests) -> None:
        """A flow has a new first request that precedes the others."""
        if flow in self._key_of:
            self._remove_head(flow)
        key = self._key_of[flow] = self._policy.key(requests[0], self._clock())
        insort(self._heads, (key, flow))

    def _remove_head(self, flow: str) -> None:
        del self._heads[bisect_left(self._heads, (self._key_of.pop(flow), flow))]


def _order(request: Request) -> Key:
    return request.order
