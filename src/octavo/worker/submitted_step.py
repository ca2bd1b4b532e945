"""A step that the model runner has started: what is left to do for it, and its result."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from torch import Tensor

from octavo.core.step import StepPlan, StepResult
from octavo.errors import RequestFailed
from octavo.worker.device.base import Moment
from octavo.worker.input_batch import Drawn, InputBatch
from octavo.worker.prompt_reading import NOTHING, not_finite
from octavo.worker.sampler import Choice, logits_not_finite, rows_not_finite


class SubmittedStep:
    """Its result can be asked for once or more."""

    def __init__(self, plan: StepPlan, batch: InputBatch, started: Moment, swapped: Moment) -> None:
        """`started`, `swapped`: before blocks are swapped, and after that."""
        self.plan = plan
        self.read = NOTHING  # of prompts
        self.errors: dict[int, RequestFailed] = {}  # rows for which nothing could be drawn
        self.undrawn: frozenset[int] = frozenset()  # those for which nothing could be drawn yet
        self.drawn: Drawn | None = None
        self.num_hit_experts: Tensor | None = None  # so far, in all steps
        self.draw: Callable[[], None] | None = None  # what is left of it
        # Once its tokens are drawn:
        self.choice: Choice | None = None
        self.ended: Moment | None = None
        self.followed_by: Callable[[], None] | None = None
        self._batch = batch
        self._moments = started, swapped
        self._result: StepResult | None = None

    def follow(self, draw: Callable[[], None]) -> None:
        """Call `draw` as soon as this step's tokens are known: those of the next depend on them."""
        self.followed_by = draw

    def end_ahead(self) -> Moment | None:
        """The step's end, if the device still has to get there: the next step begins then, so that
        it needs no moment of its own, which would take the device some microseconds."""
        return None if self.ended is None or self.ended.is_reached() else self.ended

    def finish_draw(self) -> None:
        """Start to draw the tokens, if only masks were missing."""
        draw, self.draw = self.draw, None
        if draw is not None:
            draw()

    def result(self) -> StepResult:
        """Wait for the device; the rows learn what was drawn."""
        if self._result is None:
            self._result = self._collect()
        return self._result

    def _collect(self) -> StepResult:
        self.finish_draw()
        plan, choice, drawn, ended = self.plan, self.choice, self.drawn, self.ended
        assert choice is not None, "results are asked for in the order of the steps"
        assert ended is not None, "it is set with the choice"
        assert drawn is not None, "it is set when the step is started"
        started, swapped = self._moments
        ended.wait()
        first = choice.first_tokens()
        self._batch.fill(drawn, first)
        following_seconds = 0.0
        if self.followed_by is not None:
            began = perf_counter()
            self.followed_by()
            self.followed_by = None
            following_seconds = perf_counter() - began
        candidates = choice.candidates()
        ids = plan.ending
        failed = [ids[row] for row in rows_not_finite(first, candidates)]
        if self.undrawn:  # of which nothing is known
            failed = [seq_id for seq_id in failed if seq_id not in self.undrawn]
        swaps = bool(plan.swap_out or plan.swap_in)
        scores, pooled = self.read.scored(), self.read.pooled()
        return StepResult(
            plan.step_id,
            first.tolist(),
            draws={ids[row]: tokens for row, tokens in choice.draws().items()},
            candidates=candidates,
            logprobs={ids[row]: entries for row, entries in choice.logprobs().items()},
            prompt_logprobs=scores,
            pooled=pooled,
            errors=logits_not_finite([*not_finite(scores, pooled), *failed]) | self.errors,
            undrawn=self.undrawn,
            waiting=self._batch.waiting(),
            num_hit_experts=0 if self.num_hit_experts is None else int(self.num_hit_experts),
            compute_seconds=ended.seconds_since(swapped) if plan.seq_ids else 0.0,
            swap_seconds=swapped.seconds_since(started) if swaps else 0.0,
            following_seconds=following_seconds,
        )
