"""Rows whose logits the device edits by itself, because it has records of their texts.

The device counts each token that it draws. The host says what else becomes of the rows: that they
begin with a text, fork, go on with other tokens than were drawn, or end. Nothing of it is uploaded
in a step that only draws one more token of each row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.step import SamplingSpec
from octavo.worker.logit_edits import has_edits

Int32s = NDArray[np.int32]


@dataclass(slots=True)
class RecordChanges:
    """What becomes of records before a step computes, in this order."""

    # (sources, targets); later copies may be of what earlier ones have copied.
    copies: list[tuple[list[int], list[int]]] = field(default_factory=list)
    opened: dict[int, SamplingSpec] = field(default_factory=dict)  # record -> how it edits
    # What the texts of opened records hold: int32 [n, 4] each, of a record, a token, how often the
    # output holds it, and whether the prompt does.
    texts: list[Int32s] = field(default_factory=list)
    # (record, token) -> by how much its number in the output changes.
    outputs: Counter[tuple[int, int]] = field(default_factory=Counter)
    places: dict[int, int] = field(default_factory=dict)  # row -> record, or -1 for none


class DeviceEdits(ABC):
    """A device's records of rows, and how it edits logits by them."""

    num_records: int

    @abstractmethod
    def can_edit(self, spec: SamplingSpec) -> bool:
        """Whether a record has room for what these edits need."""

    @abstractmethod
    def change(self, changes: RecordChanges) -> None:
        """Carry out the changes, behind the steps that were started, without waiting for them."""

    @abstractmethod
    def edit(self, logits: Tensor, rows: Tensor) -> Tensor:
        """The logits of these rows in float32, edited where the rows have records.

        Args:
            logits: floating [num_rows, ...], those of the rank's vocabulary; left unchanged.
            rows: int32 [num_rows], of the batch.
        """


class RowEdits:
    """Owns which rows have records."""

    def __init__(self, device: DeviceEdits | None) -> None:
        """device: None if the host edits the logits of all rows."""
        self._device = device
        self._free = [] if device is None else list(range(device.num_records - 1, -1, -1))
        self._record_of: dict[int, int] = {}
        self._changes: RecordChanges | None = None  # since they were carried out

    def open(self, row: int, spec: SamplingSpec, text: Int32s, num_prompt: int) -> bool:
        """Whether the device edits the logits of a row, which begins with this text. What it does
        not, the host has to."""
        # Candidates of beam search are edited behind the softmax.
        is_asked = has_edits(spec) and not spec.forced_tokens and not spec.num_candidates
        if self._device is None or not is_asked or not self._free:
            return False
        if not self._device.can_edit(spec):
            return False
        record, changes = self._take(row), self._pending()
        changes.opened[record] = spec
        changes.texts.append(_contents(record, text, num_prompt))
        return True

    def close(self, row: int) -> None:
        """End a row, whether it has a record or not."""
        record = self._record_of.pop(row, None)
        if record is not None:
            self._free.append(record)
            self._pending().places[row] = -1

    def copy(self, children: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Rows begin as copies of others. No parent is a child. Returns those of which the host has
        to edit the logits, though the device does those of their parents: no record was left."""
        sources, targets, left_over = list[int](), list[int](), list[int]()
        for child, parent in zip(children, parents, strict=True):
            self.close(child)
            record = self._record_of.get(parent)
            if record is None:
                continue
            if self._free:
                sources.append(record)
                targets.append(self._take(child))
            else:
                left_over.append(child)
        if targets:
            self._pending().copies.append((sources, targets))
        return left_over

    def rewrite(self, row: int, old: Int32s, new: Sequence[int]) -> bool:
        """New tokens take the place of the last ones of a row's output; either may be none. Returns
        whether the device still edits the row's logits: what it has counted cannot be taken back
        where the host does not know it (negative tokens)."""
        if (old < 0).any():
            self.close(row)
            return False
        record, outputs = self._record_of[row], self._pending().outputs
        for amount, token_ids in ((1, new), (-1, old.tolist())):
            for token_id in token_ids:
                outputs[record, token_id] += amount
        return True

    def prepare(self) -> None:
        """Have the device do all kinds of changes, so that it compiles no kernel later; nothing
        comes of them."""
        if self._device is not None:
            text = np.zeros((1, 4), np.int32)
            self._device.change(RecordChanges([([0], [0])], {0: SamplingSpec()}, [text]))

    def carry_out(self) -> None:
        """Have the device carry out what has changed since the last call."""
        changes, self._changes = self._changes, None
        if changes is not None:
            assert self._device is not None, "nothing changes without one"
            self._device.change(changes)

    def _take(self, row: int) -> int:
        record = self._record_of[row] = self._free.pop()
        self._pending().places[row] = record
        return record

    def _pending(self) -> RecordChanges:
        if self._changes is None:
            self._changes = RecordChanges()
        return self._changes


def _contents(record: int, text: Int32s, num_prompt: int) -> Int32s:
    """The tokens of a text, as RecordChanges has them."""
    # Without the counts, NumPy takes twenty times as long to find distinct integers.
    token_ids, numbers = np.unique(text, return_counts=True)
    output, of_output = np.unique(text[num_prompt:], return_counts=True)
    contents = np.zeros((len(token_ids), 4), np.int32)
    contents[:, 0], contents[:, 1] = record, token_ids
    contents[np.searchsorted(token_ids, output), 2] = of_output
    contents[:, 3] = numbers > contents[:, 2]  # the others are the prompt's
    return contents
