"""How the tiles of products end in Gluon: the bias, the epilogue, and where results are stored.

A tile has rows of W as its rows, and tokens as its columns; swapped, tokens are its rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.ops.cuda.epilogues import activate, activate_gated
from octavo.ops.cuda.two_float8 import in_two, scales_of_two


@gluon.jit
def over_tokens(values, SWAP: gl.constexpr):
    """Values per row of W, broadcast over tokens."""
    return values[None, :] if SWAP else values[:, None]


@gluon.jit
def over_rows(values, SWAP: gl.constexpr):
    """Values per token, broadcast over rows of W."""
    return values[:, None] if SWAP else values[None, :]


@gluon.jit
def _results(
    acc,
    up,
    bias,
    shape,
    adds_bias,
    SWAP: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """Sums with the bias, and the epilogue of them."""
    _, row, _, num_rows = shape
    ROWS: gl.constexpr = acc.shape[1] if SWAP else acc.shape[0]
    ROW_AXIS: gl.constexpr = 0 if SWAP else 1
    LAYOUT: gl.constexpr = acc.type.layout
    if HAS_BIAS:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(ROW_AXIS, LAYOUT))
        shift = gl.load(bias + rows, mask=(rows < num_rows) & adds_bias, other=0.0)
        acc += over_tokens(shift.to(gl.float32), SWAP)
        if GATED:
            shift = gl.load(bias + num_rows + rows, mask=rows < num_rows, other=0.0)
            up += over_tokens(shift.to(gl.float32), SWAP)
    return activate_gated(acc, up, EPILOGUE) if GATED else activate(acc, EPILOGUE)


@gluon.jit
def finish_in_two(
    acc,
    up,
    bias,
    out,
    scales,
    stride,
    shape,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """As `finish`, with results that are rounded to bfloat16, of which two e4m3 numbers each are
    made: to out [num_tokens, 2, num_rows], and a scale for the tile's rows of a token to scales
    [tiles, stride]."""
    token, row, num_tokens, num_rows = shape
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    acc = _results(acc, up, bias, shape, True, False, EPILOGUE, GATED, HAS_BIAS)
    # Neighbouring threads hold neighbouring rows of W, as in `finish`.
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = ROWS // 16
    STORE: gl.constexpr = gl.BlockedLayout([16, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    values = gl.convert_layout(acc.to(gl.bfloat16), STORE).to(gl.float32)
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
    tokens = token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, STORE))
    inside = (tokens < num_tokens)[None, :] & (rows < num_rows)[:, None]
    sizes = gl.abs(values)
    sizes = gl.where(sizes < float("inf"), sizes, float("inf"))  # of NaN, too
    largest = gl.max(gl.where(inside, sizes, 0.0), 0)
    factors, scale = scales_of_two(largest)
    scale = gl.where(largest < float("inf"), scale, float("nan"))
    high, low = in_two(values * factors[None, :])
    places = out + tokens.to(gl.int64)[None, :] * (2 * num_rows) + rows[:, None]
    gl.store(places, high, mask=inside)
    gl.store(places + num_rows, low, mask=inside)
    gl.store(scales + row // ROWS * stride + tokens, scale, mask=tokens < num_tokens)


@gluon.jit
def finish(
    acc,
    up,
    bias,
    out,
    shape,
    adds_bias,
    SWAP: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """Add the bias, apply the epilogue, and store the tile to out [num_tokens, num_rows]."""
    token, row, num_tokens, num_rows = shape
    ROWS: gl.constexpr = acc.shape[1] if SWAP else acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[0] if SWAP else acc.shape[1]
    ROW_AXIS: gl.constexpr = 0 if SWAP else 1
    acc = _results(acc, up, bias, shape, adds_bias, SWAP, EPILOGUE, GATED, HAS_BIAS)
    # From here on neighbouring threads hold neighbouring rows of W, which are adjacent in out.
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = min(32, ROWS // 8)
    STORE: gl.constexpr = (
        gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
        if SWAP
        else gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    )
    values = gl.convert_layout(acc.to(out.dtype.element_ty), STORE)
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(ROW_AXIS, STORE))
    tokens = token + gl.arange(0, TOKENS, layout=gl.SliceLayout(1 - ROW_AXIS, STORE))
    places = over_rows(tokens.to(gl.int64) * num_rows, SWAP) + over_tokens(rows, SWAP)
    inside = over_rows(tokens < num_tokens, SWAP) & over_tokens(rows < num_rows, SWAP)
    gl.store(out + places, values, mask=inside)
