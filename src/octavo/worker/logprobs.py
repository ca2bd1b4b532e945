"""Log-probabilities for clients: log-softmax of the model's logits, before any edits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.core.step import TokenLogprobs

_MAX_ELEMENTS = 1 << 24  # float32 logits held at once: 64 MiB


def rows_at_once(vocab_size: int) -> int:
    """How many rows of logits are scored together, so that long prompts need little memory."""
    return max(1, _MAX_ELEMENTS // vocab_size)


def gather_logprobs(
    logits: Tensor, rows: Sequence[int], chosen: Sequence[Sequence[int]], num_top: Sequence[int]
) -> list[list[TokenLogprobs]]:
    """Score chosen tokens of some rows.

    Args:
        logits: floating [num_rows, vocab_size].
        rows: rows of `logits`.
        chosen: tokens of each of `rows`.
        num_top: how many of the most likely tokens to report for each of `rows`.

    Returns:
        For each of `rows` one entry per chosen token; NaN if the row is not finite.
    """
    step = rows_at_once(logits.shape[1])
    result: list[list[TokenLogprobs]] = []
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        result += _score(logits, rows[part], chosen[part], num_top[part])
    return result


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
    logits: Tensor, rows: Sequence[int], chosen: Sequence[Sequence[int]], num_top: Sequence[int]
) -> list[list[TokenLogprobs]]:
    if not rows:
        return []
    device = logits.device
    scores = logits[torch.tensor(rows, device=device)].float()
    normaliser = scores.logsumexp(dim=-1, keepdim=True)
    normaliser = normaliser.where(normaliser.isfinite(), torch.nan)

    owners = [place for place, tokens in enumerate(chosen) for _ in tokens]
    token_ids = [token_id for tokens in chosen for token_id in tokens]
    owner_ids = torch.tensor(owners, device=device)
    picked = scores[owner_ids, torch.tensor(token_ids, device=device)]
    logprobs = (picked - normaliser[owner_ids, 0]).tolist()
    # Few rows have several chosen tokens; the usual case needs no copy.
    drawn_from = scores if len(owners) == len(rows) else scores[owner_ids]
    ranks = ((drawn_from > picked.unsqueeze(1)).sum(dim=-1) + 1).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
    if max(num_top) > 0:
        largest, top_ids = largest_of(scores, min(max(num_top), scores.shape[1]))
        values = (largest - normaliser).tolist()
        tops = [
            tuple(zip(ids[:number], vals[:number], strict=True))
            for number, ids, vals in zip(num_top, top_ids.tolist(), values, strict=True)
        ]
    entries = iter(
        TokenLogprobs(token_id, logprob, rank, tops[owner])
        for token_id, logprob, rank, owner in zip(token_ids, logprobs, ranks, owners, strict=True)
    )
    return [[next(entries) for _ in tokens] for tokens in chosen]
