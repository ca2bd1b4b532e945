from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.step import (
    BlockCopy,
    Fork,
    OpenedRow,
    SamplingSpec,
    StepPlan,
    TableWrite,
    TokenWrites,
)
from octavo.simulation.step_shape import (
    CopiedExtents,
    PaddedBatches,
    RowLengths,
    StepShape,
    windowed_pairs,
)


def opened(seq_id: int, num_prompt_tokens: int, num_computed: int = 0) -> OpenedRow:
    tokens = tuple(range(num_prompt_tokens))
    return OpenedRow(seq_id, tokens, num_prompt_tokens, num_computed, SamplingSpec(), 0, 0)


def plan(work: dict[int, int], **changes: object) -> StepPlan:
    """`work`: sequence -> tokens that it computes."""
    return StepPlan(0, list(work), list(work.values()), list(work), [], **changes)  # type: ignore[arg-type]


@given(start=st.integers(0, 60), count=st.integers(1, 60), window=st.integers(1, 70))
def test_what_a_window_sees(start: int, count: int, window: int) -> None:
    end = start + count
    expected = sum(min(position + 1, window) for position in range(start, end))
    assert windowed_pairs(start, end, window) == expected


def test_amounts_by_hand() -> None:
    rows = RowLengths({None: 1})
    # 10 prompt tokens, 4 of them cached; and a prompt of 3.
    prefill = rows.follow(plan({1: 6, 2: 3}, opened=[opened(1, 10, 4), opened(2, 3)]))
    pairs = (5 + 6 + 7 + 8 + 9 + 10) + (1 + 2 + 3)
    assert prefill == StepShape(2, 9, 2, 13, pairs)
    decode = rows.follow(
        plan(
            {1: 1, 3: 1},
            forks=[Fork(1, 3, 1)],
            closed=[2],
            copies=[BlockCopy(1, 2, 3)],
            swap_out=[(3, 1)],
        )
    )
    assert decode == StepShape(2, 2, 2, 22, 0, num_copied_blocks=1, num_swapped_blocks=1)
    assert rows.num_rows == 2


def test_windows_bound_what_is_read() -> None:
    """Two of three layers see 8 tokens."""
    rows = RowLengths({None: 1, 8: 2})
    prefill = rows.follow(plan({1: 20}, opened=[opened(1, 20)]))
    assert prefill.kv_tokens == pytest.approx((20 + 2 * 20) / 3)
    assert prefill.attention_pairs == pytest.approx((210 + 2 * windowed_pairs(0, 20, 8)) / 3)
    decode = rows.follow(plan({1: 1}))
    assert decode.kv_tokens == pytest.approx((21 + 2 * 8) / 3)


def test_the_paper_s_forks_copy_what_is_reserved() -> None:
    """A beam of 20 tokens moves to a reservation of 5 blocks: an extent of 8."""
    extents = CopiedExtents(RowLengths({None: 1}))
    extents.follow(
        plan({1: 20}, opened=[opened(1, 20)], table_writes=[TableWrite(1, 0, 0, (0, 1))])
    )
    forked = extents.follow(
        plan(
            {1: 1, 2: 1, 3: 4},
            forks=[Fork(1, 2, 1)],
            opened=[opened(3, 4)],
            table_writes=[
                TableWrite(2, 0, 0, (8, 9, 10, 11, 12)),
                TableWrite(3, 0, 0, (16, 17)),
            ],
            copies=[BlockCopy(0, 8, 16), BlockCopy(1, 9, 4)],
        )
    )
    assert forked.num_copied_blocks == 8
    assert extents.follow(plan({1: 1, 2: 1})).num_copied_blocks == 0


def test_batches_are_padded_to_the_longest() -> None:
    batches = PaddedBatches(RowLengths({None: 1}))
    rows = [opened(1, 10), opened(2, 30)]
    prefill = batches.follow(plan({1: 10, 2: 30}, opened=rows))
    assert prefill == StepShape(2, 60, 2, 60, 2 * 30 * 31 // 2)
    assert batches.follow(plan({1: 1, 2: 1})) == StepShape(2, 2, 2, 62, 0)
    # The first is done, but computed on.
    assert batches.follow(plan({2: 1}, closed=[1])) == StepShape(2, 2, 2, 64, 0)
    # Then the next batch, of one.
    assert batches.follow(plan({3: 5}, closed=[2], opened=[opened(3, 5)])).num_tokens == 5
    assert batches.follow(plan({3: 1})).kv_tokens == 6


def test_padded_samples_count_after_the_prompt() -> None:
    batches = PaddedBatches(RowLengths({None: 1}))
    batches.follow(plan({1: 10}, opened=[opened(1, 10)]))
    forks = [Fork(1, 2, 1), Fork(1, 3, 2)]
    assert batches.follow(plan({1: 1, 2: 1, 3: 1}, forks=forks)).kv_tokens == 33


def test_a_row_is_followed_from_any_idle_moment() -> None:
    """Rows of before may still be closed."""
    rows = RowLengths({None: 1})
    assert rows.follow(plan({7: 2}, closed=[1, 2], opened=[opened(7, 2)])).num_tokens == 2


@pytest.mark.parametrize("windows", [[None], [None, 8, 8, 20]])
def test_it_agrees_with_a_plain_count(windows: list[int | None]) -> None:
    """Of rows that come, fork, go, wait, are taken back, and compute one token or several."""
    draw = random.Random(0)
    rows, lengths, ids = RowLengths(Counter(windows)), dict[int, int](), itertools.count()
    for _ in range(300):
        closed = [seq for seq in lengths if draw.random() < 0.1]
        parents = [seq for seq in lengths if draw.random() < 0.05]
        forks = [Fork(parent, next(ids), 1) for parent in parents]
        new = [opened(next(ids), 30, draw.randrange(30)) for _ in range(draw.choice((0, 0, 1, 60)))]
        lengths |= {fork.child_id: lengths[fork.parent_id] for fork in forks}
        lengths = {seq: length for seq, length in lengths.items() if seq not in closed}
        lengths |= {row.seq_id: row.num_computed_tokens for row in new}
        back = [seq for seq, length in lengths.items() if length and draw.random() < 0.1]
        writes = TokenWrites(
            back, [lengths[seq] - draw.randrange(2) for seq in back], [7] * len(back)
        )
        lengths |= dict(zip(writes.seq_ids, writes.positions, strict=True))
        share = draw.choice((0.5, 1))
        work = {seq: draw.choice((1, 1, 1, 9)) for seq in lengths if draw.random() < share}
        work = dict(sorted(work.items(), key=lambda item: item[1] > 1))
        context = pairs = 0.0
        for seq, count in work.items():
            end = lengths[seq] = lengths[seq] + count
            for window in windows:
                limit = end if window is None else window
                context += min(end, limit + count - 1) / len(windows)
                if count > 1:
                    pairs += windowed_pairs(end - count, end, limit) / len(windows)
        step = plan(work, closed=closed, forks=forks, opened=new, token_writes=writes)
        shape = rows.follow(step)
        assert rows.num_rows == len(lengths)
        assert shape.num_tokens == sum(work.values())
        assert shape.kv_tokens == pytest.approx(context)
        assert shape.attention_pairs == pytest.approx(pairs)
