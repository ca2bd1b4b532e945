"""GEMM on Hopper of few tokens with W in packed integers of 4 bits, bound by reading W.

As linear_hopper.py: one warp loads tiles of W and x by TMA, STAGES deep, and warpgroups multiply.
These turn words into integers of 8 bits, by three instructions for eight weights, in the registers
of the tensor cores' left operand. Inputs are two such integers each, 256 high + low, which are two
columns of the right operand (Rounding.INTEGERS): whoever wrote them has put them in the order that
words are unpacked in. Sums of a block of 128 inputs are exact; they are multiplied by the scales of
weights and inputs, and added up in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.ops.cuda.linear_gemv_packed import _UNPACK
from octavo.ops.cuda.linear_hopper import _activate_gated, _barrier, _fetch_tile, _finish
from octavo.ops.cuda.linear_hopper_quantized import _halves, _interleave
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.quantize import _LARGEST, _ROUNDER, _SMALLEST
from octavo.ops.cuda.stored_weights import BLOCK, INT4, StoredWeight
from octavo.ops.epilogue import Epilogue
from octavo.ops.quantized import RoundedInputs

LINE = 32  # words of two blocks of a row: what TMA fetches of a row
WARPGROUP_ROWS = 64

_BLOCK = tl.constexpr(BLOCK)
_LINE = tl.constexpr(LINE)
_WARPGROUP_ROWS = tl.constexpr(WARPGROUP_ROWS)
# A name that changed between Triton 3.6 and 3.9.
_IS_PUBLIC = tl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
_REGISTERS = 65536  # per SM


@dataclass(frozen=True, slots=True)
class PackedTiles:
    """A configuration of the kernel."""

    tokens: int  # BM
    warpgroups: int  # that have 64 rows each
    blocks: int  # of 128 inputs in a stage
    stages: int
    ways: int = 1  # partitions that multiply
    splits: int = 1  # of K
    per_sm: int = 1  # programs that fit on one SM
    early: bool = True  # PDL: the next kernel may start from the beginning
    tiled: bool = False


def linear_few_packed(
    x: RoundedInputs,
    stored: StoredWeight,
    bias: Tensor | None,
    out: Tensor | RoundedInputs,
    epilogue: Epilogue,
    tiles: PackedTiles,
    is_partial: bool,
    workspace: tuple[Tensor, Tensor],
) -> None:
    results, out_scales = out if isinstance(out, RoundedInputs) else (out, None)
    values, x_scales = x
    num_tokens, _, size = values.shape
    num_rows = results.shape[-1]
    num_blocks = size // BLOCK
    assert size % BLOCK == 0
    assert stored.format == INT4
    kinds = 2 * len(x_scales) // num_blocks
    assert kinds in (2, 4)
    group_blocks = stored.group // BLOCK if stored.group else triton.cdiv(num_blocks, 4) * 4
    rows = WARPGROUP_ROWS if epilogue.is_gated else WARPGROUP_ROWS * tiles.warpgroups
    grid = (triton.cdiv(num_tokens, tiles.tokens), triton.cdiv(num_rows, rows), tiles.splits)
    reduces = tiles.splits > 1 and not is_partial
    warps = 4 * tiles.warpgroups
    total = warps + 4 * (tiles.ways - 1) + 4
    own = min(_REGISTERS // (32 * total * tiles.per_sm) // 8 * 8, 232)
    weight = stored.weight.view(-1, LINE) if tiles.tiled else stored.weight
    block = [WARPGROUP_ROWS // 2 if tiles.tiled else WARPGROUP_ROWS, LINE]
    of_groups = [tiles.blocks, WARPGROUP_ROWS]
    sums, arrivals = workspace
    linear_packed_kernel[grid](
        packed_descriptor(values.view(-1, size), [2 * tiles.tokens, BLOCK], 128),
        packed_descriptor(x_scales.flatten(0, 1), [kinds * tiles.blocks, tiles.tokens], 0),
        packed_descriptor(weight, block, 128),
        packed_descriptor(_by_group(stored.scales, stored), of_groups, 0),
        None if stored.zeros is None else packed_descriptor(_by_group(stored.zeros, stored), of_groups, 0),
        bias,
        results,
        out_scales,
        sums,
        arrivals,
        num_tokens,
        num_rows,
        num_blocks,
        tiles.splits,
        group_blocks,
        0 if out_scales is None else out_scales.stride(1),
        STAGES=tiles.stages,
        BLOCKS=tiles.blocks,
        HALVES=tiles.warpgroups,
        WAYS=tiles.ways,
        REGISTERS=max(24, (own * total - 24 * 4) // (total - 4) // 8 * 8),
        TILED=tiles.tiled,
        SPLITS=tiles.splits if reduces else 1,
        PARTIAL=is_partial,
        GROUP_BLOCKS=min(group_blocks, tiles.blocks),
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        EARLY=tiles.early,
        num_warps=warps,
        maxnreg=own,
        **launch_options(values.device),
    )


def empty_integers(num_tokens: int, size: int, device: torch.device) -> RoundedInputs:
    """What gates and ups write for the next product: `size` inputs with scales for groups of as
    many outputs as a tile has."""
    values = torch.empty((num_tokens, 2, size), dtype=torch.int8, device=device)
    shape = size // WARPGROUP_ROWS, 2, triton.cdiv(num_tokens, 4) * 4  # TMA needs whole 16 bytes
    return RoundedInputs(values, torch.empty(shape, dtype=torch.float32, device=device))


def _by_group(values: Tensor, stored: StoredWeight) -> Tensor:
    """Scales or zero points [groups, rows] with a stride that TMA takes, though there be one group."""
    return values.as_strided((stored.num_groups, stored.shape[0]), (stored.shape[0], 1))


def packed_descriptor(matrix: Tensor, block: list[int], swizzle: int) -> Any:
    """The TMA descriptor for fetching such blocks of `matrix`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, block, _layout(swizzle, matrix.dtype, len(block)))


