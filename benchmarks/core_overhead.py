"""Scheduler overhead: the time of schedule + update, without an executor.

First steady decodes, by number of running sequences and by size of the pool; medians over many
steps. Then the cost that the prefix cache and the queue add: a lookup beside many cached prompts, a
burst of prompts that share most of their tokens, unseen prompts beside many cached first blocks,
and the shared-prefix row of throughput.py: how many steps it takes, and what its schedules cost.
The variants that are compared take turns, and the fastest of several rounds counts, in CPU time of
this thread. In the last three measurements the garbage collector runs only between schedules and
updates, never during one, as in the engine; in the others it has Python's defaults. Prints tables,
and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter, thread_time
from typing import Any

from octavo.config import SchedulerConfig
from octavo.core.decoding import Sampling
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.specs import FullAttention
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request, Sequence
from octavo.core.step import SamplingSpec, StepResult

PROMPT = 100
BLOCK_SIZE = 16
NUM_CACHED = (1_000, 10_000, 100_000)  # cached prompts beside which an unseen one is looked up
NUM_ROUNDS = 5


def step_seconds(num_seqs: int, num_blocks: int, num_steps: int) -> float:
    """Median seconds of schedule + update while `num_seqs` sequences all decode."""
    kv = KVCacheManager([FullAttention()], BLOCK_SIZE, num_blocks)
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=1 << 20)
    scheduler = Scheduler(config, kv)
    length = min(num_blocks // num_seqs * BLOCK_SIZE, PROMPT + num_steps + 3)
    for i in range(num_seqs):
        # Prompts of different lengths, so that blocks fill up at different steps, as in serving.
        prompt = [(i * 31 + j) % 50_000 for j in range(PROMPT - i % BLOCK_SIZE)]
        method = Sampling(1, length, frozenset(), frozenset())
        scheduler.add(Request(f"r{i}", prompt, method, SamplingSpec()))
    times = []
    for _ in range(min(num_steps, length - PROMPT) + 1):
        start = perf_counter()
        plan = scheduler.schedule()
        middle = perf_counter()
        assert plan is not None
        result = StepResult(plan.step_id, [7] * len(plan.sampled))
        resumed = perf_counter()
        scheduler.update(plan, result)
        times.append(perf_counter() - resumed + middle - start)
    return statistics.median(times[1:])


def request(name: str, prompt: list[int], num_output_tokens: int) -> Request:
    method = Sampling(1, len(prompt) + num_output_tokens, frozenset(), frozenset())
    return Request(name, prompt, method, SamplingSpec())


def sequence(number: int, prompt: list[int]) -> Sequence:
    return Sequence(number, request(f"s{number}", prompt, 1), prompt)


def unseen_prompt(number: int, num_tokens: int) -> list[int]:
    """A prompt whose first block differs from that of every other number."""
    return [number % 50_000, number // 50_000, *range(num_tokens - 2)]


def fill(kv: KVCacheManager, num_prompts: int) -> None:
    """Cache the first block of `num_prompts` different prompts."""
    for number in range(num_prompts):
        seq = sequence(number, unseen_prompt(number, BLOCK_SIZE + 1))
        changes = kv.allocate(seq, kv.lookup(seq), seq.num_tokens)
        assert changes is not None
        kv.release_sources(changes.held)
        kv.register(seq, seq.num_tokens)
        kv.free(seq)


def lookup_seconds(kv: KVCacheManager) -> float:
    """CPU seconds of one lookup of a prompt of 1,000 tokens that is not in the cache."""
    prompts = [sequence(-1 - i, unseen_prompt(40_000_000 + 7 * i, 1000)) for i in range(1000)]
    start = thread_time()
    for seq in prompts:
        kv.lookup(seq)
    return (thread_time() - start) / len(prompts)


def step(scheduler: Scheduler) -> tuple[float, float]:
    """CPU seconds of schedule and of update, with the garbage collector held off."""
    gc.disable()
    start = thread_time()
    plan = scheduler.schedule()
    scheduled = thread_time()
    assert plan is not None
    result = StepResult(plan.step_id, [7] * len(plan.sampled))
    resumed = thread_time()
    scheduler.update(plan, result)
    updated = thread_time()
    gc.enable()
    return scheduled - start, updated - resumed


def burst(is_caching: bool) -> Scheduler:
    """64 sequences decode, and 5,000 prompts that share 4,000 tokens have just arrived."""
    kv = KVCacheManager([FullAttention()], BLOCK_SIZE, 100_000, 0, is_caching)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192), kv)
    for number in range(64):
        scheduler.add(request(f"decode{number}", unseen_prompt(number, 10), 10_000))
    step(scheduler)
    shared = list(range(4000))
    for number in range(5000):
        scheduler.add(request(f"r{number}", [*shared, *unseen_prompt(number, 20)], 100))
    return scheduler


def unseen_requests(num_cached: int) -> Scheduler:
    """200 requests have arrived, whose first blocks are none of the `num_cached` cached ones."""
    kv = KVCacheManager([FullAttention()], BLOCK_SIZE, 20_000)
    fill(kv, num_cached)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048), kv)
    for number in range(200):
        scheduler.add(request(f"r{number}", unseen_prompt(10_000_000 + number, PROMPT), 20))
    return scheduler


def shared_prefix() -> Scheduler:
    """512 requests have arrived that share 1,024 tokens, with 64 tokens of their own."""
    kv = KVCacheManager([FullAttention()], BLOCK_SIZE, 20_000)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=8192), kv)
    for number in range(512):
        scheduler.add(request(f"r{number}", [*range(1024), *unseen_prompt(number, 64)], 64))
    return scheduler


def side_by_side(
    cases: Mapping[str, Callable[[], Scheduler]], num_rounds: int, max_steps: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each step's schedule and update, the fastest of several rounds.

    The cases take turns step by step, so that other load on the machine affects all of them.
    """
    rounds: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in cases}
    for _ in range(num_rounds):
        schedulers = {name: make() for name, make in cases.items()}
        for name in cases:
            rounds[name].append([])
        for _ in range(max_steps):
            for name, scheduler in schedulers.items():
                if scheduler.has_unfinished:
                    rounds[name][-1].append(step(scheduler))
    return {
        name: [
            (min(schedule for schedule, _ in times), min(update for _, update in times))
            for times in zip(*rounds[name], strict=True)
        ]
        for name in cases
    }


