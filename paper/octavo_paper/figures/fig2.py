"""Figure 2: where the slots of the KV cache go, in each system under overload."""

from __future__ import annotations

from pathlib import Path

from octavo.simulation.drawing import BLUE, GREEN, ORANGE, SKY, canvas
from octavo.simulation.workloads import WorkloadSpec
from octavo_paper.drawing import SHORT_NAMES, legend_below
from octavo_paper.jobs import Job, Results
from octavo_paper.paper_values import FIGURE_2, FIGURE_2_RATE, SystemName
from octavo_paper.report import Report, Row, Table, Target
from octavo_paper.scale import Scale
from octavo_paper.simulations import Scenario, SteadyState

NAME = "fig2"
TITLE = "Figure 2: memory waste in the KV cache"
PARTS = ("token_states", "reservation", "internal", "external")
LABELS = ("token states", "reservation", "internal fragmentation", "external fragmentation, others")
PART_COLOURS = (GREEN, ORANGE, BLUE, SKY)


def job(system: SystemName, scale: Scale) -> SteadyState:
    start, end = scale.window
    workload = WorkloadSpec("sharegpt", FIGURE_2_RATE, end)
    return SteadyState(Scenario("opt-13b", system, workload), start, end)


def jobs(scale: Scale) -> list[Job]:
    return [job(system, scale) for system in FIGURE_2]


def make(results: Results, scale: Scale, folder: Path) -> Report:
    ours = {
        system: [100 * results[job(system, scale)]["slots"][part] for part in PARTS]
        for system in FIGURE_2
    }
    # In the paper, vLLM has no reservation or internal part: all but tokens is one number.
    tokens, reservation, internal, external = ours["vllm"]
    judged = ours | {"vllm": [tokens, 0.0, 0.0, reservation + internal + external]}
    rows = [
        Row(f"{SHORT_NAMES[system]}, {label}", value, paper, Target(3, "points"))
        for system, values in FIGURE_2.items()
        for label, value, paper in zip(LABELS, judged[system], values, strict=True)
        if system != "vllm" or paper
    ]
    _draw(folder, ours)
    return Report(
        NAME,
        TITLE,
        "Simulated: OPT-13B on an A100 of 40 GB, ShareGPT at 4 requests/s, which is more than any "
        "system sustains; mean over steps.",
        [Table("Percent of KV slots", rows, 1)],
        [NAME],
        [
            f"octavo's {reservation + internal + external:.1f}% that are not tokens are "
            f"{reservation:.1f}% slots of last blocks that will still be filled, {internal:.1f}% "
            f"that will not, and {external:.1f}% free blocks, most of them the 1% watermark.",
        ],
    )


def _draw(folder: Path, ours: dict[SystemName, list[float]]) -> None:
    with canvas(folder, NAME, panel=(6.4, 3.2)) as (figure, [axes]):
        for x, system in enumerate(ours):
            for side, values in ((-0.21, ours[system]), (0.21, FIGURE_2[system])):
                bottom = 0.0
                for value, colour, label in zip(values, PART_COLOURS, LABELS, strict=True):
                    axes.bar(
                        x + side,
                        value,
                        0.38,
                        bottom,
                        color=colour,
                        label=label if x == 0 and side < 0 else None,
                        edgecolor="black" if side > 0 else "none",
                        linestyle=":" if side > 0 else "-",
                        alpha=0.6 if side > 0 else 1.0,
                    )
                    if value >= 3:
                        axes.annotate(
                            f"{value:.1f}",
                            (x + side, bottom + value / 2),
                            ha="center",
                            va="center",
                            fontsize=7,
                            color="white" if colour == BLUE and side < 0 else "black",
                        )
                    bottom += value
        axes.set_xticks(range(len(ours)), [SHORT_NAMES[system] for system in ours])
        axes.set_ylabel("KV slots, %")
        axes.set_title("left: octavo; right, dotted: the paper")
        axes.grid(axis="x", visible=False)
        legend_below(figure, axes, 4)
