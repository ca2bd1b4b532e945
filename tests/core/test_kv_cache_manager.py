"""The KV cache manager: sharing, copy-on-write, prefix hits, and all-or-nothing."""

from __future__ import annotations

import copy
import gc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.worlds import BLOCK_SIZE, compute, make_manager, make_sequence
from octavo.core.invariants import check_manager
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_cache import sha256_128
from octavo.core.kv.prefix_matcher import PrefixHit
from octavo.core.kv.specs import (
    CrossAttention,
    FullAttention,
    KVSpec,
    SlidingWindow,
    group_layers,
)
from octavo.core.prefix_node import PrefixNode
from octavo.core.sequence import Sequence
from octavo.core.step import BlockCopy


def grow(kv: KVCacheManager, seq: Sequence, num_tokens: int = 1) -> list[BlockCopy]:
    """Append tokens; returns the copies that this took."""
    seq.token_ids += [5] * num_tokens
    changes = kv.append([(seq, seq.num_tokens)])
    assert changes is not None
    seq.num_computed_tokens = seq.num_tokens
    return changes.copies


def test_the_textbook_case_of_four_beams() -> None:
    """A 64-token prompt in blocks of 16, four beams, 10 tokens each: 4 + 4 blocks, not 20; with
    the tail block written by all, the prompt's own blocks stay shared."""
    kv = KVCacheManager([FullAttention()], 16, 64, enable_prefix_caching=False)
    parent = make_sequence(0, [1] * 64)
    compute(kv, parent)
    beams = [parent]
    for seq_id in (1, 2, 3):
        child = make_sequence(seq_id, parent.token_ids)
        kv.fork(parent, child)
        beams.append(child)
    for beam in beams:
        assert grow(kv, beam, 10) == []  # the prompt ends on a block's boundary
    assert kv.pool.num_held == 8
    check_manager(kv, beams)


def test_only_the_last_holder_of_a_tail_block_writes_in_place() -> None:
    kv = make_manager()
    parent = make_sequence(0, [1] * 6)
    compute(kv, parent)
    children = [make_sequence(i, parent.token_ids) for i in (1, 2)]
    for child in children:
        kv.fork(parent, child)
    tail = parent.table.block_ids[0][1]  # type: ignore[union-attr]
    copies = grow(kv, parent)
    assert copies == [(tail, parent.table.block_ids[0][1], 2)]  # type: ignore[union-attr]
    assert len(grow(kv, children[0])) == 1
    assert grow(kv, children[1]) == []
    assert children[1].table.block_ids[0][1] == tail  # type: ignore[union-attr]
    assert kv.num_cow_copies == 2
    check_manager(kv, [parent, *children])


@pytest.mark.parametrize("steps", [(8, 4), (4, 4, 4), (12,)])
def test_a_sequence_is_replaced_wherever_its_window_stands(steps: tuple[int, ...]) -> None:
    """Blocks behind a window are returned when a step's results are in, so that tables of equal
    length may differ at both ends."""
    kv = make_manager(specs=[FullAttention(), SlidingWindow(6)])
    parent = make_sequence(0, [1] * 10)
    compute(kv, parent)
    child = make_sequence(1, parent.token_ids)
    kv.fork(parent, child)
    grow(kv, parent, 12)
    for num_tokens in steps:
        grow(kv, child, num_tokens)
        kv.settle(child, child.num_tokens)
    assert child.table is not None
    assert child.table.num_dropped == [0, 4]
    for seq, other in [(child, parent), (parent, child)]:
        kv.replace(seq, other)
        check_manager(kv, [parent, child], is_settled=False)
        assert parent.table is not None
        assert child.table is not None
        assert parent.table.block_ids == child.table.block_ids
        assert kv.pool.num_held == len(set(parent.table.held()))
        grow(kv, seq)  # a copy of the tail, or a block
        check_manager(kv, [parent, child], is_settled=False)
        grow(kv, other)
        other.token_ids = list(seq.token_ids)


