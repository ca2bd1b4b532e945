"""The non-linear functions between the two projections of a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from octavo.ops.cpu.row_ops import silu_mul


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (arXiv:1606.08415, section 2); "gelu_new" in config.json."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
}
GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_mul}
