"""Throughput and latency on one GPU or several: the rows of docs/performance.md, beside vLLM's.

vLLM 0.26.0 was measured on the same kind of card (H200) on 2026-11-20, on two of them on
2026-11-22: dummy bf16 weights, max_model_len 2,048, forced output lengths. Prompts are random
tokens.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpu_harness import TRACES, make_engine, peak_rates, report

from octavo import BeamSearchParams, SamplingParams
from octavo.bench.traces import TraceRequest, make_prompts, read_trace
from octavo.engine.engine import Engine
from octavo.engine.local_client import LocalClient
from octavo.outputs import RequestOutput

Params = SamplingParams | BeamSearchParams
Query = tuple[list[int], Params]  # prompt token ids, parameters
MAX_NUM_SEQS = 1024
MAX_NUM_BATCHED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Row:
    """One workload on one model, and what vLLM reached in `unit`."""

    model: str
    make: Callable[[int], list[Query]]  # takes the vocabulary size
    peer: float
    unit: str = "tokens/s"
    tensor_parallel_size: int = 1
    quantization: str | None = None  # of vLLM's, too


def sampled(output_tokens: int, **options: Any) -> SamplingParams:
    """Parameters with a forced output length; greedy unless `options` have a temperature."""
    return SamplingParams(
        temperature=options.pop("temperature", 0.0),
        max_tokens=output_tokens,
        ignore_eos=True,
        detokenize=False,
        **options,
    )


def trace(name: str, limit: int, **options: Any) -> Callable[[int], list[Query]]:
    """Requests of a trace; with n > 1 they are sampled at temperature 1."""
    if options.get("n", 1) > 1:
        options["temperature"] = 1.0

    def make(vocab_size: int) -> list[Query]:
        requests = read_trace(TRACES / f"bench_{name}_1000.csv", limit)
        prompts = make_prompts(requests, vocab_size)
        rows = zip(prompts, requests, range(len(requests)), strict=True)
        return [(p, sampled(r.output_tokens, seed=i, **options)) for p, r, i in rows]

    return make


def random_lengths(vocab_size: int) -> list[Query]:
    """256 requests of 100 to 1,024 tokens in and out, with the lengths of nano-vllm's benchmark."""
    rng = random.Random(0)
    sizes = []
    for _ in range(256):
        sizes.append(rng.randint(100, 1024))
        for _ in range(sizes[-1]):
            rng.randint(0, 10_000)
    requests = [TraceRequest(size, rng.randint(100, 1024)) for size in sizes]
    prompts = make_prompts(requests, vocab_size)
    rows = zip(prompts, requests, range(len(requests)), strict=True)
    return [(p, sampled(r.output_tokens, temperature=0.6, seed=i)) for p, r, i in rows]


def beams(width: int) -> Callable[[int], list[Query]]:
    def make(vocab_size: int) -> list[Query]:
        params = BeamSearchParams(width, max_tokens=64, ignore_eos=True, detokenize=False)
        prompts = make_prompts([TraceRequest(128, 64)] * 64, vocab_size)
        return [(prompt, params) for prompt in prompts]

    return make


def shared_prefix(vocab_size: int) -> list[Query]:
    requests = [TraceRequest(1024, 1), *[TraceRequest(64, 64)] * 512]
    prefix, *own = make_prompts(requests, vocab_size)
    return [(prefix + prompt, sampled(64)) for prompt in own]


def prompts_alone(vocab_size: int) -> list[Query]:
    """64 prompts of 1,024 tokens, and the first token after each."""
    return [(p, sampled(1)) for p in make_prompts([TraceRequest(1024, 1)] * 64, vocab_size)]


