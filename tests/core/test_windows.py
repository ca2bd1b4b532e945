"""Sliding windows: what is held after each step, whatever their size."""

from __future__ import annotations

import pytest

from core.worlds import BLOCK_SIZE, World
from octavo.core.block_table import NULL_BLOCK
from octavo.core.kv.specs import FullAttention, KVSpec, SlidingWindow
from octavo.core.sequence import Request


def held(request: Request, group: int) -> int:
    """Blocks that the request's only sequence holds in a KV group."""
    [seq] = request.sequences
    assert seq.table is not None
    ids = seq.table.block_ids[group]
    return len(ids) - ids.count(NULL_BLOCK)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 11, 16, 1000])
@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_return_as_soon_as_the_window_has_left_them(window: int, depth: int) -> None:
    """While a prompt is computed in chunks, and while its sequence decodes."""
    specs = [FullAttention(), SlidingWindow(window)]
    world = World(100, depth=depth, specs=specs, max_num_batched_tokens=9)
    request = world.add("long", num_prompt_tokens=50, num_output_tokens=20)
    while not request.is_finished:
        world.step()
        if request.sequences and not world.under_way:
            num_computed = request.sequences[0].num_computed_tokens
            first = specs[1].first_needed_token(num_computed) // BLOCK_SIZE
            assert held(request, 0) == -(-num_computed // BLOCK_SIZE)
            assert held(request, 1) == -(-num_computed // BLOCK_SIZE) - first
    assert world.kv.pool.num_held == 0


def test_what_a_window_leaves_during_a_prompt_enters_the_prefix_cache() -> None:
    """Even if the next chunk is planned before the results of the one before are in."""
    world = World(
        100, depth=2, specs=[FullAttention(), SlidingWindow(6)], max_num_batched_tokens=16
    )
    prompt = [token % 5 for token in range(60)]
    world.add("first", prompt=prompt, num_output_tokens=1)
    world.run()
    for shared in (10, 31, 47):
        request = world.add(f"shares {shared}", prompt=[*prompt[:shared], 5, 5, 5])
        world.run()
        assert request.num_cached_tokens == shared


def test_blocks_are_given_up_early_only_if_there_is_no_room() -> None:
    """A long prompt in a pool that holds two chunks of its windows at most."""
    specs: list[KVSpec] = [SlidingWindow(4), SlidingWindow(9)]
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 1}
    least = sum(spec.max_blocks(80, BLOCK_SIZE, 8) for spec in specs)
    for depth in (1, 2, 3):
        world = World(least, depth=depth, specs=specs, **limits)
        world.add("long", num_prompt_tokens=70, num_output_tokens=10)
        [request] = world.run()
        assert request.num_preemptions == 0
        assert request.error is None


def test_a_window_larger_than_every_sequence_is_full_attention() -> None:
    worlds = [World(40, specs=[spec, spec]) for spec in (FullAttention(), SlidingWindow(10_000))]
    for world in worlds:
        for number in range(6):
            world.add(f"r{number}", num_prompt_tokens=5 + 4 * number, num_output_tokens=9)
    while worlds[0].scheduler.has_unfinished:
        plans = [world.step()[0] for world in worlds]
        assert plans[0] == plans[1]


@pytest.mark.parametrize("window", [0, -1, 1.5, None])
def test_a_window_is_at_least_a_token(window: int) -> None:
    with pytest.raises(ValueError, match="window must be a positive number of tokens, not"):
        SlidingWindow(window)
