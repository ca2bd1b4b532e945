"""docs/extending.md, "A figure, and a workload"."""

from __future__ import annotations

import json
from pathlib import Path

import toy_figure
from click.testing import CliRunner, Result
from toys import Register

from octavo.cli.main import main
from octavo.simulation.sources import SOURCES, alpaca
from octavo.simulation.workloads import WorkloadSpec, build
from octavo_paper.figures import FIGURES
from octavo_paper.jobs import job_key, source_fingerprint


def octavo(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_a_figure_is_computed_drawn_and_put_on_the_page(register: Register, tmp_path: Path) -> None:
    register(FIGURES, "toy", "toy_figure")
    out, kept = tmp_path / "out", tmp_path / "kept"
    run = octavo("reproduce", "toy", "--out", out, "--cache-dir", kept)
    assert run.exit_code == 0, run.output
    assert "Toy: lengths of prompts: " in run.stdout
    assert (out / "figures" / "toy.svg").exists()
    page = (out / "reproduction.md").read_text(encoding="utf-8")
    share = 100 * sum(pair.prompt_tokens > toy_figure.EDGE for pair in alpaca()) / len(alpaca())
    assert f"| prompts above 32 tokens, % | {share:.2f} | 10.00 |" in page
    [result] = kept.glob("*.json")
    assert result.stem == job_key(toy_figure.JOB)


def test_its_result_is_kept_until_its_own_code_changes(tmp_path: Path) -> None:
    with_figure = source_fingerprint(toy_figure.Lengths.DEPENDS_ON)
    assert with_figure != source_fingerprint(toy_figure.Lengths.DEPENDS_ON[:-1])


def test_a_workload_of_one_s_own_is_simulated(register: Register) -> None:
    register(SOURCES, "toy", toy_figure.toy_source)
    requests = build(WorkloadSpec("toy", rate=2.0, duration=4.0)).requests
    assert {request.output_tokens for request in requests} <= set(range(4, 33, 4))
    run = octavo("simulate", "--trace", "toy", "--rate", 2, "--duration", 4, "--json")
    assert run.exit_code == 0, run.output
    values = json.loads(run.stdout)
    assert values["num_requests"] == len(requests)
    assert values["settings"]["trace"] == "toy"
