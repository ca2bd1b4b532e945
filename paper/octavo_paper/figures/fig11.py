"""Figure 11: how long inputs and outputs are in ShareGPT and Alpaca."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from octavo.bench.traces import TraceRequest
from octavo.simulation import sources
from octavo.simulation.drawing import BLUE, ORANGE, canvas
from octavo_paper.drawing import SOURCE_NAMES
from octavo_paper.jobs import Job, Results
from octavo_paper.paper_values import FIGURE_11
from octavo_paper.report import Report, Row, Table, Target
from octavo_paper.scale import Scale

NAME = "fig11"
TITLE = "Figure 11: input and output lengths of the two data sets"
LIMITS = {"sharegpt": 2048, "alpaca": 256}  # tokens shown


def jobs(scale: Scale) -> list[Job]:
    return []


def make(results: Results, scale: Scale, folder: Path) -> Report:
    rows = []
    sets = {"sharegpt": sources.sharegpt(), "alpaca": sources.alpaca()}
    for name, pairs in sets.items():
        for side, values, paper in zip(
            ("input", "output"), lengths(pairs), FIGURE_11[name], strict=True
        ):
            target = Target(1, "percent") if name == "sharegpt" else None
            rows.append(
                Row(f"{SOURCE_NAMES[name]}, {side}", statistics.fmean(values), paper, target)
            )
    _draw(folder, sets)
    num_real = len(sources.alpaca_measured())
    measured = [statistics.fmean(side) for side in lengths(sources.alpaca_measured())]
    num_shown, num_all = len(sets["sharegpt"]), len(sources.sharegpt_unfiltered())
    return Report(
        NAME,
        TITLE,
        "Counted: lengths in the traces that ship with octavo.",
        [Table("Mean tokens", rows)],
        [NAME],
        [
            f"ShareGPT: {num_shown:,} of {num_all:,} pairs have fewer than 2,048 tokens together, "
            "the benchmark's filter. These are the authors' own length pairs, a random half of "
            "them; the printed means are of all 79,731 pairs of up to 2,048 tokens.",
            "Alpaca: the lengths of the whole set were not published. What is used are "
            f"{num_real:,} real rows (means {measured[0]:.2f} and {measured[1]:.2f}), scaled to "
            "the printed means, so that its means agree says nothing. A log-normal fit to them is "
            "no better: see figure 13.",
        ],
    )


def lengths(pairs: Sequence[TraceRequest]) -> tuple[list[int], list[int]]:
    return [pair.prompt_tokens for pair in pairs], [pair.output_tokens for pair in pairs]


def _draw(folder: Path, sets: dict[str, tuple[TraceRequest, ...]]) -> None:
    with canvas(folder, NAME, columns=2) as (_, panels):
        for axes, (name, pairs) in zip(panels, sets.items(), strict=True):
            edges = np.linspace(0, LIMITS[name], 65)
            for side, values, paper, colour in zip(
                ("input", "output"), lengths(pairs), FIGURE_11[name], (BLUE, ORANGE), strict=True
            ):
                mean = statistics.fmean(values)
                share, _ = np.histogram(values, edges)
                axes.stairs(
                    100 * share / len(values),
                    edges,
                    color=colour,
                    fill=True,
                    alpha=0.45,
                    label=f"{side}, mean {mean:.2f}",
                )
                axes.axvline(mean, color=colour, linewidth=1.2)
                axes.axvline(
                    paper, color=colour, linestyle=":", linewidth=2, label=f"the paper: {paper}"
                )
            axes.set_yscale("log")
            axes.set_title(SOURCE_NAMES[name] + (" (scaled)" if name == "alpaca" else ""))
            axes.set_xlabel("tokens")
            axes.legend()
        panels[0].set_ylabel("requests, %")
