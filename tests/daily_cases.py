"""Which cases of a test run by day, and which by night."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def checkered(ones: Iterable[object], others: Iterable[object]) -> list[ParameterSet]:
    """Pairs of both, as the fields of a chess board: those that are white by day, so that each of
    one kind comes beside half of the other kind; and the black ones by night. What is a tuple has
    several of the test's arguments."""

    def values(given: object) -> tuple[object, ...]:
        return given if isinstance(given, tuple) else (given,)

    return [
        pytest.param(*values(one), *values(other), marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, one in enumerate(ones)
        for j, other in enumerate(others)
    ]
