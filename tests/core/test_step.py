"""Plans that ask for no more than the step before did."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.core.step import (
    BlockCopy,
    Fork,
    OpenedRow,
    SamplingSpec,
    StepPlan,
    TableWrite,
    TokenWrites,
)

PLAN = StepPlan(7, [3, 5], [1, 1], [3, 5], [])
OPENED = OpenedRow(8, (1, 2), 2, 0, SamplingSpec(), 0, 0, 1)


@pytest.mark.parametrize(
    "changed", [{}, {"closed": [9]}, {"table_writes": [TableWrite(3, 0, 4, (17,))]}]
)
def test_a_step_of_the_same_sequences_continues(changed: dict[str, Any]) -> None:
    assert replace(PLAN, **changed).continues([3, 5])


@pytest.mark.parametrize(
    "changed",
    [
        {"seq_ids": [5, 3]},
        {"seq_ids": [3], "num_scheduled_tokens": [1], "sampled": [3]},
        {"seq_ids": [3, 5, 6], "num_scheduled_tokens": [1, 1, 1], "sampled": [3, 5, 6]},
        {"seq_ids": [], "num_scheduled_tokens": [], "sampled": []},
        {"num_scheduled_tokens": [1, 2]},
        {"sampled": [3]},
        {"sampled": [5, 3]},
        {"sampled": [3], "expanded": [5]},
        {"encoded": [5]},
        {"forks": [Fork(3, 9, 1)]},
        {"opened": [OPENED]},
        {"token_writes": TokenWrites([3], [4], [1])},
        {"swap_out": [(1, 2)]},
        {"swap_in": [(1, 2)]},
        {"copies": [BlockCopy(1, 2, 3)]},
    ],
)
def test_what_else_a_step_does_makes_it_another(changed: dict[str, Any]) -> None:
    assert not replace(PLAN, **changed).continues([3, 5])
