"""A figure from outside: how many requests of a workload source have prompts of which lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from octavo.bench.traces import TraceRequest
from octavo.simulation.drawing import BLUE, canvas
from octavo.simulation.sources import read_source
from octavo_paper.jobs import SIMULATED, Job, Results
from octavo_paper.report import Report, Row, Table, Target
from octavo_paper.scale import Scale

NAME = "toy"
TITLE = "Toy: lengths of prompts"
EDGE = 32  # tokens


def toy_source() -> list[TraceRequest]:
    """Prompts of 8, 16, ..., 64 tokens, each answered with half as many."""
    return [TraceRequest(8 * number, 4 * number) for number in range(1, 9)]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Counts the prompts of a source above an edge."""

    DEPENDS_ON: ClassVar[tuple[str, ...]] = (*SIMULATED, "toy_figure")

    source: str
    edge: int

    @property
    def seconds(self) -> float:
        return 0.1

    def run(self) -> Any:
        lengths = [request.prompt_tokens for request in read_source(self.source)]
        return {"above": sum(length > self.edge for length in lengths), "of": len(lengths)}


JOB = Lengths("alpaca", EDGE)


def jobs(scale: Scale) -> list[Job]:
    return [JOB]


def make(results: Results, scale: Scale, folder: Path) -> Report:
    counted = results[JOB]
    share = 100 * counted["above"] / counted["of"]
    with canvas(folder, NAME) as (_, [axes]):
        axes.bar(["above", "below"], [share, 100 - share], color=BLUE)
    row = Row(f"prompts above {EDGE} tokens, %", share, 10.0, Target(5.0, "points"))
    return Report(NAME, TITLE, "Counted.", [Table("share, %", [row])], [NAME])
