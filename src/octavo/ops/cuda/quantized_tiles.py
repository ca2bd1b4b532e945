"""Which tiles GEMMs with quantized weights take (linear_hopper_quantized.py; of 4 bits
linear_gemv_packed.py for one token and linear_hopper_packed.py for up to 32; and
linear_hopper_persistent.py from 65 tokens on).

A rule proposes some by the shape, the best guess first: what was fastest, or nearly so, for the
shapes of Llama 3 8B on an H200 (2026-11-23, Triton 3.6, benchmarks/quantized_linear.py). Which of
them is fastest on this card, for this shape, is measured when an engine starts (tuning.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import triton

from octavo.ops.cuda import linear_hopper_packed, linear_table
from octavo.ops.cuda.linear_gemv_packed import BLOCKS, PackedPrograms
from octavo.ops.cuda.linear_hopper_packed import PackedTiles
from octavo.ops.cuda.stored_weights import (
    BLOCK,
    CHUNK_ROWS,
    INT4,
    PIECE,
    StoredWeight,
    row_bytes,
    staged_groups,
)
from octavo.ops.cuda.tile_sizes import registers_for
from octavo.ops.quantized import Rounding

# Up to how many tokens a choice is for; more are computed otherwise.
SIZES = (1, 8, 16, 32, 64, 128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)
_NUM_SMS = 132
_SHARED_MEMORY = 222_000  # bytes per SM that tiles may fill
_PERSISTENT_MEMORY = 227_000  # beside barriers and what the end of a tile takes
_MAX_SPLITS = 8
_PARTIAL_BYTES = 32 << 20  # of partial sums, of more splits than it takes to fill the SMs
_LONG_ROW = 8192  # inputs of which two programs on each SM take splits
MOST_IN_TWO = 64  # tokens whose inputs are two e4m3 numbers each; with more, gates and ups lose
_MOST_OF_TILE_IN_TWO = 32  # of them in a tile
MOST_IN_SPANS = 64  # tokens that are rounded in parts where others have a scale each
MOST_MADE_TWO = 16  # tokens whose results become two e4m3 numbers in the tiles that have them
MOST_IN_INTEGERS = 32  # tokens whose inputs are two integers each; more were not measured
_WARPS_BY_ONE = 4  # of a program for one token
_MOST_BY_ONE = _WARPS_BY_ONE * BLOCKS * BLOCK  # its inputs
_MOST_ROWS_IN_PARTS = 4096  # results of one token that are left as partial sums
_FEWEST_TOKENS = 8  # of a tile
_MOST_OF_MANY_STAGES = 32  # tokens of tiles that find room for enough stages beside many scales
# Places in SIZES, of products that may read a dequantized copy (with fewer tokens they are bound by
# its bytes), and that do so by the rule, because tiles gain 4% at most with any shape.
_FEWEST_BY_COPY, _MANY_BY_COPY = 192, 1024
_MAX_STAGES = 12
_FEWEST_STEPS = 4
# Microseconds of the persistent kernel with tiles of so many tokens: of a step, and of adding up
# parts of tiles that programs share. Besides, of the launch, and how much longer steps of products
# with gates took, the largest. Measured on an H100, 2026-11-28, with weights of 4 bits. What
# they choose takes 0.1% longer than the fastest, on average of 36 products.
_COSTS = {128: (0.71, 7.8), 192: (1.11, 7.5), 256: (1.23, 12.2), 320: (1.65, 17.2)}
_LAUNCH, _GATED = 3.0, 1.1
_PERSISTENT_ROWS = 128  # of a tile: with 256, products take longer
_SLOWED_TOKENS = 16_000  # beyond 256, with which the power limit would make steps twice as long
_MOST_PERSISTENT = 4  # that are measured
# Rates of products of bfloat16 on an H200: weights times inputs per microsecond, bytes read per
# microsecond, and the microseconds of a launch. 28 products of 192 to 2,048 tokens take
# 5% more or less, on average.
_DENSE_PRODUCTS, _DENSE_BYTES, _DENSE_LAUNCH = 395e6, 4.2e6, 2.5
_LEAST_REGISTERS = 40  # of a thread, beside sums


@dataclass(frozen=True, slots=True)
class Tiles:
    """A configuration of linear_hopper_quantized.py's kernel, or linear_hopper_persistent.py's."""

    tokens: int  # BM
    rows: int  # of W; with a gate half of them are gates
    stages: int
    warps: int = 4  # that multiply
    splits: int = 1  # of K
    per_sm: int = 1  # programs that fit on one SM
    early: bool = False  # PDL: the next kernel may start from the beginning
    scales_weights: bool = False  # not the sums
    by_warp: bool = False  # mma of single warps in place of wgmma
    # For linear_hopper_persistent.py's kernel alone:
    x_stages: int = 0  # 0: it is not that kernel
    halves: int = 1  # of a block of x, in a stage
    is_shared: bool = False  # programs share tiles, so that they compute equally many steps


@dataclass(frozen=True, slots=True)
class Library:
    """In place of tiles: W is dequantized, and computed with as a weight that is not quantized; or
    inputs are rounded to FP8, and cuBLAS computes."""


Choice = (
    Tiles | PackedPrograms | PackedTiles | linear_table.Tiles | Library
)  # the third with inputs in FP8
LIBRARY = Library()


@dataclass(frozen=True, slots=True)
class Product:
    """What tiles are chosen for."""

    tokens: int  # at most, one of SIZES
    num_rows: int  # results per token
    size: int  # inputs
    format: int
    group: int
    has_zeros: bool
    is_gated: bool
    rounding: Rounding = Rounding.NONE
    has_copy: bool = False  # whether it may be computed with a dequantized copy of W

    @property
    def weight_rows(self) -> int:
        """Rows of W: one per result, or two (a gate, and what it gates)."""
        return self.num_rows * 2 if self.is_gated else self.num_rows

    @classmethod
    def of(
        cls,
        num_tokens: int,
        stored: StoredWeight,
        is_gated: bool,
        rounding: Rounding = Rounding.NONE,
        has_copy: bool = False,
    ) -> Product | None:
        """None: too many tokens for kernels that dequantize. With inputs rounded, more are computed
        as those of the last size."""
        if num_tokens > SIZES[-1] and rounding is Rounding.NONE:
            return None
        tokens = next((each for each in SIZES if num_tokens <= each), SIZES[-1])
        num_rows, size = stored.shape
        num_rows //= 2 if is_gated else 1
        has_zeros = stored.zeros is not None
        has_copy = has_copy and tokens >= _FEWEST_BY_COPY and rounding is Rounding.NONE
        return cls(
            *(tokens, num_rows, size, stored.format, stored.group, has_zeros),
            *(is_gated, rounding, has_copy),
        )


@cache
def candidates(product: Product) -> tuple[Choice, ...]:
    """What may be the fastest for a product, the best guess first."""
    if product.rounding is Rounding.GROUPS:
        return tuple(_grouped_candidates(product))
    if product.rounding is Rounding.TOKENS:
        return tuple(_rounded_candidates(product))
    if product.rounding is Rounding.IN_TWO:
        return (_tiles_in_two(product),)
    if product.rounding is Rounding.INTEGERS:
        return tuple(_packed_choices(product))
    packed = _packed_programs(product)
    if packed is not None:
        return (packed,)
    found: list[Tiles] = []
    if product.tokens >= 128:
        found += _persistent_candidates(product)
    if product.tokens <= 512:
        found += _simple_candidates(product)
    if not found:
        return (LIBRARY,)
    if product.has_copy and (
        product.tokens >= _MANY_BY_COPY or _expected_of_copy(product) < _expected(product, found[0])
    ):
        return (LIBRARY, *found)
    takes_library = product.has_copy or product.tokens >= 1024
    return (*found, LIBRARY) if takes_library else tuple(found)


def _packed_programs(product: Product) -> PackedPrograms | None:
    """The programs of linear_gemv_packed.py's kernel, for layers of as many inputs as a program
    takes, or of so few outputs that they are left as partial sums; None: it does not compute the
    product.

    There is no choice to measure: in turns with another kernel, each of the two takes longer than
    alone.
    """
    if product.tokens > 1 or product.format != INT4 or product.size % BLOCK:
        return None
    if product.group and product.group < BLOCK:
        return None
    splits = triton.cdiv(product.size, _MOST_BY_ONE)
    if splits > 1 and (product.is_gated or product.num_rows > _MOST_ROWS_IN_PARTS):
        return None
    return PackedPrograms(16, _WARPS_BY_ONE, splits)


def _simple_candidates(product: Product) -> list[Tiles]:
    """Tiles of linear_hopper_quantized.py's kernel to choose among, the usual ones first."""
    scales_weights = product.group > 0 and product.tokens >= 128
    # Tokens, rows, programs on an SM, and whether single warps multiply.
    if product.tokens <= 16:
        tokens = max(product.tokens, _FEWEST_TOKENS)
        pairs = [(64, 4), (64, 3), (128, 2), (64, 5), (128, 3)]
        kinds = [(tokens, *pair, True) for pair in pairs]
        kinds.append((tokens, 64, 3, False))
    elif product.tokens <= 128:
        pairs = [(64, 2), (64, 1), (128, 1), (128, 2), (64, 3)]
        if product.tokens == 64 and product.weight_rows <= 64 * _NUM_SMS:  # measured with 64 alone
            pairs = [(64, 1), (64, 2), *pairs[2:]]
        kinds = [(product.tokens, *pair, False) for pair in pairs]
    else:
        kinds = [(128, 64, 2, False), (256, 128, 1, False)]
    found: dict[Tiles, None] = {}
    for tokens, rows, per_sm, by_warp in kinds:
        if registers_for(rows // 16 + 4, per_sm) < tokens // 2 + _LEAST_REGISTERS:
            continue  # the compiler would fail
        tiles = _fitting(product, tokens, rows, per_sm)
        if tiles is not None:
            found[replace(tiles, scales_weights=scales_weights, by_warp=by_warp)] = None
    if not found and product.tokens < 128:  # scales of many small groups take the room
        tokens = max(product.tokens, _FEWEST_TOKENS)
        larger = (_fitting(product, tokens, 64, per_sm, cuts_more=True) for per_sm in (2, 1))
        fitting = [tiles for tiles in larger if tiles is not None]
        if tokens <= _MOST_OF_MANY_STAGES:
            return fitting
        # The persistent kernel loads the scales of a step when it comes to it: they need no room.
        return [*_persistent_candidates(product), *fitting]
    return list(found)


def _persistent_candidates(product: Product) -> list[Tiles]:
    """Tiles of linear_hopper_persistent.py's kernel, which fetches gates in whole pieces; those
    that are expected to be fastest come first."""
    if product.is_gated and product.num_rows % PIECE:
        return []
    # Measured with 320 and 640 tokens, and faster with 320 alone.
    served = [128] if product.tokens <= 128 else [128, 192, 256]
    if product.tokens == 320:
        served.append(320)
    found = [
        persistent_tiles(product, tokens, is_shared=is_shared)
        for tokens in served
        for is_shared in (False, True)
    ]
    found.sort(key=lambda tiles: _expected(product, tiles))
    return found[:_MOST_PERSISTENT]


def _expected_of_copy(product: Product) -> float:
    """About how many microseconds a product with the dequantized copy takes: arithmetic and reading
    overlap least when they take equally long. Gates have a kernel of their own, which reads and
    writes 16 bits of each."""
    weights = product.weight_rows * product.size
    computing, reading = weights * product.tokens / _DENSE_PRODUCTS, 2 * weights / _DENSE_BYTES
    gating = 6 * product.num_rows * product.tokens / _DENSE_BYTES if product.is_gated else 0
    return math.hypot(computing, reading) + gating + _DENSE_LAUNCH


def _expected(product: Product, tiles: Tiles) -> float:
    """About how many microseconds a product takes with tiles of the persistent kernel."""
    num_tiles = triton.cdiv(product.weight_rows, tiles.rows)
    num_tiles *= triton.cdiv(product.tokens, tiles.tokens)
    num_blocks = triton.cdiv(product.size, BLOCK)
    division = Division.of(num_tiles, num_blocks, _NUM_SMS, tiles.is_shared)
    of_step, of_sharing = _COSTS[tiles.tokens]
    of_steps = division.num_steps(num_tiles, num_blocks) * of_step
    if product.is_gated:
        of_steps *= _GATED
    slowdown = 1 + max(0, product.tokens - 256) / _SLOWED_TOKENS
    return slowdown * (of_steps + (of_sharing if division.num_shared else 0)) + _LAUNCH


def persistent_tiles(product: Product, tokens: int, is_shared: bool) -> Tiles:
    """Tiles of linear_hopper_persistent.py's kernel for so many tokens at once."""
    num_bytes = row_bytes(product.format) * _PERSISTENT_ROWS
    half_bytes = BLOCK * tokens  # of 16 bits
    halves = 1 if tokens > 192 else 2  # there is no room for enough larger stages
    if halves == 1:
        stages = 3
        x_stages = (_PERSISTENT_MEMORY - stages * num_bytes) // half_bytes
    else:
        stages = x_stages = _PERSISTENT_MEMORY // (num_bytes + 2 * half_bytes)
    scales_weights = product.group > 0
    return Tiles(
        *(tokens, _PERSISTENT_ROWS, stages, 8),
        scales_weights=scales_weights,
        x_stages=x_stages,
        halves=halves,
        is_shared=is_shared,
    )


@dataclass(frozen=True, slots=True)
class Division:
    """How the programs of linear_hopper_persistent.py's kernel divide the tiles of a product."""

    num_programs: int
    num_shared: int  # tiles whose steps programs share evenly; they compute the others as a whole
    per_program: int  # steps of shared tiles

    @classmethod
    def of(cls, num_tiles: int, num_blocks: int, num_sms: int, is_shared: bool) -> Division:
        """A step is a tile's block of 128 inputs."""
        waves = triton.cdiv(num_tiles, num_sms)
        num_shared = num_tiles % num_sms
        if not is_shared or not num_shared:
            return cls(triton.cdiv(num_tiles, waves), 0, 1)
        num_steps = num_shared * num_blocks
        per_program = max(triton.cdiv(num_steps, num_sms), min(_FEWEST_STEPS, num_blocks))
        num_programs = num_sms if waves > 1 else triton.cdiv(num_steps, per_program)
        return cls(num_programs, num_shared, per_program)

    def num_steps(self, num_tiles: int, num_blocks: int) -> int:
        """The most steps that a program computes."""
        whole: int = triton.cdiv(num_tiles - self.num_shared, self.num_programs)
        return whole * num_blocks + (self.per_program if self.num_shared else 0)


def _fitting(
    product: Product, tokens: int, rows: int, per_sm: int, cuts_more: bool = False
) -> Tiles | None:
    """As many stages as fit, and splits of K that fill the SMs; None: not even two stages fit.

    cuts_more: with more splits, if it takes these for their scales to fit.
    """
    num_tiles = triton.cdiv(product.weight_rows, rows) * triton.cdiv(product.tokens, tokens)
    num_blocks = triton.cdiv(product.size, BLOCK)
    fewest = most = _splits(product.tokens, num_tiles, num_blocks, per_sm)
    if cuts_more:
        most = max(fewest, min(_MAX_SPLITS, _PARTIAL_BYTES // (4 * num_tiles * tokens * rows)))
    for splits in range(fewest, most + 1):
        per_split = triton.cdiv(num_blocks, splits)
        if triton.cdiv(num_blocks, per_split) < splits:
            continue  # one of them would be empty
        groups = staged_groups(product.size, product.group, splits)
        staged = (6 if product.has_zeros else 4) * groups * rows
        stage = row_bytes(product.format) * rows + 2 * BLOCK * tokens
        stages = min((_SHARED_MEMORY // per_sm - staged - 1024) // stage, _MAX_STAGES, per_split)
        if stages >= min(2, per_split):
            return Tiles(tokens, rows, max(stages, 1), rows // 16, splits, per_sm, per_sm > 1)
    return None


def _splits(num_tokens: int, num_tiles: int, num_blocks: int, per_sm: int = 1) -> int:
    """Splits of K that fill the SMs with so many programs each."""
    most = _MAX_SPLITS if num_tokens <= 256 else 1  # partial sums of many tokens are large
    splits = max(1, min(most, _NUM_SMS * per_sm // num_tiles, num_blocks // 4))
    filled: int = triton.cdiv(num_blocks, triton.cdiv(num_blocks, splits))  # none of them empty
    return filled


@cache
def with_words(tiles: linear_table.Tiles, numbers: int, is_gated: bool) -> linear_table.Tiles:
    """The same tiles of linear_hopper.py's kernel for W in 7 bits, with as many stages as fit.

    numbers: of an input.
    """
    rows = tiles.rows * (2 if is_gated else 1)
    stage = tiles.columns * (7 * rows // 8 + numbers * tiles.tokens)
    return replace(tiles, stages=min(_SHARED_MEMORY // tiles.per_sm // stage, _MAX_STAGES))


def _rounded_candidates(product: Product) -> list[Choice]:
    """What may compute a product of FP8 with FP8: linear_hopper.py's kernel, or torch's."""
    num_tokens, num_rows, is_gated = product.tokens, product.num_rows, product.is_gated
    tokens, rows, per_sm = 64 if num_tokens <= 64 else 128, 64, 1
    num_tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_tokens, tokens)
    if num_tiles > _NUM_SMS:
        if num_tokens <= 64:
            per_sm = 2
        else:
            rows = 128
            tokens = 128 if is_gated or num_tokens <= 512 else 256
    kinds = [(tokens, rows, per_sm)]
    if num_tokens <= 64:
        kinds += [(64, 64, 3), (64, 128, 1), (64, 64, 1), (64, 64, 2)]
    else:
        kinds += [(128, 64, 2), (128, 64, 1), (128, 128, 1)]
        kinds += [] if is_gated or num_tokens <= 256 else [(256, 128, 1)]
    found: list[Choice] = [_rounded_tiles(product, *kind) for kind in dict.fromkeys(kinds)]
    found = list(dict.fromkeys(found))
    return [LIBRARY, *found] if num_tokens > 1024 and not is_gated else [*found, LIBRARY]


def _tiles_in_two(product: Product) -> linear_table.Tiles:
    """Tiles of linear_hopper.py's kernel: two programs fit on an SM, and those of the next kernel
    take the place of each that ends, unless all of a program's weights are asked for before the
    wait: then the next kernel may start after that.

    For the shapes of Llama 3 8B and 8 tokens, other splits, three programs on an SM, or one for
    each take longer, and so do tiles of 128 rows (docs/experiments.md).
    """
    halves = 2 if product.is_gated else 1
    tokens = min(product.tokens, _MOST_OF_TILE_IN_TWO)
    columns, stages = 4 * BLOCK, 0
    while stages < 3:
        columns //= 2
        stages = _SHARED_MEMORY // 2 // (columns * (64 * halves + 2 * tokens))
    num_blocks = triton.cdiv(product.size, columns)
    num_tiles = triton.cdiv(product.num_rows, 64) * triton.cdiv(product.tokens, tokens)
    per_sm = 2 if product.size > _LONG_ROW else 1
    splits = 1 if product.is_gated else _splits(product.tokens, num_tiles, num_blocks, per_sm)
    early = triton.cdiv(num_blocks, splits) > stages
    return linear_table.Tiles(tokens, 64, columns, stages, splits=splits, per_sm=2, early=early)


def _packed_choices(product: Product) -> list[PackedTiles]:
    """The tiles of linear_hopper_packed.py's kernel. What is fastest alone is not in a layer, so
    there is one choice, and nothing to measure (docs/experiments.md).

    With more tokens, fewer programs have room for their sums in registers.
    """
    tokens = max(product.tokens, _FEWEST_TOKENS)
    num_tiles = triton.cdiv(product.num_rows, CHUNK_ROWS) * triton.cdiv(product.tokens, tokens)
    num_blocks = triton.cdiv(product.size, BLOCK)
    per_sm = 2 if tokens <= 16 else 1
    if product.is_gated:
        splits = _splits(product.tokens, num_tiles, num_blocks)
        return [packed_tiles(product, warpgroups=2, splits=splits, per_sm=per_sm)]
    if num_tiles > _NUM_SMS:
        return [packed_tiles(product, per_sm=2)]
    if num_tiles > _NUM_SMS // 2:
        return [packed_tiles(product, ways=2, per_sm=per_sm)]
    per_sm = 3 if tokens <= 8 else 2
    splits = _splits(product.tokens, num_tiles, num_blocks, per_sm)
    return [packed_tiles(product, splits=splits, per_sm=per_sm)]


def packed_tiles(
    product: Product,
    *,
    warpgroups: int = 1,
    ways: int = 1,
    splits: int = 1,
    per_sm: int = 1,
) -> PackedTiles:
    """With as many stages as fit."""
    tokens = max(product.tokens, _FEWEST_TOKENS)
    rows = CHUNK_ROWS * warpgroups
    of_group = rows * (4 if product.has_zeros else 2)
    of_block = row_bytes(product.format) * rows + 2 * BLOCK * tokens + of_group + 8 * tokens
    of_second = 4 * rows * tokens if ways > 1 else 0
    room = _SHARED_MEMORY // per_sm - 2048 - of_second
    num_steps = triton.cdiv(product.size, BLOCK * linear_hopper_packed.BLOCKS)
    per_split = triton.cdiv(num_steps, splits)
    splits = triton.cdiv(num_steps, per_split)  # none of them empty
    stages = min(room // (linear_hopper_packed.BLOCKS * of_block), _MAX_STAGES, per_split)
    stages = max(1, stages // ways) * ways
    return PackedTiles(tokens, warpgroups, stages, ways, splits, per_sm, per_sm > 1)


def _grouped_candidates(product: Product) -> list[Choice]:
    """Tiles of linear_hopper_quantized.py's kernel for a product of FP8 with FP8 in blocks.

    Tiles of 64 rows leave room for two programs on an SM, of which one multiplies while the other
    adds up. Those of 128 read inputs half as often, and are 8 to 20% slower for shapes of Llama 3
    8B.
    """
    tokens = 64 if product.tokens <= 64 else 128
    kinds = ((64, 2), (64, 3), (64, 1)) if tokens == 64 else ((64, 2), (64, 1), (128, 1))
    return list(dict.fromkeys(_grouped_tiles(product, tokens, *kind) for kind in kinds))


def _grouped_tiles(product: Product, tokens: int, rows: int, per_sm: int) -> Tiles:
    num_blocks = triton.cdiv(product.size, BLOCK)
    num_tiles = triton.cdiv(product.weight_rows, rows) * triton.cdiv(product.tokens, tokens)
    splits = _splits(product.tokens, num_tiles, num_blocks, per_sm)
    per_split = triton.cdiv(num_blocks, splits)
    staged = 4 * staged_groups(product.size, product.group, splits) * rows
    room = _SHARED_MEMORY // per_sm - 1024 - staged
    stages = max(1, min(room // (BLOCK * (rows + tokens)), _MAX_STAGES, per_split))
    return Tiles(tokens, rows, stages, rows // 16, splits, per_sm, early=per_sm > 1)


def _rounded_tiles(product: Product, tokens: int, rows: int, per_sm: int) -> linear_table.Tiles:
    num_tiles = triton.cdiv(product.num_rows, rows) * triton.cdiv(product.tokens, tokens)
    columns = 2 * BLOCK if product.tokens <= 64 and per_sm == 1 else BLOCK
    num_blocks = triton.cdiv(product.size, columns)
    splits = _splits(product.tokens, num_tiles, num_blocks)
    stage = columns * (rows * (2 if product.is_gated else 1) + tokens)
    stages = min(_SHARED_MEMORY // per_sm // stage, _MAX_STAGES)
    return linear_table.Tiles(
        tokens, rows, columns, stages, rows // 16, splits, per_sm, early=per_sm > 1
    )
