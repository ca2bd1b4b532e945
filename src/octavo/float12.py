"""Copies of weights in 12 bits (ops/cuda/float12.py): what they take, and what gains by them.

Plain Python, no torch: kernels choose by these rules, and so do `octavo memory` and the simulator.
"""

from __future__ import annotations

PIECE_ROWS, PIECE_INPUTS = 8, 64
MOST_TOKENS = 128  # times a weight of many rows
MOST_OF_LARGE = 64  # tokens times a large weight of fewer rows than a vocabulary has
MOST_FOLDED = 16  # tokens times others
MANY_ROWS = 4 * 64 * 132  # so many keep all SMs busy to the end, as those of a vocabulary
_LEAST_ROWS = 1024
_LEAST_SIZE = 1 << 22  # weights: reading fewer takes two microseconds
_LEAST_OF_ONE = 7 << 20  # weights that one token reads from a copy
_LARGE_SIZE = 24 << 20  # weights that more than MOST_FOLDED tokens read from one


def has_use(num_rows: int, size: int) -> bool:
    """Whether a W [num_rows, size] can have a copy, and some products take less time with it."""
    is_large = num_rows >= _LEAST_ROWS and num_rows * size >= _LEAST_SIZE
    return size % PIECE_INPUTS == 0 and is_large


def copy_bytes(num_rows: int, size: int) -> int:
    """Of whole pieces, and of a scale in float32 for each row."""
    num_pieces = -(-num_rows // PIECE_ROWS)
    return num_pieces * PIECE_ROWS * size * 3 // 2 + 4 * num_rows


def copied_tokens(num_rows: int, size: int) -> range:
    """For which numbers of tokens a copy of W [num_rows, size] is read."""
    return range(fewest_tokens(num_rows, size), most_tokens(num_rows, size) + 1)


def fewest_tokens(num_rows: int, size: int) -> int:
    """From how many tokens on: a small W is read by one token as fast as its copy is unpacked."""
    return 1 if num_rows * size >= _LEAST_OF_ONE else 2


def most_tokens(num_rows: int, size: int) -> int:
    """Up to how many tokens times W [num_rows, size], which has a copy, take less time with it.

    A W of many rows, such as the head's, keeps all SMs busy with tiles that many tokens share. One
    of fewer has tiles that are folded: the more tokens, the less that gains.
    """
    if num_rows >= MANY_ROWS:
        return MOST_TOKENS
    return MOST_OF_LARGE if num_rows * size >= _LARGE_SIZE else MOST_FOLDED
