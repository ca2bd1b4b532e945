"""How tensor parallelism scales: one model on several GPUs of a host.

Decode steps at context 1,024 beside the roofline of all GPUs, the simulator's prediction and where
the time goes (`--profile FILE`); then ShareGPT requests, all at once, with each memory policy:
paged, and the paper's Orca policies, which reserve memory for whole sequences; as many with each,
or so many with each in turn. Beside each run of requests is the same one on the simulator's clock.
The weights are random, and loaded once.

    python benchmarks/tensor_parallel.py opt-175b 4 --policies paged orca-oracle orca-max
    python benchmarks/tensor_parallel.py tiny 2 --num-requests 8   # without GPUs: that it runs
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import step_profile
import torch
from decode_step import kv_bytes_read, step_times, weight_bytes
from gpu_harness import copy_bandwidth, make_engine, report
from throughput import Query, run_all, trace

from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.executor import sharded
from octavo.executor.launching import LocalLauncher
from octavo.executor.ranks import RankGroup
from octavo.outputs import RequestOutput
from octavo.registry import MEMORY_POLICIES
from octavo.simulation.cost_model import CostModel, ModelSize
from octavo.simulation.executor import SimulatedExecutor, VirtualClock
from octavo.simulation.gpus import GPUS
from octavo.simulation.step_shape import RowLengths, StepShape

CONTEXT = 1024
BATCHES = (1, 64, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("size", type=int, help="GPUs, or ranks on a CPU")
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--num-requests", nargs="+", type=int, default=[1000])
    parser.add_argument(
        "--policies", nargs="*", choices=list(MEMORY_POLICIES.builtin), default=["paged"]
    )
    parser.add_argument("--gpu", choices=list(GPUS), default="h200", help="what is predicted")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--profile", metavar="FILE")
    arguments = parser.parse_args()
    if len(arguments.num_requests) == 1:
        arguments.num_requests *= len(arguments.policies)
    if len(arguments.num_requests) != len(arguments.policies):
        parser.error("--num-requests takes one number, or one for each of --policies.")
    if arguments.profile:
        os.environ[step_profile.REQUEST] = arguments.profile
        launcher = LocalLauncher((sys.executable, step_profile.__file__))
        sharded.RankGroup = lambda config, model, _: RankGroup(config, model, launcher)  # type: ignore
    on_gpus = torch.cuda.is_available()
    bandwidth = copy_bandwidth() if on_gpus else math.inf
    if on_gpus:
        torch.cuda.empty_cache()
    began = time.perf_counter()
    engine = make_engine(
        arguments.model,
        tensor_parallel_size=arguments.size,
        max_num_seqs=max(arguments.batches, default=256),
        max_num_batched_tokens=8192 if on_gpus else 2048,
        enable_prefix_caching=False,
        swap_space=0,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        **({} if on_gpus else {"num_blocks": 1000}),
    )
    seconds = time.perf_counter() - began
    tokens = engine.executor.capacity.num_blocks * engine.config.cache.block_size
    print(
        f"{arguments.model} on {arguments.size}: ready in {seconds:.1f} s; KV of {tokens:,} tokens"
    )
    steps = {
        str(batch): decode_row(engine, batch, arguments, bandwidth * arguments.size)
        for batch in arguments.batches
        if batch * (CONTEXT + 64) <= tokens
    }
    requests = []
    for policy, num_requests in zip(arguments.policies, arguments.num_requests, strict=True):
        engine = with_policy(engine, policy)
        requests.append(requests_row(engine, policy, num_requests, arguments))
    engine.executor.shutdown()
    report(
        "tensor_parallel",
        model=arguments.model,
        size=arguments.size,
        ready_s=round(seconds, 1),
        kv_tokens=tokens,
        copy_tb_s=round(bandwidth / 1e12, 3) if on_gpus else None,
        steps=steps,
        requests=requests,
    )


def decode_row(
    engine: Engine, batch: int, arguments: argparse.Namespace, bandwidth: float
) -> dict[str, float]:
    """Steps with `batch` sequences of CONTEXT tokens; bandwidth: of all GPUs."""
    profile = arguments.profile and f"{arguments.profile}.{arguments.model}.{arguments.size}"
    walls, device, _, _ = step_times(engine, batch, {"temperature": 0.0}, profile, CONTEXT)
    wall = statistics.fmean(walls)
    num_bytes = weight_bytes(engine, batch, 0.0) + batch * kv_bytes_read(engine, CONTEXT)
    shape = StepShape(batch, batch, batch, batch * CONTEXT, 0, num_requests=batch)
    cost = cost_model(engine, arguments)
    row = {
        "ms": round(1e3 * wall, 3),
        "median_ms": round(1e3 * statistics.median(walls), 3),
        "device_ms": round(1e3 * device, 3),
        "roofline_share": round(num_bytes / bandwidth / wall, 3),
        "predicted_ms": round(1e3 * cost.compute_seconds(shape), 3),
    }
    print(f"batch {batch}: {row}", flush=True)
    return row


def cost_model(engine: Engine, arguments: argparse.Namespace) -> CostModel:
    size = ModelSize.of(engine.model_config, "bfloat16", num_gpus=arguments.size)
    block_size = engine.config.cache.block_size
    return CostModel(size, GPUS[arguments.gpu], arguments.size, block_size)


def with_policy(engine: Engine, policy: str) -> Engine:
    """An engine with another memory policy and the same executor, whose weights stay."""
    cache = replace(engine.config.cache, memory_policy=policy)
    other = Engine(replace(engine.config, cache=cache), engine.model_config, engine.executor)
    # The workers still hold the rows that ended in the last step.
    before, after = engine.scheduler._lifecycle, other.scheduler._lifecycle
    after._rows, after._next_seq_id = before._rows, before._next_seq_id
    return other


def requests_row(
    engine: Engine, policy: str, num_requests: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The first ShareGPT requests, all at once."""
    queries = trace("sharegpt", num_requests)(engine.model_config.vocab_size)
    queries = [
        query for query in queries if len(query[0]) + _outputs(query) <= engine.max_model_len
    ]
    run_all(engine, queries[:2])
    outputs, seconds, mean_batch = run_counted(engine, queries)
    num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    clock = VirtualClock()
    _, _, predicted_batch = run_counted(simulated(engine, clock, arguments), queries)
    row = {
        "policy": policy,
        "requests": len(outputs),
        "seconds": round(seconds, 2),
        "predicted_s": round(clock.now, 2),
        "tokens_per_s": round(num_tokens / seconds, 1),
        "mean_batch": round(mean_batch, 1),
        "predicted_batch": round(predicted_batch, 1),
        "preemptions": sum(engine.scheduler.num_preemptions.values()),
    }
    print(row, flush=True)
    return row


def run_counted(engine: Engine, queries: list[Query]) -> tuple[list[RequestOutput], float, float]:
    """Outputs, seconds, and how many sequences a step has on average."""
    running: list[int] = []

    def count(plan: StepPlan, result: StepResult, progress: object) -> None:
        running.append(len(plan.seq_ids))

    engine.observers.append(count)
    gc.collect()
    outputs, seconds = run_all(engine, queries)
    return outputs, seconds, statistics.fmean(running)


def simulated(engine: Engine, clock: VirtualClock, arguments: argparse.Namespace) -> Engine:
    """The same engine, which computes nothing: its steps take the time of the cost model."""
    executor = SimulatedExecutor(
        engine.executor.capacity,
        cost_model(engine, arguments),
        clock,
        RowLengths(engine.model_config.window_sizes),
        is_asynchronous=engine.executor.is_asynchronous,
    )
    return Engine(engine.config, engine.model_config, executor, clock=clock)


def _outputs(query: Any) -> int:
    return int(query[1].max_tokens)


if __name__ == "__main__":
    main()
