"""The non-linear functions between the two projections of a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (arXiv:1606.08415, section 2); "gelu_new" in config.json."""
    return F.gelu(x, approximate="tanh")


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [num_tokens, 2 * size], gate first -> [num_tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
}
GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_mul}
