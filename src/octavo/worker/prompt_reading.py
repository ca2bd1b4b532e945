"""What requests ask of the hidden states of their prompts: log-probabilities, or their sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.step import TokenLogprobs
from octavo.models.base import CausalLM
from octavo.ops import upload
from octavo.worker.input_batch import PromptChunk
from octavo.worker.logprobs import Int64s, Scores, rows_at_once
from octavo.worker.sampler import Sampler


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What a step has read, by sequence id; it may still be on its way to the host."""

    scores: dict[int, list[Scores]]
    pooled_ids: list[int]
    sums: Tensor | None  # float32 [len(pooled_ids), hidden_size]

    def scored(self) -> dict[int, list[TokenLogprobs]]:
        """The log-probabilities, one after the other; only when the step has ended."""
        return {
            seq_id: [entry for part in parts for (entry,) in part.entries()]
            for seq_id, parts in self.scores.items()
        }

    def pooled(self) -> dict[int, NDArray[np.float32]]:
        """The sums; only when the step has ended."""
        if self.sums is None:
            return {}
        rows: NDArray[np.float32] = self.sums.numpy()
        return dict(zip(self.pooled_ids, rows, strict=True))


NOTHING = PromptParts({}, [], None)


def read_prompts(
    model: CausalLM,
    hidden: Tensor,
    chunks: Sequence[PromptChunk],
    sampler: Sampler,
    to_host: Callable[[Tensor], Tensor],
) -> PromptParts:
    """Read each chunk; `hidden` is [num_tokens, hidden_size], and `to_host` starts a copy."""
    if not chunks:
        return NOTHING
    scores = {
        chunk.seq_id: _score(model, hidden, chunk, chunk.targets, sampler, to_host)
        for chunk in chunks
        if chunk.targets is not None
    }
    pooled = [chunk for chunk in chunks if chunk.targets is None]
    if not pooled:
        return PromptParts(scores, [], None)
    parts = [hidden[each.start : each.start + each.num_read] for each in pooled]
    sums = torch.stack([part.sum(dim=0, dtype=torch.float32) for part in parts])
    return PromptParts(scores, [each.seq_id for each in pooled], to_host(sums))


def not_finite(
    scores: dict[int, list[TokenLogprobs]], pooled: dict[int, NDArray[np.float32]]
) -> list[int]:
    """Ids of sequences of which something that is not finite was read."""
    found = [
        seq_id
        for seq_id, entries in scores.items()
        if any(math.isnan(entry.logprob) for entry in entries)
    ]
    return found + [seq_id for seq_id, total in pooled.items() if not np.isfinite(total).all()]


def _score(
    model: CausalLM,
    hidden: Tensor,
    chunk: PromptChunk,
    targets: Int64s,
    sampler: Sampler,
    to_host: Callable[[Tensor], Tensor],
) -> list[Scores]:
    """Log-probabilities of a chunk's targets, one after the other."""
    token_ids = upload(targets, hidden.device)
    # With a large vocabulary, the logits of a whole chunk would take gigabytes.
    vocabulary, score_tokens = sampler.vocabulary, sampler.drawer.score_tokens
    step = rows_at_once(vocabulary.size)
    parts = []
    for first in range(0, len(token_ids), step):
        part = token_ids[first : first + step]
        begin, size = chunk.start + first, len(part)
        logits = vocabulary.gather(model.logits(hidden[begin : begin + size]))
        scores = score_tokens(logits, np.arange(size), part, [1] * size, [chunk.num_top] * size)
        parts.append(scores.read_back(to_host))
    return parts
