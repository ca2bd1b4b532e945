"""The experts of one token, of MXFP4 weights, on Hopper GPUs: tensor cores multiply.

As experts_one_packed.py, whose threads would need more time to multiply and add one number after
the other than memory needs for the weights. Here weights become bfloat16 in registers, as
experts_hopper.py has them, and 16 rows of them an operand of `mma`. Each warp has a slice: a part
of the rows' inputs, or one of the token's experts. The other operand has eight columns, of which
column n has the inputs of slice n: what a warp computes for its own column counts, and warps add
that up in the end. All weights of a program are loaded at once, or AHEAD blocks of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from octavo.ops.cuda.expert_weights import BLOCK, WORDS, ExpertMatrices, Format
from octavo.ops.cuda.experts_hopper import convert
from octavo.ops.cuda.linear_hopper import _activate_gated, _barrier
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import Routed

MAX_SLICES = 8  # columns of an operand
_ROWS = tl.constexpr(16)  # of a program
_BLOCK, _WORDS = tl.constexpr(BLOCK), tl.constexpr(WORDS)
_UP_AHEAD, _DOWN_AHEAD = 3, 4  # blocks of a slice that are loaded together
_MAX_REGISTERS = 128  # of a thread: two programs share an SM
# Layouts of programs of MAX_SLICES warps: of sums, of the two operands, and of inputs on their way.
_MMA = tl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[MAX_SLICES, 1], instr_shape=[16, 8])
)
_OPERAND = tl.constexpr(gl.DotOperandLayout(0, _MMA.value, k_width=2))
_RIGHT = tl.constexpr(gl.DotOperandLayout(1, _MMA.value, k_width=2))
_FLAT = tl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [MAX_SLICES, 1], [1, 0]))
_STAGED = tl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_SLICED = tl.constexpr(MAX_SLICES * _ROWS.value)  # rows of an operand: those of a program, by slice


def is_for_one(up: ExpertMatrices, down: ExpertMatrices, top_k: int, dtype: torch.dtype) -> bool:
    """Whether mix_one_on_hopper computes such experts."""
    is_form = up.format == down.format == Format.MX_FLOAT4
    return is_form and top_k <= MAX_SLICES and dtype == torch.bfloat16


def mix_one_on_hopper(
    x: Tensor,
    routed: Routed,
    up: ExpertMatrices,
    down: ExpertMatrices,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    epilogue: Epilogue,
) -> Tensor:
    """See ExpertsKernel.apply_partial, of x [1, size]; MXFP4, and at most MAX_SLICES experts."""
    top_k, size = routed.ids.shape[1], x.shape[1]
    inner = x.new_empty((top_k, down.size))
    out = x.new_empty((1, size))
    options = launch_options(x.device)
    num_blocks = triton.cdiv(size, BLOCK)
    per_slice = triton.cdiv(num_blocks, MAX_SLICES)
    gate_up_one_kernel[(triton.cdiv(down.size, _ROWS.value), top_k)](
        x,
        up.values,
        up.scales,
        up.factors,
        up_bias,
        inner,
        routed.ids,
        down.size,
        size,
        num_blocks,
        PER_SLICE=per_slice,
        AHEAD=min(_UP_AHEAD, per_slice),
        EPILOGUE=int(epilogue),
        num_warps=MAX_SLICES,
        maxnreg=_MAX_REGISTERS,
        **options,
    )
    parts = MAX_SLICES // triton.next_power_of_2(top_k)
    num_blocks = triton.cdiv(down.size, BLOCK)
    per_slice = triton.cdiv(num_blocks, parts)
    down_one_kernel[(triton.cdiv(size, _ROWS.value),)](
        inner,
        down.values,
        down.scales,
        down.factors,
        down_bias,
        out,
        routed.ids,
        routed.weights,
        size,
        down.size,
        num_blocks,
        TOP_K=top_k,
        PARTS=parts,
        PER_SLICE=per_slice,
        AHEAD=min(_DOWN_AHEAD, per_slice),
        num_warps=MAX_SLICES,
        maxnreg=_MAX_REGISTERS,
        **options,
    )
    return out


@gluon.jit
def _load(weight, rows, scales, first, number, num_blocks, limit):
    """Words and exponent fields of one block of each row: first + number, if that is of the slice,
    which ends at `limit`."""
    columns = gl.arange(0, _WORDS, layout=gl.SliceLayout(0, _OPERAND))
    block = first + number
    inside = (number < limit) & (block < num_blocks)
    places = (rows * num_blocks + block) * _WORDS
    words = gl.load(weight + places[:, None] + columns[None, :], mask=inside[:, None], other=0)
    fields = gl.load(scales + rows * num_blocks + block, mask=inside, other=0)
    return words, fields


@gluon.jit
def _stage(x, staged, starts, ends):
    """Copy the inputs of each slice, from starts on and below ends, to shared memory: staged
    [PER_SLICE, MAX_SLICES, BLOCK]."""
    PER_SLICE: gl.constexpr = staged.shape[0]
    columns = gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, _FLAT))
    loaded = ()
    for i in gl.static_range(PER_SLICE):
        places = starts[:, None] + i * _BLOCK + columns[None, :]
        values = gl.load(x + places, mask=places < ends[:, None], other=0.0)
        loaded += (values,)  # type: ignore[assignment]
    for i in gl.static_range(PER_SLICE):
        staged.index(i).store(loaded[i])
    _barrier()


@gluon.jit
def _own(acc):
    """[slices * ROWS]: of acc [slices * ROWS, MAX_SLICES], what rows have in their slice's
    column."""
    LAYOUT: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    return gl.sum(gl.where((row // _ROWS)[:, None] == column[None, :], acc, 0.0), 1)


@gluon.jit
def _total(values):
    """[ROWS]: sums over slices of [slices * ROWS]."""
    return gl.sum(values.reshape([values.shape[0] // _ROWS, _ROWS]), 0)


@gluon.jit
def gate_up_one_kernel(
    x,
    weight,
    weight_scales,
    weight_factors,
    bias,
    out,
    ids,
    num_rows,
    size,
    num_blocks,
    PER_SLICE: gl.constexpr,
    AHEAD: gl.constexpr,
    EPILOGUE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Gates and ups of one of the token's experts, into out [TOP_K, num_rows]."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = gl.program_id(1)
    expert = gl.load(ids + slot).to(gl.int64)
    row = gl.program_id(0) * _ROWS
    number = gl.arange(0, _SLICED, layout=gl.SliceLayout(1, _OPERAND))
    rows = expert * 2 * num_rows + gl.minimum(row + number % _ROWS, num_rows - 1)
    up_rows = rows + num_rows
    first = number // _ROWS * PER_SLICE
    staged = gl.allocate_shared_memory(x.dtype.element_ty, [PER_SLICE, 8, _BLOCK], _STAGED)
    slices = gl.arange(0, 8, layout=gl.SliceLayout(1, _FLAT))
    acc = gl.zeros([_SLICED, 8], gl.float32, _MMA)
    up = acc
    for start in range(0, PER_SLICE, AHEAD):
        loaded = ()
        for i in gl.static_range(AHEAD):
            given = _load(weight, rows, weight_scales, first, start + i, num_blocks, PER_SLICE)
            up_given = _load(
                weight, up_rows, weight_scales, first, start + i, num_blocks, PER_SLICE
            )
            loaded += ((given, up_given),)  # type: ignore[assignment]
        if start == 0:
            starts = slices * (PER_SLICE * _BLOCK)
            _stage(x, staged, starts, gl.minimum(starts + PER_SLICE * _BLOCK, size))
        for i in gl.static_range(AHEAD):
            given = loaded[i]
            xs = staged.index(gl.minimum(start + i, PER_SLICE - 1)).permute((1, 0)).load(_RIGHT)
            acc = mma_v2(convert(given[0][0], given[0][1], _OPERAND), xs, acc)
            up = mma_v2(convert(given[1][0], given[1][1], _OPERAND), xs, up)
    factor = gl.load(weight_factors + expert)
    gates = _total(_own(acc)) * factor
    ups = _total(_own(up)) * factor
    targets = row + gl.arange(0, _ROWS, layout=gates.type.layout)
    inside = targets < num_rows
    if bias is not None:
        places = bias + expert * 2 * num_rows + targets
        gates += gl.load(places, mask=inside, other=0.0).to(gl.float32)
        ups += gl.load(places + num_rows, mask=inside, other=0.0).to(gl.float32)
    values = _activate_gated(gates, ups, EPILOGUE).to(out.dtype.element_ty)
    gl.store(out + slot * num_rows + targets, values, mask=inside)


@gluon.jit
def down_one_kernel(
    x,
    weight,
    weight_scales,
    weight_factors,
    bias,
    out,
    ids,
    shares,
    num_rows,
    size,
    num_blocks,
    TOP_K: gl.constexpr,
    PARTS: gl.constexpr,
    PER_SLICE: gl.constexpr,
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """The weighted sum of the token's experts, into out [num_rows]; x [TOP_K, size].

    Slices are PARTS of the inputs of each expert. See experts_one.py of `ids` and `shares`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = gl.program_id(0) * _ROWS
    number = gl.arange(0, _SLICED, layout=gl.SliceLayout(1, _OPERAND))
    slots = gl.minimum(number // _ROWS // PARTS, TOP_K - 1)
    experts = gl.load(ids + slots, cache_modifier=".cg").to(gl.int64)
    rows = experts * num_rows + gl.minimum(row + number % _ROWS, num_rows - 1)
    first = number // _ROWS % PARTS * PER_SLICE
    staged = gl.allocate_shared_memory(x.dtype.element_ty, [PER_SLICE, 8, _BLOCK], _STAGED)
    slices = gl.arange(0, 8, layout=gl.SliceLayout(1, _FLAT))
    starts = slices // PARTS * size + slices % PARTS * (PER_SLICE * _BLOCK)
    ends = gl.minimum(slices // PARTS + 1, TOP_K) * size
    acc = gl.zeros([_SLICED, 8], gl.float32, _MMA)
    for start in range(0, PER_SLICE, AHEAD):
        loaded = ()
        for i in gl.static_range(AHEAD):
            given = _load(weight, rows, weight_scales, first, start + i, num_blocks, PER_SLICE)
            loaded += (given,)  # type: ignore[assignment]
        if start == 0:
            if PDL:
                tl.extra.cuda.gdc_wait()
            _stage(x, staged, starts, ends)
        for i in gl.static_range(AHEAD):
            xs = staged.index(gl.minimum(start + i, PER_SLICE - 1)).permute((1, 0)).load(_RIGHT)
            acc = mma_v2(convert(loaded[i][0], loaded[i][1], _OPERAND), xs, acc)
    values = _own(acc)
    number = gl.arange(0, _SLICED, layout=values.type.layout)
    slot = number // _ROWS // PARTS
    is_slot = slot < TOP_K
    own = gl.load(ids + slot, mask=is_slot, other=0)
    values = values * gl.load(weight_factors + own)
    if bias is not None:
        counts = is_slot & (number // _ROWS % PARTS == 0) & (row + number % _ROWS < num_rows)
        places = bias + own.to(gl.int64) * num_rows + row + number % _ROWS
        values += gl.load(places, mask=counts, other=0.0).to(gl.float32)
    share = gl.load(shares + slot, mask=is_slot, other=0.0)
    total = _total(gl.where(is_slot, values * share, 0.0))
    targets = row + gl.arange(0, _ROWS, layout=total.type.layout)
    gl.store(out + targets, total.to(out.dtype.element_ty), mask=targets < num_rows)
