"""Figure 13: how many requests each system runs at once."""

from __future__ import annotations

from pathlib import Path

from octavo.evaluation import sources
from octavo.evaluation.drawing import COLOURS, SHORT_NAMES, canvas
from octavo.evaluation.jobs import Job, Results
from octavo.evaluation.paper_values import FIGURE_13, FIGURE_13_RATES, SystemName
from octavo.evaluation.report import Report, Row, Table, Target
from octavo.evaluation.scale import Scale
from octavo.evaluation.simulations import Scenario, SteadyState
from octavo.evaluation.workloads import WorkloadSpec

NAME = "fig13"
TITLE = "Figure 13: mean number of batched requests"
TARGETS = {"sharegpt": Target(7, "percent"), "alpaca": Target(15, "percent")}
NAMES = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
TITLES = {"sharegpt": "ShareGPT, 2 requests/s", "alpaca": "Alpaca, 30 requests/s"}


PAPER_TOKENS_HELD = 0.963 * 15_700 / 30.42


def tokens_held() -> float:
    """The mean over time of prompt and output so far, each request running its output's length."""
    pairs = sources.sharegpt()
    held = sum(pair.output_tokens * (pair.prompt_tokens + pair.output_tokens / 2) for pair in pairs)
    return held / sum(pair.output_tokens for pair in pairs)


def job(source: str, system: SystemName, scale: Scale) -> SteadyState:
    start, end = scale.window
    workload = WorkloadSpec(source, FIGURE_13_RATES[source], end)
    return SteadyState(Scenario("opt-13b", system, workload), start, end)


def jobs(scale: Scale) -> list[Job]:
    return [job(source, system, scale) for source in FIGURE_13 for system in FIGURE_13[source]]


def make(results: Results, scale: Scale, folder: Path) -> Report:
    tables = []
    with canvas(folder, NAME, columns=2) as (_, panels):
        for axes, (source, paper) in zip(panels, FIGURE_13.items(), strict=True):
            ours = {
                system: results[job(source, system, scale)]["mean_batched_requests"]
                for system in paper
            }
            rows = [
                Row(f"{NAMES[source]}, {SHORT_NAMES[system]}", ours[system], value, TARGETS[source])
                for system, value in paper.items()
            ]
            tables.append(Table(f"{TITLES[source]}: mean batched requests", rows))
            for x, (system, value) in enumerate(paper.items()):
                drawn = axes.bar(x, ours[system], 0.7, color=COLOURS[system])
                axes.bar_label(drawn, fmt="%.2f", fontsize=8, label_type="center", color="white")
                axes.hlines(value, x - 0.4, x + 0.4, "black", ":", linewidth=2)
            axes.set_xticks(range(len(paper)), [SHORT_NAMES[s].replace(" ", "\n") for s in paper])
            axes.grid(axis="x", visible=False)
            axes.margins(y=0.1)
            axes.set_title(f"{TITLES[source]}; dotted: the paper", fontsize=9)
        panels[0].set_ylabel("requests in a step")
    return Report(
        NAME,
        TITLE,
        "Simulated: OPT-13B on an A100 of 40 GB; mean over steps of the requests that run.",
        tables,
        [NAME],
        [
            f"A running request holds {tokens_held():.0f} tokens on average in the half of the "
            "ShareGPT pairs that ships with octavo: a sum over the pairs, whatever the system. The "
            f"paper's own numbers imply {PAPER_TOKENS_HELD:.0f} (96.3% of 15,700 slots for 30.42 "
            "requests), so its hour had longer requests, and paged memory, which alone packs by "
            "actual lengths, runs accordingly fewer there.",
            "Alpaca's lengths are 1,000 real rows scaled to the means of the whole set, whose "
            "lengths were not published. At 30 requests/s paged memory is at its knee: how many "
            "requests run depends on the lengths and on the speed of the machine, while the "
            "reserving systems are full.",
        ],
    )