def prefix_lookups() -> dict[int, float]:
    """Seconds of the lookup of an unseen prompt, by the number of cached prompts."""
    managers = {}
    for count in NUM_CACHED:
        managers[count] = KVCacheManager([FullAttention()], BLOCK_SIZE, 2 * count)
        fill(managers[count], count)
        assert len(managers[count].prefix_cache) == count
    rounds = [{n: lookup_seconds(kv) for n, kv in managers.items()} for _ in range(NUM_ROUNDS)]
    return {n: min(each[n] for each in rounds) for n in managers}


def worst_schedules() -> dict[str, float]:
    """Seconds of the slowest `schedule` after a burst, with prefix caching off and on."""
    cases = {"off": partial(burst, False), "on": partial(burst, True)}
    steps = side_by_side(cases, 3, 400)
    return {name: max(schedule for schedule, _ in times) for name, times in steps.items()}


def steps_of_unseen_requests() -> dict[int, float]:
    """Mean seconds per step, by the number of cached first blocks."""
    cases = {str(count): partial(unseen_requests, count) for count in (0, 5000)}
    steps = side_by_side(cases, NUM_ROUNDS, 1000)
    return {int(name): statistics.mean(map(sum, times)) for name, times in steps.items()}


def schedules_of_shared_prefix() -> list[float]:
    """Seconds of `schedule` in each step."""
    steps = side_by_side({"shared": shared_prefix}, NUM_ROUNDS, 1000)
    return [schedule for schedule, _ in steps["shared"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-steps", type=int, default=200)
    steps = parser.parse_args().num_steps
    by_seqs = {n: step_seconds(n, 50 * n, steps) for n in (1, 16, 64, 256, 1024, 4096)}
    print(f"{'sequences':>10} {'ms per step':>12} {'us per sequence':>16}")
    for n, seconds in by_seqs.items():
        print(f"{n:>10} {1e3 * seconds:>12.3f} {1e6 * seconds / n:>16.2f}")
    by_pool = {b: step_seconds(64, b, steps) for b in (1_000, 10_000, 100_000, 1_000_000)}
    show("blocks", "ms per step", 1e3, by_pool, "64 sequences")
    by_cached = prefix_lookups()
    show("cached", "us per lookup", 1e6, by_cached, "of an unseen prompt of 1,000 tokens")
    by_caching = worst_schedules()
    note = "schedule; 64 sequences decode, 5,000 that share 4,000 tokens wait"
    show("caching", "slowest ms", 1e3, by_caching, note)
    by_first = steps_of_unseen_requests()
    show("cached", "ms per step", 1e3, by_first, "200 unseen prompts")
    shared = schedules_of_shared_prefix()
    times = {"slowest": max(shared), "all": sum(shared)}
    show("schedule", "ms", 1e3, times, f"{len(shared)} steps of 512 that share 1,024 tokens")
    values = {
        "ms_by_sequences": {n: round(1e3 * s, 4) for n, s in by_seqs.items()},
        "ms_by_pool": {b: round(1e3 * s, 4) for b, s in by_pool.items()},
        "lookup_us_by_cached": {n: round(1e6 * s, 2) for n, s in by_cached.items()},
        "worst_ms_in_burst": {n: round(1e3 * s, 3) for n, s in by_caching.items()},
        "burst_ratio": round(by_caching["on"] / by_caching["off"], 2),
        "unseen_ms_by_cached": {n: round(1e3 * s, 4) for n, s in by_first.items()},
        "shared_prefix_steps": len(shared),
        "shared_prefix_ms": {n: round(1e3 * s, 3) for n, s in times.items()},
    }
    print(json.dumps({"benchmark": "core_overhead"} | values))


def show(key: str, unit: str, scale: float, seconds: Mapping[Any, float], note: str) -> None:
    """Print a table of `seconds` times `scale`; `note` says what was measured."""
    print(f"{key:>10} {unit:>13}   ({note})")
    for name, value in seconds.items():
        print(f"{name:>10} {scale * value:>13.3f}")


if __name__ == "__main__":
    main()
