"""Elementwise functions as kernels of their own: gated epilogues, where the projection before them
cannot compute them, and the soft-capping of logits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.epilogues import activate_gated
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.epilogue import Epilogue

BLOCK = 1024


def apply_gate(gate_up: Tensor, epilogue: Epilogue) -> Tensor:
    """A gated epilogue of gate_up [num_tokens, 2 * size], gate first -> [num_tokens, size].

    Computed in float32 and rounded once; rows of gate_up may be strided.
    """
    size = gate_up.shape[1] // 2
    return apply_gate_to(gate_up[:, :size], gate_up[:, size:], epilogue)


def apply_gate_to(gate: Tensor, up: Tensor, epilogue: Epilogue) -> Tensor:
    """The same of gate and up [num_tokens, size], whose rows may be strided."""
    num_tokens, size = gate.shape
    out = gate.new_empty((num_tokens, size))
    if num_tokens:
        _gate_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
            gate,
            up,
            out,
            gate.stride(0),
            up.stride(0),
            size,
            EPILOGUE=int(epilogue),
            BLOCK=BLOCK,
            num_warps=4,
            **launch_options(gate.device),
        )
    return out


@triton.jit
def _gate_kernel(
    gates,
    ups,
    out,
    gate_stride,
    up_stride,
    size,
    EPILOGUE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    wait_previous(PDL)
    gate = tl.load(gates + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    value = activate_gated(gate, up, EPILOGUE)
    tl.store(out + row * size + columns, value.to(out.dtype.element_ty), mask=inside)


def soft_cap(logits: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(logits / softcap), written into dense logits, and returned.

    Computed in float32 and rounded once.
    """
    assert logits.is_contiguous()
    size = logits.numel()
    if size:
        _soft_cap_kernel[(triton.cdiv(size, BLOCK),)](
            logits, size, softcap, BLOCK=BLOCK, num_warps=4, **launch_options(logits.device)
        )
    return logits


@triton.jit(do_not_specialize=["size"])
def _soft_cap_kernel(logits, size, softcap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    allow_next(PDL)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait_previous(PDL)
    x = tl.load(logits + places, mask=places < size, other=0.0).to(tl.float32) / softcap
    small = tl.exp(-2 * tl.abs(x))  # at most 1: no overflow
    magnitude = (1 - small) / (1 + small)
    value = tl.where(x < 0, -magnitude, magnitude) * softcap
    tl.store(logits + places, value.to(logits.dtype.element_ty), mask=places < size)
