"""Which logits a rank has, and how those of all ranks become whole rows, or less where that does.

A row of logits is divided by the vocabulary. Whatever can be found from a few numbers of each rank
(the largest logit, sums of weights, the best candidates) is exchanged as such. Where whole rows are
needed, each rank may get some of them. In the end all ranks have the same bits: none has to be told
which tokens were drawn.
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
        """The shard of a single rank, which has whole rows."""
        return cls(size, SingleRank())

    def gather(self, logits: Tensor) -> Tensor:
        """This rank's part of rows -> the whole rows, [num_rows, size], each dense."""
        if self.is_whole:
            return logits
        return self._whole_rows(self.communicator.all_gather(self._padded(logits)))

    def deal(self, logits: Tensor) -> tuple[Tensor, int]:
        """This rank's part of rows -> whole rows [num_dealt, size], and the index of the first.

        All ranks get different rows and, but for the last ones, equally many.
        """
        num_ranks, num_rows = self.communicator.shard.size, len(logits)
        each = -(-num_rows // num_ranks)
        padded = self._padded(logits, each * num_ranks)
        parts = self.communicator.all_to_all(padded.view(num_ranks, each, self.num_rows))
        first = min(each * self.communicator.shard.rank, num_rows)
        return self._whole_rows(parts)[: min(each, num_rows - first)], first

    def collect(self, values: Tensor, num_rows: int) -> Tensor:
        """What ranks have found for the rows dealt to them -> that of all rows, [num_rows]."""
        each = -(-num_rows // self.communicator.shard.size)
        padded = F.pad(values, (0, each - len(values)))
        return self.communicator.all_gather(padded).view(-1)[:num_rows]

    def _padded(self, logits: Tensor, num_rows: int | None = None) -> Tensor:
        """The logits with as many tokens as other ranks have, and with so many rows."""
        num_more = 0 if num_rows is None else num_rows - len(logits)
        return F.pad(logits, (0, self.num_rows - logits.shape[1], 0, num_more))

    def _whole_rows(self, parts: Tensor) -> Tensor:
        """Each rank's part of the same rows, [num_ranks, n, num_rows] -> [n, size], each dense."""
        return parts.transpose(0, 1).reshape(parts.shape[1], -1)[:, : self.size]

    def largest(self, values: Tensor) -> Tensor:
        """The largest of the ranks' values, elementwise; NaN if one of them is."""
        return values if self.is_whole else self.communicator.all_gather(values).amax(dim=0)


def pack(*columns: Tensor) -> Tensor:
    """float32 and int32 tensors [num_rows, any] as one of int32, to be exchanged in one go."""
    return torch.cat([column.view(torch.int32) for column in columns], dim=1)
