"""Which logits a rank has, and how those of all ranks become whole rows, or less where that does.

A row of logits is divided by the vocabulary. Whatever can be found from a few numbers of each rank
(the largest logit, sums of weights, the best candidates) is exchanged as such; all ranks get the
same bits, so all of them draw the same tokens, and nobody has to be told.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.communicator import Communicator, SingleRank


class VocabularyShard:
    """One rank's part of the vocabulary: `num_rows` tokens from `start` on; of the last ranks
    fewer, since the others divide evenly."""

    def __init__(self, size: int, communicator: Communicator) -> None:
        """`size`: of the whole vocabulary."""
        shard = communicator.shard
        self.size = size
        self.communicator = communicator
        self.is_whole = shard.size == 1
        self.num_rows = shard.padded(size)
        self.start = shard.rank * self.num_rows
        # Tokens that every rank has at least.
        self.least_rows = size - (shard.size - 1) * self.num_rows

    @classmethod
    def whole(cls, size: int) -> VocabularyShard:
        """For whole rows."""
        return cls(size, SingleRank())

    def gather(self, logits: Tensor) -> Tensor:
        """This rank's part of rows -> the whole rows, [num_rows, size], each dense."""
        if self.is_whole:
            return logits
        padded = F.pad(logits, (0, self.num_rows - logits.shape[1]))
        parts = self.communicator.all_gather(padded)
        return parts.transpose(0, 1).reshape(len(logits), -1)[:, : self.size]

    def largest(self, values: Tensor) -> Tensor:
        """The largest of the ranks' values, elementwise; NaN if one of them is."""
        return values if self.is_whole else self.communicator.all_gather(values).amax(dim=0)


def pack(*columns: Tensor) -> Tensor:
    """float32 and int32 tensors [num_rows, any] as one of int32, to be exchanged in one go."""
    return torch.cat([column.view(torch.int32) for column in columns], dim=1)
