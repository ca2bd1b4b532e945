"""What a step of decodes begins with, when the host has staged it and when it has not."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from octavo.ops.base import MOST_CONTINUED, DecodeItems
from octavo.ops.cuda.attention_work_items import Int32s, Sequences, decode_items
from octavo.ops.cuda.paged import ITEM_FIELDS
from octavo.ops.cuda.pending_tokens import begin_decodes, keep_tokens

HAS_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
TILE, ALIGNMENT = 16, 8  # the smallest ones


def int32s(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def int64s(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def items_of(contexts: list[int], window: int | None, num_splits: int, is_causal: bool) -> Int32s:
    """Work items of sequences in rows 1, 2 and so on; those with context 0 are padding."""
    n = len(contexts)
    rows = [0 if context == 0 else 1 + i for i, context in enumerate(contexts)]
    parts = (np.array(values, np.int32) for values in (range(n), rows, contexts, [1] * n))
    work = decode_items(
        Sequences(*parts), window, TILE, ALIGNMENT, num_splits, is_causal=is_causal, min_split=TILE
    )
    return work.items


def keys_of(items: Int32s, token: int) -> list[tuple[int, int]]:
    """The keys that a token's splits read, in their order."""
    own = items[items[:, 0] == token]
    own = own[own[:, 5].argsort()]
    assert own[:, 5].tolist() == list(range(own[0, 6])), "each split once"
    return [(int(begin), int(end)) for begin, end in own[:, 2:4]]


@pytest.mark.parametrize("window", [None, 20, 100])
@pytest.mark.parametrize("num_splits", [1, 7, 40])
def test_items_go_on_with_their_sequences(window: int | None, num_splits: int) -> None:
    contexts = [1, 2, 33, 400, 97, 0, 0]
    planned = items_of(contexts, window, num_splits, is_causal=True)
    items = int32s(planned.reshape(-1).tolist())
    of_encoder = items_of([30, 1, 64, 400, 5, 1, 1], None, num_splits, is_causal=False)
    encoded = int32s(of_encoder.reshape(-1).tolist())
    ids, positions = int64s([5] * 7), int64s([max(0, context - 1) for context in contexts])
    draws = int64s([*contexts, 100])
    rows, last = int32s([1, 2, 3, 4, 5, 0, 0]), int64s(range(50, 60))
    shapes = [
        DecodeItems(items, window, ALIGNMENT),
        DecodeItems(encoded, None, ALIGNMENT),
    ]
    is_staged = int32s([1])
    begin_decodes(is_staged, ids, positions, rows, last, draws, shapes)
    assert is_staged.item() == 0
    assert ids.tolist() == [5] * 7  # they were known
    assert (items.cpu().numpy().reshape(-1, ITEM_FIELDS) == planned).all()
    assert draws.tolist() == [*contexts, 100]
    for step in range(1, MOST_CONTINUED + 1):
        begin_decodes(is_staged, ids, positions, rows, last, draws, shapes)
        now = items.cpu().numpy().reshape(-1, ITEM_FIELDS)
        assert (now[:, [0, 1, 5, 6, 7]] == planned[:, [0, 1, 5, 6, 7]]).all()
        for token, context in enumerate(contexts):
            own = now[now[:, 0] == token]
            if context == 0:
                assert (own == planned[planned[:, 0] == token]).all()
                continue
            position = context - 1 + step
            assert (own[:, 4] == position).all()
            keys = keys_of(now, token)
            first = 0 if window is None else max(position + 1 - window, 0)
            assert keys[0][0] == first // ALIGNMENT * ALIGNMENT
            assert keys[-1][1] == position
            assert all(a[1] == b[0] for a, b in pairwise(keys))
            assert all(begin <= end for begin, end in keys), "a window leaves the first split alone"
        assert (encoded.cpu().numpy().reshape(-1, ITEM_FIELDS) == of_encoder).all()
    assert ids.tolist() == [51, 52, 53, 54, 55, 5, 5]
    last_positions = [context + MOST_CONTINUED - 1 if context else 0 for context in contexts]
    assert positions.tolist() == last_positions
    assert draws.tolist() == [position and position + 1 for position in last_positions] + [100]


def test_a_staged_step_fills_what_the_host_does_not_know() -> None:
    ids, positions = int64s([-1, 7, -1, 0]), int64s([3, 4, 5, 0])
    begin_decodes(
        int32s([1]), ids, positions, int32s([2, 1, 3, 0]), int64s(range(10)), int64s([9] * 4), []
    )
    assert ids.tolist() == [2, 7, 3, 0]
    assert positions.tolist() == [3, 4, 5, 0]


def test_many_sequences_go_on() -> None:
    n = 1_300  # more than the kernel has at once
    ids, positions, draws = int64s([9] * n), int64s(range(n)), int64s(range(1, n + 1))
    rows, last = int32s(range(1, n + 1)), int64s(range(7, n + 8))
    planned = items_of(list(range(1, n + 1)), None, 64, is_causal=True)
    items = int32s(planned.reshape(-1).tolist())
    shapes = [DecodeItems(items, None, ALIGNMENT)]
    begin_decodes(int32s([0]), ids, positions, rows, last, draws, shapes)
    assert ids.tolist() == list(range(8, n + 8))
    assert positions.tolist() == list(range(1, n + 1))
    assert draws.tolist() == list(range(2, n + 2))
    now = items.cpu().numpy().reshape(-1, ITEM_FIELDS)
    used = planned[:, 0] >= 0
    assert (now[used, 4] == planned[used, 4] + 1).all()
    assert (now[~used] == planned[~used]).all()


def test_results_take_turns() -> None:
    shape = (3, 6)
    results = torch.zeros(shape, dtype=torch.int64, pin_memory=HAS_GPU)
    place = int64s([results.data_ptr(), 1])
    last, counter = int64s([0] * 5), int64s([11])
    for number, tokens in enumerate(([4, 5, -1], [6, 7, 8], [1, 2, 3], [9, 9, 9])):
        counter += 1
        keep_tokens(int64s(tokens), int32s([2, 1, 4]), last, place, counter, shape)
        if HAS_GPU:
            torch.cuda.synchronize()
        row = (1 + number) % 3
        assert place[1].item() == (row + 1) % 3
        assert results[row].tolist() == [12 + number, *tokens, 0, 0]
        assert last.tolist() == [0, max(tokens[1], 0), max(tokens[0], 0), 0, max(tokens[2], 0)]
