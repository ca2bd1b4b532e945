"""Weights in 12 bits."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.cuda.float12 import (
    EXPONENT,
    MANTISSA,
    PIECE_WORDS,
    launch_packing,
    pack_float12,
    takes_float12,
    unpack_float12,
)


@pytest.mark.parametrize("shape", [(8, 64), (5, 64), (24, 192), (131, 320)])
def test_all_but_the_smallest_weights_keep_all_their_bits(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).mul_(torch.logspace(-30, 30, shape[0])[:, None]).bfloat16()
    weight[0, :4] = torch.tensor([0.0, -0.0, 1e-33, -1e-38])
    assert takes_float12(weight)
    stored = pack_float12(weight)
    assert stored.words.shape == (-(-shape[0] // 8), shape[1] // 64, PIECE_WORDS)
    dense = unpack_float12(stored)
    largest = weight.abs().amax(dim=1, keepdim=True).float().log2().floor().exp2()
    is_exact = weight.abs().float() >= largest * 2.0**-14
    assert is_exact.float().mean() > 0.99
    assert torch.equal(dense[is_exact], weight[is_exact])
    error = (unpack_float12(stored, torch.float32) - weight.float()).abs() / largest
    assert error.max() <= 2.0**-22
    assert torch.equal(dense.signbit(), weight.signbit())


def test_rows_of_zeros_and_of_the_smallest_and_largest_numbers() -> None:
    weight = torch.zeros(8, 64, dtype=torch.bfloat16)
    weight[1] = torch.finfo(torch.bfloat16).max
    weight[2, ::2] = -torch.finfo(torch.bfloat16).max
    weight[3] = torch.finfo(torch.bfloat16).tiny
    weight[4] = torch.tensor([0x7F7F, 0x0080], dtype=torch.int16).view(torch.bfloat16).repeat(32)
    dense = unpack_float12(pack_float12(weight))
    assert torch.equal(dense[:4], weight[:4])
    assert torch.equal(dense[4], weight[4].where(weight[4] > 1, 0))


@pytest.mark.parametrize("shape", [(8, 64), (5, 640), (21, 704)])
def test_the_kernel_packs_as_torch_does(device: torch.device, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    num_rows, size = shape
    weight = torch.randn(shape).mul_(torch.logspace(-36, 37, num_rows)[:, None]).bfloat16()
    weight[:, ::5] *= 2.0**-16  # of which few bits are left
    weight[0, :4] = torch.tensor([0.0, -0.0, 1e-33, -1e-38])
    weight[1] = torch.finfo(torch.bfloat16).max
    weight[1, 1::3] = 2.0**-127
    weight[2] = 0
    weight[3] = 2.0**-130
    wanted = pack_float12(weight)
    words = torch.full_like(wanted.words, -1, device=device)
    # Rows are apart in memory, as those of a part of a merged weight.
    apart = torch.cat((weight, weight), dim=1).to(device)[:, :size]
    launch_packing(apart, wanted.scales.to(device), words)
    assert torch.equal(words.cpu(), wanted.words)
    if device.type == "cuda":
        packed = pack_float12(weight.to(device))
        assert torch.equal(packed.words.cpu(), wanted.words)
        assert torch.equal(packed.scales.cpu(), wanted.scales)


def test_words_are_unpacked_by_two_rotations() -> None:
    """Thread 4 r + c has of row r the inputs 2 c, 2 c + 1 and those 8 further, of each 16."""
    weight = torch.randn(8, 64).bfloat16()
    stored = pack_float12(weight)
    words = stored.words[0, 0].tolist()
    for thread in (0, 5, 31):
        row, pair = thread // 4, thread % 4
        for step in range(4):
            for i in range(2):
                signs = _rotated_left(words[4 * thread + step], 8 * i) & MANTISSA
                shift = 4 * (2 * (step % 2) + i)
                exponents = _rotated_left(words[128 + 2 * thread + step // 2], shift) & EXPONENT
                both = signs | exponents
                for place, bits in enumerate((both & 0xFFFF, both >> 16)):
                    as_int = torch.tensor(bits << 16, dtype=torch.int64).to(torch.int32)
                    value = as_int.view(torch.float32) * 2.0**112 * stored.scales[row]
                    column = 16 * step + 8 * i + 2 * pair + place
                    assert value.item() == weight[row, column].item()


def _rotated_left(word: int, count: int) -> int:
    word &= 0xFFFFFFFF
    return ((word << count) | (word >> (32 - count))) & 0xFFFFFFFF


def test_what_has_no_such_form() -> None:
    assert not takes_float12(torch.zeros(8, 64))
    assert not takes_float12(torch.zeros(8, 65, dtype=torch.bfloat16))
    weight = torch.zeros(8, 64, dtype=torch.bfloat16)
    weight[3, 5] = torch.nan
    assert not takes_float12(weight)
