"""Decode steps on a CPU: a model as it is, and with quantized projections, in turns.

Both engines are in this process, with random weights, and take steps by turns, so that whatever
else the machine does meets both alike. The ratio is the median over pairs of neighbouring steps.
Prints one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, get_args

from octavo import LLM, SamplingParams
from octavo.config import QuantizationName

CONFIGS = Path(__file__).resolve().parent / "configs"
PROMPT = 32  # tokens of each sequence when decoding begins
MODELS = ["qwen3-0.6b", "qwen2.5-1.5b"]


def begin(llm: LLM, streams: int, steps: int) -> None:
    """Queue that many requests, and compute their prompts."""
    params = SamplingParams(max_tokens=steps + 8, temperature=0.0, ignore_eos=True)
    for i in range(streams):
        prompt = [7 + (i * PROMPT + j) % 900 for j in range(PROMPT)]
        llm.client.add_request(llm.client.make_request(prompt, params))
    for _ in range(4):  # one computes the prompts
        llm.client.step()


def step_times(engines: dict[str, LLM], streams: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each engine's decode steps."""
    for llm in engines.values():
        begin(llm, streams, steps)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(steps):
        for name, llm in engines.items():
            started = time.perf_counter()
            llm.client.step()
            times[name].append(time.perf_counter() - started)
    for llm in engines.values():
        while llm.client.has_unfinished:
            llm.client.step()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, help="directories in configs/")
    parser.add_argument("--quantization", choices=get_args(QuantizationName), default="int8")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for model in args.models:
        engines = {
            name or "as is": LLM(
                CONFIGS / model,
                load_format="dummy",
                dtype="bfloat16",
                quantization=name,
                device="cpu",
                num_threads=args.threads,
                max_model_len=1024,
                max_num_seqs=max(args.streams),
                max_num_batched_tokens=max(2048, PROMPT * max(args.streams)),
                enable_prefix_caching=False,
                kv_cache_memory=1 << 30,
                swap_space=0,
                owns_process=True,
            )
            for name in (None, args.quantization)
        }
        for streams in args.streams:
            times = step_times(engines, streams, args.steps)
            pairs = zip(*times.values(), strict=True)
            ratio = statistics.median(plain / other for plain, other in pairs)
            medians = {name: 1e3 * statistics.median(each) for name, each in times.items()}
            least = {name: 1e3 * min(each) for name, each in times.items()}
            results[f"{model}@{streams}"] = {"ms": medians, "least_ms": least, "speedup": ratio}
            shown = ", ".join(
                f"{name} {medians[name]:.1f} ms (shortest {least[name]:.1f})" for name in engines
            )
            print(f"{model}, {streams} streams: {shown}; {ratio:.2f} times as fast", flush=True)
        for llm in engines.values():
            llm.close()
    print(json.dumps({"benchmark": "cpu_decode", "threads": args.threads, "cases": results}))


if __name__ == "__main__":
    main()
