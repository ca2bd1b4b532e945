from __future__ import annotations

import pytest

from model_zoo import model_directory
from octavo import LLM, SamplingParams
from octavo.bench.memory_use import MemoryUse, StepMemory, Tail, mean_slots, sharing_saves, slot_use
from octavo.bench.percentiles import Percentiles


def test_figure_two_by_hand() -> None:
    """Ten blocks of 4 slots. A: 6 tokens in 2 blocks, 5 more to come. B: 9 tokens in 3, 1 more to
    come. C and D share a block with 2 tokens; C has 1 more to come, D none."""
    a = Tail(block_id=2, unfilled=2, to_come=5)
    b = Tail(block_id=5, unfilled=3, to_come=1)
    c, d = Tail(6, 2, 1), Tail(6, 2, 0)
    use = slot_use([a, b, c, d], num_held=6, num_blocks=10, block_size=4)
    assert use.token_states == 6 + 9 + 2
    assert use.reservation == 2 + 1 + 1
    assert use.internal == 0 + 2 + 1
    assert use.external == 4 * 4
    assert use.total == 40
    assert use.waste_of_pool == pytest.approx(1 - 17 / 40)
    assert use.waste_of_held == pytest.approx(1 - 17 / 24)


def test_means_over_steps() -> None:
    full = slot_use([], num_held=10, num_blocks=10, block_size=4)
    empty = slot_use([], num_held=0, num_blocks=10, block_size=4)
    steps = [StepMemory(full, True, 1, 1, 1, 30, 10), StepMemory(empty, False, 0, 0, 0, 0, 0)]
    mean = mean_slots(steps)
    assert mean is not None
    assert (mean.token_states, mean.external) == (20, 20)
    assert empty.waste_of_held == 0
    assert sharing_saves(steps) == pytest.approx(1 - 10 / 30)
    assert mean_slots([]) is None


def test_what_an_engine_holds_step_by_step() -> None:
    """Prompt of 10, 4 tokens out, blocks of 4: the last token's KV is never computed."""
    with LLM(str(model_directory("llama")), num_blocks=50, block_size=4) as llm:
        memory = MemoryUse.watch(llm.engine)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate([list(range(5, 15))], params, use_tqdm=False)
        memory.unwatch()
        llm.generate([list(range(5, 15))], params, use_tqdm=False)  # not recorded
    seen = [(s.slots.token_states, s.slots.reservation, s.slots.internal) for s in memory.steps]
    assert seen == [(10, 2, 0), (11, 1, 0), (12, 0, 0), (13, 0, 3)]
    assert memory.peak_blocks == 4
    assert [step.slots.external for step in memory.steps] == [47 * 4] * 3 + [46 * 4]


def test_samples_share_full_blocks_and_copy_the_tail() -> None:
    with LLM(str(model_directory("llama")), num_blocks=50, block_size=4) as llm:
        memory = MemoryUse.watch(llm.engine)
        params = SamplingParams(n=3, max_tokens=3, ignore_eos=True, seed=1)
        llm.generate([list(range(5, 15))], params, use_tqdm=False)
    prefill, first, second = memory.steps
    assert (prefill.num_logical_blocks, prefill.num_physical_blocks) == (3, 3)
    # Two full blocks shared by three samples, and a tail of their own for each.
    assert (first.num_logical_blocks, first.num_physical_blocks) == (9, 5)
    assert first.slots.token_states == 8 + 3 * 3
    assert second.slots.token_states == 8 + 3 * 4


def test_percentiles() -> None:
    measured = Percentiles.of([4.0, 1.0, 3.0, 2.0])
    assert measured.mean == 2.5
    assert measured.at[50] == 2.5
    assert measured.at[25] == 1.75
    assert measured.at[99] == pytest.approx(3.97)
    assert Percentiles.of([]).at[50] == 0
