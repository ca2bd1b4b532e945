"""The latency of one batch, measured repeatedly: `octavo bench latency`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.bench.percentiles import Percentiles
from octavo.bench.throughput import Decoding, run_requests
from octavo.bench.traces import TraceRequest, make_prompts

if TYPE_CHECKING:
    from octavo.engine.local_client import LocalClient


@dataclass(frozen=True, slots=True)
class Batch:
    """What every iteration computes."""

    size: int
    prompt_tokens: int
    output_tokens: int
    decoding: Decoding


@dataclass(slots=True)
class LatencyReport:
    """Seconds from a batch's arrival to its end, and to its last request's first token."""

    batch: Percentiles
    first_token: Percentiles
    num_iterations: int
    settings: dict[str, Any] = field(default_factory=dict)


def run_latency(
    client: LocalClient,
    batch: Batch,
    num_warm_up: int,
    num_iterations: int,
    seed: int = 0,
    finished: Callable[[], None] = lambda: None,
) -> LatencyReport:
    """Time `num_iterations` batches. Each has new prompts, so that no prefix is in the cache."""
    whole: list[float] = []
    first: list[float] = []
    for iteration in range(num_warm_up + num_iterations):
        seconds, first_seconds = _time_batch(client, batch, f"{seed}-{iteration}")
        if iteration >= num_warm_up:
            whole.append(seconds)
            first.append(first_seconds)
        finished()
    return LatencyReport(Percentiles.of(whole), Percentiles.of(first), num_iterations)


def _time_batch(client: LocalClient, batch: Batch, seed: str) -> tuple[float, float]:
    requests = [TraceRequest(batch.prompt_tokens, batch.output_tokens)] * batch.size
    prompts = make_prompts(requests, client.engine.model_config.vocab_size, seed)
    outputs = run_requests(client, requests, prompts, batch.decoding)
    start = min(output.arrival_time for output in outputs)
    first = max(output.first_token_time or start for output in outputs)
    return max(output.finish_time for output in outputs) - start, first - start
