"""How much of the prompts several replicas find cached, by routing policy.

`python benchmarks/replica_routing.py`: for each policy, starts `octavo serve --replicas`, and sends
requests of which several share a long prefix, in random order. With `--sglang-router PYTHON` (of an
environment that has sglang-router), its cache-aware policy is measured, too, in front of as many
servers with one replica each. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from server_load import VOCAB_SIZE, served

from octavo.bench.client_load import Call, Query, Target, send_all
from octavo.bench.tables import columns, show

SEED = 1
POLICIES = ("prefix", "load", "round-robin")
ROUTER_SECONDS = 60  # for a router to know its servers


def make_queries(args: argparse.Namespace) -> list[Query]:
    """Requests in random order; `args.requests / args.prefixes` share each prefix."""
    draw = random.Random(SEED)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(100, VOCAB_SIZE) for _ in range(count)]

    prefixes = [tokens(args.prefix_tokens) for _ in range(args.prefixes)]
    queries = [
        Query([*prefixes[i % len(prefixes)], *tokens(args.own_tokens)], args.output_tokens)
        for i in range(args.requests)
    ]
    draw.shuffle(queries)
    return queries


def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Send all requests to a server that has seen none of them."""
    queries = make_queries(args)
    target = Target(url, "demo")
    start = time.perf_counter()
    calls = asyncio.run(send_all(target, queries, [0.0] * len(queries), args.clients))
    return summary(calls, time.perf_counter() - start)


def summary(calls: list[Call], seconds: float) -> dict[str, Any]:
    failed = [call.error for call in calls if call.outcome != "completed"]
    num_tokens = sum(call.num_prompt_tokens for call in calls)
    num_cached = sum(call.num_cached_tokens for call in calls)
    first = sorted(call.first - call.sent for call in calls if call.first is not None)
    return {
        "prompt_tokens": num_tokens,
        "cached_tokens": num_cached,
        "hit_rate": round(num_cached / max(1, num_tokens), 3),
        "seconds": round(seconds, 1),
        "median_ttft_ms": round(first[len(first) // 2] * 1e3, 1) if first else None,
        "failed": failed,
    }


@contextlib.contextmanager
def sglang_router(python: str, urls: list[str]) -> Iterator[str]:
    """A router in front of servers; yields its URL when it serves them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [python, "-m", "sglang_router.launch_router", "--policy", "cache_aware"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + ROUTER_SECONDS
            while time.monotonic() < deadline and not is_serving(url):
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()


def is_serving(url: str) -> bool:
    body = json.dumps({"model": "demo", "prompt": [7], "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status == 200
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--prefixes", type=int, default=40)
    parser.add_argument("--prefix-tokens", type=int, default=632)
    parser.add_argument("--own-tokens", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--clients", type=int, default=4, help="requests open at once")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--num-blocks", type=int, default=4096, help="of each replica")
    parser.add_argument("--sglang-router", metavar="PYTHON", help="also measure SGLang's router")
    args = parser.parse_args()
    options = ["demo", "--num-blocks", str(args.num_blocks), "--log-level", "warning"]
    results: dict[str, dict[str, Any]] = {}
    for policy in args.policies:
        more = ["--replicas", str(args.replicas), "--routing", policy]
        with served([*options, *more]) as (url, _):
            results[policy] = measure(url, args)
    if args.sglang_router is not None:
        with contextlib.ExitStack() as stack:
            alone = [*options, "--num-threads", "1", "--ignore-unknown-fields"]
            urls = [stack.enter_context(served(alone))[0] for _ in range(args.replicas)]
            router = stack.enter_context(sglang_router(args.sglang_router, urls))
            results["sglang-router cache_aware"] = measure(router, args)
    titles = ("hit_rate", "cached_tokens", "seconds", "median_ttft_ms")
    table = columns(f"{args.replicas} replicas", *titles)
    for name, result in results.items():
        table.add_row(name, *(str(result[title]) for title in titles))
    show(table)
    print(json.dumps({"replicas": args.replicas, "requests": args.requests, "results": results}))


if __name__ == "__main__":
    main()
