"""Random workloads on the symbolic KV cache; and proof that it notices broken rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.workloads import Workload
from octavo.core import invariants
from octavo.core.block_table import NULL_BLOCK, BlockTable
from octavo.core.kv.block_pool import BlockPool
from octavo.core.kv.manager import Changes, KVCacheManager
from octavo.core.kv.prefix_cache import PrefixCache
from octavo.core.kv.prefix_matcher import PrefixHit, PrefixMatcher
from octavo.core.lifecycle import SequenceLifecycle
from octavo.core.plan_builder import PlanBuilder, StepInFlight
from octavo.core.prefix_node import PrefixNode
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence


def batches(by_day: int, by_night: int) -> pytest.MarkDecorator:
    """Numbers of batches of workloads, of which the later ones run by night alone."""
    marks = [() if batch < by_day else pytest.mark.slow for batch in range(by_night)]
    params = [pytest.param(batch, marks=each) for batch, each in enumerate(marks)]
    return pytest.mark.parametrize("batch", params)


FEW = 60  # workloads within which a broken rule must be noticed


def run_workloads(
    seeds: range, has_encoder: bool = False, holds_rows: bool = False
) -> list[Workload]:
    workloads = [Workload(seed, has_encoder=has_encoder, holds_rows=holds_rows) for seed in seeds]
    for workload in workloads:
        workload.run()
    return workloads


@batches(3, 8)
def test_random_workloads(batch: int) -> None:
    workloads = run_workloads(range(50 * batch, 50 * (batch + 1)))
    assert sum(workload.num_forks for workload in workloads) > 100
    assert sum(workload.num_tail_hits for workload in workloads) > 5
    assert sum(workload.num_left_out for workload in workloads) > 0


@batches(2, 4)
def test_random_workloads_with_an_encoder(batch: int) -> None:
    num_encoded = num_hits = num_evicted = 0
    num_preempted = {"swap": 0, "recompute": 0}
    for seed in range(50 * batch, 50 * (batch + 1)):
        workload = Workload(seed, has_encoder=True)
        workload.run()
        num_encoded += workload.executor.num_encoded
        num_hits += workload.num_input_hits
        num_evicted += workload.kv.num_evicted_blocks
        for mode, number in workload.scheduler.num_preemptions.items():
            num_preempted[mode] += number
    assert min(num_encoded, num_hits, num_evicted) > 50
    assert min(num_preempted.values()) > 0


@batches(2, 4)
def test_what_goes_wrong_ends_alone(batch: int) -> None:
    """Among prompts that cannot be computed the others get what they would get without them."""
    num_failed = 0
    for seed in range(50 * batch, 50 * (batch + 1)):
        workload = Workload(seed, is_harmful=True, has_encoder=seed % 4 == 0)
        workload.run()
        num_failed += len(workload.failed)
    assert num_failed > 20


@batches(2, 4)
def test_rows_that_could_not_be_drawn_get_the_same_tokens_later(batch: int) -> None:
    num_undrawn = num_preempted = num_failed = 0
    for seed in range(50 * batch, 50 * (batch + 1)):
        workload = Workload(
            seed, is_harmful=seed % 5 == 0, has_encoder=seed % 4 == 0, holds_rows=True
        )
        workload.run()
        num_undrawn += workload.executor.num_undrawn
        num_preempted += sum(workload.scheduler.num_preemptions.values())
        num_failed += len(workload.failed)
    assert num_undrawn > 1000
    assert min(num_preempted, num_failed) > 5


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(100))
def test_random_workloads_nightly(batch: int) -> None:
    seeds = range(1000 + 100 * batch, 1000 + 100 * (batch + 1))
    run_workloads(seeds, has_encoder=batch % 4 == 0, holds_rows=batch % 3 == 0)


def skip_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    """A shared tail block is written in place."""
    original = KVCacheManager.append

    def append(self: KVCacheManager, targets: list[tuple[Sequence, int]]) -> object:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockPool, "ref_count", lambda pool, block_id: 1)
            return original(self, targets)

    patch.setattr(KVCacheManager, "append", append)


def write_into_the_tail(patch: pytest.MonkeyPatch) -> None:
    """A prompt that goes on inside a block which is not full gets the block itself, and no copy."""
    original = KVCacheManager.allocate

    def allocate(self: KVCacheManager, seq: Sequence, hit: PrefixHit, num_tokens: int) -> object:
        changes = original(self, seq, hit, num_tokens)
        for copy in [] if changes is None else list(changes.copies):
            if self.prefix_cache.tail_of(copy.source) is not None:
                assert seq.table is not None
                assert changes is not None
                for ids in seq.table.block_ids:
                    if copy.target in ids:
                        ids[ids.index(copy.target)] = copy.source
                self.pool.share(copy.source)
                self.pool.release(copy.target)
                changes.copies.remove(copy)
                changes.table_writes = self.table_writes(seq)
        return changes

    patch.setattr(KVCacheManager, "allocate", allocate)
    # They would notice the shared block at once: here, what is read must.
    patch.setattr(invariants, "_check_table", lambda kv, seq: None)
    patch.setattr(invariants, "_check_pool", lambda pool, tables, held: None)
    patch.setattr(invariants, "_check_index", lambda kv: None)


def offer_the_newest_token(patch: pytest.MonkeyPatch) -> None:
    """A tail counts the newest token, whose KV is not there yet."""
    original = KVCacheManager.offer_tail

    def offer_tail(self: KVCacheManager, seq: Sequence) -> None:
        if (table := seq.table) is not None and seq.num_tokens % self.block_size:
            last = seq.token_ids[-1]
            seq.token_ids.append(last)
            try:
                original(self, seq)
            finally:
                seq.token_ids.pop()
                table.num_registered = min(table.num_registered, seq.num_tokens // self.block_size)
        else:
            original(self, seq)

    patch.setattr(KVCacheManager, "offer_tail", offer_tail)


def keep_the_tail_as_it_was(patch: pytest.MonkeyPatch) -> None:
    """A tail stays in the index when its block is overwritten by another sequence."""
    original = KVCacheManager._evict

    def evict(self: KVCacheManager, block_id: int) -> None:
        if self.prefix_cache.tail_of(block_id) is None:
            original(self, block_id)

    patch.setattr(KVCacheManager, "_evict", evict)
    # They would notice it at once: here, what is read must.
    patch.setattr(invariants, "_check_index", lambda kv: None)
    patch.setattr(invariants, "_check_table", lambda kv, seq: None)


def forget_a_release(patch: pytest.MonkeyPatch) -> None:
    """The first block of a freed sequence stays held."""
    original = KVCacheManager.free

    def free(self: KVCacheManager, seq: Sequence) -> None:
        if seq.table is not None and seq.num_tokens % 5 == 0:
            seq.table.block_ids[0][0] = NULL_BLOCK
        original(self, seq)

    patch.setattr(KVCacheManager, "free", free)


def register_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks enter the prefix cache when they are taken, before their KV is computed."""
    original = KVCacheManager.allocate

    def allocate(self: KVCacheManager, seq: Sequence, hit: object, num_tokens: int) -> object:
        changes = original(self, seq, hit, num_tokens)  # type: ignore[arg-type]
        if changes is not None:
            self.register(seq, num_tokens)
        return changes

    patch.setattr(KVCacheManager, "allocate", allocate)


