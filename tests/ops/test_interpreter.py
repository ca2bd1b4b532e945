"""Programs that wait for others of their grid, as Triton's interpreter runs them in these tests."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterError

from octavo.ops.cuda.announcing import EMPTY

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="without the interpreter")


@triton.jit
def _pass_on(places, results, DISTANCE: tl.constexpr):
    """Each program leaves its index, and returns what the one `DISTANCE` further has left."""
    index, num_programs = tl.program_id(0), tl.num_programs(0)
    tl.store(places + index, index)
    other = (index + DISTANCE) % (num_programs + 1)  # the last one's does not exist
    found = tl.cast(EMPTY, tl.int32)
    if other < num_programs:
        while found == EMPTY:
            found = tl.load(places + other, volatile=True)
    tl.store(results + index, found)


def test_programs_wait_for_later_and_for_earlier_ones() -> None:
    for distance in (1, 3, 5):
        places = torch.full((6,), EMPTY.value, dtype=torch.int32)
        results = torch.empty_like(places)
        _pass_on[(6,)](places, results, DISTANCE=distance)
        others = [(i + distance) % 7 for i in range(6)]
        assert results.tolist() == [each if each < 6 else EMPTY.value for each in others]


@triton.jit
def _wait_for_nobody(places):
    found = tl.cast(EMPTY, tl.int32)
    while found == EMPTY:
        found = tl.load(places + tl.program_id(0), volatile=True)


def test_a_launch_fails_if_a_program_waits_for_what_none_leaves() -> None:
    places = torch.full((3,), EMPTY.value, dtype=torch.int32)
    with pytest.raises(InterpreterError, match="waits for what no program leaves"):
        _wait_for_nobody[(3,)](places)


@triton.jit
def _combine(integers, results):
    """The second time, all shapes and numbers have been met."""
    for i in tl.static_range(2):
        x = tl.load(integers + tl.arange(0, 4))
        halves = x + 0.5
        products = halves[:, None] * x[None, :] + (1 - x.to(tl.int64) * 3)[:, None]
        smaller = tl.where(x[:, None] < x[None, :] - 1, products, 2)
        tl.store(results + 16 * i + tl.arange(0, 16), tl.reshape(smaller, [16]))


def test_operands_of_different_types_and_shapes() -> None:
    x = torch.tensor([3, -2, 7, 0], dtype=torch.int32)
    results = torch.empty(2, 4, 4)
    _combine[(1,)](x, results)
    products = (x + 0.5)[:, None] * x + (1 - 3 * x.long())[:, None]
    wanted = torch.where(x[:, None] < x - 1, products, 2)
    assert torch.equal(results, wanted.expand(2, 4, 4))


@triton.jit
def _convert(numbers, results, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(results + places, tl.load(numbers + places).to(tl.bfloat16))


def test_float32_becomes_bfloat16_by_truncation() -> None:
    bits = torch.randint(-(2**31), 2**31, (1024,), generator=torch.manual_seed(1)).int()
    bits[:4] = torch.tensor([0, -(2**31), 0x7F800000, 0x00800000])
    numbers = bits[bits & 0x7F800000 != 0][:512]
    numbers[:2] = torch.tensor([0, -(2**31)])
    results = torch.empty(512, dtype=torch.bfloat16)
    _convert[(1,)](numbers.view(torch.float32), results, SIZE=512)
    assert torch.equal(results.view(torch.int16), (numbers >> 16).short())
