"""Rows that ranks add up for each other: bit for bit what each of them would make of all parts."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from ranks import Ranks
from torch import Tensor

from octavo.ops.communicator import Communicator, Reduction, ReductionSite
from octavo.ops.cuda.norm import norm
from octavo.ops.norm import Affine

RanksOf = Callable[[int], Ranks]


def parts_of(ranks: int, num_rows: int) -> Tensor:
    values = torch.randn(ranks, num_rows, 24, generator=torch.Generator().manual_seed(num_rows))
    values[1, num_rows // 2, 3] = torch.nan
    return values.bfloat16()


def inputs(num_rows: int) -> tuple[Tensor, Tensor]:
    """(residual stream, weight of the norm)."""
    residual = torch.linspace(-3, 3, num_rows * 24).view(num_rows, 24)
    return residual.bfloat16(), torch.linspace(0.5, 2, 24).bfloat16()


def reduce(communicator: Communicator, num_rows: int, num_splits: int) -> tuple[Tensor, Tensor]:
    """(residual stream, its norm)."""
    os.environ["TRITON_INTERPRET"] = "1"
    from octavo.ops.cuda.norm import norm
    from octavo.ops.norm import Affine

    shard = communicator.shard
    x = parts_of(shard.size, num_rows)[shard.rank]
    if num_splits > 1:
        x = torch.stack([x.float() * 0.25, x.float() * 0.75])
    residual, weight = inputs(num_rows)
    reduction = Reduction(communicator, ReductionSite.MLP)
    [normed] = norm(x, Affine(weight), 1e-5, residual, True, reduction=reduction)
    return residual, normed


@pytest.mark.parametrize(("num_rows", "num_splits"), [(1, 1), (2, 2), (6, 1), (7, 1)])
def test_rows_are_added_by_one_rank_for_all(num_rows: int, num_splits: int, ranks: RanksOf) -> None:
    wanted, weight = inputs(num_rows)
    [normed] = norm(parts_of(3, num_rows), Affine(weight), 1e-5, wanted, True)
    for residual, got in ranks(3).call(reduce, num_rows, num_splits):
        assert torch.equal(residual.nan_to_num(7e4), wanted.nan_to_num(7e4))
        assert torch.equal(got.nan_to_num(7e4), normed.nan_to_num(7e4))
