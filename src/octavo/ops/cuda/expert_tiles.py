"""Which tiles the grouped products of experts take (experts.py); rules, not measurements.

While tokens are few, the time goes into reading the weights of the experts that were hit: tiles
hold as few tokens as tensor cores allow, and two or more programs share an SM, so that while one
begins or ends, others read. With many tokens per expert, tiles are square.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.ops.cuda.expert_weights import BLOCK, ExpertMatrices, Format
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.routing import usual_most

# Up to so many tokens, what each expert contributes to a token is kept in float32 until it is added
# up; beyond that it would take longer to write and read than it is worth.
EXACT_TOKENS = 256
# The same for experts_hopper.py, whose gates are not rounded: with contributions in bfloat16, its
# results are 1.8e-3 from exact ones; with rounded gates and contributions in float32 it is 1.7e-3.
HOPPER_EXACT_TOKENS = 16
_SHARED_MEMORY = 222_000  # bytes per SM that tiles may fill, on Hopper
_HOPPER_MEMORY = 227_000  # the same, for experts_hopper.py and experts_hopper_float12.py
# Registers that each thread of its programs has at the start. With their 16 warps they leave room
# on an SM for programs of the kernel that makes the lists, so that they start while it runs.
HOPPER_REGISTERS = 112
GATHERING_WARPS = 4
GATHERING_REGISTERS = 88  # of a thread
# The same of experts_hopper.py, whose other warps may unpack weights.
FLOAT8_GATHERING_REGISTERS = 56
_OTHER_SHARED_MEMORY = 96_000  # that any GPU has
MAX_STAGES = 6
_ONE_TOKEN_ELEMENTS = 8192  # of weights that a program for one token loads at once, of each kind


@dataclass(frozen=True, slots=True)
class Tiles:
    """A configuration of the grouped product's kernel."""

    tokens: int  # BM
    rows: int  # BN, of the experts' weights: of the gates, and as many ups
    columns: int  # BK
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class OneTokenPrograms:
    """What a program of a kernel for one token takes."""

    rows: int  # of each of the matrices that it reads
    columns: int  # at once
    ahead: int  # how many such blocks of columns are loaded together
    warps: int


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """A configuration of experts_hopper.py's kernel, of which an SM has one program."""

    tokens: int
    stages: int
    ahead: int  # bytes of each row of a program's first tile that are fetched before the lists


def choose_hopper_tiles(
    num_tokens: int, block_rows: int, up: ExpertMatrices, down: ExpertMatrices
) -> HopperTiles | None:
    """Tiles for both projections of FP8 experts, with blocks of up to `block_rows` rows of inputs.
    None: other kernels compute them.

    A sixth stage, for which 8 tokens leave room, takes longer (54.9 and 55.9 us of one H200).

    Weights are fetched before the lists are there while the kernel of few tokens routes them, and
    where most experts are hit; beside the kernels that route 9 to 16 tokens that takes longer.
    """
    if any(each.format != Format.FLOAT8 for each in (up, down)) or block_rows not in (16, 32):
        return None
    tokens = tokens_of_hopper(num_tokens, block_rows)
    stage = BLOCK * (2 * BLOCK + 2 * tokens) + 4 * tokens
    stages = min(5, hopper_stages(stage, tokens))
    ahead = 8 * BLOCK if tokens > 16 else 4 * BLOCK if 4 <= num_tokens <= 8 else 0
    return HopperTiles(tokens, stages, ahead)


def tokens_of_hopper(num_tokens: int, block_rows: int) -> int:
    """Tokens of a tile of experts_hopper.py and experts_hopper_float12.py, with blocks of up to
    `block_rows` rows: a batch of a few has no more of one expert."""
    return 8 if num_tokens <= 8 else block_rows


def hopper_stages(stage_bytes: int, tokens: int) -> int:
    """How many stages fit on an SM beside a matrix of a tile in float32, which is stored by way of
    shared memory, and barriers."""
    return (_HOPPER_MEMORY - 4 * BLOCK * tokens - 1024) // stage_bytes


def tokens_per_tile(num_tokens: int, num_experts: int, top_k: int) -> int:
    """Tokens of one expert that a program computes, of a batch of `num_tokens`.

    Most experts should find room for their tokens in one tile, with which their weights are read
    once.
    """
    most = usual_most(num_tokens, num_experts, top_k)
    return next((size for size in (16, 32, 64) if most <= size), 128)


def max_blocks(num_tokens: int, num_experts: int, top_k: int, tokens: int) -> int:
    """How many tiles of `tokens` all experts may need, whatever the tokens choose: as many as if
    each had a tile with a single token, and the other tokens filled tiles."""
    num_rows = num_tokens * top_k
    most = min(num_rows, num_experts)
    return most + (num_rows - most) // tokens


def choose_tiles(
    tokens: int, matrices: ExpertMatrices, element_size: int, is_gated: bool, has_tma: bool
) -> Tiles:
    """Tiles for a product of `tokens` at a time, whose elements have so many bytes."""
    size = matrices.size
    if tokens == 128:
        rows, columns, warps, per_sm = 128, 64, 8, 1
    else:
        rows, columns, warps, per_sm = 64 if is_gated else 128, 128 if tokens == 16 else 64, 4, 2
    if matrices.format.is_packed or matrices.scale_columns:
        columns = BLOCK
    else:
        if size % columns:
            columns = 64
        columns = min(columns * 2 // element_size, max(16, power_of_2(size)))
    weight_bytes = columns * matrices.bits // 8 * rows * (2 if is_gated else 1)
    stage_bytes = weight_bytes + element_size * columns * tokens
    if matrices.bits < 16 and tokens < 128:
        # Weights pass through registers, and each product waits for the one before: what hides that
        # is more programs. Of two and three per SM, three take 18% less time in FP8.
        per_sm = 5 if matrices.format.is_packed and tokens == 16 else 3
        in_registers = 1  # of the stages
    else:
        in_registers = 0
    room = _SHARED_MEMORY // per_sm if has_tma else _OTHER_SHARED_MEMORY
    stages = max(2, min(MAX_STAGES, in_registers + room // stage_bytes))
    if (stages - in_registers) * stage_bytes > room:
        rows //= 2
    return Tiles(tokens, rows, columns, stages, warps)


def programs_of_one_token(size: int, bits: int, slots: int = 1) -> OneTokenPrograms:
    """What programs take of weights with rows of `size`, of `slots` matrices each.

    Measured on 2026-11-23 on one H200, of Qwen3-30B-A3B, with routing, which takes 4.3 us: what is
    chosen is the fastest in bfloat16 (25.5 us; 25.7 to 31.7) and in FP8 (20.0; 20.2 to 24.6) of
    some ten kinds of programs for either kernel; bfloat16's two choices were measured apart.
    """
    most = 2048 if bits == 16 and size > 2048 else 1024
    columns = max(BLOCK, min(power_of_2(size), _ONE_TOKEN_ELEMENTS // slots, most))
    while -size % columns > size // 4 and columns >= 2 * BLOCK:
        columns //= 2  # less padding
    ahead = max(1, min(4, _ONE_TOKEN_ELEMENTS // (slots * columns)))
    if bits == 8:
        return OneTokenPrograms(2 if slots > 1 else 1, columns, ahead, 4 if slots > 1 else 2)
    return OneTokenPrograms(2 if slots > 1 else 1, columns, ahead, 8 if slots > 1 else 4)
