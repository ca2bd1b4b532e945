"""Figures 18 and 19 on a GPU: the cost of paging in the kernel, and of block sizes in serving.

Writes the files that `octavo reproduce fig18 fig19 --measurements DIR` draws, next to its own
simulation of the paper's figures 18b and 19b. Requests arrive as a Poisson process; for figure 19b
most of the pool is taken away, so that requests preempt each other.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_harness import device_name, make_engine, report
from throughput import normalized_latency, serve_at, trace

from octavo import SamplingParams
from octavo.core.step import StepPlan
from octavo.engine.engine import Engine
from octavo.engine.local_client import LocalClient

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KERNEL_BATCHES, KERNEL_CONTEXTS = (8, 32), (64, 128, 256)
NUM_TOKENS = 256  # swapped or recomputed for figure 19a
Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/measurements"))
    parser.add_argument("--model", default="opt-13b")
    parser.add_argument("--block-sizes", nargs="*", type=int, default=BLOCK_SIZES)
    parser.add_argument("--num-requests", type=int, default=150)
    parser.add_argument("--rate", type=float, default=14.0, help="ShareGPT requests per second")
    parser.add_argument("--alpaca-rate", type=float, default=80.0)
    parser.add_argument(
        "--short-blocks", type=int, default=12_000, help="number of slots left in the small pool"
    )
    parser.add_argument("--no-kernels", action="store_true", help="leave figure 18a out")
    parser.add_argument("--no-serving", action="store_true", help="leave figures 18b and 19b out")
    arguments = parser.parse_args()
    arguments.short_blocks = max(2048, arguments.short_blocks)  # fits any request
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Rows] = {"preemption-cost": []}
    if not arguments.no_kernels:
        results["attention-kernel"] = attention_kernel()
    if not arguments.no_serving:
        results |= {"block-size": [], "preemption": []}
    for block_size in arguments.block_sizes:
        measure_block_size(block_size, arguments, results)
        for kind, rows in results.items():
            write(arguments, kind, rows)
    report("block_sizes", rows={kind: len(rows) for kind, rows in results.items()})


def attention_kernel() -> Rows:
    """Figure 18a: decode attention over paged K and V, and PyTorch's attention over dense ones."""
    import torch.nn.functional as F
    from attention_work import HEAD_DIM, Work, seconds

    rows: Rows = []
    for batch in KERNEL_BATCHES:
        for context in KERNEL_CONTEXTS:
            work = Work("opt-13b 40/40", batch, context, new=1)
            query = work.heads_of_tokens[0].unsqueeze(2)
            shape = (work.num_layers, 2, batch, work.kv_heads, context, HEAD_DIM)
            dense = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

            def contiguous(layer: int, query: Any = query, dense: Any = dense) -> Any:
                return F.scaled_dot_product_attention(query, dense[layer, 0], dense[layer, 1])

            kernels: dict[str, Callable[[int], Any]] = {
                "paged": work.forward,
                "contiguous": contiguous,
            }
            for kernel, launch in kernels.items():
                elapsed = seconds(launch, work.num_layers, 2 * work.num_layers)
                case = {"kernel": kernel, "batch_size": batch, "context": context}
                rows.append(case | {"microseconds": round(1e6 * elapsed, 2)})
    return rows


def measure_block_size(block_size: int, arguments: Any, results: dict[str, Rows]) -> None:
    """Figures 18b, 19a and 19b at one block size, with one engine."""
    engine = make_engine(
        arguments.model,
        block_size=block_size,
        max_num_seqs=8 if arguments.no_serving else 128,
        max_num_batched_tokens=512 if arguments.no_serving else 8192,
        enable_prefix_caching=False,
        swap_space=(1 if arguments.no_serving else 8) << 30,
    )
    if not arguments.no_serving:
        results["block-size"] += block_size_rows(engine, block_size, arguments)
    results["preemption-cost"] += preemption_cost(engine, block_size)
    if not arguments.no_serving:
        results["preemption"] += preemption_rows(engine, block_size, arguments)
    engine.executor.shutdown()
    for kind, rows in results.items():
        for row in rows:
            if row.get("block_size") == block_size:
                print(kind, row, flush=True)


