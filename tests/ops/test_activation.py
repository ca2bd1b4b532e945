"""silu(gate) * up against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.cuda.activation import silu_mul

pytestmark = pytest.mark.usefixtures("poisoned")
SHAPES = {"cpu": [(3, 70), (0, 4)], "cuda": [(1, 3072), (4097, 14336), (70_000, 24)]}


def test_silu_mul(device: torch.device) -> None:
    for num_tokens, size in SHAPES[device.type]:
        gate_up = torch.randn(num_tokens, 2 * size + 3, device=device)[:, 3:]
        gate, up = gate_up.chunk(2, dim=-1)
        torch.testing.assert_close(silu_mul(gate_up), F.silu(gate) * up)
