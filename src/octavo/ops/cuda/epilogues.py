"""The epilogues of our GEMM kernels, as constants of Triton, and their activations."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.epilogue import Epilogue

RELU = tl.constexpr(int(Epilogue.RELU))
SILU_MUL = tl.constexpr(int(Epilogue.SILU_MUL))
SILU = tl.constexpr(int(Epilogue.SILU))
GELU = tl.constexpr(int(Epilogue.GELU))
GELU_TANH = tl.constexpr(int(Epilogue.GELU_TANH))
GELU_TANH_MUL = tl.constexpr(int(Epilogue.GELU_TANH_MUL))


@triton.jit
def activate(y, EPILOGUE: tl.constexpr):
    """The epilogue's activation of float32 y; of the gates, if it is gated."""
    if EPILOGUE == RELU:
        y = tl.maximum(y, 0.0)
    if EPILOGUE == SILU:
        y = y / (1 + tl.exp(-y))
    if EPILOGUE == SILU_MUL:
        y = y / (1 + tl.exp(-y))
    if EPILOGUE == GELU:
        y = 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
    if EPILOGUE == GELU_TANH:
        y = y / (1 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))
    if EPILOGUE == GELU_TANH_MUL:
        y = y / (1 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))
    return y
