"""What the attention kernels have in common: where keys lie in a paged cache, and their softmax.

A block of one layer is [num_kv_heads, K or V, block_size, head_dim], so that what one KV head reads
of a block is contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.ops.base import KVScales

ITEM_FIELDS = 8  # int32s per work item
PREFILL_FIELDS = 11  # of one of prompts
# Eviction priority of what each layer of a step reads again: it stays in the L2 cache while weights
# pass through.
REREAD = tl.constexpr("evict_last")
MEMBER_FIELDS = 3  # int32s per member of a cascade segment
# Weights are at most 2**15 where they are multiplied as float16, whose smallest number is 2**-24.
FLOAT16_WEIGHT = tl.constexpr(15.0)
LOWEST = tl.constexpr(-1.0e30)  # finite, so that rows which see no key yet make no NaN


@triton.jit
def stored(x, inverse_scale):
    """K or V as the cache holds it: itself, or e4m3 where there is a scale (KVScales).

    Written out in integers, since Triton's interpreter rounds to e4m3 in another way.
    """
    if inverse_scale is None:
        return x
    else:
        scaled = x.to(tl.float32) * inverse_scale
        bits = scaled.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # From 2**-6 on: the upper 3 bits of the mantissa, rounded to even, and another bias.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # Below, multiples of 2**-9: an addition to 2**14 rounds to them.
        shifted = tl.abs(scaled) + 16384.0
        subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, subnormal, normal)
        code = tl.where(size >= 0x43E00000, 0x7E, code)  # 448, and all that is larger
        code = tl.where(size > 0x7F800000, 0x7F, code)  # NaN
        code = code | ((bits >> 24) & 0x80)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def in_float16(q):
    """bfloat16 queries [ROWS, DIM] in float16, and what their products with cached keys are then to
    be multiplied by, [ROWS].

    Every e4m3 number is a float16, into which a GPU converts two by one instruction; into bfloat16
    it takes several for each. So queries become float16, too, after each row is scaled by a power
    of 2, such that its largest element has the largest exponent but one. What is lost are bits of
    elements below 2**-29 of that one.
    """
    wide = q.to(tl.float32)
    down, up = float16_factors(tl.max(tl.abs(wide), 1))
    return (wide * down[:, None]).to(tl.float16), up


@triton.jit
def float16_factors(largest):
    """What rows with these largest sizes are multiplied by to become float16, and its inverse; see
    `in_float16`."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 15), 252)
    # From 2**(exponent - 127) to 2**14, and back; NaN stays NaN.
    down = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return down, up


# Bytes 0, 2, 1 and 3 of two int16; then two numbers at once.
_HALVES = tl.constexpr("""
{
    .reg .b32 ordered;
    .reg .b16 low, high;
    prmt.b32 ordered, $2, 0, 0x3120;
    mov.b32 {low, high}, ordered;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}
""")
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def halves(words, DTYPE: tl.constexpr):
    """The two e4m3 numbers of each int16, the one in the lower bits first, as DTYPE."""
    if (tl.float16 == DTYPE) and (not _IS_INTERPRETED):
        return tl.inline_asm_elementwise(
            _HALVES, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        low = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        high = ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def unscaled(x, value_scale):
    """A weighted mean of cached values, as one of the values themselves."""
    if value_scale is None:
        return x
    else:
        return x * value_scale


def scale_arguments(
    scales: KVScales | None,
) -> tuple[float, float, float] | tuple[None, None, None]:
    """The inverse scales of keys and values, and the scale of values, as kernels take them.

    The scale of keys is a part of KernelScores.
    """
    if scales is None:
        return None, None, None
    return 1 / scales.key, 1 / scales.value, scales.value


def precision_of(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies: float32 exactly."""
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def tile_blocks(table, first, end, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Ids of the blocks that hold the keys first .. first + TILE - 1: int32 [TILE], or one for all.

    `first` is a multiple of `tile_alignment`. Past `end` it is the null block, which exists.
    """
    lane = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        return tl.load(
            table + first // BLOCK_SIZE, mask=first < end, other=0, eviction_policy=REREAD
        )
    elif TILE % BLOCK_SIZE == 0:
        inside = first + lane // BLOCK_SIZE * BLOCK_SIZE < end
        index = first // BLOCK_SIZE + lane // BLOCK_SIZE
        return tl.load(table + index, mask=inside, other=0, eviction_policy=REREAD)
    else:
        key = first + lane
        return tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0, eviction_policy=REREAD)


@triton.jit
def key_offsets(
    blocks,
    first,
    block_stride,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """int64 [TILE]: where the keys of `tile_blocks` lie, in elements from the layer's start."""
    lane = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        inside = first % BLOCK_SIZE + lane
    elif TILE % BLOCK_SIZE == 0:
        inside = lane % BLOCK_SIZE
    else:
        inside = (first + lane) % BLOCK_SIZE
    return blocks.to(tl.int64) * block_stride + inside * HEAD_DIM


def tile_alignment(tile: int, block_size: int) -> int:
    """What a tile's first key must be a multiple of."""
    if block_size % tile == 0:
        return tile
    return block_size if tile % block_size == 0 else 1
