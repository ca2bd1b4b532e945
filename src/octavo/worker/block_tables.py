"""Block tables of the rows: on the host for CPU kernels, on the device for a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import CascadeSegments, Staging
from octavo.worker.cascade import SharedKeysFinder

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

# Table entries that one step brings to the device with its other arrays; a step that opens longer
# tables copies the rest by itself.
_STAGED_ENTRIES = 16_384


class BlockTables(Protocol):
    """Owns one table a KV group, with a row per running sequence."""

    def add_rows(self, num_rows: int) -> None:
        """Make room for so many more rows."""

    def clear(self, row: int) -> None:
        """A row is taken by another sequence."""

    def copy(self, children: Int64s, parents: Int64s) -> None:
        """Rows become copies of what others were before."""

    def write(self, group: int, rows: Int64s, columns: Int64s, block_ids: Int64s) -> None:
        """Set entries; where indices repeat, the last one holds."""

    def of_step(self, rows: Int64s, context_lens: Int64s) -> list[Tensor]:
        """For attention: a table a group, with a row for each of `rows`, or all rows."""

    def slots(self, row_of_token: Int64s, positions: Int64s) -> list[Tensor]:
        """Where each token's KV goes, int64 a group; empty if kernels find that by themselves."""

    def shared(
        self, rows: Int64s, query_lens: Int64s, context_lens: Int64s
    ) -> list[CascadeSegments | None]:
        """A group's keys that are worth reading once for several of `rows`; empty if none are."""


class HostTables:
    """Numpy arrays, gathered for each step."""

    def __init__(self, block_size: int, num_groups: int, num_rows: int) -> None:
        self._block_size = block_size
        self.tables: list[Int32s] = [np.zeros((num_rows, 16), np.int32) for _ in range(num_groups)]

    def add_rows(self, num_rows: int) -> None:
        for group, table in enumerate(self.tables):
            new = np.zeros((num_rows, table.shape[1]), np.int32)
            self.tables[group] = np.concatenate([table, new])

    def clear(self, row: int) -> None:
        for table in self.tables:
            table[row] = 0

    def copy(self, children: Int64s, parents: Int64s) -> None:
        for table in self.tables:
            table[children] = table[parents]

    def write(self, group: int, rows: Int64s, columns: Int64s, block_ids: Int64s) -> None:
        self.tables[group] = widen(self.tables[group], int(columns.max()) + 1)
        self.tables[group][rows, columns] = block_ids

    def holds_others(self, group: int, rows: Int64s, columns: Int64s, block_ids: Int64s) -> bool:
        """Whether some of these entries are in use, and not for these blocks."""
        table = self.tables[group]
        inside = columns < table.shape[1]
        old = table[rows[inside], columns[inside]]
        return bool(((old != 0) & (old != block_ids[inside])).any())

    def of_step(self, rows: Int64s, context_lens: Int64s) -> list[Tensor]:
        num_blocks = -(-int(context_lens.max(initial=1)) // self._block_size)
        return [torch.from_numpy(table[rows, :num_blocks]) for table in self.tables]

    def slots(self, row_of_token: Int64s, positions: Int64s) -> list[Tensor]:
        index, offset = np.divmod(positions, self._block_size)
        return [
            torch.from_numpy(
                table[row_of_token, index].astype(np.int64) * self._block_size + offset
            )
            for table in self.tables
        ]

    def shared(
        self, rows: Int64s, query_lens: Int64s, context_lens: Int64s
    ) -> list[CascadeSegments | None]:
        return []  # the CPU's kernels read keys sequence by sequence


class DeviceTables:
    """Tensors that stay on the device: a step brings only what has changed.

    Row 0 belongs to nobody and is all null blocks: padding points to it. A mirror on the host says
    which sequences share blocks.
    """

    def __init__(
        self,
        block_size: int,
        have_windows: Sequence[bool],
        num_rows: int,
        max_blocks: int,
        device: torch.device,
        staging: Staging,
    ) -> None:
        """All room is taken now, for captured graphs keep the addresses.

        Args:
            have_windows: whether layers of a group see only the last tokens; one entry a group.
            max_blocks: of the longest sequence.
        """
        self._mirror = HostTables(block_size, len(have_windows), num_rows)
        self._sharing = SharedKeysFinder(block_size, have_windows)
        self._tables = [
            torch.zeros((num_rows, max_blocks), dtype=torch.int32, device=device)
            for _ in have_windows
        ]
        self._staging = staging
        # Rows and columns of entries that the device has not been told of, by group.
        self._changed: list[list[tuple[Int64s, Int64s]]] = [[] for _ in have_windows]

    def add_rows(self, num_rows: int) -> None:
        raise AssertionError("a plan never opens more rows than the limits allow")

    def clear(self, row: int) -> None:
        # On the device entries beyond a sequence's length are never read.
        self._mirror.clear(row)
        self._sharing.forget()

    def copy(self, children: Int64s, parents: Int64s) -> None:
        for table, changed in zip(self._mirror.tables, self._changed, strict=True):
            differing, columns = (table[children] != table[parents]).nonzero()
            changed.append((children[differing], columns))
        self._mirror.copy(children, parents)
        self._sharing.forget()

    def write(self, group: int, rows: Int64s, columns: Int64s, block_ids: Int64s) -> None:
        if self._sharing.remembers and self._mirror.holds_others(group, rows, columns, block_ids):
            self._sharing.forget()
        num_columns = self._tables[group].shape[1]
        assert columns.max() < num_columns, f"column {columns.max()} is not below {num_columns}"
        self._mirror.write(group, rows, columns, block_ids)
        self._changed[group].append((rows, columns))

    def stage(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Put the changes where the next copy to the device takes them along.

        Returns what `update` needs.
        """
        updates = []
        for group, changed in enumerate(self._changed):
            if not changed:
                continue
            rows, columns = map(np.concatenate, zip(*changed, strict=True))
            changed.clear()
            # As they are now: where an entry has changed twice, it stands here twice alike.
            values = self._mirror.tables[group][rows, columns]
            table = self._tables[group]
            index = rows * table.shape[1] + columns
            if len(index) <= _STAGED_ENTRIES:
                where = self._staging.put(f"table_index_{group}", index, _STAGED_ENTRIES)
                what = self._staging.put(f"table_value_{group}", values, _STAGED_ENTRIES)
            else:
                where = torch.from_numpy(index).to(table.device)
                what = torch.from_numpy(values).to(table.device)
            updates.append((table.view(-1), where, what))
        return updates

    def update(self, updates: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Carry the changes out on the device."""
        for table, where, what in updates:
            table.index_copy_(0, where, what)

    def of_step(self, rows: Int64s, context_lens: Int64s) -> list[Tensor]:
        return self._tables

    def slots(self, row_of_token: Int64s, positions: Int64s) -> list[Tensor]:
        return []

    def shared(
        self, rows: Int64s, query_lens: Int64s, context_lens: Int64s
    ) -> list[CascadeSegments | None]:
        return self._sharing.find(self._mirror.tables, rows, query_lens, context_lens)


def widen(array: Int32s, num_columns: int) -> Int32s:
    """The array with at least `num_columns` columns; grows by doubling, new ones are 0."""
    old = array.shape[1]
    if num_columns <= old:
        return array
    wider = np.zeros((array.shape[0], max(num_columns, 2 * old)), np.int32)
    wider[:, :old] = array
    return wider
