"""Capacity: the highest rate that a machine serves well enough, and the fewest devices for a rate.

Both are searches over whole simulations. A simulation that can no longer meet its target is ended
at once: its outcome is not known then, except that it misses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from octavo.errors import ConfigError, OutOfMemory, RequestTooLong
from octavo.simulation.config import SimulationConfig
from octavo.simulation.result import RequestRecord, SimulationResult
from octavo.simulation.run import simulate
from octavo.simulation.workloads import Workload

STEP = 1.5  # factor between probes before the highest rate is bracketed
PERCENTILE = 99
MAX_PROBES = 40
MIN_RATE = 1e-3  # requests/s; a machine that does not even serve this one serves nothing

# The workload of a machine at so many requests/s.
WorkloadAt = Callable[[SimulationConfig, float], Workload]


@dataclass(frozen=True, slots=True)
class Target:
    """The service level to meet, in seconds; None: no limit."""

    normalized_latency: float | None = None  # mean over requests, for each output token
    time_to_first_token: float | None = None  # of 99% of the requests
    time_per_output_token: float | None = None  # of 99% of the requests

    def __post_init__(self) -> None:
        limits = (self.normalized_latency, self.time_to_first_token, self.time_per_output_token)
        given = [limit for limit in limits if limit is not None]
        if not given:
            raise ConfigError("target", "give a latency, a time to first token or a time per token")
        for limit in given:
            if not 0 < limit < math.inf:
                raise ConfigError("target", f"{limit} s is not a positive number")

    def is_met(self, result: SimulationResult) -> bool:
        """Whether all requests were served, and well enough."""
        first, each = result.time_to_first_token, result.time_per_output_token
        return not result.num_unfinished and all(
            limit is None or value <= limit
            for limit, value in (
                (self.normalized_latency, result.normalized_latency),
                (self.time_to_first_token, first.at[PERCENTILE]),
                (self.time_per_output_token, each.at[PERCENTILE]),
            )
        )


class Hopeless:
    """Whether a run of `num_requests` can no longer meet a target, whatever follows."""

    def __init__(self, target: Target, num_requests: int) -> None:
        self._target = target
        self._num_requests = num_requests
        # If that many values are beyond a limit, so is the percentile.
        self._max_late = num_requests - int(PERCENTILE / 100 * (num_requests - 1))
        self._sum = 0.0
        self._num_late = self._num_slow = 0

    def __call__(self, records: Sequence[RequestRecord], waits: Iterable[float] = ()) -> bool:
        target = self._target
        for record in records:
            self._sum += record.normalized_latency
            first, each = target.time_to_first_token, target.time_per_output_token
            self._num_late += first is not None and record.time_to_first_token > first
            self._num_slow += each is not None and (record.time_per_output_token or 0) > each
        limit = target.normalized_latency
        too_slow = limit is not None and self._sum > limit * self._num_requests
        if too_slow or max(self._num_late, self._num_slow) >= self._max_late:
            return True
        longest = target.time_to_first_token
        if longest is None:
            return False
        # A request that has waited longer than that is late already, long before it finishes.
        return self._num_late + sum(wait > longest for wait in waits) >= self._max_late


@dataclass(frozen=True, slots=True)
class Probe:
    """One simulation of a search."""

    rate: float
    is_met: bool
    result: SimulationResult  # cut short if the target was missed


# What may be impossible for a model on some numbers of devices, and possible on others.
OF_SIZE = ("num_gpus", "quantization")


class SearchProgress:
    """Receives the progress of a search, to show it; this one shows nothing."""

    def begin(self, config: SimulationConfig, rate: float, num_requests: int) -> None:
        """A simulation of `num_requests` at `rate` requests/s begins."""

    def advance(self, num_requests: int) -> None:
        """This many more requests were served in it."""

    def end(self, probe: Probe) -> None:
        """It is over."""


_SILENT = SearchProgress()


@dataclass(frozen=True, slots=True)
class HighestRate:
    """The outcome of a search."""

    rate: float  # requests/s, the highest that met the target; 0 if none did
    probes: list[Probe]  # by rate


def probe(
    config: SimulationConfig,
    workload_at: WorkloadAt,
    rate: float,
    target: Target,
    progress: SearchProgress = _SILENT,
) -> Probe:
    """Simulate one rate, to the end or until the target is certainly missed."""
    workload = workload_at(config, rate)
    progress.begin(config, rate, len(workload.requests))
    hopeless = Hopeless(target, len(workload.requests))

    def finished(records: Sequence[RequestRecord], waits: Iterable[float]) -> bool:
        progress.advance(len(records))
        return hopeless(records, waits)

    result = simulate(config, workload, finished=finished)
    found = Probe(rate, target.is_met(result), result)
    progress.end(found)
    return found


def highest_rate(
    config: SimulationConfig,
    workload_at: WorkloadAt,
    target: Target,
    first: float = 1.0,
    resolution: float = 0.02,
    progress: SearchProgress = _SILENT,
) -> HighestRate:
    """Search for the highest rate that meets `target`, to a relative `resolution`.

    Args:
        config: the machine.
        workload_at: makes the workload of the machine and a rate.
        target: what has to be met.
        first: requests/s at which the search begins.
        resolution: how close the lowest rate that misses lies to the highest that meets.
        progress: told how it goes.

    Raises what `simulate` raises.
    """
    below, above, rate = 0.0, math.inf, first
    probes: list[Probe] = []
    while above > (1 + resolution) * below and len(probes) < MAX_PROBES:
        if probes and not below and rate <= MIN_RATE:
            break
        try:
            found = probe(config, workload_at, rate, target, progress)
        except ConfigError as error:
            if error.field != "rate" or not probes:
                raise
            break  # so low that no request arrives
        probes.append(found)
        if found.is_met:
            below = rate
        else:
            above = rate
        if math.isinf(above):
            rate *= STEP
        elif not below:
            rate /= STEP
        else:
            rate = math.sqrt(below * above)
    return HighestRate(below, sorted(probes, key=lambda each: each.rate))


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines, each on `config.num_gpus` devices, that share the requests evenly."""

    config: SimulationConfig
    num_engines: int
    result: SimulationResult  # of one engine

    @property
    def num_gpus(self) -> int:
        return self.num_engines * self.config.num_gpus


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a machine cannot be chosen."""

    config: SimulationConfig
    reason: str


def fewest_gpus(
    config: SimulationConfig,
    workload_at: WorkloadAt,
    rate: float,
    target: Target,
    sizes: Iterable[int] = (1, 2, 4, 8),
    max_gpus: int = 64,
    progress: SearchProgress = _SILENT,
) -> list[Fleet | Refusal]:
    """For each number of devices in `sizes` that an engine may have, the fewest engines that serve
    `rate` requests per second within the target, or why none do.
    """
    found: list[Fleet | Refusal] = []
    for size in sizes:
        machine = replace(config, num_gpus=size)
        most = max_gpus // size
        try:
            found.append(_fewest_engines(machine, workload_at, rate, target, most, progress))
        except (OutOfMemory, RequestTooLong) as error:
            found.append(Refusal(machine, str(error)))
        except ConfigError as error:
            if error.field not in OF_SIZE:
                raise
            found.append(Refusal(machine, str(error)))
    return found


def _fewest_engines(
    config: SimulationConfig,
    workload_at: WorkloadAt,
    rate: float,
    target: Target,
    max_engines: int,
    progress: SearchProgress,
) -> Fleet | Refusal:
    """For engines of one size: doubles their number until they meet the target, then bisects."""

    def result_of(num_engines: int) -> SimulationResult | None:
        try:
            found = probe(config, workload_at, rate / num_engines, target, progress)
        except ConfigError as error:
            if error.field != "rate" or num_engines == 1:
                raise
            return None  # so many that no request arrives at this one: fewer have next to none
        return found.result if found.is_met else None

    if not max_engines:
        return Refusal(config, "one engine takes more devices than there may be")
    too_few, enough = 0, 1
    while (best := result_of(enough)) is None and enough < max_engines:
        too_few, enough = enough, min(2 * enough, max_engines)
    if best is None:
        count = max_engines * config.num_gpus
        return Refusal(config, f"{count} devices do not meet the target")
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        result = result_of(middle)
        if result is None:
            too_few = middle
        else:
            enough, best = middle, result
    return Fleet(config, enough, best)
