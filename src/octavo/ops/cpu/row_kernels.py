"""Numba kernels of the small operations between projections; see row_ops.py.

Each works on rows that threads take from a counter. A row's result depends on that row alone.
"""

# mypy: disable-error-code="attr-defined, call-arg, no-untyped-def, no-untyped-call, var-annotated"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, float32, int32, int64, njit

from octavo.ops.cpu import gates as cpu_gates
from octavo.ops.cpu import vectors as cpu_vectors
from octavo.ops.cpu.gates import gated
from octavo.ops.cpu.jit import compile_kernel, digest_of, jit
from octavo.ops.cpu.vectors import (
    fetch_add,
    from_bits,
    from_float,
    magnitude_bits,
    pointer_to,
    round_to_int8,
    size_of,
    to_float,
)
from octavo.ops.epilogue import Epilogue

# What a kernel call needs, each an int64; strides are in elements, and 0 is an address of nothing.
NEXT_ROW, SOURCE, SECOND, RESIDUAL, BRANCH_WEIGHT, WEIGHT, BIAS, OUTPUT = range(8)
TWIN_WEIGHT, TWIN_BIAS, TWIN_OUTPUT, EPS, TOKENS, HEADS, SIZE, STRIDE, CHUNK = range(8, 17)
FACTOR, NUM_ARGS = 17, 18
INT8_MAX = np.float32(127.0)
SMALLEST_ROW = np.float32(1e-30)  # whose reciprocal is finite; smaller numbers become 0
INFINITY = np.float32(np.inf)
LARGEST = np.finfo(np.float32).max
INFINITY_BITS = 0x7F800000
WORD_BITS = 32  # of a mask's word

# The sum of a row may be taken in any order, as long as it is always the same.
sum_jit = njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})


@sum_jit
def _mean(row: Any, size: int) -> Any:
    total = np.float32(0.0)
    for i in range(size):
        total += to_float(row[i])
    return total / np.float32(size)


@sum_jit
def _mean_square(row: Any, mean: Any, size: int) -> Any:
    total = np.float32(0.0)
    for i in range(size):
        x = to_float(row[i]) - mean
        total += x * x
    return total / np.float32(size)


@jit
def _moments(row: Any, size: int, eps: float, is_rms: Any) -> Any:
    """What is subtracted from a row, and what the difference is multiplied by."""
    mean = np.float32(0.0)
    if not is_rms:
        mean = _mean(row, size)
    return mean, np.float32(1.0) / np.sqrt(_mean_square(row, mean, size) + eps)


@jit
def _scaled_row(
    row: Any, moments: Any, weight: int, bias: int, output: int, size: int, like: Any, wide: Any
) -> None:
    """output = norm(row); weight, bias and output are addresses."""
    mean, inverse = moments
    out = carray(pointer_to(output, like), size)
    scale = carray(pointer_to(weight, wide), size)
    if bias == 0:
        for i in range(size):
            result = (to_float(row[i]) - mean) * inverse * to_float(scale[i])
            out[i] = from_float(result, like)
    else:
        shift = carray(pointer_to(bias, wide), size)
        for i in range(size):
            result = (to_float(row[i]) - mean) * inverse * to_float(scale[i]) + to_float(shift[i])
            out[i] = from_float(result, like)


@jit
def _add(row: Any, second: int, residual: Any, factor: Any, size: int, like: Any) -> None:
    if second == 0:
        for i in range(size):
            total = (to_float(residual[i]) + to_float(row[i])) * factor
            residual[i] = from_float(total, like)
    else:
        other = carray(pointer_to(second, like), size)
        for i in range(size):
            total = to_float(residual[i]) + to_float(row[i]) + to_float(other[i])
            residual[i] = from_float(total * factor, like)


@jit
def _add_normed(
    row: Any, weight: Any, residual: Any, factor: Any, moments: Any, size: int, like: Any
) -> None:
    mean, inverse = moments
    for i in range(size):
        normed = (to_float(row[i]) - mean) * inverse * to_float(weight[i])
        residual[i] = from_float((to_float(residual[i]) + normed) * factor, like)


