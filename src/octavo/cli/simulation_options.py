"""The options of `octavo simulate` and `octavo plan`, and what they stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from octavo.cli.options import engine_options

if TYPE_CHECKING:
    from octavo.simulation.config import SimulationConfig
    from octavo.simulation.planning import Target
    from octavo.simulation.workloads import Workload, WorkloadSpec

Command = TypeVar("Command", bound=Callable[..., Any])
Options = dict[str, Any]

DEFAULT_DURATION = 600.0
SOFTWARE = ("octavo", "paper-2023")

MACHINE = [
    click.option("--model", default="opt-13b", show_default=True, help="A name or a MODEL."),
    click.option("--gpu", default="a100-40gb", show_default=True, help="A name, or a .json file."),
    click.option(
        "--software",
        type=click.Choice(SOFTWARE),
        default="octavo",
        show_default=True,
        help="Overheads and efficiencies to assume without a calibration.",
    ),
    click.option(
        "--calibration",
        type=click.Path(dir_okay=False, path_type=Path),
        help="What `octavo calibrate` wrote for this model and device.",
    ),
]
WORKLOAD = [
    click.option(
        "--trace",
        default="sharegpt",
        show_default=True,
        help="Lengths, and arrivals if it has any: a name, or a file (.csv, .jsonl, or with .gz).",
    ),
    click.option("--rate", type=float, help="Requests a second, instead of the trace's arrivals."),
    click.option(
        "--duration",
        type=float,
        help=f"Seconds in which requests arrive.  [default: {DEFAULT_DURATION:g} with --rate, or "
        "the whole trace]",
    ),
    click.option("--burstiness", type=float, help="Of arrivals: 1 as Poisson, more is burstier."),
    click.option(
        "--n", type=click.IntRange(1), default=1, help="Samples per prompt.  [default: 1]"
    ),
    click.option("--beam-width", type=click.IntRange(1), help="Beam search with so many beams."),
    click.option(
        "--prefix-tokens",
        type=click.IntRange(0),
        default=0,
        help="A prefix that all prompts share.",
    ),
    click.option(
        "--hash-block-size",
        type=click.IntRange(1),
        default=512,
        show_default=True,
        help="Tokens behind one of a trace's hash_ids.",
    ),
    click.option("--skip-long", is_flag=True, help="Leave out requests that can never fit."),
]
TARGET = [
    click.option(
        "--target-latency", type=float, help="Mean seconds per output token, queue included."
    ),
    click.option(
        "--target-ttft", type=float, help="Seconds to the first token, of 99% of requests."
    ),
    click.option("--target-tpot", type=float, help="Seconds for each further token, of 99%."),
]
OUTPUT = [click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")]
ENGINE = (
    *("dtype", "max_model_len", "seed", "block_size", "num_blocks", "kv_cache_memory"),
    *("swap_space", "enable_prefix_caching", "memory_policy", "max_num_seqs"),
    *("max_num_batched_tokens", "policy", "aging_seconds", "preemption_mode"),
    *("enable_chunked_prefill", "max_passes", "watermark", "overlap"),
)


def simulation_options(*groups: list[Any]) -> Callable[[Command], Command]:
    """Adds groups of options; the command gets all of them in one dict `options`."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def collect(engine: Options, **options: Any) -> Any:
            return command(options, engine)

        collected: Any = engine_options(*ENGINE)(collect)
        for option in [each for group in reversed(groups) for each in reversed(group)]:
            collected = option(collected)
        return collected  # type: ignore[no-any-return]

    return decorate


def make_simulation_config(options: Options, engine: Options, num_gpus: int) -> SimulationConfig:
    from octavo.config import make_config
    from octavo.simulation.calibration import read_calibration
    from octavo.simulation.config import SimulationConfig
    from octavo.simulation.cost_model import PAPER_SOFTWARE, Coefficients
    from octavo.simulation.gpus import find_gpu

    made = make_config(options["model"], **engine)
    overlaps = options["software"] == "octavo" and options["gpu"] != "cpu"
    if overlaps:
        made = made.for_gpu(find_gpu(options["gpu"]).memory)
    config = SimulationConfig(
        made.model,
        options["gpu"],
        num_gpus,
        dtype=made.dtype,
        max_model_len=made.max_model_len,
        cache=made.cache,
        scheduler=made.scheduler,
        coefficients=PAPER_SOFTWARE if options["software"] == "paper-2023" else Coefficients(),
        overlap=overlaps if made.overlap is None else made.overlap,
        seed=made.seed,
    )
    if options["calibration"] is None:
        return config
    if options["software"] != "octavo":
        raise click.UsageError("--calibration brings its own numbers: leave out --software")
    return read_calibration(options["calibration"]).apply(config)


def make_workload_spec(options: Options, seed: int, needs_rate: bool) -> WorkloadSpec:
    from octavo.simulation.workloads import WorkloadSpec

    rate, duration = options["rate"], options["duration"]
    if needs_rate and rate is None:
        rate = 1.0
    if rate is not None and duration is None:
        duration = DEFAULT_DURATION
    return WorkloadSpec(
        options["trace"],
        rate,
        duration,
        seed,
        options["burstiness"],
        options["n"],
        options["beam_width"],
        options["prefix_tokens"],
        hash_block_size=options["hash_block_size"],
    )


def make_target(options: Options) -> Target | None:
    from octavo.simulation.planning import Target

    limits = [options[name] for name in ("target_latency", "target_ttft", "target_tpot")]
    return None if limits == [None, None, None] else Target(*limits)


def workload_at(
    spec: WorkloadSpec, config: SimulationConfig, skip_long: bool
) -> Callable[[float], Workload]:
    return lambda rate: build_workload(spec.at_rate(rate), config, skip_long)


def build_workload(spec: WorkloadSpec, config: SimulationConfig, skip_long: bool) -> Workload:
    from dataclasses import replace

    from octavo.errors import RequestTooLong
    from octavo.simulation.run import longest_sequence
    from octavo.simulation.workloads import build

    workload = build(spec)
    if not skip_long:
        return workload
    limit = longest_sequence(config)
    kept = tuple(request for request in workload.requests if request.num_tokens <= limit)
    if not kept:
        raise RequestTooLong("trace", f"no request has {limit} tokens or less")
    return replace(workload, requests=kept)
