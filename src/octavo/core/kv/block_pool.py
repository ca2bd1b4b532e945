"""The physical blocks of one memory tier (paper section 4.2: the block allocator)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from octavo.core.block_table import NULL_BLOCK


class BlockPool:
    """Owns a tier's blocks: their reference counts, and the order in which free ones are taken.

    A block is *held* while its reference count is positive. A free block may still be *cached*:
    its contents can be found by prefix and brought back with `share`. Cached blocks are
    overwritten last, the one that has been free longest first. A *copy* of a cached block is only
    noted while it is held. Every operation is O(1) unless it says otherwise.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int], None] | None = None,
        on_copy_freed: Callable[[int], None] | None = None,
    ) -> None:
        """Blocks 1 .. num_blocks, all free; 0 is the null block.

        `on_evict` is called when a cached block will be overwritten, `on_copy_freed` when a copy
        has lost its last holder.
        """
        self.num_blocks = num_blocks
        self._ref_counts = [0] * (num_blocks + 1)
        self._cached = bytearray(num_blocks + 1)  # 1: a block is cached
        self._copies: set[int] = set()
        self._on_evict = on_evict
        self._on_copy_freed = on_copy_freed
        # Free blocks, in the order in which they are taken: emptied ones (the one used last is
        # likely to be in the CPU's caches), then never used ones, then cached ones.
        self._emptied: list[int] = []
        self._next_unused = 1
        self._end = num_blocks + 1
        self._free_cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._emptied) + self._end - self._next_unused + len(self._free_cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_free_cached(self) -> int:
        return len(self._free_cached)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def count_free(self, block_ids: list[int]) -> int:
        """How many of these are free; the null block does not count."""
        counts = self._ref_counts
        return [counts[b] for b in block_ids].count(0) - block_ids.count(NULL_BLOCK)

    def is_cached(self, block_id: int) -> bool:
        return bool(self._cached[block_id])

    def allocate(self) -> int:
        """Take a free block, and evict what it caches. The caller has checked `num_free`."""
        if self._emptied:
            block_id = self._emptied.pop()
        elif self._next_unused < self._end:
            block_id = self._next_unused
            self._next_unused += 1
        else:
            assert self._free_cached, "allocate from a pool without free blocks"
            block_id, _ = self._free_cached.popitem(last=False)
            self._cached[block_id] = 0
            if self._on_evict is not None:
                self._on_evict(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a holder. A free block that is still cached comes back into use."""
        self.share_all([block_id])

    def share_all(self, block_ids: list[int]) -> None:
        """Add a holder to each of several blocks; the null block has none."""
        counts = self._ref_counts
        for block_id in block_ids:
            count = counts[block_id]
            if count == 0:
                if block_id == NULL_BLOCK:
                    continue
                assert block_id in self._free_cached, f"block {block_id} is free and holds nothing"
                del self._free_cached[block_id]
            counts[block_id] = count + 1

    def release(self, block_id: int) -> None:
        """Drop a holder. A block without holders is free, but stays cached until it is taken."""
        count = self._ref_counts[block_id] - 1
        assert count >= 0, f"block {block_id} is already free"
        self._ref_counts[block_id] = count
        if count == 0:
            if self._cached[block_id]:
                self._free_cached[block_id] = None
                return
            self._emptied.append(block_id)
            if block_id in self._copies:
                self._copies.discard(block_id)
                if self._on_copy_freed is not None:
                    self._on_copy_freed(block_id)

    def mark_cached(self, block_id: int) -> None:
        """Mark a held block as cached: its contents can be found by prefix."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is free and cannot be indexed"
        self._copies.discard(block_id)
        self._cached[block_id] = 1

    def mark_copy(self, block_id: int) -> None:
        """Mark a held block as a copy of a cached one."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is free and no copy"
        self._copies.add(block_id)

    def forget_cached(self, block_id: int) -> None:
        """Unmark a block, held or free, so that it is neither cached nor a copy."""
        self._copies.discard(block_id)
        if self._cached[block_id]:
            self._cached[block_id] = 0
            if self._ref_counts[block_id] == 0:
                del self._free_cached[block_id]
                self._emptied.append(block_id)

    def drop_cached(self) -> None:
        """Unmark all blocks; held blocks stay held. O(pool)."""
        self._emptied.extend(reversed(self._free_cached))
        self._free_cached.clear()
        self._cached = bytearray(self.num_blocks + 1)
        self._copies.clear()

    def ref_counts(self) -> list[int]:
        """Holders of blocks 1, 2, ...; O(pool), for inspection."""
        return self._ref_counts[1:]

    def cached_ids(self) -> set[int]:
        """Blocks that the prefix cache can find, held or free; O(pool), for inspection only."""
        return {block_id for block_id, is_cached in enumerate(self._cached) if is_cached}

    def cached_marks(self) -> bytes:
        """For blocks 1, 2, ... whether the prefix cache can find them, 1 or 0; for inspection."""
        return bytes(memoryview(self._cached)[1:])

    def free_ids(self) -> list[int]:
        """All free blocks in the order in which they would be taken; O(pool), for inspection."""
        unused = range(self._next_unused, self._end)
        return [*reversed(self._emptied), *unused, *self._free_cached]
