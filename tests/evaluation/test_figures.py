"""Figures are drawn from made-up results here; what the numbers are is tested elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError, OctavoError
from octavo.evaluation import drawing, sources
from octavo.evaluation.demo_sharing import DemoSharing
from octavo.evaluation.figures import FIGURES, find_figure
from octavo.evaluation.figures.fig2 import PARTS
from octavo.evaluation.figures.fig13 import most_requests
from octavo.evaluation.jobs import Job
from octavo.evaluation.page import write_page
from octavo.evaluation.paper_values import FIGURE_2, FIGURE_12, FIGURE_13, FIGURE_15
from octavo.evaluation.report import Report, Row, Table, Target, load, save
from octavo.evaluation.scale import FULL, QUICK
from octavo.evaluation.simulations import Latency, SteadyState, Sweep


def as_in_the_paper(job: Job) -> Any:
    """A result, the paper's own where it is printed."""
    if isinstance(job, Sweep):
        rate = job.first
        points = [(0.5 * rate, 0.1), (0.9 * rate, 0.2), (rate, 0.5), (1.1 * rate, 1.4)]
        return {
            "points": [{"rate": at, "latency": latency} for at, latency in points],
            "sustained": {"0.2": 0.9 * rate, "0.5": rate},
        }
    if isinstance(job, SteadyState):
        workload = job.scenario.workload
        kind, width = (
            ("beam", workload.beam_width)
            if workload.beam_width
            else (
                "parallel",
                workload.n,
            )
        )
        batched = FIGURE_13.get(workload.source, {}).get(job.scenario.system, 1.0)
        parts = FIGURE_2.get(job.scenario.system, (100.0, 0.0, 0.0, 0.0))
        return {
            "slots": {name: part / 100 for name, part in zip(PARTS, parts, strict=True)},
            "mean_batched_requests": batched,
            "sharing_saves": FIGURE_15[kind].get(width or 1, 0.0) / 100,
        }
    if isinstance(job, Latency):
        return {"latency": 0.1}
    assert isinstance(job, DemoSharing)
    return {"sharing_saves": 0.3}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn(name: str, tmp_path: Path) -> None:
    module = find_figure(name)
    jobs = module.jobs(QUICK)
    assert len(set(jobs)) == len(jobs)
    report = module.make({job: as_in_the_paper(job) for job in jobs}, QUICK, tmp_path)
    met, total = report.counts()
    assert met == total, report.missed()
    for stem in report.images:
        assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{stem}.svg").read_text(encoding="utf-8")
    save(report, tmp_path)
    copy = load(tmp_path / f"{name}.json")
    assert [row.deviation for row in copy.rows] == [row.deviation for row in report.rows]


@pytest.mark.parametrize("name", ["fig12", "fig14", "fig16", "fig17", "fig18", "fig19"])
def test_the_full_scale_is_another(name: str) -> None:
    module = find_figure(name)
    assert not set(module.jobs(FULL)) & set(module.jobs(QUICK))


def test_figure_twelve_has_a_sweep_for_every_line() -> None:
    sweeps = [job for job in find_figure("fig12").jobs(QUICK) if isinstance(job, Sweep)]
    assert len(sweeps) == sum(len(rates) for rates in FIGURE_12.values()) == 30
    [largest] = [
        sweep.scenario.batch_limit
        for sweep in sweeps
        if sweep.scenario.system == "fastertransformer"
        and (sweep.scenario.model, sweep.scenario.workload.source) == ("opt-175b", "alpaca")
    ]
    assert largest == 80


def test_orca_s_counts_bound_alpaca_s_lengths() -> None:
    """Real rows leave room for what the paper counts; the fit, however well packed, does not."""
    rows, fit = sources.alpaca(), sources.alpaca_lognormal()
    for system, guesses in (("orca-oracle", False), ("orca-pow2", True)):
        counted = FIGURE_13["alpaca"][system]  # type: ignore[index]
        assert most_requests(fit, guesses) < counted < most_requests(rows, guesses)


def write_measurement(folder: Path, kind: str, rows: list[Mapping[str, object]]) -> None:
    content = {"kind": kind, "device": "NVIDIA H200", "model": "OPT-13B", "rows": rows}
    (folder / f"{kind}.json").write_text(json.dumps(content), encoding="utf-8")


def test_measurements_come_before_the_cost_model(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"kind": "something else"}', encoding="utf-8")
    write_measurement(
        tmp_path,
        "preemption",
        [
            {"method": method, "block_size": size, "seconds_per_token": 0.1}
            for method in ("recompute", "swap")
            for size in (16, 32)
        ],
    )
    write_measurement(
        tmp_path,
        "attention-kernel",
        [
            {"kernel": kernel, "batch_size": 8, "context": 64, "microseconds": time}
            for kernel, time in (("paged", 12), ("contiguous", 10))
        ],
    )
    scale = QUICK.with_measurements(tmp_path)
    fig19 = find_figure("fig19")
    assert fig19.jobs(scale) == []
    assert "(b) measured on NVIDIA H200, OPT-13B" in fig19.make({}, scale, tmp_path).basis
    fig18 = find_figure("fig18")
    results = {job: as_in_the_paper(job) for job in fig18.jobs(scale)}
    report = fig18.make(results, scale, tmp_path)
    assert report.rows[0].ours == pytest.approx(1.2)
    assert report.rows[1].ours is None
    assert QUICK.with_measurements(tmp_path / "none").measurements is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "bad.json"),
        ('{"kind": "block-size", "rows": 3}', "rows must be a list"),
        ('{"kind": "block-size", "rows": [{"trace": "x"}]}', "row 0 needs trace, block_size"),
    ],
)
def test_broken_measurements(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        find_figure("fig18").jobs(QUICK.with_measurements(tmp_path))


def test_targets() -> None:
    points, percent = Target(3, "points"), Target(20, "percent")
    assert Row("a", 23.0, 20.4, points).deviation == "+2.6 points"
    assert Row("a", 23.0, 20.4, points).is_met
    assert Row("a", 23.5, 20.4, points).is_met is False
    assert Row("a", 2.0, 2.5, percent).deviation == "-20.0%"
    assert Row("a", 1.9, 2.5, percent).is_met is False
    assert Row("a", 1.9, None, percent).is_met is None
    assert Row("a", 1.9, 2.5).is_met is None


def test_the_page_says_what_was_missed(tmp_path: Path) -> None:
    rows = [
        Row("near", 2.0, 2.1, Target(20, "percent")),
        Row("far", 1.0, 2.0, Target(20, "percent")),
    ]
    report = Report(
        "fig0",
        "Figure 0: a test",
        "Simulated: nothing.",
        [Table("What", rows)],
        ["fig0"],
        scale="tiny",
    )
    folder = tmp_path / "figures"
    write_page(tmp_path / "page.md", [report], folder)
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "Scale (fig0): tiny." in text
    assert "| Simulated | 1 of 2 | far -50.0% |" in text
    assert "![Figure 0: a test](figures/fig0.svg)" in text
    assert "| far | 1.00 | 2.00 | -50.0% | 20%: **missed** |" in text


def test_unknown_figure() -> None:
    with pytest.raises(ConfigError, match=r"'fig3' is not one of table1, fig2, .*fig19, all"):
        find_figure("fig3")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    with pytest.raises(OctavoError, match=r"pip install .octavo\[figures\]"):
        find_figure("table1").make({}, QUICK, tmp_path)
