"""The inner loops of attention on a CPU, as LLVM vector code that Numba inlines.

Numba's own vectoriser cannot keep a tile of accumulators in registers; these loops, where the time
goes, do. Nothing may reorder a sum: each output element is one chain of multiply-adds in token
order, whatever tile it is computed in.

Memory is read in 32-bit words. The dtype of the parameter `like` chooses the arithmetic:
  float32  a word is one fp32 number
  uint32   a word is two bf16 numbers, neighbours along the sum; the CPU's bf16 dot product
  int32    the same words, widened to fp32 first, for CPUs without that instruction
  int8     a word is four numbers, uint8 of the first factor and int8 of the other one, with sums in
           int32: the CPU's int8 dot product (VNNI)
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from octavo.ops.cpu.vectors import (
    I8,
    I32,
    I64,
    LANES,
    VF32,
    VI32,
    advance,
    call,
    exp2,
    float_lanes,
    fused_multiply_add,
    int32_lanes,
    int64_const,
    load,
    prefetch,
    round_bf16,
    splat,
    store,
)

SPAN = 4  # vectors side by side in a tile: 64 tokens of scores, or 64 elements of the output
TILE_ROWS = 6  # 6 rows x 4 vectors of accumulators + 4 operands + 1 broadcast: 29 of 32 registers


class _BFloat(ir.Type):
    """llvmlite lacks the type that LLVM's bf16 dot product takes."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_VBF16, _VI8 = ir.VectorType(_BFloat(), 2 * LANES), ir.VectorType(I8, 4 * LANES)


def _low(b: ir.IRBuilder, words: Any) -> Any:
    return b.bitcast(b.shl(words, int32_lanes(16)), VF32)


def _high(b: ir.IRBuilder, words: Any) -> Any:
    return b.bitcast(b.and_(words, int32_lanes(0xFFFF0000)), VF32)


def _multiply_add(
    b: ir.IRBuilder, cache: types.Type, acc: Any, row_words: Any, tile_words: Any
) -> Any:
    """acc += row x tile over one word of the sum."""
    if cache == types.int8:
        factors = [b.bitcast(each, _VI8) for each in (row_words, tile_words)]
        return call(b, "llvm.x86.avx512.vpdpbusd.512", VI32, acc, *factors)
    if cache == types.float32:
        return fused_multiply_add(b, b.bitcast(row_words, VF32), b.bitcast(tile_words, VF32), acc)
    if cache == types.uint32:
        pairs = (b.bitcast(row_words, _VBF16), b.bitcast(tile_words, _VBF16))
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", VF32, acc, *pairs)
    acc = fused_multiply_add(b, _low(b, row_words), _low(b, tile_words), acc)
    return fused_multiply_add(b, _high(b, row_words), _high(b, tile_words), acc)


