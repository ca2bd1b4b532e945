"""The time of a decode step at context 1,024 (--context), compared with the roofline.

The roofline is the bytes of weights, as they are stored, and KV divided by the copy bandwidth of
all GPUs; of mixtures of experts, those of the experts that were hit, which are counted. The whole
engine is timed: scheduling, the work of the device, and returning the tokens to the host.

The decoder of a model with an encoder starts with one token, and reads inputs of 512. The steps
that run the encoder are a row of their own, in TFLOP/s of its projections. Without a GPU there is
no roofline: --models tiny-t5 shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any, get_args

import step_profile
import torch
from gpu_harness import WARM_UP, decoding, make_engine, peak_rates, report

from octavo.config import KernelTuning, KVCacheDType, ModelImpl, QuantizationName
from octavo.core.scheduler import Progress
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.executor import sharded
from octavo.executor.launching import LocalLauncher
from octavo.executor.ranks import RankGroup
from octavo.layers.config import ExpertsConfig
from octavo.models.config import ModelConfig
from octavo.parallel import Shard

CONTEXT = 1024
DTYPE_BYTES = 2
ENCODER_INPUT = 512
MAX_TOKENS = 400  # that a sequence may draw
STEPS = 48
BATCHES = {
    "llama-3-8b": (1, 8, 64, 256),
    "opt-13b": (1, 8, 64),
    "qwen3-0.6b": (1, 8, 64, 256),
    "llama-3-70b": (1, 64),
    "gemma-3-4b": (1, 64, 256),
    "gemma-3-12b": (1, 64, 256),
    "t5-3b": (1, 64, 256),
    "tiny-t5": (1, 4),
    "qwen3-30b-a3b": (1, 8, 64, 256),
    "gpt-oss-20b": (1, 8, 64, 256),
    "gpt-oss-20b-mxfp4": (1, 8, 64, 256),
}
# With random weights, greedy sequences end up in loops, and rows of a batch in the same ones: then
# they take the same experts.
TEMPERATURES = {
    "qwen3-0.6b": 0.6,
    "qwen3-30b-a3b": 1.0,
    "gpt-oss-20b": 1.0,
    "gpt-oss-20b-mxfp4": 1.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["llama-3-8b", "opt-13b", "qwen3-0.6b"])
    parser.add_argument(
        "--batches", nargs="*", type=int, help="instead of the default ones of the model"
    )
    parser.add_argument(
        "--profile", metavar="FILE", help="write a table of a step's kernels to FILE.MODEL.BATCH"
    )
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--no-weight-copies", action="store_true", help="no copies of weights")
    parser.add_argument(
        "--model-impl",
        nargs="*",
        choices=get_args(ModelImpl),
        default=["auto"],
        help="what computes the model; several are measured one after the other",
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDType), default="auto")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a sequence")
    parser.add_argument(
        "--quantization",
        nargs="*",
        choices=["none", *get_args(QuantizationName)],
        default=["none"],
        help="how projections are quantized; several are measured one after the other",
    )
    parser.add_argument(
        "--params",
        nargs="*",
        type=json.loads,
        default=[{}],
        metavar="JSON",
        help="SamplingParams of all sequences; several are measured one after the other",
    )
    parser.add_argument("--tune-kernels", choices=get_args(KernelTuning), default="auto")
    arguments = parser.parse_args()
    if arguments.profile:
        os.environ[step_profile.REQUEST] = arguments.profile
        launcher = LocalLauncher((sys.executable, step_profile.__file__))
        sharded.RankGroup = lambda config, model, _: RankGroup(config, model, launcher)  # type: ignore
    card = peak_rates() if torch.cuda.is_available() else {}
    size = arguments.tensor_parallel_size
    bandwidth = 1e12 * card.get("copy_tb_s", math.inf) * size
    results: dict[str, Any] = {}
    for model, model_impl, quantization in product(
        arguments.models, arguments.model_impl, arguments.quantization
    ):
        engine = make_engine(
            model,
            quantization=None if quantization == "none" else quantization,
            model_impl=model_impl,
            max_num_seqs=max(arguments.batches or BATCHES[model]),
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            overlap=not arguments.no_overlap,
            weight_copies=not arguments.no_weight_copies,
            swap_space=0,
            tensor_parallel_size=size,
            kv_cache_dtype=arguments.kv_cache_dtype,
            tune_kernels=arguments.tune_kernels,
            max_model_len=max(2048, arguments.context + MAX_TOKENS),
        )
        for batch, params in product(arguments.batches or BATCHES[model], arguments.params):
            walls, device, encoding, num_hit = step_times(
                engine,
                batch,
                {"temperature": TEMPERATURES.get(model, 0.0), **params},
                arguments.profile and f"{arguments.profile}.{model}",
                arguments.context,
            )
            wall = statistics.fmean(walls)
            hit, expected = experts_per_layer(engine, batch, num_hit)
            num_bytes = weight_bytes(engine, batch, hit)
            num_bytes += batch * kv_bytes_read(engine, arguments.context)
            share = num_bytes / bandwidth / wall
            details = [each for each in (model_impl, quantization) if each not in ("auto", "none")]
            details += [f"{name} {value}" for name, value in params.items()]
            name = ", ".join([model, *details])
            if encoding:
                results[f"{name}@{batch}, encoder"] = encoder_row(engine, model, batch, encoding)
            results[f"{name}@{batch}"] = {
                "ms": round(1e3 * wall, 3),
                "median_ms": round(1e3 * statistics.median(walls), 3),
                "slowest_ms": round(1e3 * max(walls), 3),
                "device_ms": round(1e3 * device, 3),
                "roofline_share": round(share, 3),
            }
            if expected:
                counts = {"experts_hit": round(hit, 1), "experts_expected": round(expected, 1)}
                results[f"{name}@{batch}"] |= counts
                print(f"{'':>12} experts of a layer: {hit:.1f} hit, {expected:.1f} expected")
            print(
                f"{name:>12} batch {batch:>4}: {1e3 * wall:7.3f} ms per step (median "
                f"{1e3 * statistics.median(walls):.3f}, slowest {1e3 * max(walls):.3f}), device "
                f"{1e3 * device:7.3f} ms, {100 * share:5.1f}% of the roofline",
                flush=True,
            )
        engine.executor.shutdown()
    facts = {"context": arguments.context, "kv_cache_dtype": arguments.kv_cache_dtype}
    report("decode_step", **card, **facts, gpus=size, steps=results)


def first_context(engine: Engine, context: int) -> int:
    """Tokens of a sequence before the warm-up; at the middle of the steps there are `context`, or
    in a decoder that reads an encoder few."""
    return 1 if engine.model_config.encoder else context - WARM_UP - STEPS // 2


def experts_per_layer(engine: Engine, batch: int, num_hit: float) -> tuple[float, float]:
    """Of layers with experts, how many are hit in a step, as counted and as expected of choices
    that are evenly spread; num_hit: of all layers together."""
    mixtures = engine.model_config.mixtures()
    num_layers = sum(mixtures.values())
    if not num_layers:
        return 0.0, 0.0
    expected = sum(count * each.expected_distinct(batch) for each, count in mixtures.items())
    return num_hit / num_layers, expected / num_layers


def weight_bytes(engine: Engine, batch: int, hit: float) -> float:
    """Bytes of weights that a step of so many sequences without encoder inputs reads, with so many
    experts of a layer hit."""
    model = engine.model_config
    dense, experts = model.read_bytes(DTYPE_BYTES)
    num_bytes: float = dense - DTYPE_BYTES * model.num_encoding_parameters()
    num_ranks = engine.executor.capacity.num_ranks
    num_bytes -= num_ranks * saved_bytes(model.sharded(Shard(0, num_ranks)), batch, hit)
    if not experts:
        return num_bytes
    mixtures = model.mixtures()
    num_experts = sum(count * each.num_experts for each, count in mixtures.items())
    return num_bytes + experts * hit * sum(mixtures.values()) / num_experts


def saved_bytes(shard: ModelConfig, batch: int, hit: float) -> float:
    """How many bytes fewer that is because of copies in 12 bits."""
    saved = float(shard.head.copy_saves(batch))
    for layer in shard.layers:
        saved += layer.copy_saves(batch)
        experts = layer.mlp
        if isinstance(experts, ExpertsConfig) and batch in experts.copied_tokens:
            saved += experts.copy_saves_of_all * hit / experts.routing.num_experts
    return saved


def kv_bytes_read(engine: Engine, context: int) -> int:
    """Bytes of K and V that one sequence's step reads in all layers."""
    capacity, block_size = engine.executor.capacity, engine.config.cache.block_size
    element_bytes = capacity.block_bytes // (block_size * capacity.layout.token_size)
    context = first_context(engine, context) + WARM_UP + STEPS // 2
    num_elements = 0
    for layer in engine.model_config.layers:
        own, cross = layer.attention, layer.cross_attention
        num_elements += min(context, own.window or context) * own.num_kv_heads * own.head_dim
        if cross is not None:
            num_elements += ENCODER_INPUT * cross.num_kv_heads * cross.head_dim
    return 2 * element_bytes * num_elements


