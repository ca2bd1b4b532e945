"""Log-probabilities for clients, of rows that ask for much beside rows that ask for little."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.worker import logprobs
from octavo.worker.logprobs import score_tokens


class _Sizes(TorchDispatchMode):
    """Keeps the size of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
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
