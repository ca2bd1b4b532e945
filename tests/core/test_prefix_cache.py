"""The index from prefixes to blocks: what a lookup costs, and what it finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.worlds import BLOCK_SIZE, World, compute, make_manager, make_sequence
from octavo.core.block_table import BlockTable
from octavo.core.decoding import PinPrefix
from octavo.core.invariants import check_manager, check_scheduler
from octavo.core.kv import prefix_cache, prefix_matcher
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.specs import FullAttention, SlidingWindow
from octavo.core.sequence import Sequence

TOKENS = st.lists(st.integers(0, 2), min_size=2, max_size=9)


class Calls:
    """Counts the calls of a function."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.number = 0
        original = getattr(owner, name)

        def counted(*args: object) -> object:
            self.number += 1
            return original(*args)

        patch.setattr(owner, name, counted)


def cache_prompts(kv: KVCacheManager, prompts: list[list[int]]) -> list[Sequence]:
    """Compute prompts one after the other; each is freed before the next one comes."""
    done = []
    for number, prompt in enumerate(prompts):
        done.append(make_sequence(number, prompt))
        compute(kv, done[-1])
        kv.free(done[-1])
    return done


@pytest.mark.parametrize("prefix", [[], [7] * BLOCK_SIZE, [7] * (BLOCK_SIZE - 1)])
def test_a_lookup_looks_at_few_siblings(prefix: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks follow a common prefix, and however far they are equal."""
    kv = make_manager(num_blocks=2100)
    cache_prompts(kv, [[*prefix, i, i, i, i, i] for i in range(2000)])
    compared = Calls(monkeypatch, prefix_matcher, "_num_equal")
    verified = Calls(monkeypatch, prefix_cache, "same_prefix")
    hit = kv.lookup(make_sequence(-1, [*prefix, 9999, 1, 1, 1, 1, 1]))
    assert hit.num_tokens == len(prefix)
    assert compared.number <= 2
    assert verified.number <= 10


def longest_beginning(prompt: list[int], cached: list[list[int]]) -> int:
    """Tokens of `prompt`, but its last one, that some cached full blocks begin with."""
    blocks = [other[: len(other) // BLOCK_SIZE * BLOCK_SIZE] for other in cached]
    limit = len(prompt) - 1
    return max(
        (
            n
            for other in blocks
            for n in range(limit + 1)
            if prompt[:n] == other[:n] and n <= len(other)
        ),
        default=0,
    )


@settings(max_examples=200, derandomize=True)
@given(cached=st.lists(TOKENS, max_size=20), prompt=TOKENS)
def test_the_longest_beginning_is_found(cached: list[list[int]], prompt: list[int]) -> None:
    kv = make_manager(num_blocks=100)
    cache_prompts(kv, cached)
    assert kv.lookup(make_sequence(-1, prompt)).num_tokens == longest_beginning(prompt, cached)


def test_what_is_evicted_is_no_longer_found_by_its_beginning() -> None:
    kv = make_manager(num_blocks=2)
    cache_prompts(kv, [[1] * BLOCK_SIZE, [2] * BLOCK_SIZE])
    greedy = make_sequence(-1, [9] * BLOCK_SIZE)  # takes the older one
    compute(kv, greedy)
    assert kv.lookup(make_sequence(-2, [1, 1, 1, 5, 5])).num_tokens == 0
    assert kv.lookup(make_sequence(-3, [2, 2, 2, 5, 5])).num_tokens == 3
    check_manager(kv, [greedy])


def test_a_prompt_continues_from_part_of_a_block_only_if_all_groups_have_it() -> None:
    """The window's first block is gone: it was given back, and taken by the second prompt."""
    kv = make_manager(num_blocks=7, specs=[FullAttention(), SlidingWindow(BLOCK_SIZE)])
    first = make_sequence(0, [1] * BLOCK_SIZE)
    compute(kv, first)
    first.token_ids += [2] * 2 * BLOCK_SIZE
    for _ in range(2):
        assert kv.append([(first, first.num_computed_tokens + BLOCK_SIZE)]) is not None
        first.num_computed_tokens += BLOCK_SIZE
        kv.settle(first, first.num_computed_tokens)
    hit = kv.lookup(make_sequence(1, [1, 1, 1, 3, 3]))
    assert hit.num_tokens == 3
    taken = [kv.pool.allocate() for _ in range(kv.pool.num_free)]
    assert kv.lookup(make_sequence(1, [1, 1, 1, 3, 3])).num_tokens == 0
    for block_id in taken:
        kv.pool.release(block_id)
    check_manager(kv, [first])


def compute_both(kv: KVCacheManager, prompt: list[int]) -> tuple[Sequence, Sequence]:
    """Two sequences that have computed the same prompt, each in blocks of its own."""
    twins = make_sequence(0, prompt), make_sequence(1, prompt)
    for seq in twins:
        assert kv.allocate(seq, kv.no_hit(seq), seq.num_tokens) is not None
        seq.num_computed_tokens = seq.num_tokens
    for seq in twins:
        kv.register(seq, seq.num_tokens)
    return twins


def evict_all(kv: KVCacheManager) -> None:
    """Take every free block, and give it back."""
    taken = [kv.pool.allocate() for _ in range(kv.pool.num_free)]
    for block_id in taken:
        kv.pool.release(block_id)


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_a_prompt_is_found_as_long_as_any_sequence_holds_its_blocks(first_to_go: int) -> None:
    kv = make_manager()
    twins = compute_both(kv, [1] * 8)
    kv.free(twins[first_to_go])
    evict_all(kv)
    check_manager(kv, [twins[1 - first_to_go]])
    hit = kv.lookup(make_sequence(2, [1] * 9))
    table = twins[1 - first_to_go].table
    assert table is not None
    assert (hit.num_tokens, hit.block_ids) == (8, table.block_ids)


def test_a_copy_is_forgotten_when_it_is_free() -> None:
    """It goes before anything that can be found, and leaves nothing behind."""
    kv = make_manager()
    first, second = compute_both(kv, [1] * 8)
    assert second.table is not None
    copies = second.table.held()
    kv.free(second)
    assert kv.pool.num_free_cached == 0
    assert kv.pool.free_ids()[:2] == copies
    kv.free(first)
    assert kv.pool.num_free_cached == 2
    other = make_sequence(2, [2] * 8)
    compute(kv, other)
    assert kv.num_evicted_blocks == 0
    evict_all(kv)
    assert kv.lookup(make_sequence(3, [1] * 9)).num_tokens == 0
    check_manager(kv, [other])


def test_a_prompt_is_looked_up_and_counted_once() -> None:
    kv = make_manager()
    first = make_sequence(0, [1] * 9)
    compute(kv, first)
    assert (kv.num_lookup_tokens, kv.num_hit_tokens) == (9, 0)
    kv.free(first)
    first.request.was_admitted = True
    compute(kv, first)  # it is recomputed
    silent = make_sequence(1, [1] * 9)
    assert kv.allocate(silent, kv.no_hit(silent), 9) is not None  # it asks for nothing
    assert (kv.num_lookup_tokens, kv.num_hit_tokens) == (9, 0)
    compute(kv, make_sequence(2, [1] * 9))
    assert (kv.num_lookup_tokens, kv.num_hit_tokens) == (18, 8)


def test_nothing_is_counted_without_a_prefix_cache() -> None:
    kv = make_manager(enable_prefix_caching=False)
    compute(kv, make_sequence(0, [1] * 9))
    assert (kv.num_lookup_tokens, kv.num_hit_tokens) == (0, 0)


@pytest.mark.parametrize("specs", [[FullAttention()], [SlidingWindow(6)]])
def test_a_long_lookup_is_done_in_parts(specs: list[FullAttention | SlidingWindow]) -> None:
    """Each call names a few blocks more, until all that are cached have been named."""
    kv = make_manager(num_blocks=30, specs=specs)
    prompt = list(range(10 * BLOCK_SIZE))
    cache_prompts(kv, [prompt])
    seq = make_sequence(1, [*prompt, 0])
    num_calls = 1
    while kv.lookup(seq, max_hashes=3).is_unfinished:
        assert len(seq.prefix_nodes) == 3 * num_calls
        num_calls += 1
    assert num_calls == 4
    assert kv.lookup(seq, max_hashes=0).num_tokens == len(prompt)


def test_blocks_behind_the_end_of_a_hit_are_not_named() -> None:
    kv = make_manager(num_blocks=100)
    cache_prompts(kv, [[1] * 4 * BLOCK_SIZE])
    seq = make_sequence(1, [*[1] * 2 * BLOCK_SIZE, *[2] * 80 * BLOCK_SIZE])
    assert kv.lookup(seq).num_tokens == 2 * BLOCK_SIZE
    assert len(seq.prefix_nodes) <= 4


def test_a_prompt_that_waits_is_looked_up_again_without_a_walk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of its 256 blocks are cached and the others in progress."""
    kv = make_manager(num_blocks=300)
    prompt = [i % 1000 for i in range(256 * BLOCK_SIZE)]
    first = make_sequence(0, prompt)
    assert kv.allocate(first, kv.lookup(first), len(prompt)) is not None
    kv.register(first, len(prompt) // 2)
    seq = make_sequence(1, prompt)
    assert kv.lookup(seq).in_progress
    found = Calls(monkeypatch, prefix_cache.PrefixCache, "find")
    assert kv.lookup(seq).awaited == first.prefix_nodes[128].key
    assert found.number <= 10


def test_a_pinned_block_is_not_counted_again_for_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(num_blocks=10)
    world.add("pin", prompt=[1] * 8, method=PinPrefix("system", 8))
    world.run()
    held = Calls(monkeypatch, BlockTable, "held")
    world.add("user", 4, 4)
    assert held.number == 0
    assert world.scheduler.limits.num_available_blocks() == 8


def test_a_pin_takes_no_longer_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its own blocks are looked at when it is pinned and when it is unpinned."""
    world = World(num_blocks=100)
    for number in range(20):
        world.add(f"pin-{number}", prompt=[1, 10 + number] * 4, method=PinPrefix(f"{number}", 8))
    worst_cases = Calls(monkeypatch, KVCacheManager, "worst_case_blocks")
    for number in range(20):
        world.add(f"user-{number}", prompt=[1, 10 + number] * 4 + [1], num_output_tokens=number)
    world.add("last", prompt=[1, 10] * 4, method=PinPrefix("last", 8))
    assert worst_cases.number <= 3 * 21
    assert world.scheduler.limits.num_available_blocks() == 100 - 21 * 2
    world.run()
    assert world.kv.num_pinned_blocks == 20 * 2  # the last one holds the blocks of the first
    held = Calls(monkeypatch, BlockTable, "held")
    world.kv.unpin("0")
    assert world.kv.num_pinned_blocks == 20 * 2
    world.kv.unpin("last")
    assert world.kv.num_pinned_blocks == 19 * 2
    assert held.number <= 4
    check_scheduler(world.scheduler)
