"""What several ranks draw from their parts of the logits is what one draws from whole rows.

The same logits are cut here, so tokens must be equal bit for bit, by the CPU's routines and by the
kernels for GPUs, which Triton's interpreter carries out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import Ranks
from torch import Tensor

from octavo.config import SchedulerConfig
from octavo.core.step import Candidates, LogitBias, SamplingSpec, TokenLogprobs
from octavo.ops.communicator import Communicator, SingleRank
from octavo.ops.vocabulary import VocabularyShard
from octavo.worker.device.base import Device
from octavo.worker.device.cpu import CpuDevice
from octavo.worker.logit_edits import EditedRow
from octavo.worker.row_edits import RowEdits
from octavo.worker.sampler import Sampler, SamplingBatch, rows_not_finite
from triton_interpreter import prepare_the_interpreter
from worker.test_sampler import SPECS, make_batch, random_specs

RanksOf = Callable[[int], Ranks]
Chosen = tuple[
    list[int], dict[int, list[int]], dict[int, list[TokenLogprobs]], Candidates | None, list[int]
]
PLAIN = [SamplingSpec(temperature=t, min_p=p) for t in (0.0, 0.7, 2.0) for p in (0.0, 0.2, 0.9)]


def choose(
    communicator: Communicator, logits: Tensor, batch: SamplingBatch, kernels: bool
) -> Chosen:
    """What the sampler chooses from this rank's part of whole rows of logits."""
    vocabulary = VocabularyShard(logits.shape[1], communicator)
    device: Device = CpuDevice(1)
    if kernels:
        os.environ["TRITON_INTERPRET"] = "1"
        prepare_the_interpreter()
        from octavo.ops.cuda import sampling, sampling_candidates
        from octavo.worker.device.cuda import CudaDevice

        sampling.CHUNK = sampling_candidates.CHUNK = 64
        sampling.STRIP, sampling.SOME_DRAWS = 16, 8  # of more draws, programs have several strips
        device = CudaDevice(torch.device("cpu"))
    most = int(batch.num_draws.sum()) + len(batch.num_candidates)
    staging = device.staging(SchedulerConfig(max_num_seqs=most, max_num_batched_tokens=most), 1)
    edits = device.edits(1 + most, most, vocabulary)
    batch = with_records(batch, RowEdits(edits))
    sampler = Sampler(device.drawer(staging, vocabulary.size), staging, vocabulary, edits)
    part = logits[:, vocabulary.start : vocabulary.start + vocabulary.num_rows]
    before = part.clone()
    with torch.inference_mode():
        staging.begin()
        staged = sampler.stage(batch)
        staging.flush()
        choice = sampler(part, staged, rows=torch.arange(1, 1 + most, dtype=torch.int32))
        choice.read_back(device.to_host)
    assert torch.equal(part.nan_to_num(), before.nan_to_num())
    first, candidates = choice.first_tokens(), choice.candidates()
    failed = rows_not_finite(first, candidates)
    return first.tolist(), choice.draws(), choice.logprobs(), candidates, failed


def with_records(batch: SamplingBatch, edits: RowEdits) -> SamplingBatch:
    """Rows that the device edits have records from now on, the i-th that of row 1 + i."""
    by_host = [
        edit
        for edit in batch.edited
        if edit.index >= batch.num_sampled
        or not edits.open(1 + edit.index, edit.spec, edit.token_ids, edit.num_prompt_tokens)
    ]
    edits.carry_out()
    return replace(batch, edited=by_host, has_records=len(by_host) < len(batch.edited))


