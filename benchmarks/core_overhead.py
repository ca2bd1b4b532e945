"""What deciding costs: schedule + update for steady decodes, without any executor.

Two sweeps: over the number of running sequences, and over the size of the pool. Prints a table
and, last, one JSON line. Medians of many steps; the garbage collector stays as it is by default.
"""

from __future__ import annotations

import argparse
import json
import statistics
from time import perf_counter

from octavo.config import SchedulerConfig
from octavo.core.decoding import Sampling
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.kv_spec import FullAttention
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request
from octavo.core.step import SamplingSpec, StepResult

PROMPT = 100
BLOCK_SIZE = 16


def step_seconds(num_seqs: int, num_blocks: int, num_steps: int) -> float:
    """Median time of schedule + update with `num_seqs` sequences that all decode."""
    kv = KVCacheManager([FullAttention()], BLOCK_SIZE, num_blocks)
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=1 << 20)
    scheduler = Scheduler(config, kv)
    length = min(num_blocks // num_seqs * BLOCK_SIZE, PROMPT + num_steps + 3)
    for i in range(num_seqs):
        # Prompts of different lengths: blocks fill up at different steps, as they do in service.
        prompt = [(i * 31 + j) % 50_000 for j in range(PROMPT - i % BLOCK_SIZE)]
        method = Sampling(1, length, frozenset(), frozenset())
        scheduler.add(Request(f"r{i}", prompt, method, SamplingSpec()))
    times = []
    for _ in range(min(num_steps, length - PROMPT) + 1):
        start = perf_counter()
        plan = scheduler.schedule()
        middle = perf_counter()
        result = StepResult(plan.step_id, [7] * len(plan.sampled))
        resumed = perf_counter()
        scheduler.update(plan, result)
        times.append(perf_counter() - resumed + middle - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-steps", type=int, default=200)
    steps = parser.parse_args().num_steps
    by_seqs = {n: step_seconds(n, 50 * n, steps) for n in (1, 16, 64, 256, 1024, 4096)}
    by_pool = {b: step_seconds(64, b, steps) for b in (1_000, 10_000, 100_000, 1_000_000)}
    print(f"{'sequences':>10} {'ms a step':>10} {'us a sequence':>14}")
    for n, seconds in by_seqs.items():
        print(f"{n:>10} {1e3 * seconds:>10.3f} {1e6 * seconds / n:>14.2f}")
    print(f"{'blocks':>10} {'ms a step':>10}   (64 sequences)")
    for blocks, seconds in by_pool.items():
        print(f"{blocks:>10} {1e3 * seconds:>10.3f}")
    print(
        json.dumps(
            {
                "benchmark": "core_overhead",
                "ms_by_sequences": {n: round(1e3 * s, 4) for n, s in by_seqs.items()},
                "ms_by_pool": {b: round(1e3 * s, 4) for b, s in by_pool.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
