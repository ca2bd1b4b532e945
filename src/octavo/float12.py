"""Copies of weights in 12 bits (ops/cuda/float12.py): what they take, and what gains by them.

Plain Python, no torch: kernels choose by these rules, and so do `octavo memory` and the simulator.
"""

from __future__ import annotations

PIECE_ROWS, PIECE_INPUTS = 8, 64
MOST_TOKENS = 128
MOST_FOLDED = 16  # tokens times a weight of few rows, whose tiles are folded
MANY_ROWS = 4 * 64 * 132  # so many keep all SMs busy to the end, as those of a vocabulary
_LEAST_ROWS = 1024
_LEAST_SIZE = 1 << 22  # weights: reading fewer takes two microseconds


def has_use(num_rows: int, size: int) -> bool:
    """Whether a W [num_rows, size] can have a copy, and some products take less time with it."""
    is_large = num_rows >= _LEAST_ROWS and num_rows * size >= _LEAST_SIZE
    return size % PIECE_INPUTS == 0 and is_large


def copy_bytes(num_rows: int, size: int) -> int:
    """Of whole pieces, and of a scale in float32 for each row."""
    num_pieces = -(-num_rows // PIECE_ROWS)
    return num_pieces * PIECE_ROWS * size * 3 // 2 + 4 * num_rows


def is_faster(num_tokens: int, num_rows: int, is_chained: bool = True) -> bool:
    """Whether so many tokens times W [num_rows, _], which has a copy, take less time with it.

    Times a W of many rows, such as the head's, up to 128 tokens do; times others up to 16. One
    token times these does where projections follow each other (make_linear_kernel); others are left
    to GEMVs, which norm their inputs, too.

    is_chained: rules that do not know it assume it, as most models that have copies are.
    """
    if num_rows >= MANY_ROWS:
        return 0 < num_tokens <= MOST_TOKENS
    return (0 if is_chained else 1) < num_tokens <= MOST_FOLDED
