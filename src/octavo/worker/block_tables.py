"""Block tables of the rows: on the host, and for GPU kernels on the device, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import CascadeSegments, Staging, upload
from octavo.worker.cascade import SegmentFinder

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

# Table entries that fit into one step's staging; a step that changes more uploads them separately.
_STAGED_ENTRIES = 16_384


class TableUpdate(NamedTuple):
    """Entries of the device's tables that have changed, of all KV groups together."""

    tables: Tensor  # int32, flat: all of them
    where: Tensor  # int64: indices into `tables`
    block_ids: Tensor  # int32

    def carry_out(self) -> None:
        """Write the entries, once they are uploaded; one kernel."""
        self.tables.index_copy_(0, self.where, self.block_ids)


class StepTables(NamedTuple):
    """What attention reads in a step; see AttentionBatch. One entry per KV group, or none."""

    block_tables: Sequence[Tensor]
    slots: Sequence[Tensor]
    cascade: Sequence[CascadeSegments | None]


class BlockTables:
    """Owns the block tables of the running sequences: [KV groups, rows, blocks]."""

    def __init__(
        self,
        block_sizes: Sequence[int],
        num_rows: int,
        on_device: DeviceTables | None = None,
        of_encoder: Sequence[bool] | None = None,
    ) -> None:
        """
        Args:
            block_sizes: tokens per block, by KV group.
            on_device: the mirror of these tables on the device.
            of_encoder: whether a group holds the encoder's input; None: no group does.
        """
        self._of_encoder = of_encoder or [False] * len(block_sizes)
        self._block_sizes = block_sizes
        self._on_device = on_device
        self._tables: Int32s = np.zeros((len(block_sizes), num_rows, 16), np.int32)

    def clear(self, row: int) -> None:
        """Empty a row for another sequence."""
        self._tables[:, row] = 0
        if self._on_device is not None:
            # The device's row may stay: entries beyond a sequence's length are never read.
            self._on_device.segments.invalidate()

    def copy(self, children: Int64s, parents: Int64s) -> None:
        """Copy each parent's row, as it was before the call, to the child's."""
        old, new = self._tables[:, children], self._tables[:, parents]
        if self._on_device is not None:
            groups, differing, columns = (old != new).nonzero()
            self._on_device.note(groups, children[differing], columns)
            self._on_device.segments.invalidate()
        self._tables[:, children] = new

    def write(self, groups: Int64s, rows: Int64s, columns: Int64s, block_ids: Int64s) -> None:
        """Set entries; where indices repeat, the last one holds."""
        self._tables = widen(self._tables, int(columns.max(initial=0)) + 1)
        if self._on_device is not None:
            segments = self._on_device.segments
            if segments.has_cached:
                old = self._tables[groups, rows, columns]
                if ((old != 0) & (old != block_ids)).any():
                    segments.invalidate()
            self._on_device.note(groups, rows, columns)
        self._tables[groups, rows, columns] = block_ids

    def of_step(
        self,
        rows: Int64s,
        query_lens: Int64s,
        context_lens: Int64s,
        row_of_token: Int64s,
        positions: Int64s,
        encoder_lens: Int32s | None = None,
    ) -> StepTables:
        """What attention needs for `rows`.

        On the host: their tables, gathered, and the slots of their tokens. With resident tables:
        those of the device, and the segments of shared keys that cascade attention reads once.
        """
        if self._on_device is not None:
            segments = self._on_device.segments
            cascade = segments.find(self._tables, rows, query_lens, context_lens)
            return StepTables(self._on_device.tables, [], cascade)
        longest = int(context_lens.max(initial=1))
        gathered, slots = [], []
        for group, (table, size) in enumerate(zip(self._tables, self._block_sizes, strict=True)):
            if self._of_encoder[group]:
                assert encoder_lens is not None, "the rows have encoder inputs"
                width = -(-int(encoder_lens.max(initial=1)) // size)
                gathered.append(torch.from_numpy(table[rows, :width]))
                slots.append(torch.empty(0, dtype=torch.int64))  # a step's tokens write none
            else:
                gathered.append(torch.from_numpy(table[rows, : -(-longest // size)]))
                slots.append(self._slots(group, row_of_token, positions))
        return StepTables(gathered, slots, [])

    def of_encoded(self, row_of_token: Int64s, positions: Int64s) -> StepTables:
        """What writing the K and V of encoder inputs needs: slots, or the device's tables."""
        if self._on_device is not None:
            return StepTables(self._on_device.tables, [], [])
        groups = range(len(self._block_sizes))
        return StepTables([], [self._slots(g, row_of_token, positions) for g in groups], [])

    def _slots(self, group: int, row_of_token: Int64s, positions: Int64s) -> Tensor:
        """int64 [num_tokens]: where the tokens at these positions of these rows lie."""
        size = self._block_sizes[group]
        index, offset = np.divmod(positions, size)
        blocks = self._tables[group, row_of_token, index].astype(np.int64)
        return torch.from_numpy(blocks * size + offset)

    def stage(self, staging: Staging) -> TableUpdate | None:
        """Stage changed entries for the next upload, after which the update can be carried out;
        None if there are none."""
        return None if self._on_device is None else self._on_device.stage(self._tables, staging)


class DeviceTables:
    """Owns block tables on the device: a step uploads only the entries that have changed.

    Row 0 is for padding: it holds null blocks only. All KV groups are one tensor, so that a step
    updates them with one upload and one kernel, however many there are.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        have_windows: Sequence[bool],
        num_rows: int,
        max_blocks: int,
        device: torch.device,
        least_saved: int,
    ) -> None:
        """Allocates all memory now, since captured graphs keep the addresses.

        Args:
            block_sizes: tokens per block, by KV group.
            have_windows: whether layers of a group see only the last tokens; one entry per group.
            max_blocks: blocks of the longest sequence, in any group.
            least_saved: keys that cascade attention must save; see `least_saved_keys`.
        """
        self.segments = SegmentFinder(block_sizes, have_windows, least_saved)
        shape = len(have_windows), num_rows, max_blocks
        self._all = torch.zeros(shape, dtype=torch.int32, device=device)
        self.tables = self._all.unbind()
        # Groups, rows and columns of entries that have changed since the last upload.
        self._changed: list[tuple[Int64s, Int64s, Int64s]] = []

    def note(self, groups: Int64s, rows: Int64s, columns: Int64s) -> None:
        """Record that these entries change."""
        last, num_columns = columns.max(initial=0), self._all.shape[2]
        assert last < num_columns, f"column {last} is not below {num_columns}"
        self._changed.append((groups, rows, columns))

    def stage(self, tables: Int32s, staging: Staging) -> TableUpdate | None:
        """See BlockTables.stage; `tables` are the host's."""
        if not self._changed:
            return None
        groups, rows, columns = map(np.concatenate, zip(*self._changed, strict=True))
        self._changed.clear()
        # The present values: an entry that has changed twice occurs twice with the same value.
        block_ids = tables[groups, rows, columns]
        _, num_rows, num_columns = self._all.shape
        where = (groups * num_rows + rows) * num_columns + columns
        if len(where) <= _STAGED_ENTRIES:
            indices = staging.put("table_index", where, _STAGED_ENTRIES, part="blocks")
            values = staging.put("table_value", block_ids, _STAGED_ENTRIES, part="blocks")
        else:
            indices = upload(where, self._all.device)
            values = upload(block_ids, self._all.device)
        return TableUpdate(self._all.view(-1), indices, values)


def widen(array: Int32s, num_columns: int) -> Int32s:
    """The array with at least `num_columns` columns, its last dimension; it grows by doubling, and
    new ones are 0."""
    old = array.shape[-1]
    if num_columns <= old:
        return array
    wider = np.zeros((*array.shape[:-1], max(num_columns, 2 * old)), np.int32)
    wider[..., :old] = array
    return wider
