"""Load on a server over HTTP: `octavo bench serve`.

Definitions are those of vLLM's `bench serve`. Time to first token (TTFT): until the first chunk
with choices. Inter-token latency (ITL): the gap between two such chunks. Time per output token
(TPOT): (end-to-end - TTFT) / (output tokens - 1), without outputs of one token. End-to-end (E2E):
until the last such chunk. Normalized latency, the paper's measure: E2E / output tokens, its mean.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from octavo.bench.client_load import Call, Query, Target, poisson_times, send_all
from octavo.bench.percentiles import SHOWN, Percentiles
from octavo.bench.tables import columns, facts
from octavo.errors import ConfigError

# How the capacity is measured, of which an overload is a multiple.
CAPACITY_REQUESTS = 512
CAPACITY_CONCURRENCY = 128


@dataclass(slots=True)
class ServeReport:
    """The outcome of a run at one rate. Times in seconds."""

    rate: float  # requests per second, as asked for; infinite: all at once
    seconds: float  # from the first request to the end of the last
    num_completed: int
    num_refused: int  # answered with 429 or 503
    num_failed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    peak_concurrency: int  # requests open at once
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    e2e: Percentiles
    normalized: Percentiles  # seconds per output token
    deviations: dict[str, float]  # standard deviations of the four latencies
    errors: dict[str, int]  # message -> number of requests that failed with it

    @property
    def requests_per_second(self) -> float:
        return self.num_completed / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def prefix_hit_rate(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)


async def run_serve(
    target: Target,
    queries: Sequence[Query],
    rate: float,
    seed: int = 0,
    max_concurrency: int | None = None,
    finished: Callable[[Call], None] = lambda call: None,
) -> ServeReport:
    """Send `queries` at `rate` requests per second (Poisson), and measure.

    Raises ConfigError if the rate is not a positive number, or none of the requests got an answer.
    """
    if not rate > 0:
        raise ConfigError("request_rate", f"{rate} is not more than 0")
    times = poisson_times(len(queries), rate, seed)
    calls = await send_all(target, queries, times, max_concurrency, finished)
    if all(call.outcome == "failed" for call in calls):
        raise ConfigError("url", f"no request was answered; the first error: {calls[0].error}")
    return report_of(calls, rate)


async def find_capacity(target: Target, queries: Sequence[Query], seed: int = 0) -> float:
    """Requests per second that a server completes when it is kept busy."""
    few = queries[:CAPACITY_REQUESTS]
    report = await run_serve(target, few, float("inf"), seed, CAPACITY_CONCURRENCY)
    if not report.num_completed:
        raise ConfigError("overload", "the server completed no request, so it has no capacity")
    return report.requests_per_second


def report_of(calls: Sequence[Call], rate: float) -> ServeReport:
    """Sum up the outcomes of the requests; there is at least one."""
    done = [call for call in calls if call.outcome == "completed"]
    latencies: dict[str, list[float]] = {
        "ttft": [call.first - call.sent for call in done if call.first is not None],
        "tpot": [
            (call.last - call.first) / (call.num_output_tokens - 1)
            for call in done
            if call.first is not None and call.num_output_tokens > 1
        ],
        "itl": [gap for call in done for gap in call.gaps],
        "e2e": [call.seconds for call in done],
    }
    return ServeReport(
        rate=rate,
        seconds=max(call.last for call in calls) - min(call.sent for call in calls) or 1e-9,
        num_completed=len(done),
        num_refused=sum(call.outcome == "refused" for call in calls),
        num_failed=sum(call.outcome == "failed" for call in calls),
        num_prompt_tokens=sum(call.num_prompt_tokens for call in done),
        num_cached_tokens=sum(call.num_cached_tokens for call in done),
        num_output_tokens=sum(call.num_output_tokens for call in done),
        peak_concurrency=_peak(calls),
        normalized=Percentiles.of([call.seconds / call.num_output_tokens for call in done]),
        deviations={name: statistics.pstdev(v) if v else 0.0 for name, v in latencies.items()},
        errors=dict(Counter(call.error or "" for call in calls if call.outcome == "failed")),
        **{name: Percentiles.of(values) for name, values in latencies.items()},
    )


def serve_tables(report: ServeReport) -> tuple[RenderableType, ...]:
    """A report for people."""
    rate = "all at once" if report.rate == float("inf") else f"{report.rate:g} requests/s, Poisson"
    run = facts(
        [
            ("arrivals", rate),
            ("completed", f"{report.num_completed} in {report.seconds:.2f} s"),
            ("refused, failed", f"{report.num_refused}, {report.num_failed}"),
            ("open at once, at most", str(report.peak_concurrency)),
            ("requests/s", f"{report.requests_per_second:.2f}"),
            ("output tokens/s", f"{report.output_tokens_per_second:.1f}"),
            ("prefix cache", f"{100 * report.prefix_hit_rate:.1f} % of prompt tokens found"),
            ("normalized latency", f"{1e3 * report.normalized.mean:.2f} ms/token"),
        ]
    )
    latencies = columns("ms", "mean", *(f"p{percent}" for percent in SHOWN))
    for name in ("ttft", "tpot", "itl", "e2e"):
        percentiles: Percentiles = getattr(report, name)
        values = [percentiles.mean, *(percentiles.at[percent] for percent in SHOWN)]
        latencies.add_row(f"  {name.upper()}", *(f"{1e3 * value:.2f}" for value in values))
    errors = (f"  {count} x {error}" for error, count in report.errors.items())
    return run, latencies, *errors


def serve_values(report: ServeReport) -> dict[str, Any]:
    """A report for programs, under the names that vLLM's `bench serve` uses."""
    values: dict[str, Any] = {
        "request_rate": "inf" if report.rate == float("inf") else report.rate,
        "duration": report.seconds,
        "completed": report.num_completed,
        "refused": report.num_refused,
        "failed": report.num_failed,
        "total_input_tokens": report.num_prompt_tokens,
        "total_cached_tokens": report.num_cached_tokens,
        "total_output_tokens": report.num_output_tokens,
        "request_throughput": report.requests_per_second,
        "output_throughput": report.output_tokens_per_second,
        "total_token_throughput": (report.num_prompt_tokens + report.num_output_tokens)
        / report.seconds,
        "max_concurrent_requests": report.peak_concurrency,
        "prefix_hit_rate": report.prefix_hit_rate,
        "normalized_latency_ms": 1e3 * report.normalized.mean,
        "p99_normalized_latency_ms": 1e3 * report.normalized.at[99],
        "errors": report.errors,
    }
    for key, name in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2e", "e2el")):
        percentiles: Percentiles = getattr(report, key)
        values[f"mean_{name}_ms"] = 1e3 * percentiles.mean
        values[f"median_{name}_ms"] = 1e3 * percentiles.at[50]
        values[f"std_{name}_ms"] = 1e3 * report.deviations[key]
        for percent in (90, 99):
            values[f"p{percent}_{name}_ms"] = 1e3 * percentiles.at[percent]
    return values


def _peak(calls: Sequence[Call]) -> int:
    """How many requests were open at once, at most."""
    changes = sorted([(call.sent, 1) for call in calls] + [(call.last, -1) for call in calls])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
