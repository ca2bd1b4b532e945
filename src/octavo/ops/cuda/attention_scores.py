"""What a ScoreFunction does to dot products on a GPU: the one place for all its features.

The decode, prefill and cascade kernels share it. A feature that a layer does not have is an
argument of None, and costs no instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.ops.base import LOG2_E, ScoreFunction

_DOUBLED = tl.constexpr(-2 * LOG2_E)  # tanh takes exp(-2 |x|), as a power of 2


@dataclass(frozen=True, slots=True)
class KernelScores:
    """A layer's ScoreFunction as the kernels take it. Their scores are in powers of 2."""

    scale: float  # of the dot products: to powers of 2, or to the argument of tanh
    cap: float | None  # in powers of 2

    @classmethod
    def of(cls, function: ScoreFunction) -> KernelScores:
        if function.softcap is None:
            return cls(function.scale * LOG2_E, None)
        return cls(function.scale / function.softcap, function.softcap * LOG2_E)


def has_fast_tanh(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tanh is the GPU's own instruction, whose relative error is 2**-11.

    For 16-bit elements, as in FlashAttention: one instruction of the special function unit instead
    of two, and an error of a score that is about as large as what rounding its query leaves.
    """
    return dtype != torch.float32 and device.type == "cuda"


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        power = tl.exp2(tl.abs(x) * _DOUBLED)  # at most 1: nothing overflows
        size = (1.0 - power) / (1.0 + power)
        return tl.where(x < 0.0, -size, size)


@triton.jit
def log2_scores(products, scale, cap, FAST_TANH: tl.constexpr):
    """Dot products of any shape -> scores in powers of 2; see KernelScores."""
    scores = products * scale
    if cap is not None:
        scores = _tanh(scores, FAST_TANH) * cap
    return scores