@cache
def _layout(swizzle: int, dtype: torch.dtype, rank: int) -> Any:
    return gl.NVMMASharedLayout(swizzle, 8 * dtype.itemsize, rank=rank)


@gluon.jit
def _reshaped(tiles, SHAPE: gl.constexpr):
    """Shared memory in another shape."""
    if _IS_PUBLIC:
        result = tiles.reinterpret(tiles.dtype, SHAPE, tiles.layout)
    else:
        result = tiles._reinterpret(tiles.dtype, SHAPE, tiles.layout)
    return result


@gluon.jit
def _fetch_weights(sources, buffers, bar, place, stage, block, STAGES: gl.constexpr, TILED: gl.constexpr):
    """A stage's words, scales and zero points."""
    weight, scales, zeros = sources
    tiles, scale_tiles, zero_tiles = buffers
    row, second_row, num_blocks, group_blocks = place
    HALVES: gl.constexpr = scale_tiles.shape[0] // STAGES
    BOXES: gl.constexpr = tiles.shape[0] // (STAGES * HALVES)
    for half in gl.static_range(HALVES):
        own = second_row if half else row
        for box in gl.static_range(BOXES):
            target = tiles.index((stage * BOXES + box) * HALVES + half)
            if TILED:
                line = (own // _WARPGROUP_ROWS * num_blocks + block + box) * _LINE
                _fetch_tile(weight, [line, 0], bar, target)
            else:
                _fetch_tile(weight, [own, (block // 2 + box) * _LINE], bar, target)
        place_in = [block // group_blocks, own]
        _fetch_tile(scales, place_in, bar, scale_tiles.index(stage * HALVES + half))
        if zeros is not None:
            _fetch_tile(zeros, place_in, bar, zero_tiles.index(stage * HALVES + half))


@gluon.jit
def _fetch_inputs(x, x_scales, x_tiles, x_scale_tiles, bar, token, stage, block):
    BLOCKS: gl.constexpr = x_tiles.shape[0] // x_scale_tiles.shape[0]
    for j in gl.static_range(BLOCKS):
        target = x_tiles.index(stage * BLOCKS + j)
        _fetch_tile(x, [2 * token, (block + j) * _BLOCK], bar, target)
    KINDS: gl.constexpr = x_scale_tiles.shape[1] // BLOCKS
    _fetch_tile(x_scales, [KINDS * block, token], bar, x_scale_tiles.index(stage))


@gluon.jit
def _produce(
    x,
    x_scales,
    sources,
    buffers,
    x_buffers,
    barriers,
    place,
    token,
    first,
    count,
    TILED: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """The partition that loads."""
    weight, scales, zeros = sources
    ready, free = barriers
    x_tiles, x_scale_tiles = x_buffers
    STAGES: gl.constexpr = ready.shape[0]
    BLOCKS: gl.constexpr = x_tiles.shape[0] // STAGES
    HALVES: gl.constexpr = buffers[1].shape[0] // STAGES
    BOXES: gl.constexpr = buffers[0].shape[0] // (STAGES * HALVES)
    OF_GROUPS: gl.constexpr = scales.block_type.nbytes + (
        0 if zeros is None else zeros.block_type.nbytes
    )
    OF_INPUTS: gl.constexpr = BLOCKS * x.block_type.nbytes + x_scales.block_type.nbytes
    BYTES: gl.constexpr = HALVES * (BOXES * weight.block_type.nbytes + OF_GROUPS) + OF_INPUTS
    ahead = gl.minimum(count, STAGES)
    for i in range(ahead):
        bar = ready.index(i)
        mbarrier.expect(bar, BYTES)
        _fetch_weights(sources, buffers, bar, place, i, (first + i) * BLOCKS, STAGES, TILED)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in range(ahead):
        block = (first + i) * BLOCKS
        _fetch_inputs(x, x_scales, x_tiles, x_scale_tiles, ready.index(i), token, i, block)
    for i in range(ahead, count):
        stage = i % STAGES
        bar = ready.index(stage)
        block = (first + i) * BLOCKS
        mbarrier.wait(free.index(stage), (i // STAGES - 1) & 1)
        mbarrier.expect(bar, BYTES)
        _fetch_weights(sources, buffers, bar, place, stage, block, STAGES, TILED)
        _fetch_inputs(x, x_scales, x_tiles, x_scale_tiles, bar, token, stage, block)
    if PDL and not EARLY:
        # All loads of W are issued: only now may the next kernel's weights compete with ours.
        tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def _four_columns(values):
    even, odd = gl.split(values.reshape([values.shape[0], 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def _columns(values):
    """[n, 1, 2, 4 or 8] values as a tuple of columns."""
    COUNT: gl.constexpr = values.shape[1]
    if COUNT == 1:
        found = (values.reshape([values.shape[0]]),)
    elif COUNT == 2:
        found = gl.split(values)
    elif COUNT == 4:
        found = _four_columns(values)
    else:
        even, odd = gl.split(values.reshape([values.shape[0], 4, 2]))
        a, c, e, g = _four_columns(even)
        b, d, f, h = _four_columns(odd)
        found = (a, b, c, d, e, f, g, h)
    return found


@gluon.jit
def _words(tiles, box, TILED: gl.constexpr):
    """The words of one block, or two: [rows, 16] each."""
    HALVES: gl.constexpr = gl.num_warps() // 4
    ROWS: gl.constexpr = _WARPGROUP_ROWS * HALVES
    WARPS: gl.constexpr = [[16, 0], [32, 0]] + ([[64, 0]] if HALVES == 2 else [])
    ONE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        WARPS,
        [],
        [ROWS, 16],
    )
    if TILED:
        LINES: gl.constexpr = ROWS // 2
        LOADED: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [4, 0]],
            [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
            [[8, 0], [16, 0]] + ([[32, 0]] if HALVES == 2 else []),
            [],
            [LINES, _LINE],
        )
        own = _reshaped(tiles, [tiles.shape[0] // HALVES, LINES, _LINE]).index(box)
        words = own.load(LOADED).reshape([ROWS, 16])
        found = (gl.convert_layout(words, ONE, assert_trivial=True),)
    else:
        PAIR: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [8, 0], [0, 16]],
            [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
            WARPS,
            [],
            [ROWS, _LINE],
        )
        own = _reshaped(tiles, [tiles.shape[0] // HALVES, ROWS, _LINE]).index(box)
        first, second = gl.split(own.load(PAIR).reshape([ROWS, 2, 16]).permute((0, 2, 1)))
        found = (
            gl.convert_layout(first, ONE, assert_trivial=True),
            gl.convert_layout(second, ONE, assert_trivial=True),
        )
    return found


@gluon.jit
def _of_rows(tiles, stage, LAYOUT: gl.constexpr):
    """Scales or zero points of the groups of a stage: of each, float32 [rows]."""
    HALVES: gl.constexpr = gl.num_warps() // 4
    ROWS: gl.constexpr = _WARPGROUP_ROWS * HALVES
    GROUPS: gl.constexpr = tiles.shape[1]
    MANY: gl.constexpr = [[1, 0], [2, 0]] if GROUPS == 4 else ([[1, 0]] if GROUPS == 2 else [])
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 8]] + MANY,
        [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 16], [0, 32]] + ([[GROUPS, 0]] if HALVES == 2 else []),
        [],
        [HALVES * GROUPS, _WARPGROUP_ROWS],
    )
    SHAPE: gl.constexpr = [tiles.shape[0] // HALVES, HALVES * GROUPS, _WARPGROUP_ROWS]
    values = _reshaped(tiles, SHAPE).index(stage).load(LOADED).to(gl.float32)
    values = values.reshape([HALVES, GROUPS, _WARPGROUP_ROWS]).permute((0, 2, 1))
    columns = _columns(values.reshape([ROWS, GROUPS]))
    found = ()
    for i in gl.static_range(GROUPS):
        one = gl.convert_layout(columns[i], gl.SliceLayout(1, LAYOUT), assert_trivial=True)
        found += (one,)  # type: ignore[assignment]
    return found


@gluon.jit
def _of_tokens(tiles, stage, LAYOUT: gl.constexpr):
    """Scales and totals of a stage's groups of inputs, float32 [tokens] each."""
    KINDS: gl.constexpr = tiles.shape[1]  # two for each group
    TOKENS: gl.constexpr = tiles.shape[2]
    MANY: gl.constexpr = (
        [[1, 0], [2, 0]]
        + ([[4, 0]] if KINDS > 4 else [])
        + ([[8, 0]] if KINDS > 8 else [])
    )
    MORE: gl.constexpr = ([[0, 4]] if TOKENS > 4 else []) + ([[0, 8]] if TOKENS > 8 else [])
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        MORE + MANY,
        [[0, 1], [0, 2], [0, 0], [0, 0], [0, 0]],
        [[0, 0], [0, 0]] + ([[0, 0]] if gl.num_warps() == 8 else []),
        [],
        [KINDS, TOKENS],
    )
    values = tiles.index(stage).load(LOADED).reshape([KINDS // 2, 2, TOKENS]).permute((0, 2, 1))
    scales, totals = gl.split(values)
    scales = _columns(scales.permute((1, 0)))
    totals = _columns(totals.permute((1, 0)))
    found = ()
    for i in gl.static_range(KINDS // 2):
        one = gl.convert_layout(scales[i], gl.SliceLayout(0, LAYOUT), assert_trivial=True)
        two = gl.convert_layout(totals[i], gl.SliceLayout(0, LAYOUT), assert_trivial=True)
        found += ((one, two),)  # type: ignore[assignment]
    return found


@gluon.jit
def _left(words, LAYOUT: gl.constexpr, HALVES: gl.constexpr):
    """Words [rows, 16] -> 16 (q - 8), int8 [rows, 128] or both halves of it, as left operands."""
    parts = gl.inline_asm_elementwise(
        _UNPACK,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [words],
        dtype=(gl.int8,) * 8,
        is_pure=True,
        pack=4,
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, k_width=4)
    a, b, e, f, c, d, g, h = parts  # of the highest bit of an input's place: octets of four words
    if HALVES == 1:
        whole = _interleave((a, b, c, d, e, f, g, h))
        found = (gl.convert_layout(whole, OPERAND, assert_trivial=True),)
    else:
        found = (
            gl.convert_layout(_interleave((a, b, c, d)), OPERAND, assert_trivial=True),
            gl.convert_layout(_interleave((e, f, g, h)), OPERAND, assert_trivial=True),
        )
    return found


@gluon.jit
def _both(sums):
    """[rows, 2 tokens], of both numbers of each token's inputs -> [rows, tokens]."""
    high, low = gl.split(sums.reshape([sums.shape[0], sums.shape[1] // 2, 2]))
    return (high * 256 + low).to(gl.float32)


@gluon.jit
def _scaled(products, of_tokens, factor, shift):
    """What a block, or a half of one, adds to the sums, 16 times.

    Args:
        products: of integers.
        of_tokens: scales and totals of the inputs.
        factor, shift: scales of W, and its zero points, if there are any.
    """
    scale, total = of_tokens
    values = _both(products) * scale[None, :]
    if shift is not None:
        values -= shift[:, None] * (total * 16.0)[None, :]
    return values * factor[:, None]


@gluon.jit
def _sums(
    buffers,
    x_buffers,
    barriers,
    count,
    way,
    WAYS: gl.constexpr,
    TILED: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
):
    """What some of the stages add up to, times 16."""
    tiles, scale_tiles, zero_tiles = buffers
    x_tiles, x_scale_tiles = x_buffers
    ready, free = barriers
    STAGES: gl.constexpr = ready.shape[0]
    BLOCKS: gl.constexpr = x_tiles.shape[0] // STAGES
    ROWS: gl.constexpr = 16 * gl.num_warps()
    COLUMNS: gl.constexpr = x_tiles.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, COLUMNS, 32]
    )
    X_GROUPS: gl.constexpr = x_scale_tiles.shape[1] // (2 * BLOCKS)  # of a block
    WIDTH: gl.constexpr = _BLOCK // X_GROUPS
    nothing = gl.zeros([ROWS, COLUMNS], gl.int32, LAYOUT)
    acc = _both(nothing)
    ADDED: gl.constexpr = acc.type.layout
    for i in range(way, count, WAYS):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        factors = _of_rows(scale_tiles, stage, ADDED)
        shifts = _of_rows(zero_tiles, stage, ADDED) if HAS_ZEROS else ()
        of_tokens = _of_tokens(x_scale_tiles, stage, ADDED)
        parts = ()
        for j in gl.static_range(BLOCKS + 1):
            # A block is unpacked while the one before it is multiplied.
            if j < BLOCKS:
                if TILED:
                    (words,) = _words(tiles, stage * BLOCKS + j, TILED)
                elif j % 2 == 0:
                    words, second_words = _words(tiles, (stage * BLOCKS + j) // 2, TILED)
                else:
                    words = second_words
                lefts = _left(words, LAYOUT, X_GROUPS)
                inputs = x_tiles.index(stage * BLOCKS + j)
                for half in gl.static_range(X_GROUPS):
                    right = inputs.slice(half * WIDTH, WIDTH, 1).permute((1, 0))
                    part = warpgroup_mma(lefts[half], right, nothing, use_acc=False, is_async=True)
                    parts += (part,)  # type: ignore[assignment]
            if j > 0:
                factor = factors[(j - 1) // GROUP_BLOCKS]
                shift = shifts[(j - 1) // GROUP_BLOCKS] if HAS_ZEROS else None
                for half in gl.static_range(X_GROUPS):
                    done = warpgroup_mma_wait(
                        X_GROUPS - 1 - half + (X_GROUPS if j < BLOCKS else 0),
                        deps=[parts[(j - 1) * X_GROUPS + half]],
                    )
                    acc += _scaled(done, of_tokens[(j - 1) * X_GROUPS + half], factor, shift)
        mbarrier.arrive(free.index(stage), count=1)
    return acc


@gluon.jit
def _finish_in_integers(
    gates, ups, bias, targets, shape, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr
):
    """As `_finish` of linear_hopper.py, with results as two integers each, of groups of as many
    outputs as the tile has: as `round_inputs` makes them, but that they are not rounded before."""
    token, row, num_tokens, num_rows = shape
    out, out_scales, out_stride = targets
    LAYOUT: gl.constexpr = gates.type.layout
    rows = row + gl.arange(0, gates.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    tokens = token + gl.arange(0, gates.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    if HAS_BIAS:
        gates += gl.load(bias + rows).to(gl.float32)[:, None]
        ups += gl.load(bias + num_rows + rows).to(gl.float32)[:, None]
    results = _activate_gated(gates, ups, EPILOGUE)
    sizes = results.to(gl.int32, bitcast=True) & 0x7FFFFFFF  # in the order of numbers, NaN on top
    largest = gl.maximum(gl.max(sizes, 0), _SMALLEST).to(gl.float32, bitcast=True)
    sums = results * (_LARGEST / largest)[None, :] + _ROUNDER
    scale = largest / _LARGEST
    total = gl.sum(sums - _ROUNDER, 0) * scale
    bits = sums.to(gl.int32, bitcast=True)
    # Bits of a place as `_in_order_of_words` of quantize.py moves them.
    places = (rows & -48) | ((rows >> 5) & 1) | ((rows & 2) << 4) | (rows & 12) | ((rows & 1) << 1)
    target = out + (tokens.to(gl.int64) * (2 * num_rows))[None, :] + places[:, None]
    is_token = (tokens < num_tokens)[None, :]
    gl.store(target, (bits >> 8).to(gl.int8), mask=is_token)
    gl.store(target + num_rows, (bits ^ 0x80).to(gl.int8), mask=is_token)
    of_group = out_scales + row // _WARPGROUP_ROWS * 2 * out_stride + tokens
    gl.store(of_group, scale, mask=tokens < num_tokens)
    gl.store(of_group + out_stride, total, mask=tokens < num_tokens)


@gluon.jit
def _first_sums(
    buffers,
    x_buffers,
    barriers,
    count,
    WAYS: gl.constexpr,
    TILED: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
):
    acc = _sums(buffers, x_buffers, barriers, count, 0, WAYS, TILED, GROUP_BLOCKS, HAS_ZEROS)
    return (acc,)


@gluon.jit
def _other_sums(
    buffers,
    x_buffers,
    barriers,
    others,
    count,
    WAYS: gl.constexpr,
    TILED: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
):
    """The second of two partitions that multiply."""
    acc = _sums(buffers, x_buffers, barriers, count, 1, WAYS, TILED, GROUP_BLOCKS, HAS_ZEROS)
    others.store(acc)


@gluon.jit(do_not_specialize=["num_tokens", "num_splits"])
def linear_packed_kernel(
    x,
    x_scales,
    weight,
    scales,
    zeros,
    bias,
    out,
    out_scales,
    sums,
    arrivals,
    num_tokens,
    num_rows,
    num_blocks,
    num_splits,
    group_blocks,
    out_stride,
    STAGES: gl.constexpr,
    BLOCKS: gl.constexpr,
    HALVES: gl.constexpr,
    WAYS: gl.constexpr,
    REGISTERS: gl.constexpr,
    TILED: gl.constexpr,
    SPLITS: gl.constexpr,
    PARTIAL: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_tokens, num_rows].

    Args:
        x, x_scales: descriptors of what Rounding.INTEGERS makes of inputs: int8 [2 num_tokens,
            in_features], and float32 [2 num_blocks, at least num_tokens].
        weight: descriptor of words as of pack_integers.
        scales, zeros: descriptors of [groups, num_rows or 2 num_rows]; zeros may be None.
        out: with PARTIAL float32 [num_splits, num_tokens, num_rows].
        sums: float32 workspace, for SPLITS > 1.
        arrivals: int32, 0 for every tile before and after the kernel.
        num_blocks: of 128 inputs.
        group_blocks: how many of them share scales.
        BLOCKS: of a stage.
        HALVES: warpgroups with 64 rows each; two with GATED.
        WAYS: how many partitions share the stages.
        GROUP_BLOCKS: how many of the blocks of a stage share scales.
    """
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    HAS_ZEROS: gl.constexpr = zeros is not None
    ROWS: gl.constexpr = _WARPGROUP_ROWS * HALVES
    BN: gl.constexpr = _WARPGROUP_ROWS if GATED else ROWS  # results per token
    COLUMNS: gl.constexpr = x.block_type.shape[0]
    BM: gl.constexpr = COLUMNS // 2
    BOXES: gl.constexpr = BLOCKS if TILED else BLOCKS // 2
    token = gl.program_id(0) * BM
    tile = gl.program_id(1)
    split = gl.program_id(2)
    row = tile * BN
    second_row = row + (num_rows if GATED else _WARPGROUP_ROWS)
    num_steps = gl.cdiv(num_blocks, BLOCKS)
    per_split = gl.cdiv(num_steps, num_splits)
    first = split * per_split
    count = gl.minimum(first + per_split, num_steps) - first

    tiles = gl.allocate_shared_memory(
        weight.dtype, [STAGES * BOXES * HALVES, weight.block_type.shape[0], weight.block_type.shape[1]], weight.layout
    )
    scale_tiles = gl.allocate_shared_memory(
        scales.dtype, [STAGES * HALVES, scales.block_type.shape[0], scales.block_type.shape[1]], scales.layout
    )
    zero_tiles = scale_tiles
    if HAS_ZEROS:
        zero_tiles = gl.allocate_shared_memory(
            zeros.dtype, [STAGES * HALVES, zeros.block_type.shape[0], zeros.block_type.shape[1]], zeros.layout
        )
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES * BLOCKS, COLUMNS, _BLOCK], x.layout)
    x_scale_tiles = gl.allocate_shared_memory(
        x_scales.dtype, [STAGES, x_scales.block_type.shape[0], x_scales.block_type.shape[1]], x_scales.layout
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    buffers = (tiles, scale_tiles, zero_tiles)
    x_buffers = (x_tiles, x_scale_tiles)
    barriers = (ready, free)
    place = (row, second_row, num_blocks, group_blocks)
    sources = (weight, scales, zeros)
    if WAYS == 2:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        others = gl.allocate_shared_memory(gl.float32, [ROWS, BM], FLAT)
        (acc,) = gl.warp_specialize(
            [(_first_sums, (buffers, x_buffers, barriers, count, WAYS, TILED, GROUP_BLOCKS, HAS_ZEROS)), (_other_sums, (buffers, x_buffers, barriers, others, count, WAYS, TILED, GROUP_BLOCKS, HAS_ZEROS)), (_produce, (x, x_scales, sources, buffers, x_buffers, barriers, place, token, first, count, TILED, EARLY, PDL))],
            [4, 1],
            [REGISTERS, 24],
        )
        acc += others.load(acc.type.layout)
    else:
        (acc,) = gl.warp_specialize(
            [(_first_sums, (buffers, x_buffers, barriers, count, WAYS, TILED, GROUP_BLOCKS, HAS_ZEROS)), (_produce, (x, x_scales, sources, buffers, x_buffers, barriers, place, token, first, count, TILED, EARLY, PDL))],
            [1],
            [24],
        )
    acc = acc * 0.0625  # weights are 16 times too large
    if PDL:
        tl.extra.cuda.gdc_wait()
    LAYOUT: gl.constexpr = acc.type.layout
    is_last = True
    if SPLITS > 1:
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        tokens = gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))
        inner = rows[:, None] * BM + tokens[None, :]
        SIZE: gl.constexpr = BM * ROWS
        slot = tile * gl.num_programs(0) + gl.program_id(0)
        base = sums + slot.to(gl.int64) * (SPLITS * SIZE) + inner
        gl.store(base + split * SIZE, acc)
        _barrier()
        seen = gl.atomic_add(arrivals + slot, 1, sem="acq_rel", scope="gpu")
        is_last = seen == SPLITS - 1
        if is_last:
            acc = gl.load(base)
            for i in gl.static_range(1, SPLITS):
                acc += gl.load(base + i * SIZE)
            gl.store(arrivals + slot, 0)
    if is_last:
        if PARTIAL:
            out += split.to(gl.int64) * num_tokens * num_rows
        shape = (token, row, num_tokens, num_rows)
        adds_bias = True
        if PARTIAL:
            adds_bias = split == 0
        if GATED and out_scales is not None:
            gates, ups = _halves(acc)
            targets = (out, out_scales, out_stride)
            _finish_in_integers(gates, ups, bias, targets, shape, EPILOGUE, HAS_BIAS)
        elif GATED:
            gates, ups = _halves(acc)
            _finish(gates, ups, bias, out, shape, adds_bias, False, EPILOGUE, True, HAS_BIAS)
        else:
            _finish(acc, acc, bias, out, shape, adds_bias, False, EPILOGUE, False, HAS_BIAS)
