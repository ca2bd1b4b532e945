"""What many measurements come to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles (linear between neighbours, as numpy's default)."""

    mean: float
    at: dict[int, float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Of no values at all, everything is 0."""
        if not values:
            return cls(0.0, dict.fromkeys(SHOWN, 0.0))
        ordered = sorted(values)
        return cls(statistics.fmean(ordered), {p: _percentile(ordered, p) for p in SHOWN})


def _percentile(ordered: Sequence[float], percent: int) -> float:
    position = percent / 100 * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
