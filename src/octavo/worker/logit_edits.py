"""Edits of a row's logits before they become a distribution: penalties, bias, forced tokens.

Order: repetition penalty, frequency and presence penalty, bias, and forced tokens at last. The
row's mask (row_masks.py) is taken after them, so that no bias lifts it. Only tokens that occur in a
row's text or settings are touched, so the cost grows with those and not with the vocabulary.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.step import SamplingSpec
from octavo.ops import upload

Int64s = NDArray[np.int64]


class TokenCounts:
    """The distinct tokens of a row's text, and how often each of them occurs in its output. A token
    more is one look-up more, however long the text is."""

    __slots__ = ("_counts", "_places", "_token_ids", "num_counted")

    def __init__(self) -> None:
        self.num_counted = 0  # tokens of the text
        self._token_ids = array("q")
        self._counts = array("q")
        self._places: dict[int, int] = {}  # of the tokens, in both

    def copy(self) -> TokenCounts:
        """What was counted so far; both go on by themselves."""
        twin = TokenCounts()
        twin.num_counted, twin._places = self.num_counted, self._places.copy()
        twin._token_ids, twin._counts = self._token_ids[:], self._counts[:]
        return twin

    def take(self, text: NDArray[np.int32], num_prompt_tokens: int) -> None:
        """Count what is new in a text that begins with what was counted before."""
        output = max(self.num_counted, num_prompt_tokens)
        for token_id in set(text[self.num_counted : output].tolist()):
            self._add(token_id, 0)
        for token_id, count in Counter(text[output:].tolist()).items():
            self._add(token_id, count)
        self.num_counted = len(text)

    def _add(self, token_id: int, count: int) -> None:
        place = self._places.setdefault(token_id, len(self._token_ids))
        if place == len(self._token_ids):
            self._token_ids.append(token_id)
            self._counts.append(0)
        self._counts[place] += count

    def pairs(self, outputs_only: bool) -> tuple[Int64s, Int64s]:
        """Distinct tokens, and how often each occurs in the output."""
        token_ids, counts = np.array(self._token_ids), np.array(self._counts)
        if not outputs_only:
            return token_ids, counts
        is_there = counts > 0
        return token_ids[is_there], counts[is_there]


@dataclass(frozen=True, slots=True)
class EditedRow:
    """A row of logits to be edited."""

    index: int  # in the logits
    spec: SamplingSpec
    token_ids: NDArray[np.int32]  # [num_tokens]: prompt and output so far
    num_prompt_tokens: int
    # Of as many tokens or fewer; kept from one step of the row to the next.
    counts: TokenCounts = field(default_factory=TokenCounts)


def has_edits(spec: SamplingSpec) -> bool:
    """Whether a row is edited."""
    return follows_text(spec) or spec.logit_bias is not None


def is_forced(spec: SamplingSpec, num_output_tokens: int) -> bool:
    """Whether the token after so many is forced, so that the row is edited there."""
    return any(number == num_output_tokens for number, _ in spec.forced_tokens)


def follows_text(spec: SamplingSpec) -> bool:
    """Whether a row's edits depend on the tokens so far, rather than on their number alone."""
    return bool(spec.presence_penalty or spec.frequency_penalty or spec.repetition_penalty != 1.0)


def repetition_penalty(spec: SamplingSpec) -> float:
    """The penalty of repetition, as far as logits in float32 do not overflow; beyond these limits
    the order of tokens would be the same."""
    return min(max(spec.repetition_penalty, 1e-30), 1e30)


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
                forced = upload(np.array(token_ids, np.int64), logits.device)
                # Certain, unless the row is NaN.
                values = logits[row.index, forced].nan_to_num(torch.nan, 0.0, 0.0) * 0
                logits[row.index].fill_(-torch.inf)
                logits[row.index, forced] = values


def _pairs(rows: Sequence[EditedRow], outputs_only: bool) -> tuple[Int64s, Int64s, Int64s]:
    """The distinct tokens of each row.

    Returns:
        int64 [num_pairs] each: index in `rows`, token id, and how often it occurs in the output.
    """
    for row in rows:
        row.counts.take(row.token_ids, row.num_prompt_tokens)
    token_ids, counts = zip(*(row.counts.pairs(outputs_only) for row in rows), strict=True)
    owners = np.repeat(np.arange(len(rows)), list(map(len, token_ids)))
    return owners, np.concatenate(token_ids), np.concatenate(counts)


def _penalise_repetition(logits: Tensor, rows: Sequence[EditedRow]) -> None:
    """A positive logit of a token in prompt or output is divided by the penalty, a negative one
    multiplied (Keskar et al., "CTRL", 2019, section 4.1, as in transformers)."""
    if not rows:
        return
    owners, token_ids, _ = _pairs(rows, outputs_only=False)
    asked = [repetition_penalty(row.spec) for row in rows]
    penalties = np.array(asked, np.float32)[owners]
    where, penalty = _index(logits, rows, owners, token_ids), upload(penalties, logits.device)
    values = logits[where]
    logits[where] = torch.where(values < 0, values * penalty, values / penalty)


def _penalise_counts(logits: Tensor, rows: Sequence[EditedRow]) -> None:
    """logit -= frequency_penalty * count + presence_penalty, as OpenAI does, over output tokens."""
    if not rows:
        return
    owners, token_ids, counts = _pairs(rows, outputs_only=True)
    frequency = np.array([row.spec.frequency_penalty for row in rows], np.float32)[owners]
    presence = np.array([row.spec.presence_penalty for row in rows], np.float32)[owners]
    penalties = frequency * counts.astype(np.float32) + presence
    where = _index(logits, rows, owners, token_ids)
    logits[where] -= upload(penalties, logits.device)


def _add_bias(logits: Tensor, rows: Sequence[EditedRow]) -> None:
    if not rows:
        return
    added = [row.spec.logit_bias for row in rows if row.spec.logit_bias is not None]
    token_ids = [np.frombuffer(each.token_ids, np.int64) for each in added]
    biases = np.concatenate([np.frombuffer(each.biases, np.float32) for each in added])
    owners = np.repeat(np.arange(len(rows)), list(map(len, token_ids)))
    logits[_index(logits, rows, owners, np.concatenate(token_ids))] += upload(biases, logits.device)


def _index(
    logits: Tensor, rows: Sequence[EditedRow], owners: Int64s, token_ids: Int64s
) -> tuple[Tensor, Tensor]:
    row_indices = np.array([row.index for row in rows], np.int64)[owners]
    device = logits.device
    return upload(row_indices, device), upload(token_ids, device)
