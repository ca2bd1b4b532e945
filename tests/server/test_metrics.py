from __future__ import annotations

import dataclasses
import json
import logging
import re
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi import FastAPI, Response
from fastapi.testclient import TestClient

import model_zoo
from octavo import LLM, SamplingParams
from octavo.child_process import forward_logs
from octavo.engine.events import Counters, Gauges, Preempted
from octavo.engine.recorder import Recorder
from octavo.engine.snapshot import TierView
from octavo.errors import (
    InvalidRequest,
    LogitsNotFinite,
    Overloaded,
    RequestFailed,
    RequestTooLong,
    Unavailable,
)
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.messages import StepReport
from octavo.server.http.context import Context, reply
from octavo.server.http.errors import add_error_handlers
from octavo.server.http.settings import ServerSettings
from octavo.server.http.token_texts import TokenTexts
from octavo.server.observability.event_text import LOOKUP_ENDS
from octavo.server.observability.logs import JsonFormatter, TextFormatter
from octavo.server.observability.metrics import COUNTERS
from octavo.server.observability.observation import Observation
from octavo.server.offload import LARGE_REPLY
from server.observed import (
    FakeClient,
    admitted,
    engine_info,
    open_request,
    output_of,
    snapshot,
    view,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"
MODEL = {"model_name": "demo"}


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def seen() -> Observation:
    return Observation("demo")


@pytest.fixture
def http(client: FakeClient, seen: Observation) -> TestClient:
    app = FastAPI()
    app.state.context = Context(
        cast(EngineClient, client), ServerSettings(("demo",)), TokenTexts(None)
    )
    routers = seen.routers(cast(EngineClient, client))
    add_error_handlers(app, routers)
    for router in routers:
        app.include_router(router)
    return TestClient(app)


def report(**values: Any) -> StepReport:
    gauges = Gauges(step_tokens=values.pop("step_tokens", 0))
    return StepReport(1.0, 0, False, Counters(), gauges, **values)


def value(seen: Observation, name: str, **labels: str) -> float | None:
    return seen.metrics.registry.get_sample_value(f"octavo_{name}", MODEL | labels)


def run_one_request(seen: Observation) -> None:
    """Arrives at 10, gets blocks at 10.5, tokens at 11, 11.004 and 11.5."""
    request = open_request()
    for listener in seen.listeners:
        listener.request_added(request)
        listener.stepped(report(admitted=[admitted()], step_tokens=16))
        request.admission, request.admitted_time = admitted(), 10.5
        listener.request_admitted(request)
        request.first_token_time = None
        for now in (11.0, 11.004, 11.5):
            request.first_token_time = request.first_token_time or now
            listener.tokens_arrived(request, 1, now)
        request.num_preemptions = 2
        listener.request_finished(request, output_of(request, [3], 11.5))


def test_latencies_of_a_request(seen: Observation) -> None:
    run_one_request(seen)
    for name, seconds in (
        ("time_to_first_token_seconds", 1.0),  # from arrival: the queue counts
        ("request_queue_time_seconds", 0.5),
        ("request_prefill_time_seconds", 0.5),
        ("request_decode_time_seconds", 0.5),
        ("request_inference_time_seconds", 1.0),
        ("e2e_request_latency_seconds", 1.5),
        ("request_time_per_output_token_seconds", 0.25),
        ("inter_token_latency_seconds", 0.5),
        ("request_num_preemptions", 2),
        ("request_generation_tokens", 3),
        ("request_prefill_kv_computed_tokens", 16),
    ):
        assert value(seen, f"{name}_sum") == pytest.approx(seconds), name
    assert value(seen, "time_to_first_token_seconds_count") == 1
    assert value(seen, "inter_token_latency_seconds_count") == 2
    # 4 ms and 496 ms are told apart far below 10 ms.
    assert value(seen, "inter_token_latency_seconds_bucket", le="0.003") == 0
    assert value(seen, "inter_token_latency_seconds_bucket", le="0.005") == 1
    assert value(seen, "prompt_tokens_by_source_total", source="local_cache_hit") == 16
    assert value(seen, "prompt_tokens_total") == 32
    assert value(seen, "request_success_total", finished_reason="length") == 1
    assert value(seen, "prefix_lookup_end_total", reason="evicted") == 1


def test_experts_that_are_computed_beside_those_expected(
    client: FakeClient, http: TestClient
) -> None:
    """Of a real engine: two layers of seven experts, of which a token takes three."""
    with LLM(str(model_zoo.model_directory("qwen3_moe")), num_blocks=40) as llm:
        routings = list(llm.engine.model_config.mixtures().items())
        recorder = Recorder(llm.engine, lambda admitted: None)
        prompt = model_zoo.random_token_ids(30)
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    client.counters = recorder.counters
    lines = re.findall(r"(?m)^octavo_(experts_\w+)_total\{.*\} (\S+)", http.get("/metrics").text)
    found = {name: float(number) for name, number in lines}
    # A prompt of 30 tokens, of which the last layer computes one, and three tokens one by one,
    # whose experts are all different.
    [(routing, num_layers)] = routings
    expected = routing.expected_distinct(30) + (num_layers * 4 - 1) * routing.top_k
    assert found["experts_expected"] == pytest.approx(expected)
    most = routing.num_experts + (num_layers * 4 - 1) * routing.top_k
    least = num_layers * 4 * routing.top_k
    assert least <= found["experts_computed"] <= most


def test_steps_are_predicted_where_the_device_is_known(
    client: FakeClient, http: TestClient
) -> None:
    client.counters = Counters(step_seconds=3.0, predicted_seconds=2.5)
    name = "octavo_engine_step_predicted_seconds_total"
    assert f'{name}{{model_name="demo"}} 2.5' in http.get("/metrics").text
    client.info = engine_info(predicts_steps=False)
    assert name not in http.get("/metrics").text


def test_first_token_counts_once_for_several_samples_and_for_beams(seen: Observation) -> None:
    metrics, request = seen.metrics, open_request("four", n=4)
    for _ in range(4):  # the first step gives each sample a token
        metrics.tokens_arrived(request, 1, 11.0)
    request.first_token_time = 11.0
    for _ in range(4):
        metrics.tokens_arrived(request, 1, 11.25)
    metrics.request_finished(request, output_of(request, [2] * 4, 11.25))
    assert value(seen, "time_to_first_token_seconds_count") == 1
    assert value(seen, "inter_token_latency_seconds_count") == 4
    assert value(seen, "inter_token_latency_seconds_sum") == pytest.approx(4 * 0.25)
    beams = open_request("beams", beam_width=3)
    beams.first_token_time = 13.0
    metrics.tokens_arrived(beams, 9, 13.0)  # all at once, at the end
    metrics.request_finished(beams, output_of(beams, [5, 4], 14.0))
    assert value(seen, "time_to_first_token_seconds_sum") == pytest.approx(1.0 + 3.0)
    assert value(seen, "request_params_n_sum") == 4 + 3


def test_preemptions_and_refusals(seen: Observation) -> None:
    metrics = seen.metrics
    swap = Preempted(1.0, "r1", "swap", 7, 0, 0.25)
    recompute = Preempted(1.0, "r2", "recompute", 0, 90, 0.5)
    metrics.stepped(report(preempted=[swap, recompute], step_tokens=12))
    assert value(seen, "num_preemptions_total", mode="swap") == 1
    assert value(seen, "preemption_cost_seconds_total", mode="recompute") == 0.5
    assert value(seen, "preempted_blocks_total") == 7
    assert value(seen, "preempted_tokens_total") == 90
    assert value(seen, "iteration_tokens_total_sum") == 12
    for error, reason in (
        (Overloaded("busy", 1.0), "queue_full"),
        (RequestTooLong("prompt", "long"), "too_long"),
        (InvalidRequest("n", "bad"), "invalid"),
        (Unavailable("draining"), "unavailable"),
    ):
        metrics.request_refused(error)
        assert value(seen, "admission_rejections_total", reason=reason) == 1
    for error, reason in (
        (RequestFailed("it kills"), "engine_failed"),
        (LogitsNotFinite("NaN"), "logits_not_finite"),
    ):
        metrics.request_failed(open_request(), error)
        assert value(seen, "request_failures_total", reason=reason) == 1
    metrics.engine_died("killed")
    assert value(seen, "engine_deaths_total") == 1


def test_exposition(client: FakeClient, seen: Observation, http: TestClient) -> None:
    run_one_request(seen)
    client.gauges = Gauges(num_running=3, num_free_blocks=9, num_free_swap_blocks=1)
    client.counters = Counters(num_lookup_tokens=100, num_hit_tokens=40)
    text = http.get("/metrics").text
    assert 'octavo_kv_cache_usage_perc{model_name="demo"} 0.25' in text
    assert 'octavo_swap_blocks_held{model_name="demo"} 3.0' in text
    assert 'octavo_prefix_cache_hits_total{model_name="demo"} 40.0' in text
    assert 'block_size="16"' in text
    openmetrics = http.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert openmetrics.text.endswith("# EOF\n")


def test_counters_are_there_before_they_count(seen: Observation) -> None:
    samples = [
        sample
        for family in seen.metrics.registry.collect()
        if family.type == "counter"
        for sample in family.samples
        if sample.name.endswith("_total")
    ]
    assert {sample.name for sample in samples} == {f"octavo_{name}_total" for name in COUNTERS}
    assert not any(sample.value for sample in samples)
    before = {(sample.name, *sample.labels.values()) for sample in samples}
    run_one_request(seen)
    seen.metrics.stepped(report(preempted=[Preempted(1.0, "r1", "swap", 7, 0, 0.25)]))
    seen.metrics.request_failed(open_request(), RequestFailed("it kills"))
    seen.metrics.request_refused(Unavailable("draining"))
    after = {
        (sample.name, *sample.labels.values())
        for family in seen.metrics.registry.collect()
        for sample in family.samples
        if family.type == "counter" and sample.name.endswith("_total")
    }
    assert after == before


def metric_names(seen: Observation) -> set[str]:
    """Names of families, without octavo_."""
    return {family.name.removeprefix("octavo_") for family in seen.metrics.registry.collect()}


def test_documentation_and_dashboard_know_the_metrics(seen: Observation, http: TestClient) -> None:
    page = (DOCS / "observability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?) \| (?:gauge|counter|histogram|info) \|", page, re.M)
    described = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert described == metric_names(seen)
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    text = json.dumps(dashboard)
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"octavo_(\w+)", text)}
    known = metric_names(seen)
    known |= {f"{name}_total" for name in known}
    assert used <= known
    assert len(dashboard["panels"]) == len({panel["title"] for panel in dashboard["panels"]})


