"""y = x W^T on Hopper GPUs with W in bfloat16, and a copy of it in 12 bits for few tokens.

Few tokens are bound by reading W, and the copy (float12.py) has three quarters of its bytes. More
tokens, which are bound by arithmetic, are multiplied by W, without unpacking anything.

Where projections of one token follow each other, rings read the copy (linear_ring_float12.py) as
they would read W.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import float12
from octavo.float12 import PIECE_ROWS
from octavo.ops.cuda.float12 import pack_float12
from octavo.ops.cuda.linear import CudaLinear
from octavo.ops.cuda.linear_hopper_float12 import linear_float12
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import DeferredNorm


class CopiedLinear(CudaLinear):
    """Uses a weight in place, and owns a copy of it in 12 bits."""

    def __init__(self, weight: Tensor, is_chained: bool = False) -> None:
        """
        Args:
            weight: one that takes_float12.
            is_chained: see make_linear_kernel.
        """
        super().__init__(weight, is_chained)
        self._copy = pack_float12(weight)

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See LinearKernel.apply."""
        if epilogue == Epilogue.NONE and self._is_copy_faster(x):
            return linear_float12(x, self._copy, bias)
        return super().apply(x, bias, epilogue)

    def apply_partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See LinearKernel.apply_partial."""
        if self._is_copy_faster(x):
            return linear_float12(x, self._copy, bias)
        return super().apply_partial(x, bias)

    def _is_copy_faster(self, x: Tensor) -> bool:
        """Whether it is, other than by a ring, and its kernel takes such inputs, which it loads by
        whole 16 bytes."""
        if len(x) == 1 and self._is_in_ring:
            return False
        return (
            float12.is_faster(len(x), self._copy.shape[0], self._is_in_ring)
            and x.dtype == torch.bfloat16
            and x.stride(1) == 1
            and x.stride(0) % 8 == 0
            and x.data_ptr() % 16 == 0
        )

    def _apply_ring(
        self, x: Tensor | DeferredNorm, bias: Tensor | None, epilogue: Epilogue
    ) -> Tensor:
        # What gates gate begins with a piece of rows of its own.
        if epilogue.is_gated and self._copy.shape[0] % (2 * PIECE_ROWS):
            return super()._apply_ring(x, bias, epilogue)
        from octavo.ops.cuda.linear_ring_float12 import linear_one_float12

        return linear_one_float12(x, self._copy, bias, epilogue)
