"""Copying of blocks, as far as they are filled."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.cuda.block_copy import copy_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 2, 4), (1, 1, 2, 1), (5, 7, 2, 333), (3, 16, 2, 900)])
def test_copies(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    cache = torch.randn(20, *shape, device=device).to(dtype)
    expected = cache.clone()
    block_size = shape[-2]
    copies = [(3, 4, block_size), (3, 19, 1), (0, 1, block_size - 1), (18, 7, 0)]
    for source, target, num_tokens in copies:
        expected[target, ..., :num_tokens, :] = cache[source, ..., :num_tokens, :]
    listed = torch.tensor(copies, dtype=torch.int32, device=device)
    copy_blocks(cache, listed)
    assert torch.equal(cache, expected)
    copy_blocks(cache, listed[:0])
    assert torch.equal(cache, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offsets_beyond_32_bits() -> None:
    cache = torch.zeros(600, 2, 4 << 20, dtype=torch.bfloat16, device="cuda")  # 5e9 elements
    cache[597] = torch.randn(2, 4 << 20, device="cuda").bfloat16()
    copy_blocks(cache, torch.tensor([[597, 2, 2], [597, 599, 1]], device="cuda"))
    assert torch.equal(cache[2], cache[597])
    assert torch.equal(cache[599, 0], cache[597, 0])
    assert not cache[599, 1].any()
    assert not cache[598].any()