ROWS = {
    "opt-sharegpt": Row("opt-13b", trace("sharegpt", 1000), 4693),
    "opt-alpaca": Row("opt-13b", trace("alpaca", 1000), 7360),
    "opt-n2": Row("opt-13b", trace("alpaca", 500, n=2), 7400),
    "opt-n4": Row("opt-13b", trace("alpaca", 500, n=4), 9382),
    "opt-n6": Row("opt-13b", trace("alpaca", 500, n=6), 10094),
    "opt-beam2": Row("opt-13b", beams(2), 1865),
    "opt-beam4": Row("opt-13b", beams(4), 1958),
    "opt-beam6": Row("opt-13b", beams(6), 1942),
    "opt-prefix": Row("opt-13b", shared_prefix, 64.7, "requests/s"),
    "llama-sharegpt": Row("llama-3-8b", trace("sharegpt", 1000), 13946),
    "llama-n4": Row("llama-3-8b", trace("alpaca", 500, n=4), 19496),
    "llama-beam4": Row("llama-3-8b", beams(4), 3159),
    "llama-prefix": Row("llama-3-8b", shared_prefix, 195.0, "requests/s"),
    "llama-prompts": Row("llama-3-8b", prompts_alone, 42.4, "requests/s"),
    "llama-fp8-sharegpt": Row("llama-3-8b", trace("sharegpt", 1000), 16725, quantization="fp8"),
    "llama-fp8-prompts": Row("llama-3-8b", prompts_alone, 64.6, "requests/s", quantization="fp8"),
    "llama-int4-prompts": Row("llama-3-8b", prompts_alone, 39.8, "requests/s", quantization="int4"),
    "qwen-random": Row("qwen3-0.6b", random_lengths, 24103),
    "llama-tp2-sharegpt": Row("llama-3-8b", trace("sharegpt", 1000), 21333, tensor_parallel_size=2),
    "llama-70b-tp2-sharegpt": Row(
        "llama-3-70b", trace("sharegpt", 200), 1752, tensor_parallel_size=2
    ),
}
# OPT-13B, the first 500 ShareGPT requests, Poisson arrivals. Requests per second -> vLLM's
# normalized latency in ms per token (mean, p99) and time to first token in ms (mean, p99).
ONLINE = {
    6: (10.6, 16.4, 29, 72),
    8: (11.6, 18.1, 32, 77),
    10: (12.8, 20.5, 35, 79),
    12: (14.4, 21.2, 40, 93),
    14: (16.4, 25.5, 44, 103),
}
ONLINE_ENGINE = ("opt-13b", 1, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    on_one = [name for name, row in ROWS.items() if row.tensor_parallel_size == 1]
    parser.add_argument("--rows", nargs="*", choices=ROWS, metavar="ROW", default=on_one)
    parser.add_argument("--rates", nargs="*", type=int, default=list(ONLINE))
    arguments = parser.parse_args()
    card = peak_rates()
    results: dict[str, Any] = {}
    engines = dict.fromkeys(_engine_of(ROWS[name]) for name in arguments.rows)
    if arguments.rates:
        engines.setdefault(ONLINE_ENGINE)
    for model, size, quantization in engines:
        began = time.perf_counter()
        engine = make_engine(
            model,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            tensor_parallel_size=size,
            quantization=quantization,
        )
        on = f", {quantization}" if quantization else ""
        on += "" if size == 1 else f" on {size} GPUs"
        print(f"{model}{on}: ready in {time.perf_counter() - began:.1f} s", flush=True)
        for name in arguments.rows:
            if _engine_of(ROWS[name]) == (model, size, quantization):
                results[name] = measure(engine, name, ROWS[name])
        if (model, size, quantization) == ONLINE_ENGINE:
            for rate in arguments.rates:
                results[f"opt-online-{rate}"] = measure_online(engine, rate)
        engine.executor.shutdown()
        del engine
        torch.cuda.empty_cache()
    report("throughput", **card, rows=results)


def _engine_of(row: Row) -> tuple[str, int, str | None]:
    """The model that a row runs on, on how many GPUs, and how it is quantized."""
    return row.model, row.tensor_parallel_size, row.quantization


def measure(engine: Engine, name: str, row: Row) -> dict[str, float]:
    """Run a row with an empty prefix cache, after two of its requests as a warm-up."""
    queries = row.make(engine.model_config.vocab_size)
    run_all(engine, queries[:2])
    engine.kv.reset_prefix_cache()
    preemptions = sum(engine.scheduler.num_preemptions.values())
    steps = 0
    device = 0.0

    def count(plan: Any, result: Any, progress: Any) -> None:
        nonlocal steps, device
        steps += 1
        device += result.compute_seconds

    engine.observers.append(count)
    outputs, seconds = run_all(engine, queries)
    engine.observers.remove(count)
    num_tokens = sum(len(sample.token_ids) for o in outputs for sample in o.outputs)
    value = (len(outputs) if row.unit == "requests/s" else num_tokens) / seconds
    preemptions = sum(engine.scheduler.num_preemptions.values()) - preemptions
    print(
        f"{name:>15}: {seconds:7.2f} s {value:9.1f} {row.unit:<10} {value / row.peer:5.2f}x vLLM, "
        f"{steps} steps, device {100 * device / seconds:.0f}% busy, {preemptions} preemptions",
        flush=True,
    )
    return {"seconds": round(seconds, 3), "value": round(value, 1), "ratio": value / row.peer}


def run_all(engine: Engine, queries: list[Query]) -> tuple[list[RequestOutput], float]:
    client = LocalClient(engine)
    streams = [client.make_request(prompt, params) for prompt, params in queries]
    outputs: list[RequestOutput] = []
    began = time.perf_counter()
    for stream in streams:
        client.add_request(stream)
    while client.has_unfinished:
        outputs += client.step()
    return outputs, time.perf_counter() - began


def serve_at(engine: Engine, queries: list[Query], rate: float) -> list[RequestOutput]:
    """Send requests as a Poisson process of `rate` per second.

    A request's arrival time is that of the process, even if the engine takes it in later.
    """
    rng = random.Random(777)
    client = LocalClient(engine)
    streams = [client.make_request(prompt, params) for prompt, params in queries]
    due, arrivals = 0.0, []
    for _ in streams:
        due += rng.expovariate(rate)
        arrivals.append(due)
    outputs: list[RequestOutput] = []
    sent = 0

    def take_in() -> None:
        nonlocal sent
        while sent < len(streams) and arrivals[sent] <= engine.clock() - began:
            client.add_request(streams[sent])
            streams[sent].request.arrival_time = began + arrivals[sent]
            sent += 1

    engine.intake = take_in
    began = engine.clock()
    while sent < len(streams) or client.has_unfinished:
        take_in()
        if client.has_unfinished:
            outputs += client.step()
        else:
            time.sleep(max(0.0, arrivals[sent] - (engine.clock() - began)))
    engine.intake = None
    return outputs


def normalized_latency(output: RequestOutput) -> float:
    """Seconds from arrival to completion, per output token of the only sample."""
    return (output.finish_time - output.arrival_time) / len(output.outputs[0].token_ids)


def measure_online(engine: Engine, rate: int) -> dict[str, float]:
    """Latencies at one rate, in milliseconds, measured from the arrivals."""
    engine.kv.reset_prefix_cache()
    queries = trace("sharegpt", 500)(engine.model_config.vocab_size)
    outputs = serve_at(engine, queries, rate)
    latency = [normalized_latency(output) for output in outputs]
    first = [o.first_token_time - o.arrival_time for o in outputs if o.first_token_time]
    # The estimator of the percentiles in docs/performance.md.
    values = [
        1e3 * float(value)
        for series in (latency, first)
        for value in (np.mean(series), np.percentile(series, 99, method="weibull"))
    ]
    peer = ONLINE[rate]
    print(
        f"{rate:>4} requests/s: {values[0]:5.1f} ({values[1]:5.1f}) ms per token, first token "
        f"{values[2]:5.0f} ({values[3]:5.0f}) ms; "
        f"vLLM {peer[0]} ({peer[1]}), {peer[2]} ({peer[3]})",
        flush=True,
    )
    names = ("normalized_ms", "normalized_p99_ms", "first_token_ms", "first_token_p99_ms")
    return dict(zip(names, (round(value, 2) for value in values), strict=True))


if __name__ == "__main__":
    main()
