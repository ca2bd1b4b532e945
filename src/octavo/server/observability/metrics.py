"""Prometheus metrics: names and meanings are in docs/observability.md.

Gauges and totals are read from the engine's client at each scrape, so they cost nothing in between.
Only histograms (times and sizes) are updated as things happen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder

from octavo.errors import (
    InvalidRequest,
    LogitsNotFinite,
    NoTokenLeft,
    Overloaded,
    RequestTooLong,
)
from octavo.outputs import RequestOutput
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.listening import Listener
from octavo.server.engine_process.messages import StepReport
from octavo.server.engine_process.stream import CANCELLED
from octavo.server.observability.event_text import LOOKUP_ENDS
from octavo.server.observability.totals import LABELS, EngineTotals

# Seconds. Decoding a small model takes under a millisecond per token, so the first are small.
SHORT = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015),
    *(0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 20, 80),
)
LONG = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15),
    *(20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
TOKENS = tuple(mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5))

# Name, after octavo_: the help text, and the buckets.
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", SHORT),
    "inter_token_latency_seconds": ("Between two tokens of one sample.", SHORT),
    "request_time_per_output_token_seconds": (
        "Mean time of a request's tokens after the first.",
        SHORT,
    ),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", LONG),
    "request_queue_time_seconds": ("From a request's arrival to its first blocks.", LONG),
    "request_inference_time_seconds": ("From the first blocks to the last token.", LONG),
    "request_prefill_time_seconds": ("From the first blocks to the first token.", LONG),
    "request_decode_time_seconds": ("From the first token to the last.", LONG),
    "iteration_tokens_total": ("Tokens computed in a step.", STEP_TOKENS),
    "request_prompt_tokens": ("Tokens of a request's prompt.", TOKENS),
    "request_generation_tokens": ("Tokens that a request's outputs came to.", TOKENS),
    "request_max_num_generation_tokens": ("Tokens of a request's longest output.", TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens not found in the cache.", TOKENS),
    "request_params_n": ("Samples or beams that a request asked for.", SAMPLES),
    "request_num_preemptions": ("Preemptions of a finished request.", PREEMPTIONS),
}
MODES = ("swap", "recompute")
# Name, after octavo_ and before _total: the help text, and the label beside the model's name, with
# its values. All begin at 0: Prometheus sees no increase in a counter that appears with its first.
COUNTERS: dict[str, tuple[str, dict[str, Iterable[str]]]] = {
    "num_preemptions": ("Requests taken off the device.", {"mode": MODES}),
    "preemption_cost_seconds": ("What coming back costs, as measured.", {"mode": MODES}),
    "preempted_tokens": ("Tokens to be computed again after a preemption.", {}),
    "preempted_blocks": ("Blocks moved to the swap tier by preemptions.", {}),
    "prompt_tokens": ("Prompt tokens of admitted requests.", {}),
    "prompt_tokens_by_source": (
        "Where the prompts' KV came from.",
        {"source": ("local_compute", "local_cache_hit")},
    ),
    "prefix_lookup_end": (
        "Why lookups in the prefix cache found no more.",
        {"reason": LOOKUP_ENDS},
    ),
    "request_success": (
        "Requests that ended, by why their first output did.",
        {"finished_reason": ("stop", "length", "abort", CANCELLED)},
    ),
    "request_failures": (
        "Accepted requests that could not be computed, or were lost with the engine.",
        {"reason": ("logits_not_finite", "no_token_left", "engine_failed")},
    ),
    "admission_rejections": (
        "Requests that were not accepted.",
        {"reason": ("queue_full", "too_long", "invalid", "unavailable")},
    ),
    "engine_deaths": ("Engine processes that ended unasked.", {}),
}


@dataclass(frozen=True, slots=True)
class LatencyCounts:
    """How many latencies fell into each bucket; the last is above all bounds. Not cumulative."""

    bounds: list[float]
    ttft: list[int]  # time to first token
    itl: list[int]  # inter-token latency


class Metrics(Listener):
    """Has a registry of its own, so that several servers in one process do not share metrics."""

    def __init__(self, model_name: str) -> None:
        registry = self.registry = CollectorRegistry()
        self._model_name = model_name
        # By request: the times of its last two steps with tokens (None: there was only one).
        self._token_times: dict[str, tuple[float, float | None]] = {}
        self._families = {
            name: Histogram(f"octavo_{name}", text, LABELS, buckets=buckets, registry=registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        # With the model's name as label, so that observing needs no lookup of labels.
        self._histograms = {
            name: family.labels(model_name) for name, family in self._families.items()
        }
        self._counters = {
            name: Counter(f"octavo_{name}", text, (*LABELS, *labels), registry=registry)
            for name, (text, labels) in COUNTERS.items()
        }
        for name, (_, labels) in COUNTERS.items():
            for values in product(*labels.values()):
                self._count(name, 0, *values)

    def watch(self, client: EngineClient) -> None:
        """Read gauges and totals from this client when they are scraped."""
        self.registry.register(EngineTotals(client, self._model_name))

    def latency_counts(self) -> LatencyCounts:
        """The latencies so far by bucket, for the dashboard, which draws its own percentiles."""
        first_token = self._families["time_to_first_token_seconds"]
        inter_token = self._families["inter_token_latency_seconds"]
        return LatencyCounts(list(SHORT), _counts(first_token), _counts(inter_token))

    # ---------------------------------------------------------------- callbacks of the client

    def request_refused(self, error: Exception) -> None:
        reasons: tuple[tuple[type[Exception], str], ...] = (
            (Overloaded, "queue_full"),
            (RequestTooLong, "too_long"),
            (InvalidRequest, "invalid"),
        )
        reason = next((name for kind, name in reasons if isinstance(error, kind)), "unavailable")
        self._count("admission_rejections", 1, reason)

    def request_admitted(self, request: OpenRequest) -> None:
        assert request.admitted_time is not None, "it has just been admitted"
        self._observe("request_queue_time_seconds", request.admitted_time - request.arrival_time)
        num_tokens, num_hits = request.num_prompt_tokens, request.num_cached_tokens
        self._count("prompt_tokens", num_tokens)
        self._count("prompt_tokens_by_source", num_tokens - num_hits, "local_compute")
        self._count("prompt_tokens_by_source", num_hits, "local_cache_hit")
        self._observe("request_prompt_tokens", num_tokens)
        self._observe("request_prefill_kv_computed_tokens", num_tokens - num_hits)

    def tokens_arrived(self, request: OpenRequest, num_tokens: int, now: float) -> None:
        before = self._time_before(request, now)
        if before is not None:
            for _ in range(num_tokens):
                self._observe("inter_token_latency_seconds", (now - before) / num_tokens)

    def request_finished(self, request: OpenRequest, output: RequestOutput) -> None:
        lengths = [len(each.token_ids) for each in output.outputs] or [0]
        now = output.finish_time
        self._observe("e2e_request_latency_seconds", now - request.arrival_time)
        first, admitted = request.first_token_time, request.admitted_time
        if first is not None:
            self._observe("request_decode_time_seconds", now - first)
            if max(lengths) > 1:
                self._observe(
                    "request_time_per_output_token_seconds", (now - first) / (max(lengths) - 1)
                )
        if admitted is not None:
            self._observe("request_inference_time_seconds", now - admitted)
            if first is not None:
                self._observe("request_prefill_time_seconds", first - admitted)
        self._observe("request_generation_tokens", sum(lengths))
        self._observe("request_max_num_generation_tokens", max(lengths))
        self._observe("request_params_n", request.request.width)
        self._observe("request_num_preemptions", output.num_preemptions)
        self._token_times.pop(request.request_id, None)
        self._count("request_success", 1, output.finish_reason)

    def request_failed(self, request: OpenRequest, error: Exception) -> None:
        self._token_times.pop(request.request_id, None)
        reasons: dict[type[Exception], str] = {
            LogitsNotFinite: "logits_not_finite",
            NoTokenLeft: "no_token_left",
        }
        reason = reasons.get(type(error), "engine_failed")
        self._count("request_failures", 1, reason)

    def engine_died(self, reason: str) -> None:
        self._count("engine_deaths", 1)

    def stepped(self, report: StepReport) -> None:
        if report.gauges.step_tokens:
            self._observe("iteration_tokens_total", report.gauges.step_tokens)
        for preempted in report.preempted:
            self._count("num_preemptions", 1, preempted.mode)
            self._count("preemption_cost_seconds", preempted.cost_seconds, preempted.mode)
            self._count("preempted_tokens", preempted.num_tokens)
            self._count("preempted_blocks", preempted.num_blocks)
        for admitted in report.admitted:
            self._count("prefix_lookup_end", 1, admitted.lookup_end)

    # ---------------------------------------------------------------- inside

    def _time_before(self, request: OpenRequest, now: float) -> float | None:
        """When a request got its previous tokens, before the step at `now`. Several samples may get
        tokens in one step. The first call for a request observes the time to first token."""
        known = self._token_times.get(request.request_id)
        if known is None:
            self._observe("time_to_first_token_seconds", now - request.arrival_time)
            known = (now, None)
        elif known[0] != now:
            known = (now, known[0])
        self._token_times[request.request_id] = known
        return known[1]

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _count(self, name: str, amount: float, *labels: str) -> None:
        self._counters[name].labels(self._model_name, *labels).inc(amount)


def metrics_router(metrics: Metrics) -> APIRouter:
    """GET /metrics, in Prometheus' text format or OpenMetrics, as the client accepts it."""
    router = APIRouter()

    @router.get(
        "/metrics",
        tags=["operation"],
        summary="Prometheus metrics",
        response_class=PlainTextResponse,
    )
    def read_metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics.registry), media_type=content_type)

    return router


def _counts(histogram: Histogram) -> list[int]:
    """Values in each bucket of a histogram, not cumulative."""
    totals = [
        int(sample.value)
        for metric in histogram.collect()
        for sample in metric.samples
        if sample.name.endswith("_bucket")
    ]
    return [total - before for total, before in zip(totals, [0, *totals], strict=False)]
