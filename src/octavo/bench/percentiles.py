"""The distribution of many measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SHOWN = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean and percentiles; all of them are 0 where there are no values."""

    mean: float
    at: dict[int, float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        at = np.percentile(values or [0.0], SHOWN).tolist()
        return cls(statistics.fmean(values or [0.0]), dict(zip(SHOWN, at, strict=True)))
