from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.simulation.workloads import WorkloadSpec
from octavo_paper import simulations
from octavo_paper.paper_values import FIGURE_2, FIGURE_13, TABLE_1, SystemName
from octavo_paper.servers import SERVERS
from octavo_paper.simulations import Latency, Scenario, SteadyState, Sweep, crossing, measure


@pytest.mark.parametrize("model", TABLE_1)
def test_kv_slots_of_table_one(model: str) -> None:
    slots = SERVERS[model].num_slots() / 1000
    assert slots == pytest.approx(TABLE_1[model]["kv_slots"], rel=0.01)


@pytest.mark.parametrize("system", ["orca-max", "orca-oracle", "vllm"])
def test_figures_two_and_thirteen_in_short(system: SystemName) -> None:
    """A minute and a half of overload is enough to come near."""
    workload = WorkloadSpec("sharegpt", 4.0, 90.0)
    result = SteadyState(Scenario("opt-13b", system, workload), 45, 90).run()
    tokens = FIGURE_2[system][0]
    assert 100 * result["slots"]["token_states"] == pytest.approx(tokens, abs=6)
    assert sum(result["slots"].values()) == pytest.approx(1)
    assert result["mean_batched_requests"] == pytest.approx(FIGURE_13["sharegpt"][system], rel=0.2)


def test_a_shared_prefix_is_computed_once() -> None:
    workload = WorkloadSpec("translation", 20.0, 3.0, prefix_tokens=341)
    scenario = Scenario("llama-13b", "vllm", workload)
    alone = measure(scenario)
    shared = measure(replace(scenario, prefix_caching=True))
    assert shared["num_requests"] == alone["num_requests"] > 40
    assert shared["latency"] < 0.9 * alone["latency"]


def test_results_repeat() -> None:
    workload = WorkloadSpec("alpaca", 5.0, 4.0, beam_width=4)
    job = Latency(Scenario("opt-13b", "vllm", workload))
    assert job.run() == job.run()
    assert job.scenario.preemption == "swap"


def test_the_artifact_limits_requests_and_not_sequences() -> None:
    """Those that run, and the sequences of the one to be admitted, are 256 at most."""
    for width, requests in ((1, 256), (2, 255), (6, 251)):
        scenario = Scenario("opt-13b", "vllm", WorkloadSpec("alpaca", 1.0, 1.0, n=width))
        assert scenario.config().scheduler.max_num_seqs == width * requests
    batches = Scenario("opt-13b", "fastertransformer", scenario.workload.at_rate(1), batch_limit=9)
    assert replace(batches, workload=WorkloadSpec("alpaca", 1.0, 1.0)).max_num_seqs == 9


@pytest.mark.parametrize("first", [0.3, 1.9, 30.0])
def test_a_sweep_finds_the_knee(monkeypatch: pytest.MonkeyPatch, first: float) -> None:
    """Latency of a queue: 0.03 s/token, and infinite at 2 requests/s."""

    def queue(scenario: Scenario) -> dict[str, Any]:
        rate = scenario.workload.rate
        assert rate is not None
        return {"latency": 0.03 / (1 - rate / 2) if rate < 2 else 100.0}

    monkeypatch.setattr(simulations, "measure", queue)
    scenario = Scenario("opt-13b", "vllm", WorkloadSpec("sharegpt", 1.0, 1.0))
    result = Sweep(scenario, first, 0.01).run()
    assert result["sustained"]["0.5"] == pytest.approx(2 * (1 - 0.03 / 0.5), rel=0.01)
    rates = [point["rate"] for point in result["points"]]
    assert rates == sorted(rates)
    assert min(rates) < 0.7


def test_crossing() -> None:
    points = {1.0: {"latency": 0.1}, 2.0: {"latency": 0.4}, 3.0: {"latency": 0.9}}
    noisy = {0.5: {"latency": 0.6}, **points}
    assert crossing(noisy, 0.5) == crossing(points, 0.5)
    assert crossing(points, 0.2) == pytest.approx(1.5)
    assert crossing(points, 0.4) == pytest.approx(2.0)
    assert crossing(points, 5.0) is None
