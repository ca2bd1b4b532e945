"""The overhead of HTTP: throughput of `octavo serve` compared with the offline engine's.

The same requests (token ids in, greedy, forced lengths, all at once) go to `LLM.generate` and, as
streams, to a server with the same options. Both run in separate processes and take turns, so that
other load on the machine affects both. The client runs in this process. The server's engine has one
thread; the API process and the client share the remaining cores.

Prints medians, and one JSON line at the end; the exit status is 1 if the server reaches less than
90% of the offline throughput. On a busy machine, compare the CPU seconds instead: the engine
process should need as many as the offline engine, and the API process works beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import workload
from server_load import served

from octavo.bench.client_load import Query, Target, send_all

MIN_RATIO = 0.9
OPTIONS: dict[str, Any] = {"num_threads": 1, "num_blocks": 4096, "enable_prefix_caching": False}
FLAGS = ["--num-threads", "1", "--num-blocks", "4096", "--no-prefix-caching"]


def offline(num_requests: int, repeat: int) -> None:
    """Run once for each line on stdin, and print the wall-clock and CPU seconds as JSON."""
    from octavo import LLM, SamplingParams

    requests = workload(num_requests)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    prompts = [prompt for prompt, _ in requests]
    with LLM("demo", **OPTIONS) as llm:
        llm.generate(prompts[:8], params[:8], use_tqdm=False)
        print(json.dumps("ready"), flush=True)
        for _ in range(repeat):
            sys.stdin.readline()
            start, cpu = time.perf_counter(), time.process_time()
            llm.generate(prompts, params, use_tqdm=False)
            spent = time.process_time() - cpu
            print(json.dumps([time.perf_counter() - start, spent]), flush=True)


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def engine_process(pid: int) -> int:
    """The child of a server process that runs the engine: the one with the most CPU time."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")  # listed under the thread that started it
    children = [int(child) for path in tasks for child in path.read_text().split()]
    return max(children, key=cpu_seconds)


def online(url: str, queries: list[Query]) -> float:
    """Seconds from the first request sent to the last token, over HTTP."""
    calls = asyncio.run(send_all(Target(url, "demo"), queries, [0.0] * len(queries)))
    lost = [call.error for call in calls if call.outcome != "completed"]
    if lost:
        raise SystemExit(f"{len(lost)} requests failed: {lost[0]}")
    return max(call.last for call in calls) - min(call.sent for call in calls)


def compare(num_requests: int, repeat: int) -> dict[str, Any]:
    queries = [Query(prompt, n) for prompt, n in workload(num_requests)]
    num_tokens = sum(query.output_tokens for query in queries)
    arguments = ["--offline", "--requests", str(num_requests), "--repeat", str(repeat)]
    seconds: dict[str, list[float]] = {"offline": [], "server": []}
    cpu: dict[str, list[float]] = {"offline": [], "engine": [], "api": []}
    with (
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        ) as reference,
        served([*FLAGS, "--log-level", "warning"]) as (url, api_pid),
    ):
        assert reference.stdin is not None
        assert reference.stdout is not None
        reference.stdout.readline()
        online(url, queries[:8])
        pids = {"engine": engine_process(api_pid), "api": api_pid}
        for _ in range(repeat):
            reference.stdin.write("\n")
            wall, spent = json.loads(reference.stdout.readline())
            seconds["offline"].append(wall)
            cpu["offline"].append(spent)
            before = {name: cpu_seconds(pid) for name, pid in pids.items()}
            seconds["server"].append(online(url, queries))
            for name, pid in pids.items():
                cpu[name].append(cpu_seconds(pid) - before[name])
    ratios = [a / b for a, b in zip(seconds["offline"], seconds["server"], strict=True)]
    median = statistics.median
    return {
        "benchmark": "server_overhead",
        "requests": num_requests,
        "output_tokens": num_tokens,
        "tokens_per_second": {k: round(num_tokens / median(v), 1) for k, v in seconds.items()},
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "cpu_seconds": {name: round(median(each), 3) for name, each in cpu.items()},
        "cpu_ratio": round(median(cpu["offline"]) / median(cpu["engine"]), 3),
        "api_microseconds_per_token": round(1e6 * median(cpu["api"]) / num_tokens, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        offline(args.requests, args.repeat)
        return 0
    values = compare(args.requests, args.repeat)
    for name, speed in values["tokens_per_second"].items():
        print(f"{name:<10}{speed:>10.1f} output tokens/s")
    print(f"{'ratio':<10}{values['ratio']:>10.3f}")
    for name, spent in values["cpu_seconds"].items():
        print(f"{name:<10}{spent:>10.2f} CPU seconds")
    print(json.dumps(values))
    return 0 if values["ratio"] >= MIN_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
