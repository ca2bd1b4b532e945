"""Turns logits into tokens, on the device of the logits.

Order of a row's filters: penalties, bias and masks (logit_edits.py), temperature, min_p, top_k,
top_p. Each filter sees what the ones before it left over. Where tokens tie at a filter's limit, all
of them stay, so that what is kept depends on the row's values alone.

A row is not finite if it holds NaN or +inf, or nothing but -inf. It gets NO_TOKEN; the others are
drawn as if it were not there.

A token is drawn by inverting the cumulative distribution at one uniform number. The weights are
rounded to integers, whose sums are exact in any order: a row's token does not depend on which rows
share its batch, nor on how a device adds up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.step import Candidates, TokenLogprobs
from octavo.errors import LogitsNotFinite, RequestFailed
from octavo.worker.logit_edits import EditedRow, edit_logits
from octavo.worker.logprobs import gather_logprobs
from octavo.worker.randomness import uniforms
from octavo.worker.selection import argmax, largest, top_p_limits

NO_TOKEN = -1
# The most likely token of a row weighs 2 ** 40; 2 ** 22 tokens of that weight still fit into int64.
WEIGHT_BITS = 40
# exp(_NEVER) * 2 ** WEIGHT_BITS rounds to 0. exp takes several times longer where it underflows.
_NEVER = -60.0
_NUM_BEST = 1024  # most likely tokens that are looked at before a row is sorted
_CHUNK = 128  # tokens that are summed up before the search; any size gives the same token
_MAX_DRAWS_AT_ONCE = 256
_SLICE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}  # logits worked on at once


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row of logits is turned into tokens; arrays have one entry per row."""

    num_sampled: int  # rows that draw; the rest are expanded to candidates
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.int64]
    sample_indices: NDArray[np.int64]
    positions: NDArray[np.int64]  # of the token to be drawn
    num_draws: NDArray[np.int64]
    edited: list[EditedRow] = field(default_factory=list)  # in order of their index
    num_logprobs: dict[int, int] = field(default_factory=dict)  # row -> how many most likely tokens
    num_candidates: list[int] = field(default_factory=list)  # of each expanded row


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What was drawn; dictionaries are keyed by row and hold only rows that asked."""

    token_ids: Tensor  # int64 [num_sampled], the first draw of each row, or NO_TOKEN
    draws: dict[int, list[int]]  # rows with several draws
    logprobs: dict[int, list[TokenLogprobs]]  # one entry per draw
    candidates: Candidates | None  # of the expanded rows, if there are any
    not_finite: list[int]  # rows


class Sampler:
    """Holds no state: equal logits and equal batches give equal tokens."""

    @torch.inference_mode()
    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        """Choose the next tokens.

        Args:
            logits: floating [num_rows, vocab_size], left unchanged: sampled rows, then expanded.
        """
        token_ids, draws = self._draw(logits, batch)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if batch.num_logprobs:
            rows = [row for row in batch.num_logprobs if row < batch.num_sampled]
            num_top = [batch.num_logprobs[row] for row in rows]
            first = token_ids.tolist()
            chosen = [draws.get(row, [first[row]]) for row in rows]
            logprobs = dict(zip(rows, gather_logprobs(logits, rows, chosen, num_top), strict=True))
        candidates = self._expand(logits, batch)
        not_finite = rows_not_finite(token_ids.cpu().numpy(), candidates)
        return SamplerOutput(token_ids, draws, logprobs, candidates, not_finite)

    def _draw(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, dict[int, list[int]]]:
        n, device = batch.num_sampled, logits.device
        several = batch.num_draws[:n] > 1
        is_worked = (batch.temperature[:n] > 0) | several
        is_worked[[row.index for row in batch.edited if row.index < n]] = True
        worked = np.flatnonzero(is_worked)
        if len(worked) == 0:
            return most_likely(logits[:n]), {}

        token_ids = torch.empty(n, dtype=torch.int64, device=device)
        if len(worked) < n:
            plain = torch.from_numpy(np.flatnonzero(~is_worked)).to(device)
            token_ids[plain] = most_likely(logits[plain])
        draws: dict[int, list[int]] = {}
        for rows in _slices(worked, logits):
            sub = _select(logits, rows)
            edit_visibly(sub, _edits_of(batch, rows))
            drawn, owners = draw(sub, _subset(batch, rows))
            firsts = np.searchsorted(owners, np.arange(len(rows)))
            places = torch.from_numpy(rows).to(device)
            token_ids[places] = drawn[torch.from_numpy(firsts).to(device)]
            for index in np.flatnonzero(several[rows]).tolist():
                end = firsts[index] + int(batch.num_draws[rows[index]])
                draws[int(rows[index])] = drawn[firsts[index] : end].tolist()
        return token_ids, draws

    def _expand(self, logits: Tensor, batch: SamplingBatch) -> Candidates | None:
        """The best next tokens of each expanded row by log-probability, best first.

        As in transformers' beam search, edits act on log-probabilities, without renormalising.
        Those of a row that is not finite are all NaN, which no mask hides.
        """
        if not batch.num_candidates:
            return None
        number = min(max(batch.num_candidates), logits.shape[1])
        expanded = np.arange(batch.num_sampled, batch.num_sampled + len(batch.num_candidates))
        found = []
        for rows in _slices(expanded, logits):
            scores = _select(logits, rows).log_softmax(dim=-1)
            edit_logits(scores, _edits_of(batch, rows))
            found.append(scores.topk(number, dim=-1))
        values, indices = (torch.cat(parts) for parts in zip(*found, strict=True))
        return candidates_of(values, indices)


def draw(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, NDArray[np.int64]]:
    """Draw `num_draws` tokens of each row, all rows from their own distribution.

    Args:
        logits: float32 [num_rows, vocab_size], edited already.

    Returns:
        int64 [num_draws in all], and for each draw the row it belongs to, ascending. NO_TOKEN is
        drawn of rows that are not finite.
    """
    owners = np.repeat(np.arange(len(batch.num_draws)), batch.num_draws)
    device = logits.device
    is_random = batch.temperature > 0
    if not is_random.any():
        return most_likely(logits)[torch.from_numpy(owners).to(device)], owners

    # The i-th draw of a row is the first draw of the request's i-th next sample.
    number = np.arange(len(owners)) - np.searchsorted(owners, owners)
    noise = uniforms(
        torch.from_numpy(batch.seeds[owners]).to(device),
        torch.from_numpy(batch.sample_indices[owners] + number).to(device),
        torch.from_numpy(batch.positions[owners]).to(device),
    )
    owner_ids = torch.from_numpy(owners).to(device)
    drawn = invert(token_weights(logits, batch), owner_ids, noise)
    if not is_random.all():
        greedy = torch.from_numpy(~is_random).to(device)
        drawn = torch.where(greedy[owner_ids], most_likely(logits)[owner_ids], drawn)
    return drawn, owners


def most_likely(logits: Tensor) -> Tensor:
    """int64 [num_rows]: the token of each row's largest logit, the lowest of equal ones, or
    NO_TOKEN."""
    best = argmax(logits)
    # A row's largest value is NaN if any of its values is, so these tell of all, at no cost.
    is_finite = logits.gather(1, best.unsqueeze(1)).isfinite().squeeze(1)
    return best.masked_fill_(~is_finite, NO_TOKEN)


def edit_visibly(logits: Tensor, edits: list[EditedRow]) -> None:
    """`edit_logits`, but that no mask hides that a row is not finite: it is NaN afterwards."""
    if not edits:
        return
    rows = torch.tensor([edit.index for edit in edits], device=logits.device)
    is_finite = logits[rows].amax(dim=-1).isfinite()
    edit_logits(logits, edits)
    if not is_finite.all():
        logits[rows[~is_finite]] = torch.nan


def rows_not_finite(token_ids: NDArray[np.int64], candidates: Candidates | None) -> list[int]:
    """Of what was drawn, one token a row, and of the candidates of the rows behind them."""
    rows: list[int] = np.flatnonzero(token_ids < 0).tolist()
    if candidates is not None:
        is_finite = np.isfinite(candidates.logprobs[:, 0])
        rows += (len(token_ids) + np.flatnonzero(~is_finite)).tolist()
    return rows


def logits_not_finite(seq_ids: Iterable[int]) -> dict[int, RequestFailed]:
    """Errors of rows that hold NaN or infinity: there is nothing to choose from."""
    message = (
        "the model's logits for this request are not finite numbers: its weights are damaged, or "
        "too large for their dtype"
    )
    return {seq_id: LogitsNotFinite(message) for seq_id in seq_ids}


def candidates_of(logprobs: Tensor, token_ids: Tensor) -> Candidates:
    """Of tensors [num_rows, n], best first; the first log-probability of a row that is not finite
    is not either."""
    return Candidates(token_ids.long().cpu().numpy(), logprobs.double().cpu().numpy())


def token_weights(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Each token's share of its row's distribution after all filters, as an integer.

    Args:
        logits: float32 [num_rows, vocab_size]; a row of temperature 0 gets weights of no meaning.

    Returns:
        int64 [num_rows, vocab_size], at most 2 ** WEIGHT_BITS each; 0 for tokens filtered out, and
        for all tokens of a row that is not finite.
    """
    device = logits.device
    temperature = np.where(batch.temperature > 0, batch.temperature, np.float32(1))
    top = logits.amax(dim=-1, keepdim=True)
    scaled = logits - top  # at most 0: any temperature is safe
    scaled /= torch.from_numpy(temperature).to(device).unsqueeze(1)
    is_finite = top.isfinite()
    if not is_finite.all():
        scaled.masked_fill_(~is_finite, _NEVER)

    top_k = np.where(batch.top_k > 0, np.minimum(batch.top_k, logits.shape[1]), 0)
    needs_top_p = bool((batch.top_p < 1).any())
    best = scaled[:, :0]  # each row's largest values, in descending order
    if top_k.any() or needs_top_p:
        best = largest(scaled, max(_NUM_BEST, int(top_k.max())))
    # A weight is exp(scaled), so min_p, relative to the most likely token, is a limit on scaled.
    if top_k.any() or batch.min_p.any():
        with np.errstate(divide="ignore"):
            limits = torch.from_numpy(np.log(batch.min_p)).to(device).unsqueeze(1)
        if top_k.any():
            places = torch.from_numpy(np.maximum(top_k - 1, 0)).to(device).unsqueeze(1)
            is_off = torch.from_numpy(top_k == 0).to(device).unsqueeze(1)
            kth = best.gather(1, places).masked_fill_(is_off, -torch.inf)
            limits = torch.maximum(limits, kth)
        scaled.masked_fill_(scaled < limits, _NEVER)
    shares = _to_shares(scaled)
    weights = shares.to(torch.int64)
    if needs_top_p:
        limits = top_p_limits(shares, weights, _to_shares(best), batch.top_p)
        weights.masked_fill_(shares < limits.unsqueeze(1), 0)
    return weights


