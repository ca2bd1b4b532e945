"""Programs that wait for each other, as the emulator carries them out."""

from __future__ import annotations

from types import SimpleNamespace

import gluon_emulator
import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _wait_in_turns_kernel(places, out):
    """Program 0 waits until neither place is 0; each other program sets one of them."""
    program = gl.program_id(0)
    if program == 0:
        first = gl.load(places, volatile=True)
        second = gl.load(places + 1, volatile=True)
        while (first == 0) | (second == 0):
            first = gl.load(places, volatile=True)
            second = gl.load(places + 1, volatile=True)
        gl.store(out, first + second)
    else:
        gl.store(places + (program - 1), program)


@gluon.jit
def _load_and_store_kernel(place, out):
    before = gl.load(place)
    gl.store(place, before + 1)
    gl.store(out, before)


@gluon.jit
def _not_finite_kernel(values, largest, rounded):
    places = gl.arange(0, 4, layout=gl.BlockedLayout([1], [32], [1], [0]))
    found = gl.load(values + places)
    gl.store(largest, gl.max(found, 0))
    gl.store(largest + 1 + places, gl.maximum(found, 0.0))
    gl.store(rounded + places, found.to(gl.float8e4nv).to(gl.float32))


@pytest.fixture
def places() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize("num_programs", [1, 2])
def test_a_program_that_waits_in_turns_gives_up(
    num_programs: int, places: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither place is set, or only one of them."""
    monkeypatch.setattr(gluon_emulator, "PATIENCE", 0.3)
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(AssertionError, match="a program waits for ever"):
        gluon_emulator.run(_wait_in_turns_kernel, (num_programs,), places, out, num_warps=1)
    assert out.item() == 0


def test_a_program_waits_in_turns_for_others(places: torch.Tensor) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    gluon_emulator.run(_wait_in_turns_kernel, (3,), places, out, num_warps=1)
    assert out.item() == 3


def test_a_program_waits_as_long_as_there_is_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns for a place that stays as it is, NaN, and one that changes at every 500th look."""
    slept: list[float] = []
    monkeypatch.setattr(gluon_emulator, "time", SimpleNamespace(sleep=slept.append))
    places, polls = torch.full((2,), torch.nan), gluon_emulator.Polls()
    for look in range(10_000):
        places[1] = look // 1000
        place = gluon_emulator.Pointer(places, look % 2)
        polls.nap(place)
        polls.found(place, places[look % 2])
    assert sum(slept) > 4 * gluon_emulator.PATIENCE
    assert max(slept) == gluon_emulator.LONGEST_NAP


def test_a_number_that_was_loaded_stays_when_the_memory_changes() -> None:
    place, out = torch.zeros(1), torch.ones(1)
    gluon_emulator.run(_load_and_store_kernel, (1,), place, out, num_warps=1)
    assert (place.item(), out.item()) == (1.0, 0.0)


def test_what_is_not_finite_becomes_what_a_gpu_makes_of_it() -> None:
    """The largest of two, or of many, drops NaN, and e4m3 has no infinity."""
    values = torch.tensor([torch.nan, -torch.inf, 2.0, torch.inf])
    largest, rounded = torch.zeros(5), torch.zeros(4)
    gluon_emulator.run(_not_finite_kernel, (1,), values, largest, rounded, num_warps=1)
    assert largest.tolist() == [torch.inf, 0.0, 0.0, 2.0, torch.inf]
    assert rounded[0].isnan()
    assert rounded[1:].tolist() == [-448.0, 2.0, 448.0]
