"""Largest values of rows. On a CPU numpy's vectorised routines are 10 to 30 times torch's."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def _takes_numpy(values: Tensor) -> bool:
    return values.device.type == "cpu"


def argmax(values: Tensor) -> Tensor:
    """int64 [num_rows]: the place of each row's largest value, the lowest of equal ones.

    Args:
        values: floating [num_rows, num_columns].
    """
    if _takes_numpy(values):
        # numpy has no bfloat16; the conversion is exact.
        return torch.from_numpy(values.float().numpy().argmax(axis=-1))
    return values.argmax(dim=-1)


def largest(values: Tensor, number: int) -> Tensor:
    """The `number` largest values of each row (all, if there are fewer), in descending order.

    Args:
        values: float32 [num_rows, num_columns].
    """
    size = values.shape[1]
    number = min(number, size)
    if not _takes_numpy(values):
        return values.topk(number, dim=-1).values
    array = values.numpy()
    if number < size:
        array = np.partition(array, size - number, axis=-1)[:, size - number :]
    return torch.from_numpy(np.sort(array, axis=-1)).flip(-1)


def top_p_limits(
    shares: Tensor, weights: Tensor, best: Tensor, top_p: NDArray[np.float64]
) -> Tensor:
    """The smallest share among the fewest tokens that reach top_p of their row.

    Args:
        shares: float32 [num_rows, num_columns], not negative.
        weights: int64 [num_rows, num_columns]: the shares rounded down; their sums are exact.
        best: float32 [num_rows, n]: each row's largest shares, in descending order.
        top_p: [num_rows], in (0, 1]; rows of 1 get the limit 0.

    Returns:
        float32 [num_rows].
    """
    fractions = torch.from_numpy(top_p).to(shares.device)
    wanted = fractions * weights.sum(dim=-1)
    limits, is_reached = _limits_of_sorted(best, wanted)
    # Few tokens usually hold most of the mass; only rows where they do not are sorted.
    rest = ((fractions < 1) & ~is_reached).nonzero().squeeze(1)
    if len(rest) and best.shape[1] < shares.shape[1]:
        ordered = largest(shares[rest], shares.shape[1])
        limits[rest] = _limits_of_sorted(ordered, wanted[rest])[0]
    return limits.masked_fill_(fractions == 1, 0)


def _limits_of_sorted(ordered: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The limits of rows in descending order, and whether their tokens reach what is wanted."""
    counts = ordered.to(torch.int64)
    ends = counts.cumsum(dim=-1)
    # A token stays while those before it fall short; the first one always stays.
    num_kept = ((ends - counts) < wanted.unsqueeze(1)).sum(dim=-1, keepdim=True).clamp_(min=1)
    return ordered.gather(1, num_kept - 1).squeeze(1), ends[:, -1] >= wanted
