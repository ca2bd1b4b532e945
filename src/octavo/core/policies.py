"""Scheduling policies: who runs first, and who is preempted."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from octavo.config import SchedulerConfig
from octavo.core.sequence import Request, Sequence


class SchedulingPolicy:
    """Decides the order of requests; the scheduler decides what fits.

    A policy overrides what differs from first come, first served, and has a name in
    `octavo.registry.POLICIES`.

    Waiting requests are sorted into *flows*. Within a flow the order never changes, so its requests
    are sorted once, by `order`; between flows the first requests are compared by `key`, which may
    grow while a request waits. A step therefore evaluates the keys of the requests that it
    considers and of the flows whose keys have changed, not of all that wait.
    """

    few_waiting = 4
    """Up to this many waiting requests, prompts that share a step are limited by a quota."""
    quota_of_few = 1536
    """Prompt tokens that few waiting requests may add to one step together. Among quotas of 512 to
    8,192 tokens, this one gave the lowest 99th percentile of the time to first token, 0.1 to 1.8 ms
    less than 8,192 at the same time per output token (OPT-13B on two H200s, simulated, 6 to 14
    requests/s)."""

    def __init__(self, config: SchedulerConfig) -> None:
        pass

    # ---------------------------------------------------------------- order

    def order(self, request: Request) -> tuple[float, ...]:
        """A fixed sort key, unique to the request: its place in its flow, and in the queues."""
        return (request.arrival_time, request.number)

    def flow(self, request: Request) -> str:
        """The flow that a request belongs to as long as it lives."""
        return ""

    def key(self, request: Request, now: float) -> tuple[float, ...]:
        """The lowest key is admitted first. It never shrinks while the request waits, and it orders
        the requests of one flow as `order` does."""
        return request.order

    def victims(self, running: Seq[Request]) -> Seq[Request]:
        """`running` in the order in which they are preempted when blocks run out.

        Running and swapped requests are served in the reverse of this order. `running` is sorted by
        `order`.
        """
        return running[::-1]

    def displaceable(self, waiting: Request, running: Seq[Request]) -> Seq[Request]:
        """Running requests that may be preempted to make room for a waiting one, the first victim
        first."""
        return ()

    def may_pass(self, waiting: Request, swapped: Request) -> bool:
        """Whether a waiting request may be admitted while this one is swapped out."""
        return False

    def prefill_quota(self, waiting: Seq[Request]) -> int | None:
        """How many tokens the prompts of a step's newly admitted requests may have together; the
        first one is admitted even if it is longer. None: as many as the step has room for."""
        return self.quota_of_few if len(waiting) <= self.few_waiting else None

    # ---------------------------------------------------------------- what happens to requests

    def arrived(self, request: Request) -> None:
        """A new request waits."""

    def started(self, request: Request, now: float) -> None:
        """A waiting or swapped request runs from now on."""

    def generated(self, advanced: Seq[Sequence]) -> None:
        """A step has added a token to each of these sequences."""

    def finished(self, request: Request) -> None:
        """A request is over, or was aborted."""


class FirstComeFirstServed(SchedulingPolicy):
    """Requests run in order of arrival; the latest is preempted first (paper section 4.5)."""


class Priority(SchedulingPolicy):
    """The lowest `priority` runs first; waiting raises it one level every `aging_seconds`.

    All waiting requests age at the same pace, so their order never changes. A request keeps the
    level with which it was admitted: it is displaced only by a request whose own priority is
    better than that, never by one that has merely waited long. One that is swapped out ages, too,
    and comes back before less urgent ones start.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._aging_seconds = config.aging_seconds

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.priority * self._aging_seconds + request.arrival_time, request.number)

    def displaceable(self, waiting: Request, running: Seq[Request]) -> Seq[Request]:
        lower = [request for request in running if waiting.priority < request.level]
        lower.sort(key=lambda request: (request.level, request.order), reverse=True)
        return lower

    def may_pass(self, waiting: Request, swapped: Request) -> bool:
        return waiting.priority < swapped.level and waiting.order < swapped.order

    def started(self, request: Request, now: float) -> None:
        waited = max(0.0, now - request.arrival_time)
        request.level = request.priority - waited // self._aging_seconds


@dataclass(slots=True)
class _Tenant:
    """A tenant's virtual token counter, and its requests."""

    name: str
    counter: float  # weighted tokens of service
    num_requests: int = 0  # unfinished
    unstarted: set[Request] = field(default_factory=set)  # those that have never run


