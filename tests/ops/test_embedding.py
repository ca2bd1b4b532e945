"""Vectors of tokens, on a GPU or in Triton's interpreter; torch's are the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.cuda.embedding import embed

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [40, 1100])
def test_vectors_are_rows_of_the_table(device: torch.device, dtype: torch.dtype, size: int) -> None:
    table = torch.randn(50, size, device=device).to(dtype)
    ids = torch.tensor([49, 0, 7, 7, 31], device=device)
    expected = F.embedding(ids, table)
    assert torch.equal(embed(ids, table), expected)
    # The interpreter rounds to bfloat16 otherwise than torch.
    torch.testing.assert_close(
        embed(ids, table, factor=50.75), expected * 50.75, rtol=2**-7, atol=0
    )
    assert embed(ids[:0], table).shape == (0, size)


def test_the_parts_of_two_ranks_add_up(device: torch.device) -> None:
    table = torch.randn(51, 24, device=device)
    ids = torch.tensor([0, 25, 26, 50, 51, 3], device=device)  # 51: of the second part's padding
    parts = embed(ids, table[:26]), embed(ids, F.pad(table[26:], (0, 0, 0, 1)), first=26)
    assert torch.equal(sum(parts), F.embedding(ids, F.pad(table, (0, 0, 0, 1))))
    assert (parts[0][1:3] != 0).any(1).tolist() == [True, False]
