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
