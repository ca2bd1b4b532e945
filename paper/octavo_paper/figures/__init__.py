"""The paper's figures, one module each.

A module has NAME, TITLE, `jobs(scale)`: what has to be computed, and `make(results, scale,
folder)`: draws into `folder` and returns a Report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from octavo.registry import Registry
from octavo_paper.jobs import Job, Results
from octavo_paper.report import Report
from octavo_paper.scale import Scale


class Figure(Protocol):
    """A module, or an object."""

    NAME: str
    TITLE: str

    def jobs(self, scale: Scale) -> list[Job]: ...

    def make(self, results: Results, scale: Scale, folder: Path) -> Report: ...


# In the order of the paper.
FIGURES: Registry[Figure] = Registry(
    "figure",
    {
        name: f"octavo_paper.figures.{name}"
        for name in (
            *("table1", "fig2", "fig11", "fig12", "fig13", "fig14", "fig15", "fig16", "fig17"),
            *("fig18", "fig19"),
        )
    },
)
