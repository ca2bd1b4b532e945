"""Writing of K and V: norms, rotation, slots, and what must stay untouched."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from paged_cases import make_paged
from torch import Tensor

from octavo.attention import RotaryTable
from octavo.kernels.kv_write import HeadChanges, write_kv

pytestmark = pytest.mark.usefixtures("poisoned")

# heads, KV heads, head size, rotary size, norms, block size
CASES = {
    "cpu": [(3, 1, 20, 12, True, 4), (2, 2, 17, None, False, 3), (9, 2, 16, 16, False, 16)],
    "cuda": [
        (32, 8, 128, 128, False, 16),
        (40, 40, 128, None, False, 16),
        (16, 8, 128, 128, True, 16),
        (12, 3, 80, 32, False, 8),
        (16, 1, 256, 64, True, 256),
        (3, 3, 100, None, True, 1),
    ],
}
DTYPES = {"cpu": [torch.float32], "cuda": [torch.float32, torch.bfloat16, torch.float16]}
EPS = 1e-5


def changed(x: Tensor, weight: Tensor | None, rotary: RotaryTable | None, at: Tensor) -> Tensor:
    if weight is not None:
        x = F.rms_norm(x.float(), weight.shape, weight.float(), EPS).to(x.dtype)
    return x if rotary is None else rotary.apply(x, at)


def test_write_kv(device: torch.device) -> None:
    places = [(1, 0), (1, 1), (0, -1), (0, 7), (2, 30), (1, 16)]  # table row, position
    tokens = torch.tensor(places, dtype=torch.int32, device=device)
    positions = tokens[:, 1].long().clamp(min=0)
    for heads, kv_heads, dim, rotary_dim, norms, block_size in CASES[device.type]:
        for dtype in DTYPES[device.type]:
            paged = make_paged([0, 0, 0], 40, block_size, kv_heads, dim, dtype, device)
            fused = torch.randn(len(places), heads + 2 * kv_heads, dim, device=device).to(dtype)
            query, key, value = fused.split([heads, kv_heads, kv_heads], dim=1)
            rotary = None
            if rotary_dim is not None:
                angles = torch.rand(40, rotary_dim // 2, device=device) * 7
                rotary = RotaryTable(angles.cos(), angles.sin())
            weights = [torch.rand(dim, device=device).to(dtype) + 0.5 if norms else None] * 2
            changes = HeadChanges(
                rotary and (rotary.cos, rotary.sin),
                *(None if weight is None else (weight, EPS) for weight in weights),
            )
            before = fused.clone()
            args = (tokens.flatten(), paged.table, paged.layer_cache, changes)
            got = write_kv(query, key, value, *args)
            assert torch.equal(fused, before), "the inputs stay unchanged"
            tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
            written = [position >= 0 for _, position in places]
            expected = changed(query, weights[0], rotary, positions)
            torch.testing.assert_close(got[written], expected[written], **tolerance)
            new_key = changed(key, weights[1], rotary, positions)
            for token, (row, position) in enumerate(places):
                if position < 0:
                    assert not changes.any or got[token].isnan().all()
                    continue
                slot = paged.slot(row, position)
                torch.testing.assert_close(slot[:, 0], new_key[token], **tolerance)
                assert torch.equal(slot[:, 1], value[token])
            filled = (~paged.layer_cache.isnan()).sum()
            assert filled == sum(written) * kv_heads * 2 * dim, "only these slots are written"
