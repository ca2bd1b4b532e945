"""The simulator: what it decides, what it counts, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

from model_zoo import model_directory
from octavo.bench.throughput import Decoding
from octavo.bench.traces import TraceRequest
from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.policies import FairShare
from octavo.core.step import StepPlan, TokenWrites
from octavo.errors import ConfigError, OutOfMemory, RequestTooLong
from octavo.executor.local import LocalExecutor
from octavo.models.registry import read_model_config
from octavo.simulation import planning
from octavo.simulation.config import SimulationConfig
from octavo.simulation.cost_model import PAPER_2023
from octavo.simulation.executor import SimulatedExecutor, SimulatedStep
from octavo.simulation.planning import Fleet, Hopeless, Refusal, Target, fewest_gpus, highest_rate
from octavo.simulation.report import fewest
from octavo.simulation.result import RequestRecord
from octavo.simulation.run import Simulation, Watcher, simulate
from octavo.simulation.workloads import Workload, WorkloadSpec, build

UNCACHED = CacheConfig(num_blocks=983, enable_prefix_caching=False)
OPT = SimulationConfig("opt-13b", "a100-40gb", cache=UNCACHED, coefficients=PAPER_2023)


@dataclass(frozen=True)
class Traffic(Workload):
    decoding: Decoding = field(default_factory=Decoding)
    hash_block_size: int = 16


def steady(count: int, gap: float, prompt: int = 100, output: int = 20, **decoding: Any) -> Traffic:
    """One request every `gap` seconds."""
    requests = (TraceRequest(prompt + i % 7, output + i % 5, i * gap) for i in range(count))
    return Traffic(tuple(requests), Decoding(**decoding))


def test_one_request_by_hand() -> None:
    """A prompt and 4 decodes; the second request comes to an empty engine."""
    traffic = Traffic((TraceRequest(100, 5, 2.0), TraceRequest(100, 5, 50.0)))
    result = simulate(OPT, traffic)
    model = OPT.prepare().cost_model
    rows = [step.memory.num_tokens for step in result.steps]
    assert rows == [100, 1, 1, 1, 1] * 2
    first, second = result.requests
    assert first.arrival == 2.0
    assert result.steps[0].start == 2.0
    assert result.steps[5].start == 50.0
    assert first.latency == pytest.approx(second.latency)
    assert first.first_token == result.steps[0].end
    assert first.finish == result.steps[4].end
    assert first.normalized_latency == pytest.approx((result.steps[4].end - 2.0) / 5)
    assert first.time_per_output_token == pytest.approx((first.finish - first.first_token) / 4)
    assert result.steps[0].seconds > model.gpu.memory_bandwidth**-1 * model.size.weight_bytes
    assert result.mean_batched_requests == 1
    assert (result.num_unfinished, result.block_size, result.num_blocks) == (0, 16, 983)
    window = result.between(50.0)
    assert len(window.requests) == 1
    assert window.requests_per_second == pytest.approx(1 / second.latency)
    assert len(result.between(0.0, 50.0).steps) == 5


def test_equal_arguments_give_equal_results() -> None:
    traffic = steady(40, 0.02, beam_width=3)
    assert simulate(OPT, traffic) == simulate(OPT, traffic)


def real_executor(config: SimulationConfig) -> type[SimulatedExecutor]:
    """Computes with the real executor; time is still the simulator's."""

    class RealExecutor(SimulatedExecutor):
        def submit(self, plan: StepPlan) -> SimulatedStep:
            if not self.spans:
                model_config = read_model_config(config.model)
                self.real = LocalExecutor(config.engine_config, model_config)
                assert self.real.capacity.num_blocks == self.capacity.num_blocks
            step = super().submit(plan)
            return replace(step, outcome=self.real.submit(plan).result())

    return RealExecutor


def decisions(plans: list[StepPlan]) -> Iterator[Any]:
    """Plans without the tokens that were drawn."""
    for plan in plans:
        opened = [
            (row.seq_id, len(row.token_ids), row.num_computed_tokens, row.num_draws)
            for row in plan.opened
        ]
        writes = plan.token_writes
        unwritten = replace(plan, opened=[], token_writes=TokenWrites.none())
        yield unwritten, opened, writes.seq_ids, writes.positions


