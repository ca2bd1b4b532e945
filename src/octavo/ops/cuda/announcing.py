"""Results that announce themselves to programs that wait for them.

A place in memory holds EMPTY until its result has come, and who has taken the result makes it EMPTY
again. So those that wait poll the results themselves, and need no counter.
"""

from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(-2147483648)  # minus zero, which no program leaves; the least integer


@triton.jit
def announced(x):
    """The bits of float32; zero instead of minus zero, which is EMPTY."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits)
