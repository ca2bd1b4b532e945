from __future__ import annotations

import math

import pytest

from octavo.simulation.cost_model import ONE_SEQUENCE, PAPER_2023, PAPER_SOFTWARE, Coefficients
from octavo_paper.paper_software import FITTED, implied_steps


def error(coefficients: Coefficients) -> float:
    """Root mean square of relative errors."""
    errors = [math.log(step.priced(coefficients) / step.seconds) for step in implied_steps()]
    return math.sqrt(sum(each**2 for each in errors) / len(errors))


def test_the_cost_model_prices_the_steps_that_the_paper_implies() -> None:
    assert len(list(implied_steps())) == 24
    assert error(ONE_SEQUENCE) < 0.065
    assert error(ONE_SEQUENCE) < error(PAPER_2023)
    assert all(getattr(ONE_SEQUENCE, name) > 0 for name in FITTED)


def test_a_request_of_one_sequence_costs_what_was_fitted() -> None:
    assert error(PAPER_SOFTWARE) == pytest.approx(error(ONE_SEQUENCE))
    assert 0 < PAPER_SOFTWARE.seq_overhead < PAPER_SOFTWARE.request_overhead
