"""Prometheus metrics: names and meanings are in docs/observability.md.

Gauges and totals are read from the engine's client when somebody asks for them, so they cost
nothing in between. Only what a total cannot tell, times and sizes, is observed as it happens.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder

from octavo.errors import InvalidRequest, Overloaded, RequestTooLong
from octavo.outputs import RequestOutput
from octavo.server.client import EngineClient, Listener
from octavo.server.journal import OpenRequest
from octavo.server.messages import StepReport
from octavo.server.totals import LABELS, EngineTotals

# Seconds. Decoding a small model takes under a millisecond a token, so the first are fine.
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


@dataclass(frozen=True, slots=True)
class LatencyCounts:
    """How many latencies fell into each bucket; the last is above all bounds. Not cumulative."""

    bounds: list[float]
    first_token: list[int]
    inter_token: list[int]


class Metrics(Listener):
    """Owns a registry of its own, so that several servers in one process do not meet."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._families: dict[str, Histogram] = {}
        # By request: when its latest tokens came, and those of the step before (None: no such).
        self._token_times: dict[str, tuple[float, float | None]] = {}
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", SHORT
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one sample.", SHORT
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first.",
            SHORT,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", LONG
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From a request's arrival to its first blocks.", LONG
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "From the first blocks to the last token.", LONG
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first blocks to the first token.", LONG
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", LONG
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS
        )
        self._prompt_sizes = self._histogram(
            "request_prompt_tokens", "Tokens of a request's prompt.", TOKENS
        )
        self._output_sizes = self._histogram(
            "request_generation_tokens", "Tokens that a request's outputs came to.", TOKENS
        )
        self._longest_outputs = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest output.", TOKENS
        )
        self._computed_sizes = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache.", TOKENS
        )
        self._widths = self._histogram(
            "request_params_n", "Samples or beams that a request asked for.", SAMPLES
        )
        self._preemptions_of = self._histogram(
            "request_num_preemptions", "Preemptions of a finished request.", PREEMPTIONS
        )
        self._preemptions = self._counter(
            "num_preemptions", "Requests taken off the device.", "mode"
        )
        self._preemption_seconds = self._counter(
            "preemption_cost_seconds", "What coming back costs, as measured.", "mode"
        )
        self._preempted_tokens = self._counter(
            "preempted_tokens", "Tokens to be computed again after a preemption."
        )
        self._preempted_blocks = self._counter(
            "preempted_blocks", "Blocks moved to the swap tier by preemptions."
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self._prompt_sources = self._counter(
            "prompt_tokens_by_source", "Where the prompts' KV came from.", "source"
        )
        self._lookup_ends = self._counter(
            "prefix_lookup_end", "Why lookups in the prefix cache found no more.", "reason"
        )
        self._successes = self._counter(
            "request_success",
            "Requests that ended, by why their first output did.",
            "finished_reason",
        )
        self._failures = self._counter(
            "request_failures", "Accepted requests that were lost with the engine."
        )
        self._rejections = self._counter(
            "admission_rejections", "Requests that were not accepted.", "reason"
        )
        self._deaths = self._counter("engine_deaths", "Engine processes that ended unasked.")

    def watch(self, client: EngineClient) -> None:
        """Read gauges and totals from this client when they are asked for."""
        self.registry.register(EngineTotals(client, self._model_name))

    def latency_counts(self) -> LatencyCounts:
        """For the dashboard, which draws its own percentiles."""
        first_token = self._families["time_to_first_token_seconds"]
        inter_token = self._families["inter_token_latency_seconds"]
        return LatencyCounts(list(SHORT), _counts(first_token), _counts(inter_token))

    # ---------------------------------------------------------------- what the client tells

    def request_refused(self, error: Exception) -> None:
        reasons: tuple[tuple[type[Exception], str], ...] = (
            (Overloaded, "queue_full"),
            (RequestTooLong, "too_long"),
            (InvalidRequest, "invalid"),
        )
        reason = next((name for kind, name in reasons if isinstance(error, kind)), "unavailable")
        self._rejections.labels(self._model_name, reason).inc()

    def request_admitted(self, request: OpenRequest) -> None:
        assert request.admitted_time is not None, "it has just been admitted"
        self._queue.observe(request.admitted_time - request.arrival_time)
        num_tokens = request.num_prompt_tokens
        num_hits = 0
        if request.admission is not None:
            num_hits = min(request.admission.num_hit_tokens, num_tokens)
        self._prompt_tokens.labels(self._model_name).inc(num_tokens)
        self._prompt_sources.labels(self._model_name, "local_compute").inc(num_tokens - num_hits)
        self._prompt_sources.labels(self._model_name, "local_cache_hit").inc(num_hits)
        self._prompt_sizes.observe(num_tokens)
        self._computed_sizes.observe(num_tokens - num_hits)

    def tokens_arrived(self, request: OpenRequest, num_tokens: int, now: float) -> None:
        before = self._time_before(request, now)
        if before is not None:
            for _ in range(num_tokens):
                self._inter_token.observe((now - before) / num_tokens)

    def request_finished(self, request: OpenRequest, output: RequestOutput) -> None:
        name = self._model_name
        lengths = [len(each.token_ids) for each in output.outputs] or [0]
        now = output.finish_time
        self._e2e.observe(now - request.arrival_time)
        first, admitted = request.first_token_time, request.admitted_time
        if first is not None:
            self._decode.observe(now - first)
            if max(lengths) > 1:
                self._per_token.observe((now - first) / (max(lengths) - 1))
        if admitted is not None:
            self._inference.observe(now - admitted)
            if first is not None:
                self._prefill.observe(first - admitted)
        self._output_sizes.observe(sum(lengths))
        self._longest_outputs.observe(max(lengths))
        self._widths.observe(_width(request))
        self._preemptions_of.observe(output.num_preemptions)
        self._token_times.pop(request.request_id, None)
        reason = output.outputs[0].finish_reason if output.outputs else "abort"
        self._successes.labels(name, reason).inc()

    def request_failed(self, request: OpenRequest, error: Exception) -> None:
        self._token_times.pop(request.request_id, None)
        self._failures.labels(self._model_name).inc()

    def engine_died(self, reason: str) -> None:
        self._deaths.labels(self._model_name).inc()

    def stepped(self, report: StepReport) -> None:
        name = self._model_name
        if report.gauges.step_tokens:
            self._step_tokens.observe(report.gauges.step_tokens)
        for preempted in report.preempted:
            self._preemptions.labels(name, preempted.mode).inc()
            self._preemption_seconds.labels(name, preempted.mode).inc(preempted.cost_seconds)
            self._preempted_tokens.labels(name).inc(preempted.num_tokens)
            self._preempted_blocks.labels(name).inc(preempted.num_blocks)
        for admitted in report.admitted:
            self._lookup_ends.labels(name, admitted.lookup_end).inc()

    # ---------------------------------------------------------------- inside

    def _time_before(self, request: OpenRequest, now: float) -> float | None:
        """When the step before the one of `now` gave a request tokens. Several samples get theirs
        in one step, at one time; the first of all counts as the request's first token."""
        known = self._token_times.get(request.request_id)
        if known is None:
            self._first_token.observe(now - request.arrival_time)
            known = (now, None)
        elif known[0] != now:
            known = (now, known[0])
        self._token_times[request.request_id] = known
        return known[1]

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        """Resolved to the model's name, so that observing looks nothing up."""
        family = Histogram(f"octavo_{name}", text, LABELS, buckets=buckets, registry=self.registry)
        self._families[name] = family
        return family.labels(self._model_name)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"octavo_{name}", text, (*LABELS, *labels), registry=self.registry)


def metrics_router(metrics: Metrics) -> APIRouter:
    """GET /metrics, in Prometheus' text format or OpenMetrics, as the client prefers."""
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


def _width(request: OpenRequest) -> int:
    beam = request.request.beam
    return request.request.n if beam is None else beam.width


def _counts(histogram: Histogram) -> list[int]:
    """Values in each bucket of a histogram, not cumulative."""
    totals = [
        int(sample.value)
        for metric in histogram.collect()
        for sample in metric.samples
        if sample.name.endswith("_bucket")
    ]
    if not totals:
        totals = [0] * (len(SHORT) + 1)
    return [total - before for total, before in zip(totals, [0, *totals], strict=False)]