def block_size_rows(engine: Engine, block_size: int, arguments: Any) -> Rows:
    """Figure 18b: latency with the whole pool."""
    rates = {"sharegpt": arguments.rate, "alpaca": arguments.alpaca_rate}
    rows: Rows = []
    for name, rate in rates.items():
        value = latency(engine, name, arguments.num_requests, rate)
        rows.append({"trace": name, "block_size": block_size, "seconds_per_token": value})
    return rows


def preemption_rows(engine: Engine, block_size: int, arguments: Any) -> Rows:
    """Figure 19b: latency with a pool so small that requests preempt each other."""
    pool, scheduler = engine.kv.pool, engine.scheduler
    num_left = arguments.short_blocks // block_size
    taken = [pool.allocate() for _ in range(pool.num_free - num_left)]
    rows: Rows = []
    for method in ("recompute", "swap"):
        scheduler.config = replace(scheduler.config, preemption_mode=method)
        before = sum(scheduler.num_preemptions.values())
        value = latency(engine, "sharegpt", arguments.num_requests, arguments.rate)
        row = {"method": method, "block_size": block_size, "seconds_per_token": value}
        rows.append(row | {"preemptions": sum(scheduler.num_preemptions.values()) - before})
    for block_id in taken:
        pool.release(block_id)
    return rows


def latency(engine: Engine, name: str, num_requests: int, rate: float) -> float:
    """Mean normalized latency, seconds per token."""
    prompts = trace(name, num_requests)(engine.model_config.vocab_size)
    outputs = serve_at(engine, prompts, rate)
    return round(statistics.fmean(map(normalized_latency, outputs)), 5)


def preemption_cost(engine: Engine, block_size: int) -> Rows:
    """Figure 19a: milliseconds to swap NUM_TOKENS out, to swap them in, and to recompute them."""
    kv, count = engine.kv, -(-NUM_TOKENS // block_size)
    rng = random.Random(block_size)
    assert not engine.has_unfinished, "a request is running, so the blocks are not free to move"
    most = min(kv.pool.num_blocks, kv.swap_pool.num_blocks)
    device, host = (rng.sample(range(1, most + 1), count) for _ in range(2))
    out = list(zip(device, host, strict=True))
    moves: dict[str, Any] = {
        "swap-out": {"swap_out": out},
        "swap-in": {"swap_in": [(h, d) for d, h in out]},
    }
    rows: Rows = []
    for method, move in moves.items():
        times = []
        for _ in range(8):
            plan = StepPlan(-1, [], [], [], [], **move)
            times.append(engine.executor.submit(plan).result().swap_seconds)
        value = round(1e3 * statistics.median(times[2:]), 3)
        rows.append({"method": method, "block_size": block_size, "milliseconds": value})
    times = []
    vocab_size = engine.model_config.vocab_size
    engine.observers.append(lambda plan, result, progress: times.append(result.compute_seconds))
    client = LocalClient(engine)
    for _ in range(8):
        prompt = [rng.randrange(vocab_size) for _ in range(NUM_TOKENS)]
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        client.add_request(client.make_request(prompt, params))
        while client.has_unfinished:
            client.step()
    engine.observers.clear()
    value = round(1e3 * statistics.median(times[2:]), 3)
    rows.append({"method": "recompute", "block_size": block_size, "milliseconds": value})
    return rows


def setting(arguments: Any, kind: str) -> str:
    """How the rows of one kind were measured, for captions."""
    count, rate = arguments.num_requests, f"{arguments.rate:g} requests/s"
    return {
        "attention-kernel": "one layer's decode attention with blocks of 16 tokens, compared with "
        "PyTorch's attention over dense keys and values; bfloat16",
        "block-size": f"{count} ShareGPT requests at {rate}, then as many Alpaca requests at "
        f"{arguments.alpaca_rate:g}, with the whole pool, once for each block size",
        "preemption-cost": f"{NUM_TOKENS} tokens in blocks scattered over the pool; medians",
        "preemption": f"{count} ShareGPT requests at {rate}, with a pool of "
        f"{arguments.short_blocks:,} slots, once for each block size",
    }[kind]


def write(arguments: Any, kind: str, rows: Rows) -> None:
    content = {
        "kind": kind,
        "device": device_name(),
        "model": f"{arguments.model}, dummy weights",
        "command": "python benchmarks/block_sizes.py",
        "setting": setting(arguments, kind),
        "rows": rows,
    }
    path = arguments.out / f"{kind}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
