"""The work items that the Triton kernels get: all keys once, none too many."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.ops.cuda.attention_work_items import (
    Int32s,
    Sequences,
    Splitting,
    decode_items,
    item_capacity,
    num_places,
    prefill_items,
)

RNG = np.random.default_rng(7)
LENGTHS = {
    "mixed": lambda n: RNG.integers(0, 2000, n),
    "equal": lambda n: np.full(n, 1024),
    "one-long": lambda n: np.append(np.full(n - 1, 30), 100_000),
    "heavy-tail": lambda n: np.minimum(RNG.pareto(1, n) * 200, 50_000).astype(int) + 1,
    "tiny": lambda n: RNG.integers(0, 3, n),
}


def sequences(contexts: Int32s, lens: Int32s) -> Sequences:
    contexts, lens = np.asarray(contexts, np.int32), np.asarray(lens, np.int32)
    starts = (lens.cumsum() - lens).astype(np.int32)
    return Sequences(starts, RNG.permutation(len(lens)).astype(np.int32), contexts, lens)


@pytest.mark.parametrize("num_splits", [9, 27, 132, 1056])
@pytest.mark.parametrize("window", [None, 50, 1000])
@pytest.mark.parametrize("kind", LENGTHS)
def test_decodes_cover_each_key_once(kind: str, window: int | None, num_splits: int) -> None:
    for num_seqs, tile, alignment in ((1, 32, 16), (5, 64, 1), (40, 16, 8), (300, 32, 32)):
        contexts = LENGTHS[kind](num_seqs)
        seqs = sequences(contexts, np.ones(num_seqs))
        items = decode_items(seqs, window, tile, alignment, num_splits).items
        assert len(items) == item_capacity(num_seqs, num_splits)
        used = items[items[:, 0] >= 0]
        assert (items[len(used) :, 0] == -1).all(), "the kernel stops at nothing in between"
        places: list[int] = []
        for token, row, context in zip(seqs.tokens, seqs.rows, seqs.contexts, strict=True):
            mine = used[used[:, 0] == token]
            assert mine[:, 5].tolist() == list(range(len(mine)))
            assert (mine[:, 6] == len(mine)).all()
            assert (mine[:, 1] == row).all()
            assert (mine[:, 4] == context - 1).all()
            start = 0 if window is None else max(0, context - window) // alignment * alignment
            assert mine[0, 2] == start
            assert (mine[1:, 2] == mine[:-1, 3]).all()
            assert ((mine[1:, 2] - start) % tile == 0).all()
            if context > 1:
                assert mine[-1, 3] == context - 1
            if len(mine) > 1:
                assert (mine[:, 3] > mine[:, 2]).all(), "a split without keys"
                places += (mine[:, 7] + mine[:, 5]).tolist()
        assert len(set(places)) == len(places)
        assert max(places, default=0) < num_places(num_splits)


def test_a_sequence_alone_fills_the_card_and_equal_ones_fill_it_once() -> None:
    def count(num_seqs: int, context: int) -> int:
        seqs = sequences(np.full(num_seqs, context), np.ones(num_seqs))
        return int((decode_items(seqs, None, 32, 16, 132).items[:, 0] >= 0).sum())

    assert count(1, 100_000) > 120
    assert count(64, 4096) == 128
    assert count(256, 4096) == 256
    assert count(1, 100) == 1


def test_few_sequences_get_as_many_splits_as_are_combined_at_once() -> None:
    def count(num_seqs: int, context: int) -> int:
        seqs = sequences(np.full(num_seqs, context), np.ones(num_seqs))
        given = decode_items(seqs, None, 64, 16, 33 * num_seqs, min_split=64, at_once=16)
        return int((given.items[:, 0] >= 0).sum())

    assert count(1, 129) == 1  # two tiles
    assert count(1, 130) == 3
    assert count(1, 1025) == 16
    assert count(1, 1026) == 9  # of two tiles each, but the last
    assert count(2, 1026) == 18
    assert count(1, 64 * 16 * 8 + 1) == 16
    assert 16 < count(1, 64 * 16 * 8 + 2) <= 33


@pytest.mark.parametrize("window", [None, 33])
def test_prefills_cover_each_token_once(window: int | None) -> None:
    lens, cached = np.array([2, 70, 5, 300]), np.array([90, 0, 1000, 64])
    seqs = sequences(lens + cached, lens)
    items = prefill_items(seqs, window, tile=64, alignment=16, tokens_per_item=32)
    for i, (token, row) in enumerate(zip(seqs.tokens, seqs.rows, strict=True)):
        mine = items[items[:, 1] == row]
        mine = mine[mine[:, 0].argsort()]
        covered = np.concatenate([np.arange(m[0], m[0] + m[6]) for m in mine])
        assert covered.tolist() == list(range(token, token + lens[i]))
        assert (mine[:, 8:] == [0, 1, 0]).all(), "no item is split"
        for first, _, begin, seen_by_all, end, position, count, written in mine[:, :8]:
            assert position == cached[i] + first - token
            assert end == position + count
            assert written == lens[i] + cached[i]
            assert seen_by_all % 64 == 0
            assert position + 1 - 64 < seen_by_all <= position + 1
            first_seen = 0 if window is None else max(0, position - window + 1)
            assert begin == first_seen // 16 * 16
    costs = items[:, 4] - items[:, 2]
    assert (np.diff(costs) <= 0).all(), "the costly come first"


@pytest.mark.parametrize("is_causal", [True, False])
def test_items_with_many_keys_are_split(is_causal: bool) -> None:
    """Into disjoint parts of whole tiles, which are within their bounds, and evenly."""
    rng = np.random.default_rng(0)
    num_split = 0
    for _ in range(300):
        lens = rng.integers(1, 200, rng.integers(1, 6))
        cached = rng.choice([0, 30, 700, 5000, 100_000], len(lens))
        seqs, window = sequences(lens + cached, lens), None
        if is_causal:
            window = rng.choice([None, 50, 3000])
        splitting = Splitting(int(rng.integers(1, 40)), int(rng.choice([1, 32, 128])))
        arguments = seqs, window, 64, 16, 32, is_causal
        whole, items = prefill_items(*arguments), prefill_items(*arguments, splitting)
        assert len(items) <= item_capacity(len(whole), splitting.at_once)
        places: list[int] = []
        even = (whole[:, 4] - whole[:, 2]).sum() / splitting.at_once
        longest = (whole[:, 4] - whole[:, 2]).max()
        most = 1.5 * max(even, splitting.min_split(longest)) + 64
        assert (items[:, 4] - items[:, 2]).max() <= most
        for item in whole:
            parts = items[items[:, 0] == item[0]]
            parts = parts[parts[:, 8].argsort()]
            assert (parts[:, [0, 1, 5, 6, 7]] == item[[0, 1, 5, 6, 7]]).all()
            assert parts[:, 8].tolist() == list(range(len(parts)))
            assert (parts[:, 9] == len(parts)).all()
            assert parts[0, 2] == item[2]
            assert parts[-1, 4] == item[4]
            assert (parts[1:, 2] == parts[:-1, 4]).all()
            assert ((parts[1:, 2] - item[2]) % 64 == 0).all()
            assert (parts[:, 4] > parts[:, 2]).all()
            assert (parts[:, 3] == item[3].clip(parts[:, 2], parts[:, 4])).all()
            if len(parts) > 1:
                num_split += 1
                places += range(parts[0, 10], parts[0, 10] + len(parts))
        assert len(set(places)) == len(places)
        assert max(places, default=0) < num_places(splitting.at_once)
    assert num_split > 100
