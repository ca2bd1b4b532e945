"""Copying of whole blocks."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.block_copy import copy_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 2, 4), (1, 1, 2, 1), (5, 7, 2, 333), (3, 9, 2, 900)])
def test_copies(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    cache = torch.randn(20, *shape, device=device).to(dtype)
    expected = cache.clone()
    pairs = torch.tensor([[3, 4], [3, 19], [0, 1], [18, 7]], dtype=torch.int32, device=device)
    expected[[4, 19, 1, 7]] = cache[[3, 3, 0, 18]]
    copy_blocks(cache, pairs)
    assert torch.equal(cache, expected)
    copy_blocks(cache, pairs[:0])
    assert torch.equal(cache, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offsets_beyond_32_bits() -> None:
    cache = torch.zeros(600, 8 << 20, dtype=torch.bfloat16, device="cuda")  # 5e9 elements
    cache[597] = torch.randn(8 << 20, device="cuda").bfloat16()
    copy_blocks(cache, torch.tensor([[597, 2], [597, 599]], device="cuda"))
    assert torch.equal(cache[2], cache[597])
    assert torch.equal(cache[599], cache[597])
    assert not cache[598].any()