def test_a_gang_gets_room_for_all_or_for_none() -> None:
    kv = make_manager(num_blocks=4)
    parent = make_sequence(0, [1] * 6)
    compute(kv, parent)
    children = [make_sequence(i, parent.token_ids) for i in (1, 2, 3)]
    for child in children:
        kv.fork(parent, child)
    gang = [parent, *children]
    before = copy.deepcopy([seq.table.block_ids for seq in gang])  # type: ignore[union-attr]
    # 2 blocks are held, 2 are free; four writers of one block need three copies.
    assert kv.append([(seq, 7) for seq in gang]) is None
    assert [seq.table.block_ids for seq in gang] == before  # type: ignore[union-attr]
    check_manager(kv, gang)
    assert kv.append([(seq, 7) for seq in gang[:2]]) is not None


def test_a_cached_prompt_recomputes_one_token() -> None:
    kv = make_manager()
    first = make_sequence(0, list(range(8)))
    compute(kv, first)
    hit = kv.lookup(make_sequence(1, list(range(8))))
    assert hit.num_tokens == 7
    assert hit.block_ids == [first.table.block_ids[0][:1]]  # type: ignore[union-attr]
    assert hit.partial == first.table.block_ids[0][1:]  # type: ignore[union-attr]


def test_a_hit_ends_inside_a_block_where_the_prompts_part() -> None:
    kv = make_manager()
    compute(kv, make_sequence(0, list(range(12))))
    other = make_sequence(1, [0, 1, 2, 3, 4, 5, 99, 98, 97, 96])
    hit = kv.lookup(other)
    assert hit.num_tokens == 6
    changes = kv.allocate(other, hit, 10)
    assert changes is not None
    assert len(changes.copies) == 1


def test_a_hit_takes_no_more_than_it_may() -> None:
    kv = make_manager()
    compute(kv, make_sequence(0, list(range(16))))
    hit = kv.lookup(make_sequence(1, list(range(16))), max_tokens=6)
    assert (hit.num_tokens, len(hit.block_ids[0])) == (6, 1)


def test_copy_sources_survive_the_step() -> None:
    """The block that a hit copies from is free; nothing may take it before the copy is done."""
    kv = make_manager(num_blocks=4)
    first = make_sequence(0, list(range(8)))
    compute(kv, first)
    kv.free(first)
    second = make_sequence(1, list(range(7)))
    hit = kv.lookup(second)
    assert hit.num_tokens == 6
    changes = kv.allocate(second, hit, 7)
    assert changes is not None
    greedy = make_sequence(2, [9] * 8)
    assert kv.allocate(greedy, kv.lookup(greedy), 8) is None  # one block is left, one is held
    kv.release_sources(changes.held)
    assert kv.allocate(greedy, kv.lookup(greedy), 8) is not None


def test_tenants_do_not_meet() -> None:
    kv = make_manager()
    compute(kv, make_sequence(0, list(range(8)), cache_salt="one"))
    assert kv.lookup(make_sequence(1, list(range(8)), cache_salt="two")).num_tokens == 0
    assert kv.lookup(make_sequence(2, list(range(8)), cache_salt="one")).num_tokens == 7


def test_nothing_is_kept_of_tenants_that_left_no_block() -> None:
    def num_nodes() -> int:
        gc.collect()
        return sum(type(thing) is PrefixNode for thing in gc.get_objects())

    kv, before = make_manager(), num_nodes()
    for i in range(100):
        kv.lookup(make_sequence(i, [1] * 6, cache_salt=f"tenant {i}"))
    assert num_nodes() == before


@pytest.mark.parametrize(
    "specs", [[FullAttention()], [SlidingWindow(4)], [FullAttention(), SlidingWindow(4)]]
)
def test_blocks_that_are_being_computed_are_waited_for(specs: list[KVSpec]) -> None:
    kv = make_manager(specs=specs)
    first = make_sequence(0, list(range(9)))
    assert kv.allocate(first, kv.lookup(first), 9) is not None
    first.num_computed_tokens = 9
    assert kv.lookup(make_sequence(1, list(range(9)))).in_progress
    kv.register(first, 9)
    hit = kv.lookup(make_sequence(1, list(range(9))))
    assert (hit.in_progress, hit.num_tokens) == (False, 8)


def test_an_abandoned_prefix_is_not_waited_for() -> None:
    kv = make_manager()
    first = make_sequence(0, list(range(9)))
    assert kv.allocate(first, kv.lookup(first), 9) is not None
    kv.free(first)
    assert not kv.lookup(make_sequence(1, list(range(9)))).in_progress


