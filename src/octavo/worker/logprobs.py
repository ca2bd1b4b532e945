"""Log-probabilities for clients: log-softmax of the model's logits, before any edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.step import TokenLogprobs
from octavo.ops import upload

Int64s = NDArray[np.int64]

_MAX_ELEMENTS = 1 << 24  # float32 logits held at once: 64 MiB
_FEW_TOP = 16  # rows that ask for fewer than twice as many are searched together


def rows_at_once(vocab_size: int) -> int:
    """How many rows of logits are scored together, so that long prompts need little memory."""
    return max(1, _MAX_ELEMENTS // vocab_size)


class FoundScores(Protocol):
    """Log-probabilities of some tokens of rows of logits; NaN if a row is not finite. They may be
    on the device or, after `read_back`, on their way to the host."""

    def read_back(self, to_host: Callable[[Tensor], Tensor]) -> FoundScores:
        """The same where the host finds it when the device has come so far."""
        ...

    def entries(self) -> list[list[TokenLogprobs]]:
        """For each row one entry per token; only when the device has come so far."""
        ...


class Tops(NamedTuple):
    """The most likely tokens of some rows that ask for about as many."""

    rows: list[int]  # among those that are scored; one may be there again
    token_ids: Tensor  # integers [num_rows, as many as one of them asks for], best first
    logprobs: Tensor  # float32, the same


class Scores(NamedTuple):
    """See FoundScores."""

    owners: Sequence[int]  # the row of each token, among those that are scored
    num_top: Sequence[int]  # most likely tokens to be reported for each row
    token_ids: Tensor  # int64 [all tokens]
    logprobs: Tensor  # float32 [all tokens]
    ranks: Tensor  # int64 [all tokens]: 1 is the most likely token
    tops: list[Tops]

    def read_back(self, to_host: Callable[[Tensor], Tensor]) -> Scores:
        """See FoundScores.read_back."""
        return self._replace(
            token_ids=to_host(self.token_ids),
            logprobs=to_host(self.logprobs),
            ranks=to_host(self.ranks),
            tops=[
                Tops(rows, to_host(token_ids), to_host(logprobs))
                for rows, token_ids, logprobs in self.tops
            ],
        )

    def entries(self) -> list[list[TokenLogprobs]]:
        """See FoundScores.entries."""
        found: list[list[TokenLogprobs]] = [[] for _ in self.num_top]
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(self.num_top)
        for rows, token_ids, logprobs in self.tops:
            for row, ids, values in zip(rows, token_ids.tolist(), logprobs.tolist(), strict=True):
                number = self.num_top[row]
                tops[row] = tuple(zip(ids[:number], values[:number], strict=True))
        numbers = (each.tolist() for each in (self.token_ids, self.logprobs, self.ranks))
        for token_id, logprob, rank, owner in zip(*numbers, self.owners, strict=True):
            found[owner].append(TokenLogprobs(token_id, logprob, rank, tops[owner]))
        return found


def score_tokens(
    logits: Tensor,
    rows: Int64s,
    token_ids: Tensor,
    num_tokens: Sequence[int],
    num_top: Sequence[int],
) -> Scores:
    """Score tokens of some rows, without waiting for the device.

    Args:
        logits: floating [num_rows, vocab_size].
        rows: rows of `logits`, at least one.
        token_ids: int64 [sum of num_tokens], row by row, where the logits are; a negative one, of
            a row that is not finite, counts as token 0.
        num_tokens: how many of them belong to each of `rows`.
        num_top: how many of the most likely tokens to report for each of `rows`.
    """
    step = rows_at_once(logits.shape[1])
    ends = np.cumsum([0, *num_tokens])
    owners: list[int] = np.arange(len(rows)).repeat(num_tokens).tolist()
    logprobs, ranks, tops = [], [], list[Tops]()
    for first in range(0, len(rows), step):
        end = min(first + step, len(rows))
        part = slice(first, end)
        scores = logits[upload(rows[part], logits.device)].float()
        normaliser = scores.logsumexp(dim=-1, keepdim=True)
        normaliser = normaliser.where(normaliser.isfinite(), torch.nan)
        own = token_ids[ends[first] : ends[end]].clamp(min=0)
        of_tokens = _score(scores, normaliser, own, num_tokens[part])
        logprobs.append(of_tokens[0])
        ranks.append(of_tokens[1])
        tops += _tops_of(scores, normaliser, num_top[part], first)
    return Scores(owners, num_top, token_ids, torch.cat(logprobs), torch.cat(ranks), tops)


def largest_of(scores: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The `number` largest scores of each row, and the ids of their tokens: [num_rows, number].

    Of equal scores, which are usual in bfloat16, that of the lower id comes first: what a row gets
    does not depend on how many tokens the other rows of its step ask for.

    Args:
        scores: float32 [num_rows, vocab_size].
    """
    values, ids = scores.topk(number, dim=-1)
    # Which of the tokens that equal the last one topk has taken is not specified.
    limit, size = values[:, -1:], scores.shape[1]
    every = torch.arange(size, dtype=torch.int32, device=scores.device)
    lowest = every.where(scores == limit, size - 1).topk(number, dim=-1, largest=False).values
    is_last = values == limit
    ids = lowest.long().gather(1, is_last.cumsum(dim=-1).sub_(1).clamp_(min=0)).where(is_last, ids)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _score(
    scores: Tensor, normaliser: Tensor, token_ids: Tensor, num_tokens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ranks of tokens; scores: float32, of rows that have so many each."""
    owners = upload(np.arange(len(scores)).repeat(num_tokens), scores.device)
    picked = scores[owners, token_ids]
    # Few rows have several tokens, but those may have thousands; the usual case needs no copy.
    is_usual, step = len(token_ids) == len(scores), rows_at_once(scores.shape[1])
    ranks = []
    for first in range(0, len(token_ids), step):
        part = slice(first, first + step)
        drawn_from = scores if is_usual else scores[owners[part]]
        ranks.append((drawn_from > picked[part].unsqueeze(1)).sum(dim=-1) + 1)
    return picked - normaliser[owners, 0], torch.cat(ranks)


def _tops_of(
    scores: Tensor, normaliser: Tensor, num_top: Sequence[int], first_row: int
) -> list[Tops]:
    """The most likely tokens of rows, of which the first one is `first_row`; a row that asks for
    many does not have as many looked for in all others."""
    alike: dict[int, list[int]] = {}
    for row, number in enumerate(num_top):
        if number > 0:
            alike.setdefault(max(number, _FEW_TOP).bit_length(), []).append(row)
    tops = []
    for rows in alike.values():
        index = upload(np.array(rows), scores.device)
        own = scores if len(rows) == len(scores) else scores[index]
        most = max(num_top[row] for row in rows)
        largest, token_ids = largest_of(own, min(most, scores.shape[1]))
        tops.append(Tops([first_row + row for row in rows], token_ids, largest - normaliser[index]))
    return tops
