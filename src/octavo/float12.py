"""Copies of weights in 12 bits (ops/cuda/float12.py): what they take, and what gains by them.

Plain Python, no torch: kernels choose by these rules, and so do `octavo memory` and the simulator.
"""

from __future__ import annotations

from octavo.routing import tokens_of_many

PIECE_ROWS, PIECE_INPUTS = 8, 64
MOST_TOKENS = 128  # times a weight of many rows
MANY_ROWS = 4 * 64 * 132  # so many keep all SMs busy to the end, as those of a vocabulary
_MOST_OF_FEWER = 64  # tokens times others
_ROWS_OF_TOKEN = 200  # of these others, for each token that gains
_LEAST_ROWS = 1024
_LEAST_SIZE = 1 << 22  # weights: reading fewer takes two microseconds
_LEAST_OF_ONE = 20 << 20  # weights that one token reads from a copy
_LEAST_OF_NARROW = 7 << 20  # the same, where rings read copies, of W with no more rows than inputs
MOST_OF_EXPERT = 64  # tokens of one expert that its copy is multiplied by at once
# The most inputs that one token may have whose experts are read from copies: inputs of gates, and
# of all its down projections together.
MOST_GATE_INPUTS, MOST_DOWN_INPUTS = 4096, 8192
_LEAST_OF_EXPERTS = 24 << 20  # weights of the experts that some tokens take, read from copies


def has_use(num_rows: int, size: int) -> bool:
    """Whether a W [num_rows, size] can have a copy, and some products take less time with it."""
    is_large = num_rows >= _LEAST_ROWS and num_rows * size >= _LEAST_SIZE
    return size % PIECE_INPUTS == 0 and is_large


def copy_bytes(num_rows: int, size: int) -> int:
    """Bytes of a copy of W [num_rows, size]: whole pieces, and a float32 scale for each row."""
    num_pieces = -(-num_rows // PIECE_ROWS)
    return num_pieces * PIECE_ROWS * size * 3 // 2 + 4 * num_rows


def copied_tokens(num_rows: int, size: int, is_chained: bool = False) -> range:
    """For which numbers of tokens a copy of W [num_rows, size] is read.

    is_chained: products of one token follow each other in rings (ops/cuda/linear_ring_float12.py).
    """
    return range(fewest_tokens(num_rows, size, is_chained), most_tokens(num_rows) + 1)


def fewest_tokens(num_rows: int, size: int, is_chained: bool = False) -> int:
    """The fewest tokens that a copy is read for: one token's GEMV reads a small W as fast.

    Of two rings that read copies an SM holds one at a time, while one that reads an output
    projection in bfloat16 fills beside the copy of the gates and ups that follow it. So bfloat16 is
    read of a small W with no more rows than inputs, as most output projections are.
    """
    least = _LEAST_OF_ONE
    if is_chained:
        least = _LEAST_SIZE if num_rows > size else _LEAST_OF_NARROW
    return 1 if num_rows * size >= least else 2


def most_tokens(num_rows: int) -> int:
    """Up to how many tokens times a W of so many rows, which has a copy, take less time with it: a
    power of two.

    A W of many rows, such as the head's, keeps all SMs busy with tiles that many tokens share. One
    of fewer has tiles that are folded: the more tokens, the less that gains. The limits are an
    H200's; an H100, whose memory is slower, would gain with some more tokens.
    """
    if num_rows >= MANY_ROWS:
        return MOST_TOKENS
    few = max(1, num_rows // _ROWS_OF_TOKEN)
    return min(_MOST_OF_FEWER, 1 << (few.bit_length() - 1))


def copied_expert_tokens(num_experts: int, top_k: int, size: int, inner: int) -> range:
    """For which numbers of tokens copies of gated MLPs are read, with `inner` intermediate elements
    each; for none, if they have no whole pieces of inputs and of rows.

    Those that are hit should have many weights: unpacking few takes as long as reading them. One
    token's kernels hold all words of some rows in registers. Of more tokens hardly any expert
    should be taken by more than MOST_OF_EXPERT.
    """
    if size % PIECE_INPUTS or inner % PIECE_INPUTS:
        return range(0)
    counts = tokens_of_many(num_experts, top_k, 3 * size * inner, _LEAST_OF_EXPERTS, MOST_OF_EXPERT)
    is_one_too_long = size > MOST_GATE_INPUTS or top_k * inner > MOST_DOWN_INPUTS
    return range(2, counts.stop) if is_one_too_long and 1 in counts else counts
