"""Which tiles a skinny GEMM takes (linear_hopper.py).

Measured on 2026-11-20 on one NVIDIA H200, torch 2.11, Triton 3.6, bfloat16: the fastest few of some
40 tiles per shape, then, one product after the other, the one with which 4 to 16 layers (norms and
products with different weights, in one CUDA graph) were fastest. None: cuBLAS was faster there.
Tokens are padded to 16, 32, 64 or 128; with more, cuBLAS was always faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.ops.epilogue import Epilogue

SIZES = (16, 32, 64, 128)  # what tokens are padded to
_SHARED_MEMORY = 222_000  # bytes per SM that tiles may fill
_NUM_SMS = 132
_ROWS = 64  # of W per tile, for most shapes
_MANY_TILES = 4 * _NUM_SMS
_OF_CUBLAS = (Epilogue.NONE, Epilogue.RELU)  # what it computes without another kernel


@dataclass(frozen=True, slots=True)
class Tiles:
    """A configuration of linear_hopper.py's kernel."""

    tokens: int  # BM
    rows: int  # BN, of W
    columns: int  # BK
    stages: int
    warps: int = 4  # that multiply
    splits: int = 1  # of K
    per_sm: int = 1  # programs that fit on one SM
    swap: bool = False  # tokens fill wgmma's 64 rows
    early: bool = False  # PDL: the next kernel may start from the beginning


# (rows of W or of each half, columns of W, epilogue) -> padded tokens -> tiles, where these are not
# `_usual_tiles`
MEASURED: dict[tuple[int, int, Epilogue], dict[int, Tiles | None]] = {
    (6144, 4096, Epilogue.NONE): {  # Llama-3-8B qkv
        16: Tiles(16, 64, 128, 10),
        32: Tiles(32, 64, 128, 9),
        64: Tiles(64, 32, 128, 4, per_sm=2, swap=True, early=True),
        128: Tiles(128, 64, 64, 9),
    },
    (4096, 4096, Epilogue.NONE): {  # Llama-3-8B o
        16: Tiles(16, 64, 256, 5, splits=2),
        32: Tiles(32, 64, 128, 9, splits=2),
        64: Tiles(64, 32, 128, 9, swap=True),
        128: None,
    },
    (14336, 4096, Epilogue.SILU_MUL): {  # Llama-3-8B gate_up
        16: Tiles(16, 64, 128, 3, per_sm=2, early=True),
        32: Tiles(32, 64, 128, 5),
        64: Tiles(64, 64, 64, 4, per_sm=2, early=True),
        128: Tiles(128, 64, 64, 3, per_sm=2),
    },
    (4096, 14336, Epilogue.NONE): {  # Llama-3-8B down
        16: Tiles(16, 64, 128, 5, splits=4, per_sm=2),
        32: Tiles(32, 64, 128, 9, splits=2),
        64: Tiles(64, 64, 128, 6, splits=2),
        128: Tiles(128, 64, 64, 9, splits=2),
    },
    (128256, 4096, Epilogue.NONE): {  # Llama-3-8B logits
        16: Tiles(16, 128, 128, 3, per_sm=2, early=True),
        32: Tiles(32, 128, 128, 2, warps=8, per_sm=2, early=True),
        64: Tiles(64, 128, 128, 2, warps=8, per_sm=2, early=True),
        128: Tiles(128, 256, 64, 4, warps=8),
    },
    (15360, 5120, Epilogue.NONE): {  # OPT-13B qkv
        16: None,
        32: Tiles(32, 64, 128, 4, per_sm=2, early=True),
        64: Tiles(64, 64, 128, 3, per_sm=2, early=True),
        128: None,
    },
    (5120, 5120, Epilogue.NONE): {  # OPT-13B out
        16: None,
        32: None,
        64: None,
        128: None,
    },
    (20480, 5120, Epilogue.RELU): {  # OPT-13B fc1
        16: Tiles(16, 128, 128, 3, per_sm=2),
        32: Tiles(32, 64, 128, 9),
        64: Tiles(64, 128, 64, 4, warps=8, per_sm=2, early=True),
        128: None,
    },
    (5120, 20480, Epilogue.NONE): {  # OPT-13B fc2
        16: Tiles(16, 64, 128, 5, splits=3, per_sm=2, early=True),
        32: Tiles(32, 64, 128, 4, splits=3, per_sm=2, early=True),
        64: Tiles(64, 128, 128, 4, warps=8, splits=3),
        128: Tiles(128, 128, 64, 6, splits=3),
    },
    (50272, 5120, Epilogue.NONE): {  # OPT-13B logits
        16: Tiles(16, 64, 128, 5, per_sm=2, early=True),
        32: Tiles(32, 64, 128, 3, per_sm=3),
        64: Tiles(64, 128, 128, 4, warps=8),
        128: None,
    },
    (4096, 1024, Epilogue.NONE): {  # Qwen3-0.6B qkv
        16: Tiles(16, 128, 128, 6),
        32: Tiles(32, 128, 64, 10),
        64: Tiles(64, 64, 128, 6),
        128: Tiles(128, 64, 64, 9),
    },
    (1024, 2048, Epilogue.NONE): {  # Qwen3-0.6B o
        16: Tiles(16, 64, 256, 2, splits=4, per_sm=2),
        32: Tiles(32, 64, 128, 4, splits=4, per_sm=2, early=True),
        64: Tiles(64, 64, 128, 4, splits=4),
        128: Tiles(128, 64, 64, 8, splits=4),
    },
    (3072, 1024, Epilogue.SILU_MUL): {  # Qwen3-0.6B gate_up
        16: Tiles(16, 64, 128, 6),
        32: Tiles(32, 64, 128, 5),
        64: Tiles(64, 64, 64, 9),
        128: Tiles(128, 64, 64, 6),
    },
    (1024, 3072, Epilogue.NONE): {  # Qwen3-0.6B down
        16: Tiles(16, 64, 256, 3, splits=4),
        32: Tiles(32, 64, 128, 6, splits=4),
        64: Tiles(64, 64, 128, 6, splits=4),
        128: Tiles(128, 64, 64, 9, splits=4),
    },
    (151936, 1024, Epilogue.NONE): {  # Qwen3-0.6B logits
        16: Tiles(16, 128, 128, 3, per_sm=2, early=True),
        32: Tiles(32, 64, 128, 3, per_sm=3),
        64: Tiles(64, 64, 64, 6, per_sm=2, early=True),
        128: None,
    },
    (5120, 2880, Epilogue.NONE): {  # gpt-oss-20b qkv
        64: Tiles(64, 32, 64, 9, per_sm=2, swap=True, early=True),
    },
}