def test_colliding_digests_cost_hits_and_nothing_else() -> None:
    kv = make_manager(digest=lambda content: b"same")
    compute(kv, make_sequence(0, [1] * 8))
    assert kv.lookup(make_sequence(1, [2] * 8)).num_tokens == 0


def test_cached_blocks_are_evicted_last_and_the_oldest_first() -> None:
    kv = make_manager(num_blocks=6)
    old, new = make_sequence(0, [1] * 8), make_sequence(1, [2] * 8)
    compute(kv, old)
    compute(kv, new)
    kv.free(old)
    kv.free(new)
    big = make_sequence(2, [3] * 12)  # takes the two unused blocks, and one that cached `old`
    compute(kv, big)
    assert kv.lookup(make_sequence(3, [2] * 8)).num_tokens == 7
    # Tails go first: the head of the old prefix is still there.
    assert kv.lookup(make_sequence(4, [1] * 8)).num_tokens == BLOCK_SIZE


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("block_sizes", [(4,), (4, 4, 4), (8, 4), (4, 8)])
def test_the_end_of_a_prefix_is_evicted_first_in_all_groups(
    block_sizes: tuple[int, ...], is_swapped: bool
) -> None:
    specs: list[KVSpec] = [FullAttention(), SlidingWindow(100), SlidingWindow(200)]
    num_blocks = sum(64 // size for size in block_sizes)
    kv = KVCacheManager(specs[: len(block_sizes)], block_sizes, num_blocks, num_blocks)
    seq = make_sequence(0, [1] * 64)
    compute(kv, seq)
    if is_swapped:
        assert kv.swap_out([seq]) is not None
    else:
        kv.free(seq)
    for _ in range(num_blocks // 4):
        kv.pool.allocate()
    assert kv.lookup(make_sequence(1, [1] * 65)).num_tokens == 48


def test_who_watches_is_told_what_starts_and_what_is_evicted() -> None:
    kv = make_manager(num_blocks=4)
    told: list[tuple[Sequence, PrefixHit]] = []
    kv.on_allocate = lambda seq, hit: told.append((seq, hit))
    old = make_sequence(0, [1] * 9)
    hit = kv.lookup(old)
    assert kv.allocate(old, hit, 9) is not None
    assert told == [(old, hit)]
    kv.register(old, 8)
    assert old.table is not None
    head, tail, _ = old.table.block_ids[0]
    kv.free(old)
    kv.evicted_ids = []
    compute(kv, make_sequence(1, [2] * 16))
    assert kv.evicted_ids == [tail, head]


def test_a_pinned_prefix_survives_eviction_and_reset() -> None:
    kv = make_manager(num_blocks=4)
    prefix = make_sequence(0, [1] * 8)
    compute(kv, prefix)
    kv.pin("system", prefix)
    other = make_sequence(1, [2] * 8)
    compute(kv, other)
    kv.free(other)
    compute(kv, other := make_sequence(2, [3] * 8))
    kv.free(other)
    kv.reset_prefix_cache()
    assert kv.lookup(make_sequence(3, [1] * 9)).num_tokens == 8
    assert kv.num_pinned_blocks == 2
    kv.unpin("system")
    assert kv.pool.num_free == 4


def test_a_prefix_that_was_cached_before_it_was_pinned_is_not_evicted() -> None:
    """The pin computes its last block anew; the one that prompts find is somebody else's."""
    kv = make_manager(num_blocks=6)
    before = make_sequence(0, [1] * 8)
    compute(kv, before)
    kv.free(before)
    prefix = make_sequence(1, [1] * 8)
    compute(kv, prefix)
    kv.pin("system", prefix)
    assert kv.num_pinned_blocks == kv.pool.num_held == 2
    compute(kv, other := make_sequence(2, [2] * 16))  # takes all that is free
    kv.free(other)
    assert kv.lookup(make_sequence(3, [1] * 9)).num_tokens == 8
    check_manager(kv, [])


def test_a_prefix_that_was_swapped_out_can_be_found_again() -> None:
    """It comes back into other blocks, while those that cached it have been overwritten."""
    kv = make_manager(num_blocks=4, num_swap_blocks=4)
    seq = make_sequence(0, [1] * 8)
    compute(kv, seq)
    assert kv.swap_out([seq]) is not None
    compute(kv, other := make_sequence(1, [2] * 16))  # takes all that is free
    kv.free(other)
    assert kv.swap_in([seq]) is not None
    grow(kv, seq, 4)
    kv.register(seq, 12)
    assert kv.lookup(make_sequence(2, seq.token_ids)).num_tokens == 11
    check_manager(kv, [seq])


def test_a_window_returns_the_blocks_behind_it() -> None:
    kv = make_manager(specs=[FullAttention(), SlidingWindow(5)])
    seq = make_sequence(0, [1])
    compute(kv, seq)
    for _ in range(20):
        grow(kv, seq)
        kv.settle(seq, seq.num_tokens)
        check_manager(kv, [seq])
        assert sum(b != 0 for b in seq.table.block_ids[1]) <= 2  # type: ignore[union-attr]
    assert 0 not in seq.table.block_ids[0]  # type: ignore[union-attr]


def test_a_window_needs_only_its_own_blocks_for_a_hit() -> None:
    kv = make_manager(specs=[SlidingWindow(4)])
    seq = make_sequence(0, list(range(12)))
    compute(kv, seq)
    grow(kv, seq, 8)
    kv.settle(seq, 20)  # drops what the window has passed; it stays cached for now
    taken = [kv.pool.allocate() for _ in range(kv.pool.num_free)]  # evicts all that is free
    for block_id in taken:
        kv.pool.release(block_id)
    hit = kv.lookup(make_sequence(1, [*range(12), *([5] * 8), 1]))
    assert hit.num_tokens == 20
    assert hit.block_ids[0][:4] == [0, 0, 0, 0]
    # The sixth block is new. Of ten, a window that moves on with each chunk holds two besides.
    assert kv.num_blocks_to_admit(hit, num_tokens=21, chunk=64) == 1
    assert kv.num_blocks_to_admit(hit, num_tokens=60, chunk=4) == 2


def test_layers_form_groups_of_equal_size() -> None:
    full, window = FullAttention(), SlidingWindow(8)
    layout = group_layers([window, window, window, full] * 2)
    assert layout.token_size == 2
    assert [len(group.layer_ids) for group in layout.groups] == [2, 2, 2, 2]
    assert sorted(layer for group in layout.groups for layer in group.layer_ids) == list(range(8))
    assert group_layers([full] * 5).token_size == 5


class ManagerMachine(RuleBasedStateMachine):
    """Any order of the manager's verbs keeps the invariants; failed calls leave no trace."""

    specs: tuple[KVSpec, ...] = (FullAttention(), SlidingWindow(6))
    encoder_inputs: tuple[tuple[int, ...], ...] = ((),)

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(
            self.specs,
            BLOCK_SIZE,
            24,
            num_swap_blocks=12,
            digest=lambda content: sha256_128(content)[:1],
        )
        self.on_device: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.next_id = 0
        self.family: dict[int, int] = {}  # sequence -> the one that all of its kind descend from
        self.held: list[int] = []  # sources of copies that are not done

    def new_sequence(self, token_ids: list[int], encoder_input: tuple[int, ...]) -> Sequence:
        self.next_id += 1
        seq = make_sequence(self.next_id, token_ids)
        seq.request.encoder_token_ids = encoder_input
        return seq

    def snapshot(self) -> tuple[object, ...]:
        tables = [copy.deepcopy(s.table.by_group()) for s in self.on_device]  # type: ignore[union-attr]
        counts = [self.kv.pool.ref_count(b) for b in range(1, 25)]
        return tables, counts, self.kv.pool.num_free, self.kv.swap_pool.num_free

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def allocate(self, data: st.DataObject, tokens: list[int]) -> None:
        seq = self.new_sequence(tokens, data.draw(st.sampled_from(self.encoder_inputs)))
        hit = self.kv.lookup(seq)
        before = self.snapshot()
        needed = self.kv.num_new_blocks(hit, seq.num_tokens)
        free = self.kv.pool.num_free
        changes = self.kv.allocate(seq, hit, seq.num_tokens)
        if changes is None:
            assert needed > free
            assert before == self.snapshot()
            return
        assert needed <= free
        self.held += changes.held
        self.family[seq.seq_id] = seq.seq_id
        seq.num_computed_tokens = seq.num_tokens
        self.on_device.append(seq)

    @precondition(lambda self: self.on_device)
    @rule(data=st.data(), count=st.integers(1, 9))
    def append(self, data: st.DataObject, count: int) -> None:
        gang = data.draw(st.lists(st.sampled_from(self.on_device), unique_by=id, max_size=3))
        before = self.snapshot()
        goals = [(seq, seq.num_tokens + count) for seq in gang]
        if self.kv.append(goals) is None:
            assert before == self.snapshot()
            return
        for seq in gang:
            seq.token_ids += [seq.seq_id % 2] * count
            seq.num_computed_tokens += count

    @precondition(lambda self: self.on_device or self.swapped)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """The results of a sequence's steps arrive, perhaps after it was swapped out."""
        seq = data.draw(st.sampled_from(self.on_device + self.swapped))
        self.kv.settle(seq, seq.num_computed_tokens)
        assert seq.table is not None
        window = self.kv.specs[1].first_needed_token(seq.num_computed_tokens) // BLOCK_SIZE
        assert seq.table.num_dropped == [0, window]

    @precondition(lambda self: self.on_device)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.on_device))
        child = self.new_sequence(parent.token_ids, parent.request.encoder_token_ids)
        free = self.kv.pool.num_free
        self.kv.fork(parent, child)
        assert self.kv.pool.num_free == free
        self.family[child.seq_id] = self.family[parent.seq_id]
        self.on_device.append(child)

    @precondition(lambda self: self.kin())
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        seq, parent = data.draw(st.sampled_from(self.kin()))
        self.kv.replace(seq, parent)
        seq.token_ids = list(parent.token_ids)
        assert seq.table is not None
        assert parent.table is not None
        assert seq.table.by_group() == parent.table.by_group()
        assert seq.prefix_nodes == parent.prefix_nodes

    def kin(self) -> list[tuple[Sequence, Sequence]]:
        """Pairs of relatives that have computed equally many tokens, and hold their encoder input
        in the same blocks, as those do that are always swapped together."""
        return [
            (a, b)
            for a in self.on_device
            for b in self.on_device
            if self.family[a.seq_id] == self.family[b.seq_id]
            and a.num_computed_tokens == b.num_computed_tokens
            and a.table.encoder_ids == b.table.encoder_ids  # type: ignore[union-attr]
            and a is not b
        ]

    @precondition(lambda self: self.on_device or self.swapped)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.on_device + self.swapped))
        self.kv.free(seq)
        for queue in (self.on_device, self.swapped):
            if seq in queue:
                queue.remove(seq)

    @precondition(lambda self: self.on_device)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        gang = data.draw(
            st.lists(st.sampled_from(self.on_device), unique_by=id, min_size=1, max_size=3)
        )
        before = self.snapshot()
        if self.kv.swap_out(gang) is None:
            assert before == self.snapshot()
            return
        self.on_device = [s for s in self.on_device if s not in gang]
        self.swapped += gang

    @precondition(lambda self: self.swapped)
    @rule()
    def swap_in(self) -> None:
        before = self.snapshot()
        if self.kv.swap_in(self.swapped) is None:
            assert before == self.snapshot()
            return
        self.on_device += self.swapped
        self.swapped = []

    @rule()
    def copies_are_done(self) -> None:
        self.kv.release_sources(self.held)
        self.held = []

    @rule()
    def reset(self) -> None:
        self.kv.reset_prefix_cache()

    @invariant()
    def hold(self) -> None:
        check_manager(self.kv, self.on_device, self.swapped, is_settled=False)

    def teardown(self) -> None:
        self.copies_are_done()
        for seq in self.on_device + self.swapped:
            self.kv.free(seq)
        assert self.kv.pool.num_free == self.kv.pool.num_blocks


class EncoderMachine(ManagerMachine):
    """The same with encoder inputs, of which some need several blocks."""

    specs = (FullAttention(), SlidingWindow(6), CrossAttention())
    encoder_inputs = ((1,), (2, 3, 4, 5, 6), (2, 3, 4, 5, 6, 7, 8, 9, 10))


ManagerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True
)
TestManager = pytest.mark.filterwarnings("ignore")(ManagerMachine.TestCase)
EncoderMachine.TestCase.settings = ManagerMachine.TestCase.settings
TestManagerWithEncoder = pytest.mark.filterwarnings("ignore")(EncoderMachine.TestCase)
