"""Simulations that figures are made of: steady states, and sweeps of the request rate.

All of them use one cost model, that of the paper's software and GPUs, and the settings of the
authors' artifact: prompts computed whole, 2,560 tokens and 256 sequences in a step at most, first
come first served without overtaking.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from octavo.config import CacheConfig, PreemptionMode, SchedulerConfig
from octavo.simulation.config import SimulationConfig
from octavo.simulation.cost_model import PAPER_SOFTWARE
from octavo.simulation.run import simulate
from octavo.simulation.workloads import WorkloadSpec, build
from octavo_paper.jobs import SIMULATED
from octavo_paper.paper_values import SystemName
from octavo_paper.servers import (
    BLOCK_SIZE,
    DTYPE,
    MAX_BATCHED_TOKENS,
    MAX_REQUESTS,
    SERVERS,
    SWAP_SPACE_PER_GPU,
)

DEFAULT_BEAM_SPACING = 1.0
STEP = 1.15  # growth of the rate from probe to probe while a sweep looks for the knee
SHOWN = (0.3, 0.6, 0.85)  # fractions of the sustained rate at which a curve has points, too
THRESHOLD = 0.5  # s/token; "sustained" means below it, as we read the paper's figures
MAX_PROBES = 40


@dataclass(frozen=True, slots=True)
class Scenario:
    """One system on one of the paper's servers, and its workload."""

    model: str  # a name in SERVERS
    system: SystemName
    workload: WorkloadSpec
    block_size: int = BLOCK_SIZE
    preemption_mode: PreemptionMode | None = None  # None: the artifact's rule
    prefix_caching: bool = False
    batch_limit: int = MAX_REQUESTS  # FasterTransformer's largest batch
    beam_spacing: float = DEFAULT_BEAM_SPACING

    def at_rate(self, rate: float) -> Scenario:
        return replace(self, workload=self.workload.at_rate(rate))

    @property
    def preemption(self) -> PreemptionMode:
        """The artifact recomputes requests of one sequence, and swaps the others."""
        if self.preemption_mode is not None:
            return self.preemption_mode
        return "swap" if self.workload.decoding.is_wide else "recompute"

    @property
    def max_num_seqs(self) -> int:
        """The limit on sequences. The artifact limits running requests plus the sequences of the
        request to be admitted to 256, so this many requests run, of any width."""
        width = self.workload.beam_width or self.workload.n
        return width * (self.batch_limit + 1 - width)

    def config(self) -> SimulationConfig:
        server = SERVERS[self.model]
        return SimulationConfig(
            self.model,
            server.gpu,
            server.num_gpus,
            dtype=DTYPE,
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=server.num_blocks(self.block_size),
                swap_space=SWAP_SPACE_PER_GPU * server.num_gpus,
                enable_prefix_caching=self.prefix_caching,
                memory_policy="paged" if self.system == "vllm" else self.system,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
                preemption_mode=self.preemption,
                enable_chunked_prefill=False,
                max_passes=0,
            ),
            coefficients=PAPER_SOFTWARE,
            beam_spacing=self.beam_spacing,
            copies_extents=True,
        )


@dataclass(frozen=True, slots=True)
class SteadyState:
    """What a system looks like in a window of a run: means over its steps."""

    DEPENDS_ON: ClassVar[tuple[str, ...]] = SIMULATED

    scenario: Scenario
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return 2e-2 * self.end

    def run(self) -> dict[str, Any]:
        result = simulate(self.scenario.config(), build(self.scenario.workload), until=self.end)
        window = result.between(self.start, self.end)
        slots = window.mean_slots
        assert slots is not None, "an engine under load makes steps all the time"
        return {
            "slots": {name: value / slots.total for name, value in asdict(slots).items()},
            "mean_batched_requests": window.mean_batched_requests,
            "sharing_saves": window.sharing_saves,
            "num_steps": len(window.steps),
            "preemptions": result.preemptions,
        }


@dataclass(frozen=True, slots=True)
class Latency:
    """Normalized latency at one rate."""

    DEPENDS_ON: ClassVar[tuple[str, ...]] = SIMULATED

    scenario: Scenario

    @property
    def seconds(self) -> float:
        return 2e-2 * (self.scenario.workload.duration or 1000.0)

    def run(self) -> dict[str, Any]:
        return measure(self.scenario)


@dataclass(frozen=True, slots=True)
class Sweep:
    """How latency grows with the rate, and which rate is sustained.

    `first` is where the search for the knee begins; what it finds does not depend on it.
    """

    DEPENDS_ON: ClassVar[tuple[str, ...]] = SIMULATED

    scenario: Scenario
    first: float  # requests/s
    resolution: float

    @property
    def seconds(self) -> float:
        return 0.15 * (self.scenario.workload.duration or 1000.0)

    def run(self) -> dict[str, Any]:
        points = self._search()
        knee = crossing(points, THRESHOLD)
        assert knee is not None, "the search brackets the threshold"
        for share in SHOWN:
            rate = share * knee
            if not any(abs(known / rate - 1) < 0.05 for known in points):
                points[rate] = measure(self.scenario.at_rate(rate))
        return {
            "points": [{"rate": rate} | points[rate] for rate in sorted(points)],
            "sustained": {str(limit): crossing(points, limit) for limit in (0.2, THRESHOLD)},
        }

    def _search(self) -> dict[float, dict[str, Any]]:
        points: dict[float, dict[str, Any]] = {}
        below, above, rate = 0.0, math.inf, self.first
        for _ in range(MAX_PROBES):
            points[rate] = found = measure(self.scenario.at_rate(rate))
            if found["latency"] < THRESHOLD:
                below = max(below, rate)
            else:
                above = min(above, rate)
            if math.isinf(above):
                rate *= STEP
            elif not below:
                rate /= STEP
            elif above / below < 1 + self.resolution:
                break
            else:
                rate = math.sqrt(below * above)
        return points


def measure(scenario: Scenario) -> dict[str, Any]:
    """All requests of a workload are served to their ends, as in the paper."""
    result = simulate(scenario.config(), build(scenario.workload))
    return {
        "latency": result.normalized_latency,
        "mean_batched_requests": result.mean_batched_requests,
        "preemptions": result.preemptions,
        "num_requests": len(result.requests),
    }


def crossing(points: dict[float, dict[str, Any]], limit: float) -> float | None:
    """The rate from which on latency stays above `limit`, between two points on a line over the
    logarithm of latency. None if there are no such two points."""
    for low, high in reversed(list(pairwise(sorted(points)))):
        before, after = points[low]["latency"], points[high]["latency"]
        if before < limit <= after:
            share = math.log(limit / before) / math.log(after / before)
            return low + share * (high - low)
    return None
