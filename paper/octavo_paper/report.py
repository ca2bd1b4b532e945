"""The outcome of a figure: our numbers beside the paper's, how close they are, and notes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Target:
    """How far a number may be from the paper's."""

    limit: float
    kind: Literal["points", "percent"]  # a difference, or a share of the paper's number

    def is_met(self, ours: float, paper: float) -> bool:
        return abs(self.deviation(ours, paper)) <= self.limit

    def deviation(self, ours: float, paper: float) -> float:
        if self.kind == "points":
            return ours - paper
        return 100 * (ours / paper - 1)

    def __str__(self) -> str:
        return f"{self.limit:g} points" if self.kind == "points" else f"{self.limit:g}%"


@dataclass(frozen=True, slots=True)
class Row:
    """One number."""

    label: str
    ours: float | None  # None: there is none
    paper: float | None
    target: Target | None = None

    @property
    def deviation(self) -> str:
        if self.ours is None or self.paper is None:
            return ""
        if self.target is not None and self.target.kind == "points":
            return f"{self.ours - self.paper:+.1f} points"
        return f"{100 * (self.ours / self.paper - 1):+.1f}%" if self.paper else ""

    @property
    def is_met(self) -> bool | None:
        """None without a target."""
        if self.ours is None or self.paper is None or self.target is None:
            return None
        return self.target.is_met(self.ours, self.paper)


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers of one unit."""

    caption: str
    rows: Sequence[Row]
    digits: int = 2


@dataclass(frozen=True, slots=True)
class Report:
    """One figure or table of the paper."""

    name: str
    title: str
    basis: str  # what our numbers are: counted, simulated, measured; one sentence
    tables: Sequence[Table]
    images: Sequence[str] = ()  # stems of PNG and SVG files
    notes: Sequence[str] = ()  # paragraphs: what differs, and why
    scale: str = ""  # how much was simulated

    @property
    def rows(self) -> list[Row]:
        return [row for table in self.tables for row in table.rows]

    def counts(self) -> tuple[int, int]:
        """Targets met, and targets."""
        judged = [row.is_met for row in self.rows if row.is_met is not None]
        return sum(judged), len(judged)

    def missed(self) -> list[Row]:
        return [row for row in self.rows if row.is_met is False]


def save(report: Report, folder: Path) -> None:
    path = folder / f"{report.name}.json"
    path.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Report:
    """What `save` has written. Raises ConfigError if the file is broken, as after a full disk."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        tables = [
            Table(
                table["caption"],
                [
                    Row(
                        row["label"],
                        row["ours"],
                        row["paper"],
                        row["target"] and Target(**row["target"]),
                    )
                    for row in table["rows"]
                ],
                table["digits"],
            )
            for table in values.pop("tables")
        ]
        return Report(tables=tables, **values)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"{path}: no report; `octavo reproduce {path.stem}` writes it again"
        raise ConfigError("out", what) from error
