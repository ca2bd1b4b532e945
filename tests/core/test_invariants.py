"""What tests run after every step notices each rule that is broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.worlds import BLOCK_SIZE, World, make_sequence
from octavo.core.block_table import NULL_BLOCK
from octavo.core.invariants import check_scheduler
from octavo.core.kv.reserving import OrcaOracle
from octavo.core.kv.specs import FullAttention
from octavo.core.prefix_node import pack_tokens
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request, Status


def table(request: Request) -> list[int]:
    """The blocks of a request's first sequence."""
    held = request.sequences[0].table
    assert held is not None
    return held.block_ids[0]


@pytest.fixture
def world() -> World:
    """`first` has 6 tokens in blocks 1 and 2; `second` 4 in block 3; the others wait."""
    world = World(num_blocks=6, num_swap_blocks=6, max_num_seqs=2)
    world.add("first", prompt=[1] * 6)
    world.add("second", prompt=[2] * 4)
    world.add("third", prompt=[3] * 5)
    world.add("fourth", prompt=[4] * 5)
    world.step()
    assert world.names("running") == ["first", "second"]
    check_scheduler(world.scheduler)
    return world


def free_twice(scheduler: Scheduler, first: Request, second: Request) -> None:
    scheduler.kv.pool._emptied += [4, 4]


def free_and_held(scheduler: Scheduler, first: Request, second: Request) -> None:
    scheduler.kv.pool._emptied.append(table(first)[0])


def lose_a_block(scheduler: Scheduler, first: Request, second: Request) -> None:
    scheduler.kv.pool.allocate()


def miscount_holders(scheduler: Scheduler, first: Request, second: Request) -> None:
    scheduler.kv.pool.share(table(first)[0])


def lose_a_table_entry(scheduler: Scheduler, first: Request, second: Request) -> None:
    scheduler.kv.pool.release(table(first).pop())


def lose_a_block_of_a_table(scheduler: Scheduler, first: Request, second: Request) -> None:
    scheduler.kv.pool.release(table(first)[0])
    table(first)[0] = NULL_BLOCK


def write_into_a_shared_block(scheduler: Scheduler, first: Request, second: Request) -> None:
    twin = make_sequence(99, list(first.prompt_token_ids))
    scheduler.kv.fork(first.sequences[0], twin)
    twin.request = first
    first.sequences.append(twin)
    first.method = second.method
    held = first.sequences[0].table
    assert held is not None
    held.writable_until = 2 * BLOCK_SIZE


def write_into_a_cached_block(scheduler: Scheduler, first: Request, second: Request) -> None:
    cache, block_id = scheduler.kv.prefix_cache, table(first)[1]
    node = cache.node(first.sequences[0].prefix_nodes[0], pack_tokens([1] * BLOCK_SIZE))
    assert cache.add(node, 0, block_id)
    scheduler.kv.pool.mark_cached(block_id)


def look_at_none(scheduler: Scheduler, first: Request, second: Request) -> None:
    for request in scheduler.waiting:
        scheduler.queues.ready.discard(request)


def look_at_the_last_first(scheduler: Scheduler, first: Request, second: Request) -> None:
    [ready] = scheduler.queues.ready.flows()
    ready._lists[0].reverse()


def hold_blocks_and_wait(scheduler: Scheduler, first: Request, second: Request) -> None:
    first.status = Status.WAITING


def swap_without_moving(scheduler: Scheduler, first: Request, second: Request) -> None:
    first.status = Status.SWAPPED


def finish_and_stay(scheduler: Scheduler, first: Request, second: Request) -> None:
    first.status = Status.FINISHED


def queue_twice(scheduler: Scheduler, first: Request, second: Request) -> None:
    scheduler.waiting.add(first)


def reverse_the_queue(scheduler: Scheduler, first: Request, second: Request) -> None:
    scheduler.running.reverse()


def lose_a_slot(scheduler: Scheduler, first: Request, second: Request) -> None:
    scheduler.queues.num_free_slots += 1


def hold_a_source_too_long(scheduler: Scheduler, first: Request, second: Request) -> None:
    scheduler.kv.pool.share(1)
    scheduler.kv.held_sources[1] += 1


def wait_for_no_decision(scheduler: Scheduler, first: Request, second: Request) -> None:
    first.num_undecided += 1


def wait_for_no_draw(scheduler: Scheduler, first: Request, second: Request) -> None:
    first.sequences[0].num_pending += 1


def let_prompts_wait_for_none(scheduler: Scheduler, first: Request, second: Request) -> None:
    scheduler.kv._prefixes._in_progress[b"key"] = 99


def look_at_one_that_runs(scheduler: Scheduler, first: Request, second: Request) -> None:
    scheduler.queues.ready.add(first)


