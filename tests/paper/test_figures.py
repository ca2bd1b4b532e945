"""Figures are drawn from made-up results here; what the numbers are is tested elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError, OctavoError
from octavo.simulation import drawing, sources
from octavo_paper.demo_sharing import DemoSharing
from octavo_paper.figures import FIGURES
from octavo_paper.figures.fig2 import PARTS
from octavo_paper.figures.fig13 import most_requests
from octavo_paper.jobs import Job
from octavo_paper.page import write_page
from octavo_paper.paper_values import FIGURE_2, FIGURE_12, FIGURE_13, FIGURE_15
from octavo_paper.report import Report, Row, Table, Target, load, save
from octavo_paper.scale import FULL, QUICK, Scale
from octavo_paper.simulations import Latency, SteadyState, Sweep

ROW = '"trace": "sharegpt", "block_size": 16, "seconds_per_token"'


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
    module = FIGURES.find(name)
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
    module = FIGURES.find(name)
    assert not set(module.jobs(FULL)) & set(module.jobs(QUICK))


def test_figure_twelve_has_a_sweep_for_every_line() -> None:
    sweeps = [job for job in FIGURES.find("fig12").jobs(QUICK) if isinstance(job, Sweep)]
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
    content = {
        "kind": kind,
        "device": "NVIDIA H200",
        "model": "opt-13b",
        "command": "measure",
        "setting": f"{kind}s of a test",
        "rows": rows,
    }
    (folder / f"{kind}.json").write_text(json.dumps(content), encoding="utf-8")


def make_figure(name: str, scale: Scale, folder: Path) -> Report:
    module = FIGURES.find(name)
    return module.make({job: as_in_the_paper(job) for job in module.jobs(scale)}, scale, folder)


def test_measured_latencies_are_a_panel_of_their_own(tmp_path: Path) -> None:
    """Simulations stay beside the paper, measurements of another card do not come near it."""
    (tmp_path / "other.json").write_text('{"kind": "something else"}', encoding="utf-8")
    latencies = {("recompute", 16): 0.02, ("recompute", 32): 0.03, ("swap", 32): 0.033}
    write_measurement(
        tmp_path,
        "preemption",
        [
            {"method": method, "block_size": size, "seconds_per_token": latency}
            for (method, size), latency in latencies.items()
        ],
    )
    simulated = make_figure("fig19", QUICK, tmp_path)
    scale = QUICK.with_measurements(tmp_path)
    assert FIGURES.find("fig19").jobs(scale) == FIGURES.find("fig19").jobs(QUICK)
    report = make_figure("fig19", scale, tmp_path)
    assert report.tables[:2] == simulated.tables
    assert report.tables[2].rows == [
        Row("recompute, blocks of 16", 20.0, None),
        Row("recompute, blocks of 32", 30.0, None),
        Row("swap, blocks of 32", 33.0, None),
    ]
    assert report.basis.startswith("(a) cost model, (b) simulated, (c) measured on NVIDIA H200: ")
    assert "recompute 20.0 ms/token (blocks of 16) to 30.0 (blocks of 32), swap" in report.notes[2]
    assert "NVIDIA H200, opt-13b, `measure`: preemptions of a test." in report.notes[2]
    assert "10% apart" in report.notes[2]


def test_measured_kernels_and_moves_replace_the_cost_model(tmp_path: Path) -> None:
    write_measurement(
        tmp_path,
        "attention-kernel",
        [
            {"kernel": kernel, "batch_size": 8, "context": 64, "microseconds": time}
            for kernel, time in (("paged", 12), ("contiguous", 10))
        ],
    )
    write_measurement(
        tmp_path,
        "block-size",
        [{"trace": "sharegpt", "block_size": 16, "seconds_per_token": 0.01}],
    )
    write_measurement(
        tmp_path,
        "preemption-cost",
        [
            {"method": method, "block_size": 16, "milliseconds": time}
            for method, time in (("swap-out", 4), ("swap-in", 5), ("recompute", 12))
        ],
    )
    scale = QUICK.with_measurements(tmp_path)
    report = make_figure("fig18", scale, tmp_path)
    assert report.basis.startswith("(a) and (c) measured on NVIDIA H200, (b) simulated: ")
    assert [row.ours for row in report.rows[:2]] == [pytest.approx(1.2), None]
    assert [row.label for row in report.tables[2].rows] == ["ShareGPT, blocks of 16"]
    report = make_figure("fig19", scale, tmp_path)
    assert report.basis.startswith("(a) measured on NVIDIA H200, (b) simulated: ")
    assert {row.label: row.ours for row in report.tables[0].rows if row.ours} == {
        "swap, blocks of 16": 9.0,
        "recompute, blocks of 16": 12.0,
    }
    assert len(report.tables) == 2
    assert QUICK.with_measurements(tmp_path / "none").measurements is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "bad.json"),
        ("[" * 100_000, "bad.json"),
        ('{"kind": "block-size", "rows": 3}', "rows must be a list"),
        ('{"kind": "block-size", "rows": [{"trace": "x"}]}', "row 0 needs trace, block_size"),
        *(
            (f'{{"kind": "block-size", "rows": [{{{ROW}: {value}}}]}}', "which is positive")
            for value in ("0", "-1", "NaN", "Infinity")
        ),
        ('{"kind": "block-size", "rows": []}', "device must be a string, not None"),
    ],
)
def test_broken_measurements(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        FIGURES.find("fig18").jobs(QUICK.with_measurements(tmp_path))


@pytest.mark.parametrize("text", ["", '{"name": "fig2', "[]", '"fig2"', "{}", '{"tables": [{}]}'])
def test_a_broken_report_is_named(tmp_path: Path, text: str) -> None:
    """As a full disk leaves it behind: those of other figures are read at each run."""
    path = tmp_path / "fig2.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"fig2\.json: no report; `octavo reproduce fig2` writes"):
        load(path)


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
        [Table("What", rows), Table("Ours", [Row("alone", 3.0, None)], 1)],
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
    assert "| Ours | octavo |\n|---|---:|\n| alone | 3.0 |\n" in text


def test_unknown_figure() -> None:
    with pytest.raises(ConfigError, match=r"'fig3' is not one of table1, fig2, .*fig19$"):
        FIGURES.find("fig3")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    with pytest.raises(OctavoError, match=r"pip install matplotlib"):
        FIGURES.find("table1").make({}, QUICK, tmp_path)
