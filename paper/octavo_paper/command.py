"""The `octavo reproduce` command: the paper's figures, beside the paper's numbers."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import click

from octavo.errors import ConfigError
from octavo.simulation.drawing import require_matplotlib
from octavo_paper.figures import FIGURES
from octavo_paper.jobs import Store, default_cache_directory, run_jobs
from octavo_paper.page import write_page
from octavo_paper.report import load, save
from octavo_paper.scale import FULL, QUICK


@click.command()
@click.argument("figures", nargs=-1)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="reproduction",
    show_default=True,
    help="Where reproduction.md and figures/ are written.",
)
@click.option(
    "--full", is_flag=True, help="Traces of one hour, as in the paper: hours instead of minutes."
)
@click.option(
    "--measurements",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Measurements on a GPU, *.json, for figures 18 and 19.  [default: OUT/measurements]",
)
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where results are kept.  [default: octavo/reproduce in the user's cache]",
)
@click.option(
    "--processes", type=click.IntRange(1), help="Jobs at once.  [default: one for each core]"
)
def reproduce(
    figures: tuple[str, ...],
    out: Path,
    full: bool,
    measurements: Path | None,
    cache_dir: Path | None,
    processes: int | None,
) -> None:
    """Draw the paper's FIGURES, with a table of how far our numbers are from the paper's.

    \b
    FIGURES are table1, fig2, fig11, fig12, ... fig19, or all (the default). No GPU is needed.
    Results are kept, and computed again only when the code behind them changes.
    """
    names = tuple(FIGURES) if not figures or "all" in figures else tuple(dict.fromkeys(figures))
    scale = (FULL if full else QUICK).with_measurements(measurements or out / "measurements")
    modules = [FIGURES.find(name) for name in names]
    folder = out / "figures"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", f"{folder}: {error.strerror}") from error
    require_matplotlib()
    store = Store(cache_dir or default_cache_directory())
    jobs = [job for module in modules for job in module.jobs(scale)]
    results = run_jobs(jobs, store, processes or os.cpu_count() or 1, sys.stderr.isatty())
    for module in modules:
        report = replace(module.make(results, scale, folder), scale=scale.description)
        save(report, folder)
        met, total = report.counts()
        click.echo(f"{report.name:8} {report.title}: {met} of {total} targets met")
        for row in report.missed():
            click.echo(f"{'':9}missed: {row.label}: {row.ours:.4g}, the paper {row.paper:.4g}")
    made = [folder / f"{name}.json" for name in FIGURES]
    reports = [load(path) for path in made if path.exists()]
    write_page(out / "reproduction.md", reports, folder)
    click.echo(f"{out / 'reproduction.md'}")
