"""A server under load over loopback: `python benchmarks/server_load.py`.

Starts `octavo serve`, finds its capacity, sends requests with the lengths of a trace at fractions
of that capacity, and then, twice, at ten times the capacity. Afterwards nothing may be lost: each
request has completed or was refused with a proper error, the same greedy request gets the same
answer as before, no block is held, and the second overload took no more memory than the first. The
last line is JSON; the exit status is 1 if something was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from octavo.bench.client_load import Query, Target
from octavo.bench.serve import find_capacity, run_serve, serve_tables, serve_values
from octavo.bench.tables import show
from octavo.bench.traces import TraceRequest, read_trace
from octavo.cli.bench_serve import make_queries

TRACE = Path(__file__).parent / "traces" / "bench_sharegpt_1000.csv"
PROBE = {"prompt": list(range(100, 140)), "max_tokens": 24, "temperature": 0, "ignore_eos": True}
SETTLE_SECONDS = 20.0  # for aborted requests to free their blocks
SAMPLE_SECONDS = 0.25  # between two samples of the memory
MAX_GROWTH = 1.2  # of the server's memory, second overload to first
VOCAB_SIZE = 4000  # token ids that the demo model knows


class Memory:
    """Samples the memory of a process and its descendants: proportional set size, in MiB."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.start = self.peak = tree_mib(pid)
        self._thread.start()

    def take_peak(self) -> float:
        """The peak since the last call."""
        peak, self.peak = self.peak, tree_mib(self._pid)
        return max(peak, self.peak)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, tree_mib(self._pid))


def tree_mib(pid: int) -> float:
    """PSS of a process and all its descendants; those that have just ended count as zero."""
    total, found = 0.0, [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
            total += int(re.findall(r"^Pss:\s+(\d+)", rollup, re.M)[0]) / 1024
    return total


@contextlib.contextmanager
def served(options: list[str], prefix: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Run `octavo serve` on a free port; yields its URL and process id.

    `prefix` is a command that ends by executing its arguments, such as `env`.
    """
    command = [*prefix, sys.executable, "-m", "octavo.cli.main", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"at (http://\S+) \(ready", line)
            if found is None:
                raise RuntimeError(f"the server did not start; it printed {line!r}")
            yield found[1], process.pid
        finally:
            process.terminate()


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read() or b"null")


def blocks_held(url: str) -> int:
    """Blocks held in both tiers."""
    state = ask(url, "/debug/kv")
    return int(state["device"]["num_held"] + state["swap"]["num_held"])


async def settle(url: str) -> int:
    """Wait until no block is held; returns the number of blocks still held."""
    held = await asyncio.to_thread(blocks_held, url)
    for _ in range(int(SETTLE_SECONDS / 0.5)):
        if held == 0:
            break
        await asyncio.sleep(0.5)
        held = await asyncio.to_thread(blocks_held, url)
    return held


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with the lengths of a trace; every run gets different prompts."""

    requests: list[TraceRequest]
    scale: float

    def queries(self, count: int, seed: int) -> list[Query]:
        many = [self.requests[i % len(self.requests)] for i in range(count)]
        return make_queries(many, VOCAB_SIZE, seed, self.scale)


def losses(result: dict[str, Any]) -> list[str]:
    """What must not have happened, but did."""
    floods, memory = result["overloads"], result["memory_mib"]
    failures = [run["errors"] for run in [*result["runs"], *floods] if run["failed"]]
    found = [f"requests failed: {errors}" for errors in failures]
    if result["blocks_held_after"]:
        found.append(f"{result['blocks_held_after']} blocks are still held")
    if not result["same_answer_after"]:
        found.append("the same greedy request has another answer after the load")
    if not all(flood["completed"] for flood in floods):
        found.append("no request completed under overload")
    if memory["second_overload"] > MAX_GROWTH * memory["first_overload"]:
        found.append(f"the server's memory keeps growing: {memory} MiB")
    return found


async def measure(
    url: str,
    memory: Memory,
    workload: Workload,
    count: int,
    shares: list[float],
    overload: float,
    num_flood: int,
) -> dict[str, Any]:
    """All runs against one server, and the state of the server afterwards."""
    target = Target(url, "demo")
    infinite = float("inf")
    before = ask(url, "/v1/completions", PROBE)["choices"][0]["text"]
    alone = await run_serve(target, workload.queries(8, 1), infinite, max_concurrency=1)
    capacity = await find_capacity(target, workload.queries(4 * count, 2))
    print(f"capacity: {capacity:.2f} requests/s\n")
    runs = []
    for number, share in enumerate(shares):
        report = await run_serve(target, workload.queries(count, 10 + number), share * capacity)
        show(f"at {share:g} times the capacity", *serve_tables(report), "")
        slower = report.normalized.mean / alone.normalized.mean
        runs.append({"load": share, "latency_ratio": slower, **serve_values(report)})
    peaks, floods = [memory.take_peak()], []
    for seed in (3, 4):
        flood = await run_serve(target, workload.queries(num_flood, seed), overload * capacity)
        show(f"at {overload:g} times the capacity", *serve_tables(flood), "")
        ratio = flood.requests_per_second / capacity
        floods.append({"load": overload, "goodput_ratio": ratio, **serve_values(flood)})
        peaks.append(memory.take_peak())
    held = await settle(url)
    after = ask(url, "/v1/completions", PROBE)["choices"][0]["text"]
    return {
        "capacity": capacity,
        "alone_normalized_latency_ms": 1e3 * alone.normalized.mean,
        "runs": runs,
        "overloads": floods,
        "memory_mib": {
            "start": memory.start,
            "before_overload": peaks[0],
            "first_overload": peaks[1],
            "second_overload": peaks[2],
        },
        "blocks_held_after": held,
        "same_answer_after": after == before,
    }


def exit_with(result: dict[str, Any], name: str, failures: list[str]) -> NoReturn:
    """Print `failures`, then `result` with them under `name`; exit with 1 if there are any."""
    for line in failures:
        print(f"{name}: {line}", file=sys.stderr)
    print(json.dumps(result | {name: failures}))
    sys.exit(1 if failures else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--num-requests", type=int, default=200, help="requests per run")
    parser.add_argument("--num-overload", type=int, default=1500)
    parser.add_argument("--scale", type=float, default=0.25, help="factor of the trace's lengths")
    parser.add_argument("--shares", default="0.25,0.5,0.75,0.9", help="fractions of the capacity")
    parser.add_argument("--overload", type=float, default=10.0)
    parser.add_argument("--max-waiting", type=int, default=128)
    parser.add_argument("--num-blocks", type=int, default=1024)
    args = parser.parse_args()
    shares = [float(share) for share in args.shares.split(",")]
    workload = Workload(read_trace(args.trace), args.scale)
    options = ["demo", "--log-level", "warning", "--max-waiting", str(args.max_waiting)]
    with served([*options, "--num-blocks", str(args.num_blocks)]) as (url, pid):
        ask(url, "/v1/completions", PROBE)
        memory = Memory(pid)
        sizes = (args.num_requests, shares, args.overload, args.num_overload)
        result = asyncio.run(measure(url, memory, workload, *sizes))
        memory.stop()
    exit_with(result, "lost", losses(result))


if __name__ == "__main__":
    main()
