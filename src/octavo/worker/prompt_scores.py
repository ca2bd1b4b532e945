"""Log-probabilities of prompt tokens, for requests that ask for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from octavo.core.step import TokenLogprobs
from octavo.models.base import CausalLM
from octavo.ops.vocabulary import VocabularyShard
from octavo.worker.input_batch import PromptChunk
from octavo.worker.logprobs import gather_logprobs, rows_at_once


def score_prompts(
    model: CausalLM, hidden: Tensor, chunks: Sequence[PromptChunk], vocabulary: VocabularyShard
) -> dict[int, list[TokenLogprobs]]:
    """Score each chunk's targets, by sequence id; `hidden` is [num_tokens, hidden_size]."""
    scored: dict[int, list[TokenLogprobs]] = {}
    # With a large vocabulary, the logits of a whole chunk would take gigabytes.
    step = rows_at_once(vocabulary.size)
    for chunk in chunks:
        entries: list[TokenLogprobs] = []
        targets = chunk.targets.tolist()
        for first in range(0, len(targets), step):
            part = targets[first : first + step]
            begin = chunk.start + first
            logits = vocabulary.gather(model.logits(hidden[begin : begin + len(part)]))
            rows, tops = range(len(part)), [chunk.num_top] * len(part)
            for entry in gather_logprobs(logits, rows, [[token] for token in part], tops):
                entries += entry
        scored[chunk.seq_id] = entries
    return scored


def not_finite(scored: Mapping[int, Sequence[TokenLogprobs]]) -> list[int]:
    """Ids of sequences with scores from logits that are not finite."""
    return [
        seq_id
        for seq_id, entries in scored.items()
        if any(math.isnan(entry.logprob) for entry in entries)
    ]
