"""The epilogues of our GEMM kernels, as constants of Triton, and their activations."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops import epilogue
from octavo.ops.epilogue import Epilogue

RELU = tl.constexpr(int(Epilogue.RELU))
SILU_MUL = tl.constexpr(int(Epilogue.SILU_MUL))
SILU = tl.constexpr(int(Epilogue.SILU))
GELU = tl.constexpr(int(Epilogue.GELU))
GELU_TANH = tl.constexpr(int(Epilogue.GELU_TANH))
GELU_TANH_MUL = tl.constexpr(int(Epilogue.GELU_TANH_MUL))
CLAMPED_SWIGLU = tl.constexpr(int(Epilogue.CLAMPED_SWIGLU))
SWIGLU_ALPHA = tl.constexpr(epilogue.SWIGLU_ALPHA)
SWIGLU_LIMIT = tl.constexpr(epilogue.SWIGLU_LIMIT)


@triton.jit
def activate(y, EPILOGUE: tl.constexpr):
    """The epilogue's activation of float32 y, if it is not gated."""
    if EPILOGUE == RELU:
        y = tl.where(y < 0.0, 0.0, y)  # comparisons, unlike the maximum, keep NaN
    if EPILOGUE == SILU:
        y = y / (1 + tl.exp(-y))
    if EPILOGUE == GELU:
        y = 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
    if EPILOGUE == GELU_TANH:
        y = y / (1 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))
    return y


@triton.jit
def activate_gated(gate, up, EPILOGUE: tl.constexpr):
    """A gated epilogue's result for float32 gates and ups."""
    if EPILOGUE == SILU_MUL:
        gate = gate / (1 + tl.exp(-gate))
    if EPILOGUE == GELU_TANH_MUL:
        gate = gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    if EPILOGUE == CLAMPED_SWIGLU:
        # Comparisons, as above, keep NaN.
        gate = tl.where(gate > SWIGLU_LIMIT, SWIGLU_LIMIT, gate)
        up = tl.where(up > SWIGLU_LIMIT, SWIGLU_LIMIT, up)
        up = tl.where(up < -SWIGLU_LIMIT, -SWIGLU_LIMIT, up) + 1
        gate = gate / (1 + tl.exp(gate * -SWIGLU_ALPHA))
    return gate * up
