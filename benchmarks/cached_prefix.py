"""The time to the first token of a prompt that begins with a cached prefix, on one GPU.

A turn of a conversation has few new tokens over a long context. Its attention would be a few
programs with many keys each, so keys are split (octavo/ops/cuda/attention_prefill.py). Each prompt
is computed with splits and without, in turns, by the whole engine; "alone" is the same number of
new tokens without a context. Prints a table, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from gpu_harness import make_engine, report

from octavo import SamplingParams
from octavo.engine.local_client import LocalClient
from octavo.ops.cuda import attention, attention_work_items
from octavo.ops.cuda.attention_prefill import PrefillTimes

CACHED = [2048, 7600]
NEW = [16, 128, 512]
ROUNDS = 7


@contextmanager
def unsplit() -> Iterator[None]:
    """No keys of prompts are split."""
    with (
        patch.object(attention, "prefill_times", lambda *_: PrefillTimes(split=1.0, whole=0.0)),
        patch.object(attention_work_items, "_split_items", lambda items, *_: items),
    ):
        yield


def first_token(client: LocalClient, prompt: list[int]) -> float:
    """Milliseconds to its first token."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    client.add_request(client.make_request(prompt, params))
    started = time.perf_counter()
    while client.engine.has_unfinished:
        client.step()
    return 1e3 * (time.perf_counter() - started)


def measure(client: LocalClient, cached: int, new: int, rounds: int) -> dict[str, float]:
    """Milliseconds, the median of all rounds but the first."""
    vocab_size = client.engine.model_config.vocab_size
    rng = random.Random(cached)
    prefix = [rng.randrange(vocab_size) for _ in range(cached)]
    first_token(client, [*prefix, 0])
    times: dict[str, list[float]] = {"split": [], "whole": [], "alone": []}
    for _ in range(rounds + 1):
        for kind, taken in times.items():
            tokens = [rng.randrange(vocab_size) for _ in range(new)]
            if kind == "whole":
                with unsplit():
                    taken.append(first_token(client, [*prefix, *tokens]))
            else:
                taken.append(first_token(client, tokens if kind == "alone" else [*prefix, *tokens]))
    return {kind: round(statistics.median(taken[1:]), 3) for kind, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--cached", type=int, nargs="*", default=CACHED)
    parser.add_argument("--new", type=int, nargs="*", default=NEW)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    longest = max(arguments.cached) + max(arguments.new) + 2
    engine = make_engine(
        arguments.model,
        max_model_len=longest,
        max_num_seqs=16,
        max_num_batched_tokens=8192,
        kv_cache_dtype=arguments.kv_cache_dtype,
        tune_kernels="off",
        swap_space=0,
    )
    client, results = LocalClient(engine), {}
    for cached in arguments.cached:
        for new in arguments.new:
            found = measure(client, cached, new, arguments.rounds)
            shown = "  ".join(f"{kind} {taken:7.2f} ms" for kind, taken in found.items())
            print(f"{new:>5} new tokens of {cached + new:>6}:  {shown}", flush=True)
            results[f"{new} of {cached + new}"] = found
    report(
        "cached_prefix",
        model=arguments.model,
        kv_cache_dtype=arguments.kv_cache_dtype,
        first_token_ms=results,
    )


if __name__ == "__main__":
    main()
