"""Log-probabilities for clients, of rows that ask for much beside rows that ask for little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.config import SchedulerConfig
from octavo.core.step import SamplingSpec
from octavo.ops.vocabulary import VocabularyShard
from octavo.structured.constraint import words_of
from octavo.worker import logprobs
from octavo.worker.device.cuda import CudaDevice
from octavo.worker.logit_edits import EditedRow
from octavo.worker.logprobs import score_tokens
from octavo.worker.sampler import Sampler
from worker.test_sampler import make_batch, sample


class _Sizes(TorchDispatchMode):
    """Keeps the size of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        if isinstance(result, Tensor) and not is_view:
            self.largest = max(self.largest, result.numel())
        return result


def test_a_row_with_many_draws_takes_no_more_memory_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(logprobs, "_MAX_ELEMENTS", 4 * 50)
    drawn = [[i % 50 for i in range(102)], [3]]
    token_ids, counts = torch.tensor(drawn[0] + drawn[1]), [102, 1]
    with _Sizes() as sizes:
        scores = score_tokens(logits, np.array([0, 1]), token_ids, counts, [2, 0])
    scored = scores.entries()
    assert sizes.largest <= 4 * 50
    for row, tokens in enumerate(drawn):
        wanted = logits[row].log_softmax(dim=-1)
        for token, entry in zip(tokens, scored[row], strict=True):
            assert entry.logprob == pytest.approx(wanted[token].item(), abs=1e-5)
            assert entry.rank == 1 + int((logits[row] > logits[row, token]).sum())


def test_a_row_with_many_top_tokens_does_not_have_others_searched_as_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[tuple[int, int]] = []

    def largest_of(scores: Tensor, number: int) -> tuple[Tensor, Tensor]:
        searched.append((len(scores), number))
        return whole(scores, number)

    whole = logprobs.largest_of
    monkeypatch.setattr(logprobs, "largest_of", largest_of)
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(2))
    num_top = [1, 500, 20, 0, 300, 5]
    scores = score_tokens(logits, np.arange(6), torch.tensor([7] * 6), [1] * 6, num_top)
    assert sorted(searched) == [(2, 500), (3, 20)]
    for row, [entry] in enumerate(scores.entries()):
        wanted, number = logits[row].log_softmax(dim=-1).sort(descending=True), num_top[row]
        assert [token_id for token_id, _ in entry.top] == wanted.indices[:number].tolist()
        assert [value for _, value in entry.top] == pytest.approx(
            wanted.values[:number].tolist(), abs=1e-5
        )


def test_candidates_of_many_rows_are_found_for_some_at_once() -> None:
    """Behind masks, edits or in great numbers they take several copies of the logits, which are not
    among the largest steps that a GPU's memory is measured with."""
    num_rows, vocab_size = 40, 500
    device = CudaDevice(torch.device("cpu"))
    staging = device.staging(SchedulerConfig(max_num_seqs=num_rows), 1)
    sampler = Sampler(
        device.drawer(staging, vocab_size), staging, VocabularyShard.whole(vocab_size)
    )
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    batch = make_batch([SamplingSpec()] * num_rows, num_expanded=num_rows)
    edits = [EditedRow(3, SamplingSpec(presence_penalty=1.0), np.arange(9, dtype=np.int32), 4)]
    words = np.stack([words_of(range(20, 90), vocab_size)])
    places = np.zeros(num_rows, np.int32)
    for number, fields, masks in (
        (5, {"mask_places": places}, words),
        (5, {"edited": edits}, None),
        (70, {}, None),
    ):
        asked = replace(batch, num_candidates=[number] * num_rows, **fields)
        with torch.inference_mode():
            staged = sampler.stage(asked)
            with _Sizes() as sizes:
                choice = sampler(logits, staged, masks)
        assert sizes.largest <= num_rows // 5 * 32 * (-(-vocab_size // 32)), number
        choice.read_back(device.to_host)
        wanted = sample(logits, asked, masks).candidates
        found = choice.candidates()
        assert found is not None
        assert wanted is not None
        assert np.array_equal(found.token_ids, wanted.token_ids)
