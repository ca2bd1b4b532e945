"""When requests arrive; seconds from the start, in order."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from octavo.errors import ConfigError

MAX_REQUESTS = 1_000_000  # on average; each is simulated
MAX_DURATION = 1e6  # seconds: some 11 days
MIN_BURSTINESS, MAX_BURSTINESS = 1e-3, 100.0  # below: evenly spaced; above: a single burst
QUANTUM = 0.01  # seconds; the paper's generator draws a Poisson number for each


def poisson(rate: float, duration: float, seed: int) -> list[float]:
    """As the paper's artifact: in each quantum of 10 ms, a Poisson number of requests.

    Args:
        rate: requests per second, on average.
        duration: seconds; the last arrival is before it.
    """
    _check(rate, duration)
    counts = np.random.default_rng(seed).poisson(rate * QUANTUM, math.ceil(duration / QUANTUM))
    quanta = np.repeat(np.arange(len(counts)), counts)
    return [float(time) for time in quanta * QUANTUM]


def gamma(rate: float, duration: float, seed: int, burstiness: float) -> list[float]:
    """Gaps from a gamma distribution. `burstiness` is their coefficient of variation: 1 is a
    Poisson process, more comes in bursts, 0 is a clock."""
    _check(rate, duration)
    if burstiness and not MIN_BURSTINESS <= burstiness <= MAX_BURSTINESS:
        raise ConfigError(
            "burstiness",
            f"{burstiness} is neither 0 nor between {MIN_BURSTINESS:g} and {MAX_BURSTINESS:g}",
        )
    return list(_gamma_times(rate, duration, seed, burstiness))


def _gamma_times(rate: float, duration: float, seed: int, burstiness: float) -> Iterator[float]:
    draw = np.random.default_rng(seed)
    time = 0.0
    while True:
        if burstiness:
            shape = burstiness**-2
            time += float(draw.gamma(shape, 1 / (rate * shape)))
        else:
            time += 1 / rate
        if time >= duration:
            return
        yield time


def _check(rate: float, duration: float) -> None:
    """That both are positive, and not so large that the requests could never be simulated."""
    for name, value in (("rate", rate), ("duration", duration)):
        if not 0 < value < math.inf:
            raise ConfigError(name, f"{value} is not a positive number")
    if duration > MAX_DURATION:
        raise ConfigError("duration", f"{duration:g} s is more than {MAX_DURATION:g} s")
    if rate * duration > MAX_REQUESTS:
        raise ConfigError(
            "rate",
            f"{rate:g} requests/s for {duration:g} s are more than {MAX_REQUESTS:,} requests; "
            "shorten the duration",
        )