def check(group: Ranks, logits: Tensor, batch: SamplingBatch, kernels: bool = False) -> None:
    first, draws, logprobs, candidates, failed = choose(SingleRank(), logits, batch, False)
    found = group.call(choose, logits, batch, kernels)
    for mine in found:
        assert mine[:3] == (first, draws, logprobs)
        assert mine[4] == failed
        assert (mine[3] is None) == (candidates is None)
        if candidates is not None:
            np.testing.assert_allclose(mine[3].logprobs, candidates.logprobs, atol=2e-6)
            is_finite = np.isfinite(candidates.logprobs)  # others have tokens of no meaning
            theirs = candidates.token_ids[is_finite].tolist()
            assert mine[3].token_ids[is_finite].tolist() == theirs
            assert np.array_equal(mine[3].logprobs, found[0][3].logprobs, equal_nan=True)


def rows(number: int, vocab_size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, vocab_size, generator=generator) * 2


# Of the kernels, three ranks show what two show: the parts of a row are of different lengths.
of_groups = pytest.mark.parametrize(
    ("size", "kernels"),
    [(2, False), (3, False), (3, True), pytest.param(2, True, marks=pytest.mark.slow)],
)


@of_groups
def test_draws_without_limits(size: int, kernels: bool, ranks: RanksOf) -> None:
    for vocab_size, seed in [(150, 0), (257, 1)] if kernels else [(150, 0), (257, 1), (5000, 2)]:
        logits = rows(len(PLAIN), vocab_size, seed)
        num_draws = [1, 3, 1, 2] + [1] * (len(PLAIN) - 4)
        for counts in (None, num_draws):
            batch = make_batch(PLAIN, range(seed, seed + len(PLAIN)), num_draws=counts)
            check(ranks(size), logits, batch, kernels)


@pytest.mark.parametrize("size", [2, 3])
def test_greedy_batches(size: int, ranks: RanksOf) -> None:
    """Equal logits on several ranks: the lowest id."""
    logits = rows(4, 200)
    logits[0, [30, 80, 170]] = 9.0
    logits[1, [110, 199]] = 9.0
    batch = make_batch([SamplingSpec(temperature=0.0)] * 4)
    for kernels in (False, True):
        check(ranks(size), logits, batch, kernels)
        assert ranks(size).call(choose, logits, batch, kernels)[0][0][:2] == [30, 110]


@pytest.mark.parametrize("size", [2, 3])
def test_everything_else(size: int, ranks: RanksOf) -> None:
    """Limits, edits, log-probabilities and candidates, each beside plain rows."""
    specs = [*SPECS.values(), *random_specs(8)]
    logits = rows(len(specs), 331)
    check(ranks(size), logits, make_batch(specs, range(len(specs))))
    edited = [
        EditedRow(i, spec, np.arange(40, dtype=np.int32), 20)
        for i, spec in enumerate([SamplingSpec(0.0, repetition_penalty=1.5), *PLAIN[3:6]])
    ]
    batch = make_batch(PLAIN, range(len(PLAIN)))
    batch = replace(batch, edited=edited, num_logprobs={0: 3, 4: 0, 7: 5})
    check(ranks(size), logits[: len(PLAIN)], batch)


@of_groups
def test_edited_rows(size: int, kernels: bool, ranks: RanksOf) -> None:
    """Where a device edits them, each rank has the records of its part of the vocabulary."""
    asked = [*random_specs(7), *PLAIN[3:6]]
    logits = rows(len(asked), 110)
    edited = [
        EditedRow(i, spec, np.arange(7 * i, 40 + 7 * i, dtype=np.int32), 20)
        for i, spec in [
            (1, SamplingSpec(repetition_penalty=1.5)),
            (4, SamplingSpec(frequency_penalty=1.5, presence_penalty=-0.5)),
            (5, SamplingSpec(logit_bias=LogitBias.of({2: 9.0, 60: 3.5, 109: 4.0}))),
            (8, SamplingSpec(repetition_penalty=0.5, forced_tokens=((20, (7, 77)),))),
        ]
    ]
    batch = make_batch(asked, range(len(asked)))
    check(ranks(size), logits, replace(batch, edited=edited), kernels)


