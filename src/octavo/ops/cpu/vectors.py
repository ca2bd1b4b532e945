"""LLVM vector code for Numba kernels: what Numba itself does not offer.

Helpers emit code at an IRBuilder; kernels call intrinsics. Vectors are 16 lanes of 32 bits; LLVM
splits them where the CPU has shorter ones.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import os
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16

I8, I16, I32, I64 = (ir.IntType(size) for size in (8, 16, 32, 64))
F32 = ir.FloatType()
VI16, VI32, VF32 = (ir.VectorType(t, LANES) for t in (I16, I32, F32))
PTR = ir.PointerType()


def int64_const(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def float_lanes(value: float) -> ir.Constant:
    return ir.Constant(VF32, [value] * LANES)


def int32_lanes(value: int) -> ir.Constant:
    return ir.Constant(VI32, [value] * LANES)


def splat(b: ir.IRBuilder, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(
        first, ir.Constant(vector, ir.Undefined), ir.Constant(VI32, [0] * LANES)
    )


def advance(b: ir.IRBuilder, address: Any, count: int, stride: Any) -> Any:
    """address + count * stride"""
    return b.add(
        address,
        b.mul(stride if hasattr(stride, "type") else int64_const(stride), int64_const(count)),
    )


def load(b: ir.IRBuilder, address: Any, typ: ir.Type, align: int = 4) -> Any:
    return b.load(b.inttoptr(address, PTR), align=align, typ=typ)


def store(b: ir.IRBuilder, value: Any, address: Any, align: int = 4) -> None:
    b.store(value, b.inttoptr(address, PTR), align=align)


def call(b: ir.IRBuilder, name: str, result: ir.Type, *args: Any) -> Any:
    signature = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), args)


def prefetch(b: ir.IRBuilder, address: Any) -> None:
    hints = [ir.Constant(I32, hint) for hint in (0, 2, 1)]  # to read, into the L2 cache, data
    call(b, "llvm.prefetch.p0", ir.VoidType(), b.inttoptr(address, PTR), *hints)


def fused_multiply_add(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    kind = "v16f32" if isinstance(x.type, ir.VectorType) else "f32"
    return call(b, f"llvm.fma.{kind}", x.type, x, y, z)


def round_bf16(b: ir.IRBuilder, x: Any) -> Any:
    """16 floats as bf16 bits, rounded to nearest even."""
    bits = b.bitcast(x, VI32)
    odd = b.and_(b.lshr(bits, int32_lanes(16)), int32_lanes(1))
    return b.trunc(b.lshr(b.add(bits, b.add(odd, int32_lanes(0x7FFF))), int32_lanes(16)), VI16)


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


def exp2(b: ir.IRBuilder, x: Any) -> Any:
    """2**x for x <= 0 (a float or a vector), exactly 0 below -126; NaN stays NaN."""
    vector = isinstance(x.type, ir.VectorType)
    ints = VI32 if vector else I32

    def const(value: float) -> ir.Constant:
        return float_lanes(value) if vector else ir.Constant(F32, value)

    magic = const(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, held in the low bits
    shifted = b.fadd(x, magic)
    fraction = b.fsub(x, b.fsub(shifted, magic))
    poly = const(_EXP2[-1])
    for coefficient in reversed(_EXP2[:-1]):
        poly = fused_multiply_add(b, poly, fraction, const(coefficient))
    exponent = b.shl(b.bitcast(shifted, ints), int32_lanes(23) if vector else ir.Constant(I32, 23))
    result = b.bitcast(b.add(b.bitcast(poly, ints), exponent), x.type)
    return b.select(b.fcmp_ordered("<", x, const(-126.0)), const(0.0), result)


@intrinsic
def exp2_nonpositive(typingctx, x):
    """2**x for a float32 x <= 0, exactly 0 below -126; LLVM can vectorise loops over it."""

    def codegen(context, b, sig, args):
        return exp2(b, args[0])

    return types.float32(types.float32), codegen


@intrinsic
def to_float(typingctx, element):
    """An element as float32: bf16 bits (uint16) are widened, a float32 is itself."""
    signature = types.float32(element)

    def codegen(context, b, sig, args):
        return _widened(b, sig.args[0], args[0])

    return signature, codegen


def _widened(b: ir.IRBuilder, element: types.Type, value: Any) -> Any:
    if element == types.float32:
        return value
    return b.bitcast(b.shl(b.zext(value, I32), ir.Constant(I32, 16)), F32)


@intrinsic
def from_float(typingctx, number, like):
    """A float32 as an element of `like`: itself, or bf16 bits (uint16) rounded to nearest even.

    Rounding a NaN up may carry into its sign, which leaves a zero: each becomes the same NaN.
    """
    element = like.dtype
    signature = element(types.float32, like)

    def codegen(context, b, sig, args):
        if element == types.float32:
            return args[0]
        bits = b.bitcast(args[0], I32)
        odd = b.and_(b.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
        rounded = b.lshr(b.add(bits, b.add(odd, ir.Constant(I32, 0x7FFF))), ir.Constant(I32, 16))
        is_nan = b.fcmp_unordered("uno", args[0], args[0])
        return b.select(is_nan, ir.Constant(I16, 0x7FC0), b.trunc(rounded, I16))

    return signature, codegen


@intrinsic
def to_cached(typingctx, element, inverse_scale, like):
    """An element as an array like `like` caches it: itself, or for bytes the e4m3 of its product
    with a float32, rounded to nearest even; at most 448 in size, and NaN if it is NaN."""
    signature = like.dtype(element, types.float32, like)

    def codegen(context, b, sig, args):
        if sig.args[0] == like.dtype:
            return args[0]

        def const(value: int) -> ir.Constant:
            return ir.Constant(I32, value)

        bits = b.bitcast(b.fmul(_widened(b, sig.args[0], args[0]), args[1]), I32)
        size = b.and_(bits, const(0x7FFFFFFF))
        # From 2**-6 on: the upper 3 bits of the mantissa, rounded, and another bias.
        odd = b.and_(b.lshr(size, const(20)), const(1))
        rounded = b.lshr(b.add(size, b.add(odd, const(0x7FFFF))), const(20))
        normal = b.sub(rounded, const((127 - 7) << 3))
        # Below, multiples of 2**-9: an addition to 2**14 rounds to them.
        shifted = b.fadd(b.bitcast(size, F32), ir.Constant(F32, 16384.0))
        subnormal = b.sub(b.bitcast(shifted, I32), const(0x46800000))
        code = b.select(b.icmp_unsigned("<", size, const(0x3C800000)), subnormal, normal)
        code = b.select(b.icmp_unsigned(">=", size, const(0x43E00000)), const(0x7E), code)
        code = b.select(b.icmp_unsigned(">", size, const(0x7F800000)), const(0x7F), code)
        return b.trunc(b.or_(code, b.and_(b.lshr(bits, const(24)), const(0x80))), I8)

    return signature, codegen


@intrinsic
def from_cached(typingctx, cached, like):
    """What is cached as an element of `like`: itself, or an e4m3 number (a byte) widened; LLVM can
    vectorise loops over it."""
    element = like.dtype
    signature = element(cached, like)

    def codegen(context, b, sig, args):
        if sig.args[0] == element:
            return args[0]

        def const(value: int) -> ir.Constant:
            return ir.Constant(I32, value)

        code = b.zext(args[0], I32)
        size = b.and_(code, const(0x7F))
        normal = b.add(b.shl(size, const(20)), const((127 - 7) << 23))
        small = b.fmul(b.sitofp(size, F32), ir.Constant(F32, 2.0**-9))
        bits = b.select(b.icmp_unsigned("<", size, const(8)), b.bitcast(small, I32), normal)
        bits = b.select(b.icmp_unsigned("==", size, const(0x7F)), const(0x7FC00000), bits)
        bits = b.or_(bits, b.shl(b.and_(code, const(0x80)), const(24)))
        if element == types.float32:
            return b.bitcast(bits, F32)
        return b.trunc(b.lshr(bits, const(16)), I16)

    return signature, codegen


@intrinsic
def magnitude_bits(typingctx, number):
    """The bits of |number| (float32) as an int32: in the order of sizes, infinity behind all
    numbers, and NaN behind infinity."""

    def codegen(context, b, sig, args):
        return b.and_(b.bitcast(args[0], I32), ir.Constant(I32, 0x7FFFFFFF))

    return types.int32(types.float32), codegen


@intrinsic
def from_bits(typingctx, bits):
    """A float32 from its bits, an int32."""

    def codegen(context, b, sig, args):
        return b.bitcast(args[0], F32)

    return types.float32(types.int32), codegen


@intrinsic
def round_to_int8(typingctx, number):
    """A float32 of at most 127 in size as an int8, rounded to nearest even."""

    def codegen(context, b, sig, args):
        # 1.5 * 2**23: adding it rounds to an integer, held in the low bits
        shifted = b.fadd(args[0], ir.Constant(F32, 12582912.0))
        return b.trunc(b.bitcast(shifted, I32), I8)

    return types.int8(types.float32), codegen


@intrinsic
def size_of(typingctx, like):
    """Bytes of an element of `like`, as a constant (an array's itemsize is read at run time)."""
    size = like.dtype.bitwidth // 8

    def codegen(context, b, sig, args):
        return ir.Constant(I64, size)

    return types.int64(like), codegen


@intrinsic
def pointer_to(typingctx, address, like):
    """An address as a pointer to elements of `like`'s dtype, for numba.carray."""
    signature = types.CPointer(like.dtype)(types.int64, like)

    def codegen(context, b, sig, args):
        return b.inttoptr(args[0], PTR)

    return signature, codegen


@intrinsic
def fetch_add(typingctx, address, value):
    """Atomically add to the int64 at an address; returns its old value."""
    signature = types.int64(types.int64, types.int64)

    def codegen(context, b, sig, args):
        return b.atomic_rmw("add", b.inttoptr(args[0], PTR), args[1], "acq_rel")

    return signature, codegen


if os.name == "posix":
    yield_core = types.ExternalFunction("sched_yield", types.int32())
else:

    @njit
    def yield_core():
        """Does nothing on Windows, which has no such function: the caller spins."""