def trust_the_digest(patch: pytest.MonkeyPatch) -> None:
    """A hit is not verified against the tokens."""

    def find(self: PrefixCache, node: PrefixNode) -> object:
        return self._entries.get(node.key)

    patch.setattr(PrefixCache, "find", find)


def swap_without_moving(patch: pytest.MonkeyPatch) -> None:
    """Swapped-out blocks are never copied."""
    original = KVCacheManager.swap_out

    def swap_out(self: KVCacheManager, seqs: list[Sequence]) -> list[tuple[int, int]] | None:
        pairs = original(self, seqs)
        return pairs[1:] if pairs else pairs

    patch.setattr(KVCacheManager, "swap_out", swap_out)


def free_by_another_window(patch: pytest.MonkeyPatch) -> None:
    """Blocks are freed by the first group's window, whichever group they are in."""
    original = KVCacheManager._left_behind

    def left_behind(self: KVCacheManager, table: BlockTable, num_computed_tokens: int) -> object:
        specs = self.specs
        self.specs = (specs[self._windowed[0]],) * len(specs)
        try:
            yield from original(self, table, num_computed_tokens)
        finally:
            self.specs = specs

    patch.setattr(KVCacheManager, "_left_behind", left_behind)


def free_a_step_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks are freed that the window leaves with the next token."""
    original = KVCacheManager._leave_behind

    def leave_behind(self: KVCacheManager, table: BlockTable, num_computed_tokens: int) -> None:
        original(self, table, num_computed_tokens + 1)

    patch.setattr(KVCacheManager, "_leave_behind", leave_behind)


def free_when_planned(patch: pytest.MonkeyPatch) -> None:
    """Blocks are freed while the step that still reads them is planned."""
    original = KVCacheManager._append_one

    def append_one(self: KVCacheManager, seq: Sequence, num_tokens: int, changes: Changes) -> None:
        original(self, seq, num_tokens, changes)
        assert seq.table is not None
        self._leave_behind(seq.table, num_tokens)

    patch.setattr(KVCacheManager, "_append_one", append_one)


def keep_what_is_behind(patch: pytest.MonkeyPatch) -> None:
    """Blocks that a window has left stay held until the sequence ends."""
    patch.setattr(KVCacheManager, "settle", KVCacheManager.register)


def free_by_another_block_size(patch: pytest.MonkeyPatch) -> None:
    """Blocks are freed as if they held as few tokens as those of other groups."""
    original = KVCacheManager._left_behind

    def left_behind(self: KVCacheManager, table: BlockTable, num_computed_tokens: int) -> object:
        sizes = self.block_sizes
        self.block_sizes = (min(sizes),) * len(sizes)
        try:
            yield from original(self, table, num_computed_tokens)
        finally:
            self.block_sizes = sizes

    patch.setattr(KVCacheManager, "_left_behind", left_behind)


def copy_by_another_block_size(patch: pytest.MonkeyPatch) -> None:
    """A block is copied as if it held as few tokens as those of other groups."""
    original = KVCacheManager.allocate

    def allocate(self: KVCacheManager, seq: Sequence, hit: PrefixHit, num_tokens: int) -> object:
        changes = original(self, seq, hit, num_tokens)
        if changes is not None:
            smallest = min(self.block_sizes)
            changes.copies = [
                copy._replace(num_tokens=copy.num_tokens % smallest) for copy in changes.copies
            ]
        return changes

    patch.setattr(KVCacheManager, "allocate", allocate)


def hold_the_input_once(patch: pytest.MonkeyPatch) -> None:
    """A fork does not count as a holder of the encoder's input, which is freed with its parent."""
    original = KVCacheManager.fork

    def fork(self: KVCacheManager, parent: Sequence, child: Sequence) -> None:
        original(self, parent, child)
        assert child.table is not None
        for block_id in [b for ids in child.table.encoder_ids for b in ids]:
            self.pool.release(block_id)

    patch.setattr(KVCacheManager, "fork", fork)


