"""How requests get onto the device: what a waiting one can start with, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum, auto

from octavo.config import SchedulerConfig
from octavo.core import regrow
from octavo.core.draft import PlanDraft
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_matcher import PrefixHit
from octavo.core.policy import SchedulingPolicy
from octavo.core.queues import Queues
from octavo.core.sequence import Request, Status


class Entry(Enum):
    """What came of an attempt to start a waiting request."""

    STARTED = auto()
    NO_ROOM = auto()
    TOO_EARLY = auto()  # steps under way compute what it needs to know
    DEFERRED = auto()  # it is not ready: a running request computes what it can share
    NEXT_STEP = auto()  # it would make this one too long for those who have been started before


@dataclass(slots=True)
class Demand:
    """What a waiting request could start from, and what it needs on top."""

    hit: PrefixHit
    num_blocks: int  # free ones, until all its tokens are computed
    num_tokens: int  # for its first sequence to compute: all, or up to where another forks off


class Admission:
    """Decides whether a waiting request can start, and starts it."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        queues: Queues,
        policy: SchedulingPolicy,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._kv = kv
        self._queues = queues
        self._policy = policy
        self._clock = clock
        self._watermark = int(config.watermark * kv.pool.num_blocks)

    @property
    def num_reserved_blocks(self) -> int:
        """Kept free when something is admitted, so that running requests can grow."""
        return self._watermark if self._is_crowded else 0

    def start(
        self, request: Request, draft: PlanDraft, room: int, longest: int | None = None
    ) -> Entry:
        """Admit a waiting request if it fits; at most `room` of its tokens are computed now.

        longest: it is not started if more of its tokens would be computed now.
        """
        if request.is_pending:
            return Entry.TOO_EARLY
        free = self._kv.num_free_blocks
        if (
            room <= 0
            or request.method.max_sequences > self._queues.num_free_seats
            or self._was_refused(request, free)
        ):
            return Entry.NO_ROOM
        demand = self._demand(request, draft)
        if demand.hit.is_unfinished:
            return Entry.NEXT_STEP
        if demand.hit.awaited is not None:
            self._queues.defer(request, demand.hit.awaited)
            return Entry.DEFERRED
        if demand.num_blocks > free - self.num_reserved_blocks:
            if self._is_crowded:
                request.refused_with_free = free
                return Entry.NO_ROOM
            # Alone, it fits by the check at `add`, unless a block is held only to be copied.
            excess = demand.hit.num_tokens
            demand.hit = self._kv.without_partial(demand.hit)
            demand.num_tokens += excess - demand.hit.num_tokens
        if demand.num_tokens > room and not self._config.enable_chunked_prefill:
            return Entry.NO_ROOM
        num_tokens = min(demand.num_tokens, room)
        if longest is not None and num_tokens > longest:
            return Entry.NEXT_STEP
        return self._allocate(request, demand, draft, num_tokens)

    def fits(self, request: Request, draft: PlanDraft, leaving: Seq[Request] = ()) -> bool:
        """Whether a waiting request could start in this step if some running ones left."""
        demand = self._demand(request, draft)
        if demand.hit.is_unfinished or demand.hit.in_progress:
            return False
        held = [seq for other in leaving for seq in other.sequences if seq.table is not None]
        free = self._kv.num_free_blocks - self.num_reserved_blocks
        free += self._kv.num_releasable_blocks(held, demand.hit)
        seats = self._queues.num_free_seats
        seats += sum(other.method.max_sequences for other in leaving)
        room = draft.budget - self._queues.num_running_seqs
        room += sum(len(other.sequences) for other in leaving)
        return (
            demand.num_blocks <= free
            and request.method.max_sequences <= seats
            and room >= (1 if self._config.enable_chunked_prefill else demand.num_tokens)
        )

    def enter(self, request: Request, draft: PlanDraft) -> None:
        """A request that holds its blocks runs from now on."""
        self._queues.move(request, Status.RUNNING)
        request.level = self._policy.level(request, self._clock())
        draft.started.append(request)

    @property
    def _is_crowded(self) -> bool:
        return bool(self._queues.running or self._queues.swapped)

    def _was_refused(self, request: Request, free: int) -> bool:
        """Whether it did not fit before, and no block has come free. Alone, it may fit now."""
        refused_with = request.refused_with_free
        return refused_with is not None and free <= refused_with and self._is_crowded

    def _demand(self, request: Request, draft: PlanDraft) -> Demand:
        kv, chunk = self._kv, self._config.max_num_batched_tokens
        leader, *others = request.sequences
        regrow.prepare(request)
        goal = regrow.goal(leader, request.sequences) if others else leader.num_tokens
        if request.sampling.num_prompt_logprobs is not None:
            hit = kv.no_hit()  # every position of the prompt must be computed
        else:
            # When nothing runs, there is no one to wait for what this takes.
            max_names = draft.max_names if self._queues.running else None
            num_named = len(leader.prefix_nodes)
            hit = kv.lookup(leader, goal, max_names)
            draft.max_names -= len(leader.prefix_nodes) - num_named
        num_blocks = kv.num_blocks_to_admit(hit, leader.num_tokens, chunk)
        for seq in others:
            num_blocks += kv.num_blocks_for(seq.num_tokens, chunk)
            num_blocks -= kv.num_shared_blocks(seq.branch_at, seq.num_tokens)
        return Demand(hit, num_blocks, goal - hit.num_tokens)

    def _allocate(self, request: Request, demand: Demand, draft: PlanDraft, n: int) -> Entry:
        """Give a request its blocks, and let it compute its first `n` tokens."""
        leader, hit = request.sequences[0], demand.hit
        changes = self._kv.allocate(leader, hit, hit.num_tokens + n)
        if changes is None:
            return Entry.NO_ROOM
        if request.num_preemptions == 0:
            request.num_cached_tokens = hit.num_tokens
        request.refused_with_free = None
        self.enter(request, draft)
        draft.open(leader)
        draft.apply(changes)
        if n > 0:
            draft.add(leader, n)
        return Entry.STARTED
