"""The product of int8 weights with rounded tokens, on matrix units or by dot products of words of
four numbers; see int8.py."""

# mypy: disable-error-code="attr-defined, call-arg, no-untyped-def, no-untyped-call, var-annotated"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, float32, int32

from octavo.ops.cpu import attention_tiles as cpu_tiles
from octavo.ops.cpu import gates as cpu_gates
from octavo.ops.cpu import linear_kernel as cpu_linear
from octavo.ops.cpu import matrix_tiles as cpu_matrix_tiles
from octavo.ops.cpu import row_kernels as cpu_row_kernels
from octavo.ops.cpu import vectors as cpu_vectors
from octavo.ops.cpu.attention_tiles import SPAN, TILE_ROWS, multiply_keys
from octavo.ops.cpu.gates import write_gated
from octavo.ops.cpu.jit import compile_kernel, digest_of, inlined
from octavo.ops.cpu.linear_kernel import BLOCK, LINE, point_to_tiles
from octavo.ops.cpu.matrix_tiles import (
    PAIR,
    TILE_BYTES,
    TILE_INPUTS,
    configure_tiles,
    multiply_tiles,
    release_tiles,
    scale_sums,
)
from octavo.ops.cpu.row_kernels import quantize_row
from octavo.ops.cpu.vectors import LANES, fetch_add, pointer_to, size_of, to_float
from octavo.ops.epilogue import Epilogue

PANEL_TILES = 4  # tiles of tokens whose sums are held together
MAX_SPAN = SPAN  # tiles of outputs whose sums are
PANEL = PANEL_TILES * LANES  # tokens

_FIELDS = (
    *("next_unit", "x", "x_stride", "x_scales", "weight", "offsets", "scales", "bias", "output"),
    *("num_rows", "tile_rows", "out_features", "depth", "span", "rows_per_unit"),
    *("exact", "exact_stride", "in_features"),
)
JOB = np.dtype([(name, np.int64) for name in _FIELDS])
"""What a call needs. Addresses and x_stride are bytes; depth counts steps of 64 inputs. Tokens
share tiles by `tile_rows`, and x has rows for all of the last tile of a matrix unit. A unit of work
is `span` tiles of outputs (of a gate, and as many that it multiplies) for `rows_per_unit` tokens,
whole tiles. `offsets` are added to the sums, int32 [out_features]; 0: there are none. `exact`: of
tokens that a single thread rounds before, with its strides in elements; 0: x is there."""


@inlined
def _set_shapes(rows: int) -> None:
    """Give the tiles of tokens and of sums `rows` rows, and those of weights 16."""
    palette = np.zeros(64, np.uint8)
    palette[0] = 1
    for register in range(8):
        palette[16 + 2 * register] = 64  # bytes of a row
        palette[48 + register] = rows if register < 6 else LANES
    configure_tiles(palette)


@inlined
def _load_scales(
    job: Any, elements: Any, tile: int, count: int, offsets: Any, scales: Any, shifts: Any
) -> None:
    """Offsets, scales and bias of the outputs of `count` tiles."""
    begin = tile * LANES
    width = min(count * LANES, job.out_features - begin)
    if job.offsets != 0:
        added = carray(pointer_to(job.offsets + 4 * begin, int32), width)
        for i in range(width):
            offsets[i] = added[i]
    source = carray(pointer_to(job.scales + 4 * begin, float32), width)
    for i in range(width):
        scales[i] = source[i]
    if job.bias != 0:
        bias = carray(pointer_to(job.bias + begin * size_of(elements), elements), width)
        for i in range(width):
            shifts[i] = to_float(bias[i])


