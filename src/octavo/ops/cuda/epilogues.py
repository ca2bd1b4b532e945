"""The epilogues that our GEMM kernels have, as constants of Triton."""

from __future__ import annotations

import triton.language as tl

from octavo.ops.epilogue import Epilogue

RELU = tl.constexpr(int(Epilogue.RELU))
SILU_MUL = tl.constexpr(int(Epilogue.SILU_MUL))
