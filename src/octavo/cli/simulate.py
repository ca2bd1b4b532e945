"""`octavo simulate`, `octavo plan` and `octavo calibrate`: capacity without the hardware."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from octavo.bench.tables import show
from octavo.cli.options import integers
from octavo.cli.simulation_options import (
    DEFAULT_RATE,
    Options,
    build_workload,
    machine_options,
    make_simulation_config,
    make_workload_spec,
    target_options,
    workload_at,
    workload_options,
)
from octavo.simulation.calibration import calibrate as fit
from octavo.simulation.config import SimulationConfig
from octavo.simulation.planning import (
    Fleet,
    HighestRate,
    Probe,
    Refusal,
    SearchProgress,
    Target,
    fewest_gpus,
    highest_rate,
)
from octavo.simulation.plots import plot_run, plot_search
from octavo.simulation.report import (
    calibration_tables,
    fewest,
    fleets_table,
    highest_rate_text,
    probe_text,
    simulation_table,
)
from octavo.simulation.result import SimulationResult
from octavo.simulation.run import simulate as run
from octavo.simulation.step_records import read_step_records
from octavo.simulation.workloads import Workload


@click.command()
@machine_options
@click.option(
    "--num-gpus", type=click.IntRange(1), default=1, show_default=True, help="Tensor parallel."
)
@workload_options
@target_options
@click.option("--plot", type=click.Path(path_type=Path), help="Write PLOT.png and PLOT.svg.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def simulate(
    machine: Options,
    engine: Options,
    num_gpus: int,
    workload: Options,
    skip_long: bool,
    target: Options,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Run the real scheduler and KV cache manager on a virtual clock.

    A cost model stands for the device. With a target, the highest rate that meets it is searched,
    from --rate on.
    """
    config = make_simulation_config(machine, engine, num_gpus)
    settings = _plain({**machine, "num_gpus": num_gpus, **workload, **target, **engine})
    spec = make_workload_spec(workload, config.seed, needs_rate=bool(target))
    if not target:
        result = _run(config, build_workload(spec, config, skip_long))
        result.settings = settings
        _show_run(result, as_json)
        if plot is not None:
            plot_run(result, plot)
        return
    found = highest_rate(
        config,
        workload_at(spec, skip_long),
        Target(**target),
        spec.rate or DEFAULT_RATE,
        progress=ShownProgress(),
    )
    _show_search(found, settings, as_json)
    if plot is not None:
        plot_search(found, plot)
    if not found.rate:
        raise click.exceptions.Exit(1)


@click.command()
@machine_options
@click.option(
    "--sizes",
    type=integers,
    default="1,2,4,8",
    show_default=True,
    help="GPUs that one engine may have.",
)
@click.option("--max-gpus", type=click.IntRange(1), default=64, show_default=True)
@workload_options
@target_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def plan(
    machine: Options,
    engine: Options,
    sizes: tuple[int, ...],
    max_gpus: int,
    workload: Options,
    skip_long: bool,
    target: Options,
    as_json: bool,
) -> None:
    """Find the fewest GPUs that serve --rate requests per second within a target.

    Engines of each size, tensor parallel, share the requests evenly.
    """
    config = make_simulation_config(machine, engine, 1)
    if not target:
        raise click.UsageError("give --target-latency, --target-ttft or --target-tpot")
    if "rate" not in workload:
        raise click.UsageError("give the --rate that is to be served")
    spec = make_workload_spec(workload, config.seed, needs_rate=True)

    found = fewest_gpus(
        config,
        workload_at(spec, skip_long),
        workload["rate"],
        Target(**target),
        sizes,
        max_gpus,
        ShownProgress(),
    )
    best = fewest(found)
    if as_json:
        values = [_choice_values(choice) for choice in found]
        click.echo(json.dumps({"choices": values, "num_gpus": best and best.num_gpus}))
    else:
        show(fleets_table(found))
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
    calibration = fit(*read_step_records(steps))
    if out is not None:
        calibration.write(out)
    if as_json:
        click.echo(json.dumps(asdict(calibration)))
    else:
        show(*calibration_tables(calibration))


class ShownProgress(SearchProgress):
    """Shows a search on stderr: a line for each simulation, and a bar on a terminal."""

    def __init__(self) -> None:
        self._machine = ""
        self._bar: Any = None

    def begin(self, config: SimulationConfig, rate: float, num_requests: int) -> None:
        self._machine = f"{config.num_gpus} x {config.gpu}"
        is_terminal = sys.stderr.isatty()
        if not is_terminal:
            click.echo(
                f"{self._machine} {rate:8.3f} requests/s: simulating {num_requests} requests",
                err=True,
            )
        self._bar = tqdm(
            total=num_requests,
            desc=f"{self._machine} {rate:8.3f} requests/s",
            unit="requests",
            disable=not is_terminal,
            leave=False,
        )

    def advance(self, num_requests: int) -> None:
        self._bar.update(num_requests)

    def end(self, probe: Probe) -> None:
        self._bar.close()
        click.echo(f"{self._machine} {probe_text(probe)}", err=True)


def _run(config: SimulationConfig, workload: Workload) -> SimulationResult:
    total = len(workload.requests)
    with tqdm(total=total, unit="requests", disable=not sys.stderr.isatty(), leave=False) as bar:
        # update returns whether the bar was drawn; a watcher's True would end the simulation.
        return run(config, workload, finished=lambda each, _: bar.update(len(each)) and False)


def _show_run(result: SimulationResult, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result.to_values()))
    else:
        show(simulation_table(result))


def _show_search(found: HighestRate, settings: Options, as_json: bool) -> None:
    if not as_json:
        click.echo(highest_rate_text(found))
        return
    probes = [
        {"rate": each.rate, "is_met": each.is_met}
        | ({"result": each.result.to_values(0)} if each.is_met else {})
        for each in found.probes
    ]
    click.echo(json.dumps({"settings": settings, "rate": found.rate, "probes": probes}))


def _choice_values(choice: Fleet | Refusal) -> Options:
    values: Options = {"gpus_per_engine": choice.config.num_gpus}
    if isinstance(choice, Fleet):
        values |= {"num_engines": choice.num_engines, "num_gpus": choice.num_gpus}
        return values | {"result": choice.result.to_values(0)}
    return values | {"refused": choice.reason}


def _plain(options: Options) -> Options:
    """Options as JSON can hold them."""
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in options.items()
    }
