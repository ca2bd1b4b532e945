"""y = x W^T of one token with weights of 4 bits, by as many programs as there are SMs.

linear_ring.py says why, and what becomes of x; linear_gemv_packed.py how words of W are multiplied.
Here words and their scales pass through the ring, and registers hold those of one step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from octavo.ops.cuda.linear_gemv_packed import _add_block
from octavo.ops.cuda.linear_hopper import _activate, _activate_gated, _barrier, _fetch_tile
from octavo.ops.cuda.linear_hopper_quantized import _IS_PUBLIC
from octavo.ops.cuda.linear_ring import _inputs, _parts
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.stored_weights import BLOCK, INT4, StoredWeight
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import DeferredNorm

_BLOCK = tl.constexpr(BLOCK)
_WORDS = tl.constexpr(16)  # of a block of a row
_ROWS = tl.constexpr(16)  # of W, or of each half, in a step
_PART_BLOCKS = tl.constexpr(8)  # of x that are loaded at once
_TOKENS = tl.constexpr(8)  # columns of the right operand, which are equal


def linear_ring_packed(
    x: Tensor | DeferredNorm,
    stored: StoredWeight,
    bias: Tensor | None,
    epilogue: Epilogue,
    stages: int,
    num_programs: int,
    warps: int = 4,
) -> Tensor:
    """epilogue(x W^T + b) of x [1, size]: [1, num_rows].

    x: or what its norm is computed from.
    stored: of 4 bits in groups of 128, without zero points; as many rows as are aligned to 16 bytes
        of scales.
    stages: of the ring.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    assert stored.format == INT4
    assert stored.group == BLOCK
    assert stored.zeros is None
    norm = x if isinstance(x, DeferredNorm) else None
    x = x.x if isinstance(x, DeferredNorm) else x
    total_rows, size = stored.shape
    num_rows = total_rows // 2 if epilogue.is_gated else total_rows
    out = x.new_empty((1, num_rows))
    words = stored.weight.view(total_rows, -1, _WORDS.value)
    num_blocks = 2 * warps
    block = [_ROWS.value, num_blocks, _WORDS.value]
    elements = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    groups = [num_blocks, _ROWS.value]
    layout = gl.NVMMASharedLayout.get_default_for(groups, elements[stored.scales.dtype])
    steps = triton.cdiv(size, BLOCK * num_blocks)
    _linear_ring_packed_kernel[(num_programs,)](
        x,
        None if norm is None else norm.weight,
        None if norm is None else norm.residual,
        None if norm is None else norm.total,
        None if norm is None else norm.branch_weight,
        TensorDescriptor.from_tensor(
            words, block, gl.NVMMASharedLayout.get_default_for(block, gl.int32)
        ),
        TensorDescriptor.from_tensor(stored.scales, groups, layout),
        bias,
        out,
        num_rows,
        size,
        0.0 if norm is None else norm.eps,
        OFFSET=0.0 if norm is None else norm.offset,
        STAGES=stages,
        STEPS=steps,
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        num_warps=warps,
        **launch_options(x.device),
    )
    return out


