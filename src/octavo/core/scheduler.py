"""Which requests run in the next step, and on which blocks (paper sections 4.5 and 5.2).

`schedule` plans a step and `update` processes its results. Both are written in the order in which
things happen, and so is the rest of this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from octavo.config import SchedulerConfig
from octavo.core.beam_search import rank
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_matcher import PrefixHit
from octavo.core.lifecycle import SequenceLifecycle
from octavo.core.plan_builder import PlanBuilder, StepInFlight
from octavo.core.policies import SchedulingPolicy
from octavo.core.preemption import (
    PreemptionCosts,
    is_leader,
    prepare_rebuild,
    rebuild_goals,
    take_ready_forks,
)
from octavo.core.prompt_reading import reading_of
from octavo.core.queues import Queues
from octavo.core.request_limits import RequestLimits
from octavo.core.sequence import Request, Sequence, Status
from octavo.core.step import StepPlan, StepResult
from octavo.errors import LogitsNotFinite, RequestFailed
from octavo.registry import POLICIES

# How many waiting requests a step may defer because their prefix is still being computed. It then
# considers no others, so the cost of a step stays bounded however many requests arrive at once.
MAX_DEFERRALS = 32


class Progress(NamedTuple):
    """What a step has produced."""

    advanced: Seq[Sequence]  # sequences with a new token
    finished: Seq[Request]  # requests that are done


class Admission(Enum):
    """The outcome of an attempt to start a waiting request."""

    STARTED = auto()
    NO_ROOM = auto()
    PENDING = auto()  # it needs tokens that steps in flight are still sampling
    DEFERRED = auto()  # it was deferred: a running request is computing a prefix that it can share
    NEXT_STEP = auto()  # it would make this step too long for the requests already in it


@dataclass(slots=True)
class Demand:
    """What a waiting request could start from, and what it needs on top."""

    hit: PrefixHit
    num_blocks: int  # free blocks, until all its tokens are computed
    num_tokens: int  # for its first sequence to compute: all, or up to where another forks off


class Scheduler:
    """Decides, step by step, which requests run.

    Its parts own the rest: `Queues` where requests stand, `SequenceLifecycle` their sequences,
    `KVCacheManager` the blocks, and the policy the order.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.kv = kv
        self.clock = clock
        self.policy: SchedulingPolicy = POLICIES[config.policy](config)
        self.queues = queues = Queues(config.max_num_seqs, self.policy, clock)
        # The same lists, for observers.
        self.requests, self.waiting = queues.requests, queues.waiting
        self.swapped, self.running = queues.swapped, queues.running
        self.limits = RequestLimits(config, kv)
        self.costs = PreemptionCosts()
        self.num_preemptions = {"swap": 0, "recompute": 0}
        # For observers: called with each request that was just preempted.
        self.on_preempt: Callable[[Request], None] | None = None
        self.in_flight: dict[int, StepInFlight] = {}  # by step id
        self._lifecycle = SequenceLifecycle(kv)
        # Requests that are not planned because no token could be drawn for some of their rows, by
        # id; they are, once one can, or if there is nothing else to do.
        self._resting: dict[Request, set[int]] = {}
        self._watermark = int(config.watermark * kv.pool.num_blocks)
        self._has_paused = False  # whether the latest step leaves all running requests out
        self._next_number = 0
        self._next_step = 0

    # ================================================================ requests come and go

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestTooLong if it could never run to its end."""
        self.limits.check(request)
        request.number = self._next_number
        self._next_number += 1
        request.order = self.policy.order(request)
        request.sequences = [self._lifecycle.create(request, list(request.prompt_token_ids))]
        self.queues.add(request)
        self.limits.note(request)

    def resume(self, request: Request, outputs: Mapping[int, list[int]]) -> None:
        """Queue a request that another engine has begun, as if it were preempted by recompute.

        `outputs`: sample index -> its output tokens so far, for the samples that are alive.
        """
        self.add(request)
        if outputs:
            prompt = request.prompt_token_ids
            request.sequences = [
                self._lifecycle.create(request, prompt + output, index)
                for index, output in sorted(outputs.items())
            ]

    def abort(self, request_id: str) -> Request | None:
        """End a request now, whichever queue it is in, and take its blocks back."""
        request = self.requests.get(request_id)
        if request is not None:
            for seq in list(request.sequences):
                self._lifecycle.finish(seq, "abort")
            self._retire([request])
        return request

    def finish_by_stop_string(self, seq: Sequence, stop: str) -> Request | None:
        """End a sequence whose text contains a stop string.

        Returns its request if that is done now. None if other sequences go on, or if the sequence
        had ended already: `Progress` has named the request then, and only the reason changes.
        """
        seq.stop_reason = stop
        if seq.finish_reason is not None:
            seq.finish_reason = "stop"
            return None
        request = seq.request
        if request.status is not Status.WAITING and is_leader(seq, request.sequences):
            # Others were still to fork off it: another sequence must lead them.
            if request.status is Status.RUNNING:
                for other in request.sequences:
                    if other.table is not None:
                        self._lifecycle.close_row(other)
            self._recompute(request)
        self._lifecycle.finish(seq, "stop")
        is_closed = not self.kv.batch_formation.is_open(self.running)
        if request.sequences or (is_closed and request.status is Status.RUNNING):
            return None  # a closed batch ends as a whole, in `update`
        self._retire([request])
        return request

    def _retire(self, requests: Seq[Request]) -> None:
        """Let requests without live sequences leave the queues."""
        self.queues.retire(requests)
        for request in requests:
            self._lifecycle.ended.pop(request, None)
            if request.is_finished:
                self.limits.forget(request)

    # ================================================================ planning a step

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to do. `update` takes its results.

        Earlier steps may still be in flight: blocks are taken and given back in the order of the
        plans, which is the order in which the worker computes, and tokens being sampled count as
        `num_pending`. A sequence that turns out to have ended is merely computed once too often.
        """
        builder = PlanBuilder(self.config.max_num_batched_tokens)
        self.queues.recall(self.kv.is_in_progress, self.queues.num_free_slots + MAX_DEFERRALS)
        may_pause = not self._has_paused and self.kv.batch_formation.is_open(self.running)
        self._has_paused = False
        if self.queues.ready:
            self._displace_running(builder, may_pause)
            if may_pause and not builder.started:
                self._start_alone(builder)
        if not self._has_paused:
            self._continue_running(builder)
            if self.swapped and not builder.ran_out_of_blocks:
                self._resume_swapped(builder)
            if self.queues.ready and not builder.ran_out_of_blocks:
                self._admit_waiting(builder)
        if self._resting and builder.is_empty and not self.in_flight:
            self._resting.clear()
            self._continue_running(builder)
        batches = self.kv.batch_formation
        if builder.is_empty and not batches.leaving(self._lifecycle.ended, self.running):
            return None  # closing rows can wait
        plan = builder.build(self._next_step, self._lifecycle.take_row_changes())
        self._next_step += 1
        self.in_flight[plan.step_id] = builder.in_flight
        return plan

    # ---------------------------------------------------------------- displacing running requests

    def _displace_running(self, builder: PlanBuilder, may_pause: bool) -> None:
        """Preempt running requests for the first waiting one if it would not fit otherwise.

        `may_pause`: whether the step may leave the running requests out. They are not preempted
        because the step is too short for them, too.
        """
        head = self.queues.ready.first()
        if head is None or not self._may_pass(head, self._next_swapped()):
            return
        victims = [
            victim
            for victim in self.policy.displaceable(head, self.running)
            if not victim.num_undecided
        ]
        if not victims or head.is_pending:
            return
        room = builder.budget if may_pause else builder.budget - self.queues.num_running_seqs
        if not self._fits(head, builder, room, victims):
            return
        for victim in victims:
            if self._fits(head, builder, room):
                break
            self._preempt(victim, builder)
        # At once, or the running requests would grow into the room that it needs.
        head.refused_at = None
        outcome = self._admit(head, builder, builder.budget - self.queues.num_running_seqs)
        if may_pause and outcome is not Admission.STARTED:
            self._admit_alone(head, builder)

    def _next_swapped(self) -> Request | None:
        """The swapped request that comes back first. Waiting ones that pass it do not change which
        one that is."""
        return self.policy.victims(self.swapped)[-1] if self.swapped else None

    def _may_pass(self, waiting: Request, swapped: Request | None) -> bool:
        """Whether a waiting request need not wait until all swapped ones are back, of which
        `swapped` is the next."""
        return swapped is None or self.policy.may_pass(waiting, swapped)

    def _fits(
        self, request: Request, builder: PlanBuilder, room: int, leaving: Seq[Request] = ()
    ) -> bool:
        """Whether a waiting request could start in this step, which has `room` tokens for it, if
        some running ones left."""
        demand = self._demand(request, builder)
        if demand.hit.is_unfinished or demand.hit.in_progress:
            return False
        slots = self.queues.num_free_slots
        slots += sum(other.method.max_sequences for other in leaving)
        if request.method.max_sequences > slots or room < self._least_at_once(demand):
            return False
        held = [seq for other in leaving for seq in other.sequences if seq.table is not None]
        free = self.kv.num_free_blocks - self._num_reserved_blocks
        # What becomes free takes as long to count as there are blocks, in every step in which the
        # request waits, so that is done only where it may be enough.
        if demand.num_blocks > free + self.kv.num_table_entries(held):
            return False
        return demand.num_blocks <= free + self.kv.num_releasable_blocks(held, demand.hit)

    # ---------------------------------------------------------------- a step without running ones

    def _start_alone(self, builder: PlanBuilder) -> None:
        """Start the first waiting request if what it must compute at once, its encoder's input or
        a prompt that is not chunked, has no room in a step beside the running sequences, and leave
        these out of the step. Else it would wait until enough of them have ended, and requests
        behind it would, too."""
        head, room = self.queues.ready.first(), builder.budget - self.queues.num_running_seqs
        if head is None:
            return
        most = 1 if self.config.enable_chunked_prefill else head.sequences[0].num_tokens
        if len(head.encoder_token_ids) + most <= room:
            return
        if head.is_pending or not self._may_pass(head, self._next_swapped()):
            return
        if head.method.max_sequences > self.queues.num_free_slots:
            return
        if self._was_refused(head, self.kv.num_free_blocks):
            return
        if self._least_at_once(self._demand(head, builder)) > room:  # else enough of it is cached
            self._admit_alone(head, builder)

    def _admit_alone(self, request: Request, builder: PlanBuilder) -> None:
        """Start a waiting request if it fits into a step without the running ones."""
        self._has_paused = self._admit(request, builder, builder.budget) is Admission.STARTED

    def _least_at_once(self, demand: Demand) -> int:
        """Tokens that the first step of a waiting request has to compute."""
        least = 1 if self.config.enable_chunked_prefill else demand.num_tokens
        return demand.hit.num_to_encode + least

    # ---------------------------------------------------------------- running requests

    def _continue_running(self, builder: PlanBuilder) -> None:
        """Let every running request compute its next tokens, in the policy's order."""
        started, preempted = builder.started, builder.preempted
        # One token is reserved for each sequence still to come, so that decodes never starve.
        later = self.queues.num_running_seqs - sum(len(request.sequences) for request in started)
        victims = self.policy.victims(self.running)
        resting = self._resting
        for request in reversed(victims):
            if (started and request in started) or (preempted and request in preempted):
                continue
            sequences = request.sequences
            later -= len(sequences)
            if resting and request in resting:
                continue
            # Decodes into blocks that are exclusively theirs are the common case, and take no
            # further decisions. The last token of a prompt may look like one, but may be followed
            # by several draws.
            method = request.method
            if method.wants == "token" and not request.catching_up:
                max_length = method.max_length
                for seq in sequences:
                    table = seq.table
                    end = seq.num_computed_tokens + 1
                    if (
                        table is None
                        or end != len(seq.token_ids) + seq.num_pending
                        or not seq.num_prompt_tokens < end <= table.writable_until
                        or end >= max_length
                    ):
                        break
                else:
                    builder.decode(sequences)
                    continue
            elif method.wants == "candidates" and sequences and not request.catching_up:
                end = sequences[0].num_computed_tokens + 1  # beams are equally long
                if end == len(sequences[0].token_ids):
                    goals = _goals_of_beams(sequences, end)
                    if not goals or self._make_room(request, goals, victims, builder):
                        builder.search(request, method, end)
                    continue
            targets = self._next_targets(request, builder, builder.budget - later)
            goals = [(seq, seq.num_computed_tokens + n) for seq, n in targets]
            if goals and self._make_room(request, goals, victims, builder):
                for seq, n in targets:
                    builder.add(seq, n)

    def _next_targets(
        self, request: Request, builder: PlanBuilder, room: int
    ) -> list[tuple[Sequence, int]]:
        """Which of a request's sequences compute how many tokens next, `room` at most."""
        if not request.catching_up:
            targets = [
                (seq, min(seq.num_expected_tokens - seq.num_computed_tokens, room))
                for seq in request.sequences
                if not _is_complete(seq)
            ]
            return targets if len(targets) <= room else []
        for leader, follower in take_ready_forks(request.sequences):
            self.kv.fork(leader, follower)
            builder.open(follower, self.kv.table_writes(follower))
        started = [seq for seq in request.sequences if seq.table is not None]
        behind = [seq for seq in started if seq.num_tokens - seq.num_computed_tokens > 1]
        if len(started) == len(request.sequences) and not behind:
            request.catching_up = False
            return self._next_targets(request, builder, room)
        targets, rebuilt = [], rebuild_goals(request.sequences)
        for seq in started:
            n = min(rebuilt[seq] - seq.num_computed_tokens, room)
            if n > 0:
                targets.append((seq, n))
                room -= n
        return targets

    def _make_room(
        self,
        request: Request,
        goals: list[tuple[Sequence, int]],
        victims: Seq[Request],
        builder: PlanBuilder,
    ) -> bool:
        """Make sequences of a request writable up to their goals; preempt while blocks run out.

        Victims are requests that this step has not planned yet, the request itself last: all that
        are planned stand behind it in `victims`. False if it came to that.
        """
        while (changes := self.kv.append(goals)) is None:
            builder.ran_out_of_blocks = True
            victim = next(
                each
                for each in victims
                if each.status is Status.RUNNING
                and not each.num_undecided
                and each not in builder.started
            )
            self._preempt(victim, builder)
            if victim is request:
                return False
        builder.apply(changes)
        return True

    def _preempt(self, request: Request, builder: PlanBuilder) -> None:
        """Take a running request off the device, with all its sequences and blocks."""
        held = [seq for seq in request.sequences if seq.table is not None]
        mode: str = self.config.preemption_mode
        if mode == "auto":
            mode = self.costs.choose(held, self.kv)
        for seq in held:
            if not builder.withdraw(seq.seq_id):
                self._lifecycle.close_row(seq)
        pairs = self.kv.swap_out(held) if mode == "swap" else None
        if pairs is not None:
            builder.swap_out(pairs)
            request.num_swapped_blocks = len(pairs)
            self.queues.move(request, Status.SWAPPED)
        else:
            mode = "recompute"
            self._recompute(request)
        request.refused_at = None
        request.num_preemptions += 1
        self.num_preemptions[mode] += 1
        builder.preempted.append(request)
        if self.on_preempt is not None:
            self.on_preempt(request)

    def _recompute(self, request: Request) -> None:
        """Give a request's blocks back, and let it wait in its old place to be recomputed."""
        for seq in request.sequences:
            self.kv.free(seq)
            seq.num_computed_tokens = 0
        self.queues.move(request, Status.WAITING)

    # ---------------------------------------------------------------- swapped requests

    def _resume_swapped(self, builder: PlanBuilder) -> None:
        """Bring swapped requests back, as far as there is room."""
        for request in reversed(self.policy.victims(self.swapped)):
            held = [seq for seq in request.sequences if seq.table is not None]
            needed = request.num_swapped_blocks
            if self.running:
                # With room to grow, or it would be the first to be preempted again.
                needed += len(held) * len(self.kv.specs) + self._num_reserved_blocks
            if (
                request in builder.preempted
                or request.is_pending
                or needed > self.kv.num_free_blocks
                or request.method.max_sequences > self.queues.num_free_slots
                or len(request.sequences) > builder.budget
            ):
                return
            moved = self.kv.swap_in(held)
            assert moved is not None, "the room was counted before"
            pairs, changes = moved
            self._start(request, builder)
            builder.swap_in(pairs)
            builder.apply(changes)
            for seq in held:
                builder.open(seq)
            targets = self._next_targets(request, builder, builder.budget)
            room = self.kv.append([(seq, seq.num_computed_tokens + n) for seq, n in targets])
            if room is not None:  # else it runs from the next step on
                builder.apply(room)
                for seq, n in targets:
                    builder.add(seq, n)

    @property
    def _num_reserved_blocks(self) -> int:
        """Blocks that stay free when a request is admitted, so that running ones can grow."""
        return 0 if self.queues.is_idle else self._watermark

    def _start(self, request: Request, builder: PlanBuilder) -> None:
        """A request that holds its blocks runs from now on."""
        self.queues.move(request, Status.RUNNING)
        self._resting.pop(request, None)
        builder.started.append(request)

    # ---------------------------------------------------------------- waiting requests

    def _admit_waiting(self, builder: PlanBuilder) -> None:
        """Admit waiting requests in the policy's order; a few may pass one that does not fit."""
        batches, queues = self.kv.batch_formation, self.queues
        if not batches.is_open(self.running):
            return
        quota = batches.prefill_quota(self.policy.prefill_quota(self.waiting))
        swapped = self._next_swapped()
        passed: list[Request] = []
        num_deferred = 0
        for request in queues.ready:
            if builder.budget <= 0 or queues.num_free_slots <= 0:
                return
            if request in builder.preempted or not self._may_pass(request, swapped):
                return
            outcome = self._admit(request, builder, builder.budget, quota)
            if outcome is Admission.NEXT_STEP:
                return
            if outcome is Admission.STARTED:
                for other in passed:
                    other.num_passes += 1
            elif outcome is Admission.DEFERRED:  # it loses nothing by being passed
                num_deferred += 1
                if num_deferred == MAX_DEFERRALS:
                    return
            elif outcome is Admission.NO_ROOM:
                passed.append(request)
                limit = self.config.max_passes
                if request.num_passes >= limit or len(passed) > limit:
                    return

    def _admit(
        self, request: Request, builder: PlanBuilder, room: int, quota: int | None = None
    ) -> Admission:
        """Start a waiting request if it fits; at most `room` of its tokens are computed now.

        `quota`: the most tokens that a step with prompts should compute; None: no limit.
        """
        if request.is_pending:
            return Admission.PENDING
        free = self.kv.num_free_blocks
        if (
            room <= 0
            or request.method.max_sequences > self.queues.num_free_slots
            or self._was_refused(request, free)
        ):
            return Admission.NO_ROOM
        demand = self._demand(request, builder)
        if demand.hit.is_unfinished:
            return Admission.NEXT_STEP
        if demand.hit.awaited is not None:
            self.queues.defer(request, demand.hit.awaited)
            return Admission.DEFERRED
        if demand.num_blocks > free - self._num_reserved_blocks:
            if not self.queues.is_idle:
                request.refused_at = (free, demand.hit.missing)
                return Admission.NO_ROOM
            # Alone, it fits by the check in `add`, unless a block is held only to be copied.
            excess = demand.hit.num_tokens
            demand.hit = self.kv.without_partial(demand.hit)
            demand.num_tokens += excess - demand.hit.num_tokens
        if self._least_at_once(demand) > room:
            return Admission.NO_ROOM
        num_to_encode = demand.hit.num_to_encode
        num_tokens = min(demand.num_tokens, room - num_to_encode)
        if quota is not None:
            num_planned = self.config.max_num_batched_tokens - builder.budget
            has_prompt = num_planned > builder.num_rows
            if has_prompt and num_planned + num_to_encode + num_tokens > quota:
                return Admission.NEXT_STEP
        return self._allocate(request, demand, builder, num_tokens)

    def _was_refused(self, request: Request, free: int) -> bool:
        """Whether it did not fit before, and since then no block has come free, and no more of its
        prefix is cached. Alone, it may fit now."""
        if request.refused_at is None or self.queues.is_idle:
            return False
        refused_with, missing = request.refused_at
        return free <= refused_with and (missing is None or not self.kv.is_cached(missing))

    def _demand(self, request: Request, builder: PlanBuilder) -> Demand:
        kv, chunk = self.kv, self.config.max_num_batched_tokens
        leader, *others = request.sequences
        prepare_rebuild(request)
        goal = rebuild_goals(request.sequences)[leader] if others else leader.num_tokens
        num_unread = goal if request.reading is None else request.sampling.first_read
        if num_unread == 0 or request.avoids_cache:
            hit = kv.no_hit(leader)  # every position of the prompt must be computed
        else:
            # If nothing runs, hashing keeps no request waiting.
            max_hashes = builder.num_hashes_left if self.running else None
            hit = kv.lookup(leader, min(goal, num_unread), max_hashes)
            builder.num_hashes_left -= hit.num_hashes
        num_blocks = kv.num_blocks_to_admit(hit, leader.num_tokens, chunk)
        for seq in others:
            num_blocks += kv.num_blocks_for(seq.num_tokens, chunk)
            num_blocks -= kv.num_shared_blocks(seq.branch_at, seq.num_tokens)
        return Demand(hit, num_blocks, goal - hit.num_tokens)

    def _allocate(
        self, request: Request, demand: Demand, builder: PlanBuilder, num_tokens: int
    ) -> Admission:
        """Give a request its blocks, and let it compute its first `num_tokens`."""
        leader, hit = request.sequences[0], demand.hit
        changes = self.kv.allocate(leader, hit, hit.num_tokens + num_tokens)
        if changes is None:
            return Admission.NO_ROOM
        if request.avoids_cache or not request.was_admitted:
            request.num_cached_tokens = hit.num_cached_tokens
        request.was_admitted = True
        # Now: its windows may leave such blocks behind.
        request.found_unverified = not self.kv.is_verified(hit)
        for seq in request.sequences:
            seq.num_at_start = seq.num_tokens
        request.refused_at = None
        self._start(request, builder)
        builder.open(leader)
        builder.apply(changes)
        if hit.num_to_encode > 0:
            builder.encode(leader, hit.num_to_encode)
        if num_tokens > 0:
            builder.add(leader, num_tokens)
        return Admission.STARTED

    # ================================================================ processing its results

    def update(self, plan: StepPlan, result: StepResult) -> Progress:
        """Process what a step has computed: append tokens, fork and end sequences."""
        step = self.in_flight.pop(plan.step_id)
        self.costs.observe(plan, result)
        self._settle(step, result.undrawn)
        if result.errors:
            self._end_failed(step, result.errors)
        if step.prompts:
            _take_readings(step, result)
        self._append_drawn(step, result)
        if step.searching:
            self._advance_searches(step, result)
        if self._resting:
            self._wake(result.waiting)
        advanced = self._lifecycle.take_advanced()
        self.policy.generated(advanced)
        finished = self.kv.batch_formation.leaving(self._lifecycle.ended, self.running)
        if finished:
            self._retire(finished)
        return Progress(advanced, finished)

    def _settle(self, step: StepInFlight, undrawn: frozenset[int]) -> None:
        """What was computed is in the cache, and what was copied may be overwritten. Sequences that
        are `undrawn` will compute their last token again."""
        self.kv.release_sources(step.held)
        for request in step.undecided:
            request.num_undecided -= 1
        for seq, table, num_computed in step.filled:
            if seq.table is table:  # else it was preempted since, and is recomputed
                if undrawn and seq.seq_id in undrawn:
                    num_computed = min(num_computed, seq.num_tokens - 1)
                self.kv.settle(seq, num_computed)

    def _end_failed(self, step: StepInFlight, errors: Mapping[int, RequestFailed]) -> None:
        """End the requests of rows that could not be computed, with all their sequences.

        Cached blocks may be the cause of logits that are not finite, so nothing may start from them
        any more. They may be of another request, whose prompt goes wrong further on, and of which
        not all is computed yet. So a request that got no token since it was admitted is computed
        once more, with nothing from the cache.
        """
        owners = step.owners()
        for seq_id, error in errors.items():
            request = owners.get(seq_id)
            if request is None or all(seq.seq_id != seq_id for seq in request.sequences):
                continue  # it has ended while the step ran
            sequences = list(request.sequences)
            if isinstance(error, LogitsNotFinite):
                for seq in sequences:
                    self.kv.forget(seq)
                if _may_be_spoilt(request):
                    self._begin_again(request, sequences)
                    continue
            request.error = error
            for seq in sequences:
                self._lifecycle.finish(seq, "error")

    def _begin_again(self, request: Request, sequences: Seq[Sequence]) -> None:
        """Let a request wait to be computed without the cache, by new sequences in place of these;
        steps in flight know these alone."""
        request.avoids_cache = True
        request.reading = reading_of(request.sampling)
        for seq in sequences:
            twin = self._lifecycle.create(request, list(seq.token_ids), seq.sample_index)
            twin.cumulative_logprob = seq.cumulative_logprob
            request.sequences.append(twin)
            self._lifecycle.free(seq)
            seq.finish_reason = "error"
        self.queues.move(request, Status.WAITING)

    def _append_drawn(self, step: StepInFlight, result: StepResult) -> None:
        """Append the sampled tokens."""
        lifecycle = self._lifecycle
        advanced = lifecycle.advanced
        is_scored, undrawn = bool(result.draws or result.logprobs), result.undrawn
        for seq, token_id in zip(step.drawn, result.token_ids, strict=True):
            if seq.num_pending:
                seq.num_pending -= 1
            if seq.finish_reason is not None:
                continue  # it ended while the step ran
            if undrawn and seq.seq_id in undrawn:
                self._sit_out(seq)
                continue
            method = seq.request.method
            if is_scored and (seq.seq_id in result.draws or seq.seq_id in result.logprobs):
                self._append_scored(seq, token_id, result)
            elif method.wants == "token":
                advanced.append(seq)
                reason = method.accept(seq, token_id)
                if reason is not None:
                    lifecycle.finish(seq, reason)
            elif method.wants == "kv":
                method.computed(seq, lifecycle)

    def _append_scored(self, seq: Sequence, token_id: int, result: StepResult) -> None:
        """Append a token that comes with log-probabilities, or the first tokens of all samples."""
        method, request = seq.request.method, seq.request
        assert method.wants == "token", "only these methods sample tokens"
        draws = result.draws.get(seq.seq_id, [token_id])
        self._lifecycle.advanced.append(seq)
        samples = [seq]
        if len(draws) > 1:
            method.start(seq, draws, self._lifecycle)
            by_index = {s.sample_index: s for s in request.sequences + request.finished}
            samples = [by_index[index] for index in range(len(draws))]
        scores = result.logprobs.get(seq.seq_id, [])
        for sample, score in zip(samples, scores, strict=False):
            sample.last_logprobs = score
            sample.cumulative_logprob += score.logprob
        if len(draws) == 1:
            reason = method.accept(seq, token_id)
            if reason is not None:
                self._lifecycle.finish(seq, reason)

    def _advance_searches(self, step: StepInFlight, result: StepResult) -> None:
        """Let beam searches choose among their candidates, then append all chosen tokens together:
        the device idles until this is done."""
        candidates = result.candidates
        searches = []
        for search in step.searching:
            sequences = search.request.sequences
            if search.request.status is not Status.RUNNING:
                continue  # it was aborted, or begins again
            if not result.undrawn.isdisjoint([seq.seq_id for seq in sequences]):
                for seq in sequences:
                    self._sit_out(seq)
            elif sequences:
                searches.append(search)
        if not searches:
            return
        assert candidates is not None, "searches have requested them"
        lifecycle = self._lifecycle
        children: list[Sequence] = []
        token_ids: list[int] = []
        logprobs: list[float] = []
        for ranking in rank(searches, candidates):
            usual, others = ranking.split()
            best_logprobs, parents_of, best_ids = ranking.best(usual)
            for place, parents in zip(usual, parents_of, strict=True):
                children += lifecycle.branch(ranking.searches[place].request, parents)
            token_ids += best_ids
            logprobs += best_logprobs
            for place in others:
                request, method, _ = ranking.searches[place]
                chosen = method.advance(request, ranking.offered(place), lifecycle)
                if chosen is not None:
                    children += lifecycle.branch(request, chosen.parents)
                    token_ids += chosen.token_ids
                    logprobs += chosen.logprobs
        lifecycle.append(children, token_ids)
        for child, logprob in zip(children, logprobs, strict=True):
            child.cumulative_logprob = logprob

    # ---------------------------------------------------------------- rows that were not drawn

    def _sit_out(self, seq: Sequence) -> None:
        """No token could be drawn for a sequence: it is as if it had not computed its last token,
        which it does again when one can be drawn."""
        if seq.num_pending or seq.table is None:
            return  # the steps that continue it end first; or it is recomputed anyway
        request = seq.request
        is_running = request.status is Status.RUNNING
        if not self.kv.rewind(seq, seq.num_tokens - 1):
            for other in request.sequences:
                if is_running and other.table is not None:
                    self._lifecycle.close_row(other)
            self._recompute(request)
            return
        if is_running:
            self._lifecycle.take_back(seq)
            self._resting.setdefault(request, set()).add(seq.seq_id)

    def _wake(self, waiting: frozenset[int]) -> None:
        """Let requests continue none of whose rows is `waiting` any more."""
        for request, seq_ids in list(self._resting.items()):
            if waiting.isdisjoint(seq_ids):
                del self._resting[request]


