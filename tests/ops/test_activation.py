"""Elementwise kernels against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.cuda.activation import apply_gate, apply_gate_to, soft_cap
from octavo.ops.epilogue import Epilogue, apply_epilogue

pytestmark = pytest.mark.usefixtures("poisoned")
SHAPES = {"cpu": [(3, 70), (0, 4)], "cuda": [(1, 3072), (4097, 14336), (70_000, 24)]}


@pytest.mark.parametrize("epilogue", [each for each in Epilogue if each.is_gated])
def test_gated_epilogues(device: torch.device, epilogue: Epilogue) -> None:
    for num_tokens, size in SHAPES[device.type]:
        gate_up = torch.randn(num_tokens, 2 * size + 3, device=device)[:, 3:]
        wanted = apply_epilogue(gate_up, epilogue)
        torch.testing.assert_close(apply_gate(gate_up, epilogue), wanted)


def test_gates_and_ups_that_lie_apart(device: torch.device) -> None:
    for num_tokens, size in SHAPES[device.type]:
        gate = torch.randn(num_tokens, size, device=device)
        up = torch.randn(num_tokens, 3, size, device=device)[:, 1]
        wanted = F.gelu(gate, approximate="tanh") * up
        got = apply_gate_to(gate, up, Epilogue.GELU_TANH_MUL)
        torch.testing.assert_close(got, wanted)


def test_silu_is_that_of_torch(device: torch.device) -> None:
    gate_up = torch.randn(2, 6, device=device)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(apply_gate(gate_up, Epilogue.SILU_MUL), F.silu(gate) * up)


def test_soft_cap(device: torch.device) -> None:
    for num_rows, size in ((0, 5), (1, 3), (3, 1031)):
        logits = 100 * torch.randn(num_rows, size, device=device)
        if num_rows:
            logits[0, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
        wanted = 30 * torch.tanh(logits / 30)
        assert soft_cap(logits, 30.0) is logits
        torch.testing.assert_close(logits, wanted, equal_nan=True)
