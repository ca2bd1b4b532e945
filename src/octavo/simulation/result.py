"""The outcome of a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from octavo.bench.memory_use import SlotUse, StepMemory, mean_slots, sharing_saves
from octavo.bench.percentiles import Percentiles

# What of a result is reported under its own name.
REPORTED = (
    *("settings", "seconds", "num_unfinished", "requests_per_second", "output_tokens_per_second"),
    *("mean_batched_requests", "mean_batched_sequences", "preemptions", "prefix_hit_rate"),
    *("sharing_saves", "num_blocks"),
)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that was served. Times are seconds from the start of the simulation."""

    prompt_tokens: int
    output_tokens: int  # of one sample or beam
    arrival: float
    first_token: float
    finish: float
    num_cached_tokens: int
    num_preemptions: int
    tenant: str = ""

    @property
    def latency(self) -> float:
        return self.finish - self.arrival

    @property
    def normalized_latency(self) -> float:
        """Seconds for each output token, the time in the queue included (paper section 6.1)."""
        return self.latency / self.output_tokens

    @property
    def time_to_first_token(self) -> float:
        return self.first_token - self.arrival

    @property
    def time_per_output_token(self) -> float | None:
        """After the first; None for an output of one token."""
        if self.output_tokens < 2:
            return None
        return (self.finish - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step. `memory` says where the slots went and how much was computed."""

    start: float
    end: float
    num_waiting: int  # requests
    num_swapped: int
    num_preemptions: int  # so far
    memory: StepMemory

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class SimulationResult:
    """All that was recorded, in order of time. `between` cuts a window out of it."""

    requests: list[RequestRecord]  # those that finished, in the order of their ends
    steps: list[StepSample]
    num_unfinished: int  # requests that were still there, or to come, when it ended
    preemptions: dict[str, int]
    num_prompt_tokens: int  # looked up in the prefix cache
    num_cached_tokens: int  # of them found
    block_size: int
    num_blocks: int
    settings: dict[str, Any] = field(default_factory=dict)

    def between(self, start: float, end: float = math.inf) -> SimulationResult:
        """The same for the steps that began in [start, end), and the requests that arrived then.

        Counts of preemptions, of unfinished requests and of the prefix cache are not divided.
        """
        return replace(
            self,
            requests=[each for each in self.requests if start <= each.arrival < end],
            steps=[step for step in self.steps if start <= step.start < end],
        )

    @property
    def seconds(self) -> float:
        """Virtual time at the end of the last step."""
        return self.steps[-1].end if self.steps else 0.0

    @property
    def duration(self) -> float:
        """Virtual seconds from the beginning of the first step to the end of the last one."""
        return self.seconds - self.steps[0].start if self.steps else 0.0

    @property
    def normalized_latency(self) -> float:
        """The paper's measure: the mean over requests of seconds per output token. Infinite if
        no request finished."""
        values = [request.normalized_latency for request in self.requests]
        return sum(values) / len(values) if values else math.inf

    @property
    def time_to_first_token(self) -> Percentiles:
        return Percentiles.of([request.time_to_first_token for request in self.requests])

    @property
    def time_per_output_token(self) -> Percentiles:
        """After the first; requests of one token have none."""
        values = [request.time_per_output_token for request in self.requests]
        return Percentiles.of([value for value in values if value is not None])

    @property
    def requests_per_second(self) -> float:
        return len(self.requests) / self.duration if self.steps else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        total = sum(request.output_tokens for request in self.requests)
        return total / self.duration if self.steps else 0.0

    @property
    def mean_batched_requests(self) -> float:
        """Requests that run, the mean over steps (paper figure 13)."""
        return _mean([step.memory.num_requests for step in self.steps])

    @property
    def mean_batched_sequences(self) -> float:
        return _mean([step.memory.num_seqs for step in self.steps])

    @property
    def mean_slots(self) -> SlotUse | None:
        """Where the KV slots went, the mean over steps (paper figure 2). None without steps."""
        return mean_slots([step.memory for step in self.steps])

    @property
    def sharing_saves(self) -> float:
        """Share of blocks that sharing saved (paper figure 15)."""
        return sharing_saves([step.memory for step in self.steps])

    @property
    def prefix_hit_rate(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    def to_values(self, num_points: int = 500) -> dict[str, Any]:
        """Plain values for JSON; of memory over time at most `num_points`, evenly spread."""
        slots = self.mean_slots
        return {
            **{name: getattr(self, name) for name in REPORTED},
            "num_requests": len(self.requests),
            "normalized_latency": self.normalized_latency if self.requests else None,
            "time_to_first_token": asdict(self.time_to_first_token),
            "time_per_output_token": asdict(self.time_per_output_token),
            "num_steps": len(self.steps),
            "slots": slots and asdict(slots),
            "over_time": [_point(step) for step in thinned(self.steps, num_points)],
        }


def thinned(steps: Sequence[StepSample], count: int) -> list[StepSample]:
    """At most `count` of the steps, evenly spread, the last one among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round((i + 1) * len(steps) / count) - 1] for i in range(count)]


def _point(step: StepSample) -> dict[str, float]:
    return {
        "time": step.start,
        "running": step.memory.num_requests,
        "waiting": step.num_waiting,
        "swapped": step.num_swapped,
        **asdict(step.memory.slots),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