def _to_shares(scaled: Tensor) -> Tensor:
    """exp(scaled) * 2 ** WEIGHT_BITS, in place."""
    return scaled.clamp_(min=_NEVER).exp_().mul_(2.0**WEIGHT_BITS)


def invert(weights: Tensor, owners: Tensor, noise: Tensor) -> Tensor:
    """The token at which the cumulative weights of its row first exceed noise * total.

    Args:
        weights: int64 [num_rows, vocab_size].
        owners: int64 [num_draws], rows of weights.
        noise: float64 [num_draws] in [0, 1).

    Returns:
        int64 [num_draws]; NO_TOKEN of a row without weights.
    """
    vocab_size = weights.shape[1]
    padding = -vocab_size % _CHUNK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    chunks = weights.view(weights.shape[0], -1, _CHUNK)
    ends = chunks.sum(dim=-1).cumsum(dim=-1)  # [num_rows, num_chunks]
    drawn = []
    for first in range(0, len(owners), _MAX_DRAWS_AT_ONCE):
        rows = owners[first : first + _MAX_DRAWS_AT_ONCE]
        row_ends = ends[rows]
        # Less than the total even when rounded: noise is at most 1 - 2 ** -53.
        totals = row_ends[:, -1]
        target = noise[first : first + _MAX_DRAWS_AT_ONCE] * totals
        target = target.to(torch.int64).unsqueeze(1)
        chunk = (row_ends <= target).sum(dim=-1).clamp_(max=row_ends.shape[1] - 1)
        inside = chunks[rows, chunk].cumsum(dim=-1)  # [num_draws, _CHUNK]
        before = row_ends.gather(1, chunk.unsqueeze(1)) - inside[:, -1:]
        token_ids = chunk * _CHUNK + (inside <= target - before).sum(dim=-1)
        drawn.append(token_ids.masked_fill_(totals == 0, NO_TOKEN))
    return torch.cat(drawn)


