"""Every backend against the reference, over scrambled block tables in a cache full of NaN."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Bench, Case

MIXED = ((0, 1), (5, 1), (0, 37), (40, 30), (100, 1), (127, 1), (64, 65), (15, 2))
BACKENDS = ["cpu"]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}

CASES = [
    Case(MIXED),
    Case(MIXED, block_size=1, head_dim=16, group=1),
    Case(MIXED, block_size=8, head_dim=80, group=4, rotary_dim=80),
    Case(MIXED, block_size=32, head_dim=128, group=3, rotary_dim=128),
    Case(MIXED, block_size=256, head_dim=256, group=16, num_kv_heads=1),
    Case(MIXED, block_size=16, head_dim=100, group=7, window=33, rotary_dim=40),
    Case(MIXED, block_size=8, head_dim=64, group=1, window=20, num_kv_heads=5),
    Case(MIXED, block_size=16, head_dim=64, group=4, window=1),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"b{c.block_size}-d{c.head_dim}-g{c.group}-w{c.window}"
)
def test_backend_agrees_with_the_reference(backend: str, case: Case, dtype: torch.dtype) -> None:
    from dataclasses import replace

    case = replace(case, dtype=dtype)
    for got, expected in zip(
        Bench(backend, case).run(), Bench("reference", case).run(), strict=True
    ):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
