"""The CPU's selections, against plain Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.worker.device.cpu_sampling import argmax, largest, top_p_limits


def values_with_ties(num_rows: int, num_columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_columns)
    return torch.randint(-20, 20, (num_rows, num_columns), generator=generator).float()


@pytest.mark.parametrize("num_columns", [1, 7, 500, 3_000])
def test_argmax_and_largest(num_columns: int) -> None:
    values = values_with_ties(9, num_columns)
    for dtype in (torch.float32, torch.bfloat16):
        expected = [row.index(max(row)) for row in values.tolist()]
        assert argmax(values.to(dtype)).tolist() == expected
    for number in (1, 5, num_columns, num_columns + 5):
        expected_rows = [sorted(row, reverse=True)[:number] for row in values.tolist()]
        assert largest(values, number).tolist() == expected_rows


@pytest.mark.parametrize("num_best", [1, 4, 60, 300])
def test_top_p_limits_do_not_depend_on_how_many_were_looked_at_first(num_best: int) -> None:
    shares = values_with_ties(40, 300).abs() * 3.5
    weights = shares.to(torch.int64)
    top_p = torch.linspace(0.02, 1.0, 40, dtype=torch.float64).numpy()
    limits = top_p_limits(shares, weights, largest(shares, num_best), top_p).tolist()
    for row, share, limit in zip(shares.tolist(), top_p.tolist(), limits, strict=True):
        reached, expected = 0, 0.0
        for value in sorted(row, reverse=True):
            if share == 1 or reached >= share * sum(map(int, row)):
                break
            reached, expected = reached + int(value), value
        assert limit == expected