@of_groups
def test_limited_rows_are_dealt(size: int, kernels: bool, ranks: RanksOf) -> None:
    """As many for each rank, or fewer for the last one; few are gathered."""
    specs = [SPECS[name] for name in ("top_k", "top_p", "plain")] + random_specs(7)
    for number in (1, 7, 8, 9, 10):
        logits = rows(number, 110, number)
        logits[number // 2, 100] = torch.nan
        batch = make_batch(specs[:number], range(number))
        check(ranks(size), logits, batch, kernels)


@of_groups
def test_candidates(size: int, kernels: bool, ranks: RanksOf) -> None:
    """Numbers that a rank's part has, that it lacks, and more than there are."""
    for number, vocab_size in [(1, 150), (8, 150), (20, 150), (60, 150), (200, 150)]:
        logits = rows(5, vocab_size, number)
        logits[2, :100] = -torch.inf  # all that the first rank has
        batch = make_batch([SamplingSpec(1.0)] * 5, num_expanded=3)
        batch = replace(batch, num_candidates=[number, 2, 1])
        check(ranks(size), logits, batch, kernels)
        spec = SamplingSpec(logit_bias=LogitBias.of({70: 5.0}))
        edited = [EditedRow(4, spec, np.zeros(3, np.int32), 3)]
        check(ranks(size), logits, replace(batch, edited=edited), kernels)


@pytest.mark.parametrize("size", [2, 3])
def test_the_lowest_of_equal_candidates_comes_first(size: int, ranks: RanksOf) -> None:
    logits = rows(1, 150)
    logits[0, [3, 60, 61, 149]] = 11.0
    logits[0, [70, 9]] = 10.0
    batch = make_batch([SamplingSpec(1.0)], num_expanded=1)
    batch = replace(batch, num_candidates=[6])
    for *_, candidates, _ in ranks(size).call(choose, logits, batch, True):
        assert candidates.token_ids.tolist() == [[3, 60, 61, 149, 9, 70]]


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite(bad: float, kernels: bool, ranks: RanksOf) -> None:
    """On whichever rank the number is, all ranks notice; other rows are as they were."""
    group = ranks(2)
    for temperature in (0.0, 1.0):
        for place in (10, 140):
            logits = rows(6, 150)
            logits[[1, 5], place] = bad
            logits[3] = -torch.inf
            batch = make_batch([SamplingSpec(temperature)] * 6, num_expanded=2)
            batch = replace(batch, num_candidates=[3, 3])
            check(group, logits, batch, kernels)
            assert group.call(choose, logits, batch, kernels)[1][4] == [1, 3, 5]


def deal(communicator: Communicator, logits: Tensor) -> tuple[Tensor, int, Tensor]:
    vocabulary = VocabularyShard(logits.shape[1], communicator)
    part = logits[:, vocabulary.start : vocabulary.start + vocabulary.num_rows]
    dealt, first = vocabulary.deal(part)
    numbers = torch.arange(first, first + len(dealt))
    return dealt, first, vocabulary.collect(numbers, len(logits))


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_row_is_dealt_once(size: int, ranks: RanksOf) -> None:
    """Also where the last ranks get none."""
    for number in (1, 2, 5, 8, 9):
        logits = rows(number, 31)
        results = ranks(size).call(deal, logits)
        assert torch.equal(torch.cat([dealt for dealt, *_ in results]), logits)
        for dealt, first, numbers in results:
            assert torch.equal(dealt, logits[first : first + len(dealt)])
            assert numbers.tolist() == list(range(number))


def test_a_large_vocabulary_in_a_large_batch(ranks: RanksOf) -> None:
    """More rows than are worked on at once, and more draws."""
    logits = rows(40, 20_011)
    num_draws = [1] * 39 + [600]
    batch = make_batch([SamplingSpec(0.9)] * 40, range(40), num_draws=num_draws)
    check(ranks(3), logits, batch)