# Where cuBLAS computes. (rows of W, columns) -> up to how many tokens two splits of K, as a batched
# product, and the norm that adds them up take 2 to 20% less than one product and the norm.
# OPT-13B's out gains nothing; its fc2 has a bias, which the batched product would not add.
_AS_TWO_SPLITS = {
    (4096, 4096): 384,  # Llama-3-8B o
    (4096, 14336): 384,  # Llama-3-8B down
    (1024, 2048): 512,  # Qwen3-0.6B o
    (1024, 3072): 512,  # Qwen3-0.6B down
}
# (rows of a gated W, columns) -> tokens, padded to _HALVES_STEP, at which the halves of W one after
# the other take less time than W as a whole: 4 and 30%.
_IN_HALVES = {(28672, 4096): (256, 448)}  # Llama-3-8B gate_up
_HALVES_STEP = 32


def pays_as_two_splits(num_tokens: int, num_rows: int, size: int) -> bool:
    """Whether a product with W [num_rows, size] should be split along K if a norm follows."""
    return num_tokens <= _AS_TWO_SPLITS.get((num_rows, size), 0)


def pays_in_halves(num_tokens: int, num_rows: int, size: int) -> bool:
    """Whether a product with W [num_rows, size] should be one for each half of the rows."""
    padded = -(-num_tokens // _HALVES_STEP) * _HALVES_STEP
    return padded in _IN_HALVES.get((num_rows, size), ())


def choose_tiles(num_tokens: int, num_rows: int, size: int, epilogue: Epilogue) -> Tiles | None:
    """The tiles of a product; None: cuBLAS is faster.

    Args:
        num_rows: results per token; W has twice as many rows if the epilogue is gated.
        size: columns of W, a multiple of 64.
        epilogue: one that linear_hopper.py has.
    """
    padded = next((tokens for tokens in SIZES if num_tokens <= tokens), None)
    if padded is None:
        return None
    measured = MEASURED.get((num_rows, size, epilogue), {})
    if padded in measured:
        return measured[padded]
    return _usual_tiles(padded, num_rows, size, epilogue)


def _usual_tiles(tokens: int, num_rows: int, size: int, epilogue: Epilogue) -> Tiles | None:
    """For shapes not measured: what most of the measured ones take.

    Measured on 2026-11-22 (benchmarks/tune_linear.py) on the shapes of Gemma 3 4B and 12B, and of
    one rank of two of Llama 3 8B and 70B, some 10 candidates for each: these take up to 5% longer
    than the tiles with which whole layers were fastest, and mostly are the same. On 2026-11-27 on
    one rank of four of OPT-66B, OPT-175B and Llama 3 70B, with 16, 32 and 64 tokens.
    """
    num_tiles = -(-num_rows // _ROWS)
    halves = 2 if epilogue.is_gated else 1
    if num_tiles > _MANY_TILES and halves == 1:
        return _tiles_of_many(tokens)
    if tokens == SIZES[-1]:
        return _tiles_of_128(num_rows, size, halves)
    if tokens == 64 and epilogue in _OF_CUBLAS and _NUM_SMS < num_tiles <= 1.5 * _NUM_SMS:
        # Some SMs would have one program, and some two: 2 to 10% slower than cuBLAS, which was
        # measured without an epilogue and with ReLU.
        return None
    if tokens == 64 and halves == 1 and size <= 4096 and 0.7 * _NUM_SMS < 2 * num_tiles <= _NUM_SMS:
        return Tiles(64, 32, 128, 9, swap=True)  # one program per SM, without splits
    # Few tiles: one program per SM, with all of K in flight. Many: two that take turns.
    per_sm = 1 if num_tiles <= _NUM_SMS else 2
    is_short = tokens > 16 and halves == 2 and per_sm == 2 and num_tiles < 1.5 * _NUM_SMS
    columns = 64 if is_short or size % 128 else 128
    return _fitting_tiles(tokens, num_rows, size, halves, columns, per_sm)


def _tiles_of_many(tokens: int) -> Tiles | None:
    """Tiles for so many rows that all SMs are busy to the end, as in a vocabulary."""
    if tokens == SIZES[-1]:
        return None
    if tokens == SIZES[0]:
        return Tiles(16, 128, 128, 3, per_sm=2, early=True)
    return Tiles(tokens, 128, 128, 2, warps=8, per_sm=2, early=True)


def _tiles_of_128(num_rows: int, size: int, halves: int) -> Tiles | None:
    """Tiles for 128 tokens; None: cuBLAS is as fast, as it often is with so many."""
    num_tiles = -(-num_rows // _ROWS)
    if halves == 2 and _NUM_SMS < num_tiles <= 2 * _NUM_SMS:
        return Tiles(128, 128, 64, 4, warps=8)
    is_split = num_tiles <= _NUM_SMS // 2 and size > 4096
    if num_tiles > _NUM_SMS or (halves == 1 and not is_split):
        return None
    return _fitting_tiles(SIZES[-1], num_rows, size, halves, 64, per_sm=1)


def _fitting_tiles(
    tokens: int, num_rows: int, size: int, halves: int, columns: int, per_sm: int
) -> Tiles:
    """Tiles of 64 rows, as many in flight as fit, and splits of K that fill the SMs."""
    num_tiles = -(-num_rows // _ROWS)
    splits = max(1, min(8, _NUM_SMS // num_tiles, size // (2 * columns)))
    stage_bytes = 2 * columns * (_ROWS * halves + tokens)
    stages = min(_SHARED_MEMORY // per_sm // stage_bytes, -(-size // columns // splits), 12)
    stages = max(2, stages)
    is_early = per_sm > 1
    return Tiles(tokens, _ROWS, columns, stages, splits=splits, per_sm=per_sm, early=is_early)