def window_over_the_input(patch: pytest.MonkeyPatch) -> None:
    """A window of the decoder frees blocks of the encoder's input."""
    original = KVCacheManager._leave_behind

    def leave_behind(self: KVCacheManager, table: BlockTable, num_computed_tokens: int) -> None:
        original(self, table, num_computed_tokens)
        spec, pool = self.specs[0], self.pool if table.on_device else self.swap_pool
        for ids, size in zip(table.encoder_ids, self.encoder_block_sizes, strict=True):
            for i in range(min(len(ids), spec.first_needed_token(num_computed_tokens) // size)):
                if ids[i] != NULL_BLOCK:
                    pool.release(ids[i])
                    ids[i] = NULL_BLOCK

    patch.setattr(KVCacheManager, "_leave_behind", leave_behind)


def encode_only_once(patch: pytest.MonkeyPatch) -> None:
    """The encoder does not run again when a request is recomputed."""
    original = PlanBuilder.encode

    def encode(self: PlanBuilder, seq: Sequence, num_tokens: int) -> None:
        if not seq.request.num_preemptions:
            original(self, seq, num_tokens)

    patch.setattr(PlanBuilder, "encode", encode)


def share_between_inputs(patch: pytest.MonkeyPatch) -> None:
    """Equal tokens of decoders have the same names under different encoder inputs."""

    def root(self: PrefixMatcher, seq: Sequence) -> PrefixNode:
        return self._cache.root(seq.request.cache_salt)

    patch.setattr(PrefixMatcher, "_root", root)


def find_what_is_partly_evicted(patch: pytest.MonkeyPatch) -> None:
    """An encoder input can be found although some of its blocks were overwritten."""

    def evict(self: KVCacheManager, block_id: int) -> None:
        if self.encoder_inputs.owner(block_id) is None:
            copy = self.prefix_cache.forget(block_id)
            if copy is not None:
                self.pool.mark_cached(copy)

    patch.setattr(KVCacheManager, "_evict", evict)
    # The invariants of the index would notice it at once: here, what is read must.
    patch.setattr(invariants, "_check_index", lambda kv: None)


def leave_the_input_behind(patch: pytest.MonkeyPatch) -> None:
    """Swapping moves the blocks of the sequences, and not those of the encoder's input."""

    def held(self: BlockTable) -> list[int]:
        return [b for ids in self.block_ids for b in ids if b != NULL_BLOCK]

    patch.setattr(BlockTable, "held", held)


def settle_what_sits_out(patch: pytest.MonkeyPatch) -> None:
    """Windows leave blocks that the last token of a row which was not drawn reads again."""
    original = Scheduler._settle

    def settle(self: Scheduler, step: StepInFlight, undrawn: frozenset[int]) -> None:
        original(self, step, frozenset())

    patch.setattr(Scheduler, "_settle", settle)
    # It would have the request recomputed as a whole: here, what is read must notice it.
    patch.setattr(KVCacheManager, "rewind", _rewind_without_windows)


def rewind_behind_windows(patch: pytest.MonkeyPatch) -> None:
    """A sequence goes back to tokens whose windows have been left behind."""
    patch.setattr(KVCacheManager, "rewind", _rewind_without_windows)


_rewind = KVCacheManager.rewind


def _rewind_without_windows(self: KVCacheManager, seq: Sequence, num_tokens: int) -> bool:
    windowed, self._windowed = self._windowed, []
    try:
        return _rewind(self, seq, num_tokens)
    finally:
        self._windowed = windowed


def keep_the_void_token(patch: pytest.MonkeyPatch) -> None:
    """The worker's row is not taken back behind a token that was not drawn."""
    patch.setattr(SequenceLifecycle, "take_back", lambda self, seq: None)


def keep_the_void_block(patch: pytest.MonkeyPatch) -> None:
    """A sequence that goes back keeps the blocks of tokens that were not drawn."""

    def rewind(self: KVCacheManager, seq: Sequence, num_tokens: int) -> bool:
        seq.num_computed_tokens = num_tokens
        return True

    patch.setattr(KVCacheManager, "rewind", rewind)


OF_ROWS_THAT_SIT_OUT = [
    settle_what_sits_out,
    rewind_behind_windows,
    keep_the_void_token,
    keep_the_void_block,
]
WITH_AN_ENCODER = [
    hold_the_input_once,
    window_over_the_input,
    encode_only_once,
    share_between_inputs,
    find_what_is_partly_evicted,
    leave_the_input_behind,
]


@pytest.mark.parametrize(
    "break_rule",
    [
        skip_copy_on_write,
        write_into_the_tail,
        offer_the_newest_token,
        keep_the_tail_as_it_was,
        forget_a_release,
        register_early,
        trust_the_digest,
        swap_without_moving,
        free_by_another_window,
        free_a_step_early,
        free_when_planned,
        keep_what_is_behind,
        free_by_another_block_size,
        copy_by_another_block_size,
        *OF_ROWS_THAT_SIT_OUT,
        *WITH_AN_ENCODER,
    ],
    ids=lambda rule: rule.__name__,
)
def test_broken_rules_are_noticed(
    break_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_rule(monkeypatch)
    # Few workloads read a tail whose block has been overwritten.
    first = 280 if break_rule is keep_the_tail_as_it_was else 0
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_workloads(
            range(first, first + FEW),
            has_encoder=break_rule in WITH_AN_ENCODER,
            holds_rows=break_rule in OF_ROWS_THAT_SIT_OUT,
        )
