"""What a ScoreFunction does to dot products on a GPU: the one place for all its features.

The decode, prefill and cascade kernels share it. A feature that a layer does not have is an
argument of None, and costs no instruction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.base import LOG2_E, ScoreFunction

TANH = tl.constexpr("tanh.approx.f32 $0, $1;")
_DOUBLED = tl.constexpr(-2 * LOG2_E)  # tanh takes exp(-2 |x|), as a power of 2


@dataclass(frozen=True, slots=True)
class KernelScores:
    """A layer's ScoreFunction as the kernels take it: all but its scale is in powers of 2."""

    scale: float  # of the dot products: to powers of 2, or to the argument of tanh
    cap: float | None
    slopes: Tensor | None  # float32 [num_heads], of ALiBi
    sinks: Tensor | None  # float32 [num_heads]
    # float32 [num_heads, max_distance + 1]: of the relative bias, by distance; the last for all
    # that are farther.
    biases: Tensor | None

    @classmethod
    def of(
        cls, function: ScoreFunction, device: torch.device, key_scale: float = 1.0
    ) -> KernelScores:
        """Its tensors are on `device`, at the same addresses for as long as it lives. key_scale: of
        cached keys (KVScales)."""
        scale, cap = key_scale * function.scale * LOG2_E, None
        if function.softcap is not None:
            scale = key_scale * function.scale / function.softcap
            cap = function.softcap * LOG2_E
        slopes, sinks, bias = function.alibi_slopes, function.sinks, function.relative_bias
        biases = None
        if bias is not None:
            distances = torch.arange(bias.max_distance + 1, device=bias.weight.device)
            biases = (bias.biases(-distances) * LOG2_E).to(device).contiguous()
        return cls(
            scale,
            cap,
            None if slopes is None else torch.tensor(slopes, device=device) * LOG2_E,
            None if sinks is None else sinks.weight.to(device, torch.float32) * LOG2_E,
            biases,
        )

    def of_heads(self, begin: int, end: int) -> KernelScores:
        """Of a part of the query heads."""
        part = slice(begin, end)
        slopes, sinks, biases = (
            None if each is None else each[part] for each in (self.slopes, self.sinks, self.biases)
        )
        return replace(self, slopes=slopes, sinks=sinks, biases=biases)

    @property
    def need_distances(self) -> bool:
        """Whether scores depend on how far a key is from the query."""
        return self.slopes is not None or self.biases is not None

    @property
    def max_distance(self) -> int:
        """The last column of `biases`; 0 without."""
        return 0 if self.biases is None else self.biases.shape[1] - 1


def has_fast_tanh(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tanh is the GPU's own instruction, whose relative error is 2**-11.

    For 16-bit elements, as in FlashAttention: one instruction of the special function unit instead
    of two, and an error of a score that is about as large as what rounding its query leaves.
    """
    return dtype != torch.float32 and device.type == "cuda"


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    """Otherwise with a relative error of at most 1e-6; 1 - exp(-2 |x|) cancels near 0."""
    if FAST:
        return tl.inline_asm_elementwise(TANH, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        power = tl.exp2(tl.abs(x) * _DOUBLED)  # at most 1: nothing overflows
        size = (1.0 - power) / (1.0 + power)
        square = x * x
        series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
        return tl.where(tl.abs(x) < 0.125, series, tl.where(x < 0.0, -size, size))


@triton.jit
def capped_scores(products, scale, cap, FAST_TANH: tl.constexpr):
    """Dot products of any shape -> scores in powers of 2, as they are at a distance of 0."""
    scores = products * scale
    if cap is not None:
        scores = _tanh(scores, FAST_TANH) * cap
    return scores


@triton.jit
def log2_scores(
    products,
    scale,
    cap,
    slope,
    bias,
    distance,
    FAST_TANH: tl.constexpr,
    MAX_DISTANCE: tl.constexpr,
):
    """Dot products [ROWS, TILE] -> scores in powers of 2; see KernelScores.

    slope: float32 [ROWS] or None. bias: where the row of `biases` of each row's head begins,
    [ROWS], or None. distance: int32 [ROWS or 1, TILE], from query to key.
    """
    scores = capped_scores(products, scale, cap, FAST_TANH)
    if slope is not None:
        scores += slope[:, None] * distance.to(tl.float32)
    if bias is not None:
        # Keys behind the query are masked later; they must not be read beyond the table.
        scores += tl.load(bias[:, None] + tl.minimum(tl.maximum(-distance, 0), MAX_DISTANCE))
    return scores
