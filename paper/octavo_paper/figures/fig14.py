"""Figure 14: parallel sampling and beam search, latency over the request rate."""

from __future__ import annotations

from pathlib import Path

from octavo.simulation.drawing import canvas
from octavo.simulation.workloads import WorkloadSpec
from octavo_paper.beams import FITTED_SPACING
from octavo_paper.drawing import COLOURS, SHORT_NAMES, legend_below, paper_key
from octavo_paper.figures.curves import RATIO, Panel, order_note
from octavo_paper.jobs import Job, Results
from octavo_paper.paper_values import FIGURE_14_OVER_ORACLE, FIGURE_14_SWEPT
from octavo_paper.report import Report, Row, Table
from octavo_paper.scale import Scale
from octavo_paper.simulations import Scenario, Sweep

NAME = "fig14"
TITLE = "Figure 14: parallel sampling and beam search"
KINDS = {"parallel": "parallel sampling", "beam": "beam search"}


def workload(kind: str, width: int, rate: float, seconds: float) -> WorkloadSpec:
    if kind == "beam":
        return WorkloadSpec("alpaca", rate, seconds, beam_width=width)
    return WorkloadSpec("alpaca", rate, seconds, n=width)


def panels(scale: Scale) -> list[Panel]:
    found = []
    for (kind, width), swept in FIGURE_14_SWEPT.items():
        sweeps = {}
        for system, (_, highest) in swept.items():
            scenario = Scenario(
                "opt-13b",
                system,
                workload(kind, width, highest, scale.busy_seconds),
                beam_spacing=FITTED_SPACING,
            )
            sweeps[system] = Sweep(scenario, highest, scale.resolution)
        found.append(Panel(f"{KINDS[kind]}, {width}", sweeps))
    return found


def jobs(scale: Scale) -> list[Job]:
    return [sweep for panel in panels(scale) for sweep in panel.sweeps.values()]


def make(results: Results, scale: Scale, folder: Path) -> Report:
    shown = panels(scale)
    with canvas(folder, NAME, rows=2, columns=3) as (figure, grid):
        for axes, panel, swept in zip(grid, shown, FIGURE_14_SWEPT.values(), strict=True):
            panel.draw(axes, results)
            # Of the paper we have the rates that were swept, the last one past the knee.
            for number, (system, (lowest, highest)) in enumerate(swept.items()):
                height = 0.97 - 0.035 * number
                axes.hlines(height, lowest, highest, COLOURS[system], ":", linewidth=2)
            axes.set_xlim(right=1.08 * max(axes.get_xlim()[1], swept["vllm"][1]))
        for axes in (grid[0], grid[3]):
            axes.set_ylabel("normalized latency, s/token")
        paper_key(grid[0], "rates that the paper swept")
        legend_below(figure, grid[0], 5)
    last = {
        key: panel.sustained(results, "vllm") / panel.sustained(results, "orca-oracle")
        for key, panel in zip(FIGURE_14_SWEPT, shown, strict=True)
    }
    told = [
        Row(f"{KINDS[kind]}, {width}, over Orca (Oracle)", last[kind, width], ratio, RATIO)
        for (kind, width), ratio in FIGURE_14_OVER_ORACLE.items()
        if (kind, width) in last
    ]
    ratios = [row for panel in shown for row in panel.ratio_rows(results, ())]
    knees = [
        Row(
            f"{panel.title}, {SHORT_NAMES[system]} (the paper swept {lowest:g} to {highest:g})",
            panel.sustained(results, system),
            None,
        )
        for panel, swept in zip(shown, FIGURE_14_SWEPT.values(), strict=True)
        for system, (lowest, highest) in swept.items()
    ]
    inside = sum(
        swept[system][0] <= panel.sustained(results, system) <= swept[system][1]
        for panel, swept in zip(shown, FIGURE_14_SWEPT.values(), strict=True)
        for system in panel.sweeps
    )
    return Report(
        NAME,
        TITLE,
        "Simulated: OPT-13B on an A100 of 40 GB, Alpaca; beams as in figure 15.",
        [
            Table("Rate sustained over that of others, as the text says", told),
            Table("Rate sustained by paged memory over that of others", ratios),
            Table("Rate at 0.5 s/token, requests/s", knees),
        ],
        [NAME],
        [
            order_note(shown, results),
            "The lines of this figure were not read: of the paper we have what the text says, and "
            "the rates that the authors' artifact sweeps for each system, the last of which lies "
            f"past the knee. {inside} of {len(knees)} of our knees lie inside the range swept.",
            "Parallel sampling is fitted, beam search is not: what a request of one sequence costs "
            "in a step is known from figure 12, and was divided so that parallel sampling breaks "
            "down, on average, at 0.9 of the highest rate that the artifact sweeps, as basic "
            "sampling on Alpaca does (0.88 to 0.90). Three quarters are the request's: the "
            "artifact draws tokens request by request.",
            "The artifact's limit of 256 counts requests, so memory alone limits paged sequences: "
            "450 run with six beams. In its Orca, each beam has a reservation, and a fork copies "
            "all of it; both are charged. What beam search itself costs the processor (candidates, "
            "copies of a beam's tokens) is not: nothing in the paper tells it. So all systems do "
            "about a quarter better with beams here than there, as far as the ranges tell (knees "
            "are at 1.16 of the highest rate, on average), which the ratios feel less.",
        ],
    )