@jit
def _norm(address: int, is_rms: Any, like: Any, wide: Any) -> None:
    """output = norm(source [tokens, heads, size]); with a residual, that is added to first.

    What is added is the source, or the source plus a second one, or the source's own norm. The
    sum is multiplied by a factor. The result can be scaled and shifted in two ways (twin). `wide`:
    like the weights.
    """
    args = carray(pointer_to(address, int64), NUM_ARGS)
    eps = carray(pointer_to(address + 8 * EPS, float32), 1)[0]
    factor = carray(pointer_to(address + 8 * FACTOR, float32), 1)[0]
    heads, size, itemsize = args[HEADS], args[SIZE], size_of(like)
    num_rows = args[TOKENS] * heads
    begin = fetch_add(address, args[CHUNK])
    while begin < num_rows:
        for r in range(begin, min(begin + args[CHUNK], num_rows)):
            place = args[SOURCE] + (r // heads * args[STRIDE] + r % heads * size) * itemsize
            row = carray(pointer_to(place, like), size)
            offset = r * size * itemsize
            if args[RESIDUAL] != 0:
                residual = carray(pointer_to(args[RESIDUAL] + offset, like), size)
                if args[BRANCH_WEIGHT] != 0:
                    branch_weight = carray(pointer_to(args[BRANCH_WEIGHT], wide), size)
                    moments = _moments(row, size, eps, is_rms)
                    _add_normed(row, branch_weight, residual, factor, moments, size, like)
                else:
                    second = 0 if args[SECOND] == 0 else args[SECOND] + offset
                    _add(row, second, residual, factor, size, like)
                row = residual
            if args[OUTPUT] != 0:
                moments = _moments(row, size, eps, is_rms)
                output = args[OUTPUT] + offset
                _scaled_row(row, moments, args[WEIGHT], args[BIAS], output, size, like, wide)
                if args[TWIN_OUTPUT] != 0:
                    output = args[TWIN_OUTPUT] + offset
                    weight, bias = args[TWIN_WEIGHT], args[TWIN_BIAS]
                    _scaled_row(row, moments, weight, bias, output, size, like, wide)
        begin = fetch_add(address, args[CHUNK])


@jit
def _gate(address: int, is_gelu: Any, is_clamped: Any, source_like: Any, like: Any) -> None:
    """output [tokens, size] = f(gate) * up for source [tokens, gate and up, size], whose tokens are
    multiplied by weight float32 [tokens] first if there is one; see gates.py."""
    args = carray(pointer_to(address, int64), NUM_ARGS)
    size, itemsize, width = args[SIZE], size_of(like), size_of(source_like)
    begin = fetch_add(address, args[CHUNK])
    while begin < args[TOKENS]:
        for r in range(begin, min(begin + args[CHUNK], args[TOKENS])):
            source = args[SOURCE] + r * args[STRIDE] * width
            gate = carray(pointer_to(source, source_like), size)
            up = carray(pointer_to(source + size * width, source_like), size)
            scale = np.float32(1.0)
            if args[WEIGHT] != 0:
                scale = carray(pointer_to(args[WEIGHT], float32), args[TOKENS])[r]
            output = carray(pointer_to(args[OUTPUT] + r * size * itemsize, like), size)
            for i in range(size):
                x, factor = to_float(gate[i]) * scale, to_float(up[i]) * scale
                output[i] = from_float(gated(x, factor, is_gelu, is_clamped), like)
        begin = fetch_add(address, args[CHUNK])


@jit
def _weighted_sum(address: int, like: Any) -> None:
    """output [tokens, size] = sum over h of weight [tokens, heads] * source [bias [tokens, heads]],
    in the order of h; the latter are rows of the source, as int64."""
    args = carray(pointer_to(address, int64), NUM_ARGS)
    heads, size, itemsize = args[HEADS], args[SIZE], size_of(like)
    sums = np.empty(size, np.float32)
    begin = fetch_add(address, args[CHUNK])
    while begin < args[TOKENS]:
        for r in range(begin, min(begin + args[CHUNK], args[TOKENS])):
            weights = carray(pointer_to(args[WEIGHT] + r * heads * 4, float32), heads)
            places = carray(pointer_to(args[BIAS] + r * heads * 8, int64), heads)
            sums[:] = np.float32(0.0)
            for h in range(heads):
                weight = weights[h]
                row = carray(pointer_to(args[SOURCE] + places[h] * size * itemsize, like), size)
                for i in range(size):
                    sums[i] += weight * to_float(row[i])
            output = carray(pointer_to(args[OUTPUT] + r * size * itemsize, like), size)
            for i in range(size):
                output[i] = from_float(sums[i], like)
        begin = fetch_add(address, args[CHUNK])


@jit
def _largest(row: Any, size: int) -> Any:
    """The size of the largest element, as its bits: infinity or NaN if there is one."""
    largest = np.int32(0)
    for i in range(size):
        largest = max(largest, magnitude_bits(to_float(row[i])))
    return largest


@jit
def quantize_row(row: Any, output: Any, size: int, flipped: Any) -> Any:
    """Write a row, rounded to int8, with the bits of `flipped` turned over; what that is to be
    multiplied by. Of a row with an infinity or a NaN it is NaN."""
    bits = _largest(row, size)
    if bits >= INFINITY_BITS:
        for i in range(size):
            output[i] = flipped
        return np.float32(np.nan)
    largest = max(from_bits(bits), SMALLEST_ROW)
    inverse = INT8_MAX / largest
    for i in range(size):
        output[i] = round_to_int8(to_float(row[i]) * inverse) ^ flipped
    return largest / INT8_MAX


@jit
def _quantize(address: int, like: Any, rounded: Any) -> None:
    """output int8 [tokens, size] times weight [tokens] = source [tokens, size], rounded; tokens of
    the output are `bias` bytes apart.

    Of a row with an infinity or a NaN, the weight is NaN.
    """
    args = carray(pointer_to(address, int64), NUM_ARGS)
    size, itemsize = args[SIZE], size_of(like)
    scales = carray(pointer_to(args[WEIGHT], float32), args[TOKENS])
    begin = fetch_add(address, args[CHUNK])
    while begin < args[TOKENS]:
        for r in range(begin, min(begin + args[CHUNK], args[TOKENS])):
            row = carray(pointer_to(args[SOURCE] + r * args[STRIDE] * itemsize, like), size)
            output = carray(pointer_to(args[OUTPUT] + r * args[BIAS], rounded), size)
            scales[r] = quantize_row(row, output, size, np.int8(0))
        begin = fetch_add(address, args[CHUNK])


@jit
def _rescale(address: int, like: Any) -> None:
    """output [tokens, size] = source float32 [tokens, size] * weight [tokens] + bias [size]."""
    args = carray(pointer_to(address, int64), NUM_ARGS)
    size, itemsize = args[SIZE], size_of(like)
    scales = carray(pointer_to(args[WEIGHT], float32), args[TOKENS])
    bias = carray(pointer_to(args[BIAS], like), size)
    begin = fetch_add(address, args[CHUNK])
    while begin < args[TOKENS]:
        for r in range(begin, min(begin + args[CHUNK], args[TOKENS])):
            scale = scales[r]
            row = carray(pointer_to(args[SOURCE] + r * size * 4, float32), size)
            output = carray(pointer_to(args[OUTPUT] + r * size * itemsize, like), size)
            if args[BIAS] == 0:
                for i in range(size):
                    output[i] = from_float(row[i] * scale, like)
            else:
                for i in range(size):
                    output[i] = from_float(row[i] * scale + to_float(bias[i]), like)
        begin = fetch_add(address, args[CHUNK])


@jit
def _mask_part(part: Any, word: Any, first: int, like: Any) -> Any:
    """Less than a word's elements become -inf where bits from `first` on are not set. Whether one
    of them was NaN or +inf."""
    is_damaged = np.int32(0)
    for i in range(len(part)):
        is_damaged |= np.int32(not (to_float(part[i]) <= LARGEST))
        if (word >> np.int32(first + i)) & 1 == 0:
            part[i] = from_float(-INFINITY, like)
    return is_damaged


@jit
def _mask_words(part: Any, words: Any, like: Any) -> Any:
    """See _mask_part. The inner loop has a constant length, so it becomes vector instructions."""
    is_damaged = np.int32(0)
    for w in range(len(words)):
        word = words[w]
        for i in range(WORD_BITS):
            is_damaged |= np.int32(not (to_float(part[w * WORD_BITS + i]) <= LARGEST))
            if (word >> np.int32(i)) & 1 == 0:
                part[w * WORD_BITS + i] = from_float(-INFINITY, like)
    return is_damaged


@jit
def _mask(address: int, like: Any) -> None:
    """Elements of source [tokens, size] become -inf, in place, where their bits are not set in a
    row of weight int32 [..., heads]: row t's is at bias int32 [tokens], unless that is negative.

    An element's bit is `eps` bits further on than its place in its row. A row with a NaN or a +inf
    becomes NaN.
    """
    args = carray(pointer_to(address, int64), NUM_ARGS)
    size, itemsize, first = args[SIZE], size_of(like), args[EPS]
    places = carray(pointer_to(args[BIAS], int32), args[TOKENS])
    head = min(size, -first % WORD_BITS)  # elements before the first whole word
    num_words = (size - head) // WORD_BITS
    tail = head + num_words * WORD_BITS
    begin = fetch_add(address, args[CHUNK])
    while begin < args[TOKENS]:
        for r in range(begin, min(begin + args[CHUNK], args[TOKENS])):
            if places[r] < 0:
                continue
            row = carray(pointer_to(args[SOURCE] + r * args[STRIDE] * itemsize, like), size)
            mask = carray(
                pointer_to(args[WEIGHT] + places[r] * args[HEADS] * 4, int32), args[HEADS]
            )
            next_word = (first + head) // WORD_BITS
            words = mask[next_word : next_word + num_words]
            is_damaged = _mask_words(row[head:tail], words, like)
            if head > 0:
                word = mask[first // WORD_BITS]
                is_damaged |= _mask_part(row[:head], word, first % WORD_BITS, like)
            if tail < size:
                is_damaged |= _mask_part(row[tail:], mask[next_word + num_words], 0, like)
            if is_damaged != 0:
                row[:] = from_float(np.float32(np.nan), like)
        begin = fetch_add(address, args[CHUNK])


def compile_norm(element: Any, weight_element: Any, is_rms: bool) -> Any:
    """A norm as a C function of its arguments' address; elements: float32 or uint16 (bf16)."""
    sources = digest_of(cpu_vectors)

    def norm(address):
        sources  # noqa: B018 (makes it a part of the key under which the kernel is kept)
        _norm(address, is_rms, np.empty(0, element), np.empty(0, weight_element))

    return compile_kernel(norm)


def compile_gate(source: Any, element: Any, epilogue: Epilogue) -> Any:
    """See compile_norm; from elements of `source` to `element`."""
    sources = digest_of(cpu_gates, cpu_vectors)
    is_gelu, is_clamped = epilogue == Epilogue.GELU_TANH_MUL, epilogue == Epilogue.CLAMPED_SWIGLU

    def gate(address):
        sources  # noqa: B018
        _gate(address, is_gelu, is_clamped, np.empty(0, source), np.empty(0, element))

    return compile_kernel(gate)


def compile_weighted_sum(element: Any) -> Any:
    """See compile_norm."""
    sources = digest_of(cpu_vectors)

    def weighted_sum(address):
        sources  # noqa: B018
        _weighted_sum(address, np.empty(0, element))

    return compile_kernel(weighted_sum)


def compile_quantize(element: Any) -> Any:
    """See compile_norm."""
    sources = digest_of(cpu_vectors)

    def quantize(address):
        sources  # noqa: B018
        _quantize(address, np.empty(0, element), np.empty(0, np.int8))

    return compile_kernel(quantize)


def compile_rescale(element: Any) -> Any:
    """See compile_norm."""
    sources = digest_of(cpu_vectors)

    def rescale(address):
        sources  # noqa: B018
        _rescale(address, np.empty(0, element))

    return compile_kernel(rescale)


def compile_mask(element: Any) -> Any:
    """See compile_norm."""
    sources = digest_of(cpu_vectors)

    def mask(address):
        sources  # noqa: B018
        _mask(address, np.empty(0, element))

    return compile_kernel(mask)
