"""Inputs as two e4m3 numbers each, for products with weights in e4m3 that lose nothing of them.

A bfloat16 has 8 bits, of which the first number takes 4, and the second one the others with a sign
of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.ops.quantized import Rounding

# Products of e4m3 that tensor cores add up: they keep some 14 bits.
MOST_ADDED = Rounding.IN_TWO.group


@gluon.jit
def scales_of_two(largest):
    """What inputs are multiplied by before `in_two`, where `largest` is the largest of their sizes,
    and what products are multiplied by: powers of two, with which it lies between 128 and 256.

    They are made of their bits: with logarithms that takes more instructions.
    """
    exponents = gl.maximum(largest, 1e-30).to(gl.int32, bitcast=True) >> 23
    factors = ((261 - exponents) << 23).to(gl.float32, bitcast=True)
    factors = gl.where(exponents < 255, factors, float("nan"))  # of infinity
    return factors, ((exponents - 7) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def in_two(scaled):
    """float32 inputs of at most 256 -> the e4m3 numbers that add up to them.

    The first one is rounded to e4m3's bits as an integer, not converted and back again: the ptxas
    of Triton 3.6 loses half of the numbers that are. What is below e4m3's normal numbers, both may
    miss by 2^-10 each.
    """
    bits = scaled.to(gl.int32, bitcast=True)
    high = ((bits + 0x80000) & -0x100000).to(gl.float32, bitcast=True)
    return high.to(gl.float8e4nv), (scaled - high).to(gl.float8e4nv)