@intrinsic
def multiply_keys(typingctx, like, rows, vecs, a, a_stride, tiles, line, next_line, depth, c):
    """Scores C[r, v] = sum over k < depth of A[r, k] * K_v[k], each v the 16 tokens of a tile.

    Limits: 1 <= rows <= 6, 1 <= vecs <= 4, depth >= 1. Addresses and strides are bytes:
      A    a word at a + r * a_stride + 4k
      K_v  a vector of words at tiles[v] + line * k, `tiles` being the address of 8 addresses
      C    a vector of fp32, or of int32, at c + 256r + 64v
    What is read next is prefetched meanwhile: at tiles[4 + v] + next_line * k.
    """
    signature = types.void(like, *([types.int64] * 9))

    def codegen(context, b, sig, args):
        _, rows, vecs, a, a_stride, tiles, line, next_line, depth, c = args

        def emit(num_rows: int, num_vecs: int) -> None:
            held = [load(b, advance(b, tiles, v, 8), I64) for v in range(num_vecs)]
            ahead = [load(b, advance(b, tiles, SPAN + v, 8), I64) for v in range(num_vecs)]

            def places(k: Any) -> tuple[list[Any], list[Any]]:
                offset, next_offset = b.mul(k, line), b.mul(k, next_line)
                return [b.add(x, offset) for x in held], [b.add(x, next_offset) for x in ahead]

            a_rows = [advance(b, a, r, a_stride) for r in range(num_rows)]
            zero = int32_lanes(0) if like.dtype == types.int8 else float_lanes(0.0)
            start = [zero] * (num_rows * num_vecs)
            sums = _sum_loop(b, like.dtype, a_rows, places, (int64_const(0), depth), start)
            for i, value in enumerate(sums):
                r, v = divmod(i, num_vecs)
                store(b, value, b.add(c, int64_const(4 * LANES * (SPAN * r + v))))

        _for_each_shape(b, rows, vecs, emit)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def multiply_values(
    typingctx, like, rows, vecs, weights, tiles, offset, stride, begin, end, c, c_stride
):
    """Sums C[r, v] += sum over begin <= w < end of A[r, w] * V[w, v], w counting words of tokens.

    Limits: 1 <= rows <= 6, 1 <= vecs <= 4, begin < end. Addresses and strides are bytes:
      A  a word at weights + 256r + 4w
      V  a vector of words at tiles[t] + offset + i * stride + 64v, for word i of tile t
      C  a vector of fp32 at c + r * c_stride + 64v
    tiles[4 + t] is read next in the same way: its cache lines are prefetched meanwhile.
    """
    signature = types.void(like, *([types.int64] * 10))
    shift = 4 if like.dtype == types.float32 else 3  # 16 or 8 words of tokens in a tile

    def codegen(context, b, sig, args):
        _, rows, vecs, weights, tiles, offset, stride, begin, end, c, c_stride = args

        def emit(num_rows: int, num_vecs: int) -> None:
            def places(w: Any) -> tuple[list[Any], list[Any]]:
                tile = b.add(tiles, b.mul(b.ashr(w, int64_const(shift)), int64_const(8)))
                inside = b.add(offset, b.mul(b.and_(w, int64_const(2**shift - 1)), stride))
                here = b.add(load(b, tile, I64), inside)
                next_ = b.add(load(b, b.add(tile, int64_const(8 * SPAN)), I64), inside)
                lines = [int64_const(4 * LANES * v) for v in range(num_vecs)]
                return [b.add(here, x) for x in lines], [b.add(next_, x) for x in lines]

            a_rows = [advance(b, weights, r, 4 * LANES * SPAN) for r in range(num_rows)]
            c_rows = [advance(b, c, r, c_stride) for r in range(num_rows)]
            targets = [advance(b, c_row, v, 4 * LANES) for c_row in c_rows for v in range(num_vecs)]
            start = [load(b, target, VF32) for target in targets]
            sums = _sum_loop(b, like.dtype, a_rows, places, (begin, end), start)
            for value, target in zip(sums, targets, strict=True):
                store(b, value, target)

        _for_each_shape(b, rows, vecs, emit)
        return context.get_dummy_value()

    return signature, codegen


def _for_each_shape(
    b: ir.IRBuilder, rows: Any, vecs: Any, emit: Callable[[int, int], None]
) -> None:
    """Branch on the shape of a tile; `emit` writes the code for one."""
    done = b.append_basic_block("tile.done")
    switch = b.switch(b.add(b.mul(rows, int64_const(SPAN)), vecs), done)
    for num_rows in range(1, TILE_ROWS + 1):
        for num_vecs in range(1, SPAN + 1):
            block = b.append_basic_block(f"tile.{num_rows}x{num_vecs}")
            switch.add_case(int64_const(num_rows * SPAN + num_vecs), block)
            b.position_at_end(block)
            emit(num_rows, num_vecs)
            b.branch(done)
    b.position_at_end(done)


