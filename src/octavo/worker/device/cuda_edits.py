"""How a GPU edits the logits of rows whose texts it has records of."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.core.step import LogitBias, SamplingSpec
from octavo.ops.cuda.logit_edits import MAX_BIASES, EditRecords, EditSettings
from octavo.ops.vocabulary import VocabularyShard
from octavo.worker.logit_edits import repetition_penalty
from octavo.worker.row_edits import DeviceEdits, RecordChanges


class CudaEdits(DeviceEdits):
    """See DeviceEdits. Each rank has the records of its part of the vocabulary."""

    def __init__(
        self, num_rows: int, num_records: int, vocabulary: VocabularyShard, device: torch.device
    ) -> None:
        self.num_records = num_records
        self.records = EditRecords(num_rows, num_records, vocabulary.num_rows, device)
        self.first_token = vocabulary.start

    def can_edit(self, spec: SamplingSpec) -> bool:
        bias = spec.logit_bias
        return bias is None or len(bias.token_ids) <= 8 * MAX_BIASES

    def change(self, changes: RecordChanges) -> None:
        records = self.records
        for sources, targets in changes.copies:
            records.copy(sources, targets)
        if changes.opened:
            records.open(
                list(changes.opened), [_settings(each) for each in changes.opened.values()]
            )
        if changes.texts:
            records.count(np.concatenate(changes.texts), self.first_token)
        if changes.outputs:
            moved = [(*place, amount, 0) for place, amount in changes.outputs.items()]
            records.count(np.array(moved, np.int32), self.first_token)
        if changes.places:
            records.place(list(changes.places), list(changes.places.values()))

    def edit(self, logits: Tensor, rows: Tensor) -> Tensor:
        return self.records.edit(logits, rows, self.first_token)


def _settings(spec: SamplingSpec) -> EditSettings:
    bias = spec.logit_bias or LogitBias.of({})
    return EditSettings(
        repetition_penalty(spec),
        spec.frequency_penalty,
        spec.presence_penalty,
        np.frombuffer(bias.token_ids, np.int64),
        np.frombuffer(bias.biases, np.float32),
    )