@pytest.mark.parametrize(
    ("cache", "scheduler", "decoding"),
    [
        ({}, {"preemption_mode": "recompute"}, Decoding()),
        ({}, {"preemption_mode": "swap", "enable_chunked_prefill": False}, Decoding(n=2)),
        ({"memory_policy": "orca-oracle", "num_blocks": 70}, {}, Decoding(n=2)),
        ({"memory_policy": "fastertransformer"}, {}, Decoding()),
    ],
    ids=["recompute", "swap", "orca", "fastertransformer"],
)
def test_the_simulator_decides_as_the_engine_does(
    cache: dict[str, Any],
    scheduler: dict[str, Any],
    decoding: Decoding,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same plans, block by block, as with a real executor of the same speed."""
    config = SimulationConfig(
        str(model_directory("llama")),
        "cpu",
        max_model_len=96,
        cache=CacheConfig(
            **{
                "block_size": 4,
                "num_blocks": 60,
                "enable_prefix_caching": "memory_policy" not in cache,
                **cache,
            }
        ),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=96, **scheduler),
    )
    requests = tuple(
        TraceRequest(10 + 7 * i % 40, 5 + 11 * i % 30, 1e-4 * i, (i % 3,)) for i in range(16)
    )
    traffic = Traffic(requests, replace(decoding, temperature=1.0), hash_block_size=8)

    def plans() -> list[Any]:
        simulation = Simulation(config, traffic)
        seen: list[StepPlan] = []
        simulation.engine.observers.append(lambda plan, result, progress: seen.append(plan))
        assert simulation.run().num_unfinished == 0
        if "preemption_mode" in scheduler:
            assert simulation.engine.scheduler.num_preemptions[scheduler["preemption_mode"]] > 0
        return list(decisions(seen))

    simulated = plans()
    monkeypatch.setattr("octavo.simulation.run.SimulatedExecutor", real_executor(config))
    assert plans() == simulated


def test_overlap_plans_a_step_ahead() -> None:
    """The same work; a request that comes to a busy engine waits for one step more."""
    ahead = replace(OPT, overlap=True)
    assert simulate(ahead, steady(1, 1.0)).requests == simulate(OPT, steady(1, 1.0)).requests
    plain, overlapped = simulate(OPT, steady(30, 0.05)), simulate(ahead, steady(30, 0.05))
    assert overlapped.time_to_first_token.mean > plain.time_to_first_token.mean
    spans = [(step.start, step.end) for step in overlapped.steps]
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_samples_share_and_part() -> None:
    result = simulate(OPT, steady(20, 0.05, prompt=400, n=4))
    assert result.mean_batched_sequences > 3 * result.mean_batched_requests
    assert 0.4 < result.sharing_saves < 0.75
    # Samples share the prompt from the start, as in the paper's software.
    prompt = result.steps[0].memory
    assert prompt.num_logical_blocks == 4 * prompt.num_physical_blocks


def test_beams_share_more_the_closer_their_candidates() -> None:
    """Of tied candidates all come from the best beam; far apart, every beam goes its own way."""
    traffic = steady(10, 0.2, output=60, beam_width=4)
    saves = [
        simulate(replace(OPT, beam_spacing=spacing), traffic).sharing_saves
        for spacing in (0.01, 1.0, 100.0)
    ]
    assert saves == sorted(saves, reverse=True)
    assert saves[0] > saves[-1] + 0.05


def test_equal_hashes_are_found() -> None:
    requests = tuple(TraceRequest(80, 4, 5.0 * i, (1, 2, 3, 10 + i)) for i in range(4))
    config = replace(OPT, cache=CacheConfig(num_blocks=983))
    result = simulate(config, Traffic(requests))
    # The blocks of the first three hashes; what follows is each request's own.
    assert [request.num_cached_tokens for request in result.requests] == [0, 48, 48, 48]
    assert result.prefix_hit_rate == pytest.approx(3 * 48 / (4 * 80))


def test_reserving_systems_serve_fewer_at_once() -> None:
    """Figure 13's order, in small."""
    traffic = steady(400, 0.01, prompt=160, output=340)
    batches = {}
    for policy in ("paged", "orca-oracle", "orca-pow2", "orca-max"):
        cache = replace(UNCACHED, memory_policy=policy)
        result = simulate(replace(OPT, cache=cache), traffic, until=40.0)
        batches[policy] = result.between(20.0).mean_batched_requests
        slots = result.mean_slots
        assert slots is not None
        assert slots.total == pytest.approx(983 * 16)
    assert list(batches.values()) == sorted(batches.values(), reverse=True)
    assert batches["orca-max"] == 7


def test_a_batch_of_fastertransformer_ends_together() -> None:
    cache = replace(UNCACHED, memory_policy="fastertransformer")
    requests = tuple(TraceRequest(50, output, 0.0) for output in (10, 100, 40))
    result = simulate(replace(OPT, cache=cache), Traffic(requests))
    assert {request.finish for request in result.requests} == {result.seconds}
    assert len(result.steps) == 100
    # Those that are done are computed on: all decodes take as long, but for the growing context.
    decodes = [step.seconds for step in result.steps[1:]]
    assert decodes == sorted(decodes)


def test_it_ends_when_told() -> None:
    traffic = steady(100, 0.1)
    result = simulate(OPT, traffic, until=3.0)
    assert result.steps[-2].end < 3.0 <= result.seconds
    assert 0 < result.num_unfinished < 100
    result = simulate(OPT, traffic, finished=lambda records, waits: True)
    assert len(result.requests) == 1


def test_what_can_never_run_is_refused() -> None:
    with pytest.raises(RequestTooLong, match=r"request 1 has 2000 \+ 100 tokens, but .* 2048 here"):
        simulate(OPT, Traffic((TraceRequest(9, 9), TraceRequest(2000, 100))))
    with pytest.raises(
        RequestTooLong, match=r"request 1: max_tokens: 10 sequence\(s\) of up to 1800"
    ):
        simulate(OPT, Traffic((TraceRequest(9, 9), TraceRequest(100, 1700)), Decoding(n=10)))
    with pytest.raises(OutOfMemory, match="a KV cache of one block does not fit"):
        simulate(replace(OPT, cache=CacheConfig(), gpu="cpu"), steady(1, 1.0))
    with pytest.raises(ConfigError, match=r"num_gpus: .*heads \(40\) cannot be divided"):
        simulate(replace(OPT, num_gpus=3), steady(1, 1.0))
    with pytest.raises(ConfigError, match="num_gpus: 0 is less than 1"):
        replace(OPT, num_gpus=0)


def test_the_highest_rate_meets_the_target_and_a_little_more_misses_it() -> None:
    target = Target(normalized_latency=0.05)
    found = highest_rate(OPT, lambda _, rate: steady(100, 1 / rate), target, resolution=0.1)
    rates = {probe.rate: probe.is_met for probe in found.probes}
    assert rates[found.rate]
    missed = [rate for rate, is_met in rates.items() if not is_met]
    assert found.rate < min(missed) <= 1.1 * found.rate
    # What was cut short would have missed.
    whole = simulate(OPT, steady(100, 1 / min(missed)))
    assert whole.normalized_latency > 0.05
    impossible = highest_rate(OPT, lambda _, rate: steady(3, 1 / rate), Target(1e-6))
    assert impossible.rate == 0


def test_a_search_may_begin_below_the_lowest_rate_that_it_falls_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "MAX_PROBES", 2)
    first = planning.MIN_RATE / 2
    for target, rates in ((1.0, [first, planning.STEP * first]), (1e-6, [first])):
        found = highest_rate(OPT, lambda _, rate: steady(3, 1 / rate), Target(target), first)
        assert [each.rate for each in found.probes] == rates


