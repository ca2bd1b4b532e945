from __future__ import annotations

import math

from octavo.evaluation.paper_software import FITTED, PAPER_SOFTWARE, implied_steps
from octavo.simulation.cost_model import PAPER_2023, Coefficients


def error(coefficients: Coefficients) -> float:
    """Root mean square of relative errors."""
    errors = [math.log(step.priced(coefficients) / step.seconds) for step in implied_steps()]
    return math.sqrt(sum(each**2 for each in errors) / len(errors))


def test_the_cost_model_prices_the_steps_that_the_paper_implies() -> None:
    assert len(list(implied_steps())) == 24
    assert error(PAPER_SOFTWARE) < 0.08
    assert error(PAPER_SOFTWARE) < error(PAPER_2023)
    assert all(getattr(PAPER_SOFTWARE, name) > 0 for name in FITTED)
