"""Linear layers with weights packed by oneDNN, through private ops of torch.

They are the ops with which torch's compiler packs weights when it freezes a model. If a version of
torch has them in another form, or not at all, F.linear is used instead.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from octavo.ops.cpu.row_ops import apply_epilogue
from octavo.ops.epilogue import Epilogue

# The number of tokens that oneDNN optimises the layout for: 16 to 512 gave the same speed for every
# batch size, while 1 halves the speed of larger batches.
_NUM_TOKENS = 64


class OneDnnLinear:
    """Owns a copy of W [out_features, in_features] packed by oneDNN."""

    keeps_weight = False

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _NUM_TOKENS)

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See LinearKernel.apply. Batch-invariant, except in bf16 on CPUs with matrix units."""
        y = self.apply_partial(x, bias)
        return apply_epilogue(y, epilogue) if epilogue else y

    def apply_partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See LinearKernel.apply_partial."""
        num_tokens = x.shape[0]
        if num_tokens == 1:
            # For a single token, oneDNN splits the sum differently; two tokens take as long as one.
            x = x.expand(2, -1)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return result[:num_tokens]


def can_pack(weight: Tensor) -> bool:
    """Whether this torch and this CPU have oneDNN's packed GEMM for such a weight."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    return _has_ops(weight.dtype)


@cache
def _has_ops(dtype: torch.dtype) -> bool:
    """Whether the ops exist and take our arguments."""
    mkldnn, ops = torch.backends.mkldnn, torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not mkldnn.is_available() or not all(hasattr(ops, name) for name in names):  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16 and not ops._is_mkldnn_bf16_supported():
        return False
    probe = torch.ones(2, 2, dtype=dtype)
    try:
        return torch.equal(OneDnnLinear(probe).apply_partial(probe, None), 2 * probe)
    except (RuntimeError, TypeError):  # the schema of a private op may change
        return False
