"""What a ScoreFunction does to dot products on a CPU: the one place for all its features."""

# mypy: disable-error-code="attr-defined, call-arg, var-annotated"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, float32

from octavo.ops.base import LOG2_E
from octavo.ops.cpu.attention_tiles import SPAN
from octavo.ops.cpu.jit import jit
from octavo.ops.cpu.vectors import LANES, exp2_nonpositive, pointer_to

_DOUBLED = np.float32(-2 * LOG2_E)  # tanh takes exp(-2 |x|), as a power of 2
_ONE, _SMALL = np.float32(1), np.float32(0.125)
_THIRD, _FIFTH, _SEVENTH = np.float32(-1 / 3), np.float32(2 / 15), np.float32(-17 / 315)


@jit
def _tanh(x: Any) -> Any:
    """Relative error at most 1e-6; near 0 from the series, since 1 - exp(-2 |x|) cancels there."""
    power = exp2_nonpositive(_DOUBLED * abs(x))
    size = (_ONE - power) / (_ONE + power)
    square = x * x
    series = x * (_ONE + square * (_THIRD + square * (_FIFTH + square * _SEVENTH)))
    large = size if x >= 0 else -size
    return series if abs(x) < _SMALL else large


@jit
def change_scores(step: Any, scores: Any, begin: int, head: int, position: int) -> None:
    """Turn dot products of one query with a span of keys into scores, in place.

    Called only where `step.changes_scores` is set; otherwise a score is a multiple of the product,
    and the softmax multiplies. The loops have no branches, so that LLVM vectorises them.

    Args:
        scores: float32; the products begin at `begin`.
        head: the query's.
        position: the query's, counted from the first key of the span.
    """
    # Loops over `scores` itself, whose indices may wrap around, would not be vectorised.
    row = scores[begin : begin + SPAN * LANES]
    for i in range(len(row)):
        row[i] *= step.product_scale
    if step.softcap > 0:
        for i in range(len(row)):
            row[i] = step.softcap * _tanh(row[i] / step.softcap)
    if step.slopes != 0:
        slope = carray(pointer_to(step.slopes, float32), step.num_heads)[head]
        for i in range(len(row)):
            row[i] += slope * np.float32(i - position)
    if step.biases != 0:
        farthest = step.max_distance
        biases = carray(pointer_to(step.biases, float32), (step.num_heads, farthest + 1))[head]
        for i in range(len(row)):
            row[i] += biases[min(max(position - i, 0), farthest)]
