"""What a ScoreFunction does to dot products on a CPU: the one place for all its features."""

# mypy: disable-error-code="attr-defined, call-arg, var-annotated"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, float32

from octavo.ops.base import LOG2_E
from octavo.ops.cpu.jit import jit
from octavo.ops.cpu.vectors import exp2_nonpositive, pointer_to

_DOUBLED = np.float32(-2 * LOG2_E)  # tanh takes exp(-2 |x|), as a power of 2
_ONE = np.float32(1)


@jit
def change_scores(step: Any, row: Any, head: int, position: int) -> None:
    """Turn dot products of one query with neighbouring keys into scores, in place.

    Called only where `step.changes_scores` is set; otherwise a score is a multiple of the product,
    and the softmax multiplies. Loops without branches, so that LLVM vectorises them.

    Args:
        row: float32, the products with the keys 0, 1, 2, ...
        head: the query's.
        position: the query's, counted as the keys are.
    """
    for i in range(len(row)):
        row[i] *= step.product_scale
    if step.softcap > 0:
        for i in range(len(row)):
            x = row[i] / step.softcap
            power = exp2_nonpositive(_DOUBLED * abs(x))
            tanh = (_ONE - power) / (_ONE + power)
            row[i] = step.softcap * (tanh if x >= 0 else -tanh)
    if step.slopes != 0:
        slope = carray(pointer_to(step.slopes, float32), step.num_heads)[head]
        for i in range(len(row)):
            row[i] += slope * np.float32(i - position)