class FairShare(SchedulingPolicy):
    """Tenants that have requests waiting get equal service: the virtual token counters (VTC) of
    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.

    Service is weighted tokens: those of the prompt, counted when a request first starts, and every
    output token. The tenant with the lowest counter is admitted next and preempted last; its own
    requests come in order of arrival. The counters of two tenants that both have requests waiting
    differ by at most `max(input_weight * longest prompt, output_weight * tokens in the KV cache)`,
    so the service that they receive over any such period differs by at most twice that.

    A tenant without waiting requests saves up nothing: when it comes back, its counter is lifted to
    the *floor*, the lowest counter of the tenants with waiting requests (or that of the last one
    that had any). A tenant without any request is forgotten once its counter is not above the
    floor, where it would start again anyway. If more than `max_idle_tenants` are above it, the
    floor rises to the lowest of them, so none gains by being forgotten.
    """

    input_weight = 1.0  # per prompt token
    output_weight = 2.0  # per output token
    max_idle_tenants = 10_000

    def __init__(self, config: SchedulerConfig) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._floor = 0.0
        self._backlogged: dict[str, _Tenant] = {}  # with requests that have never run
        self._last_backlogged: _Tenant | None = None  # the last tenant that left `_backlogged`
        # Heaps of (counter, name). Entries may be outdated; counters only grow.
        self._lowest: list[tuple[float, str]] = []  # of backlogged tenants
        self._idle: list[tuple[float, str]] = []  # of tenants without requests

    def counters(self) -> dict[str, float]:
        """Weighted tokens of service by tenant, for inspection."""
        return {tenant.name: tenant.counter for tenant in self._tenants.values()}

    def num_requests(self) -> int:
        """Unfinished requests, for inspection."""
        return sum(tenant.num_requests for tenant in self._tenants.values())

    def flow(self, request: Request) -> str:
        return request.tenant

    def key(self, request: Request, now: float) -> tuple[float, ...]:
        return (self._tenants[request.tenant].counter, *request.order)

    def victims(self, running: Seq[Request]) -> Seq[Request]:
        return sorted(running, key=lambda request: self.key(request, 0.0), reverse=True)

    def may_pass(self, waiting: Request, swapped: Request) -> bool:
        tenants = self._tenants
        return tenants[waiting.tenant].counter < tenants[swapped.tenant].counter

    def arrived(self, request: Request) -> None:
        name = request.tenant
        self._raise_floor()
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, self._floor)
        if not tenant.unstarted:
            tenant.counter = max(tenant.counter, self._floor)
            self._backlogged[name] = tenant
            heappush(self._lowest, (tenant.counter, name))
            if len(self._lowest) > 2 * len(self._backlogged) + 16:  # most are outdated
                self._lowest = [(each.counter, each.name) for each in self._backlogged.values()]
                heapify(self._lowest)
        tenant.unstarted.add(request)
        tenant.num_requests += 1

    def started(self, request: Request, now: float) -> None:
        tenant = self._tenants[request.tenant]
        if request in tenant.unstarted:
            self._unqueue(tenant, request)
            tenant.counter += self.input_weight * request.num_input_tokens

    def generated(self, advanced: Seq[Sequence]) -> None:
        tenants, weight = self._tenants, self.output_weight
        for seq in advanced:
            tenants[seq.request.tenant].counter += weight

    def finished(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        if request in tenant.unstarted:
            self._unqueue(tenant, request)
        tenant.num_requests -= 1
        if not tenant.num_requests:
            heappush(self._idle, (tenant.counter, tenant.name))
        self._raise_floor()
        self._forget_idle()

    def _unqueue(self, tenant: _Tenant, request: Request) -> None:
        tenant.unstarted.remove(request)
        if not tenant.unstarted:
            del self._backlogged[tenant.name]
            self._last_backlogged = tenant

    def _raise_floor(self) -> None:
        if self._backlogged:
            self._floor = max(self._floor, self._lowest_counter())
        elif self._last_backlogged is not None:
            self._floor = max(self._floor, self._last_backlogged.counter)

    def _lowest_counter(self) -> float:
        """The lowest counter of the backlogged tenants; there must be at least one."""
        heap, backlogged = self._lowest, self._backlogged
        while True:
            counter, name = heap[0]
            tenant = backlogged.get(name)
            if tenant is None:
                heappop(heap)
            elif counter < tenant.counter:
                heapreplace(heap, (tenant.counter, name))
            else:
                return counter

    def _forget_idle(self) -> None:
        idle, tenants = self._idle, self._tenants
        while idle and (idle[0][0] <= self._floor or len(idle) > self.max_idle_tenants):
            counter, name = heappop(idle)
            tenant = tenants.get(name)
            if tenant is not None and not tenant.num_requests and tenant.counter == counter:
                del tenants[name]
                self._floor = max(self._floor, counter)
