"""What a ScoreFunction does to dot products on a CPU: the one place for all its features."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.ops.base import LOG2_E
from octavo.ops.cpu.jit import jit
from octavo.ops.cpu.vectors import exp2_nonpositive

_DOUBLED = np.float32(-2 * LOG2_E)  # tanh takes exp(-2 |x|), as a power of 2
_ONE = np.float32(1)


@jit
def change_scores(step: Any, row: Any) -> None:
    """Turn dot products of one query with neighbouring keys into scores, in place.

    Called only where `step.changes_scores` is set; otherwise a score is a multiple of the product,
    and the softmax multiplies. Loops without branches, so that LLVM vectorises them.
    """
    for i in range(len(row)):
        row[i] *= step.product_scale
    if step.softcap > 0:
        for i in range(len(row)):
            x = row[i] / step.softcap
            power = exp2_nonpositive(_DOUBLED * abs(x))
            tanh = (_ONE - power) / (_ONE + power)
            row[i] = step.softcap * (tanh if x >= 0 else -tanh)