def encoder_row(engine: Engine, model: str, batch: int, seconds: list[float]) -> dict[str, float]:
    """What is reported of the steps that ran the encoder."""
    num_tokens = batch * ENCODER_INPUT
    flops = 2 * engine.model_config.num_encoding_parameters() * num_tokens
    rate = flops / sum(seconds) / 1e12
    print(
        f"{model:>12} batch {batch:>4}: {1e3 * sum(seconds):7.3f} ms of the device for encoder "
        f"inputs of {num_tokens:,} tokens in {len(seconds)} steps, {rate:.1f} TFLOP/s",
        flush=True,
    )
    return {"ms": round(1e3 * sum(seconds), 3), "steps": len(seconds), "tflop_s": round(rate, 2)}


def step_times(
    engine: Engine, batch: int, params: dict[str, Any], profile: str | None, context: int
) -> tuple[list[float], float, list[float], float]:
    """Wall-clock seconds of each step; mean seconds of the device's work per step; seconds of the
    device's work in each step that ran an encoder; and how many experts a step hits in all layers.
    """
    length = ENCODER_INPUT if engine.model_config.encoder else first_context(engine, context)
    encoding: list[float] = []
    device: list[float] = []
    hit: list[int] = []

    def note_encoder(plan: StepPlan, result: StepResult, progress: object) -> None:
        if plan.encoded:
            encoding.append(result.compute_seconds)

    def observe(plan: StepPlan, result: StepResult, progress: Progress) -> None:
        device.append(result.compute_seconds)
        hit.append(result.num_hit_experts)

    engine.observers.append(note_encoder)
    with decoding(engine, [length] * batch, MAX_TOKENS, **params) as client:
        engine.observers[:] = [observe]
        moments = [time.perf_counter()]
        for _ in range(STEPS):
            client.step()
            moments.append(time.perf_counter())
        engine.observers.clear()
        if profile:
            write_profile(engine, f"{profile}.{batch}")
    num_hit = (hit[-1] - hit[0]) / (len(hit) - 1)
    return [b - a for a, b in pairwise(moments)], statistics.fmean(device), encoding, num_hit


def write_profile(engine: Engine, path: str) -> None:
    """Write the device time of a decode step by kernel, and print it by kind."""
    if engine.config.tensor_parallel_size > 1:
        kinds = step_profile.request(path, engine.step)
    else:
        with step_profile.profile() as profiler:
            for _ in range(step_profile.STEPS):
                engine.step()
        kinds, table = step_profile.summary(profiler, step_profile.STEPS)
        Path(path).write_text(table)
    print(f"             microseconds: {step_profile.describe(kinds)}", flush=True)


if __name__ == "__main__":
    main()
