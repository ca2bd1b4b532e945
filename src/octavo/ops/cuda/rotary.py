"""Head norms and rotary embedding of a few heads, inside other kernels.

Reference: RMSNorm and RotaryTable in PyTorch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.cuda.paged import REREAD


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
    c, s = load_angles(position, cos, sin, DIM_PAD, ROTARY_HALF, INTERLEAVED)
    w, partner_w = load_weights(weight, HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, HAS_NORM)
    x, y = read_heads(
        heads + row[:, None] * HEAD_DIM, rows_inside, HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED
    )
    return change_heads(
        x, y, w, partner_w, c, s, eps, HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, HAS_NORM
    )


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
    w, partner_w = load_weights(weight, HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, HAS_NORM)
    x, y = read_heads(
        heads + place[:, None], rows_inside, HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED
    )
    return change_heads(
        x, y, w, partner_w, c, s, eps, HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, HAS_NORM
    )


@triton.jit
def load_angles(
    position,
    cos,
    sin,
    DIM_PAD: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """cos and sin [1, DIM_PAD] of one position for `change_heads`: 1 and 0 beyond what rotates."""
    dim = tl.arange(0, DIM_PAD)
    c = tl.full([DIM_PAD], 1.0, tl.float32)
    s = tl.zeros([DIM_PAD], tl.float32)
    if ROTARY_HALF > 0:
        rotated = dim < 2 * ROTARY_HALF
        # Padding has no position; what it reads must be in the table all the same.
        first = tl.maximum(position, 0).to(tl.int64) * ROTARY_HALF
        angle = first + _pair_of(dim, ROTARY_HALF, INTERLEAVED)
        c = tl.load(cos + angle, mask=rotated, other=1.0, eviction_policy=REREAD)
        s = tl.load(sin + angle, mask=rotated, other=0.0, eviction_policy=REREAD)
    return c[None, :], s[None, :]


@triton.jit
def partner_of(dim, ROTARY_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The element that an element is rotated with."""
    if INTERLEAVED:
        return (dim ^ 1) % (2 * ROTARY_HALF)
    else:
        return (dim + ROTARY_HALF) % (2 * ROTARY_HALF)


@triton.jit
def load_weights(
    weight,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """A head norm's weights [1, DIM_PAD] for `change_heads`: each element's, and its partner's."""
    w = 1.0
    partner_w = 1.0
    if HAS_NORM:
        dim = tl.arange(0, DIM_PAD)
        w = tl.load(weight + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        if ROTARY_HALF > 0:
            partner = partner_of(dim, ROTARY_HALF, INTERLEAVED)
            partner_w = tl.load(weight + partner).to(tl.float32)[None, :]
    return w, partner_w


@triton.jit
def read_heads(
    base,
    rows_inside,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_ORDER: tl.constexpr = False,
):
    """Heads at base [rows, 1] for `change_heads`: each element, and its partner.

    IN_ORDER: asked for in the order of the calls. Otherwise ptxas saves registers by asking for
    what is used later only when the rest has come.
    """
    dim = tl.arange(0, DIM_PAD)
    inside = rows_inside[:, None] & (dim < HEAD_DIM)[None, :]
    x = tl.load(base + dim[None, :], mask=inside, other=0.0, volatile=IN_ORDER)
    # Each element also loads the one that it is rotated with: no exchange between threads.
    y = x
    if ROTARY_HALF > 0:
        partner = partner_of(dim, ROTARY_HALF, INTERLEAVED)
        y = tl.load(base + partner[None, :], mask=inside, other=0.0, volatile=IN_ORDER)
    return x, y


@triton.jit
def change_heads(
    x,
    y,
    w,
    partner_w,
    c,
    s,
    eps,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Normalised and rotated heads of x and y, which `read_heads` has read; c, s [rows or 1,
    DIM_PAD]: cos and sin, 1 and 0 beyond."""
    dim = tl.arange(0, DIM_PAD)
    dtype = x.dtype
    factor = tl.zeros([x.shape[0]], tl.float32)
    if HAS_NORM:
        wide = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)
        x = (wide * factor[:, None] * w).to(dtype)
    if ROTARY_HALF > 0:
        if HAS_NORM:
            y = (y.to(tl.float32) * factor[:, None] * partner_w).to(dtype)
        first_of_pair = dim % 2 == 0 if INTERLEAVED else dim < ROTARY_HALF
        s = tl.where(first_of_pair[None, :], -s, s)
        x = (x.to(tl.float32) * c + y.to(tl.float32) * s).to(dtype)
    return x


@triton.jit
def normed_values(v, eps, HEAD_DIM: tl.constexpr):
    """Heads of values [rows, DIM_PAD], 0 beyond HEAD_DIM, by their RMS norm without a scale; as
    they are where eps is None."""
    if eps is not None:
        wide = v.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)
        v = (wide * factor[:, None]).to(v.dtype)
    return v
