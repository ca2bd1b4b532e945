"""How a CPU draws tokens: numpy and torch, row by row in slices that stay in its caches.

Filters come in the order of worker/sampler.py. Where tokens tie at a filter's limit, all of them
stay, so that what is kept depends on the row's values alone.

A token is drawn by inverting the cumulative distribution at one uniform number. The weights are
rounded to integers, whose sums are exact in any order: a row's token does not depend on which rows
share its batch, nor on how the vocabulary is divided among ranks, and a GPU's kernels
(ops/cuda/sampling.py) draw the same one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.cpu.row_ops import mask_rows
from octavo.ops.vocabulary import VocabularyShard, pack
from octavo.structured.constraint import Words
from octavo.worker.randomness import uniforms
from octavo.worker.sampler import (
    NO_TOKEN,
    Drawer,
    DrawMode,
    Int64s,
    SamplingBatch,
    draws_of,
)

# The most likely token of a row weighs 2 ** 40; 2 ** 22 tokens of that weight still fit into int64.
WEIGHT_BITS = 40
# exp(_NEVER) * 2 ** WEIGHT_BITS rounds to 0. exp takes several times longer where it underflows.
_NEVER = -60.0
_NUM_BEST = 1024  # most likely tokens that are searched before a whole row is sorted
_CHUNK = 128  # tokens that are summed up before the search; any size gives the same token
_MAX_DRAWS_AT_ONCE = 256
_SLICE_ELEMENTS = 1 << 18  # logits worked on at once


class CpuDrawer(Drawer):
    """See Drawer; what it stages is the batch itself."""

    def __init__(self) -> None:
        self._words: Words | None = None  # the step's masks

    def take_masks(self, words: Words) -> Tensor:
        self._words = words
        return torch.from_numpy(words)

    def rows_at_once(self, vocab_size: int) -> int:
        return max(1, _SLICE_ELEMENTS // vocab_size)

    def stage(self, batch: SamplingBatch, owners: Int64s | None, mode: DrawMode) -> SamplingBatch:
        return batch

    def select(
        self, draws: SamplingBatch, rows: Int64s, index: Tensor, owners: Int64s
    ) -> SamplingBatch:
        return draws.subset(rows)

    def slice_rows(self, draws: SamplingBatch, begin: int, end: int) -> SamplingBatch:
        return draws.subset(np.arange(begin, end))

    def draw(self, logits: Tensor, draws: SamplingBatch, vocabulary: VocabularyShard) -> Tensor:
        """See Drawer.draw.

        Of rows that are edited, only whether they are finite: they are drawn again.
        """
        n, owners = draws.num_sampled, draws.owners
        if draws.mask_places is not None:
            assert self._words is not None, "the batch refers to them"
            mask_rows(logits, self._words, draws.mask_places[:n], vocabulary.start)
        is_random = draws.temperature[:n] > 0
        for row in draws.edited:
            if row.index < n:
                is_random[row.index] = False
        random_rows = np.flatnonzero(is_random)
        if not len(random_rows):
            best = most_likely(logits, vocabulary)
            return best if owners is None else best[torch.from_numpy(owners)]
        token_ids = torch.empty(n if owners is None else len(owners), dtype=torch.int64)
        plain = np.flatnonzero(~is_random)
        if len(plain):
            best = most_likely(_select(logits, plain), vocabulary)
            where, places = draws_of(plain, owners)
            token_ids[torch.from_numpy(where)] = best[torch.from_numpy(places)]
        size = self.rows_at_once(vocabulary.num_rows)
        for first in range(0, len(random_rows), size):
            rows = random_rows[first : first + size]
            where, places = draws_of(rows, owners)
            token_ids[torch.from_numpy(where)] = draw_random(
                _select(logits, rows).float(), draws.subset(rows), places, vocabulary
            )
        return token_ids


def most_likely(logits: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """int64 [num_rows]: the token of each row's largest logit, the lowest of equal ones, or
    NO_TOKEN. `logits` are those of `vocabulary`."""
    best = argmax(logits).unsqueeze(1)
    values = logits.gather(1, best)
    if not vocabulary.is_whole:
        own = pack(values.float(), (best + vocabulary.start).int())
        parts = vocabulary.communicator.all_gather(own).transpose(0, 1)
        of_ranks = parts[:, :, 0].contiguous().view(torch.float32)
        rank = argmax(of_ranks).unsqueeze(1)
        values, best = of_ranks.gather(1, rank), parts[:, :, 1].gather(1, rank).long()
    # A row's largest value is NaN if any of its values is, so these tell of all, at no cost.
    return best.masked_fill_(~values.isfinite(), NO_TOKEN).squeeze(1)


def draw_random(
    logits: Tensor, batch: SamplingBatch, owners: Int64s, vocabulary: VocabularyShard
) -> Tensor:
    """Draw a token for each of `owners`.

    Args:
        logits: float32 [num_rows, ...], those of `vocabulary`, edited already; left unchanged.
            They must be whole if top_k or top_p is set.
        batch: of these rows, all of them with a temperature above 0.
        owners: int64 [num_draws], rows in ascending order. The i-th draw of a row is the first draw
            of the request's i-th next sample.

    Returns:
        int64 [num_draws]; NO_TOKEN for rows that are not finite.
    """
    number = np.arange(len(owners)) - np.searchsorted(owners, owners)
    noise = uniforms(
        torch.from_numpy(batch.seeds[owners]),
        torch.from_numpy(batch.sample_indices[owners] + number),
        torch.from_numpy(batch.positions[owners]),
    )
    top = vocabulary.largest(logits.amax(dim=-1, keepdim=True))
    weights = token_weights(logits, batch, top)
    return invert(weights, torch.from_numpy(owners), noise, vocabulary)


def token_weights(logits: Tensor, batch: SamplingBatch, top: Tensor) -> Tensor:
    """Each token's share of its row's distribution after all filters, as an integer.

    Args:
        logits: float32 [num_rows, num_tokens]; a row of temperature 0 gets weights of no meaning.
        top: float32 [num_rows, 1]: each row's largest logit, NaN if one of the row is.

    Returns:
        int64 [num_rows, num_tokens], at most 2 ** WEIGHT_BITS each; 0 for tokens filtered out, and
        for all tokens of a row that is not finite.
    """
    temperature = np.where(batch.temperature > 0, batch.temperature, np.float32(1))
    scaled = logits - top  # at most 0: any temperature is safe
    scaled *= torch.from_numpy(np.float32(1) / temperature).unsqueeze(1)
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
            limits = torch.from_numpy(np.log(batch.min_p)).unsqueeze(1)
        if top_k.any():
            places = torch.from_numpy(np.maximum(top_k - 1, 0)).unsqueeze(1)
            is_off = torch.from_numpy(top_k == 0).unsqueeze(1)
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


def invert(weights: Tensor, owners: Tensor, noise: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """The token at which the cumulative weights of its row first exceed noise * total.

    Args:
        weights: int64 [num_rows, num_tokens], of the tokens of `vocabulary`.
        owners: int64 [num_draws], rows of weights.
        noise: float64 [num_draws] in [0, 1).

    Returns:
        int64 [num_draws]; NO_TOKEN for a row without weights.
    """
    padding = -weights.shape[1] % _CHUNK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    chunks = weights.view(weights.shape[0], -1, _CHUNK)
    ends = chunks.sum(dim=-1).cumsum(dim=-1)  # [num_rows, num_chunks]
    communicator = vocabulary.communicator
    of_ranks = communicator.all_gather(ends[:, -1]).cumsum(dim=0)  # [num_ranks, num_rows]
    whole, before_rank = of_ranks[-1], of_ranks[communicator.shard.rank] - ends[:, -1]
    drawn = []
    for first in range(0, len(owners), _MAX_DRAWS_AT_ONCE):
        rows = owners[first : first + _MAX_DRAWS_AT_ONCE]
        row_ends = ends[rows]
        # Less than the total even when rounded: noise is at most 1 - 2 ** -53.
        target = noise[first : first + _MAX_DRAWS_AT_ONCE] * whole[rows]
        target = (target.to(torch.int64) - before_rank[rows]).unsqueeze(1)
        is_own = (target >= 0) & (target < row_ends[:, -1:])  # by whichever rank has the token
        chunk = (row_ends <= target).sum(dim=-1).clamp_(max=row_ends.shape[1] - 1)
        inside = chunks[rows, chunk].cumsum(dim=-1)  # [num_draws, _CHUNK]
        before = row_ends.gather(1, chunk.unsqueeze(1)) - inside[:, -1:]
        token_ids = chunk * _CHUNK + (inside <= target - before).sum(dim=-1) + vocabulary.start
        drawn.append(token_ids.masked_fill_(~is_own.squeeze(1), NO_TOKEN))
    return vocabulary.largest(torch.cat(drawn))


def _select(logits: Tensor, rows: Int64s) -> Tensor:
    """The given rows, ascending; without a copy if they are neighbours."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return logits[first : last + 1]
    return logits.index_select(0, torch.from_numpy(rows))


