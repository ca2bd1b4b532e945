"""Plots of simulations: a run over time, and a search for the highest rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.bench.report import PARTS
from octavo.errors import ConfigError
from octavo.simulation.drawing import BLACK, BLUE, GREEN, ORANGE, RED, canvas
from octavo.simulation.planning import HighestRate
from octavo.simulation.result import SimulationResult, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_POINTS = 1000
PART_COLOURS = dict(zip(PARTS, (BLUE, ORANGE, RED, "#dddddd"), strict=True))


def plot_run(result: SimulationResult, path: Path) -> None:
    """KV slots and queues over time, and how latencies are distributed.

    Raises ConfigError if there is no such directory, OctavoError without matplotlib.
    """
    with canvas(_directory(path), path.name, columns=3, panel=(4.0, 2.9)) as (_, axes):
        _plot_slots(axes[0], result)
        _plot_queues(axes[1], result)
        _plot_latencies(axes[2], result)


def plot_search(found: HighestRate, path: Path) -> None:
    """Latency over the rate; crosses are rates that miss the target."""
    met = [probe for probe in found.probes if probe.is_met]
    missed = [probe.rate for probe in found.probes if not probe.is_met]
    with canvas(_directory(path), path.name) as (_, [axes]):
        latencies = [probe.result.normalized_latency for probe in met]
        axes.plot([probe.rate for probe in met], latencies, "o-", color=BLUE, label="meets it")
        height = max(latencies, default=1.0)
        axes.plot(missed, [height] * len(missed), "x", color=RED, label="misses the target")
        axes.set_xlabel("requests/s")
        axes.set_ylabel("s/token")
        axes.set_ylim(bottom=0)
        axes.legend()


def _directory(path: Path) -> Path:
    if not path.parent.is_dir():
        raise ConfigError("plot", f"there is no directory {path.parent}")
    return path.parent


def _plot_slots(axes: Axes, result: SimulationResult) -> None:
    steps = thinned(result.steps, NUM_POINTS)
    times = [step.start for step in steps]
    parts = [[getattr(step.memory.slots, name) for step in steps] for name in PARTS]
    axes.stackplot(times, parts, labels=PARTS.values(), colors=list(PART_COLOURS.values()))
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("KV slots")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def _plot_queues(axes: Axes, result: SimulationResult) -> None:
    steps = thinned(result.steps, NUM_POINTS)
    times = [step.start for step in steps]
    axes.plot(times, [step.memory.num_requests for step in steps], color=BLUE, label="running")
    axes.plot(times, [step.num_waiting for step in steps], color=ORANGE, label="waiting")
    axes.plot(times, [step.num_swapped for step in steps], color=GREEN, label="swapped")
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("requests")
    axes.legend()


def _plot_latencies(axes: Axes, result: SimulationResult) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    values = {
        "to the first token, s": [each.time_to_first_token for each in result.requests],
        "normalized, s/token": [each.normalized_latency for each in result.requests],
    }
    for (label, numbers), colour in zip(values.items(), (BLACK, BLUE), strict=True):
        ordered = sorted(numbers)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        axes.plot(ordered, shares, color=colour, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("latency")
    axes.set_ylabel("share of requests")
    axes.legend()