@inlined
def _sum_by_tiles(
    job: Any, x: int, tile: int, count: int, first: int, last: int, is_fetched: Any, sums: Any
) -> None:
    """int32 sums of `count` tiles of outputs and of the rows [first, last), whole tiles of tokens,
    of those at `x`: [count, PANEL, 16]. Weights that are in the caches (`is_fetched`) need no
    fetching."""
    tiles = (last - first + job.tile_rows - 1) // job.tile_rows
    x_tile, sums_tile = job.tile_rows * job.x_stride, job.tile_rows * LANES * 4
    x, weight_tile = x + first * job.x_stride, job.depth * TILE_BYTES
    for n in range(0, count, PAIR):
        for t in range(0, tiles, PAIR):
            multiply_tiles(
                min(PAIR, tiles - t), min(PAIR, count - n), x + t * x_tile, job.x_stride, x_tile,
                job.weight + (tile + n) * weight_tile, weight_tile,
                0 if is_fetched or t > 0 else 1, job.depth,
                sums.ctypes.data + 4 * n * PANEL * LANES + t * sums_tile, sums_tile,
                4 * PANEL * LANES,
            )  # fmt: skip


@inlined
def _sum_by_words(
    job: Any,
    words: Any,
    x: int,
    tiles: Any,
    tile: int,
    count: int,
    first: int,
    last: int,
    sums: Any,
) -> None:
    """int32 sums, but for `offsets`, of `count` tiles of outputs and of the rows [first, last) of
    those at `x`: [rows, MAX_SPAN, 16]."""
    block_bytes = job.depth * SPAN * TILE_BYTES
    num_tiles = (job.out_features + LANES - 1) // LANES
    groups = (last - first + TILE_ROWS - 1) // TILE_ROWS
    for group in range(groups):
        begin = first + group * (last - first) // groups
        rows = first + (group + 1) * (last - first) // groups - begin
        next_line = point_to_tiles(tiles, job.weight, tile, num_tiles, block_bytes, group, groups)
        multiply_keys(
            words, rows, count, x + begin * job.x_stride, job.x_stride, tiles.ctypes.data, LINE,
            next_line, job.depth * (TILE_INPUTS // 4),
            sums.ctypes.data + (begin - first) * 4 * BLOCK,
        )  # fmt: skip


@inlined
def _linear(
    jobs: Any,
    elements: Any,
    bias_elements: Any,
    has_tiles: Any,
    is_gated: Any,
    is_gelu: Any,
    is_clamped: Any,
) -> None:
    """Compute units of outputs and tokens until none is left; any number of threads may run
    this."""
    job = jobs[0]
    sums = np.empty(2 * MAX_SPAN * PANEL * LANES, np.int32)
    offsets = np.zeros(2 * MAX_SPAN * LANES, np.int32)
    scales, shifts = (
        np.zeros(2 * MAX_SPAN * LANES, np.float32),
        np.zeros(2 * MAX_SPAN * LANES, np.float32),
    )
    # Bytes from the sums of a row to those of the next one, and from tile to tile of outputs.
    row_bytes, tile_bytes = (4 * LANES, 4 * LANES * PANEL) if has_tiles else (4 * BLOCK, 4 * LANES)
    row = np.empty(2 * MAX_SPAN * LANES, np.float32)
    partial = np.empty(MAX_SPAN * LANES, elements.dtype)
    wide, itemsize = np.empty(0, np.float32), size_of(elements)
    words, tiles = np.empty(0, np.int8), np.empty(2 * SPAN, np.int64)
    num_own = job.num_rows if job.exact != 0 else 0
    own_tiles = (num_own + job.tile_rows - 1) // job.tile_rows
    # Named in the loop, so that they live as long: see jit.py.
    x = np.empty(own_tiles * job.tile_rows * job.x_stride, np.int8)
    x_scales = np.empty(num_own, np.float32)
    if job.exact == 0:
        x = carray(pointer_to(job.x, words), job.num_rows * job.x_stride)
        x_scales = carray(pointer_to(job.x_scales, float32), job.num_rows)
    else:
        flipped = np.int8(0) if has_tiles else np.int8(-128)
        for r in range(job.num_rows):
            place = job.exact + r * job.exact_stride * size_of(bias_elements)
            exact = carray(pointer_to(place, bias_elements), job.in_features)
            x_scales[r] = quantize_row(exact, x[r * job.x_stride :], job.in_features, flipped)
    num_outputs = job.out_features // 2 if is_gated else job.out_features
    num_tiles = (num_outputs + LANES - 1) // LANES
    row_units = (job.num_rows + job.rows_per_unit - 1) // max(1, job.rows_per_unit)
    num_units = (num_tiles + job.span - 1) // job.span * row_units
    half = BLOCK  # where the second halves of the sums, scales and rows begin
    if has_tiles:
        _set_shapes(job.tile_rows)
    unit = fetch_add(jobs.ctypes.data, 1)
    while unit < num_units:
        tile = unit // row_units * job.span
        count = min(job.span, num_tiles - tile)
        width = min(count * LANES, num_outputs - tile * LANES)
        _load_scales(job, bias_elements, tile, count, offsets, scales, shifts)
        if is_gated:
            _load_scales(
                job, bias_elements, num_tiles + tile, count,
                offsets[half:], scales[half:], shifts[half:],
            )  # fmt: skip
        begin = unit % row_units * job.rows_per_unit
        end = min(begin + job.rows_per_unit, job.num_rows)
        for first in range(begin, end, PANEL_TILES * job.tile_rows):
            last = min(first + PANEL_TILES * job.tile_rows, end)
            for side in range(2 if is_gated else 1):
                of_side, there = side * num_tiles + tile, sums[side * half * PANEL :]
                if has_tiles:
                    _sum_by_tiles(
                        job, x.ctypes.data, of_side, count, first, last, first > begin, there
                    )
                else:
                    _sum_by_words(
                        job, words, x.ctypes.data, tiles, of_side, count, first, last, there
                    )
            for r in range(first, last):
                place = job.output + (r * num_outputs + tile * LANES) * itemsize
                target = place if width == count * LANES else partial.ctypes.data
                source = sums.ctypes.data + (r - first) * row_bytes
                for side in range(2 if is_gated else 1):
                    for n in range(count):
                        v = (side * MAX_SPAN + n) * LANES
                        at = source + side * half * PANEL * 4 + n * tile_bytes
                        to_offsets = offsets.ctypes.data + 4 * v
                        to_scales = scales.ctypes.data + 4 * v
                        to_shifts = shifts.ctypes.data + 4 * v
                        if is_gated:
                            to = row.ctypes.data + 4 * v
                            scale_sums(wide, at, to_offsets, x_scales[r], to_scales, to_shifts, to)
                        else:
                            to = target + n * LANES * itemsize
                            scale_sums(
                                elements, at, to_offsets, x_scales[r], to_scales, to_shifts, to
                            )
                if is_gated:
                    for n in range(count):
                        gates = row.ctypes.data + 4 * n * LANES
                        to = place + n * LANES * itemsize
                        write_gated(elements, gates, gates + 4 * half, to, is_gelu, is_clamped)
                elif target != place:
                    output = carray(pointer_to(place, elements), width)
                    for i in range(width):
                        output[i] = partial[i]
        unit = fetch_add(jobs.ctypes.data, 1)
    if has_tiles:
        release_tiles()


def compile_product(element: Any, bias_element: Any, epilogue: Epilogue, has_tiles: bool) -> Any:
    """`_linear` with results of one dtype, as a C function of the address of a JOB; elements are
    float32 or uint16 (bf16), the epilogue is NONE or one with a gate.

    has_tiles: on matrix units, of inputs in int8; else by dot products, of inputs in uint8, from
    whose sums `offsets` take what was added to the inputs.
    """
    sources = digest_of(
        cpu_gates, cpu_linear, cpu_matrix_tiles, cpu_row_kernels, cpu_tiles, cpu_vectors
    )
    is_gelu, is_clamped = epilogue == Epilogue.GELU_TANH_MUL, epilogue == Epilogue.CLAMPED_SWIGLU
    is_gated = epilogue.is_gated

    def product(address):
        sources  # noqa: B018 (makes it a part of the key under which the kernel is kept)
        _linear(
            carray(pointer_to(address, JOB), 1), np.empty(0, element), np.empty(0, bias_element),
            has_tiles, is_gated, is_gelu, is_clamped,
        )  # fmt: skip

    return compile_kernel(product)