def test_hopeless_is_certain() -> None:
    result = simulate(OPT, steady(100, 0.01))
    for limit in (0.5, 0.9, 1.1):
        late = result.time_to_first_token.at[99] * limit
        slow = result.time_per_output_token.at[99] * limit
        mean = result.normalized_latency * limit
        for target in (Target(mean), Target(None, late), Target(None, None, slow)):
            hopeless = Hopeless(target, 100)
            gave_up = any([hopeless([record]) for record in result.requests])
            assert gave_up == (not target.is_met(result)) == (limit < 1)


def test_who_waits_too_long_is_late_before_it_finishes() -> None:
    """A crowd that comes at once: most of it waits while the first ones are served."""
    crowd = Traffic(tuple(TraceRequest(500, 200) for _ in range(300)))
    target = Target(time_to_first_token=2.0)
    whole = simulate(OPT, crowd)
    assert not target.is_met(whole)
    by_finished = simulate(OPT, crowd, finished=_without_waits(Hopeless(target, 300)))
    by_waiting = simulate(OPT, crowd, finished=Hopeless(target, 300))
    assert len(by_waiting.steps) < len(by_finished.steps) / 2 < len(whole.steps) / 2


def _without_waits(hopeless: Hopeless) -> Watcher:
    return lambda records, waits: hopeless(records)


