"""Figure 19: recomputing against swapping, as a cost and end to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from octavo.config import PreemptionMode
from octavo.simulation.drawing import BLUE, ORANGE, canvas
from octavo.simulation.workloads import WorkloadSpec
from octavo_paper.figures.block_sizes import (
    Line,
    basis,
    draw_lines,
    draw_measured,
    draw_simulated,
    milliseconds,
    ranges,
)
from octavo_paper.jobs import Job, Results
from octavo_paper.kernel_costs import recompute_milliseconds, swap_milliseconds
from octavo_paper.measurements import Key, Measurements, read_measurements
from octavo_paper.paper_values import (
    BLOCK_SIZES,
    FIGURE_18B_RATES,
    FIGURE_19A_RECOMPUTE,
    FIGURE_19A_SWAP,
    FIGURE_19B,
)
from octavo_paper.report import Report, Row, Table
from octavo_paper.scale import Scale
from octavo_paper.servers import BLOCK_SIZE
from octavo_paper.simulations import Latency, Scenario

NAME = "fig19"
TITLE = "Figure 19: recomputing and swapping"
NUM_TOKENS = 256
METHODS: tuple[PreemptionMode, ...] = ("recompute", "swap")
LINES = [
    Line(method, method, colour, dict(zip(BLOCK_SIZES, FIGURE_19B[method], strict=True)))
    for method, colour in zip(METHODS, (BLUE, ORANGE), strict=True)
]
RECOMPUTE_COST = replace(LINES[0], paper=dict.fromkeys(BLOCK_SIZES, sum(FIGURE_19A_RECOMPUTE) / 2))
SWAP_COST = replace(LINES[1], paper=FIGURE_19A_SWAP)


def job(method: PreemptionMode, block_size: int, scale: Scale) -> Latency:
    workload = WorkloadSpec("sharegpt", FIGURE_18B_RATES["sharegpt"], scale.block_size_seconds)
    return Latency(Scenario("opt-13b", "vllm", workload, block_size, method))


def jobs(scale: Scale) -> list[Job]:
    _measured(scale)  # broken files are refused before anything is simulated
    return [job(method, size, scale) for method in METHODS for size in BLOCK_SIZES]


def make(results: Results, scale: Scale, folder: Path) -> Report:
    costs, served = _measured(scale)
    cost_values = _both_ways(costs) if costs else _priced_costs()
    tables = [Table(f"(a) {NUM_TOKENS} tokens, ms", _cost_rows(cost_values), 1)]
    with canvas(folder, NAME, columns=3 if served else 2, panel=(4.6, 3.2)) as (_, axes):
        draw_lines(axes[0], cost_values, [RECOMPUTE_COST, SWAP_COST])
        axes[0].set_ylabel(f"{NUM_TOKENS} tokens, out and back, ms")
        axes[0].set_title(f"(a) measured on {costs.device}" if costs else "(a) cost model")
        tables.append(draw_simulated(axes[1], _simulated(results, scale), LINES))
        if served:
            tables.append(draw_measured(axes[2], served, LINES))
    return Report(NAME, TITLE, basis(costs, served), tables, [NAME], _notes(costs, served))


def _measured(scale: Scale) -> tuple[Measurements | None, Measurements | None]:
    """For panels (a) and (c)."""
    folder = scale.measurements
    return read_measurements(folder, "preemption-cost"), read_measurements(folder, "preemption")


def _notes(costs: Measurements | None, served: Measurements | None) -> list[str]:
    notes = [
        f"(a) {costs.description}. Between block sizes, {ranges(_both_ways(costs), LINES, 'ms')}. "
        "A block of all layers is one piece here and moves with one copy, where the cost model "
        "explains the paper's times with 80, one for the keys and one for the values of each "
        "layer. So even blocks of one token can be swapped."
        if costs
        else "(a) Nothing was measured: this is the cost model, whose price of swapping a block "
        "(80 copies, one for the keys and one for the values of each layer) was taken from "
        "this very figure. octavo keeps a block of all layers in one piece, so its own "
        "swapping does not depend on the block size in this way.",
        "(b) At the artifact's rate, at the edge of what is sustained; see figure 18.",
    ]
    if served:
        seen = ranges(milliseconds(served), LINES, "ms/token")
        notes.append(
            f"(c) {served.description}. Another card at another rate: not to be held against "
            f"the paper. Between block sizes, {seen}: large blocks cost most, by fragmentation. "
            f"{_gap(served.values)}"
        )
    return notes


def _gap(values: Mapping[Key, float]) -> str:
    recompute, swap = (line.over_sizes(values) for line in LINES)
    gaps = [abs(swap[size] / recompute[size] - 1) for size in swap if size in recompute]
    return f"At the same block size the methods are at most {max(gaps):.0%} apart." if gaps else ""


def _both_ways(costs: Measurements) -> dict[Key, float]:
    """Out and in together, where both were measured."""
    values = costs.values
    found = {key: value for key, value in values.items() if key[0] == "recompute"}
    for (method, size), value in values.items():
        back = values.get(("swap-in", size))
        if method == "swap-out" and back is not None:
            found["swap", size] = value + back
    return found


def _priced_costs() -> dict[Key, float]:
    prices = {"recompute": recompute_milliseconds, "swap": swap_milliseconds}
    return {
        (method, size): price(NUM_TOKENS, size)
        for method, price in prices.items()
        for size in BLOCK_SIZES
    }


def _simulated(results: Results, scale: Scale) -> dict[Key, float]:
    return {
        (method, size): results[job(method, size, scale)]["latency"]
        for method in METHODS
        for size in BLOCK_SIZES
    }


def _cost_rows(values: Mapping[Key, float]) -> list[Row]:
    """Recomputing takes the same at every size."""
    again = Row(
        f"recompute, blocks of {BLOCK_SIZE}",
        values.get(("recompute", BLOCK_SIZE)),
        RECOMPUTE_COST.paper[BLOCK_SIZE],
    )
    return [*SWAP_COST.rows(values), again]
