from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click_harness import Octavo

from octavo.simulation.calibration import cost_model_of
from octavo.simulation.cost_model import Coefficients
from octavo.simulation.step_records import FORMAT, Setting, StepRecord
from octavo.simulation.step_shape import StepShape

ONCE = ("simulate", "--rate", 1, "--duration", 20, "--software", "paper-2023")


def test_a_run_as_text_and_as_json(octavo: Octavo) -> None:
    values = json.loads(octavo(*ONCE, "--json").stdout)
    assert values["num_requests"] > 10
    assert values["num_unfinished"] == 0
    assert 0.02 < values["normalized_latency"] < 0.06
    assert sum(values["slots"].values()) == pytest.approx(16 * values["num_blocks"])
    assert values["settings"]["software"] == "paper-2023"
    text = octavo(*ONCE).stdout
    assert re.search(rf"^requests +{values['num_requests']} in ", text, re.MULTILINE)
    assert "external fragmentation & others" in text


def test_policies_and_decoding(octavo: Octavo) -> None:
    paged = json.loads(octavo(*ONCE, "--n", 2, "--json").stdout)
    orca = json.loads(octavo(*ONCE, "--n", 2, "--memory-policy", "orca-max", "--json").stdout)
    assert paged["sharing_saves"] > 0.05 > orca["sharing_saves"] == 0
    assert orca["normalized_latency"] > paged["normalized_latency"]


def test_a_trace_of_one_s_own(octavo: Octavo, tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1.5,3000,5\n2,20,7\n")
    refused = octavo("simulate", "--trace", trace)
    assert refused.exit_code == 1
    assert "error: workload: request 1 has 3000 + 5 tokens" in refused.stderr
    values = json.loads(octavo("simulate", "--trace", trace, "--skip-long", "--json").stdout)
    assert values["num_requests"] == 2
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,10,none\n")
    broken = octavo("simulate", "--trace", trace)
    assert "mine.csv:3: output_tokens is 'none'" in broken.stderr


def test_the_highest_rate_for_a_target(octavo: Octavo, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    args = ("simulate", "--duration", 5, "--software", "paper-2023", "--num-blocks", 200)
    result = octavo(*args, "--target-latency", 0.05, "--plot", tmp_path / "search", "--json")
    values = json.loads(result.stdout)
    assert values["rate"] > 0
    met = [probe["rate"] for probe in values["probes"] if probe["is_met"]]
    assert max(met) == values["rate"]
    assert {path.name for path in tmp_path.iterdir()} == {"search.png", "search.svg"}
    hopeless = octavo(*args, "--target-ttft", 1e-6)
    assert hopeless.exit_code == 1
    assert "no rate meets the target" in hopeless.stdout


def test_a_plot_of_a_run(octavo: Octavo, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert octavo(*ONCE, "--plot", tmp_path / "run").exit_code == 0
    assert (tmp_path / "run.svg").stat().st_size > 10_000
    failed = octavo(*ONCE, "--plot", tmp_path / "nowhere" / "run")
    assert "error: plot: there is no directory" in failed.stderr


def test_a_plan(octavo: Octavo) -> None:
    args = ("plan", "--model", "opt-66b", "--duration", 10, "--rate", 2, "--sizes", "1,4")
    for options in ((), ("--skip-long",)):  # what fits depends on the machine
        values = json.loads(octavo(*args, *options, "--target-latency", 0.5, "--json").stdout)
        assert values["num_gpus"] == 4
        assert "does not fit" in values["choices"][0]["refused"]
    text = octavo(*args, "--target-latency", 0.5).stdout
    assert "fewest: 4 x a100-40gb, as 1 engine on 4 each" in text
    assert octavo(*args, "--target-latency", 1e-4, "--max-gpus", 4).exit_code == 1


def test_a_search_says_what_it_simulates_before_it_does(octavo: Octavo) -> None:
    args = ("--duration", 5, "--software", "paper-2023", "--num-blocks", 200)
    for command in (
        ("plan", "--rate", 2, "--sizes", "1", "--target-ttft", 1e-6, "--max-gpus", 2, *args),
        ("simulate", "--rate", 2, "--target-ttft", 1e-6, *args),
    ):
        lines = octavo(*command).stderr.splitlines()
        assert re.fullmatch(r"1 x a100-40gb +2\.000 requests/s: simulating \d+ requests", lines[0])
        assert re.fullmatch(r"1 x a100-40gb +2\.000 requests/s: misses the target", lines[1])


def test_calibrate_and_use_it(octavo: Octavo, tmp_path: Path, steps: Path) -> None:
    out = tmp_path / "calibration.json"
    text = octavo("calibrate", steps, "--out", out).stdout
    assert "steps held out" in text
    assert re.search(r"^swap_efficiency +0\.84   \(no step tells; left as it was\)$", text, re.M)
    assert octavo(*ONCE[:-2], "--calibration", out).exit_code == 0
    other = octavo(*ONCE[:-2], "--calibration", out, "--model", "llama-13b")
    assert "error: calibration: it was made for another model: weight_bytes was" in other.stderr
    both = octavo(*ONCE, "--calibration", out)
    assert both.exit_code == 2
    assert "leave out --software" in both.stderr


def test_a_calibration_that_cannot_be_written(octavo: Octavo, tmp_path: Path, steps: Path) -> None:
    result = octavo("calibrate", steps, "--out", tmp_path / "nowhere" / "calibration.json")
    assert result.exit_code == 1
    assert "nowhere/calibration.json cannot be written: No such file or directory" in result.stderr


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """Made-up decodes of OPT-13B."""
    from dataclasses import asdict

    from octavo.simulation.cost_model import ModelSize
    from octavo.simulation.models import find_model

    size = ModelSize.of(find_model("opt-13b"), "float16")
    model = cost_model_of(Setting(size, "a100-40gb", 1, 16), Coefficients())
    setting = {"model": asdict(size), "gpu": "a100-40gb", "num_gpus": 1, "block_size": 16}
    lines = [{"octavo_steps": FORMAT, **setting}]
    for n in range(1, 60):
        shape = StepShape(n, n, n, 100 * n, 0)
        lines.append(asdict(StepRecord.of(shape, model.seconds(shape), 0.0, 0.0)))
    file = tmp_path / "steps.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--gpu", "b200"), "error: gpu: 'b200' is not one of a100-40gb, a100-80gb, h100, h200"),
        (("--model", "opt-14b"), "error: no model 'opt-14b'"),
        (("--trace", "sharegtp"), "error: trace: 'sharegtp' is neither a file nor one of alpaca"),
        (("--rate", 0), "error: rate: 0.0 is not a positive number"),
        (("--rate", "nan"), "error: rate: nan is not a positive number"),
        (("--rate", 1e9), "error: rate: 1e+09 requests/s for 20 s are more than 1,000,000"),
        (("--duration", 1e9), "error: duration: 1e+09 s is more than 1e+06 s"),
        (
            ("--memory-policy", "orca"),
            "error: memory_policy: 'orca' is not one of paged, orca-max, orca-pow2",
        ),
        (
            ("--num-gpus", 3),
            "error: num_gpus: the number of attention heads (40) cannot be divided evenly among 3",
        ),
        (("--gpu", "cpu"), "error: a KV cache of one block does not fit"),
        (("--n", 400), "error: workload: request 0: n: 400 sequences exceed max_num_seqs (256)"),
    ],
)
def test_mistakes(octavo: Octavo, args: tuple[str, object], message: str) -> None:
    result = octavo(*ONCE, *args)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
