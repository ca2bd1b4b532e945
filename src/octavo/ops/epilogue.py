"""What a projection does to its output before storing it, named once for all kernels."""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


class Epilogue(IntEnum):
    """A function of y = x W^T + b; GPU kernels take its value as a compile-time constant.

    `*_MUL` applies the activation to the first half of the outputs, the gates, and multiplies it by
    the second, the ups: [num_tokens, 2 * size] -> [num_tokens, size].
    """

    NONE = 0
    RELU = 1
    SILU_MUL = 2
    SILU = 3
    GELU = 4
    GELU_TANH = 5  # GELU by its tanh approximation (arXiv:1606.08415, section 2)
    GELU_TANH_MUL = 6
    # gpt-oss: x * sigmoid(SWIGLU_ALPHA * x) * (up + 1), with the gates x at most SWIGLU_LIMIT, and
    # ups between -SWIGLU_LIMIT and SWIGLU_LIMIT.
    CLAMPED_SWIGLU = 7

    @property
    def is_gated(self) -> bool:
        """Whether there are two outputs for each result."""
        return self in (Epilogue.SILU_MUL, Epilogue.GELU_TANH_MUL, Epilogue.CLAMPED_SWIGLU)


def apply_epilogue(y: Tensor, epilogue: Epilogue) -> Tensor:
    """The epilogue in plain torch; y [num_tokens, out_features] stays unchanged."""
    match epilogue:
        case Epilogue.NONE:
            return y
        case Epilogue.RELU:
            return F.relu(y)
        case Epilogue.SILU_MUL:
            gate, up = y.chunk(2, dim=-1)
            return F.silu(gate).mul_(up)
        case Epilogue.SILU:
            return F.silu(y)
        case Epilogue.GELU:
            return F.gelu(y)
        case Epilogue.GELU_TANH:
            return F.gelu(y, approximate="tanh")
        case Epilogue.GELU_TANH_MUL:
            gate, up = y.chunk(2, dim=-1)
            return F.gelu(gate, approximate="tanh").mul_(up)
        case Epilogue.CLAMPED_SWIGLU:
            gate, up = y.chunk(2, dim=-1)
            gate = gate.clamp(max=SWIGLU_LIMIT)
            up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return torch.sigmoid(SWIGLU_ALPHA * gate).mul_(gate).mul_(up + 1)