def _slices(rows: NDArray[np.int64], logits: Tensor) -> Iterator[NDArray[np.int64]]:
    """The rows in parts that are small enough to be worked on at once."""
    limit = _SLICE_ELEMENTS.get(logits.device.type, 1 << 26)
    size = max(1, limit // logits.shape[1])
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def _select(values: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """A float32 copy of the given rows."""
    picked = values.index_select(0, torch.from_numpy(rows).to(values.device))
    return picked.float()


def _edits_of(batch: SamplingBatch, rows: NDArray[np.int64]) -> list[EditedRow]:
    """The edits of the given rows (ascending), which are renumbered from 0."""
    place = {row: index for index, row in enumerate(rows.tolist())}
    return [
        replace(edited, index=place[edited.index])
        for edited in batch.edited
        if edited.index in place
    ]


def _subset(batch: SamplingBatch, rows: NDArray[np.int64]) -> SamplingBatch:
    return SamplingBatch(
        num_sampled=len(rows),
        temperature=batch.temperature[rows],
        top_k=batch.top_k[rows],
        top_p=batch.top_p[rows],
        min_p=batch.min_p[rows],
        seeds=batch.seeds[rows],
        sample_indices=batch.sample_indices[rows],
        positions=batch.positions[rows],
        num_draws=batch.num_draws[rows],
    )
