"""The MXFP4 experts of one token on Hopper GPUs.

As in linear_gemv_packed.py, a program computes a few rows, its warps share their inputs, and words
go from memory straight to the registers that tensor cores read, where they become float16: by a
table of eight bytes, the upper ones of a float16, to whose exponents the scale is added. They lie
as experts_mx_hopper.py needs them (expert_tables.py). All columns of the right operand are the same
token; inputs become float16 by a power of two, which is exact down to 2^-28 of the largest.

Which experts the token takes is known when gates and ups begin, so the second kernel, which starts
while the first one ends, loads weights before it waits for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from octavo.ops.cuda.expert_tables import ROWS, ExpertProjection, table_lookup
from octavo.ops.cuda.expert_weights import BLOCK
from octavo.ops.cuda.linear_hopper import _activate_gated
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.experts import Routed

_BLOCK = tl.constexpr(BLOCK)
_TILE_ROWS = tl.constexpr(ROWS)
_ROWS = 16  # of each of two matrices in a program
_PART_ROWS = tl.constexpr(_ROWS)
_TOKENS = tl.constexpr(8)  # columns of the right operand
_WARPS = 4
_AHEAD = 2  # blocks of each warp that are loaded before the first one is multiplied
_REGISTERS = 128  # of a thread: four programs share an SM


def _assembly() -> str:
    """PTX: words $8 and $9 of one row, with halves of the shifts of their groups in two octets of
    $10, -> two float16 in each of $0 to $7, of which 4 c to 4 c + 3 are those of word c."""
    lines = [".reg .b32 low, high, shift, small, large, t;"]
    for c in range(2):
        word = f"${8 + c}"
        lines += [
            # Upper bytes of float16, of 2^-5 times the numbers.
            *table_lookup(word, "$10", c, "0x2A282400", "0x32302E2C"),
            f"lop3.b32 t, {word}, 0x80808080, t, 0xEA;",
            f"prmt.b32 ${4 * c}, t, 0, 0x1404;",
            f"prmt.b32 ${4 * c + 1}, t, 0, 0x3424;",
            "prmt.b32 t, small, large, high;",
            f"shl.b32 high, {word}, 4;",
            "lop3.b32 t, high, 0x80808080, t, 0xEA;",
            f"prmt.b32 ${4 * c + 2}, t, 0, 0x1404;",
            f"prmt.b32 ${4 * c + 3}, t, 0, 0x3424;",
        ]
    return "{" + "\n".join(lines) + "}"


_TO_FLOAT16 = tl.constexpr(_assembly())


def mix_one_mx(x: Tensor, routed: Routed, up: ExpertProjection, down: ExpertProjection) -> Tensor:
    """See ExpertsKernel.apply_partial, of bfloat16 x [1, size]."""
    top_k = routed.ids.shape[1]
    inner = x.new_empty((top_k, down.tables.size))
    _launch(x, up, inner, routed)
    out = torch.empty((top_k, 1, x.shape[1]), dtype=torch.float32, device=x.device)
    _launch(inner, down, out, routed)
    return out


def _launch(x: Tensor, projection: ExpertProjection, out: Tensor, routed: Routed) -> None:
    """One projection of all experts of the token."""
    weight, bias, epilogue = projection
    count = triton.cdiv(weight.num_blocks, _WARPS)
    experts_one_kernel[(weight.num_tiles * (ROWS // _ROWS), routed.ids.shape[1])](
        x,
        weight.words,
        weight.shifts,
        weight.factors,
        bias,
        out,
        routed.ids,
        routed.weights,
        out.shape[-1],
        weight.num_rows,
        weight.num_first,
        weight.num_tiles,
        weight.num_blocks,
        weight.size,
        COUNT=count,
        AHEAD=min(count, _AHEAD),
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        **launch_options(x.device),
    )


@gluon.jit
def _regrouped(values):
    """A thread's four neighbours in the last dimension as two pairs, eight elements apart."""
    A: gl.constexpr = values.shape[0]
    B: gl.constexpr = values.shape[1]
    C: gl.constexpr = values.shape[2]
    parts = values.reshape([A, B, C // 16, 4, 2, 2]).permute((0, 1, 2, 4, 3, 5))
    return parts.reshape([A, B, C])


@gluon.jit
def _to_float16(words, shifts):
    """Words int32 [WARPS, 16, 16], in order of t and c, and halves of shifts int32 [WARPS, 16] as
    eight left operands of float16 [WARPS, 16, 16], of which 2 c and 2 c + 1 are those of words c.

    Inputs are in the order of `_regrouped`."""
    A: gl.constexpr = words.shape[0]
    B: gl.constexpr = words.shape[1]
    pairs = words.reshape([A, B, 4, 2, 2]).permute((0, 1, 2, 4, 3))
    groups = gl.split(pairs)
    LAYOUT: gl.constexpr = groups[0].type.layout
    BY_ROW: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))
    found = ()
    for i in gl.static_range(2):
        own = groups[i]
        fields = gl.convert_layout(shifts >> (16 * i), BY_ROW, assert_trivial=True)
        spread = gl.zeros(own.shape, gl.int32, LAYOUT) + fields[:, :, None, None]
        parts = gl.inline_asm_elementwise(
            _TO_FLOAT16,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
            [own, spread],
            dtype=(gl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
        for k in gl.static_range(4):
            values = gl.join(parts[2 * k], parts[2 * k + 1])  # [A, B, t, pair, half]
            values = values.permute((0, 1, 4, 2, 3)).reshape([A, B, 16])
            found += (values,)  # type: ignore[assignment]
    return found


@gluon.jit
def _load(source, i):
    """Of each warp's i-th block, the words of both matrices and all shifts: 0 if it has none."""
    words, shifts, word_blocks, shift_blocks, num_blocks = source
    own = word_blocks + i * gl.num_warps()
    places = words + own * (_TILE_ROWS * 32)
    first = gl.load(places, mask=own < num_blocks, other=0)
    second = gl.load(places + 16, mask=own < num_blocks, other=0)
    own = shift_blocks + i * gl.num_warps()
    places = shifts + own * (_TILE_ROWS // 16 * 32)
    return first, second, gl.load(places, mask=own < num_blocks, other=0)


@gluon.jit
def _of_both(shifts, LAYOUT: gl.constexpr):
    """Halves of the shifts of both matrices, int32 [WARPS, 16] each, of what lies in memory."""
    WARPS: gl.constexpr = shifts.shape[0]
    pairs = (shifts >> 1).reshape([WARPS, 8, 2, 2]).permute((0, 3, 1, 2))
    first, second = gl.split(pairs.reshape([WARPS, 16, 2]))
    return (
        gl.convert_layout(first, LAYOUT, assert_trivial=True),
        gl.convert_layout(second, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def _keep_inputs(x, tiles, size):
    """Write x [size] to tiles float16 [COUNT, WARPS, 1, BLOCK] of shared memory, divided by a power
    of two, which is returned."""
    COUNT: gl.constexpr = tiles.shape[0]
    WARPS: gl.constexpr = tiles.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    blocks = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, WIDE)))
    inner = gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, WIDE)))
    columns = blocks[:, None, None] * _BLOCK + inner[None, None, :]
    given = ()
    for i in gl.static_range(COUNT):
        start = i * (WARPS * _BLOCK)
        values = gl.load(x + start + columns, mask=columns < size - start, other=0.0)
        given += (values,)  # type: ignore[assignment]
    largest = gl.zeros([WARPS, 1, _BLOCK], gl.float32, WIDE)
    for i in gl.static_range(COUNT):
        values = given[i].to(gl.float32)
        largest = gl.maximum(largest, gl.maximum(values, -values))
    most = gl.max(gl.max(gl.max(largest, 2), 1), 0)
    exponent = gl.floor(gl.log2(gl.maximum(most, 1e-30))) - 14
    for i in gl.static_range(COUNT):
        values = given[i].to(gl.float32) * gl.exp2(-exponent)
        tiles.index(i).store(values.to(gl.float16))
    return gl.exp2(exponent)


