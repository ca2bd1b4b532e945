"""Head norm and rotary embedding of a few heads, inside other kernels.

Reference: RMSNorm and RotaryTable in PyTorch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pair_of(dim, ROTARY_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Which pair, and so which angle, an element belongs to; see RotaryTable."""
    if INTERLEAVED:
        return dim // 2
    else:
        return dim % ROTARY_HALF


@triton.jit
def load_heads(
    heads,
    row,
    rows_inside,
    position,
    cos,
    sin,
    weight,
    eps,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """[len(row), DIM_PAD]: heads `row` of the dense heads at `heads`, normalised and rotated.

    In their own dtype, rounded after the norm and after the rotation; 0 outside.
    """
    dim = tl.arange(0, DIM_PAD)
    c = tl.full([DIM_PAD], 1.0, tl.float32)
    s = tl.zeros([DIM_PAD], tl.float32)
    if ROTARY_HALF > 0:
        rotated = dim < 2 * ROTARY_HALF
        # Padding has no position; what it reads must be in the table all the same.
        first = tl.maximum(position, 0).to(tl.int64) * ROTARY_HALF
        angle = first + _pair_of(dim, ROTARY_HALF, INTERLEAVED)
        c = tl.load(cos + angle, mask=rotated, other=1.0)
        s = tl.load(sin + angle, mask=rotated, other=0.0)
    base = heads + row[:, None] * HEAD_DIM
    return _change(
        base, rows_inside, c[None, :], s[None, :], weight, eps,
        HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, HAS_NORM,
    )  # fmt: skip


@triton.jit
def load_rows(
    heads,
    place,
    rows_inside,
    position,
    cos,
    sin,
    weight,
    eps,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """As `load_heads`, of several tokens: row i is the head at heads + place[i], at position[i]."""
    dim = tl.arange(0, DIM_PAD)
    c = tl.full([1, DIM_PAD], 1.0, tl.float32)
    s = tl.zeros([1, DIM_PAD], tl.float32)
    if ROTARY_HALF > 0:
        rotated = rows_inside[:, None] & (dim < 2 * ROTARY_HALF)[None, :]
        first = position[:, None].to(tl.int64) * ROTARY_HALF
        angle = first + _pair_of(dim, ROTARY_HALF, INTERLEAVED)[None, :]
        c = tl.load(cos + angle, mask=rotated, other=1.0)
        s = tl.load(sin + angle, mask=rotated, other=0.0)
    return _change(
        heads + place[:, None], rows_inside, c, s, weight, eps,
        HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, HAS_NORM,
    )  # fmt: skip


@triton.jit
def _change(
    base,
    rows_inside,
    c,
    s,
    weight,
    eps,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Heads at base [rows, 1]; c, s [rows or 1, DIM_PAD]: cos and sin, 1 and 0 beyond."""
    dim = tl.arange(0, DIM_PAD)
    inside = rows_inside[:, None] & (dim < HEAD_DIM)[None, :]
    x = tl.load(base + dim[None, :], mask=inside, other=0.0)
    dtype = x.dtype
    factor = tl.zeros([rows_inside.shape[0]], tl.float32)
    if HAS_NORM:
        wide = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)
        w = tl.load(weight + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
        x = (wide * factor[:, None] * w[None, :]).to(dtype)
    if ROTARY_HALF > 0:
        # Each element also loads the one that it is rotated with: no exchange between threads.
        if INTERLEAVED:
            partner = (dim ^ 1) % (2 * ROTARY_HALF)
        else:
            partner = (dim + ROTARY_HALF) % (2 * ROTARY_HALF)
        y = tl.load(base + partner[None, :], mask=inside, other=0.0)
        if HAS_NORM:
            w = tl.load(weight + partner).to(tl.float32)
            y = (y.to(tl.float32) * factor[:, None] * w[None, :]).to(dtype)
        first_of_pair = dim % 2 == 0 if INTERLEAVED else dim < ROTARY_HALF
        s = tl.where(first_of_pair[None, :], -s, s)
        x = (x.to(tl.float32) * c + y.to(tl.float32) * s).to(dtype)
    return x
