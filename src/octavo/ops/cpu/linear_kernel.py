"""The GEMM of a batch with a packed weight; see linear.py."""

# mypy: disable-error-code="attr-defined, call-arg, no-untyped-def, var-annotated"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, int64

from octavo.ops.cpu import attention_tiles as cpu_tiles
from octavo.ops.cpu import vectors as cpu_vectors
from octavo.ops.cpu.attention_tiles import SPAN, TILE_ROWS, multiply_keys
from octavo.ops.cpu.jit import compile_kernel, digest_of, inlined
from octavo.ops.cpu.vectors import LANES, fetch_add, from_float, pointer_to, size_of, to_float

BLOCK = SPAN * LANES  # outputs computed together
LINE = 4 * BLOCK  # bytes of a block that are multiplied by the same word of inputs
_AHEAD = 8192  # bytes between what is multiplied and what is fetched

_FIELDS = ("next_unit", "x", "x_stride", "weight", "bias", "output", "num_rows", "out_features")
JOB = np.dtype(
    [(name, np.int64) for name in (*_FIELDS, "depth", "rows_per_unit", "blocks_per_unit")]
)
"""What a call needs. Addresses and x_stride are bytes; depth counts the words of a row of x."""
NEXT_UNIT, JOBS, NUM_UNITS, UNITS_PER_JOB = range(4)  # what a call with several jobs needs


@inlined
def point_to_tiles(
    tiles: Any, weight: int, tile: int, num_tiles: int, block_bytes: int, group: int, groups: int
) -> int:
    """Fill `tiles` for multiply_keys with SPAN tiles of outputs from `tile` on, for one `group` of
    rows; returns the distance of lines that are fetched. Those of the tiles are LINE bytes apart.

    A single group fetches a little ahead of what it multiplies. Several share the fetching of the
    next block, a quarter at a time from one end to the other.
    """
    is_alone = groups == 1
    next_block = weight + (tile // SPAN + 1) * block_bytes
    for v in range(SPAN):
        number = tile + v
        tiles[v] = weight + number // SPAN * block_bytes + number % SPAN * (4 * LANES)
        fetches = v * groups // SPAN == group and number + SPAN < num_tiles
        if is_alone:
            tiles[SPAN + v] = tiles[v] + _AHEAD
        elif fetches:
            tiles[SPAN + v] = next_block + v * (block_bytes // SPAN)
        else:
            tiles[SPAN + v] = tiles[v]
    return LINE if is_alone else 4 * LANES


@inlined
def _multiply_rows(
    job: Any, words: Any, elements: Any, block: int, begin: int, end: int, tiles: Any, sums: Any
) -> None:
    """One block of outputs for the rows [begin, end) of x, at most 6 at a time."""
    num_tiles = (job.out_features + LANES - 1) // LANES
    vecs = min(SPAN, num_tiles - block * SPAN)
    columns = min(BLOCK, job.out_features - block * BLOCK)
    groups = (end - begin + TILE_ROWS - 1) // TILE_ROWS
    itemsize = size_of(elements)
    bias = carray(pointer_to(job.bias + block * BLOCK * itemsize, elements), columns)
    for group in range(groups):
        first = begin + group * (end - begin) // groups
        rows = begin + (group + 1) * (end - begin) // groups - first
        next_line = point_to_tiles(
            tiles, job.weight, block * SPAN, num_tiles, job.depth * LINE, group, groups
        )
        multiply_keys(
            words, rows, vecs, job.x + first * job.x_stride, job.x_stride,
            tiles.ctypes.data, LINE, next_line, job.depth, sums.ctypes.data,
        )  # fmt: skip
        for r in range(rows):
            place = (first + r) * job.out_features + block * BLOCK
            target = carray(pointer_to(job.output + place * itemsize, elements), columns)
            row = sums[r * BLOCK : (r + 1) * BLOCK]
            if job.bias != 0:
                for i in range(columns):
                    row[i] += to_float(bias[i])
            for i in range(columns):
                target[i] = from_float(row[i], elements)


@inlined
def _grouped(args: Any, words: Any, elements: Any) -> None:
    """Several products of equal weight shapes, each of all rows of its own x; any number of
    threads may run this."""
    tiles = np.empty(2 * SPAN, np.int64)
    sums = np.empty(TILE_ROWS * BLOCK, np.float32)
    jobs = carray(pointer_to(args[JOBS], JOB), args[NUM_UNITS] // args[UNITS_PER_JOB])
    unit = fetch_add(args.ctypes.data, 1)
    while unit < args[NUM_UNITS]:
        job = jobs[unit // args[UNITS_PER_JOB]]
        num_blocks = (job.out_features + BLOCK - 1) // BLOCK
        first = unit % args[UNITS_PER_JOB] * job.blocks_per_unit
        for block in range(first, min(first + job.blocks_per_unit, num_blocks)):
            _multiply_rows(job, words, elements, block, 0, job.num_rows, tiles, sums)
        unit = fetch_add(args.ctypes.data, 1)


@inlined
def _linear(jobs: Any, words: Any, elements: Any) -> None:
    """Compute units of rows and outputs until none is left; any number of threads may run this."""
    job = jobs[0]
    tiles = np.empty(2 * SPAN, np.int64)
    sums = np.empty(TILE_ROWS * BLOCK, np.float32)
    num_blocks = (job.out_features + BLOCK - 1) // BLOCK
    block_units = (num_blocks + job.blocks_per_unit - 1) // job.blocks_per_unit
    row_units = (job.num_rows + job.rows_per_unit - 1) // max(1, job.rows_per_unit)
    unit = fetch_add(jobs.ctypes.data, 1)
    while unit < block_units * row_units:
        first_block = unit // row_units * job.blocks_per_unit
        begin = unit % row_units * job.rows_per_unit
        end = min(begin + job.rows_per_unit, job.num_rows)
        for block in range(first_block, min(first_block + job.blocks_per_unit, num_blocks)):
            _multiply_rows(job, words, elements, block, begin, end, tiles, sums)
        unit = fetch_add(jobs.ctypes.data, 1)


def compile_linear(bf16: bool) -> Any:
    """`_linear` for one dtype as a C function of the address of a JOB."""
    elements: Any = np.dtype(np.uint16 if bf16 else np.float32)
    words: Any = np.dtype(np.uint32 if bf16 else np.float32)
    sources = digest_of(cpu_tiles, cpu_vectors)

    def linear(address):
        sources  # noqa: B018 (makes it a part of the key under which the kernel is kept)
        _linear(carray(pointer_to(address, JOB), 1), np.empty(0, words), np.empty(0, elements))

    return compile_kernel(linear)


def compile_grouped(bf16: bool) -> Any:
    """`_grouped` for one dtype as a C function of the address of its four int64 arguments."""
    elements: Any = np.dtype(np.uint16 if bf16 else np.float32)
    words: Any = np.dtype(np.uint32 if bf16 else np.float32)
    sources = digest_of(cpu_tiles, cpu_vectors)

    def grouped(address):
        sources  # noqa: B018
        _grouped(carray(pointer_to(address, int64), 4), np.empty(0, words), np.empty(0, elements))

    return compile_kernel(grouped)
