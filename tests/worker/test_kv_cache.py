"""Block moves: their order, their exactness, and what memory they take."""

from __future__ import annotations

import random
import resource
from collections.abc import Sequence

import pytest
import torch

from octavo.core.step import BlockCopy, StepPlan
from octavo.errors import OutOfMemory
from octavo.ops import HostStaging
from octavo.worker.device.cpu import CpuDevice
from octavo.worker.kv_cache import KVCache, independent_runs

SHAPE = (2, 3, 2, 4)
DEVICE = CpuDevice()


def filled_cache(dtype: torch.dtype = torch.float32) -> KVCache:
    """Block i of the device holds i everywhere, block i of the swap tier 100 + i."""
    cache = KVCache(9, 4, SHAPE, dtype, DEVICE)
    for block_id in range(1, 10):
        cache.blocks[block_id] = block_id
    for block_id in range(5):
        cache.swapped[block_id] = 100 + block_id
    return cache


def contents(cache: KVCache) -> tuple[list[int], list[int]]:
    for tier in (cache.blocks, cache.swapped):
        flat = tier.view(len(tier), -1)
        assert (flat == flat[:, :1]).all(), "a block is moved whole"
    device, swap = (
        tier.view(len(tier), -1)[:, 0].tolist() for tier in (cache.blocks, cache.swapped)
    )
    return [int(value) for value in device], [int(value) for value in swap]


def plan(
    swap_out: Sequence[tuple[int, int]] = (),
    swap_in: Sequence[tuple[int, int]] = (),
    copies: Sequence[tuple[int, int]] = (),
) -> StepPlan:
    whole = [BlockCopy(source, target, SHAPE[-2]) for source, target in copies]
    return StepPlan(0, [], [], [], [], swap_out=list(swap_out), swap_in=list(swap_in), copies=whole)


def move(cache: KVCache, plan: StepPlan) -> float:
    """The seconds that swapping took; 0 if nothing is swapped."""
    copies = cache.stage(plan.copies, HostStaging())
    started = DEVICE.moment()
    swapped = cache.move(plan, copies)
    assert (swapped is not None) == bool(plan.swap_out or plan.swap_in)
    return 0.0 if swapped is None else swapped.seconds_since(started)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_is_swap_out_then_swap_in_then_copies(dtype: torch.dtype) -> None:
    cache = filled_cache(dtype)
    # Block 3 is swapped out to 0, taken for what comes in from 1, and that is copied to 4.
    seconds = move(cache, plan(swap_out=[(3, 0)], swap_in=[(1, 3)], copies=[(3, 4)]))
    device, swap = contents(cache)
    assert swap == [3, 101, 102, 103, 104]
    assert device == [0, 1, 2, 101, 101, 5, 6, 7, 8, 9]
    assert seconds > 0


def test_what_was_swapped_out_may_come_back_in_the_same_step() -> None:
    cache = filled_cache()
    move(cache, plan(swap_out=[(1, 2), (2, 3)], swap_in=[(2, 8), (3, 1)]))
    device, swap = contents(cache)
    assert swap == [100, 101, 1, 2, 104]
    assert device == [0, 2, 2, 3, 4, 5, 6, 7, 1, 9]


def test_copies_take_effect_one_after_the_other() -> None:
    cache = filled_cache()
    move(cache, plan(copies=[(1, 2), (2, 3), (5, 1), (4, 2)]))
    assert contents(cache)[0] == [0, 5, 4, 1, 4, 5, 6, 7, 8, 9]


def test_new_blocks_are_zero_and_untouched_memory_is_not_taken() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = KVCache(1 << 14, 1 << 14, (2, 1 << 12), torch.float64, DEVICE)  # 1 GiB each
    assert not cache.blocks[0].any()
    assert not cache.blocks[1 << 14].any()
    assert cache.blocks.is_contiguous()
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert taken < 64 << 10  # KiB


def test_more_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(OutOfMemory, match=r"PiB|TiB.* cannot be had .* lower kv_cache_memory"):
        KVCache(1 << 40, 0, (2, 1 << 12), torch.float64, DEVICE)


def test_a_swap_tier_may_be_absent() -> None:
    cache = KVCache(2, 0, SHAPE, torch.float32, DEVICE)
    cache.blocks[1], cache.blocks[2] = 1, 2
    move(cache, plan(copies=[(1, 2)]))
    device, swap = contents(cache)
    assert device[1:] == [1, 1]
    assert len(swap) == 1, "the null block alone"


def test_runs_of_copies_are_cut_where_they_depend_on_each_other() -> None:
    """What a GPU does run by run equals the moves one by one."""
    rng = random.Random(0)
    for _ in range(200):
        copies = [
            BlockCopy(rng.randrange(8), rng.randrange(8), 1) for _ in range(rng.randrange(10))
        ]
        expected = list(range(8))
        for source, target, _ in copies:
            expected[target] = expected[source]
        got = torch.arange(8)
        for run in independent_runs(copies):
            if run:
                sources, targets, _ = zip(*run, strict=True)
                got[list(targets)] = got[list(sources)]
        assert got.tolist() == expected
