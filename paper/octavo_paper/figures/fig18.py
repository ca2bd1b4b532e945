"""Figure 18: the cost of paging in the attention kernel, and the block size end to end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.simulation.drawing import BLUE, ORANGE, canvas
from octavo.simulation.workloads import WorkloadSpec
from octavo_paper.drawing import SOURCE_NAMES, paper_key
from octavo_paper.figures.block_sizes import (
    Line,
    basis,
    draw_measured,
    draw_simulated,
    milliseconds,
    ranges,
)
from octavo_paper.jobs import Job, Results
from octavo_paper.kernel_costs import attention_microseconds
from octavo_paper.measurements import Key, Measurements, read_measurements
from octavo_paper.paper_values import (
    BLOCK_SIZES,
    FIGURE_18A,
    FIGURE_18A_CONTEXTS,
    FIGURE_18B,
    FIGURE_18B_RATES,
    SystemName,
)
from octavo_paper.report import Report, Row, Table
from octavo_paper.scale import Scale
from octavo_paper.simulations import Latency, Scenario

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig18"
TITLE = "Figure 18: attention kernel and block size"
KERNELS: dict[SystemName, str] = {"vllm": "paged", "fastertransformer": "contiguous"}
KERNEL_COLOURS = {"paged": BLUE, "contiguous": ORANGE}
LINES = [
    Line(source, SOURCE_NAMES[source], colour, dict(zip(BLOCK_SIZES, latencies, strict=True)))
    for (source, latencies), colour in zip(FIGURE_18B.items(), (BLUE, ORANGE), strict=True)
]


def job(source: str, block_size: int, scale: Scale) -> Latency:
    workload = WorkloadSpec(source, FIGURE_18B_RATES[source], scale.block_size_seconds)
    return Latency(Scenario("opt-13b", "vllm", workload, block_size, "recompute"))


def jobs(scale: Scale) -> list[Job]:
    _measured(scale)  # broken files are refused before anything is simulated
    return [job(source, size, scale) for source in FIGURE_18B for size in BLOCK_SIZES]


def make(results: Results, scale: Scale, folder: Path) -> Report:
    kernels, served = _measured(scale)
    kernel_values = kernels.values if kernels else _priced_kernels()
    tables = [Table("(a) Paged over contiguous attention, times", _overheads(kernel_values))]
    with canvas(folder, NAME, columns=3 if served else 2, panel=(4.6, 3.2)) as (_, axes):
        title = f"measured on {kernels.device}" if kernels else "cost model"
        _draw_kernels(axes[0], kernel_values, f"(a) {title}")
        tables.append(draw_simulated(axes[1], _simulated_sizes(results, scale), LINES))
        if served:
            tables.append(draw_measured(axes[2], served, LINES))
    return Report(NAME, TITLE, basis(kernels, served), tables, [NAME], _notes(kernels, served))


def _measured(scale: Scale) -> tuple[Measurements | None, Measurements | None]:
    """For panels (a) and (c)."""
    folder = scale.measurements
    return read_measurements(folder, "attention-kernel"), read_measurements(folder, "block-size")


def _notes(kernels: Measurements | None, served: Measurements | None) -> list[str]:
    notes = [
        f"(a) {kernels.description}."
        if kernels
        else "(a) No kernel was measured: what is shown is the cost model's time for reading KV, "
        "with and without looking blocks up. It knows no launch and no start of a kernel, so "
        "small batches are too cheap.",
        "(b) The rates are the artifact's. They lie at the edge of what is sustained, where "
        "latency depends steeply on the machine's speed and on how long the run is. The "
        "paper's own figure 12 breaks down at 1.93 and 28.1 requests/s, with 1.1 s/token for "
        "ShareGPT at 2.0, and this one shows 0.085 at 2.01 and 0.59 for Alpaca at 30.1. The "
        "cost model follows figure 12, so it is overloaded here whatever the block size. What "
        "can be compared is the shape, a valley between too many look-ups and too much "
        "fragmentation, and where it lies: at blocks of 16 to 64 tokens for ShareGPT and 16 to "
        "32 for Alpaca.",
    ]
    if served:
        seen = ranges(milliseconds(served), LINES, "ms/token")
        notes.append(
            f"(c) {served.description}. Another card at other rates: not to be held against the "
            f"paper. Between block sizes, {seen}. There is no valley, for looking small "
            "blocks up costs octavo's kernels little, and memory is not short, so that large "
            "blocks may waste some. Figure 19 (c) shows what they cost where it is."
        )
    return notes


def _priced_kernels() -> dict[Key, float]:
    return {
        (kernel, batch, context): attention_microseconds(batch, context, kernel == "paged")
        for kernel in KERNELS.values()
        for batch in FIGURE_18A
        for context in FIGURE_18A_CONTEXTS
    }


def _simulated_sizes(results: Results, scale: Scale) -> dict[Key, float]:
    return {
        (source, size): results[job(source, size, scale)]["latency"]
        for source in FIGURE_18B
        for size in BLOCK_SIZES
    }


def _overheads(values: Mapping[Key, float]) -> list[Row]:
    rows = []
    for batch, paper in FIGURE_18A.items():
        for i, context in enumerate(FIGURE_18A_CONTEXTS):
            paged = values.get(("paged", batch, context))
            contiguous = values.get(("contiguous", batch, context))
            rows.append(
                Row(
                    f"batch {batch}, context {context}",
                    paged / contiguous if paged and contiguous else None,
                    paper["vllm"][i] / paper["fastertransformer"][i],
                )
            )
    return rows


def _draw_kernels(axes: Axes, values: Mapping[Key, float], title: str) -> None:
    ticks: list[str] = []
    for batch, paper in FIGURE_18A.items():
        for i, context in enumerate(FIGURE_18A_CONTEXTS):
            x = len(ticks)
            ticks.append(f"{batch}\n{context}")
            for side, (system, kernel) in zip((-0.2, 0.2), KERNELS.items(), strict=True):
                drawn = axes.bar(
                    x + side,
                    values.get((kernel, batch, context), 0.0),
                    0.38,
                    color=KERNEL_COLOURS[kernel],
                    label=kernel if not x else None,
                )
                axes.bar_label(drawn, fmt="%.0f", fontsize=6.5)
                line = paper[system][i]
                axes.hlines(line, x + side - 0.19, x + side + 0.19, "black", ":", linewidth=2)
    paper_key(axes)
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_xlabel("batch size and context, tokens")
    axes.set_ylabel("attention kernel, us")
    axes.grid(axis="x", visible=False)
    axes.set_title(title)
    axes.legend(loc="upper left")
