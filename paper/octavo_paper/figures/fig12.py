"""Figure 12: normalized latency over the request rate, basic sampling."""

from __future__ import annotations

from pathlib import Path

from octavo.simulation.drawing import canvas
from octavo.simulation.workloads import WorkloadSpec
from octavo_paper.drawing import SHORT_NAMES, SOURCE_NAMES, legend_below, paper_key
from octavo_paper.figures.curves import Panel, order_note
from octavo_paper.jobs import Job, Results
from octavo_paper.paper_values import (
    FASTER_TRANSFORMER_BATCH,
    FIGURE_12,
    FIGURE_12_POINTS,
    FIGURE_12_THRESHOLDS,
    ORCAS,
)
from octavo_paper.report import Report, Row, Table
from octavo_paper.scale import Scale
from octavo_paper.servers import MAX_REQUESTS
from octavo_paper.simulations import Scenario, Sweep

NAME = "fig12"
TITLE = "Figure 12: basic sampling, latency over the request rate"
MODELS = {"opt-13b": "OPT-13B", "opt-66b": "OPT-66B", "opt-175b": "OPT-175B"}


def panels(scale: Scale) -> list[Panel]:
    found = []
    for (model, source), rates in FIGURE_12.items():
        sustained = {system: pair[1] for system, pair in rates.items()}
        sweeps = {}
        for system, rate in sustained.items():
            limit = MAX_REQUESTS
            if system == "fastertransformer":
                limit = FASTER_TRANSFORMER_BATCH[model, source]
            workload = WorkloadSpec(source, rate, scale.trace_seconds(source, model))
            scenario = Scenario(model, system, workload, batch_limit=limit)
            sweeps[system] = Sweep(scenario, rate or 1.0, scale.resolution)
        found.append(
            Panel(
                f"{MODELS[model]}, {SOURCE_NAMES[source]}",
                sweeps,
                sustained,
                FIGURE_12_POINTS.get((model, source), {}),
            )
        )
    return found


def jobs(scale: Scale) -> list[Job]:
    return [sweep for panel in panels(scale) for sweep in panel.sweeps.values()]


def make(results: Results, scale: Scale, folder: Path) -> Report:
    shown = panels(scale)
    with canvas(folder, NAME, rows=2, columns=3) as (figure, grid):
        for axes, panel in zip(grid, shown, strict=True):
            panel.draw(axes, results)
        for axes in (grid[0], grid[3]):
            axes.set_ylabel("normalized latency, s/token")
        paper_key(grid[0])
        legend_below(figure, grid[0], 6)
    ratios = [row for panel in shown for row in panel.ratio_rows(results, ORCAS)]
    rates = [row for panel in shown for row in panel.rate_rows(results)]
    earlier = [
        Row(f"{panel.title}, {SHORT_NAMES[system]}", panel.sustained(results, system, 0.2), pair[0])
        for panel, systems in zip(shown, FIGURE_12.values(), strict=True)
        for system, pair in systems.items()
    ]
    return Report(
        NAME,
        TITLE,
        "Simulated: the paper's models and servers, Poisson arrivals.",
        [
            Table("Rate sustained by paged memory over that of others", ratios),
            Table(f"Rate at {FIGURE_12_THRESHOLDS[1]} s/token, requests/s", rates),
            Table(f"Rate at {FIGURE_12_THRESHOLDS[0]} s/token, requests/s", earlier),
        ],
        [NAME],
        [
            order_note(shown, results),
            "The cost model was fitted to these rates, see above. What the ratios test is whether "
            "one machine, with the batches that the policies hold, explains them all.",
            "What is left does not follow from work: the rates imply steps of 86 and 95 ms for "
            "OPT-175B with 37 and 52 requests of ShareGPT, and of 93 ms with 29, where the model "
            "says 96, 106 and 91; and 71 ms for OPT-66B with 26 requests of Alpaca, where it says "
            "63. Systems that serve few requests a second need long traces: OPT-66B on ShareGPT "
            "has an hour, as in the paper; in a third of it, the few long requests that happen to "
            "be there move the ratios by a quarter.",
            "FasterTransformer sustains less than in the paper: it is C++ and has less overhead in "
            "a step (the figure shows 24 ms a token under light load against 30 for the others), "
            "which one cost model for all does not know. Its order among the systems is the same.",
            "The paper's rates are read from the figure's lines. Against the text: 1.7 to 2.7 "
            "times the rate of Orca (Oracle) holds for OPT-13B and OPT-66B in the figure, while "
            "OPT-175B reads 1.5; 2.7 to 8 times that of Orca (Max) reads 2.6 to 4.6.",
        ],
    )
