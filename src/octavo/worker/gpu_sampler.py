"""Sampling without waiting for the device: what is drawn comes to the host when it asks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.step import Candidates, TokenLogprobs
from octavo.ops.cuda.sampling import DeviceDraws, sample
from octavo.ops.cuda.sampling_candidates import MAX_CANDIDATES, best_tokens
from octavo.worker.logit_edits import EditedRow, edit_logits
from octavo.worker.logprobs import gather_logprobs
from octavo.worker.sampler import SamplingBatch, candidates_of
from octavo.worker.staging import DeviceStaging

Int64s = NDArray[np.int64]
DrawMode = Literal["greedy", "random", "limited"]


class Choice:
    """What a step has drawn, on the device and, after `read_back`, soon on the host."""

    def __init__(self, token_ids: Tensor, firsts: tuple[Int64s, Tensor] | None = None) -> None:
        """token_ids int64 [num_draws], row by row.

        `firsts`: where each row's draws begin, on host and device; None: each row has one.
        """
        self._token_ids = token_ids
        self._best: tuple[Tensor, Tensor] | None = None
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self._firsts = None if firsts is None else firsts[0]
        self._device_firsts = None if firsts is None else firsts[1]

    @classmethod
    def nothing(cls, device: torch.device) -> Choice:
        """Of a step that ends no row."""
        return cls(torch.zeros(0, dtype=torch.int64, device=device))

    @property
    def first(self) -> Tensor:
        """int64 [num_sampled] on the device: the first draw of each row."""
        if self._device_firsts is None:
            return self._token_ids
        return self._token_ids[self._device_firsts]

    def expand(self, logprobs: Tensor, token_ids: Tensor) -> None:
        """Keep the candidates of expanded rows, best first: [num_rows, n] each."""
        self._best = (logprobs, token_ids)

    def read_back(self) -> None:
        """Start the copies to the host."""
        self._token_ids = _to_host(self._token_ids)
        if self._best is not None:
            self._best = (_to_host(self._best[0]), _to_host(self._best[1]))

    # After `read_back`, once the device has come so far.

    def first_tokens(self) -> Int64s:
        """int64 [num_sampled]; negative of a row that is not finite."""
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

    def candidates(self) -> Candidates | None:
        """Of the expanded rows, if there are any."""
        return None if self._best is None else candidates_of(*self._best)


def _to_host(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return values.clone()  # the next step draws into the same place
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class GpuSampler:
    """Draws the tokens of one step after another; sampler.py says what is drawn."""

    def __init__(self, staging: DeviceStaging) -> None:
        self._staging = staging
        self._batch: SamplingBatch | None = None
        self._owners = np.zeros(0, np.int64)
        self._draws: DeviceDraws | None = None
        self._each_row: Tensor | None = None
        self._firsts: tuple[Int64s, Tensor] | None = None
        # How all rows are drawn, each once and by itself; None if there is more to it.
        self.mode: DrawMode | None = None

    def stage(self, batch: SamplingBatch) -> None:
        """Bring to the device how the rows of the step's logits become tokens."""
        self._batch = batch
        n = batch.num_sampled
        self.mode = self._draws = self._firsts = None
        if not n and batch.num_candidates:
            return  # nothing is drawn
        num_draws = batch.num_draws[:n]
        # Draw i belongs to row owners[i]; the j-th draw of a row is for its j-th next sample.
        owners = self._owners = np.repeat(np.arange(n), num_draws)
        number = np.arange(len(owners)) - np.searchsorted(owners, owners)
        is_random = batch.temperature[:n] > 0
        has_limits = (batch.top_k[:n] > 0) | (batch.top_p[:n] < 1)
        with np.errstate(divide="ignore"):
            log_min_p = np.log(batch.min_p[owners])
        self._draws = DeviceDraws(
            rows=self._put("rows", owners),
            temperature=self._put("temperature", batch.temperature[owners]),
            top_k=self._put("top_k", batch.top_k[owners]),
            top_p=self._put("top_p", batch.top_p[owners]),
            log_min_p=self._put("log_min_p", log_min_p),
            seeds=self._put("seeds", batch.seeds[owners]),
            sample_indices=self._put("sample_indices", batch.sample_indices[owners] + number),
            positions=self._put("positions", batch.positions[owners]),
            is_greedy=not is_random.any(),
            is_limited=bool((is_random & has_limits).any()),
        )
        if len(owners) != n:
            firsts = np.searchsorted(owners, np.arange(n))
            self._firsts = (firsts, self._put("firsts", firsts))
        is_plain = not (batch.edited or batch.num_logprobs or batch.num_candidates)
        if is_plain and len(owners) == n:
            self.mode = "greedy" if self._draws.is_greedy else "random"
            self.mode = "limited" if self._draws.is_limited else self.mode

    def draw_padded(self, logits: Tensor, mode: DrawMode) -> Tensor:
        """A token for each row, int64 [num_rows], by what is staged when the kernels run.

        Rows beyond those that were staged get tokens of no meaning.
        """
        num_rows = len(logits)
        if self._each_row is None:
            self._each_row = torch.arange(self._staging.max_num_seqs, device=logits.device)

        def staged(name: str) -> Tensor:
            return self._staging.padded(f"draws.{name}", num_rows)

        return sample(
            logits,
            DeviceDraws(
                self._each_row[:num_rows],
                staged("temperature"),
                staged("top_k"),
                staged("top_p"),
                staged("log_min_p"),
                staged("seeds"),
                staged("sample_indices"),
                staged("positions"),
                is_greedy=mode == "greedy",
                is_limited=mode == "limited",
            ),
        )

    def _put(self, name: str, values: NDArray[Any]) -> Tensor:
        return self._staging.put(f"draws.{name}", values, self._staging.max_num_seqs)

    def __call__(self, logits: Tensor) -> Choice:
        """Rows that draw, then expanded ones: [num_rows, vocab_size]."""
        batch, draws = self._batch, self._draws
        assert batch is not None, "stage() comes first"
        n = batch.num_sampled
        if draws is None:  # no row draws
            token_ids = torch.zeros(0, dtype=torch.int64, device=logits.device)
        else:
            token_ids = sample(logits[:n], draws)
        edited = [edit for edit in batch.edited if edit.index < n]
        if edited:
            self._redraw(token_ids, logits, edited)
        choice = Choice(token_ids, self._firsts)
        if batch.num_logprobs:
            self._score(choice, logits, batch, token_ids)
        if batch.num_candidates:
            choice.expand(*_expand(logits[n:], batch))
        return choice

    def _redraw(self, token_ids: Tensor, logits: Tensor, edited: list[EditedRow]) -> None:
        """Draw again for rows whose logits are not taken as they are."""
        draws, device = self._draws, logits.device
        assert draws is not None
        rows = np.array([edit.index for edit in edited])
        copy = logits[torch.from_numpy(rows).to(device)].float()
        edit_logits(copy, [replace(edit, index=i) for i, edit in enumerate(edited)])
        where = np.flatnonzero(np.isin(self._owners, rows))
        owners = np.searchsorted(rows, self._owners[where])
        index = torch.from_numpy(where).to(device)
        drawn = sample(
            copy,
            DeviceDraws(
                torch.from_numpy(owners).to(device),
                draws.temperature[index],
                draws.top_k[index],
                draws.top_p[index],
                draws.log_min_p[index],
                draws.seeds[index],
                draws.sample_indices[index],
                draws.positions[index],
                draws.is_greedy,
                draws.is_limited,
            ),
        )
        # No mask hides that the logits, as they were, are not finite.
        token_ids[index] = drawn.where(token_ids[index] >= 0, token_ids[index])

    def _score(
        self, choice: Choice, logits: Tensor, batch: SamplingBatch, token_ids: Tensor
    ) -> None:
        rows = [row for row in batch.num_logprobs if row < batch.num_sampled]
        tokens = np.maximum(token_ids.cpu().numpy(), 0)
        chosen = [tokens[self._owners == row].tolist() for row in rows]
        num_top = [batch.num_logprobs[row] for row in rows]
        scores = gather_logprobs(logits, rows, chosen, num_top)
        choice.logprobs = dict(zip(rows, scores, strict=True))


def _expand(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the best next tokens of expanded rows, best first.

    As in transformers' beam search, edits act on log-probabilities, without renormalising.
    """
    n = batch.num_sampled
    edited = [replace(edit, index=edit.index - n) for edit in batch.edited if edit.index >= n]
    number = min(max(batch.num_candidates), logits.shape[1])
    if not edited and number <= MAX_CANDIDATES:
        return best_tokens(logits, number)
    scores = logits.float().log_softmax(dim=-1)
    edit_logits(scores, edited)
    best = scores.topk(number, dim=-1)
    return best.values, best.indices
