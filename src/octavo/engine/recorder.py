"""Records the core's steps as counters and events."""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.kv.prefix_matcher import PrefixHit
from octavo.core.preemption import num_common
from octavo.core.scheduler import Progress
from octavo.core.sequence import Request, Sequence, Status
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.engine.events import (
    Admitted,
    BlockEvents,
    Copied,
    Counters,
    Evicted,
    Forked,
    Gauges,
    Preempted,
    Swapped,
)


class Recorder:
    """Observes one engine. Admissions, preemptions and counters are always recorded, events of
    single blocks only while `watching`."""

    def __init__(
        self,
        engine: Engine,
        on_admission: Callable[[Admitted], None],
        predict: Callable[[StepPlan], float] | None = None,
    ) -> None:
        """
        Args:
            engine: nothing runs yet.
            on_admission: called before the step that computes the admitted request's tokens.
            predict: how many seconds a step should take; called once for each, in their order.
        """
        self.counters = Counters()
        self.preempted: list[Preempted] = []
        self.watched = BlockEvents.none()
        self._engine = engine
        mixtures = engine.model_config.mixtures()
        self._last_routing = engine.model_config.last_routing
        if self._last_routing is not None:
            mixtures[self._last_routing] -= 1
        self._mixtures = list(mixtures.items())  # of all layers but the last
        self._step_size = (0, 0)  # tokens and sequences of the last step
        self._on_admission = on_admission
        self._predict = predict
        engine.observers.append(self._observe)
        engine.kv.on_allocate = self._note_admission
        engine.scheduler.on_preempt = self._note_preemption

    @property
    def watching(self) -> bool:
        return self._engine.kv.evicted_ids is not None

    @watching.setter
    def watching(self, on: bool) -> None:
        self._engine.kv.evicted_ids = [] if on else None

    def clear(self) -> None:
        """Forget recorded events, which have been sent. Counters are kept."""
        self.preempted, self.watched = [], BlockEvents.none()

    def forget_step(self) -> None:
        """The next report is not about a step."""
        self._step_size = (0, 0)

    def gauges(self) -> Gauges:
        """The engine's present state."""
        scheduler, kv = self._engine.scheduler, self._engine.kv
        return Gauges(
            len(scheduler.running),
            len(scheduler.waiting),
            len(scheduler.swapped),
            sum(len(request.sequences) for request in scheduler.running),
            kv.pool.num_free,
            kv.pool.num_free_cached,
            kv.swap_pool.num_free,
            len(kv.pins),
            *self._step_size,
        )

    def _observe(self, plan: StepPlan, result: StepResult, progress: Progress) -> None:
        num_tokens = plan.num_tokens + plan.num_encoder_tokens
        self._step_size = (num_tokens, len(plan.seq_ids))
        self._count(plan, result, progress)
        if self.watching:
            self._note_moves(plan)

    def _count(self, plan: StepPlan, result: StepResult, progress: Progress) -> None:
        kv, scheduler, counters = self._engine.kv, self._engine.scheduler, self.counters
        counters.num_steps += 1
        counters.step_seconds += result.compute_seconds + result.swap_seconds
        if self._predict is not None:
            counters.predicted_seconds += self._predict(plan)
        counters.num_computed_tokens += self._step_size[0]
        counters.num_output_tokens += len(progress.advanced)
        counters.num_lookup_tokens = kv.num_lookup_tokens
        counters.num_hit_tokens = kv.num_hit_tokens
        counters.num_swap_preemptions = scheduler.num_preemptions["swap"]
        counters.num_recompute_preemptions = scheduler.num_preemptions["recompute"]
        counters.num_copied_blocks += len(plan.copies)
        counters.num_evicted_blocks = kv.num_evicted_blocks
        counters.num_swapped_out_blocks += len(plan.swap_out)
        counters.num_swapped_in_blocks += len(plan.swap_in)
        counters.num_hit_experts = result.num_hit_experts
        counters.num_expected_experts += sum(
            num_layers * routing.expected_distinct(self._step_size[0])
            for routing, num_layers in self._mixtures
        )
        if self._last_routing is not None:
            num_rows = plan.num_tokens if plan.only_decodes else max(1, len(plan.ending))
            counters.num_expected_experts += self._last_routing.expected_distinct(num_rows)

    def _note_admission(self, seq: Sequence, hit: PrefixHit) -> None:
        request, kv = seq.request, self._engine.kv
        end: str = hit.ended_by
        if not kv.enable_prefix_caching:
            end = "off"
        elif request.avoids_cache:
            end = "avoided"
        elif request.reading is not None and hit.num_tokens == request.sampling.first_read:
            end = "read"
        self._on_admission(
            Admitted(
                self._engine.clock(),
                request.request_id,
                len(request.encoder_token_ids) + seq.num_tokens,
                hit.num_found_tokens,
                hit.num_cached_tokens,
                end,
                kv.num_free_blocks,
                request.num_preemptions,
            )
        )

    def _note_preemption(self, request: Request) -> None:
        """Record that a request was just preempted, with the cost of resuming it."""
        costs, now = self._engine.scheduler.costs, self._engine.clock()
        if request.status is Status.SWAPPED:
            held = [seq for seq in request.sequences if seq.table is not None]
            num_blocks, num_tokens = self._engine.kv.num_swap_in_blocks(held), 0
            mode, seconds = "swap", costs.swap_seconds(num_blocks)
        else:
            first, *others = request.sequences
            num_blocks, num_tokens = 0, len(request.encoder_token_ids) + first.num_tokens
            num_tokens += sum(seq.num_tokens - num_common(first, seq) for seq in others)
            mode, seconds = "recompute", costs.recompute_seconds(num_tokens)
        event = Preempted(now, request.request_id, mode, num_blocks, num_tokens, seconds)
        self.preempted.append(event)

    def _note_moves(self, plan: StepPlan) -> None:
        now, kv, watched = self._engine.clock(), self._engine.kv, self.watched
        if plan.forks:
            watched.forked.append(
                Forked(now, [(fork.parent_id, fork.child_id) for fork in plan.forks])
            )
        if plan.swap_out:
            watched.swapped.append(Swapped(now, "out", plan.swap_out))
        if plan.swap_in:
            watched.swapped.append(Swapped(now, "in", plan.swap_in))
        if kv.evicted_ids:
            watched.evicted.append(Evicted(now, kv.evicted_ids))
            kv.evicted_ids = []
        if plan.copies:
            copies = [(copy.source, copy.target) for copy in plan.copies]
            watched.copied.append(Copied(now, copies))