def test_documentation_knows_why_lookups_end() -> None:
    page = (DOCS / "observability.md").read_text(encoding="utf-8")
    section = page.split("## Why a prefix lookup ended")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == set(LOOKUP_ENDS)


def test_debug_endpoint(client: FakeClient, seen: Observation, http: TestClient) -> None:
    request = open_request()
    seen.lookups.request_added(request)
    preempted = Preempted(11.0, "r1", "swap", 3, 0, 0.01)
    seen.lookups.stepped(report(admitted=[admitted()], preempted=[preempted]))
    client.picture = snapshot([view("r1", [3, 4, 5], [3, 4, 6])])
    reply = http.get("/debug/kv/r1").json()
    assert [seq["block_table"] for seq in reply["now"]["sequences"]] == [[[3, 4, 5]], [[3, 4, 6]]]
    lookup, preemption = reply["history"]
    assert (lookup["num_hit_tokens"], lookup["lookup_end"]) == (16, "evicted")
    assert "overwritten" in lookup["explanation"]
    assert (preemption["mode"], preemption["num_blocks"]) == ("swap", 3)
    pool = http.get("/debug/kv").json()
    assert pool["device"]["num_shared"] == 2
    assert pool["requests"][0]["request_id"] == "r1"
    seen.lookups.request_finished(request, output_of(request, [3], 12.0))
    client.picture = snapshot([])
    over = http.get("/debug/kv/r1")
    assert (over.json()["now"], over.json()["finish_reasons"]) == (None, ["length"])
    assert "secret" not in over.text
    missing = http.get("/debug/kv/nobody")
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "request_id"
    assert "ID~0" in missing.json()["error"]["message"]


