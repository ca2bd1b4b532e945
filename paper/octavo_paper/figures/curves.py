"""What figures 12, 14, 16 and 17 have in common: latency over the request rate, by system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from octavo_paper.drawing import COLOURS, MARKERS, NAMES, PAPER_LINE, SHORT_NAMES
from octavo_paper.jobs import Results
from octavo_paper.paper_values import SystemName
from octavo_paper.report import Row, Target
from octavo_paper.simulations import THRESHOLD, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATIO = Target(20, "percent")
TIE = 0.02  # two rates this close are the same, as far as a sweep can tell


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: a sweep for each system, and what the paper says of it."""

    title: str
    sweeps: Mapping[SystemName, Sweep]  # system -> sweep
    paper: Mapping[SystemName, float | None] = field(
        default_factory=dict
    )  # sustained at 0.5 s/token
    paper_points: Mapping[SystemName, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def sustained(self, results: Results, system: SystemName, limit: float = THRESHOLD) -> float:
        rate: float = results[self.sweeps[system]]["sustained"][str(limit)]
        return rate

    def rate_rows(self, results: Results) -> list[Row]:
        """Rates sustained; no target of their own, for they depend on the machine's speed."""
        return [
            Row(
                f"{self.title}, {SHORT_NAMES[system]}",
                self.sustained(results, system),
                self.paper.get(system),
            )
            for system in self.sweeps
        ]

    def ratio_rows(self, results: Results, judged: Sequence[str]) -> list[Row]:
        """How many times the rate of the others octavo's paged memory sustains."""
        rows = []
        ours = self.sustained(results, "vllm")
        for system in self.sweeps:
            if system == "vllm":
                continue
            paper, vllm = self.paper.get(system), self.paper.get("vllm")
            rows.append(
                Row(
                    f"{self.title}, over {SHORT_NAMES[system]}",
                    ours / self.sustained(results, system),
                    vllm / paper if paper and vllm else None,
                    RATIO if system in judged else None,
                )
            )
        return rows

    def in_order(self, results: Results) -> bool:
        """Whether the systems stand in the order of `sweeps`, the best first."""
        rates = [self.sustained(results, system) for system in self.sweeps]
        return all(better > (1 - TIE) * worse for better, worse in pairwise(rates))

    def draw(self, axes: Axes, results: Results) -> None:
        highest = 0.0
        for system, sweep in self.sweeps.items():
            points: list[dict[str, Any]] = results[sweep]["points"]
            rates = [point["rate"] for point in points]
            highest = max(highest, self.sustained(results, system))
            axes.plot(
                rates,
                [point["latency"] for point in points],
                color=COLOURS[system],
                marker=MARKERS[system],
                label=NAMES[system],
                clip_on=True,
            )
            known = self.paper_points.get(system)
            if known:
                axes.plot(*zip(*known, strict=True), color=COLOURS[system], **PAPER_LINE)
            elif (rate := self.paper.get(system)) is not None:
                axes.axvline(rate, color=COLOURS[system], alpha=0.8, **PAPER_LINE)
        axes.axhline(THRESHOLD, color="#999999", linewidth=0.8)
        paper_highest = max((rate for rate in self.paper.values() if rate), default=0.0)
        axes.set_xlim(0, 1.12 * max(highest, paper_highest))
        axes.set_ylim(0, 1)
        axes.set_title(self.title)
        axes.set_xlabel("requests/s")


def order_note(panels: Sequence[Panel], results: Results) -> str:
    """One sentence on the order of the systems."""
    wrong = [panel.title for panel in panels if not panel.in_order(results)]
    if wrong:
        return f"The order of the systems differs from the paper's in: {', '.join(wrong)}."
    return f"The order of the systems is the paper's in {_all(len(panels))}."


def _all(count: int) -> str:
    return {1: "the panel", 2: "both panels"}.get(count, f"all {count} panels")
