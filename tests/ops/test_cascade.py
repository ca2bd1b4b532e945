"""Cascade attention: keys in shared blocks are found, cut into work items, and read once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import FEATURES, Bench, Case, some_scores
from hypothesis import given, settings
from hypothesis import strategies as st
from test_triton_backend import GPU, TOLERANCE

from octavo.ops import CascadeSegments, KVScales
from octavo.ops.cuda.attention_work_items import (
    MAX_CASCADE_RESULTS,
    Sequences,
    cascade_capacity,
    cascade_work,
    decode_items,
)
from octavo.worker import cascade
from octavo.worker.cascade import SegmentFinder, find_segments, least_saved_keys

pytestmark = pytest.mark.usefixtures("few_programs")

BLOCK = 16
MIN_KEYS, MIN_SAVING = 64, 1 / 8  # fewer than what pays on a GPU
Tables = tuple[np.ndarray, np.ndarray]


@pytest.fixture(autouse=True)
def _short_segments_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade, "MIN_KEYS", MIN_KEYS)
    monkeypatch.setattr(cascade, "MIN_SAVING", MIN_SAVING)


def grown(parents: list[tuple[int, int, int]], width: int = 64) -> Tables:
    """(tables, contexts) of a tree: each sequence begins with some blocks of an earlier one.

    parents: (which one, blocks in common, tokens of its own).
    """
    tables = np.random.default_rng(1).integers(1, 1 << 20, (len(parents), width), np.int32)
    fresh = iter(range(1, 1 << 20))
    contexts = np.zeros(len(parents), np.int64)
    for i, (parent, common, own) in enumerate(parents):
        if i:
            common = min(common, int(contexts[parent % i] - 1) // BLOCK)
            tables[i, :common] = tables[parent % i, :common]
        else:
            common = 0
        contexts[i] = common * BLOCK + own
        num_blocks = -(-int(contexts[i]) // BLOCK)
        tables[i, common:num_blocks] = [next(fresh) for _ in range(num_blocks - common)]
    order = np.random.default_rng(len(parents)).permutation(len(parents))
    return tables[order], contexts[order]


def sequences(contexts: np.ndarray) -> Sequences:
    n = len(contexts)
    numbers = np.arange(n, dtype=np.int32)
    return Sequences(
        numbers, numbers[::-1].copy(), contexts.astype(np.int32), np.ones_like(numbers)
    )


@settings(max_examples=60)
@given(
    parents=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 25), st.integers(1, 300)),
        min_size=2,
        max_size=24,
    ),
    tile=st.sampled_from([16, 48, 64]),
    members_per_item=st.integers(2, 9),
    num_splits=st.sampled_from([1, 6, 40]),
)
def test_all_keys_are_read_once_for_each_sequence(
    parents: list[tuple[int, int, int]], tile: int, members_per_item: int, num_splits: int
) -> None:
    tables, contexts = grown(parents)
    found = find_segments(tables, contexts, BLOCK)
    if found is None:
        return
    saved = 0
    for i, (begin, end) in enumerate(zip(found.begins, found.ends, strict=True)):
        members = found.members[found.starts[i] : found.starts[i + 1]]
        assert len(set(members.tolist())) == len(members) > 1
        assert end - begin >= MIN_KEYS
        assert begin % BLOCK == end % BLOCK == 0
        assert (end < contexts[members]).all(), "the new token's block is nobody else's"
        segment = tables[members, begin // BLOCK : end // BLOCK]
        assert (segment == segment[0]).all()
        saved += (len(members) - 1) * (end - begin)
    assert saved >= contexts.sum() * MIN_SAVING
    check_work(tables, contexts, found, tile, members_per_item, num_splits)


def check_work(
    tables: np.ndarray,
    contexts: np.ndarray,
    found: CascadeSegments,
    tile: int,
    members_per_item: int,
    num_splits: int,
) -> None:
    """All cached keys are read once for each sequence, and each result has a place of its own."""
    seqs = sequences(contexts)
    work = cascade_work(seqs, found, tile, num_splits, members_per_item)
    decodes = decode_items(seqs, None, tile, BLOCK, num_splits, cascade=work)
    members = work.member_table(seqs, decodes.first_places)
    assert len(work.items) == cascade_capacity(len(contexts), num_splits)
    reads: dict[int, list[tuple[int, int]]] = {token: [] for token in range(len(contexts))}
    places: Counter[int] = Counter()
    for count, row, begin, end, first, split, *_ in work.items.tolist():
        if not count:
            continue
        assert count <= members_per_item
        assert begin % BLOCK == 0
        blocks = slice(begin // BLOCK, -(-end // BLOCK))
        for token, position, place in members[first : first + count].tolist():
            assert position == contexts[token] - 1
            assert (tables[seqs.rows == row, blocks] == tables[token, blocks]).all()
            reads[token].append((begin, end))
            places[place + split] += 1
    for token, _, begin, end, position, split, num_splits, first_place in decodes.items.tolist():
        if token < 0:
            continue
        assert position == contexts[token] - 1
        if begin < end:
            reads[token].append((begin, end))
        if num_splits > 1:
            places[first_place + split] += 1
    for token, segments in reads.items():
        ends = [0, *(end for _, end in sorted(segments))]
        assert [begin for begin, _ in sorted(segments)] == ends[:-1], "a gap, or a key twice"
        assert ends[-1] == contexts[token] - 1
    assert set(places.values()) <= {1}, "two results in one place"
    for *_, num_splits, first_place in decodes.items[decodes.items[:, 6] > 1].tolist():
        assert all(places[first_place + split] for split in range(num_splits)), "no result"


def test_a_gang_a_common_prefix_and_strangers() -> None:
    # Four beams that part late, below a prefix that five requests have in common; two strangers.
    tables, contexts = grown(
        [(0, 0, 400), *[(0, 8, 250)] * 4, (4, 20, 50), (4, 20, 20), *[(9, 0, 90)] * 2]
    )
    found = find_segments(tables, contexts, BLOCK)
    assert found is not None
    segments = sorted(
        zip(found.begins.tolist(), found.ends.tolist(), np.diff(found.starts).tolist(), strict=True)
    )
    assert segments == [(0, 128, 7), (128, 320, 3)]


def test_nothing_is_shared_where_it_would_not_pay() -> None:
    assert find_segments(*grown([(0, 0, 500), (0, 3, 500)]), BLOCK) is None  # 48 keys
    assert find_segments(*grown([(0, 0, 500), (0, 6, 900)]), BLOCK) is None  # 96 of 1,496
    assert find_segments(*grown([(0, 0, 5), (0, 0, 5), (0, 0, 900)]), BLOCK) is None
    tables, contexts = grown([(0, 0, 200), (0, 12, 8)])
    tables[:, :] = 0  # null blocks are nobody's, not everybody's
    assert find_segments(tables, contexts, BLOCK) is None


def test_few_sequences_share_long_contexts_alone() -> None:
    """Per layer, 64 MiB of keys and values must be saved; a key and its value take 4 KiB here."""
    least = least_saved_keys(num_kv_heads=8, head_dim=128, element_bytes=2)
    assert least == 16 << 10
    assert least_saved_keys(4, 256, 2) == 24 << 10
    assert least_saved_keys(8, 128, 1) == 32 << 10
    for size, blocks in ((2, 1023), (9, 127)):
        shorter, longer = (
            grown([(0, 0, 20_000), *[(0, each, 8)] * (size - 1)], width=1300)
            for each in (blocks, blocks + 1)
        )
        assert find_segments(*shorter, BLOCK, least) is None
        assert find_segments(*longer, BLOCK, least) is not None


def test_where_results_find_no_room_nothing_is_cut() -> None:
    tables, contexts = grown([(0, 0, 200)] + [(0, 12, 8)] * MAX_CASCADE_RESULTS)
    found = find_segments(tables, contexts, BLOCK)
    assert found is not None
    work = cascade_work(sequences(contexts), found, 64, 6, 64)
    assert not work.items.any()
    assert not work.counts.any()


def test_segments_of_odd_sizes_that_lie_in_each_other() -> None:
    """Two members an item: a segment of three takes two items, and of nine sequences there are
    fifteen, where a segment of two members has one."""
    depth, own = 8, 5
    sharers = [(0, 24), (0, 24), (0, 16), (3, 24), (0, 8), (5, 24), (5, 24), (5, 16)]
    parents = [
        (9 * family + who, common, (3 * depth - common) * BLOCK + own)
        for family in range(8)
        for who, common in [(0, 0), *sharers]
    ]
    tables, contexts = grown(parents)
    found = find_segments(tables, contexts, BLOCK)
    assert found is not None
    assert len(found.begins) == 8 * 6
    for num_splits in (1, 33, 132):
        check_work(tables, contexts, found, 64, 2, num_splits)


SHARED_CASES = [
    Case(((90, 1), (150, 1), (81, 1), (97, 1), (20, 1)), group=1, head_dim=16, block_size=8),
    Case(((130, 1), (150, 1), (200, 1), (96, 1)), num_kv_heads=1, head_dim=20, rotary_dim=12),
    Case(((130, 1), (150, 1), (96, 1)), num_kv_heads=1, head_dim=20, kv_scales=KVScales(0.02, 0.1)),
    Case(
        ((100, 1), (70, 7), (90, 1), (113, 1)), group=2, head_dim=16, rotary_dim=16, head_norm=True
    ),
]
SHARED_CASES += [replace(SHARED_CASES[1], sequences=SHARED_CASES[2].sequences, interleaved=True)]
# Few pairs of sequences and KV heads, of which several programs combine results elsewhere; behind
# the shared keys, they have fewer splits than that.
SHARED_CASES += [
    Case(((130, 1), (150, 1), (96, 1)), num_kv_heads=1, head_dim=16, dtype=torch.float16),
    Case(((130, 1), (150, 1), (96, 1)), group=2, head_dim=128, dtype=torch.float16),
]
SCORED = Case(((90, 1), (150, 1), (81, 1), (113, 1)), group=2, num_kv_heads=2, head_dim=16)
SHARED_CASES += [replace(SCORED, scores=some_scores(SCORED, *FEATURES))]
BY_DAY = (2, 3, 5, 7)  # an FP8 cache, prompts beside decodes, float16 and all features of scores
SINGLE_FEATURES = [replace(SCORED, scores=some_scores(SCORED, name)) for name in FEATURES]
MANY = ((2100, 1), *((2000 + i, 1) for i in range(20)), (300, 1))
GPU_CASES = [
    Case(MANY, 16, 8, group, 128, None, torch.bfloat16, rotary_dim, head_norm)
    for group, rotary_dim, head_norm in (
        (1, None, False),
        (4, 128, False),
        (2, 128, True),
        (7, 64, False),
    )
]
GPU_CASES.append(replace(GPU_CASES[0], group=4, kv_scales=KVScales(0.02, 0.1)))
FEW = ((2100, 1), (1100, 1), (300, 1))
GPU_CASES += [
    Case(FEW, 16, num_kv_heads, group, head_dim, dtype=torch.bfloat16, rotary_dim=head_dim)
    for num_kv_heads, group, head_dim in ((1, 8, 128), (2, 4, 64), (2, 2, 256), (2, 1, 128))
]


def check(case: Case, prefix: int, device: str) -> None:
    """All but the last sequence begin with `prefix` tokens of the first one."""
    outputs = []
    for backend in ("reference", "triton"):
        on = device if backend == "triton" else "cpu"
        bench = Bench(backend, case, capacity=max(c for c, _ in case.sequences) + 40, device=on)
        sharers = range(1, len(case.sequences) - 1)
        bench.step([(0, case.sequences[0][0])])
        bench.step([(len(case.sequences) - 1, case.sequences[-1][0])])
        for i in sharers:
            bench.tables[i, : prefix // case.block_size] = bench.tables[
                0, : prefix // case.block_size
            ]
            bench.computed[i] = prefix
        bench.step([(i, case.sequences[i][0] - prefix) for i in sharers])
        shared: list[CascadeSegments | None] = []
        if backend == "triton":
            singles = np.array([i for i, (_, new) in enumerate(case.sequences) if new == 1])
            contexts = np.array([case.sequences[i][0] + 1 for i in singles])
            found = find_segments(bench.tables.numpy()[singles], contexts, case.block_size)
            assert found is not None
            shared = [found._replace(members=singles[found.members].astype(np.int32))]
        work = [(i, new) for i, (_, new) in enumerate(case.sequences)]
        outputs.append(bench.step(work, shared))
        # A second step without sharing: counters are at 0 again.
        outputs[-1] += bench.step([(i, 1) for i in range(len(case.sequences))])
    for expected, actual in zip(*outputs, strict=True):
        torch.testing.assert_close(
            actual.cpu().float(), expected.float(), atol=TOLERANCE[case.dtype], rtol=0.02
        )


@pytest.mark.skipif(GPU, reason="without the interpreter the same runs on the GPU")
@pytest.mark.parametrize(
    "case",
    [
        *(
            pytest.param(each, marks=() if number in BY_DAY else pytest.mark.slow)
            for number, each in enumerate(SHARED_CASES)
        ),
        *(pytest.param(each, marks=pytest.mark.slow) for each in SINGLE_FEATURES),
    ],
)
def test_interpreted(case: Case) -> None:
    check(case, 64, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("case", [*SHARED_CASES, *SINGLE_FEATURES, *GPU_CASES])
def test_on_the_gpu(case: Case) -> None:
    check(case, 1024 if case in GPU_CASES else 64, "cuda")


def test_where_windows_move_over_the_keys_none_are_looked_for() -> None:
    tables, contexts = grown([(0, 0, 200), (0, 12, 8)])
    rows, ones = np.arange(2), np.ones(2, np.int64)
    with_window = SegmentFinder([BLOCK] * 2, [True, False], least_saved=0)
    assert with_window.find(np.stack([tables, tables]), rows, ones, contexts)[0] is None
    assert with_window.find(np.stack([tables, tables]), rows, ones, contexts)[1] is not None
    assert (
        SegmentFinder([BLOCK], [True], least_saved=0).find(tables[None], rows, ones, contexts) == []
    )
