"""Log-probabilities for clients: log-softmax of the model's logits, before any edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.step import TokenLogprobs
from octavo.worker.staging import upload

Int64s = NDArray[np.int64]

_MAX_ELEMENTS = 1 << 24  # float32 logits held at once: 64 MiB


def rows_at_once(vocab_size: int) -> int:
    """How many rows of logits are scored together, so that long prompts need little memory."""
    return max(1, _MAX_ELEMENTS // vocab_size)


class Scores(NamedTuple):
    """Log-probabilities of some tokens of rows of logits, row by row; NaN if a row is not finite.
    They may be on the device or, after `read_back`, on their way to the host."""

    num_tokens: Sequence[int]  # of each row
    num_top: Sequence[int]  # most likely tokens to be reported for each row
    token_ids: Tensor  # int64 [all tokens]
    logprobs: Tensor  # float32 [all tokens]
    ranks: Tensor  # int64 [all tokens]: 1 is the most likely token
    top_ids: Tensor  # int64 [num_rows, largest of num_top]
    top_logprobs: Tensor  # float32, the same

    def read_back(self, to_host: Callable[[Tensor], Tensor]) -> Scores:
        """The same where the host finds it when the device has come so far."""
        tensors = (to_host(each) for each in self[2:])
        return Scores(self.num_tokens, self.num_top, *tensors)

    def entries(self) -> list[list[TokenLogprobs]]:
        """For each row one entry per token; only when the device has come so far."""
        token_ids, logprobs, ranks, top_ids, top_logprobs = (each.tolist() for each in self[2:])
        tops = [
            tuple(zip(ids[:number], values[:number], strict=True))
            for number, ids, values in zip(self.num_top, top_ids, top_logprobs, strict=True)
        ]
        owners = (row for row, number in enumerate(self.num_tokens) for _ in range(number))
        entries = (
            TokenLogprobs(token_id, logprob, rank, tops[owner])
            for token_id, logprob, rank, owner in zip(
                token_ids, logprobs, ranks, owners, strict=True
            )
        )
        return [list(islice(entries, number)) for number in self.num_tokens]


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
        token_ids: int64 [sum of num_tokens], where the logits are.
        num_tokens: how many of them belong to each of `rows`.
        num_top: how many of the most likely tokens to report for each of `rows`.
    """
    step = rows_at_once(logits.shape[1])
    most = min(max(num_top), logits.shape[1])
    ends = np.cumsum([0, *num_tokens])
    parts = [
        _score(
            logits,
            rows[i : i + step],
            token_ids[ends[i] : ends[min(i + step, len(rows))]],
            num_tokens[i : i + step],
            most,
        )
        for i in range(0, len(rows), step)
    ]
    tensors = (torch.cat(each) for each in zip(*parts, strict=True))
    return Scores(num_tokens, num_top, token_ids, *tensors)


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
    logits: Tensor, rows: Int64s, token_ids: Tensor, num_tokens: Sequence[int], most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `score_tokens` says of a few rows: the last four fields of Scores."""
    device = logits.device
    scores = logits[upload(rows, device)].float()
    normaliser = scores.logsumexp(dim=-1, keepdim=True)
    normaliser = normaliser.where(normaliser.isfinite(), torch.nan)
    # Few rows have several tokens, but those may have thousands; the usual case needs no copy.
    is_usual, step = len(token_ids) == len(rows), rows_at_once(scores.shape[1])
    owners = upload(np.arange(len(rows)).repeat(num_tokens), device)
    picked = scores[owners, token_ids]
    logprobs = picked - normaliser[owners, 0]
    parts = [slice(first, first + step) for first in range(0, len(token_ids), step)]
    drawn_from = (scores if is_usual else scores[owners[part]] for part in parts)
    ranks = torch.cat(
        [
            (values > picked[part].unsqueeze(1)).sum(dim=-1) + 1
            for values, part in zip(drawn_from, parts, strict=True)
        ]
    )
    if not most:
        return logprobs, ranks, token_ids.new_zeros((len(rows), 0)), scores[:, :0]
    largest, top_ids = largest_of(scores, most)
    return logprobs, ranks, top_ids, largest - normaliser
