"""How much work a step is: what the cost model prices and what a recorder writes down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.core.step import StepPlan


@dataclass(frozen=True, slots=True)
class StepShape:
    """The amounts in one step, of the whole model whatever the number of devices.

    Layers with sliding windows read less than the others, so what attention reads is the mean over
    layers.
    """

    num_seqs: int  # computed
    num_tokens: int  # computed
    num_sampled: int  # rows of logits
    kv_tokens: float  # cached tokens that attention reads, those of the step included
    attention_pairs: float  # (query, key) pairs of sequences that compute more than one token
    num_copied_blocks: int = 0
    num_swapped_blocks: int = 0  # in either direction
    num_requests: int = 0  # that the sequences belong to; 0 where that is not known


class RowLengths:
    """Owns how many tokens each of the worker's rows has computed; follows plans by their deltas.

    It must see every plan from a moment on at which nothing ran; rows of before may still be closed
    then.
    """

    def __init__(self, layer_windows: Sequence[int | None]) -> None:
        """`layer_windows[i]` is layer i's window, None for full attention."""
        counts = Counter(layer_windows)
        self._num_computed: dict[int, int] = {}
        self._windows = [
            (window, count / len(layer_windows))
            for window, count in counts.items()
            if window is not None
        ]
        self._full_share = counts[None] / len(layer_windows)

    @property
    def num_rows(self) -> int:
        return len(self._num_computed)

    def follow(self, plan: StepPlan) -> StepShape:
        """Apply a plan, and measure it."""
        rows = self._num_computed
        for fork in plan.forks:
            rows[fork.child_id] = rows[fork.parent_id]
        for seq_id in plan.closed:
            rows.pop(seq_id, None)
        for opened in plan.opened:
            rows[opened.seq_id] = opened.num_computed_tokens
        num_tokens = context = pairs = 0
        for seq_id, count in zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True):
            before = rows[seq_id]
            rows[seq_id] = end = before + count
            num_tokens += count
            context += end
            if count > 1:
                pairs += count * before + count * (count + 1) // 2
        return StepShape(
            num_seqs=len(plan.seq_ids),
            num_tokens=num_tokens,
            num_sampled=len(plan.sampled) + len(plan.expanded),
            kv_tokens=self._mean_context(plan, context) if self._windows else context,
            attention_pairs=self._mean_pairs(plan, pairs) if self._windows else pairs,
            num_copied_blocks=len(plan.copies),
            num_swapped_blocks=len(plan.swap_out) + len(plan.swap_in),
        )

    def _mean_context(self, plan: StepPlan, full: int) -> float:
        """What a layer reads on average; a window and the step's own tokens bound it."""
        mean = self._full_share * full
        for window, share in self._windows:
            mean += share * sum(
                min(self._num_computed[seq_id], window + count - 1)
                for seq_id, count in zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True)
            )
        return mean

    def _mean_pairs(self, plan: StepPlan, full: int) -> float:
        mean = self._full_share * full
        for window, share in self._windows:
            for seq_id, count in zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True):
                if count > 1:
                    end = self._num_computed[seq_id]
                    mean += share * windowed_pairs(end - count, end, window)
        return mean


def windowed_pairs(start: int, end: int, window: int) -> int:
    """Pairs of queries at positions start .. end - 1 with the keys that a window lets them see."""
    inside = min(max(window, start), end)  # queries before it see everything
    triangle = inside * (inside + 1) // 2 - start * (start + 1) // 2
    return triangle + (end - inside) * window


class CopiedExtents:
    """The same where a fork copies all that is reserved for a sequence, filled or not, as the
    paper's Orca does. octavo's own reservations copy the blocks that are used."""

    def __init__(self, rows: RowLengths) -> None:
        self._rows = rows

    def follow(self, plan: StepPlan) -> StepShape:
        """Apply a plan, and measure it."""
        shape = self._rows.follow(plan)
        if not plan.copies:
            return shape
        # A running sequence with reserved memory gets a new table only when it moves. Its extent
        # was rounded up to a power of two.
        opened = {row.seq_id for row in plan.opened}
        moved = [len(write.block_ids) for write in plan.table_writes if write.seq_id not in opened]
        return replace(shape, num_copied_blocks=sum(1 << (n - 1).bit_length() for n in moved))


@dataclass(slots=True)
class _Batch:
    num_requests: int
    longest_prompt: int
    num_decoded: int = 0


class PaddedBatches:
    """The same for request-level batching: all prompts are padded to the longest, and a request
    that is done is computed on until the last of its batch is done, too."""

    def __init__(self, rows: RowLengths) -> None:
        self._rows = rows
        self._batch = _Batch(0, 0)

    def follow(self, plan: StepPlan) -> StepShape:
        """Apply a plan, and measure what a padding engine would compute."""
        shape = self._rows.follow(plan)
        if plan.opened:
            longest = max(opened.num_prompt_tokens for opened in plan.opened)
            self._batch = batch = _Batch(len(plan.opened), longest)
            pairs = batch.num_requests * longest * (longest + 1) // 2
            return StepShape(
                num_seqs=batch.num_requests,
                num_tokens=batch.num_requests * longest,
                num_sampled=batch.num_requests,
                kv_tokens=batch.num_requests * longest,
                attention_pairs=pairs,
            )
        if not plan.seq_ids:
            return shape
        batch = self._batch
        if plan.forks and batch.num_decoded == 0:
            batch.num_requests = max(batch.num_requests, shape.num_seqs)
        batch.num_decoded += 1
        return StepShape(
            num_seqs=batch.num_requests,
            num_tokens=batch.num_requests,
            num_sampled=batch.num_requests,
            kv_tokens=batch.num_requests * (batch.longest_prompt + batch.num_decoded),
            attention_pairs=0,
            num_copied_blocks=shape.num_copied_blocks,
        )
