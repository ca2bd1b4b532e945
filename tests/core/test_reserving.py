"""Memory reserved ahead: the buddy allocator, and the same tokens as with paged memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.symbolic import Ask
from core.workloads import Workload
from core.worlds import sampling
from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.invariants import check_scheduler
from octavo.core.kv.extent_pool import Arena, BuddyPool
from octavo.core.kv.memory_policy import make_kv_cache_manager
from octavo.core.kv.prefix_matcher import PrefixHit
from octavo.core.kv.specs import FullAttention, KVGroup, KVLayout, group_layers
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request, Sequence
from octavo.core.step import SamplingSpec, StepResult
from octavo.errors import ConfigError, RequestTooLong
from octavo.registry import MEMORY_POLICIES

RESERVING = [name for name in MEMORY_POLICIES if name != "paged"]


def test_a_pool_is_cut_as_the_paper_cut_it() -> None:
    """983 blocks, at most 2,048 tokens: 7 x 128 + 64 + 16 + 4 + 2 + 1."""
    pool = BuddyPool(983, 128)
    assert pool.free_extents() == {1: 1, 2: 1, 4: 1, 16: 1, 64: 1, 128: 7}
    assert sorted(pool.free_ids()) == list(range(1, 984))


@settings(max_examples=80, derandomize=True)
@given(
    num_blocks=st.integers(1, 300),
    max_extent=st.integers(1, 128),
    moves=st.lists(st.tuples(st.booleans(), st.integers(1, 140), st.integers(0, 99)), max_size=60),
)
def test_extents_never_overlap_and_merge_again(
    num_blocks: int, max_extent: int, moves: list[tuple[bool, int, int]]
) -> None:
    pool = BuddyPool(num_blocks, max_extent)
    untouched = pool.free_extents()
    held: list[list[int]] = []
    for takes, size, index in moves:
        if takes:
            largest = max(pool.free_extents(), default=0)
            ids = pool.reserve(size)
            assert (ids is None) == (pool.extent_size(size) > largest)
            if ids is not None:
                assert ids == list(range(ids[0], ids[0] + size))
                assert (ids[0] - 1) % pool.extent_size(size) == 0
                held.append(ids)
        elif held:
            for block_id in held.pop(index % len(held)):
                pool.release(block_id)
        free = pool.free_ids()
        blocks = [block_id for ids in held for block_id in ids]
        assert len({*blocks, *free}) == len(blocks) + len(free)
        assert len(free) == pool.num_free
        assert pool.num_free == num_blocks - sum(pool.extent_size(len(ids)) for ids in held)
        assert pool.num_referenced == len(blocks)
    for ids in held:
        for block_id in ids:
            pool.release(block_id)
    assert pool.free_extents() == untouched


def test_an_arena_comes_back_as_a_whole() -> None:
    pool = Arena(10)
    first, second = pool.reserve(4), pool.reserve(5)
    assert (first, second) == ([1, 2, 3, 4], [5, 6, 7, 8, 9])
    assert pool.reserve(2) is None
    for block_id in first or []:
        pool.release(block_id)
    assert (pool.num_free, pool.reserve(2)) == (1, None)
    for block_id in second or []:
        pool.release(block_id)
    assert pool.num_free == 10
    assert pool.reserve(10) == list(range(1, 11))


def test_a_single_block_is_an_extent_with_holders_of_its_own() -> None:
    pool = BuddyPool(4, 4)
    block_id = pool.allocate()
    assert (pool.num_free, pool.num_referenced) == (3, 1)
    pool.share(block_id)
    pool.release(block_id)
    assert pool.num_free == 3
    pool.release(block_id)
    assert pool.num_free == 4
    with pytest.raises(AssertionError, match=f"block {block_id} is free"):
        pool.share(block_id)
    with pytest.raises(AssertionError, match=f"block {block_id} is already free"):
        pool.release(block_id)


class ReservingWorkload(Workload):
    """The random workloads of the core, with another memory policy."""

    def __init__(self, seed: int, policy: str) -> None:
        super().__init__(seed)
        rng = self.rng
        self.kv = make_kv_cache_manager(
            CacheConfig(self.block_size, enable_prefix_caching=False, memory_policy=policy),
            KVLayout(
                tuple(
                    KVGroup(spec, (i,), size // self.block_size)
                    for i, (spec, size) in enumerate(zip(self.specs, self.block_sizes, strict=True))
                )
            ),
            rng.randint(20, 200) * len(self.specs),
            0,
            max_model_len=80,
        )
        self.scheduler = Scheduler(
            replace(self.scheduler.config, policy="fcfs"), self.kv, clock=lambda: self.now
        )

    def ask(self, number: int) -> Ask:
        ask = super().ask(number)
        return replace(ask, kind="sample", max_tokens=3) if ask.kind == "pin" else ask

    def finish(self) -> None:
        super().finish()
        assert self.scheduler.num_preemptions == {"swap": 0, "recompute": 0}


@pytest.mark.parametrize("policy", RESERVING)
def test_random_workloads_get_the_tokens_that_they_get_alone(policy: str) -> None:
    for seed in range(60):
        ReservingWorkload(seed, policy).run()


class Server:
    """A scheduler with a memory policy. 16 slots a block; every token drawn is 7."""

    def __init__(self, policy: str, num_blocks: int, max_model_len: int) -> None:
        cache = CacheConfig(enable_prefix_caching=False, memory_policy=policy)
        self.kv = make_kv_cache_manager(
            cache, group_layers([FullAttention()]), num_blocks, 0, max_model_len
        )
        config = SchedulerConfig(max_num_batched_tokens=4096, watermark=0.0, max_passes=0)
        self.scheduler = Scheduler(config, self.kv)

    def add(self, name: str, prompt: int, output: int, n: int = 1) -> Request:
        request = Request(name, [1] * prompt, sampling(n, prompt + output), SamplingSpec())
        self.scheduler.add(request)
        return request

    def step(self) -> list[str]:
        """Names of the requests that finished."""
        plan = self.scheduler.schedule()
        assert plan is not None
        draws = {row.seq_id: [7] * row.num_draws for row in plan.opened if row.num_draws > 1}
        result = StepResult(plan.step_id, [7] * len(plan.sampled), draws)
        progress = self.scheduler.update(plan, result)
        check_scheduler(self.scheduler)
        return [request.request_id for request in progress.finished]

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)


@pytest.mark.parametrize(
    ("policy", "table", "num_running"),
    [
        # Prompt 40, output 25. Max reserves 2,048 slots. Pow2: 40 + 32. Oracle: 65, five blocks,
        # in an extent of eight.
        ("orca-max", 128, 7),
        ("orca-pow2", 5, 983 // 8),
        ("orca-oracle", 5, 983 // 8),
    ],
)
def test_what_orca_reserves(policy: str, table: int, num_running: int) -> None:
    server = Server(policy, 983, 2048)
    requests = [server.add(f"r{i}", 40, 25) for i in range(130)]
    for _ in range(3):
        server.step()
    assert server.num_running == num_running
    held = requests[0].sequences[0].table
    assert held is not None
    assert len(held.block_ids[0]) == table


def test_nothing_is_cached_where_memory_is_reserved() -> None:
    """The second of two equal prompts is computed as a whole."""
    server = Server("orca-oracle", 64, 1024)
    first, second = server.add("first", 40, 25), server.add("second", 40, 25)
    plan = server.scheduler.schedule()
    assert plan is not None
    assert plan.num_scheduled_tokens == [40, 40]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)


def test_what_rounding_adds_to_a_reservation() -> None:
    """65 tokens in blocks of 16: the last block has 15 slots that were not asked for."""
    server = Server("orca-oracle", 64, 1024)
    assert server.kv.num_rounding_slots(server.add("r", 40, 25)) == 15


def test_who_watches_is_told_what_starts() -> None:
    server = Server("fastertransformer", 64, 1024)
    told: list[tuple[Sequence, PrefixHit]] = []
    server.kv.on_allocate = lambda seq, hit: told.append((seq, hit))
    request = server.add("r", 40, 25)
    server.step()
    assert told == [(request.sequences[0], server.kv.no_hit(request.sequences[0]))]


def test_samples_have_extents_of_their_own_and_copy_the_prompt() -> None:
    """Prompt of 40 tokens, three blocks: two of three samples copy them."""
    server = Server("orca-oracle", 64, 1024)
    server.add("r", 40, 10, n=3)
    server.step()
    plan = server.scheduler.schedule()
    assert plan is not None
    assert len(plan.copies) == 2 * 3
    assert server.kv.num_free_blocks == 64 - 3 * 4


def test_a_batch_begins_and_ends_as_a_whole() -> None:
    """20 blocks. Three requests padded to 20 + 40 tokens take 4 blocks each; a fourth with 60
    output tokens would pad all four to 5 + 5."""
    server = Server("fastertransformer", 20, 1024)
    for name, prompt, output in [("a", 20, 2), ("b", 10, 40), ("c", 20, 30), ("d", 1, 80)]:
        server.add(name, prompt, output)
    assert server.step() == []
    assert server.num_running == 3
    ends = [server.step() for _ in range(39)]
    assert ends[:-1] == [[]] * 38
    assert ends[-1] == ["a", "b", "c"]
    server.step()
    assert [request.request_id for request in server.scheduler.running] == ["d"]


def test_a_batch_may_be_as_long_as_the_context() -> None:
    """Each request alone is shorter, and the two padded are not."""
    server = Server("fastertransformer", 20, 64)
    server.add("long prompt", 40, 8)
    server.add("long output", 10, 24)
    server.add("too long together", 10, 25)
    server.step()
    assert server.num_running == 2


def test_the_rest_of_an_aborted_batch_comes_out() -> None:
    server = Server("fastertransformer", 20, 1024)
    server.add("short", 5, 1)
    server.add("long", 5, 100)
    assert server.step() == []
    server.scheduler.abort("long")
    assert server.step() == ["short"]
    assert not server.scheduler.has_unfinished


def test_a_request_that_ends_before_its_batch_begins_is_gone() -> None:
    server = Server("fastertransformer", 20, 1024)
    server.add("running", 5, 2)
    server.step()
    waiting = Request("waiting", [1] * 5, sampling(1, 20), SamplingSpec())
    server.scheduler.resume(waiting, {0: [7, 7]})
    server.scheduler.finish_by_stop_string(waiting.sequences[0], "stop")
    assert waiting.is_finished
    assert server.step() == ["running"]
    assert not server.scheduler.has_unfinished


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RequestTooLong, match="need 192 KV blocks of 16 tokens, but the pool has"):
        Server("orca-max", 128, 1024).add("r", 40, 25, n=3)
    with pytest.raises(ConfigError, match="orca-max shares no blocks"):
        CacheConfig(memory_policy="orca-max")
    with pytest.raises(ConfigError, match="is not one of paged, orca-max, orca-pow2"):
        CacheConfig(memory_policy="orca")  # type: ignore[arg-type]