def _sum_loop(
    b: ir.IRBuilder,
    dtype: types.Type,
    a_rows: list[Any],
    places: Callable[[Any], tuple[list[Any], list[Any]]],
    bounds: tuple[Any, Any],
    start: list[Any],
) -> list[Any]:
    """start[r, v] + sum over k in bounds of A[r, k] * B_v[k], all in registers; never empty."""
    before, loop, after = b.block, b.append_basic_block("sum"), b.append_basic_block("sum.done")
    b.branch(loop)
    b.position_at_end(loop)
    k = b.phi(I64)
    k.add_incoming(bounds[0], before)
    sums = []
    for value in start:
        sums.append(b.phi(value.type))
        sums[-1].add_incoming(value, before)
    here, ahead = places(k)
    for address in ahead:
        prefetch(b, address)
    tile_words = [load(b, address, VI32) for address in here]
    results = []
    for r, a_row in enumerate(a_rows):
        row_word = splat(b, load(b, b.add(a_row, b.mul(k, int64_const(4))), I32))
        for v, words in enumerate(tile_words):
            phi = sums[r * len(tile_words) + v]
            results.append(_multiply_add(b, dtype, phi, row_word, words))
            phi.add_incoming(results[-1], loop)
    next_k = b.add(k, int64_const(1))
    k.add_incoming(next_k, loop)
    b.cbranch(b.icmp_signed("<", next_k, bounds[1]), loop, after)
    b.position_at_end(after)
    return results


def _reduce(b: ir.IRBuilder, vector: Any, combine: Any) -> Any:
    """Fold 16 lanes in halves: always the same tree."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = [i + width if i < width else i for i in range(LANES)]
        folded = b.shuffle_vector(vector, ir.Constant(VF32, ir.Undefined), ir.Constant(VI32, lanes))
        vector = combine(vector, folded)
    return b.extract_element(vector, ir.Constant(I32, 0))


@intrinsic
def softmax_row(typingctx, like, scores, first, end, scale, maximum):
    """Turn 64 scores into weights in place: w[i] = 2 ** (score[i] * scale - new_maximum).

    Weights outside [first, end) are exactly 0. For bf16 they are packed to 64 bf16 numbers.
    Returns (new_maximum, 2 ** (maximum - new_maximum), sum of the weights).
    """
    dtype = like.dtype
    result = types.UniTuple(types.float32, 3)
    signature = result(like, types.int64, types.int64, types.int64, types.float32, types.float32)

    def codegen(context, b, sig, args):
        _, scores, first, end, scale, maximum = args
        first, end = (splat(b, b.trunc(bound, I32)) for bound in (first, end))
        scale = splat(b, scale)

        def larger(x, y):
            return b.select(b.fcmp_ordered(">", x, y), x, y)

        values = []
        for v in range(SPAN):
            lane = ir.Constant(VI32, [v * LANES + i for i in range(LANES)])
            seen = b.and_(b.icmp_signed(">=", lane, first), b.icmp_signed("<", lane, end))
            place = b.add(scores, ir.Constant(I64, 4 * LANES * v))
            value = b.fmul(load(b, place, VF32), scale)
            values.append(b.select(seen, value, float_lanes(float("-inf"))))
        top = larger(larger(values[0], values[1]), larger(values[2], values[3]))
        top = splat(b, _reduce(b, larger(top, splat(b, maximum)), larger))
        weights = [exp2(b, b.fsub(value, top)) for value in values]
        for v, weight in enumerate(weights):
            if dtype == types.float32:
                store(b, weight, b.add(scores, ir.Constant(I64, 4 * LANES * v)))
            else:
                store(b, round_bf16(b, weight), b.add(scores, ir.Constant(I64, 2 * LANES * v)))
        total = b.fadd(b.fadd(weights[0], weights[1]), b.fadd(weights[2], weights[3]))
        decay = b.extract_element(exp2(b, b.fsub(splat(b, maximum), top)), ir.Constant(I32, 0))
        new_maximum = b.extract_element(top, ir.Constant(I32, 0))
        return context.make_tuple(b, result, (new_maximum, decay, _reduce(b, total, b.fadd)))

    return signature, codegen
