"""The page with all figures: `docs/reproduction.md`, made from the reports of single figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from octavo.evaluation.report import Report, Row, Table

INTRODUCTION = """\
# Every figure of the paper

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023 ([arXiv 2309.06180](https://arxiv.org/abs/2309.06180)). This page is written by

    octavo reproduce all --out docs

without a GPU. Single figures: `octavo reproduce fig12`; with traces of one hour, as in the paper:
`--full`. In the figures, dotted lines are the paper's, in the same colours as ours.

Simulations run octavo's own engine, scheduler and KV cache manager on a virtual clock; Orca and
FasterTransformer are memory and batching policies of the same engine. Time comes from one cost
model for all figures, models and systems: FLOPs and bytes of a step over what the data sheet of
the GPU says, times efficiencies, plus overheads. Nothing is fitted to a single figure, but for the
one number that says how beams descend from each other (figure 15), which is fitted on width 2.
"Sustained" is the rate at which the mean of latency over output length reaches 0.5 s/token.
"""


def write_page(path: Path, reports: Sequence[Report], folder: Path, scale: str) -> None:
    """Write the page for reports in the order given; images lie in `folder`."""
    relative = folder.relative_to(path.parent).as_posix()
    parts = [INTRODUCTION, _summary(reports), f"Scale of the simulations: {scale}.\n"]
    parts += [_section(report, relative) for report in reports]
    path.write_text("\n".join(parts), encoding="utf-8")


def _summary(reports: Sequence[Report]) -> str:
    lines = ["| | basis | targets met | missed |", "|---|---|---|---|"]
    for report in reports:
        met, total = report.counts()
        missed = "; ".join(f"{row.label} {row.deviation}" for row in report.missed())
        judged = f"{met} of {total}" if total else "none set"
        lines.append(
            f"| [{report.title}](#{_anchor(report.title)}) | {report.basis.partition(':')[0]} "
            f"| {judged} | {missed or '-'} |"
        )
    return "\n".join(lines) + "\n"


def _anchor(title: str) -> str:
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def _section(report: Report, folder: str) -> str:
    parts = [f"## {report.title}\n", report.basis + "\n"]
    parts += [f"![{report.title}]({folder}/{stem}.svg)\n" for stem in report.images]
    parts += [_table(table) for table in report.tables]
    parts += [f"{note}\n" for note in report.notes]
    return "\n".join(parts)


def _table(table: Table) -> str:
    lines = [
        f"| {table.caption} | octavo | paper | deviation | target |",
        "|---|---:|---:|---:|---|",
    ]
    lines += [_row(row, table.digits) for row in table.rows]
    return "\n".join(lines) + "\n"


def _row(row: Row, digits: int) -> str:
    target = ""
    if row.target is not None:
        verdict = {True: "met", False: "**missed**", None: ""}[row.is_met]
        target = f"{row.target}: {verdict}"
    return (
        f"| {row.label} | {_number(row.ours, digits)} | {_number(row.paper, digits)} "
        f"| {row.deviation} | {target} |"
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
