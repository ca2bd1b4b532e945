"""y = x W^T on Hopper GPUs with W in bfloat16, and a copy of it in 12 bits for few tokens.

Up to MOST_TOKENS are bound by reading W, and the copy (float12.py) has three quarters of its bytes.
More tokens, which are bound by arithmetic, are multiplied by W, without unpacking anything. So the
copy is worth its memory for a weight that a step reads once and whole, however few its tokens: the
head's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.cuda.float12 import pack_float12
from octavo.ops.cuda.linear import CudaLinear
from octavo.ops.cuda.linear_hopper_float12 import MOST_TOKENS, linear_float12
from octavo.ops.epilogue import Epilogue


class CopiedLinear(CudaLinear):
    """Uses a weight in place, and owns a copy of it in 12 bits."""

    def __init__(self, weight: Tensor) -> None:
        """weight: one that takes_float12."""
        super().__init__(weight)
        self._copy = pack_float12(weight)

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See LinearKernel.apply."""
        if epilogue == Epilogue.NONE and _takes(x):
            return linear_float12(x, self._copy, bias)
        return super().apply(x, bias, epilogue)


def _takes(x: Tensor) -> bool:
    """Whether the copy's kernel takes such inputs, which it loads by whole 16 bytes."""
    return (
        0 < len(x) <= MOST_TOKENS
        and x.dtype == torch.bfloat16
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
    )
