"""Which tiles GEMMs with quantized weights take (linear_hopper_quantized.py, and
linear_hopper_persistent.py from 65 tokens on).

A rule proposes a few by the shape, the best guess first: what was fastest, or nearly so, for the
shapes of Llama 3 8B on an H200 (2026-11-22, Triton 3.6, benchmarks/quantized_linear.py). Which of
them is fastest on another card, or for another shape, can be measured
(`octavo.ops.cuda.linear_quantized.measure_tiles`): that takes up to a second for each, most of it
for compiling, so engines do not do it when they start; the file that `table_path` names keeps it.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache
from pathlib import Path

import torch
import triton

from octavo.ops.cuda import linear_table
from octavo.ops.cuda.stored_weights import BLOCK, StoredWeight

logger = logging.getLogger(__name__)

# What tokens are padded to; more are computed otherwise.
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_NUM_SMS = 132
_SHARED_MEMORY = 222_000  # bytes per SM that tiles may fill
_MAX_SPLITS = 8
_MAX_STAGES = 12
_WHOLE_TILES = 0.95  # of the SMs busy: adding up parts of tiles takes longer than the others' rest
_FEWEST_STEPS = 4


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
    # Of linear_hopper_persistent.py's kernel:
    x_stages: int = 0  # of x; 0: it is not that kernel
    in_halves: bool = False  # blocks are converted and multiplied
    is_shared: bool = False  # programs compute equally many steps, not whole tiles


@dataclass(frozen=True, slots=True)
class Product:
    """What tiles are chosen for."""

    tokens: int  # padded
    num_rows: int  # results per token
    size: int  # inputs
    format: int
    group: int
    has_zeros: bool
    is_gated: bool

    @classmethod
    def of(cls, num_tokens: int, stored: StoredWeight, is_gated: bool) -> Product | None:
        """None: too many tokens for the kernel."""
        tokens = next((each for each in SIZES if num_tokens <= each), None)
        if tokens is None:
            return None
        num_rows, size = stored.shape
        num_rows //= 2 if is_gated else 1
        has_zeros = stored.zeros is not None
        return cls(tokens, num_rows, size, stored.format, stored.group, has_zeros, is_gated)


def candidates(product: Product, stored: StoredWeight) -> list[Tiles]:
    """The tiles among which to choose, the best guess first."""
    by_warp = product.tokens <= 16
    scales_weights = stored.group > 0 and product.tokens >= 128
    if by_warp:
        kinds = [(product.tokens, *each) for each in ((64, 4), (64, 3), (128, 2))]
    elif product.tokens <= 128:
        kinds = [(product.tokens, *each) for each in ((64, 2), (64, 1), (128, 1))]
    elif product.tokens == 256 and not product.is_gated:
        kinds = [(128, 64, 2), (256, 128, 1), (256, 64, 1)]
    else:
        kinds = [(256, 128, 1), (128, 64, 2), (256, 64, 1)]
    found = [persistent_tiles(stored, 256)] if product.tokens >= 128 else []
    for tokens, rows, per_sm in kinds:
        tiles = _fitting(product, stored, tokens, rows, per_sm)
        if tiles is not None and tiles not in found:
            found.append(replace(tiles, scales_weights=scales_weights, by_warp=by_warp))
    return found


def persistent_tiles(
    stored: StoredWeight, tokens: int, rows: int = 128, is_shared: bool = False, per_sm: int = 1
) -> Tiles:
    """Of linear_hopper_persistent.py's kernel."""
    in_halves = tokens > 128
    stages = 4 if stored.row_bytes < BLOCK else 3
    room = _SHARED_MEMORY // per_sm - 1024 - stages * stored.row_bytes * rows
    x_stages = min(room // ((1 if in_halves else 2) * BLOCK * tokens), _MAX_STAGES)
    return Tiles(
        tokens,
        rows,
        stages,
        warps=rows // 16 if rows < 256 else 8,
        per_sm=per_sm,
        scales_weights=stored.group > 0,
        x_stages=x_stages,
        in_halves=in_halves,
        is_shared=is_shared,
    )


def steps_per_program(num_tiles: int, num_blocks: int, tiles: Tiles) -> int:
    """How many blocks of tiles a persistent program computes: those of whole tiles, or as many as
    all SMs share evenly."""
    num_programs = _NUM_SMS * tiles.per_sm
    if not tiles.is_shared:
        return triton.cdiv(num_tiles, num_programs) * num_blocks
    shared: int = triton.cdiv(num_tiles * num_blocks, num_programs)
    return max(shared, min(_FEWEST_STEPS, num_blocks))


def _fitting(
    product: Product, stored: StoredWeight, tokens: int, rows: int, per_sm: int
) -> Tiles | None:
    """As many stages as fit, and splits of K that fill the SMs; None: not even two stages fit."""
    halves = 2 if product.is_gated else 1
    num_blocks = triton.cdiv(product.size, BLOCK)
    num_tiles = triton.cdiv(product.num_rows * halves, rows) * triton.cdiv(product.tokens, tokens)
    most = _MAX_SPLITS if product.tokens <= 256 else 1  # partial sums of many tokens are large
    splits = max(1, min(most, _NUM_SMS * per_sm // num_tiles, num_blocks // 4))
    per_split = triton.cdiv(num_blocks, splits)
    splits = triton.cdiv(num_blocks, per_split)  # none of them empty
    staged = (6 if product.has_zeros else 4) * stored.staged_groups(splits) * rows
    stage = stored.row_bytes * rows + 2 * BLOCK * tokens
    stages = min((_SHARED_MEMORY // per_sm - staged - 1024) // stage, _MAX_STAGES, per_split)
    if stages < min(2, per_split):
        return None
    return Tiles(tokens, rows, max(stages, 1), rows // 16, splits, per_sm, per_sm > 1)


def choose_tiles(num_tokens: int, stored: StoredWeight, is_gated: bool) -> Tiles | None:
    """The measured ones, or the best guess; None: with so many tokens W is dequantized, or inputs
    are rounded."""
    product = Product.of(num_tokens, stored, is_gated)
    if product is None:
        return None
    if stored.weight.device.type == "cuda":
        measured = measured_tiles(stored.weight.device).get(_key(product))
        if measured is not None:
            return measured
    found = candidates(product, stored)
    return found[0] if found else None


def rounded_tiles(
    num_tokens: int, num_rows: int, size: int, is_gated: bool
) -> linear_table.Tiles | None:
    """Of a product of FP8 with FP8; None: torch's is faster."""
    if num_tokens > 1024 and not is_gated:
        return None
    tokens, rows, per_sm = 64 if num_tokens <= 64 else 128, 64, 1
    num_tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_tokens, tokens)
    if num_tiles > _NUM_SMS:
        if num_tokens <= 64:
            per_sm = 2
        else:
            rows = 128
            tokens = 128 if is_gated or num_tokens <= 512 else 256
        num_tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_tokens, tokens)
    num_blocks = triton.cdiv(size, BLOCK)
    most = _MAX_SPLITS if num_tokens <= 256 else 1
    splits = max(1, min(most, _NUM_SMS // num_tiles, num_blocks // 4))
    splits = triton.cdiv(num_blocks, triton.cdiv(num_blocks, splits))  # none of them empty
    stage = BLOCK * (rows * (2 if is_gated else 1) + tokens)
    stages = min(_SHARED_MEMORY // per_sm // stage, _MAX_STAGES)
    return linear_table.Tiles(
        tokens, rows, BLOCK, stages, rows // 16, splits, per_sm, early=per_sm > 1
    )


def table_path(device: torch.device) -> Path:
    """Where the measurements of a card are kept: in the user's cache, by card and Triton."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    card = torch.cuda.get_device_name(device).replace(" ", "-")
    return root / "octavo" / f"quantized-tiles-{card}-triton-{triton.__version__}.json"


@cache
def measured_tiles(device: torch.device) -> dict[str, Tiles]:
    """What was measured on such a card; empty if nothing was, or if the file cannot be read."""
    path = table_path(device)
    try:
        entries = json.loads(path.read_text())
        return {key: Tiles(**values) for key, values in entries.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("%s is not used, because it cannot be read: %s", path, error)
        return {}


def keep_tiles(device: torch.device, product: Product, tiles: Tiles) -> None:
    """Note what is fastest, for this process and for later ones."""
    table = measured_tiles(device)
    table[_key(product)] = tiles
    path = table_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({key: asdict(value) for key, value in table.items()}, indent=1))
    partial.replace(path)


def _key(product: Product) -> str:
    return "/".join(str(int(each)) for each in astuple(product))
