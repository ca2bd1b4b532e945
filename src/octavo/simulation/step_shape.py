"""How much work a step is: what the cost model prices and what a recorder writes down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

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

    Lengths are in one array, so that a step of many decodes costs a few operations on arrays: a
    server follows its own steps, too.
    """

    def __init__(self, window_sizes: Mapping[int | None, int]) -> None:
        """`window_sizes`: by window (None: full attention), how much of a token's keys and values
        layers with that window have, in any unit."""
        total = sum(window_sizes.values())
        self._places: dict[int, int] = {}  # of rows, dense: 0, 1, ...
        self._rows: list[int] = []  # by their places
        self._lengths = np.zeros(64, np.int64)  # by places
        self._windows = [
            (window, size / total) for window, size in window_sizes.items() if window is not None
        ]
        self._full_share = window_sizes.get(None, 0) / total

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def follow(self, plan: StepPlan) -> StepShape:
        """Apply a plan, and measure it."""
        for fork in plan.forks:
            self._set(fork.child_id, int(self._lengths[self._places[fork.parent_id]]))
        for seq_id in plan.closed:
            self._close(seq_id)
        for opened in plan.opened:
            self._set(opened.seq_id, opened.num_computed_tokens)
        for seq_id, position in zip(*plan.token_writes[:2], strict=True):
            if seq_id in self._places:  # from here on it is computed again
                place = self._places[seq_id]
                self._lengths[place] = min(int(self._lengths[place]), position)
        num_seqs, num_tokens = len(plan.seq_ids), plan.num_tokens
        chunks = self._chunks(plan) if num_tokens > num_seqs else []
        ends = self._advanced(plan)
        full = int(ends.sum())
        context: float = full
        pairs: float = sum(
            count * (end - count) + count * (count + 1) // 2 for count, end in chunks
        )
        if self._windows:
            context, pairs = self._mean_context(ends, full, chunks), self._mean_pairs(pairs, chunks)
        return StepShape(
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            num_sampled=len(plan.sampled) + len(plan.expanded),
            kv_tokens=context,
            attention_pairs=pairs,
            num_copied_blocks=len(plan.copies),
            num_swapped_blocks=len(plan.swap_out) + len(plan.swap_in),
        )

    def _set(self, seq_id: int, length: int) -> None:
        place = self._places.get(seq_id)
        if place is None:
            place = self._places[seq_id] = len(self._rows)
            self._rows.append(seq_id)
            if place == len(self._lengths):
                self._lengths = np.concatenate((self._lengths, np.zeros_like(self._lengths)))
        self._lengths[place] = length

    def _close(self, seq_id: int) -> None:
        """The last row takes its place."""
        place = self._places.pop(seq_id, None)
        if place is None:
            return
        last = self._rows.pop()
        if last != seq_id:
            self._rows[place] = last
            self._places[last] = place
            self._lengths[place] = self._lengths[len(self._rows)]

    def _chunks(self, plan: StepPlan) -> list[tuple[int, int]]:
        """Tokens of rows that compute several, which are last in a plan, and lengths after it."""
        chunks = []
        for seq_id, count in zip(
            reversed(plan.seq_ids), reversed(plan.num_scheduled_tokens), strict=True
        ):
            if count == 1:
                break
            place = self._places[seq_id]
            self._lengths[place] += count - 1  # and 1 as all rows
            chunks.append((count, int(self._lengths[place]) + 1))
        return chunks

    def _advanced(self, plan: StepPlan) -> NDArray[np.int64]:
        """Lengths of the plan's rows, in any order, after one more token of each."""
        if len(plan.seq_ids) == len(self._rows):
            ends = self._lengths[: len(self._rows)]
            ends += 1
            return ends
        places = [self._places[seq_id] for seq_id in plan.seq_ids]
        self._lengths[places] += 1
        return self._lengths[places]

    def _mean_context(
        self, ends: NDArray[np.int64], full: int, chunks: Sequence[tuple[int, int]]
    ) -> float:
        """What a layer reads on average; a window and the step's own tokens bound it."""
        mean = self._full_share * full
        for window, share in self._windows:
            read = int(np.minimum(ends, window).sum())
            read += sum(min(end, window + count - 1) - min(end, window) for count, end in chunks)
            mean += share * read
        return mean

    def _mean_pairs(self, full: float, chunks: Sequence[tuple[int, int]]) -> float:
        mean = self._full_share * full
        for window, share in self._windows:
            mean += share * sum(windowed_pairs(end - count, end, window) for count, end in chunks)
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
