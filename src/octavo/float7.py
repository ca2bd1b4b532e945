"""Copies of FP8 weights in 7 bits (ops/cuda/float7.py): what they take, and what gains by them.

Plain Python, no torch: kernels choose by these rules, and so do `octavo memory` and the simulator.
Measured on an H200 (2026-11-29).
"""

from __future__ import annotations

from octavo.routing import tokens_of_many

PIECE_ROWS, PIECE_INPUTS = 8, 128
UNIT = 8  # copies have W / 2 ** UNIT
MOST_OF_EXPERT = 32  # tokens of one expert that its copy is multiplied by at once
_LEAST_SIZE = 48 << 20  # weights: unpacking fewer takes as long as reading them
_MANY_ROWS = 2 * 64 * 132  # so many give each SM two programs
_MOST_TOKENS, _MOST_OF_FEWER = 64, 32  # times a W of many rows, and of fewer
_LEAST_OF_EXPERTS = 48 << 20  # weights of the experts that some tokens take


def has_use(num_rows: int, size: int) -> bool:
    """Whether a W [num_rows, size] can have a copy, and some products take less time with it."""
    is_in_pieces = num_rows % (2 * PIECE_ROWS) == 0 and size % PIECE_INPUTS == 0
    return is_in_pieces and num_rows * size >= _LEAST_SIZE


def copy_bytes(num_rows: int, size: int) -> int:
    """Bytes of a copy of W [num_rows, size], whose scales are W's."""
    return -(-num_rows // PIECE_ROWS) * PIECE_ROWS * size * 7 // 8


def copied_tokens(num_rows: int, size: int) -> range:
    """For which numbers of tokens a copy of W [num_rows, size] is read. One token's kernels are
    faster with W as it is."""
    if not has_use(num_rows, size):
        return range(0)
    return range(2, (_MOST_TOKENS if num_rows >= _MANY_ROWS else _MOST_OF_FEWER) + 1)


def copied_expert_tokens(num_experts: int, top_k: int, size: int, inner: int) -> range:
    """For which numbers of tokens copies of gated MLPs are read, with `inner` intermediate elements
    each; for none, if they have no whole pieces of inputs.

    Those that are hit should have many weights, and hardly any expert should be taken by more than
    MOST_OF_EXPERT tokens: kernels for more convert weights.
    """
    if size % PIECE_INPUTS or inner % PIECE_INPUTS:
        return range(0)
    counts = tokens_of_many(num_experts, top_k, 3 * size * inner, _LEAST_OF_EXPERTS, MOST_OF_EXPERT)
    return range(2, counts.stop) if 1 in counts else counts
