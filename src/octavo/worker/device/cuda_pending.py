"""What a GPU keeps between steps, and how it delivers results to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.core.step import TokenLogprobs
from octavo.ops import DecodeItems, Staging
from octavo.ops.cuda.pending_tokens import begin_decodes, fill_pending, keep_tokens
from octavo.ops.cuda.sampling import DeviceDraws
from octavo.ops.cuda.sampling_candidates import MAX_CANDIDATES
from octavo.ops.cuda.sampling_scores import SCORE_WORDS, deliver_scores
from octavo.worker.device.base import Delivered, PendingTokens
from octavo.worker.device.cuda_edits import CudaEdits
from octavo.worker.logprobs import FoundScores

_NUM_RESULTS = 8  # at least as many as steps that may be in flight, which are three


class CudaPendingTokens(PendingTokens):
    """See PendingTokens; row 0 is padding's.

    Results are written into the host's memory by the kernels that find them: copies would begin and
    end some microseconds later.
    """

    def __init__(self, num_rows: int, device: torch.device, edits: CudaEdits) -> None:
        """edits: where tokens are counted."""
        self._edits = edits
        self._last = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # The host's: int64 [steps, 1 + max_num_seqs], and int32 [steps, max_num_seqs, SCORE_WORDS]
        # from when tokens are scored first.
        self._results: Tensor | None = None
        self._scores: Tensor | None = None
        self._delivered: list[Delivered] = []  # views of both, of each step
        self._place: Tensor | None = None  # on the device: where they are, and which the step's are
        self._number = 0  # which the next step's are

    def fill(self, input_ids: Tensor, rows: Tensor) -> None:
        """See PendingTokens.fill."""
        fill_pending(input_ids, rows, self._last)

    def keep(self, token_ids: Tensor, rows: Tensor, are_edited: bool) -> None:
        """See PendingTokens.keep."""
        keep_tokens(token_ids, rows, self._last, **self._counting(are_edited))

    def begin(
        self,
        is_staged: Tensor,
        input_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        draws: DeviceDraws,
        items: Sequence[DecodeItems],
    ) -> None:
        """See PendingTokens.begin."""
        last, of_draws = self._last, draws.positions
        begin_decodes(is_staged, input_ids, positions, rows, last, of_draws, items)

    def stage_results(self, staging: Staging, are_scored: bool) -> Delivered:
        """See PendingTokens.stage_results."""
        if self._results is None or (are_scored and self._scores is None):
            self._make_room(staging.max_num_seqs, are_scored)
        assert self._results is not None, "made with the first step"
        scores = 0 if self._scores is None else self._scores.data_ptr()
        place = np.array([self._results.data_ptr(), self._number, scores])
        self._place = staging.put("results", place, len(place))
        return self.next_results()

    def next_results(self) -> Delivered:
        """See PendingTokens.next_results."""
        delivered = self._delivered[self._number]
        self._number = (self._number + 1) % _NUM_RESULTS
        return delivered

    def _make_room(self, most: int, are_scored: bool) -> None:
        """Make what is not there of memory for results of steps of so many sequences."""
        is_gpu = self._last.device.type == "cuda"
        if self._results is None:
            shape: tuple[int, ...] = (_NUM_RESULTS, 1 + most)
            self._results = torch.zeros(shape, dtype=torch.int64, pin_memory=is_gpu)
        if are_scored:
            shape = (_NUM_RESULTS, most, SCORE_WORDS)
            self._scores = torch.zeros(shape, dtype=torch.int32, pin_memory=is_gpu)
        scores = [None] * _NUM_RESULTS if self._scores is None else self._scores
        self._delivered = [
            Delivered(tokens[:1], tokens[1:], of_step)
            for tokens, of_step in zip(self._results, scores, strict=True)
        ]

    def score(
        self, logits: Tensor, token_ids: Tensor, numbers: Tensor, kinds: Sequence[int]
    ) -> None:
        """See PendingTokens.score."""
        assert self._place is not None, "stage_results() comes before score()"
        assert self._scores is not None, "stage_results() is told that tokens are scored"
        for number in kinds:
            size = self._scores.shape[1]
            deliver_scores(logits, token_ids, numbers, number, self._place, size)

    def scores(
        self, delivered: Delivered, rows: Sequence[int], num_top: Sequence[int]
    ) -> FoundScores:
        """See PendingTokens.scores."""
        assert delivered.scores is not None, "the step's tokens were scored"
        return DeliveredScores(rows, num_top, delivered.token_ids, delivered.scores)

    def deliver(
        self, token_ids: Tensor, rows: Tensor, counter: Tensor | None, are_edited: bool
    ) -> None:
        """See PendingTokens.deliver."""
        assert self._results is not None, "stage_results() comes before deliver()"
        shape = self._results.shape
        keep_tokens(
            *(token_ids, rows, self._last, self._place, counter, (shape[0], shape[1])),
            **self._counting(are_edited),
        )

    def _counting(self, are_edited: bool) -> dict[str, Any]:
        edits = self._edits
        return {"records": edits.records if are_edited else None, "first_token": edits.first_token}


@dataclass(frozen=True, slots=True)
class DeliveredScores:
    """See FoundScores: in memory of the host, as `deliver_scores` writes them."""

    rows: Sequence[int]  # those that are reported
    num_top: Sequence[int]  # most likely tokens to be reported for each of them
    token_ids: Tensor  # int64 [at least all rows]
    words: Tensor  # int32 [at least all rows, SCORE_WORDS]

    def read_back(self, to_host: Callable[[Tensor], Tensor]) -> DeliveredScores:
        """See FoundScores.read_back: they come by themselves."""
        return self

    def entries(self) -> list[list[TokenLogprobs]]:
        """See FoundScores.entries."""
        most, rows = max(self.num_top), np.array(self.rows)
        token_ids: list[int] = self.token_ids.numpy()[rows].tolist()
        words = self.words.numpy()
        floats = words.view(np.float32)
        ids = words[rows, 2 + MAX_CANDIDATES : 2 + MAX_CANDIDATES + most].tolist()
        values = floats[rows, 2 : 2 + most].tolist()
        own, ranks = floats[rows, 0].tolist(), words[rows, 1].tolist()
        return [
            [
                TokenLogprobs(
                    token_id, logprob, rank, tuple(zip(top_ids, tops, strict=True))[:number]
                )
            ]
            for token_id, logprob, rank, top_ids, tops, number in zip(
                *(token_ids, own, ranks, ids, values, self.num_top), strict=True
            )
        ]