@pytest.mark.parametrize("num_blocks", [8, 1000])
def test_a_large_pool_is_written_in_a_thread(
    client: FakeClient, http: TestClient, monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    threads = []

    def noted(value: Any) -> Response:
        threads.append(threading.current_thread().name)
        return reply(value)

    monkeypatch.setattr("octavo.server.observability.debug.reply", noted)
    tier = TierView(num_blocks, num_blocks, 0, bytes(num_blocks), bytes(num_blocks))
    client.picture = dataclasses.replace(snapshot([]), device=tier)
    assert http.get("/debug/kv").json()["device"]["num_blocks"] == num_blocks
    assert threads[0].startswith("replies") is (num_blocks > LARGE_REPLY)


def test_finished_requests_are_forgotten_in_order(seen: Observation) -> None:
    for number in range(1200):
        request = open_request(f"r{number}")
        seen.lookups.request_added(request)
        if number != 0:  # the first one goes on
            seen.lookups.request_finished(request, output_of(request, [1], 12.0))
    known = [number for number in range(1200) if seen.lookups.history(f"r{number}")]
    assert known == [0, *range(200, 1200)]


def test_a_request_whose_id_is_used_again_is_remembered_as_the_latest(seen: Observation) -> None:
    for number in range(1200):
        request = open_request("again" if number % 2 else f"r{number}")
        seen.lookups.request_added(request)
        seen.lookups.request_finished(request, output_of(request, [1], 12.0))
    assert seen.lookups.history("again") is not None
    assert all(seen.lookups.history(f"r{number}") for number in range(0, 1200, 2))


def test_log_lines(seen: Observation, caplog: pytest.LogCaptureFixture) -> None:
    # By its own handler: a command that ran before may have cut octavo's log off from the root.
    log = logging.getLogger("octavo.server.observability.logs")
    caplog.set_level(logging.INFO, logger=log.name)
    log.addHandler(caplog.handler)
    run_one_request(seen)
    log.removeHandler(caplog.handler)
    [record] = {id(r): r for r in caplog.records if r.message == "finished"}.values()
    line = json.loads(JsonFormatter().format(record))
    assert line["request_id"] == "r1"
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (32, 16, 3)
    assert line["first_token_seconds"] == 1.0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])
    assert "request_id=r1" in TextFormatter().format(record)


