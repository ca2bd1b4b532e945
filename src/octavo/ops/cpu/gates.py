"""Gated activations on a CPU, as LLVM code that Numba inlines; see Epilogue for what they are."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from octavo.ops.cpu.vectors import (
    F32,
    I32,
    LANES,
    VF32,
    VI32,
    exp2,
    load,
    round_bf16,
    store,
)
from octavo.ops.epilogue import SWIGLU_ALPHA, SWIGLU_LIMIT

_LOG2_E = 1.4426950408889634
_GELU_LINEAR = 1.5957691216057308  # 2 sqrt(2 / pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR


def _gated(b: ir.IRBuilder, x: Any, factor: Any, is_gelu: Any, is_clamped: Any) -> Any:
    """f(x) * factor of gates x (a float or a vector): f(x) = x / (1 + exp(-t)).

    SiLU if t is x; GELU's tanh approximation if t is 2 sqrt(2 / pi) (x + 0.044715 x^3); and see
    Epilogue.CLAMPED_SWIGLU. The compiler knows the two conditions.
    """
    is_vector = isinstance(x.type, ir.VectorType)

    def const(value: float) -> ir.Constant:
        return ir.Constant(VF32, [value] * LANES) if is_vector else ir.Constant(F32, value)

    def bits(value: int) -> ir.Constant:
        return ir.Constant(VI32, [value] * LANES) if is_vector else ir.Constant(I32, value)

    def at_most(value: Any) -> Any:
        limit = const(SWIGLU_LIMIT)
        return b.select(b.fcmp_ordered(">", value, limit), limit, value)

    low = const(-SWIGLU_LIMIT)
    clamped = at_most(factor)
    clamped = b.select(b.fcmp_ordered("<", clamped, low), low, clamped)
    factor = b.select(is_clamped, b.fadd(const(1.0), clamped), factor)
    x = b.select(is_clamped, at_most(x), x)
    square = b.fmul(b.fmul(const(_GELU_CUBIC), x), x)
    cubic = b.fmul(x, b.fadd(const(_GELU_LINEAR), square))
    t = b.select(is_gelu, cubic, b.select(is_clamped, b.fmul(const(SWIGLU_ALPHA), x), x))
    size = b.bitcast(b.and_(b.bitcast(t, bits(0).type), bits(0x7FFFFFFF)), x.type)
    small = exp2(b, b.fmul(size, const(-_LOG2_E)))
    upper = b.select(b.fcmp_ordered(">=", t, const(0.0)), x, b.fmul(x, small))
    return b.fmul(b.fdiv(upper, b.fadd(const(1.0), small)), factor)


@intrinsic
def gated(typingctx, x, factor, is_gelu, is_clamped):
    """f(x) * factor, all float32; LLVM can vectorise loops over it."""

    def codegen(context, b, sig, args):
        return _gated(b, *args)

    return types.float32(types.float32, types.float32, types.boolean, types.boolean), codegen


@intrinsic
def write_gated(typingctx, like, gates, factors, target, is_gelu, is_clamped):
    """Write f(gate) * factor of 16 float32 gates and factors as elements like `like` (float32, or
    uint16 for bf16); gates, factors and target are addresses."""
    dtype = like.dtype
    signature = types.void(like, *([types.int64] * 3), types.boolean, types.boolean)

    def codegen(context, b, sig, args):
        _, gates, factors, target, is_gelu, is_clamped = args
        result = _gated(b, load(b, gates, VF32), load(b, factors, VF32), is_gelu, is_clamped)
        store(b, result if dtype == types.float32 else round_bf16(b, result), target, align=2)
        return context.get_dummy_value()

    return signature, codegen
