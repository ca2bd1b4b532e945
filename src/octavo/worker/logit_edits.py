"""Edits of a row's logits before they become a distribution: penalties, bias, forced tokens.

Order: repetition penalty, frequency and presence penalty, bias, and forced tokens at last. The
row's mask (row_masks.py) is taken after them, so that no bias lifts it. Only tokens that occur in a
row's text or settings are touched, so the cost grows with those and not with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.step import SamplingSpec

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EditedRow:
    """A row of logits to be edited."""

    index: int  # in the logits
    spec: SamplingSpec
    token_ids: NDArray[np.int32]  # [num_tokens]: prompt and output so far
    num_prompt_tokens: int


def has_edits(spec: SamplingSpec) -> bool:
    """Whether a row is edited."""
    return follows_text(spec) or spec.logit_bias is not None


def is_forced(spec: SamplingSpec, num_output_tokens: int) -> bool:
    """Whether the token after so many is forced, so that the row is edited there."""
    return any(number == num_output_tokens for number, _ in spec.forced_tokens)


def follows_text(spec: SamplingSpec) -> bool:
    """Whether a row's edits depend on the tokens so far, rather than on their number alone."""
    return bool(spec.presence_penalty or spec.frequency_penalty or spec.repetition_penalty != 1.0)


def edit_logits(logits: Tensor, rows: Sequence[EditedRow]) -> None:
    """Edit rows of `logits` (float32 [num_rows, vocab_size]) in place."""
    if not rows:
        return
    _penalise_repetition(logits, [row for row in rows if row.spec.repetition_penalty != 1.0])
    _penalise_counts(
        logits,
        [row for row in rows if row.spec.frequency_penalty or row.spec.presence_penalty],
    )
    _add_bias(logits, [row for row in rows if row.spec.logit_bias is not None])
    for row in rows:
        for number, token_ids in row.spec.forced_tokens:
            if number == len(row.token_ids) - row.num_prompt_tokens:
                forced = torch.tensor(token_ids, device=logits.device)
                # Certain, unless the row is NaN.
                values = logits[row.index, forced].nan_to_num(torch.nan, 0.0, 0.0) * 0
                logits[row.index].fill_(-torch.inf)
                logits[row.index, forced] = values


def _pairs(rows: Sequence[EditedRow], outputs_only: bool) -> tuple[Int64s, Int64s, Int64s]:
    """The distinct tokens of each row.

    Returns:
        int64 [num_pairs] each: index in `rows`, token id, and how often it occurs in the row.
    """
    texts = [row.token_ids[row.num_prompt_tokens if outputs_only else 0 :] for row in rows]
    owners = np.repeat(np.arange(len(rows)), [len(text) for text in texts])
    keys = (owners << 32) | np.concatenate(texts)
    distinct, counts = np.unique(keys, return_counts=True)
    return distinct >> 32, distinct & 0xFFFFFFFF, counts


def _penalise_repetition(logits: Tensor, rows: Sequence[EditedRow]) -> None:
    """A positive logit of a token in prompt or output is divided by the penalty, a negative one
    multiplied (Keskar et al., "CTRL", 2019, section 4.1, as in transformers)."""
    if not rows:
        return
    owners, token_ids, _ = _pairs(rows, outputs_only=False)
    # Beyond these limits float32 would overflow; clipping does not change the order of tokens.
    asked = [row.spec.repetition_penalty for row in rows]
    penalties = np.clip(asked, 1e-30, 1e30).astype(np.float32)[owners]
    where, penalty = _index(logits, rows, owners, token_ids), _to(logits, penalties)
    values = logits[where]
    logits[where] = torch.where(values < 0, values * penalty, values / penalty)


def _penalise_counts(logits: Tensor, rows: Sequence[EditedRow]) -> None:
    """logit -= frequency_penalty * count + presence_penalty, as OpenAI does, over output tokens."""
    if not rows:
        return
    owners, token_ids, counts = _pairs(rows, outputs_only=True)
    frequency = np.array([row.spec.frequency_penalty for row in rows], np.float32)[owners]
    presence = np.array([row.spec.presence_penalty for row in rows], np.float32)[owners]
    where = _index(logits, rows, owners, token_ids)
    logits[where] -= _to(logits, frequency * counts.astype(np.float32) + presence)


def _add_bias(logits: Tensor, rows: Sequence[EditedRow]) -> None:
    if not rows:
        return
    added = [row.spec.logit_bias for row in rows if row.spec.logit_bias is not None]
    token_ids = [np.frombuffer(each.token_ids, np.int64) for each in added]
    biases = np.concatenate([np.frombuffer(each.biases, np.float32) for each in added])
    owners = np.repeat(np.arange(len(rows)), list(map(len, token_ids)))
    logits[_index(logits, rows, owners, np.concatenate(token_ids))] += _to(logits, biases)


def _index(
    logits: Tensor, rows: Sequence[EditedRow], owners: Int64s, token_ids: Int64s
) -> tuple[Tensor, Tensor]:
    row_indices = np.array([row.index for row in rows], np.int64)[owners]
    device = logits.device
    return torch.from_numpy(row_indices).to(device), torch.from_numpy(token_ids).to(device)


def _to(logits: Tensor, values: Float32s) -> Tensor:
    return torch.from_numpy(values).to(logits.device)