@gluon.jit
def experts_one_kernel(
    x,
    words,
    shifts,
    weight_factors,
    bias,
    out,
    ids,
    shares,
    num_outputs,
    num_rows,
    num_first,
    num_tiles,
    num_blocks,
    size,
    COUNT: gl.constexpr,
    AHEAD: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Gates and ups with the activation, or down projections, of one of the token's experts.

    Args:
        x: if GATED bfloat16 [1, size], else a row for each of the token's experts.
        words, shifts, weight_factors: of ExpertTables.
        out: if GATED [TOP_K, num_outputs], else float32, weighted by `shares`.
        COUNT: blocks of a warp, at most.
        AHEAD: how many of them are loaded before the first one is multiplied.
    """
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, k_width=2)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    BY_ROW: gl.constexpr = gl.SliceLayout(2, LOADED)
    # A thread loads 16 bytes at once: the shifts of its two rows of both matrices.
    SHIFTS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]],
        [[0, 0], [0, 0], [0, 4], [0, 8], [0, 16]],
        [[1, 0], [2, 0]],
        [],
        [WARPS, 32],
    )
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    MEMORY: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    x_tiles = gl.allocate_shared_memory(gl.float16, [COUNT, WARPS, 1, _BLOCK], MEMORY)
    tile = gl.program_id(0) // (_TILE_ROWS // _PART_ROWS)
    part = gl.program_id(0) % (_TILE_ROWS // _PART_ROWS)
    slot = gl.program_id(1)

    if GATED and PDL:
        tl.extra.cuda.gdc_wait()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert = gl.load(ids + slot, cache_modifier=".cg").to(gl.int64)
    chunk = (expert * num_tiles + tile) * num_blocks
    rows = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))
    inner = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))
    own_words = words + (chunk * _TILE_ROWS + part * _PART_ROWS) * 32
    own_words = own_words + (rows[None, :, None] * 32 + inner[None, None, :])
    own_shifts = shifts + (chunk * (_TILE_ROWS // 16) + part) * 32
    own_shifts = own_shifts + gl.arange(0, 32, layout=gl.SliceLayout(0, SHIFTS))[None, :]
    word_blocks = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))
    shift_blocks = gl.arange(0, WARPS, layout=gl.SliceLayout(1, SHIFTS))[:, None]
    source = (own_words, own_shifts, word_blocks[:, None, None], shift_blocks, num_blocks)
    pieces = ()
    for i in gl.static_range(AHEAD):
        pieces += _load(source, i)
    if not GATED and PDL:
        tl.extra.cuda.gdc_wait()
    scale = _keep_inputs(x if GATED else x + slot * size, x_tiles, size)
    own_rows = tile * _TILE_ROWS + part * _PART_ROWS + gl.arange(0, _PART_ROWS, layout=OUT)
    own_places = expert * num_rows + gl.minimum(own_rows, num_rows - 1)
    second_places = expert * num_rows + gl.minimum(num_first + own_rows, num_rows - 1)
    factor = gl.load(weight_factors + own_places)
    second_factor = gl.load(weight_factors + second_places)
    shift = gl.zeros([_PART_ROWS], gl.float32, OUT)
    second_shift = shift
    if bias is not None:
        shift = gl.load(bias + own_places).to(gl.float32)
        second_shift = gl.load(bias + second_places).to(gl.float32)
    acc = gl.zeros([WARPS, 16, _TOKENS], gl.float32, SUMS)
    second_acc = acc
    spread = gl.zeros([1, _TOKENS, 1], gl.float16, LOADED)
    for i in gl.static_range(COUNT):
        if i + AHEAD < COUNT:
            pieces += _load(source, i + AHEAD)
        own, second_own = _of_both(pieces[3 * i + 2], BY_ROW)
        lefts = _to_float16(pieces[3 * i], own)
        second_lefts = _to_float16(pieces[3 * i + 1], second_own)
        inputs = x_tiles.index(i)
        for k in gl.static_range(_BLOCK // 16):
            values, _ = gl.broadcast(inputs.slice(k * 16, 16, 2).load(LOADED), spread)
            right = gl.convert_layout(_regrouped(values).permute((0, 2, 1)), RIGHT)
            left = gl.convert_layout(lefts[k], LEFT, assert_trivial=True)
            acc = mma_v2(left, right, acc)
            left = gl.convert_layout(second_lefts[k], LEFT, assert_trivial=True)
            second_acc = mma_v2(left, right, second_acc)
    # All columns are the same.
    first = gl.sum(gl.sum(acc, 2), 0) * (1.0 / _TOKENS)
    second = gl.sum(gl.sum(second_acc, 2), 0) * (1.0 / _TOKENS)
    first = gl.convert_layout(first, OUT) * (factor * scale) + shift
    second = gl.convert_layout(second, OUT) * (second_factor * scale) + second_shift
    target = out + slot * num_outputs
    if GATED:
        result = _activate_gated(first, second, EPILOGUE)
        inside = own_rows < num_outputs
        gl.store(target + own_rows, result.to(out.dtype.element_ty), mask=inside)
    else:
        share = gl.load(shares + slot, cache_modifier=".cg")
        gl.store(target + own_rows, first * share, mask=own_rows < num_first)
        inside = num_first + own_rows < num_rows
        gl.store(target + num_first + own_rows, second * share, mask=inside)