def _may_be_spoilt(request: Request) -> bool:
    """Whether a request may have failed because of what it found in the cache. A token drawn since
    then says that it is sound, and what is pinned was verified."""
    has_drawn = any(seq.num_tokens != seq.num_at_start for seq in request.sequences)
    return request.found_unverified and not has_drawn


def _take_readings(step: StepInFlight, result: StepResult) -> None:
    """Give requests what was read of their prompts."""
    for seq_id, (request, start) in step.prompts.items():
        part: Any = result.prompt_logprobs.get(seq_id, result.pooled.get(seq_id))
        is_alive = any(seq.seq_id == seq_id for seq in request.sequences)
        if part is not None and request.reading is not None and is_alive:
            request.reading.take(start, part)


def _goals_of_beams(sequences: Seq[Sequence], end: int) -> list[tuple[Sequence, int]]:
    """The running beams that need room to compute up to `end`: those that were forked, or whose
    blocks are full."""
    goals = []
    for seq in sequences:
        assert seq.table is not None, "it runs"
        if end > seq.table.writable_until:
            goals.append((seq, end))
    return goals


def _is_complete(seq: Sequence) -> bool:
    """Whether the steps in flight compute all tokens of a sequence that are certain to exist."""
    num_expected = seq.num_expected_tokens
    if seq.num_computed_tokens >= num_expected:  # more, if draws that it was to continue failed
        return True
    return seq.num_pending > 0 and num_expected >= seq.request.method.max_length
