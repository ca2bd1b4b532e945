"""What it costs to compute a step in other processes: a plan out to all ranks, a result back.

Ranks compute nothing, so this is the cost of messages alone. Prints one JSON line. For each kind of
step, medians in microseconds:

    submit      the plan is encoded and sent to all ranks
    round_trip  from before that until the result is decoded, waiting included
    host        CPU time of the engine's process in it
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

from octavo.config import make_config
from octavo.core.kv.specs import FullAttention, group_layers
from octavo.core.step import (
    FinishedStep,
    OpenedRow,
    SamplingSpec,
    StepPlan,
    StepResult,
    TableWrite,
)
from octavo.executor.base import KVCapacity
from octavo.executor.launching import LocalLauncher
from octavo.executor.messages import ASK, Ready, Start, encode_plan
from octavo.executor.rank import Submit, main
from octavo.executor.ranks import RankGroup
from octavo.memory_budget import MemoryBudget
from octavo.models.registry import read_model_config

MODEL = Path(__file__).resolve().parent / "configs" / "tiny"
BLOCK_SIZE = 16


def make_idle(start: Start) -> tuple[Ready, Submit]:
    """A rank that draws the same token for all rows."""

    def submit(plan: StepPlan) -> FinishedStep:
        return FinishedStep(StepResult(plan.step_id, [12345] * len(plan.sampled)))

    budget = MemoryBudget(0, 0, 0, 0, 0, 1, BLOCK_SIZE, 1, 0, 0)
    capacity = KVCapacity.of(budget, group_layers([FullAttention()]), start.shard.size)
    return Ready(start.config, start.model_config, True, capacity), submit


def decodes(count: int) -> StepPlan:
    """One token of each sequence; one sequence in BLOCK_SIZE gets another block."""
    ids = list(range(1000, 1000 + count))
    writes = [TableWrite(seq_id, 0, 64, (5000 + seq_id,)) for seq_id in ids[::BLOCK_SIZE]]
    return StepPlan(1, ids, [1] * count, ids, [], table_writes=writes)


def prompt(num_tokens: int) -> StepPlan:
    """A sequence that starts."""
    row = OpenedRow(
        7, tuple(range(30_000, 30_000 + num_tokens)), num_tokens, 0, SamplingSpec(), 1, 0
    )
    blocks = tuple(range(100, 100 + -(-num_tokens // BLOCK_SIZE)))
    writes = [TableWrite(7, 0, 0, blocks)]
    return StepPlan(1, [7], [num_tokens], [7], [], opened=[row], table_writes=writes)


def measure(group: RankGroup, plan: StepPlan, repeats: int) -> dict[str, float]:
    submits, trips, hosts = [], [], []
    for _ in range(repeats):
        host, began = time.thread_time(), time.perf_counter()
        group.send(encode_plan(plan))
        submits.append(time.perf_counter() - began)
        group.send(ASK)
        result = group.receive_result()
        trips.append(time.perf_counter() - began)
        hosts.append(time.thread_time() - host)
        assert len(result.token_ids) == len(plan.sampled)
    columns = {"submit": submits, "round_trip": trips, "host": hosts}
    return {name: round(median(values) * 1e6, 1) for name, values in columns.items()}


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2000)
    arguments = parser.parse_args()
    config = make_config(MODEL, tensor_parallel_size=arguments.ranks)
    group = RankGroup(config, read_model_config(MODEL), LocalLauncher((sys.executable, __file__)))
    plans = {f"decodes_{count}": decodes(count) for count in (1, 64, 256)}
    plans["opened_1000"] = prompt(1000)
    values: dict[str, object] = {"ranks": arguments.ranks}
    for name, plan in plans.items():
        measure(group, plan, arguments.repeats // 10)
        sent = {"plan_bytes": len(encode_plan(plan))}
        values[name] = sent | measure(group, plan, arguments.repeats)
    group.close()
    print(json.dumps(values))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].isdecimal():
        main(int(sys.argv[1]), make_idle)
    run()
