"""Sampling without waiting for the device: what is drawn comes to the host when it asks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.step import TokenLogprobs
from octavo.worker.logit_edits import edit_logits
from octavo.worker.logprobs import gather_logprobs
from octavo.worker.sampler import SamplingBatch, draw
from octavo.worker.staging import DeviceStaging

Int64s = NDArray[np.int64]


class Choice:
    """What a step has drawn, on the device and, after `read_back`, soon on the host."""

    def __init__(self, num_sampled: int, owners: Int64s, token_ids: Tensor) -> None:
        """`owners`: for each draw its row, ascending; token_ids int64 [len(owners)]."""
        self._num_sampled = num_sampled
        self._owners = owners
        self._token_ids = token_ids
        self._best: tuple[Tensor, Tensor] | None = None
        self._num_candidates: list[int] = []
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        # Where each row's draws begin; most rows have one.
        self._firsts: Int64s | None = None
        if len(owners) != num_sampled:
            self._firsts = np.searchsorted(owners, np.arange(num_sampled))

    @classmethod
    def nothing(cls, device: torch.device) -> Choice:
        """Of a step that ends no row."""
        return cls(0, np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int64, device=device))

    @property
    def first(self) -> Tensor:
        """int64 [num_sampled] on the device: the first draw of each row."""
        if self._firsts is None:
            return self._token_ids
        return self._token_ids[torch.from_numpy(self._firsts).to(self._token_ids.device)]

    def expand(self, values: Tensor, token_ids: Tensor, wanted: list[int]) -> None:
        """Keep the candidates of expanded rows, best first: [num_rows, max(wanted)] each."""
        self._best = (values, token_ids)
        self._num_candidates = wanted

    def read_back(self) -> None:
        """Start the copies to the host."""
        self._token_ids = _to_host(self._token_ids)
        if self._best is not None:
            self._best = (_to_host(self._best[0]), _to_host(self._best[1]))

    # After `read_back`, once the device has come so far.

    def first_tokens(self) -> Int64s:
        """int64 [num_sampled]."""
        tokens: Int64s = self._token_ids.numpy()
        return tokens if self._firsts is None else tokens[self._firsts]

    def draws(self) -> dict[int, list[int]]:
        """All draws of rows with several."""
        if self._firsts is None:
            return {}
        tokens = self._token_ids.tolist()
        ends = np.append(self._firsts[1:], len(tokens)).tolist()
        pairs = zip(self._firsts.tolist(), ends, strict=True)
        return {row: tokens[a:b] for row, (a, b) in enumerate(pairs) if b - a > 1}

    def candidates(self) -> dict[int, list[tuple[int, float]]]:
        """(token id, log-probability) of the best next tokens of each expanded row."""
        if self._best is None:
            return {}
        values, ids = self._best[0].tolist(), self._best[1].tolist()
        return {
            row: list(zip(ids_of_row[:n], values_of_row[:n], strict=True))
            for row, (n, ids_of_row, values_of_row) in enumerate(
                zip(self._num_candidates, ids, values, strict=True), self._num_sampled
            )
        }


def _to_host(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class GpuSampler:
    """Draws the tokens of one step after another; see sampler.py for what is drawn."""

    def __init__(self, staging: DeviceStaging) -> None:
        self._staging = staging
        self._batch: SamplingBatch | None = None

    def stage(self, batch: SamplingBatch) -> None:
        """Take in how the rows of the step's logits become tokens."""
        self._batch = batch

    def __call__(self, logits: Tensor) -> Choice:
        """Rows that draw, then expanded ones: [num_rows, vocab_size]."""
        batch = self._batch
        assert batch is not None, "stage() comes first"
        n = batch.num_sampled
        edited = logits.float()
        edit_logits(edited, batch.edited)
        token_ids, owners = draw(edited[:n], _sampled(batch))
        choice = Choice(n, owners, token_ids)
        if batch.num_logprobs:
            self._score(choice, logits, batch, token_ids, owners)
        if batch.num_candidates:
            self._expand(choice, logits[n:], batch)
        return choice

    def _score(
        self,
        choice: Choice,
        logits: Tensor,
        batch: SamplingBatch,
        token_ids: Tensor,
        owners: Int64s,
    ) -> None:
        rows = [row for row in batch.num_logprobs if row < batch.num_sampled]
        tokens = token_ids.cpu().numpy()
        chosen = [tokens[owners == row].tolist() for row in rows]
        num_top = [batch.num_logprobs[row] for row in rows]
        scores = gather_logprobs(logits, rows, chosen, num_top)
        choice.logprobs = dict(zip(rows, scores, strict=True))

    def _expand(self, choice: Choice, logits: Tensor, batch: SamplingBatch) -> None:
        scores = logits.float().log_softmax(dim=-1)
        n = batch.num_sampled
        edit_logits(scores, [replace(e, index=e.index - n) for e in batch.edited if e.index >= n])
        best = scores.topk(min(max(batch.num_candidates), scores.shape[1]), dim=-1)
        choice.expand(best.values, best.indices, batch.num_candidates)


def _sampled(batch: SamplingBatch) -> SamplingBatch:
    n = batch.num_sampled
    return SamplingBatch(
        num_sampled=n,
        temperature=np.ascontiguousarray(batch.temperature[:n]),
        top_k=np.ascontiguousarray(batch.top_k[:n]),
        top_p=np.ascontiguousarray(batch.top_p[:n]),
        min_p=np.ascontiguousarray(batch.min_p[:n]),
        seeds=np.ascontiguousarray(batch.seeds[:n]),
        sample_indices=np.ascontiguousarray(batch.sample_indices[:n]),
        positions=np.ascontiguousarray(batch.positions[:n]),
        num_draws=np.ascontiguousarray(batch.num_draws[:n]),
    )