# Selections: numpy's vectorised routines take 1/10 to 1/30 of the time of torch's.


def argmax(values: Tensor) -> Tensor:
    """int64 [num_rows]: the place of each row's largest value, the lowest of equal ones.

    Args:
        values: floating [num_rows, num_columns].
    """
    # numpy has no bfloat16; the conversion is exact.
    return torch.from_numpy(values.float().numpy().argmax(axis=-1))


def largest(values: Tensor, number: int) -> Tensor:
    """The `number` largest values of each row (all, if there are fewer), in descending order.

    Args:
        values: float32 [num_rows, num_columns].
    """
    size = values.shape[1]
    number = min(number, size)
    array = values.numpy()
    if number < size:
        array = np.partition(array, size - number, axis=-1)[:, size - number :]
    return torch.from_numpy(np.sort(array, axis=-1)).flip(-1)


def top_p_limits(
    shares: Tensor, weights: Tensor, best: Tensor, top_p: NDArray[np.float64]
) -> Tensor:
    """The smallest share among the fewest tokens that reach top_p of their row.

    Args:
        shares: float32 [num_rows, num_columns], not negative.
        weights: int64 [num_rows, num_columns]: the shares rounded down; their sums are exact.
        best: float32 [num_rows, n]: each row's largest shares, in descending order.
        top_p: [num_rows], in (0, 1]; rows of 1 get the limit 0.

    Returns:
        float32 [num_rows].
    """
    fractions = torch.from_numpy(top_p)
    wanted = fractions * weights.sum(dim=-1)
    limits, is_reached = _limits_of_sorted(best, wanted)
    # Few tokens usually hold most of the mass; only rows where they do not are sorted.
    rest = ((fractions < 1) & ~is_reached).nonzero().squeeze(1)
    if len(rest) and best.shape[1] < shares.shape[1]:
        ordered = largest(shares[rest], shares.shape[1])
        limits[rest] = _limits_of_sorted(ordered, wanted[rest])[0]
    return limits.masked_fill_(fractions == 1, 0)


def _limits_of_sorted(ordered: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The limits of rows in descending order, and whether their tokens reach `wanted`."""
    counts = ordered.to(torch.int64)
    ends = counts.cumsum(dim=-1)
    # A token stays while those before it fall short; the first one always stays.
    num_kept = ((ends - counts) < wanted.unsqueeze(1)).sum(dim=-1, keepdim=True).clamp_(min=1)
    return ordered.gather(1, num_kept - 1).squeeze(1), ends[:, -1] >= wanted
