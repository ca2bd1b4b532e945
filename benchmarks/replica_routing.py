"""How much of the prompts several replicas find cached, by routing policy.

`python benchmarks/replica_routing.py`: for each policy, starts `octavo serve --replicas`, and sends
requests of which several share a long prefix, in random order. With `--sglang-router PYTHON` (of an
environment that has sglang-router), its cache-aware policy is measured, too, in front of as many
servers with one replica each. With `--rounds N`, all are measured N times in turn, and the fastest
round of each counts: other programs slow rounds down. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from server_load import ask, served

from octavo.bench.tables import columns, show

SEED = 1
WORDS = ("the", "cat", "sat", "on", "mat", "and", "saw", "one", "big", "red", "sun", "go", "up")
POLICIES = ("prefix", "load", "round-robin")
ROUTER_SECONDS = 60  # for a router to know its servers


def make_prompts(args: argparse.Namespace) -> list[str]:
    """Prompts in random order; `args.requests / args.prefixes` share each prefix. They are text,
    because SGLang's router takes no token ids."""
    draw = random.Random(SEED)

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    prefixes = [words(args.prefix_words) for _ in range(args.prefixes)]
    prompts = [
        f"{prefixes[i % len(prefixes)]} {words(args.own_words)}" for i in range(args.requests)
    ]
    draw.shuffle(prompts)
    return prompts


def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Send all requests to a server that has seen none of them."""

    def send(prompt: str) -> tuple[dict[str, Any], float]:
        fields = {"max_tokens": args.output_tokens, "temperature": 0, "ignore_eos": True}
        start = time.perf_counter()
        reply = ask(url, "/v1/completions", {"model": "demo", "prompt": prompt, **fields})
        return reply["usage"], time.perf_counter() - start

    with ThreadPoolExecutor(args.clients) as pool:
        warm_up = [f"{number} bottles of milk" for number in range(4 * args.replicas)]
        list(pool.map(send, warm_up))
        start = time.perf_counter()
        usages, times = zip(*pool.map(send, make_prompts(args)), strict=True)
    num_tokens = sum(usage["prompt_tokens"] for usage in usages)
    num_cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {
        "prompt_tokens": num_tokens,
        "cached_tokens": num_cached,
        "hit_rate": round(num_cached / num_tokens, 3),
        "seconds": round(time.perf_counter() - start, 1),
        "median_ms": round(sorted(times)[len(times) // 2] * 1e3, 1),
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
            return bool(reply.status == 200)
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--prefixes", type=int, default=40)
    parser.add_argument("--prefix-words", type=int, default=600)
    parser.add_argument("--own-words", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--clients", type=int, default=4, help="requests open at once")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--num-blocks", type=int, default=4096, help="of each replica")
    parser.add_argument("--sglang-router", metavar="PYTHON", help="also measure SGLang's router")
    args = parser.parse_args()
    options = ["demo", "--num-blocks", str(args.num_blocks), "--log-level", "warning"]
    rounds: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for policy in args.policies:
            more = ["--replicas", str(args.replicas), "--routing", policy]
            with served([*options, *more]) as (url, _):
                rounds.setdefault(policy, []).append(measure(url, args))
        if args.sglang_router is not None:
            with contextlib.ExitStack() as stack:
                alone = [*options, "--num-threads", "1"]
                urls = [stack.enter_context(served(alone))[0] for _ in range(args.replicas)]
                router = stack.enter_context(sglang_router(args.sglang_router, urls))
                name = "sglang-router cache_aware"
                rounds.setdefault(name, []).append(measure(router, args))
    results = {name: min(each, key=lambda one: one["seconds"]) for name, each in rounds.items()}
    titles = ("hit_rate", "cached_tokens", "seconds", "median_ms")
    table = columns(f"{args.replicas} replicas", *titles)
    for name, result in results.items():
        table.add_row(name, *(str(result[title]) for title in titles))
    show(table)
    print(json.dumps({"replicas": args.replicas, "requests": args.requests, "results": results}))


if __name__ == "__main__":
    main()
