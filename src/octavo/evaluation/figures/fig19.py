"""Figure 19: recomputing against swapping, as a cost and end to end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import PreemptionMode
from octavo.evaluation.drawing import BLUE, ORANGE, PAPER_LINE, canvas, paper_key
from octavo.evaluation.jobs import Job, Results
from octavo.evaluation.kernel_costs import recompute_milliseconds, swap_milliseconds
from octavo.evaluation.measurements import Key, read_measurements
from octavo.evaluation.paper_values import (
    BLOCK_SIZES,
    FIGURE_18B_RATES,
    FIGURE_19A_RECOMPUTE,
    FIGURE_19A_SWAP,
    FIGURE_19B,
)
from octavo.evaluation.report import Report, Row, Table
from octavo.evaluation.scale import Scale
from octavo.evaluation.simulations import Latency, Scenario
from octavo.evaluation.workloads import WorkloadSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig19"
TITLE = "Figure 19: recomputing and swapping"
NUM_TOKENS = 256
METHODS: tuple[PreemptionMode, ...] = ("recompute", "swap")
METHOD_COLOURS = {"recompute": BLUE, "swap": ORANGE}


def job(method: PreemptionMode, block_size: int, scale: Scale) -> Latency:
    workload = WorkloadSpec("sharegpt", FIGURE_18B_RATES["sharegpt"], scale.block_size_seconds)
    return Latency(Scenario("opt-13b", "vllm", workload, block_size, method))


def jobs(scale: Scale) -> list[Job]:
    if read_measurements(scale.measurements, "preemption"):
        return []
    return [job(method, size, scale) for method in METHODS for size in BLOCK_SIZES]


def make(results: Results, scale: Scale, folder: Path) -> Report:
    costs = read_measurements(scale.measurements, "preemption-cost")
    served = read_measurements(scale.measurements, "preemption")
    cost_values = _measured_costs(costs.values) if costs else _priced_costs()
    served_values = served.values if served else _simulated(results, scale)
    with canvas(folder, NAME, columns=2, panel=(4.6, 3.2)) as (_, (left, right)):
        paper = {"recompute": dict.fromkeys(BLOCK_SIZES, sum(FIGURE_19A_RECOMPUTE) / 2)}
        _draw(left, cost_values, paper | {"swap": FIGURE_19A_SWAP})
        left.set_ylabel(f"{NUM_TOKENS} tokens, out and back, ms")
        left.set_title(f"(a) {costs.description if costs else 'cost model'}")
        lines = {
            method: dict(zip(BLOCK_SIZES, latencies, strict=True))
            for method, latencies in FIGURE_19B.items()
        }
        _draw(right, served_values, lines)
        right.set_ylabel("normalized latency, s/token")
        right.set_yscale("log")
        right.set_title(f"(b) {served.description if served else 'simulated'}")
    notes = []
    if costs is None:
        notes.append(
            "(a) Nothing was measured: this is the cost model, whose price of swapping a block "
            "(80 copies, one for the keys and one for the values of each layer) was taken from "
            "this very figure. octavo keeps a block of all layers in one piece, so its own "
            "swapping does not depend on the block size in this way."
        )
    if served is None:
        notes.append("(b) At the artifact's rate, at the edge of what is sustained; see figure 18.")
    return Report(
        NAME,
        TITLE,
        f"(a) {'measured on ' + costs.description if costs else 'cost model'}, "
        f"(b) {'measured on ' + served.description if served else 'simulated'}: OPT-13B; the "
        "paper's numbers are of an A100 of 40 GB.",
        [
            Table(f"(a) {NUM_TOKENS} tokens, ms", _cost_rows(cost_values), 1),
            Table("(b) Normalized latency, s/token", _served_rows(served_values), 3),
        ],
        [NAME],
        notes,
    )


def _measured_costs(values: Mapping[Key, float]) -> dict[Key, float]:
    """Out and in together, where both were measured."""
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
    rows = [
        Row(f"swap, blocks of {size}", values.get(("swap", size)), FIGURE_19A_SWAP.get(size))
        for size in BLOCK_SIZES
    ]
    return rows + [
        Row(f"recompute, blocks of {size}", values.get(("recompute", size)), between)
        for size, between in ((16, sum(FIGURE_19A_RECOMPUTE) / 2),)
    ]


def _served_rows(values: Mapping[Key, float]) -> list[Row]:
    return [
        Row(f"{method}, blocks of {size}", values.get((method, size)), latency)
        for method, latencies in FIGURE_19B.items()
        for size, latency in zip(BLOCK_SIZES, latencies, strict=True)
    ]


def _draw(
    axes: Axes, values: Mapping[Key, float], paper: Mapping[str, Mapping[int, float]]
) -> None:
    for method in METHODS:
        colour = METHOD_COLOURS[method]
        known = [(size, values[method, size]) for size in BLOCK_SIZES if (method, size) in values]
        axes.plot(*zip(*known, strict=True), color=colour, marker="o", label=method)
        axes.plot(*zip(*paper[method].items(), strict=True), color=colour, **PAPER_LINE)
    paper_key(axes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES])
    axes.set_xlabel("block size, tokens")
    axes.legend()
