"""The inner loops of the CPU backend, as LLVM vector code that Numba inlines.

So no compiler is needed at the user's. Numba's own vectoriser cannot keep a tile of accumulators in
registers; here the loops where the time goes are written with explicit <16 x float> vectors, which
LLVM splits where the CPU has shorter ones. Nothing may reorder a sum: each output element is one
chain of multiply-adds in the order of its tokens, whatever tile it is computed in.

Memory is read in 32-bit words. The dtype of the parameter `like` chooses the arithmetic:
  float32  a word is one fp32 number
  uint32   a word is two bf16 numbers, neighbours along the sum; the CPU's bf16 dot product
  int32    the same words, widened to fp32 first, for CPUs without that instruction

Numba's cache on disk notices changes of cpu_kernel.py only: after a change here, change that too
(a comment will do), or delete __pycache__.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
SPAN = 4  # vectors side by side in a tile: 64 tokens of scores, or 64 elements of the output
TILE_ROWS = (
    6  # 6 rows x 4 vectors of accumulators + 4 operands + 1 broadcast: 29 of AVX-512's 32 registers
)

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VI16, _VI32, _VF32 = (ir.VectorType(t, LANES) for t in (_I16, _I32, _F32))
_PTR = ir.PointerType()


class _BFloat(ir.Type):
    """llvmlite lacks the type that LLVM's bf16 dot product takes."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_VBF16 = ir.VectorType(_BFloat(), 2 * LANES)


def _const(value: float) -> ir.Constant:
    return ir.Constant(_VF32, [value] * LANES)


def _int(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _step(b: ir.IRBuilder, address: Any, count: int, stride: Any) -> Any:
    """address + count * stride"""
    return b.add(address, b.mul(stride if hasattr(stride, "type") else _int(stride), _int(count)))


def _consti(value: int) -> ir.Constant:
    return ir.Constant(_VI32, [value] * LANES)


def _splat(b: ir.IRBuilder, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return b.shuffle_vector(
        first, ir.Constant(vector, ir.Undefined), ir.Constant(_VI32, [0] * LANES)
    )


def _load(b: ir.IRBuilder, address: Any, typ: ir.Type, align: int = 4) -> Any:
    return b.load(b.inttoptr(address, _PTR), align=align, typ=typ)


def _store(b: ir.IRBuilder, value: Any, address: Any, align: int = 4) -> None:
    b.store(value, b.inttoptr(address, _PTR), align=align)


def _call(b: ir.IRBuilder, name: str, result: ir.Type, *args: Any) -> Any:
    signature = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), args)


def _prefetch(b: ir.IRBuilder, address: Any) -> None:
    hints = [ir.Constant(_I32, hint) for hint in (0, 2, 1)]  # to read, into the L2 cache, data
    _call(b, "llvm.prefetch.p0", ir.VoidType(), b.inttoptr(address, _PTR), *hints)