def test_fewest_devices() -> None:
    """OPT-66B needs four of them for its weights alone."""
    config = SimulationConfig("opt-66b", "a100-40gb", cache=replace(UNCACHED, num_blocks=None))
    found = fewest_gpus(
        config, lambda _, rate: steady(60, 1 / rate), 4.0, Target(0.1), (1, 4, 5, 8)
    )
    kinds = [type(choice) for choice in found]
    assert kinds == [Refusal, Fleet, Refusal, Fleet]
    best = fewest(found)
    assert best is not None
    assert (best.config.num_gpus, best.num_gpus % 4) == (4, 0)
    config = SimulationConfig("llama-13b", "a100-80gb", cache=UNCACHED)
    found = fewest_gpus(config, lambda _, rate: steady(3, 1 / rate), 1.0, Target(10.0), (5, 1))
    refused, chosen = found
    assert isinstance(refused, Refusal)
    assert "intermediate size (13824) cannot be divided" in refused.reason
    assert isinstance(chosen, Fleet)
    with pytest.raises(ConfigError, match="target: give a latency"):
        Target()
    with pytest.raises(ConfigError, match="target: -1 s is not a positive number"):
        Target(-1)
    with pytest.raises(ConfigError, match="target: inf s is not a positive number"):
        Target(0.1, math.inf)


