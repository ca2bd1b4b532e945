"""Pools that hand out runs of consecutive blocks, as servers did before paged memory.

A run is called an extent. Its first blocks are held like those of any other pool; the rest,
which results from rounding up, is not held by anything and is freed with them.
"""

from __future__ import annotations

from octavo.core.kv.block_pool import BlockPool


class ExtentPool(BlockPool):
    """Owns a tier's blocks, and allocates them in extents. Nothing in it is ever cached."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._extent_of: dict[int, int] = {}  # held block -> first block of its extent
        self._num_held: dict[int, int] = {}  # first block of an extent -> blocks held of it
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks outside of extents; they need not be consecutive."""
        return self._num_free

    @property
    def num_referenced(self) -> int:
        """Held blocks, without those that are taken only because of rounding."""
        return len(self._extent_of)

    def extent_size(self, num_blocks: int) -> int:
        """Blocks that an extent for `num_blocks` takes; more than the pool has if none does."""
        raise NotImplementedError

    def reserve(self, num_blocks: int) -> list[int] | None:
        """Take an extent and hold its first `num_blocks` blocks. None if no extent fits."""
        first = self._take(num_blocks)
        if first is None:
            return None
        self._num_free -= self.extent_size(num_blocks)
        held = list(range(first, first + num_blocks))
        self._extent_of.update(dict.fromkeys(held, first))
        self._num_held[first] = num_blocks
        for block_id in held:
            self._ref_counts[block_id] = 1
        return held

    def allocate(self) -> int:
        """An extent of one block."""
        held = self.reserve(1)
        assert held is not None, "allocate from a pool without free blocks"
        return held[0]

    def share(self, block_id: int) -> None:
        """Add a holder of a block that is held."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is free"
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop a holder. An extent is free when none of its blocks is held."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is already free"
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id]:
            return
        first = self._extent_of.pop(block_id)
        self._num_held[first] -= 1
        if not self._num_held[first]:
            del self._num_held[first]
            self._num_free += self._give_back(first)

    def free_ids(self) -> list[int]:
        """All blocks outside of extents; O(pool), for inspection."""
        raise NotImplementedError

    def _take(self, num_blocks: int) -> int | None:
        """The first block of a new extent."""
        raise NotImplementedError

    def _give_back(self, first: int) -> int:
        """Free an extent that is no longer held; returns its size."""
        raise NotImplementedError


class BuddyPool(ExtentPool):
    """The buddy allocator: extents are powers of two, and lie at multiples of their size.

    The pool is cut into the largest extents that it holds, up to `max_extent`, and what is left
    into smaller ones. A request takes the smallest free extent that is large enough, halved as
    often as possible; an extent that comes back merges with its other half if that is free.
    """

    def __init__(self, num_blocks: int, max_extent: int) -> None:
        """`max_extent`: blocks of the largest extent; rounded up to a power of two."""
        super().__init__(num_blocks)
        self._max_order = _order(max_extent)
        # By order: the offsets of free extents, in the order in which they became free.
        self._free: list[dict[int, None]] = [{} for _ in range(self._max_order + 1)]
        self._order_of: dict[int, int] = {}  # first block of an extent -> log2 of its size
        offset = 0
        for order in range(self._max_order, -1, -1):
            while num_blocks - offset >= 1 << order:
                self._free[order][offset] = None
                offset += 1 << order

    def extent_size(self, num_blocks: int) -> int:
        order = _order(num_blocks)
        return 1 << order if order <= self._max_order else self.num_blocks + 1

    def free_ids(self) -> list[int]:
        return [
            1 + offset + i
            for order, offsets in enumerate(self._free)
            for offset in offsets
            for i in range(1 << order)
        ]

    def free_extents(self) -> dict[int, int]:
        """Size -> how many free extents of it there are."""
        return {1 << order: len(offsets) for order, offsets in enumerate(self._free) if offsets}

    def _take(self, num_blocks: int) -> int | None:
        wanted = _order(num_blocks)
        fitting = (order for order in range(wanted, self._max_order + 1) if self._free[order])
        order = next(fitting, None)
        if order is None:
            return None
        offset, _ = self._free[order].popitem()
        while order > wanted:
            order -= 1
            self._free[order][offset + (1 << order)] = None
        self._order_of[offset + 1] = wanted
        return offset + 1

    def _give_back(self, first: int) -> int:
        order, offset = self._order_of.pop(first), first - 1
        size = 1 << order
        while order < self._max_order and (offset ^ (1 << order)) in self._free[order]:
            buddy = offset ^ (1 << order)
            del self._free[order][buddy]
            offset = min(offset, buddy)
            order += 1
        self._free[order][offset] = None
        return size


class Arena(ExtentPool):
    """A bump allocator: memory becomes available again only when all extents are free."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._end = 0  # blocks taken from the front

    def extent_size(self, num_blocks: int) -> int:
        return num_blocks

    def free_ids(self) -> list[int]:
        return list(range(1 + self._end, 1 + self.num_blocks))

    def _take(self, num_blocks: int) -> int | None:
        if self._end + num_blocks > self.num_blocks:
            return None
        first = 1 + self._end
        self._end += num_blocks
        return first

    def _give_back(self, first: int) -> int:
        if self._num_held:
            return 0
        freed, self._end = self._end, 0
        return freed


def _order(num_blocks: int) -> int:
    """log2 of the smallest power of two that is not less."""
    return (num_blocks - 1).bit_length()
