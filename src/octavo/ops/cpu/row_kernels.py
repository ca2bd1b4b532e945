"""Numba kernels of the small operations between projections; see row_ops.py.

Each works on rows that threads take from a counter. A row's result depends on that row alone.
"""

# mypy: disable-error-code="attr-defined, call-arg, no-untyped-def, no-untyped-call, var-annotated"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, float32, int64, njit

from octavo.ops.cpu import vectors as cpu_vectors
from octavo.ops.cpu.jit import compile_kernel, digest_of, jit
from octavo.ops.cpu.vectors import (
    exp2_nonpositive,
    fetch_add,
    from_float,
    pointer_to,
    size_of,
    to_float,
)

# What a kernel call needs, each an int64; strides are in elements.
NEXT_ROW, SOURCE, RESIDUAL, WEIGHT, OUTPUT, EPS, TOKENS, HEADS, SIZE, STRIDE, CHUNK = range(11)
MINUS_LOG2_E = np.float32(-1.4426950408889634)

# The sum of a row may be taken in any order, as long as it is always the same.
sum_jit = njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})


@sum_jit
def _mean_square(row: Any, size: int) -> Any:
    total = np.float32(0.0)
    for i in range(size):
        x = to_float(row[i])
        total += x * x
    return total / np.float32(size)


@jit
def _rms_norm_row(row: Any, weight: Any, output: Any, size: int, eps: float, like: Any) -> None:
    inverse = np.float32(1.0) / np.sqrt(_mean_square(row, size) + eps)
    for i in range(size):
        output[i] = from_float(to_float(row[i]) * inverse * to_float(weight[i]), like)


@jit
def _rms_norm(address: int, like: Any) -> None:
    """output = norm(source [tokens, heads, size]); with a residual, that is added to first."""
    args = carray(pointer_to(address, int64), 11)
    eps = carray(pointer_to(address + 8 * EPS, float32), 1)[0]
    heads, size, itemsize = args[HEADS], args[SIZE], size_of(like)
    num_rows = args[TOKENS] * heads
    weight = carray(pointer_to(args[WEIGHT], like), size)
    begin = fetch_add(address, args[CHUNK])
    while begin < num_rows:
        for r in range(begin, min(begin + args[CHUNK], num_rows)):
            place = args[SOURCE] + (r // heads * args[STRIDE] + r % heads * size) * itemsize
            row = carray(pointer_to(place, like), size)
            output = carray(pointer_to(args[OUTPUT] + r * size * itemsize, like), size)
            if args[RESIDUAL] != 0:
                residual = carray(pointer_to(args[RESIDUAL] + r * size * itemsize, like), size)
                for i in range(size):
                    residual[i] = from_float(to_float(residual[i]) + to_float(row[i]), like)
                row = residual
            _rms_norm_row(row, weight, output, size, eps, like)
        begin = fetch_add(address, args[CHUNK])


@jit
def _silu_mul(address: int, like: Any) -> None:
    """output [tokens, size] = silu(gate) * up for source [tokens, gate and up, size]."""
    args = carray(pointer_to(address, int64), 11)
    size, itemsize = args[SIZE], size_of(like)
    begin = fetch_add(address, args[CHUNK])
    while begin < args[TOKENS]:
        for r in range(begin, min(begin + args[CHUNK], args[TOKENS])):
            source = args[SOURCE] + r * args[STRIDE] * itemsize
            gate = carray(pointer_to(source, like), size)
            up = carray(pointer_to(source + size * itemsize, like), size)
            output = carray(pointer_to(args[OUTPUT] + r * size * itemsize, like), size)
            for i in range(size):
                x = to_float(gate[i])
                small = exp2_nonpositive(abs(x) * MINUS_LOG2_E)
                upper = x if x >= 0 else x * small
                result = upper / (np.float32(1.0) + small) * to_float(up[i])
                output[i] = from_float(result, like)
        begin = fetch_add(address, args[CHUNK])


def compile_rms_norm(element: Any) -> Any:
    """As a C function of the address of its arguments; `element` is float32 or uint16 (bf16)."""
    sources = digest_of(cpu_vectors)

    def rms_norm(address):
        sources  # noqa: B018 (makes it a part of the key under which the kernel is kept)
        _rms_norm(address, np.empty(0, element))

    return compile_kernel(rms_norm)


def compile_silu_mul(element: Any) -> Any:
    """See compile_rms_norm."""
    sources = digest_of(cpu_vectors)

    def silu_mul(address):
        sources  # noqa: B018
        _silu_mul(address, np.empty(0, element))

    return compile_kernel(silu_mul)
