from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from octavo.bench.traces import TraceRequest, make_prompts
from octavo.errors import ConfigError
from octavo.simulation import arrivals, sources
from octavo.simulation.workloads import WorkloadSpec, build, chatbot, shuffled, with_prefix


def test_lengths_are_those_of_the_paper() -> None:
    """Figure 11: half of the authors' pairs; Alpaca is scaled to the printed means."""
    pairs = sources.sharegpt()
    assert len(pairs) == 39_864
    assert sum(pair.prompt_tokens for pair in pairs) / len(pairs) == pytest.approx(161.80, abs=0.01)
    assert sum(pair.output_tokens for pair in pairs) / len(pairs) == pytest.approx(337.70, abs=0.01)
    assert max(pair.num_tokens for pair in pairs) < 2048
    for fitted in (sources.alpaca(), sources.alpaca_lognormal()):
        assert statistics.fmean(p.prompt_tokens for p in fitted) == pytest.approx(19.31, rel=0.02)
        assert statistics.fmean(p.output_tokens for p in fitted) == pytest.approx(58.45, rel=0.02)


def test_every_source_can_be_read() -> None:
    for name in sources.SOURCES:
        assert len(sources.read_source(name)) >= 500
    with pytest.raises(ConfigError, match="'nothing' is neither a file nor one of alpaca"):
        sources.read_source("nothing")


def test_a_file_is_a_source(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n3,5,6\n1,7,8\n9,1,1\n")
    workload = build(WorkloadSpec(str(path), duration=5))
    assert [request.arrival_s for request in workload.requests] == [1, 3]


def test_poisson_in_quanta() -> None:
    times = arrivals.poisson(50, 400, seed=1)
    assert times == sorted(times)
    assert all(round(time * 100) == pytest.approx(time * 100) for time in times)
    counts = np.bincount([int(time) for time in times], minlength=400)
    assert counts.mean() == pytest.approx(50, rel=0.03)
    assert counts.var() == pytest.approx(50, rel=0.25)
    assert times == arrivals.poisson(50, 400, seed=1)
    assert times != arrivals.poisson(50, 400, seed=2)


@pytest.mark.parametrize("burstiness", [0, 0.5, 2])
def test_gamma_burstiness(burstiness: float) -> None:
    gaps = np.diff(arrivals.gamma(20, 500, 0, burstiness))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.1, abs=1e-9)


def test_shuffled_takes_all_before_any_twice() -> None:
    pairs = [TraceRequest(i, 1) for i in range(1, 8)]
    drawn = shuffled(pairs, 17, seed=3)
    assert sorted(pair.prompt_tokens for pair in drawn[:7]) == list(range(1, 8))
    assert sorted(pair.prompt_tokens for pair in drawn[7:14]) == list(range(1, 8))
    assert len(drawn) == 17


def test_a_prefix_is_shared_by_whole_blocks() -> None:
    """341 tokens are 21 blocks and 5 tokens: the 336 are equal, the rest is each one's own."""
    requests = [with_prefix(TraceRequest(9, 4), 341) for _ in range(2)]
    first, second = make_prompts(requests, 30_000, hash_block_size=16)
    assert len(first) == len(second) == 350
    assert first[:336] == second[:336]
    assert first[336:] != second[336:]
    workload = build(WorkloadSpec("translation", 5, 10, prefix_tokens=341))
    assert workload.hash_block_size == 16


def test_chatbot_prompts_are_the_end_of_the_history() -> None:
    pairs = sources.sharegpt_unfiltered()
    requests = chatbot(pairs, 2000, new_conversation=0.1, seed=0)
    assert max(request.prompt_tokens for request in requests) == 1024
    assert max(request.output_tokens for request in requests) == 1016
    full = sum(request.prompt_tokens == 1024 for request in requests) / 2000
    assert 0.75 < full < 0.95
    alone = chatbot(pairs, 2000, new_conversation=1.0, seed=0)
    assert statistics.median(request.prompt_tokens for request in alone) < 60


def test_equal_specs_give_equal_workloads() -> None:
    spec = WorkloadSpec("alpaca", 20, 30, n=4)
    workload = build(spec)
    assert workload == build(spec)
    assert workload.decoding.n == 4
    assert len(workload.requests) == pytest.approx(600, rel=0.15)
    assert build(spec.at_rate(10)) != workload


def test_a_trace_keeps_its_arrivals_and_blocks() -> None:
    workload = build(WorkloadSpec("mooncake-conversation", duration=60))
    assert workload.requests
    assert all(request.hash_ids for request in workload.requests)
    assert max(request.arrival_s or 0 for request in workload.requests) < 60
    assert workload.hash_block_size == 512


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"source": "sharegpt"}, "rate: sharegpt has no arrival times"),
        ({"source": "sharegpt", "rate": 0.0, "duration": 5}, "rate: 0.0 is not a positive number"),
        ({"source": "sharegpt", "rate": 1e-9, "duration": 5}, "no request arrives in 5 s"),
        ({"source": "sharegpt", "rate": 2.0}, "duration: a rate needs a duration"),
        ({"source": "azure-code", "burstiness": 2.0}, "burstiness: a trace's own arrivals"),
        ({"source": "azure-code", "duration": -1.0}, "no request of azure-code arrives"),
        (
            {"source": "alpaca", "new_conversation": 0.0},
            r"new_conversation: 0.0 is not in \(0, 1\]",
        ),
        (
            {"source": "mooncake-conversation", "duration": 9, "prefix_tokens": 32},
            "brings shared prefixes of its own",
        ),
        (
            {"source": "alpaca", "rate": 3.0, "duration": 9, "burstiness": -1.0},
            "burstiness: -1.0 is neither 0 nor between 0.001 and 100",
        ),
    ],
)
def test_mistakes(spec: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(WorkloadSpec(**spec))  # type: ignore[arg-type]
