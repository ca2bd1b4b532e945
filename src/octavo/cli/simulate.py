"""`octavo simulate`, `octavo plan` and `octavo calibrate`: capacity without the hardware."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from octavo.cli.options import engine_options, integers

if TYPE_CHECKING:
    from octavo.evaluation.workloads import Workload, WorkloadSpec
    from octavo.simulation.config import SimulationConfig
    from octavo.simulation.planning import Fleet, Probe, Refusal, Target

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
ENGINE = tuple(
    """
    dtype max_model_len seed block_size num_blocks kv_cache_memory swap_space enable_prefix_caching
    memory_policy max_num_seqs max_num_batched_tokens policy aging_seconds preemption_mode
    enable_chunked_prefill max_passes watermark
    """.split()
)


def _options(*groups: list[Any]) -> Callable[[Command], Command]:
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


@click.command()
@_options(
    MACHINE,
    [click.option("--num-gpus", type=click.IntRange(1), default=1, help="Tensor parallel.")],
    WORKLOAD,
    TARGET,
    [click.option("--plot", type=click.Path(path_type=Path), help="Write PLOT.png and PLOT.svg.")],
    OUTPUT,
)
def simulate(options: Options, engine: Options) -> None:
    """Run the real scheduler and KV cache manager on a virtual clock.

    A cost model stands for the device. With a target, the highest rate that meets it is searched,
    from --rate on.
    """
    config = _config(options, engine, options["num_gpus"])
    target = _target(options)
    spec = _workload_spec(options, config.seed, needs_rate=target is not None)
    if target is None:
        _simulate_once(config, spec, options)
    else:
        _search(config, spec, target, options)


@click.command()
@_options(
    MACHINE,
    [
        click.option(
            "--sizes",
            type=integers,
            default="1,2,4,8",
            show_default=True,
            help="GPUs that one engine may have.",
        ),
        click.option("--max-gpus", type=click.IntRange(1), default=64, show_default=True),
    ],
    WORKLOAD,
    TARGET,
    OUTPUT,
)
def plan(options: Options, engine: Options) -> None:
    """Find the fewest GPUs that serve --rate requests a second within a target.

    Engines of each size, tensor parallel, share the requests evenly.
    """
    from octavo.simulation.planning import fewest_gpus
    from octavo.simulation.report import fewest, fleets_text

    config, target = _config(options, engine, 1), _target(options)
    if target is None:
        raise click.UsageError("give --target-latency, --target-ttft or --target-tpot")
    if options["rate"] is None:
        raise click.UsageError("give the --rate that is to be served")
    spec = _workload_spec(options, config.seed, needs_rate=True)

    def show(machine: SimulationConfig, probe: Probe) -> None:
        _show_probe(probe, f"{machine.num_gpus} x {machine.gpu}")

    found = fewest_gpus(
        config,
        _workload_at(spec, config, options["skip_long"]),
        options["rate"],
        target,
        options["sizes"],
        options["max_gpus"],
        show,
    )
    best = fewest(found)
    if options["as_json"]:
        values = [_choice_values(choice) for choice in found]
        click.echo(json.dumps({"choices": values, "num_gpus": best and best.num_gpus}))
    else:
        click.echo(fleets_text(found))
    if best is None:
        raise click.exceptions.Exit(1)


@click.command()
@click.argument("steps", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the calibration is written, for `octavo simulate --calibration`.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def calibrate(steps: Path, out: Path | None, as_json: bool) -> None:
    """Fit the cost model to measured STEPS, and print its error on steps that it has not seen.

    STEPS is a file that a StepRecorder has written, as benchmarks do.
    """
    from octavo.simulation.calibration import calibrate as fit
    from octavo.simulation.report import calibration_text
    from octavo.simulation.step_records import read_step_records

    calibration = fit(*read_step_records(steps))
    if out is not None:
        calibration.write(out)
    values = asdict(calibration)
    click.echo(json.dumps(values) if as_json else calibration_text(calibration))


# ---------------------------------------------------------------------------- what is asked for


def _config(options: Options, engine: Options, num_gpus: int) -> SimulationConfig:
    from octavo.config import make_config
    from octavo.simulation.calibration import read_calibration
    from octavo.simulation.config import SimulationConfig
    from octavo.simulation.cost_model import PAPER_2023, Coefficients

    made = make_config(options["model"], **engine)
    config = SimulationConfig(
        made.model,
        options["gpu"],
        num_gpus,
        dtype=made.dtype,
        max_model_len=made.max_model_len,
        cache=made.cache,
        scheduler=made.scheduler,
        coefficients=PAPER_2023 if options["software"] == "paper-2023" else Coefficients(),
        seed=made.seed,
    )
    if options["calibration"] is None:
        return config
    if options["software"] != "octavo":
        raise click.UsageError("--calibration brings its own numbers: leave out --software")
    return read_calibration(options["calibration"]).apply(config)


def _workload_spec(options: Options, seed: int, needs_rate: bool) -> WorkloadSpec:
    from octavo.evaluation.workloads import WorkloadSpec

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


def _target(options: Options) -> Target | None:
    from octavo.simulation.planning import Target

    limits = [options[name] for name in ("target_latency", "target_ttft", "target_tpot")]
    return None if limits == [None, None, None] else Target(*limits)


def _workload_at(
    spec: WorkloadSpec, config: SimulationConfig, skip_long: bool
) -> Callable[[float], Workload]:
    return lambda rate: _build(spec.at_rate(rate), config, skip_long)


def _build(spec: WorkloadSpec, config: SimulationConfig, skip_long: bool) -> Workload:
    from dataclasses import replace

    from octavo.errors import RequestTooLong
    from octavo.evaluation.workloads import build
    from octavo.simulation.run import longest_sequence

    workload = build(spec)
    if not skip_long:
        return workload
    limit = longest_sequence(config)
    kept = tuple(request for request in workload.requests if request.num_tokens <= limit)
    if not kept:
        raise RequestTooLong("trace", f"no request has {limit} tokens or less")
    return replace(workload, requests=kept)


# ---------------------------------------------------------------------------- runs


def _simulate_once(config: SimulationConfig, spec: WorkloadSpec, options: Options) -> None:
    from tqdm import tqdm

    from octavo.simulation.report import simulation_text
    from octavo.simulation.run import simulate as run

    workload = _build(spec, config, options["skip_long"])
    total = len(workload.requests)
    with tqdm(total=total, unit="requests", disable=not sys.stderr.isatty(), leave=False) as bar:
        # update returns whether the bar was drawn; a watcher's True would end the simulation.
        result = run(config, workload, finished=lambda each: bar.update(len(each)) and False)
    result.settings = _settings(options)
    click.echo(json.dumps(result.to_values()) if options["as_json"] else simulation_text(result))
    if options["plot"]:
        from octavo.evaluation.run_plots import plot_run

        plot_run(result, options["plot"])


def _search(config: SimulationConfig, spec: WorkloadSpec, target: Target, options: Options) -> None:
    from octavo.simulation.planning import highest_rate
    from octavo.simulation.report import highest_rate_text

    found = highest_rate(
        config,
        _workload_at(spec, config, options["skip_long"]),
        target,
        spec.rate or 1.0,
        probed=lambda probe: _show_probe(probe, ""),
    )
    if options["as_json"]:
        probes = [
            {"rate": each.rate, "is_met": each.is_met}
            | ({"result": each.result.to_values(0)} if each.is_met else {})
            for each in found.probes
        ]
        values = {"settings": _settings(options), "rate": found.rate, "probes": probes}
        click.echo(json.dumps(values))
    else:
        click.echo(highest_rate_text(found))
    if options["plot"]:
        from octavo.evaluation.run_plots import plot_search

        plot_search(found, options["plot"])
    if not found.rate:
        raise click.exceptions.Exit(1)


def _show_probe(probe: Probe, machine: str) -> None:
    """On stderr, while a search runs."""
    from octavo.simulation.report import probe_text

    if sys.stderr.isatty():
        click.echo(f"{machine} {probe_text(probe)}".strip(), err=True)


def _choice_values(choice: Fleet | Refusal) -> Options:
    from octavo.simulation.planning import Fleet

    values: Options = {"gpus_per_engine": choice.config.num_gpus}
    if isinstance(choice, Fleet):
        values |= {"num_engines": choice.num_engines, "num_gpus": choice.num_gpus}
        return values | {"result": choice.result.to_values(0)}
    return values | {"refused": choice.reason}


def _settings(options: Options) -> Options:
    """What was asked for, as JSON can hold it."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        if name != "as_json"
    }
