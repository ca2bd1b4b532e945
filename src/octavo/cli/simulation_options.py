"""The options of `octavo simulate` and `octavo plan`, and the objects that they describe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from octavo.cli.options import engine_options, option_of, together
from octavo.config import make_config
from octavo.errors import RequestTooLong
from octavo.simulation.calibration import read_calibration
from octavo.simulation.config import SimulationConfig
from octavo.simulation.cost_model import PAPER_SOFTWARE, Coefficients
from octavo.simulation.gpus import find_gpu
from octavo.simulation.planning import WorkloadAt
from octavo.simulation.run import longest_sequence
from octavo.simulation.sources import read_source
from octavo.simulation.workloads import Workload, WorkloadSpec, build

Options = dict[str, Any]

DEFAULT_RATE = 1.0  # requests/s from which a search begins
DEFAULT_DURATION = 600.0
SOFTWARE = ("octavo", "paper-2023")

machine_option = option_of("machine")
workload_option = option_of("workload")
target_option = option_of("target")

simulated_engine_options = engine_options(
    *("dtype", "max_model_len", "seed", "block_size", "num_blocks", "kv_cache_memory"),
    *("kv_cache_dtype", "quantization", "weight_copies"),
    *("swap_space", "enable_prefix_caching", "memory_policy", "max_num_seqs"),
    *("max_num_batched_tokens", "policy", "aging_seconds", "preemption_mode"),
    *("enable_chunked_prefill", "max_passes", "watermark", "overlap"),
)
machine_options = together(
    machine_option("--model", default="opt-13b", show_default=True, help="A name or a MODEL."),
    machine_option(
        "--gpu", default="a100-40gb", show_default=True, help="A name, or a .json file."
    ),
    machine_option(
        "--software",
        type=click.Choice(SOFTWARE),
        default="octavo",
        show_default=True,
        help="Overheads and efficiencies to assume without a calibration.",
    ),
    machine_option(
        "--calibration",
        type=click.Path(dir_okay=False, path_type=Path),
        help="What `octavo calibrate` wrote for this model and device.",
    ),
    simulated_engine_options,
)
workload_options = together(
    workload_option(
        "--trace",
        default="sharegpt",
        show_default=True,
        help="Lengths, and arrivals if it has any: a name, or a file (.csv, .jsonl, or with .gz).",
    ),
    workload_option(
        "--rate", type=float, help="Requests per second, instead of the trace's arrivals."
    ),
    workload_option(
        "--duration",
        type=float,
        help=f"Seconds in which requests arrive.  [default: {DEFAULT_DURATION:g} with --rate, or "
        "the whole trace]",
    ),
    workload_option(
        "--burstiness",
        type=float,
        help="Burstiness of arrivals: 1 is that of a Poisson process, more is burstier.",
    ),
    workload_option("--n", type=click.IntRange(1), help="Samples per prompt.  [default: 1]"),
    workload_option(
        "--beam-width", type=click.IntRange(1), help="Beam search with this many beams."
    ),
    workload_option(
        "--prefix-tokens", type=click.IntRange(0), help="A prefix that all prompts share."
    ),
    workload_option(
        "--hash-block-size",
        type=click.IntRange(1),
        default=512,
        show_default=True,
        help="Tokens behind one of a trace's hash_ids.",
    ),
    click.option("--skip-long", is_flag=True, help="Leave out requests that can never fit."),
)
target_options = together(
    target_option(
        "--target-latency",
        "normalized_latency",
        type=float,
        help="Mean seconds per output token, queue included.",
    ),
    target_option(
        "--target-ttft",
        "time_to_first_token",
        type=float,
        help="Seconds to the first token, of 99% of requests.",
    ),
    target_option(
        "--target-tpot",
        "time_per_output_token",
        type=float,
        help="Seconds for each further token, of 99%.",
    ),
)


def make_simulation_config(machine: Options, engine: Options, num_gpus: int) -> SimulationConfig:
    made = make_config(machine["model"], **engine)
    overlaps = machine["software"] == "octavo" and machine["gpu"] != "cpu"
    if overlaps:
        made = made.for_gpu(find_gpu(machine["gpu"]).memory)
    config = SimulationConfig(
        made.model,
        machine["gpu"],
        num_gpus,
        dtype=made.dtype,
        quantization=made.quantization,
        weight_copies=made.weight_copies,
        max_model_len=made.max_model_len,
        cache=made.cache,
        scheduler=made.scheduler,
        coefficients=PAPER_SOFTWARE if machine["software"] == "paper-2023" else Coefficients(),
        overlap=overlaps if made.overlap is None else made.overlap,
        seed=made.seed,
    )
    if "calibration" not in machine:
        return config
    if machine["software"] != "octavo":
        raise click.UsageError("--calibration brings its own numbers: leave out --software")
    return read_calibration(machine["calibration"]).apply(config)


def make_workload_spec(workload: Options, seed: int, needs_rate: bool) -> WorkloadSpec:
    given = dict(workload)
    if needs_rate:
        given.setdefault("rate", DEFAULT_RATE)
    if "rate" in given:
        given.setdefault("duration", DEFAULT_DURATION)
    return WorkloadSpec(given.pop("trace"), **given, seed=seed)


def workload_at(spec: WorkloadSpec, skip_long: bool) -> WorkloadAt:
    """Makes the workload of each machine and rate; the trace is read once."""
    pairs = read_source(spec.source)

    def made(config: SimulationConfig, rate: float) -> Workload:
        workload = build(spec.at_rate(rate), pairs)
        return _without_long(workload, config) if skip_long else workload

    return made


def build_workload(spec: WorkloadSpec, config: SimulationConfig, skip_long: bool) -> Workload:
    workload = build(spec)
    return _without_long(workload, config) if skip_long else workload


def _without_long(workload: Workload, config: SimulationConfig) -> Workload:
    """Without requests that can never fit on that machine."""
    limit = longest_sequence(config)
    kept = tuple(request for request in workload.requests if request.num_tokens <= limit)
    if not kept:
        raise RequestTooLong("trace", f"no request has {limit} tokens or less")
    return replace(workload, requests=kept)