def test_a_size_at_which_nothing_can_be_quantized_is_refused_alone(tmp_path: Path) -> None:
    """Groups of 32 divide the inputs of one device's projections, and not those of four."""
    fields = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512},
        **{"hidden_size": 144, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "torch_dtype": "bfloat16"},
        **{"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = SimulationConfig(str(tmp_path), "a100-40gb", quantization="int4", cache=UNCACHED)
    refused, chosen = fewest_gpus(
        config, lambda _, rate: steady(3, 1 / rate), 1.0, Target(10.0), (4, 1)
    )
    assert isinstance(refused, Refusal)
    assert "quantization: " in refused.reason
    assert "none of the weights can be quantized to int4" in refused.reason
    assert isinstance(chosen, Fleet)


def test_no_number_of_engines_up_to_the_limit_is_left_out() -> None:
    """Seven are needed, and the number is doubled until there are enough."""
    limits = {7: 7, 6: "6 devices do not meet the target"}
    for max_gpus, expected in limits.items():
        [found] = fewest_gpus(
            OPT, lambda _, rate: steady(60, 1 / rate), 20.0, Target(0.03), (1,), max_gpus
        )
        assert expected == (found.reason if isinstance(found, Refusal) else found.num_engines)
    [refused] = fewest_gpus(OPT, lambda _, rate: steady(1, 1.0), 1.0, Target(0.1), (4,), 3)
    assert isinstance(refused, Refusal)
    assert refused.reason == "one engine takes more devices than there may be"


def test_engines_that_no_request_reaches_do_not_end_the_search() -> None:
    """A target that is missed by few requests, too, is not met by more engines."""
    spec = WorkloadSpec("alpaca", rate=1.0, duration=5.0)
    found = fewest_gpus(OPT, lambda _, rate: build(spec.at_rate(rate)), 1.0, Target(1e-6), (1, 2))
    assert [str(each.reason) for each in found if isinstance(each, Refusal)] == [
        "64 devices do not meet the target",
        "64 devices do not meet the target",
    ]
    with pytest.raises(ConfigError, match="rate: no request arrives"):
        fewest_gpus(OPT, lambda _, rate: build(spec.at_rate(rate)), 1e-6, Target(1e-6))


def test_nothing_finished_is_infinitely_slow() -> None:
    result = simulate(OPT, steady(1, 1.0), until=1e-9)
    assert result.normalized_latency == math.inf
    assert result.to_values()["normalized_latency"] is None


# -------------------------------------------------------------------- fair shares


def tenants(rate: float, seconds: float) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """One that sends slowly, and one that sends ten times as often, and longer requests."""
    slow = [
        TraceRequest(100 + i % 7, 60 + i % 5, 0.5 + i / rate, tenant="slow")
        for i in range(int(rate * seconds))
    ]
    flood = [
        TraceRequest(200 + i % 11, 150 + i % 13, i / (10 * rate), tenant="flood")
        for i in range(int(10 * rate * seconds))
    ]
    return slow, flood


def served(policy: str, *traffic: list[TraceRequest]) -> dict[str, list[RequestRecord]]:
    """What became of each tenant's requests."""
    config = replace(OPT, scheduler=SchedulerConfig(policy=policy))
    requests = sorted(chain(*traffic), key=lambda request: request.arrival_s or 0.0)
    by_tenant: dict[str, list[RequestRecord]] = {}
    for record in simulate(config, Traffic(tuple(requests))).requests:
        by_tenant.setdefault(record.tenant, []).append(record)
    return by_tenant


def test_a_flood_does_not_slow_another_tenant_down() -> None:
    """Alone, the slow tenant's steps are nearly empty; with the flood they are full, so each takes
    longer. First come, first served, its requests wait behind the whole flood."""
    slow, flood = tenants(1.2, 30.0)

    def latency(records: list[RequestRecord]) -> float:
        return sum(record.normalized_latency for record in records) / len(records)

    def first_token(records: list[RequestRecord]) -> float:
        return sum(record.time_to_first_token for record in records) / len(records)

    alone = served("fcfs", slow)["slow"]
    fair, fcfs = served("fair", slow, flood), served("fcfs", slow, flood)
    assert len(fair["slow"]) == len(slow)
    assert len(fair["flood"]) == len(flood)
    assert latency(fair["slow"]) < 3 * latency(alone)
    assert latency(fcfs["slow"]) > 7 * latency(alone)
    assert first_token(fair["slow"]) < 0.6
    assert first_token(fcfs["slow"]) > 8
    assert latency(fair["flood"]) < 1.1 * latency(fcfs["flood"])  # it pays little for that


def test_two_floods_get_equal_service() -> None:
    """One sends long prompts, the other wants long outputs. While requests of both wait, their
    virtual token counters differ by at most the bound of VTC, and the service that they receive by
    at most twice that."""
    first = [TraceRequest(200, 150, 0.0, tenant="flood")] * 240
    second = [TraceRequest(700, 10, 0.02 * i, tenant="second") for i in range(240)]
    config = replace(OPT, scheduler=SchedulerConfig(policy="fair"))
    traffic = sorted([*first, *second], key=lambda request: request.arrival_s or 0.0)
    simulation = Simulation(config, Traffic(tuple(traffic)))
    scheduler = simulation.engine.scheduler
    policy = scheduler.policy
    assert isinstance(policy, FairShare)
    bound = max(policy.input_weight * 700, policy.output_weight * 983 * 16)
    counters: list[dict[str, float]] = []

    def observe(*_: object) -> None:
        if {request.tenant for request in scheduler.waiting} == {"flood", "second"}:
            counters.append(policy.counters())

    simulation.engine.observers.append(observe)
    simulation.run(None)
    assert len(counters) > 300
    assert max(abs(each["flood"] - each["second"]) for each in counters) <= bound
    begin, end = counters[50], counters[-1]
    service = [end[name] - begin[name] for name in ("flood", "second")]
    assert abs(service[0] - service[1]) <= 2 * bound
    assert min(service) > 2 * bound
