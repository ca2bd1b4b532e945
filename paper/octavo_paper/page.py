"""The page with all figures: `docs/reproduction.md`, made from the reports of single figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from octavo_paper.report import Report, Row, Table

INTRODUCTION = """\
# Every figure of the paper

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023 ([arXiv 2309.06180](https://arxiv.org/abs/2309.06180)). This page is written by

    octavo reproduce all --out docs

without a GPU (`pip install . ./demo ./paper` in a checkout). The first run takes 25 minutes of
processor time (15 minutes on two cores); results are kept, so that figures are drawn again in
seconds. `octavo reproduce fig12` draws one, `--full` simulates the paper's hour of traffic. In the
figures, dotted lines are the paper's, in the same colours as ours.

**What is simulated.** Simulations run octavo's own engine, scheduler and KV cache manager on a
virtual clock. Orca and FasterTransformer are memory policies of the same engine. As in the authors'
artifact, prompts are computed whole, a step has at most 2,560 tokens and 256 requests (the artifact
calls its limit one of sequences, but counts requests), requests are served first come first served,
and a preempted request is recomputed if it has a single sequence, and swapped otherwise. A fork
copies all that Orca has reserved for a sequence. What the memory holds (table 1, figures 2, 13 and
15) follows from the policies and the lengths.

**Where time comes from.** One cost model for all figures, models and systems: bytes and FLOPs of a
step over the data sheet of the GPU, times efficiencies, plus overheads. Five of its coefficients
were fitted to the 24 step times that figure 12 implies (`octavo_paper/paper_software.py`; root mean
square error 6%), so figure 12's rates are not predictions, though no single system or panel has a
parameter of its own; figures 16 and 17 are. Two more parameters: how the cost of a request of one
sequence divides into the request's and the sequence's, fitted to the ranges that the artifact
sweeps for parallel sampling (figure 14; beam search is a prediction), and how beams branch, fitted
to figure 15 at width 2. Tried and left out: an overhead per layer beside that of a step (the fit
makes it zero), and one for steps with prompts beside decodes (the error falls by one point, for a
cause that we do not know).

**What is compared.** "Sustained" is the rate at which the mean of latency over output length
reaches 0.5 s/token. Rates depend on the length of the trace: a growing queue takes time to show, so
a trace of ten minutes seems to sustain some percent more than one of an hour. Ratios change less,
where enough requests come.
"""


def write_page(path: Path, reports: Sequence[Report], folder: Path) -> None:
    """Write the page for reports in the order given; images lie in `folder`."""
    relative = folder.relative_to(path.parent).as_posix()
    parts = [INTRODUCTION, _summary(reports), *_scales(reports)]
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


def _scales(reports: Sequence[Report]) -> list[str]:
    """A paragraph for each scale; figures that were made at different times may differ in it."""
    names: dict[str, list[str]] = {}
    for report in reports:
        names.setdefault(report.scale, []).append(report.name)
    return [f"Scale ({', '.join(each)}): {scale}.\n" for scale, each in names.items()]


def _anchor(title: str) -> str:
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def _section(report: Report, folder: str) -> str:
    parts = [f"## {report.title}\n", report.basis + "\n"]
    parts += [f"![{report.title}]({folder}/{stem}.svg)\n" for stem in report.images]
    parts += [_table(table) for table in report.tables]
    parts += [f"{note}\n" for note in report.notes]
    return "\n".join(parts)


_COLUMNS = {"octavo": "---:", "paper": "---:", "deviation": "---:", "target": "---"}


def _table(table: Table) -> str:
    """Empty columns are left out."""
    rows = [_cells(row, table.digits) for row in table.rows]
    used = [name for name in _COLUMNS if any(cells[name] for cells in rows)]
    lines = [f"| {' | '.join([table.caption, *used])} |"]
    lines.append(f"|{'|'.join(['---', *(_COLUMNS[name] for name in used)])}|")
    for row, cells in zip(table.rows, rows, strict=True):
        lines.append(f"| {' | '.join([row.label, *(cells[name] for name in used)])} |")
    return "\n".join(lines) + "\n"


def _cells(row: Row, digits: int) -> dict[str, str]:
    target = ""
    if row.target is not None:
        verdict = {True: "met", False: "**missed**", None: ""}[row.is_met]
        target = f"{row.target}: {verdict}"
    return {
        "octavo": _number(row.ours, digits),
        "paper": _number(row.paper, digits),
        "deviation": row.deviation,
        "target": target,
    }


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
