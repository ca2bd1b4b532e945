"""`octavo simulate`, `octavo plan` and `octavo calibrate`: capacity without the hardware."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from octavo.cli.options import integers
from octavo.cli.search_progress import search_progress
from octavo.cli.simulation_options import (
    MACHINE,
    OUTPUT,
    TARGET,
    WORKLOAD,
    Options,
    build_workload,
    make_simulation_config,
    make_target,
    make_workload_spec,
    simulation_options,
    workload_at,
)

if TYPE_CHECKING:
    from octavo.simulation.config import SimulationConfig
    from octavo.simulation.planning import Fleet, Refusal, Target
    from octavo.simulation.workloads import WorkloadSpec


@click.command()
@simulation_options(
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
    config = make_simulation_config(options, engine, options["num_gpus"])
    target = make_target(options)
    spec = make_workload_spec(options, config.seed, needs_rate=target is not None)
    if target is None:
        _simulate_once(config, spec, options)
    else:
        _search(config, spec, target, options)


@click.command()
@simulation_options(
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

    config, target = make_simulation_config(options, engine, 1), make_target(options)
    if target is None:
        raise click.UsageError("give --target-latency, --target-ttft or --target-tpot")
    if options["rate"] is None:
        raise click.UsageError("give the --rate that is to be served")
    spec = make_workload_spec(options, config.seed, needs_rate=True)

    found = fewest_gpus(
        config,
        workload_at(spec, config, options["skip_long"]),
        options["rate"],
        target,
        options["sizes"],
        options["max_gpus"],
        search_progress(),
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


def _simulate_once(config: SimulationConfig, spec: WorkloadSpec, options: Options) -> None:
    from tqdm import tqdm

    from octavo.simulation.report import simulation_text
    from octavo.simulation.run import simulate as run

    workload = build_workload(spec, config, options["skip_long"])
    total = len(workload.requests)
    with tqdm(total=total, unit="requests", disable=not sys.stderr.isatty(), leave=False) as bar:
        # update returns whether the bar was drawn; a watcher's True would end the simulation.
        result = run(config, workload, finished=lambda each, _: bar.update(len(each)) and False)
    result.settings = _settings(options)
    click.echo(json.dumps(result.to_values()) if options["as_json"] else simulation_text(result))
    if options["plot"]:
        from octavo.simulation.plots import plot_run

        plot_run(result, options["plot"])


def _search(config: SimulationConfig, spec: WorkloadSpec, target: Target, options: Options) -> None:
    from octavo.simulation.planning import highest_rate
    from octavo.simulation.report import highest_rate_text

    found = highest_rate(
        config,
        workload_at(spec, config, options["skip_long"]),
        target,
        spec.rate or 1.0,
        progress=search_progress(),
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
        from octavo.simulation.plots import plot_search

        plot_search(found, options["plot"])
    if not found.rate:
        raise click.exceptions.Exit(1)


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
