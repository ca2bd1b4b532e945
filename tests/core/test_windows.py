"""Sliding windows: what is held after each step, whatever their size."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType

import pytest

from core.worlds import BLOCK_SIZE, World, compute, make_sequence, sampling
from octavo.config import SchedulerConfig
from octavo.core.block_table import NULL_BLOCK
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.specs import FullAttention, KVSpec, SlidingWindow
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request, Sequence
from octavo.core.step import SamplingSpec, StepResult


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


@pytest.fixture
def without_collector() -> Iterator[None]:
    """No garbage collection, whose callbacks would be counted as calls."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize(
    "specs", [[SlidingWindow(64)], [SlidingWindow(1)], [FullAttention(), *[SlidingWindow(64)] * 6]]
)
def test_planning_a_decode_costs_no_more_in_a_long_context(specs: list[KVSpec]) -> None:
    """The same calls are made for each token, whether 300 or 50,000 are computed."""
    counts = []
    for num_prompt_tokens in (300, 50_000):
        kv = KVCacheManager(specs, 16, 40_000)
        scheduler = Scheduler(SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=4096), kv)
        prompt = [token % 5 for token in range(num_prompt_tokens // 16 * 16)]
        method = sampling(1, len(prompt) + 200)
        scheduler.add(Request("r", prompt, method, SamplingSpec()))
        calls: Counter[str] = Counter()

        def count(frame: FrameType, event: str, arg: object, calls: Counter[str] = calls) -> None:
            calls[f"{event} {frame.f_code.co_qualname}"] += event in ("call", "c_call")

        num_decodes = 0
        while num_decodes < 150:  # the last ones would free the sequence
            sys.setprofile(count if num_decodes else None)
            plan = scheduler.schedule()
            assert plan is not None
            scheduler.update(plan, StepResult(plan.step_id, [1] * len(plan.sampled)))
            sys.setprofile(None)
            num_decodes += len(plan.sampled)
        counts.append(calls)
    assert counts[0] == counts[1]
    assert counts[0].total() > 1000


def longest_hit(kv: KVCacheManager, seq: Sequence, limit: int) -> int:
    """By the definition: the most nodes of which every group has what the next query reads."""
    cache, node_size = kv.prefix_cache, kv.block_size

    def has(group: int, block: int) -> bool:
        size = kv.block_sizes[group]
        entry = cache.find(seq.prefix_nodes[block * size // node_size])
        first = next(place for place, (other, _) in enumerate(kv._places) if other == group)
        number = block * size % node_size // size
        return entry is not None and entry.block_ids[first + number] is not None

    for num_nodes in range(limit // node_size, 0, -1):
        end = num_nodes * node_size
        if all(
            has(group, block)
            for group, (spec, size) in enumerate(zip(kv.specs, kv.block_sizes, strict=True))
            for block in range(spec.first_needed_token(end) // size, end // size)
        ):
            return end
    return 0


@pytest.mark.parametrize("seed", range(40))
def test_a_hit_ends_at_the_last_position_at_which_all_groups_agree(seed: int) -> None:
    """Whatever was evicted: blocks that windows left behind go first, and not in any order."""
    rng = random.Random(seed)
    specs: list[KVSpec] = [
        *rng.choice([[FullAttention()], [FullAttention()], []]),
        *[SlidingWindow(rng.randint(1, 30)) for _ in range(rng.randint(1, 3))],
    ]
    span = rng.choice([1, 2, 3])
    sizes = [4 * rng.choice([1, span]) for _ in specs]
    kv = KVCacheManager(specs, sizes, 400)
    prompts = [[rng.randrange(2) for _ in range(rng.randint(1, 120))] for _ in range(6)]
    for number, prompt in enumerate(prompts):
        seq = make_sequence(number, prompt)
        compute(kv, seq)
        kv.settle(seq, seq.num_tokens)
        kv.free(seq)
    num_shorter = 0
    for number in range(60):
        cached = sorted(kv.pool.cached_ids())
        for block_id in rng.sample(cached, min(len(cached), rng.randrange(4))):
            kv.prefix_cache.forget(block_id)
            kv.pool.forget_cached(block_id)
        tokens = [*rng.choice(prompts), *[rng.randrange(2) for _ in range(5)]]
        seq = make_sequence(100 + number, tokens)
        hit = kv.lookup(seq)
        kv._prefixes.hash_blocks(seq, seq.num_tokens // kv.block_size)
        expected = longest_hit(kv, seq, seq.num_tokens - 1)
        assert hit.num_tokens // kv.block_size * kv.block_size == expected
        num_full = sum(kv.prefix_cache.find(node) is not None for node in seq.prefix_nodes)
        num_shorter += 0 < expected < num_full * kv.block_size
        for group, (spec, size) in enumerate(zip(specs, sizes, strict=True)):
            first = spec.first_needed_token(expected) // size
            ids = hit.block_ids[group]
            assert ids[: min(first, expected // size)].count(NULL_BLOCK) == first
            assert NULL_BLOCK not in ids[first:]
        changes = kv.allocate(seq, hit, seq.num_tokens)
        assert changes is not None
        kv.release_sources(changes.held)
        kv.free(seq)
    assert num_shorter or len(specs) < 3


def test_a_prefix_whose_windows_were_evicted_hits_where_they_are_still_there() -> None:
    """The windows of a long prompt are gone but for those at its end and in the middle."""
    kv = KVCacheManager([FullAttention(), SlidingWindow(8)], 4, 100)
    prompt = make_sequence(0, [token % 5 for token in range(80)])
    compute(kv, prompt)
    assert prompt.table is not None
    windows = list(prompt.table.block_ids[1])
    kv.settle(prompt, 80)
    for i in [*range(8), *range(10, 18)]:
        kv.prefix_cache.forget(windows[i])
        kv.pool.forget_cached(windows[i])
    for num_shared, num_tokens in [(80, 80), (76, 40), (60, 40), (40, 40), (39, 0)]:
        other = make_sequence(1, [*prompt.token_ids[:num_shared], 9, 9])
        assert kv.lookup(other).num_tokens // 4 * 4 == num_tokens
