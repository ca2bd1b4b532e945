"""Requests that go on where another one stands, or has ended: what they compute and hold."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from core.symbolic import drawn_token, symbols_of
from core.worlds import BLOCK_SIZE, World, preempt
from octavo.core.decoding import BeamSearch
from octavo.core.kv.specs import FullAttention, SlidingWindow
from octavo.core.sequence import Request
from octavo.core.step import SamplingSpec

PROMPT = [1, 2, 3, 4, 5, 0, 1, 2, 3]
SUFFIX = [6, 6, 5]


def make_world(num_blocks: int = 60, max_tails: int = 8, **options: Any) -> World:
    world = World(num_blocks, **options)
    world.kv.max_tails = max_tails
    return world


def start(world: World, num_output_tokens: int = 20, until: int = 4) -> Request:
    """A parent that has drawn `until` tokens."""
    parent = world.add("parent", prompt=PROMPT, num_output_tokens=num_output_tokens)
    while parent.sequences[0].num_output_tokens < until:
        world.step()
    return parent


def fork(world: World, parent: Request, name: str = "child", suffix: list[int] = SUFFIX) -> Request:
    [seq] = parent.sequences or parent.finished
    if parent.sequences:
        world.kv.offer_tail(seq)
    return world.add(name, prompt=[*seq.token_ids, *suffix], num_output_tokens=5)


def check(request: Request) -> None:
    """A request has the tokens that it would have alone."""
    [seq] = request.finished
    symbols = symbols_of(seq.token_ids)
    for position in range(request.num_prompt_tokens, len(seq.token_ids)):
        drawn = drawn_token(symbols[position - 1], request.seed, 0)
        assert seq.token_ids[position] == drawn


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_drawn", range(1, 8))
def test_a_child_of_a_running_parent_computes_its_own_tokens_alone(
    num_drawn: int, depth: int
) -> None:
    world = make_world(depth=depth)
    parent = start(world, until=num_drawn)
    num_known = parent.sequences[0].num_tokens - 1  # the newest one is not computed yet
    child = fork(world, parent)
    world.run()
    assert child.num_cached_tokens == num_known
    check(parent)
    check(child)
    assert world.kv.num_free_blocks == world.kv.pool.num_blocks


def test_a_child_of_an_ended_parent_computes_its_own_tokens_alone() -> None:
    world = make_world()
    parent = start(world, num_output_tokens=6)
    world.run()
    assert world.kv.num_free_blocks == world.kv.pool.num_blocks
    num_known = len(PROMPT) + 6 - 1
    assert num_known % BLOCK_SIZE
    children = [fork(world, parent, f"child {i}", [i]) for i in range(3)]
    world.run()
    for child in children:
        assert child.num_cached_tokens == num_known
        check(child)


def test_a_child_may_go_on_from_before_the_end() -> None:
    world = make_world(max_tails=100)
    parent = start(world, num_output_tokens=6)
    world.run()
    tokens = parent.finished[0].token_ids
    for position in range(1, len(tokens)):
        child = world.add(f"c{position}", prompt=[*tokens[:position], 6], num_output_tokens=3)
        world.run()
        assert child.num_cached_tokens == position
        check(child)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("is_forked_before", [True, False])
def test_a_parent_may_be_preempted_while_its_children_start(
    mode: Literal["swap", "recompute"], is_forked_before: bool
) -> None:
    world = make_world(num_swap_blocks=30)
    parent = start(world)
    if is_forked_before:
        child = fork(world, parent)
    preempt(world, parent, mode)
    if not is_forked_before:
        child = fork(world, parent)
    world.run()
    assert parent.num_preemptions == 1
    check(parent)
    check(child)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_parent_may_be_cancelled_while_its_children_start(num_steps: int) -> None:
    world = make_world(depth=2)
    parent = start(world)
    num_known = parent.sequences[0].num_tokens - 1
    child = fork(world, parent)
    for _ in range(num_steps):
        world.step()
    world.scheduler.abort("parent")
    late = fork(world, parent, "late", [4])
    world.run()
    assert child.num_cached_tokens == num_known
    check(child)
    check(late)
    assert world.kv.num_free_blocks == world.kv.pool.num_blocks


def test_a_child_of_an_evicted_parent_computes_all_again() -> None:
    world = make_world(num_blocks=12)
    parent = start(world, num_output_tokens=6)
    world.run()
    world.add("greedy", prompt=[5] * 44, num_output_tokens=3)
    world.run()
    assert world.kv.prefix_cache.num_tails == 1, "of the greedy one"
    child = fork(world, parent)
    world.run()
    assert child.num_cached_tokens == 0
    check(child)


def test_tails_preempt_nobody() -> None:
    """What has ended is overwritten before a running request is preempted."""
    world = make_world(num_blocks=12, max_tails=100)
    for i in range(6):
        world.add(f"r{i}", prompt=[i, 1], num_output_tokens=2)
    world.run()
    assert world.kv.prefix_cache.num_tails == 6
    world.add("long", prompt=[6, 6], num_output_tokens=45)
    world.run()
    assert world.scheduler.num_preemptions == {"swap": 0, "recompute": 0}
    assert world.kv.prefix_cache.num_tails == 1


def test_the_oldest_tails_are_forgotten_first() -> None:
    world = make_world(max_tails=2)
    parents = []
    for i in range(3):
        parents.append(world.add(f"r{i}", prompt=[i, 1], num_output_tokens=2))
        world.run()
    assert world.kv.prefix_cache.num_tails == 2
    children = [fork(world, parent, f"c{i}") for i, parent in enumerate(parents)]
    world.step()
    assert [child.num_cached_tokens for child in children] == [0, 3, 3]


def test_a_tail_that_has_become_full_is_found_as_what_it_is_now() -> None:
    world = make_world()
    parent = start(world, until=3)
    world.kv.offer_tail(parent.sequences[0])
    assert world.kv.prefix_cache.num_tails == 1
    world.run()
    assert (len(PROMPT) + 20 - 1) % BLOCK_SIZE == world.kv.prefix_cache.num_tails == 0
    child = fork(world, parent)
    world.run()
    assert child.num_cached_tokens == len(PROMPT) + 20 - 1


def test_what_fails_leaves_no_tail() -> None:
    """Not even one that was offered before: it cannot be known what has harmed the request."""
    world = make_world()
    parent = start(world, until=3)
    other = world.add("other", prompt=[6, 5], num_output_tokens=2)
    while not other.is_finished:
        world.step()
    world.kv.offer_tail(parent.sequences[0])
    assert world.kv.prefix_cache.num_tails == 2
    world.executor.strikes = lambda: True
    world.run()
    assert parent.error is not None
    assert world.kv.prefix_cache.num_tails == 1, "of the other one"


def test_without_tails_only_full_blocks_are_found() -> None:
    world = make_world(max_tails=0)
    child = fork(world, start(world, until=4))
    world.run()
    assert child.num_cached_tokens == (len(PROMPT) + 3) // BLOCK_SIZE * BLOCK_SIZE
    check(child)


def test_samples_of_a_forked_request_share_what_they_fork_from() -> None:
    world = make_world()
    parent = start(world)
    world.kv.offer_tail(parent.sequences[0])
    prompt = [*parent.sequences[0].token_ids, 6]
    method = BeamSearch(3, len(prompt) + 4, frozenset())
    spec = SamplingSpec(num_candidates=method.num_candidates)
    search = world.add("search", prompt=prompt, method=method, sampling=spec)
    samples = world.add("samples", prompt=prompt, n=3)
    world.run()
    assert len(search.finished) == len(samples.finished) == 3
    assert search.num_cached_tokens == len(prompt) - 2
    assert samples.num_cached_tokens >= len(prompt) - 2


def test_a_tail_of_groups_with_other_blocks_and_windows() -> None:
    """Small blocks of a tail are shared if they are full; a window may have left some behind."""
    specs = [FullAttention(), SlidingWindow(6), SlidingWindow(40)]
    world = make_world(specs=specs, block_sizes=[8, 2, 4])
    for num_drawn in range(1, 12):
        parent = start(world, until=num_drawn)
        num_known = parent.sequences[0].num_tokens - 1
        child = fork(world, parent)
        world.run()
        whole = num_known // 8 * 8
        assert child.num_cached_tokens in (whole, num_known)
        check(child)
        world.kv.reset_prefix_cache()
    assert world.kv.num_free_blocks == world.kv.pool.num_blocks


def test_64_children_of_a_long_prompt_compute_it_once() -> None:
    """Counted beside 64 requests with the same tokens that find full blocks alone."""
    num_computed, num_held = {}, {}
    for max_tails in (64, 0):
        world = make_world(1600, max_tails, max_num_seqs=65, max_num_batched_tokens=2048)
        parent = world.add("parent", prompt=[i % 7 for i in range(332)], num_output_tokens=200)
        while parent.sequences[0].num_output_tokens < 3:
            world.step()
        num_tokens = parent.sequences[0].num_tokens
        children = [fork(world, parent, f"child {i}", [10 + i] * 3) for i in range(64)]
        while world.scheduler.waiting:
            world.step()
        counts = [child.num_prompt_tokens - child.num_cached_tokens for child in children]
        num_computed[max_tails] = sum(counts)
        num_held[max_tails] = world.kv.num_table_blocks
        world.run()
    num_full, length = divmod(num_tokens - 1, BLOCK_SIZE)
    assert length == 2, "the last block must not be full"
    # The parent's newest token and the suffix, or less once the parent has gone on. Without tails,
    # children that start before the parent's last block is full compute that as well.
    assert num_computed[64] <= 64 * (1 + 3)
    assert num_computed[0] >= num_computed[64] + 30 * length
    # All share the full blocks, and each holds what comes after them.
    assert max(num_held.values()) <= num_full + 65 * 4