def test_a_client_cannot_write_lines_of_the_log() -> None:
    record = logging.makeLogRecord(
        {"msg": "request", "path": "/v1", "user": "me\n2026 error: status=500\u2028"}
    )
    for formatter in (JsonFormatter(), TextFormatter()):
        [line] = formatter.format(record).split("\n")
        assert "/v1" in line
    assert r'user="me\n2026 error: status=500\u2028"' in line


def test_log_lines_of_engine_processes_hold_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    log, lines = logging.getLogger("octavo"), list[str]()
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(log, name, getattr(log, name))
    forward_logs(logging.INFO, lambda _, text: lines.append(text))
    prompt, device = "a piece of somebody's prompt", "an illegal memory access"
    for error in (
        ValueError(prompt),
        KeyError(prompt),
        AssertionError(prompt),
        RuntimeError(device),
    ):
        try:
            raise error
        except Exception:
            logging.getLogger("octavo.x").exception("broken")
    for line, kind in zip(lines, ("Value", "Key", "Assertion", "Runtime"), strict=True):
        assert line.startswith("broken\n")
        assert f"{kind}Error" in line
        assert "test_metrics.py" in line
        assert "somebody" not in line
    assert device in lines[-1]


def test_log_lines_hold_no_secrets() -> None:
    prompt = "a piece of somebody's prompt"
    try:
        raise ValueError(prompt)
    except ValueError as error:
        record = logging.getLogger("x").makeRecord(
            "octavo.x",
            logging.ERROR,
            "file.py",
            1,
            "broken",
            (),
            (ValueError, error, error.__traceback__),
            extra={"prompt": "a secret", "authorization": "Bearer key", "status": 500},
        )
    for formatter in (JsonFormatter(), TextFormatter()):
        line = formatter.format(record)
        assert "500" in line
        assert "ValueError" in line
        assert "test_metrics.py" in line
        for secret in ("somebody", "a secret", "Bearer"):
            assert secret not in line
