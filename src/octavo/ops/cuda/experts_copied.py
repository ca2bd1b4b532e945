"""Experts in bfloat16 on Hopper GPUs, with copies in 12 bits for few tokens.

As linear_copied.py for projections: while tokens are few, time goes into reading the experts that
were hit, and copies (float12.py) have three quarters of their bytes. More tokens are multiplied by
the weights, without unpacking anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.cuda.expert_tiles import EXACT_TOKENS
from octavo.ops.cuda.expert_weights import ExpertMatrices
from octavo.ops.cuda.experts import MAX_BLOCKS, CudaExperts, empty_parts, progress_of
from octavo.ops.cuda.experts_hopper_float12 import mix_few_float12
from octavo.ops.cuda.experts_one_float12 import mix_one_float12
from octavo.ops.cuda.float12 import pack_float12, takes_float12
from octavo.ops.cuda.routing import BlockLists
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import ExpertWeights, Routed


class CopiedExperts(CudaExperts):
    """Uses the experts' weights in place, and owns copies of them."""

    def __init__(self, weights: ExpertWeights, epilogue: Epilogue, copied_tokens: range) -> None:
        """
        Args:
            weights: bfloat16, without biases, that `take_copies`.
            epilogue: gated.
            copied_tokens: see make_experts_kernel.
        """
        up, down = ExpertMatrices.of(weights.up), ExpertMatrices.of(weights.down)
        assert up is not None
        assert down is not None
        super().__init__(up, down, (None, None), epilogue)
        self._copied_tokens = copied_tokens
        self._copies = tuple(pack_float12(each.flatten(0, 1)) for each in weights[:2])

    def apply_partial(self, x: Tensor, routed: Routed) -> Tensor:
        """See ExpertsKernel.apply_partial; x dense in its last dimension."""
        num_tokens, top_k = routed.ids.shape
        is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0
        if num_tokens not in self._copied_tokens or x.dtype != torch.bfloat16 or not is_aligned:
            return super().apply_partial(x, routed)
        up, down = self._copies
        if num_tokens == 1:
            return mix_one_float12(x, routed, up, down, self._epilogue)
        lists: BlockLists = routed.lists
        if len(lists.experts) > MAX_BLOCKS:
            return super().apply_partial(x, routed)
        out = empty_parts(x, top_k, EXACT_TOKENS)
        mix_few_float12(x, routed, up, down, out, self._epilogue, progress_of(x.device))
        return out


def take_copies(weights: ExpertWeights) -> bool:
    """Whether experts may have copies: finite, and without biases."""
    has_biases = weights.up_bias is not None or weights.down_bias is not None
    return not has_biases and all(takes_float12(each.flatten(0, 1)) for each in weights[:2])
