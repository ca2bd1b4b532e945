"""Who runs in the next step, and on which blocks (paper sections 4.5 and 5.2).

Order of a step: running requests continue, the most urgent first, and when blocks run out the
least urgent is preempted whole; then swapped requests come back; then waiting ones are admitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from octavo.config import SchedulerConfig
from octavo.core import regrow
from octavo.core.admission import Admission, Entry
from octavo.core.draft import PlanDraft, RowChanges
from octavo.core.kv.manager import KVCacheManager
from octavo.core.limits import Limits
from octavo.core.outcomes import Outcomes, Progress
from octavo.core.policy import POLICIES
from octavo.core.preemption import PreemptionCosts
from octavo.core.queues import Queues
from octavo.core.sequence import Request, Sequence, Status
from octavo.core.step import StepPlan, StepResult

# While few requests wait, prompts share a step of at most so many tokens; longer ones are computed
# one after the other. Of 512 to 8,192 tokens 1,536 gave the lowest 99th percentile of the time to
# the first token, 0.1 to 1.8 ms less than 8,192, at the same time a token (simulated 100 times for
# each of 6 to 14 requests a second, with the times of OPT-13B's steps on two H200s).
FEW_WAITING = 4
TOKENS_OF_FEW = 1536

# Waiting requests that a step finds to wait for a prefix that is being computed. Beyond these it
# looks at no others, so that a burst of any size costs a step no more than this.
MAX_DEFERRALS = 32


class Scheduler:
    """Decides, step by step, who runs. Where requests stand is in its queues; blocks are the
    manager's."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.kv = kv
        self.costs = PreemptionCosts()
        self.num_preemptions = {"swap": 0, "recompute": 0}
        self._queues = queues = Queues(config.max_num_seqs)
        # The same objects, for those who look.
        self.requests, self.waiting = queues.requests, queues.waiting
        self.swapped, self.running = queues.swapped, queues.running
        self.limits = Limits(config, kv, self.requests)
        self._policy = POLICIES[config.policy](config)
        self._admission = Admission(config, kv, queues, self._policy, clock)
        self._next_number = 0
        self._next_step = 0
        self._in_flight: dict[int, PlanDraft] = {}
        self._outcomes = Outcomes(kv)

    # ---------------------------------------------------------------- requests come and go

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestTooLong if it could never run to its end."""
        self.limits.check(request)
        request.number = self._next_number
        self._next_number += 1
        request.rank = self._policy.rank(request)
        request.sequences = [
            self._outcomes.new_sequence(request, list(request.prompt_token_ids), 0)
        ]
        self._queues.add(request)
        self.limits.note(request)

    def resume(self, request: Request, outputs: Mapping[int, list[int]]) -> None:
        """Queue a request whose samples have begun elsewhere, like one preempted by recompute.

        `outputs`: sample index -> its output tokens so far, for the samples that are alive.
        """
        self.add(request)
        if outputs:
            prompt = request.prompt_token_ids
            request.sequences = [
                self._outcomes.new_sequence(request, prompt + output, index)
                for index, output in sorted(outputs.items())
            ]

    def abort(self, request_id: str) -> Request | None:
        """End a request now, wherever it stands, and take its blocks back."""
        request = self.requests.get(request_id)
        if request is not None:
            for seq in list(request.sequences):
                self._outcomes.finish(seq, "abort")
            self._queues.retire([request])
        return request

    def finish_by_stop_string(self, seq: Sequence, stop: str) -> None:
        """End a sequence whose text has come to a stop string, if it has not ended there anyway."""
        seq.stop_reason = stop
        if seq.finish_reason is not None:
            seq.finish_reason = "stop"
            return
        request = seq.request
        if request.status is not Status.WAITING and regrow.leads(seq, request.sequences):
            self._begin_anew(request)
        self._outcomes.finish(seq, "stop")
        if not (self.kv.forms_batches and request.status is Status.RUNNING):
            self._queues.retire([request])

    # ---------------------------------------------------------------- one step

    def schedule(self) -> StepPlan | None:
        """Decide on the next step; None if there is nothing to do. `update` brings the results.

        Steps planned before may still be under way: blocks are taken and given back in the order
        of the plans, in which the worker computes, and tokens being drawn are counted as
        `num_pending`. A sequence that turns out to have ended is only computed once too often.
        """
        draft = PlanDraft(self.config.max_num_batched_tokens)
        queues = self._queues
        queues.recall(self.kv.is_in_progress, queues.num_free_seats + MAX_DEFERRALS)
        if self._policy.displaces and queues.ready:
            self._displace(draft)
        self._continue_running(draft)
        if not draft.ran_out_of_blocks:
            self._resume_swapped(draft)
            if not (self.kv.forms_batches and self.running):
                self._admit_waiting(draft)
        if draft.is_empty and not self._finished_batch():
            return None  # rows that have closed can wait
        plan = draft.to_plan(self._next_step, self._outcomes.rows)
        self._next_step += 1
        self._in_flight[plan.step_id] = draft
        self._outcomes.rows = RowChanges()
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> Progress:
        """Take in what a step computed: append, fork, free."""
        draft = self._in_flight.pop(plan.step_id)
        self.costs.observe(plan, result)
        progress = self._outcomes.take_in(draft, result)
        progress.finished += self._finished_batch()
        self._queues.retire(progress.finished)
        return progress

    # ---------------------------------------------------------------- running requests

    def _continue_running(self, draft: PlanDraft) -> None:
        """Let every running request take its next tokens, the most urgent first."""
        # One token each is kept for the sequences still to come: decodes never starve.
        later = self._queues.num_running_seqs - sum(
            len(request.sequences) for request in draft.started
        )
        running = self.running
        position = 0
        while position < len(running):  # preemption shortens the list from its end
            request = running[position]
            position += 1
            if draft.started and request in draft.started:
                continue
            sequences = request.sequences
            later -= len(sequences)
            # The common case, decodes into blocks of their own, needs no help from anybody. The
            # last token of a prompt is no such case: it may be followed by several draws.
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
                    draft.decode(sequences)
                    continue
            elif method.wants == "candidates" and sequences and not request.catching_up:
                # Beams are as long as each other. Few need help: those that were forked, and those
                # whose blocks are full.
                end = sequences[0].num_computed_tokens + 1
                if end == len(sequences[0].token_ids):
                    goals = []
                    for seq in sequences:
                        table = seq.table
                        assert table is not None, "it runs"
                        if end > table.writable_until:
                            goals.append((seq, end))
                    if not goals or self._make_room(request, goals, draft):
                        draft.search(request, method, end)
                    continue
            self._continue(request, draft, draft.budget - later)

    def _continue(self, request: Request, draft: PlanDraft, room: int) -> None:
        """Run a request's next tokens, at most `room`."""
        targets = self._next_targets(request, draft, room)
        goals = [(seq, seq.num_computed_tokens + n) for seq, n in targets]
        if goals and self._make_room(request, goals, draft):
            for seq, n in targets:
                draft.add(seq, n)

    def _make_room(
        self, request: Request, goals: list[tuple[Sequence, int]], draft: PlanDraft
    ) -> bool:
        """Let sequences of a request be written up to their goals; preempt if blocks run out.

        Later ones in the order go first, the request itself at last: it is decided, or had no
        goals. False if it came to that.
        """
        while (changes := self.kv.append(goals)) is None:
            draft.ran_out_of_blocks = True
            victim = next(
                r for r in reversed(self.running) if r not in draft.started and not r.num_undecided
            )
            self._preempt(victim, draft)
            if victim is request:
                return False
        draft.apply(changes)
        return True

    def _next_targets(
        self, request: Request, draft: PlanDraft, room: int
    ) -> list[tuple[Sequence, int]]:
        """Which of a request's sequences compute how many tokens next."""
        if not request.catching_up:
            targets = [
                (seq, min(seq.num_expected_tokens - seq.num_computed_tokens, room))
                for seq in request.sequences
                if not self._has_all_it_needs(seq)
            ]
            return targets if len(targets) <= room else []
        for leader, follower in regrow.take_ready(request.sequences):
            self.kv.fork(leader, follower)
            draft.open(follower)
            draft.table_writes += self.kv.table_writes(follower)
        started = [seq for seq in request.sequences if seq.table is not None]
        behind = [seq for seq in started if seq.num_tokens - seq.num_computed_tokens > 1]
        if len(started) == len(request.sequences) and not behind:
            request.catching_up = False
            return self._next_targets(request, draft, room)
        targets = []
        for seq in started:
            n = min(regrow.goal(seq, request.sequences) - seq.num_computed_tokens, room)
            if n > 0:
                targets.append((seq, n))
                room -= n
        return targets

    def _has_all_it_needs(self, seq: Sequence) -> bool:
        """Whether the steps under way bring a sequence to its end, or to a decision."""
        num_expected = seq.num_expected_tokens
        if seq.num_computed_tokens == num_expected:
            return True
        return seq.num_pending > 0 and num_expected >= seq.request.method.max_length

    # ---------------------------------------------------------------- preemption

    def _preempt(self, request: Request, draft: PlanDraft) -> None:
        """Take a running request off the device, with all its sequences and blocks (gang)."""
        held = [seq for seq in request.sequences if seq.table is not None]
        mode: str = self.config.preemption_mode
        if mode == "auto":
            mode = self.costs.choose(held, self.kv)
        for seq in held:
            if not draft.withdraw(seq.seq_id):
                self._outcomes.rows.close(seq)
        pairs = self.kv.swap_out(held) if mode == "swap" else None
        if pairs is not None:
            draft.swap_out += pairs
            self._queues.move(request, Status.SWAPPED)
        else:
            mode = "recompute"
            self._wait_anew(request)
        request.refused_with_free = None
        request.num_preemptions += 1
        self.num_preemptions[mode] += 1
        draft.preempted.append(request)

    def _begin_anew(self, request: Request) -> None:
        """A sequence ends from which others were still to fork: they need another to lead them."""
        if request.status is Status.RUNNING:
            for seq in request.sequences:
                if seq.table is not None:
                    self._outcomes.rows.close(seq)
        self._wait_anew(request)

    def _wait_anew(self, request: Request) -> None:
        """Give a request's blocks back, and let it wait in its old place to be recomputed."""
        for seq in request.sequences:
            self.kv.free(seq)
            seq.num_computed_tokens = 0
        self._queues.move(request, Status.WAITING)

    def _displace(self, draft: PlanDraft) -> None:
        """Preempt less urgent running requests for a waiting one that would not fit otherwise."""
        head = self._queues.ready[0]
        if self.swapped and not self._policy.may_displace(head, self.swapped[0]):
            return  # that one comes back first
        victims = [
            r for r in self.running if not r.num_undecided and self._policy.may_displace(head, r)
        ]
        if not victims or head.is_pending or not self._admission.fits(head, draft, victims):
            return
        victims.sort(key=lambda r: (r.level, r.rank))
        while not self._admission.fits(head, draft):
            self._preempt(victims.pop(), draft)
        # At once, or the running ones would grow into the room that it needs.
        head.refused_with_free = None
        self._admission.start(head, draft, draft.budget - self._queues.num_running_seqs)

    # ---------------------------------------------------------------- coming (back) in

    def _resume_swapped(self, draft: PlanDraft) -> None:
        """Bring swapped requests back, as far as there is room."""
        for request in list(self.swapped):
            held = [seq for seq in request.sequences if seq.table is not None]
            needed = self.kv.num_swap_in_blocks(held)
            if self.running:
                # Room to grow, or it would be the first to be preempted again.
                needed += len(held) * len(self.kv.specs) + self._admission.num_reserved_blocks
            seats = request.method.max_sequences
            if (
                request in draft.preempted
                or request.is_pending
                or needed > self.kv.num_free_blocks
                or seats > self._queues.num_free_seats
                or len(request.sequences) > draft.budget
            ):
                return
            moved = self.kv.swap_in(held)
            assert moved is not None, "the room was counted before"
            self._admission.enter(request, draft)
            draft.swap_in += moved[0]
            draft.apply(moved[1])
            for seq in held:
                draft.open(seq)
            targets = self._next_targets(request, draft, draft.budget)
            changes = self.kv.append([(s, s.num_computed_tokens + n) for s, n in targets])
            if changes is not None:  # else it runs from the next step on
                draft.apply(changes)
                for seq, n in targets:
                    draft.add(seq, n)

    def _admit_waiting(self, draft: PlanDraft) -> None:
        """Admit waiting requests in order; a few may pass one that does not fit."""
        few_wait = len(self.waiting) <= FEW_WAITING and not self.kv.forms_batches
        ready = self._queues.ready
        passed: list[Request] = []
        position = num_deferred = 0
        while position < len(ready) and draft.budget > 0 and self._queues.num_free_seats > 0:
            request = ready[position]
            if request in draft.preempted:
                return
            if self.swapped and not self._policy.may_displace(request, self.swapped[0]):
                return
            longest = self._room_beside_prompts(draft) if few_wait else None
            entry = self._admission.start(request, draft, draft.budget, longest)
            if entry is Entry.NEXT_STEP:
                return
            if entry is Entry.STARTED:
                for other in passed:
                    other.num_passes += 1
                continue
            if entry is Entry.DEFERRED:  # it loses nothing by being passed
                num_deferred += 1
                if num_deferred == MAX_DEFERRALS:
                    return
                continue
            position += 1
            if entry is Entry.TOO_EARLY:
                continue  # neither does this one, and there are few
            passed.append(request)
            limit = self.config.max_passes
            if request.num_passes >= limit or len(passed) > limit:
                return

    def _room_beside_prompts(self, draft: PlanDraft) -> int | None:
        """For one of few newcomers; None: the step has no prompt yet."""
        num_tokens = self.config.max_num_batched_tokens - draft.budget
        return TOKENS_OF_FEW - num_tokens if num_tokens > len(draft.seq_ids) else None

    # ---------------------------------------------------------------- ends

    def _finished_batch(self) -> list[Request]:
        """Request-level batching: all that ran, when the last of them is done."""
        if not self.kv.forms_batches or any(request.sequences for request in self.running):
            return []
        return list(self.running)
