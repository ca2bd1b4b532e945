"""Block tables of the rows: on the host, and for GPU kernels on the device, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import CascadeSegments, Staging
from octavo.worker.cascade import SegmentFinder

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

# Table entries that fit into one step's staging; a step that changes more uploads them separately.
_STAGED_ENTRIES = 16_384

Update = tuple[Tensor, Tensor, Tensor]  # a flat table, indices into it, values


class StepTables(NamedTuple):
    """What attention reads in a step; see AttentionBatch. One entry per KV group, or none."""

    block_tables: list[Tensor]
    slots: list[Tensor]
    cascade: list[CascadeSegments | None]


class BlockTables:
    """Owns one table per KV group, with a row per running sequence."""

    def __init__(
        self,
        block_size: int,
        num_groups: int,
        num_rows: int,
        on_device: DeviceTables | None = None,
    ) -> None:
        """`on_device`: the mirror of these tables on the device."""
        self._block_size = block_size
        self._on_device = on_device
        self._tables: list[Int32s] = [np.zeros((num_rows, 16), np.int32) for _ in range(num_groups)]

    @property
    def num_groups(self) -> int:
        """KV groups."""
        return len(self._tables)

    def clear(self, row: int) -> None:
        """Empty a row for another sequence."""
        for table in self._tables:
            table[row] = 0
        if self._on_device is not None:
            # The device's row may stay: entries beyond a sequence's length are never read.
            self._on_device.segments.invalidate()

    def copy(self, children: Int64s, parents: Int64s) -> None:
        """Copy each parent's row, as it was before the call, to the child's."""
        for group, table in enumerate(self._tables):
            if self._on_device is not None:
                differing, columns = (table[children] != table[parents]).nonzero()
                self._on_device.note(group, children[differing], columns)
            table[children] = table[parents]
        if self._on_device is not None:
            self._on_device.segments.invalidate()

    def write(self, group: int, rows: Int64s, columns: Int64s, block_ids: Int64s) -> None:
        """Set entries; where indices repeat, the last one holds."""
        if self._on_device is not None:
            segments = self._on_device.segments
            if segments.has_cached and self._holds_others(group, rows, columns, block_ids):
                segments.invalidate()
            self._on_device.note(group, rows, columns)
        self._tables[group] = widen(self._tables[group], int(columns.max()) + 1)
        self._tables[group][rows, columns] = block_ids

    def of_step(
        self,
        rows: Int64s,
        query_lens: Int64s,
        context_lens: Int64s,
        row_of_token: Int64s,
        positions: Int64s,
    ) -> StepTables:
        """For attention of `rows`: tables of theirs alone and slots; or the device's tables and
        the keys worth reading once for several of them."""
        if self._on_device is not None:
            segments = self._on_device.segments
            cascade = segments.find(self._tables, rows, query_lens, context_lens)
            return StepTables(self._on_device.tables, [], cascade)
        num_blocks = -(-int(context_lens.max(initial=1)) // self._block_size)
        index, offset = np.divmod(positions, self._block_size)
        gathered, slots = [], []
        for table in self._tables:
            gathered.append(torch.from_numpy(table[rows, :num_blocks]))
            blocks = table[row_of_token, index].astype(np.int64)
            slots.append(torch.from_numpy(blocks * self._block_size + offset))
        return StepTables(gathered, slots, [])

    def stage(self, staging: Staging) -> list[Update]:
        """Stage changed entries for the next upload.

        Returns the updates that `carry_out` applies on the device after that.
        """
        return [] if self._on_device is None else self._on_device.stage(self._tables, staging)

    def _holds_others(self, group: int, rows: Int64s, columns: Int64s, block_ids: Int64s) -> bool:
        """Whether some of these entries hold other blocks than these."""
        table = self._tables[group]
        inside = columns < table.shape[1]
        old = table[rows[inside], columns[inside]]
        return bool(((old != 0) & (old != block_ids[inside])).any())


class DeviceTables:
    """Owns block tables on the device: a step uploads only the entries that have changed.

    Row 0 is for padding: it holds null blocks only.
    """

    def __init__(
        self,
        block_size: int,
        have_windows: Sequence[bool],
        num_rows: int,
        max_blocks: int,
        device: torch.device,
    ) -> None:
        """Allocates all memory now, since captured graphs keep the addresses.

        Args:
            have_windows: whether layers of a group see only the last tokens; one entry per group.
            max_blocks: blocks of the longest sequence.
        """
        self.segments = SegmentFinder(block_size, have_windows)
        self.tables = [
            torch.zeros((num_rows, max_blocks), dtype=torch.int32, device=device)
            for _ in have_windows
        ]
        # Rows and columns of entries that have changed since the last upload, by group.
        self._changed: list[list[tuple[Int64s, Int64s]]] = [[] for _ in have_windows]

    def note(self, group: int, rows: Int64s, columns: Int64s) -> None:
        """Record that these entries change."""
        num_columns = self.tables[group].shape[1]
        last = columns.max(initial=0)
        assert last < num_columns, f"column {last} is not below {num_columns}"
        self._changed[group].append((rows, columns))

    def stage(self, tables: Sequence[Int32s], staging: Staging) -> list[Update]:
        """See BlockTables.stage; `tables` are the host's."""
        updates = []
        for group, changed in enumerate(self._changed):
            if not changed:
                continue
            rows, columns = map(np.concatenate, zip(*changed, strict=True))
            changed.clear()
            # The present values: an entry that has changed twice occurs twice with the same value.
            values = tables[group][rows, columns]
            table = self.tables[group]
            index = rows * table.shape[1] + columns
            if len(index) <= _STAGED_ENTRIES:
                where = staging.put(f"table_index_{group}", index, _STAGED_ENTRIES)
                what = staging.put(f"table_value_{group}", values, _STAGED_ENTRIES)
            else:
                where = torch.from_numpy(index).to(table.device)
                what = torch.from_numpy(values).to(table.device)
            updates.append((table.view(-1), where, what))
        return updates


def carry_out(updates: Sequence[Update]) -> None:
    """Write staged updates into the device's tables."""
    for table, where, what in updates:
        table.index_copy_(0, where, what)


def widen(array: Int32s, num_columns: int) -> Int32s:
    """The array with at least `num_columns` columns; it grows by doubling, and new ones are 0."""
    old = array.shape[1]
    if num_columns <= old:
        return array
    wider = np.zeros((array.shape[0], max(num_columns, 2 * old)), np.int32)
    wider[:, :old] = array
    return wider
