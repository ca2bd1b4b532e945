"""What figures 18 and 19 have in common: values over the block size, simulated and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from octavo_paper.drawing import PAPER_LINE, paper_key
from octavo_paper.measurements import Key, Measurements
from octavo_paper.paper_values import BLOCK_SIZES
from octavo_paper.report import Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Line:
    """A trace or a method; values are kept under its name and a block size."""

    name: str
    label: str
    colour: str
    paper: Mapping[int, float] = field(default_factory=dict)  # empty: nothing to compare with

    def over_sizes(self, values: Mapping[Key, float]) -> dict[int, float]:
        return {
            size: values[self.name, size] for size in BLOCK_SIZES if (self.name, size) in values
        }

    def rows(self, values: Mapping[Key, float]) -> list[Row]:
        known = self.over_sizes(values)
        return [
            Row(f"{self.label}, blocks of {size}", known.get(size), self.paper.get(size))
            for size in BLOCK_SIZES
            if size in known or size in self.paper
        ]


def draw_lines(axes: Axes, values: Mapping[Key, float], lines: Sequence[Line]) -> None:
    for line in lines:
        known = line.over_sizes(values)
        axes.plot(
            list(known), list(known.values()), color=line.colour, marker="o", label=line.label
        )
        if line.paper:
            axes.plot(*zip(*line.paper.items(), strict=True), color=line.colour, **PAPER_LINE)
    if any(line.paper for line in lines):
        paper_key(axes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES])
    axes.set_xlabel("block size, tokens")
    axes.legend()


def draw_simulated(axes: Axes, values: Mapping[Key, float], lines: Sequence[Line]) -> Table:
    """Panel (b), the paper's card at the paper's rates, and its table."""
    draw_lines(axes, values, lines)
    axes.set_yscale("log")
    axes.set_ylabel("normalized latency, s/token")
    axes.set_title("(b) simulated")
    rows = [row for line in lines for row in line.rows(values)]
    return Table("(b) Normalized latency, s/token", rows, 3)


def draw_measured(axes: Axes, measured: Measurements, lines: Sequence[Line]) -> Table:
    """Panel (c), another card at other rates, so without lines from the paper, and its table."""
    values = milliseconds(measured)
    lines = [replace(line, paper={}) for line in lines]
    draw_lines(axes, values, lines)
    axes.set_ylim(0, 1.1 * max(values.values()))
    axes.legend(loc="lower right")
    axes.set_ylabel("normalized latency, ms/token")
    axes.set_title(f"(c) measured on {measured.device}")
    rows = [row for line in lines for row in line.rows(values)]
    return Table("(c) Normalized latency, ms/token", rows)


def milliseconds(measured: Measurements) -> dict[Key, float]:
    return {key: 1e3 * seconds for key, seconds in measured.values.items()}


def ranges(values: Mapping[Key, float], lines: Sequence[Line], unit: str) -> str:
    """The lowest and the highest value of each line that has any, and at which block sizes."""
    said = []
    for line in lines:
        if known := line.over_sizes(values):
            low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
            said.append(
                f"{line.label} {known[low]:.1f} {unit} (blocks of {low}) to {known[high]:.1f} "
                f"(blocks of {high})"
            )
    return ", ".join(said)


def basis(first: Measurements | None, third: Measurements | None) -> str:
    """What panels (a), (b) and, if measured, (c) are; panels of one kind together."""
    kinds = {"(a)": f"measured on {first.device}" if first else "cost model", "(b)": "simulated"}
    if third:
        kinds["(c)"] = f"measured on {third.device}"
    panels: dict[str, list[str]] = {}
    for panel, kind in kinds.items():
        panels.setdefault(kind, []).append(panel)
    said = ", ".join(f"{' and '.join(each)} {kind}" for kind, each in panels.items())
    return f"{said}: OPT-13B; the paper's numbers are of an A100 of 40 GB."