def lose_what_is_cached(scheduler: Scheduler, first: Request, second: Request) -> None:
    scheduler.kv.prefix_cache.forget(table(first)[0])


def know_a_free_copy(scheduler: Scheduler, first: Request, second: Request) -> None:
    places = scheduler.kv.prefix_cache._places
    places[scheduler.kv.pool.free_ids()[0]] = places[table(first)[0]]


def continue_from_what_is_gone(scheduler: Scheduler, first: Request, second: Request) -> None:
    entry, _ = scheduler.kv.prefix_cache._places[table(first)[0]]
    del scheduler.kv.prefix_cache._entries[entry.node.key]


@pytest.mark.parametrize(
    ("break_rule", "message"),
    [
        (free_twice, r"^I1: a block is free twice\b"),
        (free_and_held, r"^I1: a block is free and held\b"),
        (lose_a_block, r"^I1: a block is neither free nor held\b"),
        (miscount_holders, r"^I2: block \d counts 2 holders and has 1\b"),
        (lose_a_table_entry, r"^I4: .* has 1 table entries for 6 tokens\b"),
        (lose_a_block_of_a_table, r"^I4: .* lost a block\b"),
        (write_into_a_shared_block, r"^I3: .* may write into shared block \d\b"),
        (write_into_a_cached_block, r"^I3: .* may write into cached block \d\b"),
        (look_at_none, r"^a waiting request is considered never, or twice\b"),
        (look_at_the_last_first, r"^requests that are ready are out of order\b"),
        (hold_blocks_and_wait, r"^I7: Request\('first', .*\) waits and holds blocks\b"),
        (swap_without_moving, r"^I7: Sequence\(.*\) holds blocks of the wrong tier\b"),
        (finish_and_stay, r"^Request\('first', .*\) is finished, yet known\b"),
        (queue_twice, r"^a request is lost or queued twice\b"),
        (reverse_the_queue, r"^a queue is out of order\b"),
        (lose_a_slot, r"^a slot is lost\b"),
        (hold_a_source_too_long, r"^a source of a copy is held too long, or not at all\b"),
        (wait_for_no_decision, r"^Request\('first', .*\) waits for other decisions\b"),
        (wait_for_no_draw, r"^Sequence\(.*\) waits for other draws\b"),
        (let_prompts_wait_for_none, r"^prompts wait for blocks that no sequence computes\b"),
        (look_at_one_that_runs, r"^a waiting request is considered never, or twice\b"),
        (lose_what_is_cached, r"^the index and the pool disagree on what is cached\b"),
        (know_a_free_copy, r"^I6: copy \d+ is free and still known\b"),
        (continue_from_what_is_gone, r"^a block that is gone has a place in order\b"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_rule_is_noticed(
    world: World, break_rule: Callable[[Scheduler, Request, Request], None], message: str
) -> None:
    first, second = world.scheduler.running
    break_rule(world.scheduler, first, second)
    with pytest.raises(AssertionError, match=message):
        check_scheduler(world.scheduler)


def overlap(kv: OrcaOracle, first: Request, second: Request) -> None:
    table(second)[:] = table(first)


def break_a_run(kv: OrcaOracle, first: Request, second: Request) -> None:
    table(first)[1] += 1


def lose_an_extent(kv: OrcaOracle, first: Request, second: Request) -> None:
    kv.pool._num_free += 1


def share_an_extent(kv: OrcaOracle, first: Request, second: Request) -> None:
    for block_id in table(first):
        kv.pool.share(block_id)


def outgrow_an_extent(kv: OrcaOracle, first: Request, second: Request) -> None:
    first.sequences[0].num_computed_tokens = 9


@pytest.mark.parametrize(
    ("break_rule", "message"),
    [
        (overlap, r"^I2: block \d has 2 holders\b"),
        (break_a_run, r"^\(1, 3\) are not consecutive\b"),
        (lose_an_extent, r"^I1: a free block is not counted\b"),
        (share_an_extent, r"^I2: block \d has 1 holders\b"),
        (outgrow_an_extent, r"^I4: .* has room for 8 tokens\b"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_rule_is_noticed_where_memory_is_reserved(
    break_rule: Callable[[OrcaOracle, Request, Request], None], message: str
) -> None:
    world = World(enable_prefix_caching=False)
    kv = OrcaOracle([FullAttention()], BLOCK_SIZE, 8, 0, 32)
    scheduler = Scheduler(world.scheduler.config, kv)
    world.scheduler = scheduler
    first, second = world.add("first", 6, 2), world.add("second", 3, 5)
    scheduler.schedule()
    check_scheduler(scheduler)
    break_rule(kv, first, second)
    with pytest.raises(AssertionError, match=message):
        check_scheduler(scheduler)