@gluon.jit
def _fetch(weight, scales, buffers, i, num_rows, STEPS: gl.constexpr, GATED: gl.constexpr):
    """Load the words and the scales of the program's i-th step."""
    tiles, factors, ready = buffers
    HALVES: gl.constexpr = 2 if GATED else 1
    STAGES: gl.constexpr = ready.shape[0]
    stage = i % STAGES
    row = (gl.program_id(0) + i // STEPS * gl.num_programs(0)) * _ROWS
    block = i % STEPS * weight.block_type.shape[1]
    NUM_BYTES: gl.constexpr = weight.block_type.nbytes + scales.block_type.nbytes
    mbarrier.expect(ready.index(stage), HALVES * NUM_BYTES)
    for half in gl.static_range(HALVES):
        rows = row + half * num_rows
        place = stage * HALVES + half
        _fetch_tile(weight, [rows, block, 0], ready.index(stage), tiles.index(place))
        _fetch_tile(scales, [block, rows], ready.index(stage), factors.index(place))


@gluon.jit
def _by_row(acc):
    """[rows]: sums over warps; all columns are equal."""
    return gl.sum(gl.sum(acc, 2) * (1.0 / _TOKENS), 0)


@gluon.jit
def _linear_ring_packed_kernel(
    x,
    norm_weight,
    residual,
    total,
    branch_weight,
    weight,
    scales,
    bias,
    out,
    num_rows,
    size,
    eps,
    OFFSET: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """epilogue(x W^T + b) into out [num_rows].

    Args:
        weight: descriptor of words [num_rows or 2 * num_rows, blocks, 16], as of pack_integers.
        scales: descriptor of [groups, num_rows or 2 * num_rows].
        STEPS: of a row of W, of eight blocks each; and parts of x.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALVES: gl.constexpr = 2 if GATED else 1
    BLOCKS: gl.constexpr = weight.block_type.shape[1]
    LOADS: gl.constexpr = STEPS * BLOCKS // _PART_BLOCKS
    DTYPE: gl.constexpr = x.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    PARTS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    tiles = gl.allocate_shared_memory(
        gl.int32, [STAGES * HALVES, _ROWS, BLOCKS, _WORDS], weight.layout
    )
    factors = gl.allocate_shared_memory(
        scales.dtype, [STAGES * HALVES, BLOCKS, _ROWS], scales.layout
    )
    x_parts = gl.allocate_shared_memory(DTYPE, [LOADS, _PART_BLOCKS, 1, _BLOCK], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if _IS_PUBLIC:
        right = x_parts.reinterpret(DTYPE, [STEPS, BLOCKS, 1, _BLOCK], FLAT)
    else:
        right = x_parts._reinterpret(DTYPE, [STEPS, BLOCKS, 1, _BLOCK], FLAT)
    buffers = (tiles, factors, ready)
    for each in gl.static_range(STAGES):
        mbarrier.init(ready.index(each), count=1)
    fence_async_shared()
    num_units = gl.cdiv(gl.cdiv(num_rows, _ROWS) - gl.program_id(0), gl.num_programs(0))
    count = num_units * STEPS
    for first in range(gl.minimum(count, STAGES)):
        _fetch(weight, scales, buffers, first, num_rows, STEPS, GATED)
    weights = _parts(norm_weight, size, LOADS, PARTS)
    branch_weights = _parts(branch_weight, size, LOADS, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    parts = _inputs(x, residual, total, weights, branch_weights, size, eps, OFFSET, LOADS, PARTS)
    for i in gl.static_range(LOADS):
        values = parts[i].to(DTYPE).reshape([_PART_BLOCKS, 1, _BLOCK])
        x_parts.index(i).store(values)
    _barrier()
    for unit in range(num_units):
        acc = gl.zeros([BLOCKS, _ROWS, _TOKENS], gl.float32, SUMS)
        up = acc
        for block in range(STEPS):
            step = unit * STEPS + block
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            words = tiles.index(stage * HALVES).permute((1, 0, 2)).load(LOADED)
            factor = factors.index(stage * HALVES).load(gl.SliceLayout(2, SUMS))
            if GATED:
                up_words = tiles.index(stage * HALVES + 1).permute((1, 0, 2)).load(LOADED)
                up_factor = factors.index(stage * HALVES + 1).load(gl.SliceLayout(2, SUMS))
            if step + STAGES < count:
                _barrier()  # All warps have the step's words: their place is free.
                _fetch(weight, scales, buffers, step + STAGES, num_rows, STEPS, GATED)
            inputs = right.index(block)
            acc = _add_block(acc, words, inputs, factor, (), 0)
            if GATED:
                up = _add_block(up, up_words, inputs, up_factor, (), 0)
        y = _by_row(acc)
        row = (gl.program_id(0) + unit * gl.num_programs(0)) * _ROWS
        rows = row + gl.arange(0, _ROWS, layout=y.type.layout)
        if HAS_BIAS:
            y += gl.load(bias + rows, mask=rows < num_rows, other=0.0).to(gl.float32)
        if GATED:
            ups = _by_row(up)
            if HAS_BIAS:
                shift = gl.load(bias + num_rows + rows, mask=rows < num_rows, other=0.0)
                ups += shift.to(gl.float32)
            y = _activate_gated(y, ups, EPILOGUE)
        else:
            y = _activate(y, EPILOGUE)
        gl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < num_rows)
