from __future__ import annotations

from pathlib import Path

from click_harness import Octavo


def test_figures_a_page_and_kept_reports(octavo: Octavo, tmp_path: Path) -> None:
    out, kept = tmp_path / "out", tmp_path / "kept"
    for name in ("fig11", "table1"):
        run = octavo("reproduce", name, "--out", out, "--cache-dir", kept)
        assert run.exit_code == 0, run.output
    assert "Table 1: model sizes and server configurations: 3 of 3 targets met" in run.output
    page = (out / "reproduction.md").read_text(encoding="utf-8")
    # The figure made before is on the page, too, and in the paper's order.
    assert page.index("## Table 1") < page.index("## Figure 11")
    for name in ("fig11", "table1"):
        assert (out / "figures" / f"{name}.svg").exists()


def test_mistakes(octavo: Octavo, tmp_path: Path) -> None:
    run = octavo("reproduce", "fig12", "fig99", "--out", tmp_path)
    assert run.exit_code == 1
    assert "error: figure: 'fig99' is not one of table1, fig2" in run.stderr
    (tmp_path / "file").touch()
    run = octavo("reproduce", "table1", "--out", tmp_path / "file")
    assert run.exit_code == 2
    assert "is a file" in run.stderr
