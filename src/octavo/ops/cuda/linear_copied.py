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
from octavo.ops.cuda.float12 import pack_float12
from octavo.ops.cuda.linear import CudaLinear
from octavo.ops.cuda.linear_hopper_float12 import linear_float12, takes_gates
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
        self._copied_tokens = float12.copied_tokens(*self._copy.shape, self._is_in_ring)

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See LinearKernel.apply."""
        if self._is_copy_faster(x) and self._takes(epilogue):
            return linear_float12(x, self._copy, bias, epilogue)
        return super().apply(x, bias, epilogue)

    def apply_partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See LinearKernel.apply_partial."""
        if self._is_copy_faster(x):
            return linear_float12(x, self._copy, bias)
        return super().apply_partial(x, bias)

    def norms_inputs(self, num_tokens: int, norms_branch: bool) -> bool:
        """See NormingKernel.norms_inputs: of the copy's kernels, rings do."""
        is_copied = 1 in self._copied_tokens and not self._is_in_ring
        return not is_copied and super().norms_inputs(num_tokens, norms_branch)

    def _takes(self, epilogue: Epilogue) -> bool:
        """Whether the copy's kernels compute W with that."""
        return not epilogue.is_gated or takes_gates(self._copy.shape[0])

    def _is_copy_faster(self, x: Tensor) -> bool:
        """Whether it is, other than by a ring, and its kernel takes such inputs, which it loads by
        whole 16 bytes."""
        if len(x) == 1 and self._is_in_ring:
            return False
        return (
            len(x) in self._copied_tokens
            and x.dtype == torch.bfloat16
            and x.stride(1) == 1
            and x.stride(0) % 8 == 0
            and x.data_ptr() % 16 == 0
        )

    def _apply_ring(
        self, x: Tensor | DeferredNorm, bias: Tensor | None, epilogue: Epilogue
    ) -> Tensor:
        if 1 not in self._copied_tokens or not self._takes(epilogue):
            return super()._apply_ring(x, bias, epilogue)
        from octavo.ops.cuda.linear_ring_float12 import linear_one_float12, takes_one

        if not takes_one(self._copy, epilogue):
            return super()._apply_ring(x, bias, epilogue)
        return linear_one_float12(x, self._copy, bias, epilogue)