def _fma(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    kind = "v16f32" if isinstance(x.type, ir.VectorType) else "f32"
    return _call(b, f"llvm.fma.{kind}", x.type, x, y, z)


def _low(b: ir.IRBuilder, words: Any) -> Any:
    return b.bitcast(b.shl(words, _consti(16)), _VF32)


def _high(b: ir.IRBuilder, words: Any) -> Any:
    return b.bitcast(b.and_(words, _consti(0xFFFF0000)), _VF32)


def _multiply_add(
    b: ir.IRBuilder, cache: types.Type, acc: Any, row_words: Any, tile_words: Any
) -> Any:
    """acc += row x tile over one word of the sum."""
    if cache == types.float32:
        return _fma(b, b.bitcast(row_words, _VF32), b.bitcast(tile_words, _VF32), acc)
    if cache == types.uint32:
        pairs = (b.bitcast(row_words, _VBF16), b.bitcast(tile_words, _VBF16))
        return _call(b, "llvm.x86.avx512bf16.dpbf16ps.512", _VF32, acc, *pairs)
    acc = _fma(b, _low(b, row_words), _low(b, tile_words), acc)
    return _fma(b, _high(b, row_words), _high(b, tile_words), acc)


@intrinsic
def multiply_keys(typingctx, like, rows, vecs, a, a_stride, tiles, depth, c):
    """Scores C[r, v] = sum over k < depth of A[r, k] * K_v[k], each v the 16 tokens of a tile.

    Limits: 1 <= rows <= 6, 1 <= vecs <= 4, depth >= 1. Addresses and strides are bytes:
      A    a word at a + r * a_stride + 4k
      K_v  a vector of words at tiles[v] + 64k, `tiles` being the address of 8 addresses
      C    a vector of fp32 at c + 256r + 64v
    tiles[4 + v] is read next in the same way: its cache lines are fetched in passing.
    """
    signature = types.void(like, *([types.int64] * 7))

    def codegen(context, b, sig, args):
        _, rows, vecs, a, a_stride, tiles, depth, c = args

        def emit(num_rows: int, num_vecs: int) -> None:
            held = [_load(b, _step(b, tiles, v, 8), _I64) for v in range(num_vecs)]
            ahead = [_load(b, _step(b, tiles, SPAN + v, 8), _I64) for v in range(num_vecs)]

            def places(k: Any) -> tuple[list[Any], list[Any]]:
                line = b.mul(k, _int(4 * LANES))
                return [b.add(x, line) for x in held], [b.add(x, line) for x in ahead]

            a_rows = [_step(b, a, r, a_stride) for r in range(num_rows)]
            start = [_const(0.0)] * (num_rows * num_vecs)
            sums = _sum_loop(b, like.dtype, a_rows, places, (_int(0), depth), start)
            for i, value in enumerate(sums):
                r, v = divmod(i, num_vecs)
                _store(b, value, b.add(c, _int(4 * LANES * (SPAN * r + v))))

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
    tiles[4 + t] is read next in the same way: its cache lines are fetched in passing.
    """
    signature = types.void(like, *([types.int64] * 10))
    shift = 4 if like.dtype == types.float32 else 3  # 16 or 8 words of tokens in a tile

    def codegen(context, b, sig, args):
        _, rows, vecs, weights, tiles, offset, stride, begin, end, c, c_stride = args

        def emit(num_rows: int, num_vecs: int) -> None:
            def places(w: Any) -> tuple[list[Any], list[Any]]:
                tile = b.add(tiles, b.mul(b.ashr(w, _int(shift)), _int(8)))
                inside = b.add(offset, b.mul(b.and_(w, _int(2**shift - 1)), stride))
                here = b.add(_load(b, tile, _I64), inside)
                next_ = b.add(_load(b, b.add(tile, _int(8 * SPAN)), _I64), inside)
                lines = [_int(4 * LANES * v) for v in range(num_vecs)]
                return [b.add(here, x) for x in lines], [b.add(next_, x) for x in lines]

            a_rows = [_step(b, weights, r, 4 * LANES * SPAN) for r in range(num_rows)]
            c_rows = [_step(b, c, r, c_stride) for r in range(num_rows)]
            targets = [_step(b, c_row, v, 4 * LANES) for c_row in c_rows for v in range(num_vecs)]
            start = [_load(b, target, _VF32) for target in targets]
            sums = _sum_loop(b, like.dtype, a_rows, places, (begin, end), start)
            for value, target in zip(sums, targets, strict=True):
                _store(b, value, target)

        _for_each_shape(b, rows, vecs, emit)
        return context.get_dummy_value()

    return signature, codegen


def _for_each_shape(
    b: ir.IRBuilder, rows: Any, vecs: Any, emit: Callable[[int, int], None]
) -> None:
    """Branch on the shape of a tile; `emit` writes the code for one."""
    done = b.append_basic_block("tile.done")
    switch = b.switch(b.add(b.mul(rows, _int(SPAN)), vecs), done)
    for num_rows in range(1, TILE_ROWS + 1):
        for num_vecs in range(1, SPAN + 1):
            block = b.append_basic_block(f"tile.{num_rows}x{num_vecs}")
            switch.add_case(_int(num_rows * SPAN + num_vecs), block)
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
    k = b.phi(_I64)
    k.add_incoming(bounds[0], before)
    sums = []
    for value in start:
        sums.append(b.phi(_VF32))
        sums[-1].add_incoming(value, before)
    here, ahead = places(k)
    for address in ahead:
        _prefetch(b, address)
    tile_words = [_load(b, address, _VI32) for address in here]
    results = []
    for r, a_row in enumerate(a_rows):
        row_word = _splat(b, _load(b, b.add(a_row, b.mul(k, _int(4))), _I32))
        for v, words in enumerate(tile_words):
            phi = sums[r * len(tile_words) + v]
            results.append(_multiply_add(b, dtype, phi, row_word, words))
            phi.add_incoming(results[-1], loop)
    next_k = b.add(k, _int(1))
    k.add_incoming(next_k, loop)
    b.cbranch(b.icmp_signed("<", next_k, bounds[1]), loop, after)
    b.position_at_end(after)
    return results


# 2**x on [-0.5, 0.5], fitted at Chebyshev points: relative error 3e-9 before rounding.
_EXP2 = (
    1.0,
    0.6931472067028329,
    0.24022650922289554,
    0.05550327226669895,
    0.00961805667843204,
    0.0013400428177711937,
    0.00015461444724808513,
)


def _exp2(b: ir.IRBuilder, x: Any) -> Any:
    """2**x for x <= 0 (a float or a vector), exactly 0 below -126; NaN stays NaN."""
    vector = isinstance(x.type, ir.VectorType)
    ints = _VI32 if vector else _I32

    def const(value: float) -> ir.Constant:
        return _const(value) if vector else ir.Constant(_F32, value)

    magic = const(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, held in the low bits
    shifted = b.fadd(x, magic)
    fraction = b.fsub(x, b.fsub(shifted, magic))
    poly = const(_EXP2[-1])
    for coefficient in reversed(_EXP2[:-1]):
        poly = _fma(b, poly, fraction, const(coefficient))
    exponent = b.shl(b.bitcast(shifted, ints), _consti(23) if vector else ir.Constant(_I32, 23))
    result = b.bitcast(b.add(b.bitcast(poly, ints), exponent), x.type)
    return b.select(b.fcmp_ordered("<", x, const(-126.0)), const(0.0), result)


@intrinsic
def exp2_nonpositive(typingctx, x):
    """2**x for a float32 x <= 0, exactly 0 below -126: vectorised where a loop is."""

    def codegen(context, b, sig, args):
        return _exp2(b, args[0])

    return types.float32(types.float32), codegen


def _reduce(b: ir.IRBuilder, vector: Any, combine: Any) -> Any:
    """Fold 16 lanes in halves: always the same tree."""
    width = LANES
    while width > 1:
        width //= 2
        lanes = [i + width if i < width else i for i in range(LANES)]
        folded = b.shuffle_vector(
            vector, ir.Constant(_VF32, ir.Undefined), ir.Constant(_VI32, lanes)
        )
        vector = combine(vector, folded)
    return b.extract_element(vector, ir.Constant(_I32, 0))


def _round_bf16(b: ir.IRBuilder, x: Any) -> Any:
    bits = b.bitcast(x, _VI32)
    odd = b.and_(b.lshr(bits, _consti(16)), _consti(1))
    return b.trunc(b.lshr(b.add(bits, b.add(odd, _consti(0x7FFF))), _consti(16)), _VI16)


@intrinsic
def softmax_row(typingctx, cache, scores, first, end, scale, maximum):
    """Turn 64 scores into weights in place: w[i] = 2 ** (score[i] * scale - new_maximum).

    Weights outside [first, end) are exactly 0. For bf16 they are packed to 64 bf16 numbers.
    Returns (new_maximum, 2 ** (maximum - new_maximum), sum of the weights).
    """
    dtype = cache.dtype
    result = types.UniTuple(types.float32, 3)
    signature = result(cache, types.int64, types.int64, types.int64, types.float32, types.float32)

    def codegen(context, b, sig, args):
        _, scores, first, end, scale, maximum = args
        first, end = (_splat(b, b.trunc(bound, _I32)) for bound in (first, end))
        scale = _splat(b, scale)

        def larger(x, y):
            return b.select(b.fcmp_ordered(">", x, y), x, y)

        values = []
        for v in range(SPAN):
            lane = ir.Constant(_VI32, [v * LANES + i for i in range(LANES)])
            seen = b.and_(b.icmp_signed(">=", lane, first), b.icmp_signed("<", lane, end))
            place = b.add(scores, ir.Constant(_I64, 4 * LANES * v))
            value = b.fmul(_load(b, place, _VF32), scale)
            values.append(b.select(seen, value, _const(float("-inf"))))
        top = larger(larger(values[0], values[1]), larger(values[2], values[3]))
        top = _splat(b, _reduce(b, larger(top, _splat(b, maximum)), larger))
        weights = [_exp2(b, b.fsub(value, top)) for value in values]
        for v, weight in enumerate(weights):
            if dtype == types.float32:
                _store(b, weight, b.add(scores, ir.Constant(_I64, 4 * LANES * v)))
            else:
                _store(b, _round_bf16(b, weight), b.add(scores, ir.Constant(_I64, 2 * LANES * v)))
        total = b.fadd(b.fadd(weights[0], weights[1]), b.fadd(weights[2], weights[3]))
        decay = b.extract_element(_exp2(b, b.fsub(_splat(b, maximum), top)), ir.Constant(_I32, 0))
        new_maximum = b.extract_element(top, ir.Constant(_I32, 0))
        return context.make_tuple(b, result, (new_maximum, decay, _reduce(b, total, b.fadd)))

    return signature, codegen


@intrinsic
def fetch_add(typingctx, address, value):
    """Atomically add to the int64 at an address; returns what it held."""
    signature = types.int64(types.int64, types.int64)

    def codegen(context, b, sig, args):
        return b.atomic_rmw("add", b.inttoptr(args[0], _PTR), args[1], "acq_rel")

    return signature, codegen


@intrinsic
def to_float(typingctx, element):
    """An element as float32: bf16 bits (uint16) are widened, a float32 is itself."""
    signature = types.float32(element)

    def codegen(context, b, sig, args):
        if sig.args[0] == types.float32:
            return args[0]
        return b.bitcast(b.shl(b.zext(args[0], _I32), ir.Constant(_I32, 16)), _F32)

    return signature, codegen


@intrinsic
def from_float(typingctx, number, like):
    """A float32 as an element of `like`: itself, or bf16 bits (uint16) rounded to nearest even."""
    element = like.dtype
    signature = element(types.float32, like)

    def codegen(context, b, sig, args):
        if element == types.float32:
            return args[0]
        bits = b.bitcast(args[0], _I32)
        odd = b.and_(b.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = b.lshr(b.add(bits, b.add(odd, ir.Constant(_I32, 0x7FFF))), ir.Constant(_I32, 16))
        return b.trunc(rounded, _I16)

    return signature, codegen


@intrinsic
def size_of(typingctx, like):
    """Bytes of an element of `like`, as a constant (an array's itemsize is read at run time)."""
    size = like.dtype.bitwidth // 8

    def codegen(context, b, sig, args):
        return ir.Constant(_I64, size)

    return types.int64(like), codegen


@intrinsic
def pointer_to(typingctx, address, like):
    """An address as a pointer to elements of `like`'s dtype, for numba.carray."""
    signature = types.CPointer(like.dtype)(types.int64, like)

    def codegen(context, b, sig, args):
        return b.inttoptr(args[0], _PTR)

    return signature, codegen
