"""The paper's figures, one module each.

A module has NAME, TITLE, `jobs(scale)`: what has to be computed, and `make(results, scale,
folder)`: draws into `folder` and returns a Report.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from octavo.errors import ConfigError
from octavo_paper.jobs import Job, Results
from octavo_paper.report import Report
from octavo_paper.scale import Scale

# In the order of the paper. Extend here: one module and its name.
FIGURES = (
    "table1",
    "fig2",
    "fig11",
    "fig12",
    "fig13",
    "fig14",
    "fig15",
    "fig16",
    "fig17",
    "fig18",
    "fig19",
)


class FigureModule(Protocol):
    NAME: str
    TITLE: str

    def jobs(self, scale: Scale) -> list[Job]: ...

    def make(self, results: Results, scale: Scale, folder: Path) -> Report: ...


def find_figure(name: str) -> FigureModule:
    """Raises ConfigError, with the list, if there is no such figure."""
    if name not in FIGURES:
        raise ConfigError("figure", f"{name!r} is not one of {', '.join(FIGURES)}, all")
    return cast(FigureModule, import_module(f"octavo_paper.figures.{name}"))
