"""The numbered invariants of docs/kv_cache.md, and those of the queues, as code.

Tests check them after every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from octavo.core.block_table import NULL_BLOCK, BlockTable
from octavo.core.kv.block_pool import BlockPool
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.reserving import ReservingKVCacheManager
from octavo.core.kv.specs import FullAttention
from octavo.core.prefix_node import TOKEN_BYTES
from octavo.core.request_limits import keeps_blocks
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence, Status


def check_scheduler(scheduler: Scheduler) -> None:
    """Check all invariants of the KV cache and of the queues that can be seen between two steps.

    Raises AssertionError.
    """
    on_device: list[Sequence] = []
    swapped: list[Sequence] = []
    for request in scheduler.requests.values():
        held = [seq for seq in request.sequences if seq.table is not None]
        assert request.status is not Status.FINISHED, f"{request} is finished, yet known"
        is_running = request.status is Status.RUNNING
        for seq in held:
            assert request.status is not Status.WAITING, f"I7: {request} waits and holds blocks"
            assert _table(seq).on_device == is_running, f"I7: {seq} holds blocks of the wrong tier"
        (swapped if request.status is Status.SWAPPED else on_device).extend(held)
    check_manager(scheduler.kv, on_device, swapped, is_settled=not scheduler.in_flight)
    queues = (scheduler.waiting, scheduler.swapped, scheduler.running)
    queued = [request.request_id for queue in queues for request in queue]
    assert sorted(queued) == sorted(scheduler.requests), "a request is lost or queued twice"
    for queue in queues:
        order = [request.order for request in queue]
        assert order == sorted(order), "a queue is out of order"
    slots = sum(request.method.max_sequences for request in scheduler.running)
    assert slots <= scheduler.config.max_num_seqs, "more sequences run than allowed"
    free_slots = scheduler.queues.num_free_slots
    assert slots + free_slots == scheduler.config.max_num_seqs, "a slot is lost"
    for request in scheduler.running:
        assert len(request.sequences) <= request.method.max_sequences, f"{request} is too wide"
    _check_limits(scheduler)
    _check_ready(scheduler)
    _check_steps_in_flight(scheduler)
    computing = {seq.seq_id for seq in on_device}
    owners = scheduler.kv.seqs_in_progress()
    assert owners <= computing, "prompts wait for blocks that no sequence computes"
    alive = {seq for request in scheduler.requests.values() for seq in request.sequences}
    assert alive.issuperset(scheduler.kv.recent_prompts()), "a prompt that has ended is kept alive"


def _check_limits(scheduler: Scheduler) -> None:
    """What new requests are checked against is what the unfinished ones and the pins need."""
    limits, kv = scheduler.limits, scheduler.kv
    needed = {each: limits.worst_case_blocks(each) for each in scheduler.requests.values()}
    assert limits.worst_cases == needed, "the worst case of a request is not known"
    coming = sum(blocks for request, blocks in needed.items() if keeps_blocks(request))
    assert limits.num_available_blocks() == kv.pool.num_blocks - kv.num_pinned_blocks - coming
    others = [blocks for request, blocks in needed.items() if not keeps_blocks(request)]
    assert limits.largest == max(others, default=0), "the largest request is not known"


def _check_ready(scheduler: Scheduler) -> None:
    """A waiting request is either ready, or deferred until a prefix is in the cache."""
    queues = scheduler.queues
    for flow in queues.ready.flows():
        order = [request.order for request in flow]
        assert order == sorted(order), "requests that are ready are out of order"
    ready = list(queues.ready)
    keys = [scheduler.policy.key(request, scheduler.clock()) for request in ready]
    assert keys == sorted(keys), "the policy's order is not kept"
    places = Counter(request.request_id for request in [*ready, *queues.deferred()])
    waiting = [request.request_id for request in scheduler.waiting]
    assert places == Counter(waiting), "a waiting request is considered never, or twice"


def _check_steps_in_flight(scheduler: Scheduler) -> None:
    """Requests and sequences wait for exactly what the steps in flight will bring."""
    steps = list(scheduler.in_flight.values())
    held = Counter(block_id for step in steps for block_id in step.held)
    assert held == scheduler.kv.held_sources, "a source of a copy is held too long, or not at all"
    for request in scheduler.requests.values():
        undecided = [step for step in steps if request in step.undecided]
        assert request.num_undecided == len(undecided), f"{request} waits for other decisions"
        for seq in request.sequences:
            drawing = [step for step in steps if seq in step.drawn and step not in undecided]
            assert seq.num_pending == len(drawing), f"{seq} waits for other draws"


def check_manager(
    kv: KVCacheManager,
    on_device: Iterable[Sequence],
    swapped: Iterable[Sequence] = (),
    is_settled: bool = True,
) -> None:
    """I1 to I4 and I8, for the given sequences, which must be all there are.

    `is_settled`: no step is in flight, so that nothing is held for its sake.
    """
    on_device, swapped = list(on_device), list(swapped)
    if isinstance(kv, ReservingKVCacheManager):
        _check_reservations(kv, on_device)
        return
    pinned = [_table(seq) for seq in kv.pins.values()]
    tables = [*map(_table, on_device), *pinned]
    holders = Counter(block_id for table in pinned for block_id in table.held())
    assert kv.pinned == holders, "blocks of pinned prefixes are not counted"
    _check_pool(kv.pool, tables, kv.held_sources)
    _check_pool(kv.swap_pool, [_table(seq) for seq in swapped], Counter())
    assert kv.swap_pool.num_blocks <= kv.pool.num_blocks, "I8: the swap tier exceeds the pool"
    for seq in [*on_device, *swapped]:
        _check_windows(kv, seq, is_settled)
        _check_encoder_input(kv, seq)
    for seq in on_device:
        _check_table(kv, seq)
    _check_index(kv)


def _check_reservations(kv: ReservingKVCacheManager, seqs: list[Sequence]) -> None:
    """The same where memory is reserved ahead: a table has room for more than I4 allows."""
    tables = [_table(seq).block_ids for seq in seqs]
    spares = kv.spare_extents()
    runs = {tuple(ids) for extent in [*tables, *spares] for ids in extent}
    for run in runs:
        assert run == tuple(range(run[0], run[0] + len(run))), f"{run} are not consecutive"
    blocks = [b for run in runs for b in run]
    free = kv.pool.free_ids()
    assert len({*blocks, *free}) == len(blocks) + len(free), "I1: extents overlap, or are free"
    assert len(free) == kv.pool.num_free, "I1: a free block is not counted"
    holders = Counter(b for extent in [*tables, *spares] for ids in extent for b in ids)
    for block_id, count in holders.items():
        assert kv.pool.ref_count(block_id) == count, f"I2: block {block_id} has {count} holders"
    for seq in seqs:
        table = _table(seq)
        room = min(
            len(ids) * size for ids, size in zip(table.block_ids, kv.block_sizes, strict=True)
        )
        assert seq.num_computed_tokens <= room, f"I4: {seq} has room for {room} tokens"
        if table.writable_until > seq.num_computed_tokens:
            assert kv.pool.ref_count(table.block_ids[0][0]) == 1, f"I3: {seq} shares its extent"


def _table(seq: Sequence) -> BlockTable:
    assert seq.table is not None, f"{seq} holds no blocks"
    return seq.table


def _check_pool(pool: BlockPool, tables: list[BlockTable], held: Counter[int]) -> None:
    holders = Counter(b for table in tables for b in table.held())
    holders.update(held)
    free = pool.free_ids()
    assert len(free) == len(set(free)) == pool.num_free, "I1: a block is free twice"
    assert not holders.keys() & set(free), "I1: a block is free and held"
    assert len(holders) + len(free) == pool.num_blocks, "I1: a block is neither free nor held"
    for block_id, count in holders.items():
        assert pool.ref_count(block_id) == count, (
            f"I2: block {block_id} counts {pool.ref_count(block_id)} holders and has {count}"
        )


def _check_index(kv: KVCacheManager) -> None:
    """The pool keeps what lookups find, and copies are known as long as they are held."""
    cache = kv.prefix_cache
    indexed = {block_id for block_id in cache._places if cache.is_indexed(block_id)}
    inputs = kv.encoder_inputs.block_ids()
    assert not inputs & cache._places.keys(), "a block holds an encoder input and a prefix"
    indexed |= inputs
    assert indexed == kv.pool.cached_ids(), "the index and the pool disagree on what is cached"
    for block_id in cache._places.keys() - indexed:
        assert kv.pool.ref_count(block_id) > 0, f"I6: copy {block_id} is free and still known"
    tails = {node.key for node in cache.tails}
    assert len(tails) == cache.num_tails <= kv.max_tails, "there are too many tails"
    for entry in cache._entries.values():
        is_short = len(entry.node.tokens) < kv.block_size * TOKEN_BYTES
        assert is_short == entry.is_tail == (entry.node.key in tails), "a tail is lost"
        assert any(block_id is not None for block_id in entry.block_ids), "an entry has no block"
    for siblings in cache._children.values():
        tokens = [entry.node.tokens for entry in siblings]
        assert tokens == sorted(tokens), "children of a prefix are out of order"
        for entry in siblings:
            assert entry.is_complete, "a prompt could continue from a block that is not there"
            assert cache.find(entry.node) is entry, "a block that is gone has a place in order"


def _check_table(kv: KVCacheManager, seq: Sequence) -> None:
    table = _table(seq)
    for spec, size, ids in zip(kv.specs, kv.block_sizes, table.block_ids, strict=True):
        assert len(ids) == -(-seq.num_computed_tokens // size), (
            f"I4: {seq} has {len(ids)} table entries for {seq.num_computed_tokens} tokens"
        )
        if isinstance(spec, FullAttention):
            assert NULL_BLOCK not in ids, f"I4: {seq} lost a block"
    if table.writable_until > seq.num_computed_tokens:
        # I3: what may be written without asking is held by this sequence alone.
        for ids, size in zip(table.block_ids, kv.block_sizes, strict=True):
            tail = ids[seq.num_computed_tokens // size]
            # Copies that are pending read what comes before.
            others = kv.pool.ref_count(tail) - kv.held_sources[tail] - 1
            assert others == 0, f"I3: {seq} may write into shared block {tail}"
            assert not kv.pool.is_cached(tail) or _is_cached_before(kv, seq, tail), (
                f"I3: {seq} may write into cached block {tail}"
            )


def _is_cached_before(kv: KVCacheManager, seq: Sequence, block_id: int) -> bool:
    """Whether only tokens of a block are cached that a sequence has computed already."""
    node = kv.prefix_cache.tail_of(block_id)
    if node is None:
        return False
    num_cached = len(node.tokens) // TOKEN_BYTES
    return num_cached <= seq.num_computed_tokens % kv.block_size


def _check_windows(kv: KVCacheManager, seq: Sequence, is_settled: bool) -> None:
    """What the next query reads is there, and, once all steps are over, nothing else."""
    table = _table(seq)
    for group, (spec, ids) in enumerate(zip(kv.specs, table.block_ids, strict=True)):
        first = spec.first_needed_token(seq.num_computed_tokens) // kv.block_sizes[group]
        assert NULL_BLOCK not in ids[first:], f"I4: {seq} lost a block inside its window"
        dropped = ids[: table.num_dropped[group]]
        assert dropped.count(NULL_BLOCK) == len(dropped), f"I4: {seq} holds what it has dropped"
        if is_settled:
            assert len(dropped) == first, f"I4: {seq} holds blocks that its window has left"


def _check_encoder_input(kv: KVCacheManager, seq: Sequence) -> None:
    """A sequence holds all blocks of its encoder input, and those that its siblings hold."""
    table, num_tokens = _table(seq), len(seq.request.encoder_token_ids)
    for size, ids in zip(kv.encoder_block_sizes, table.encoder_ids, strict=True):
        assert len(ids) == -(-num_tokens // size), (
            f"I4: {seq} has {len(ids)} blocks for an encoder input of {num_tokens} tokens"
        )
        assert NULL_BLOCK not in ids, f"I4: {seq} lost a block of its encoder input"
    for other in seq.request.sequences:
        if other.table is not None:
            assert other.table.encoder_ids == table.encoder_ids, (
                f"I4: {seq} and {other} hold their encoder input in different blocks"
            )
