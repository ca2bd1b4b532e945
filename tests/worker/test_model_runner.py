"""The runner against a dense computation without a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.step import (
    BlockCopy,
    Fork,
    OpenedRow,
    SamplingSpec,
    StepPlan,
    TableWrite,
    TokenWrites,
)
from octavo.ops import load_backend, token_size_of
from octavo.sampling_params import PoolingParams
from octavo.worker import logprobs
from worker.fake_model import GREEDY, HEADS, VOCAB_SIZE, Driver, FakeModel, make_runner


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def greedy_reference(model: FakeModel, token_ids: list[int], num_tokens: int) -> list[int]:
    tokens = list(token_ids)
    for _ in range(num_tokens):
        tokens.append(int(model.expected_logits(tokens)[-1].argmax()))
    return tokens[len(token_ids) :]


WIDE, NARROW = (2, 2, 16), (4, 1, 8)  # of 64 and 16 elements per token, where HEADS have 32


@pytest.mark.parametrize(
    ("windows", "heads"),
    [
        ((None, None), None),
        ((5, 5), None),
        ((None, 3), None),
        ((None, 6, 6), None),
        ((None, *[6] * 9), None),
        ((6, 6, None, None), (HEADS, HEADS, WIDE, WIDE)),
        ((6, 6, 6, None), (WIDE, WIDE, WIDE, NARROW)),  # whose blocks are longer
        ((None, None, None), (WIDE, NARROW, HEADS)),
    ],
)
@pytest.mark.parametrize("chunk", [3, 7, 100])
@pytest.mark.parametrize("backend_name", ["reference", "cpu"])
def test_greedy_tokens_equal_a_dense_computation(
    windows: tuple, heads: tuple | None, chunk: int, backend_name: str
) -> None:
    model = FakeModel(windows, heads=heads)
    runner, _ = make_runner(model, backend_name=backend_name)
    layout = model.kv_layout(token_size_of(load_backend(backend_name)))
    driver = Driver(runner, layout.block_sizes(4))
    prompts = {7: prompt(13, 1), 3: prompt(1, 2), 5: prompt(30, 3)}
    outputs: dict[int, list[int]] = {seq_id: [] for seq_id in prompts}
    opened = [driver.opened(seq_id, tokens) for seq_id, tokens in prompts.items()]
    while any(len(tokens) < 8 for tokens in outputs.values()):
        scheduled = {
            seq_id: min(chunk, driver.lengths[seq_id] - driver.computed[seq_id])
            for seq_id in prompts
        }
        ending = [s for s, n in scheduled.items() if driver.computed[s] + n == driver.lengths[s]]
        result = driver.step(scheduled, opened)
        opened = []
        for seq_id, token_id in zip(ending, result.token_ids, strict=True):
            outputs[seq_id].append(token_id)
    for seq_id, tokens in prompts.items():
        assert outputs[seq_id][:8] == greedy_reference(model, tokens, 8)


def plan(step_id: int, **parts: Any) -> StepPlan:
    empty: dict[str, Any] = {
        "seq_ids": [], "num_scheduled_tokens": [], "sampled": [], "expanded": [],
    }  # fmt: skip
    return StepPlan(step_id, **{**empty, **parts})


def test_samples_fork_after_the_prompt_and_copy_the_shared_block_on_write() -> None:
    model = FakeModel()
    runner, _ = make_runner(model)
    tokens = prompt(6, 4)  # one full block, and two tokens in the second
    spec = SamplingSpec(temperature=1.0)
    row = OpenedRow(0, tuple(tokens), 6, 0, spec, seed=3, sample_index=0, num_draws=3)
    first = runner.submit(
        plan(0, seq_ids=[0], num_scheduled_tokens=[6], sampled=[0], opened=[row],
             table_writes=[TableWrite(0, 0, 0, (1, 2))])
    ).result()  # fmt: skip
    drawn = first.draws[0]
    assert len(drawn) == 3
    assert first.token_ids == drawn[:1]

    second = runner.submit(
        plan(1, seq_ids=[0, 11, 12], num_scheduled_tokens=[1, 1, 1], sampled=[0, 11, 12],
             forks=[Fork(0, 11, 1), Fork(0, 12, 2)],
             token_writes=TokenWrites([11, 12], [6, 6], drawn[1:]),
             table_writes=[TableWrite(11, 0, 1, (3,)), TableWrite(12, 0, 1, (4,))],
             copies=[BlockCopy(2, 3, 2), BlockCopy(2, 4, 2)])
    ).result()  # fmt: skip
    # Each sample alone, from the prompt and its first token, gives the same second token.
    for index, token_id in enumerate(second.token_ids):
        alone, _ = make_runner(model)
        opened = OpenedRow(9, (*tokens, drawn[index]), 6, 0, spec, seed=3, sample_index=index)
        result = alone.submit(
            plan(0, seq_ids=[9], num_scheduled_tokens=[7], sampled=[9], opened=[opened],
                 table_writes=[TableWrite(9, 0, 0, (1, 2))])
        ).result()  # fmt: skip
        assert result.token_ids == [token_id]


def test_moves_come_before_the_computation() -> None:
    """A sequence is swapped out and back; both times its neighbour computes into its blocks."""
    model = FakeModel()
    runner, _ = make_runner(model)
    tokens, other = prompt(8, 5), prompt(8, 6)
    runner.submit(
        plan(0, seq_ids=[1], num_scheduled_tokens=[8], sampled=[1],
             opened=[OpenedRow(1, tuple(tokens), 8, 0, GREEDY, 0, 0)],
             table_writes=[TableWrite(1, 0, 0, (1, 2))])
    ).result()  # fmt: skip
    swapping = runner.submit(
        plan(1, seq_ids=[2], num_scheduled_tokens=[8], sampled=[2], closed=[1],
             opened=[OpenedRow(2, tuple(other), 8, 0, GREEDY, 0, 0)],
             table_writes=[TableWrite(2, 0, 0, (1, 2))], swap_out=[(1, 4), (2, 7)])
    ).result()  # fmt: skip
    assert swapping.swap_seconds > 0
    assert swapping.compute_seconds > 0
    sequence = [*tokens, greedy_reference(model, tokens, 1)[0]]
    back = runner.submit(
        plan(2, seq_ids=[1, 2], num_scheduled_tokens=[1, 1], sampled=[1, 2],
             opened=[OpenedRow(1, tuple(sequence), 8, 8, GREEDY, 0, 0)],
             table_writes=[TableWrite(1, 0, 0, (5, 6, 7)), TableWrite(2, 0, 2, (3,)),
                           TableWrite(2, 0, 0, (8,))],
             swap_in=[(4, 5), (7, 6)], copies=[BlockCopy(1, 8, 4)])
    ).result()  # fmt: skip
    assert back.token_ids == [
        greedy_reference(model, tokens, 2)[1],
        greedy_reference(model, other, 2)[1],
    ]


def test_a_plan_may_only_move_blocks_or_only_change_rows() -> None:
    runner, kv_cache = make_runner(FakeModel())
    kv_cache.blocks[3] = 3
    result = runner.submit(plan(5, copies=[BlockCopy(3, 4, 4)])).result()
    assert (result.step_id, result.token_ids, result.compute_seconds) == (5, [], 0.0)
    assert (kv_cache.blocks[4] == 3).all()
    opened = [OpenedRow(1, (1, 2), 2, 0, GREEDY, 0, 0)]
    assert runner.submit(plan(6, opened=opened)).result().token_ids == []
    assert runner.submit(plan(7, closed=[1])).result().token_ids == []


def test_a_step_without_swapping_takes_no_swap_time() -> None:
    runner, _ = make_runner(FakeModel())
    assert runner.submit(plan(0, copies=[BlockCopy(1, 2, 4)])).result().swap_seconds == 0.0


def test_a_chunk_that_does_not_end_its_prompt_draws_nothing() -> None:
    model = FakeModel()
    driver = Driver(make_runner(model)[0])
    result = driver.step({1: 3}, [driver.opened(1, prompt(9))])
    assert result.token_ids == []
    assert driver.step({1: 6}).token_ids == greedy_reference(model, prompt(9), 1)


def test_expanded_rows_offer_candidates_and_append_nothing() -> None:
    model = FakeModel()
    runner, _ = make_runner(model)
    tokens = prompt(5, 8)
    spec = SamplingSpec(num_candidates=4)
    row = OpenedRow(1, tuple(tokens), 5, 0, spec, 0, 0)
    result = runner.submit(
        plan(0, seq_ids=[1], num_scheduled_tokens=[5], expanded=[1], opened=[row],
             table_writes=[TableWrite(1, 0, 0, (1, 2))])
    ).result()  # fmt: skip
    expected = model.expected_logits(tokens)[-1].log_softmax(-1).topk(4)
    assert result.token_ids == []
    assert result.candidates is not None
    assert result.candidates.token_ids.tolist() == [expected.indices.tolist()]
    assert result.candidates.logprobs == pytest.approx(expected.values[None].numpy(), abs=1e-4)
    # Two children of the beam, the one in its place and a fork.
    best = result.candidates.token_ids[0, :2].tolist()
    result = runner.submit(
        plan(1, seq_ids=[1, 2], num_scheduled_tokens=[1, 1], expanded=[1, 2], forks=[Fork(1, 2, 0)],
             token_writes=TokenWrites([1, 2], [5, 5], best),
             table_writes=[TableWrite(2, 0, 1, (3,))], copies=[BlockCopy(2, 3, 4)])
    ).result()  # fmt: skip
    assert result.candidates is not None
    for offered, token in zip(result.candidates.token_ids, best, strict=True):
        expected = model.expected_logits([*tokens, token])[-1].log_softmax(-1).topk(4)
        assert offered.tolist() == expected.indices.tolist()


@pytest.mark.parametrize("chunk", [1, 4, 9, 100])
def test_prompt_logprobs_score_every_prompt_token_but_the_first(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Logits of two positions at a time, as if the vocabulary were large.
    monkeypatch.setattr(logprobs, "_MAX_ELEMENTS", 2 * VOCAB_SIZE)
    model = FakeModel()
    driver = Driver(make_runner(model)[0])
    tokens, output = prompt(19, 9), prompt(3, 10)
    spec = SamplingSpec(temperature=0.0, num_prompt_logprobs=2, num_logprobs=1)
    # As after a preemption: part of the tokens are output, which is not scored.
    opened = [driver.opened(1, [*tokens, *output], spec, num_prompt_tokens=19)]
    entries = []
    while driver.computed.get(1, 0) < 22:
        n = min(chunk, 22 - driver.computed[1])
        result = driver.step({1: n}, opened)
        opened = []
        entries += result.prompt_logprobs.get(1, [])
    expected = model.expected_logits([*tokens, *output]).log_softmax(-1)
    assert [entry.token_id for entry in entries] == tokens[1:]
    for position, entry in enumerate(entries):
        row = expected[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()
    (drawn,) = result.logprobs[1]
    assert drawn.token_id == result.token_ids[0] == int(expected[-1].argmax())
    assert drawn.top[0] == (drawn.token_id, drawn.logprob)


@pytest.mark.parametrize("chunk", [1, 4, 9, 100])
def test_hidden_states_of_prompts_are_summed(chunk: int) -> None:
    model = FakeModel()
    driver = Driver(make_runner(model)[0])
    tokens = prompt(19, 9)
    specs = [PoolingParams(pooling=kind).to_spec(19) for kind in ("mean", "last", "cls")]
    opened = [driver.opened(i, tokens, spec) for i, spec in enumerate(specs)]
    opened.append(driver.opened(3, tokens, SamplingSpec(num_prompt_logprobs=0, first_read=15)))
    sums = [np.zeros(model.config.hidden_size) for _ in specs]
    targets = []
    while driver.computed.get(0, 0) < 19:
        n = min(chunk, 19 - driver.computed[0])
        result = driver.step(dict.fromkeys(range(4), n), opened)
        opened = []
        for i, part in result.pooled.items():
            sums[i] += part
        targets += [entry.token_id for entry in result.prompt_logprobs.get(3, [])]
    hidden = model.expected_hidden(tokens).double().numpy()
    for total, expected in zip(sums, (hidden.sum(0), hidden[-1], hidden[0]), strict=True):
        assert total == pytest.approx(expected, abs=1e-4)
    assert targets == tokens[16:]


def test_sampled_tokens_do_not_depend_on_the_crowd_or_on_a_recompute() -> None:
    model = FakeModel()
    spec = SamplingSpec(temperature=1.2, top_p=0.9, presence_penalty=0.5, min_tokens=2,
                        end_token_ids=(3,))  # fmt: skip
    prompts = {seq_id: prompt(5 + seq_id, seed=seq_id) for seq_id in range(6)}

    def run(seq_ids: list[int], num_tokens: int) -> dict[int, list[int]]:
        driver = Driver(make_runner(model)[0])
        opened = [driver.opened(s, prompts[s], spec, seed=40 + s) for s in seq_ids]
        outputs: dict[int, list[int]] = {s: [] for s in seq_ids}
        for _ in range(num_tokens):
            scheduled = {s: driver.lengths[s] - driver.computed[s] for s in seq_ids}
            for s, token in zip(seq_ids, driver.step(scheduled, opened).token_ids, strict=True):
                outputs[s].append(token)
            opened = []
        return outputs

    together = run(list(prompts), 10)
    assert run([3], 10)[3] == together[3]
    # Preempted after 6 tokens and recomputed.
    driver = Driver(make_runner(model)[0])
    sequence = [*prompts[2], *together[2][:6]]
    opened = [driver.opened(2, sequence, spec, num_prompt_tokens=len(prompts[2]), seed=42)]
    assert driver.step({2: len(sequence)}, opened).token_ids == [together[2][6]]


def test_nothing_is_kept_for_gradients() -> None:
    model = FakeModel()
    for weights in (model.embedding, *model.qkv):
        weights.requires_grad_()
    runner, kv_cache = make_runner(model)
    driver = Driver(runner)
    driver.step({1: 4}, [driver.opened(1, prompt(4))])
    assert not kv_cache.blocks.requires_grad
