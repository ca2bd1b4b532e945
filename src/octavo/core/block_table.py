"""One sequence's map from logical to physical blocks (paper section 4.2)."""

from __future__ import annotations

NULL_BLOCK = 0  # stands in a table where a block is no longer needed; no pool hands it out


class BlockTable:
    """Owns the physical block ids of one sequence, a list per KV group: `block_ids` of the groups
    that grow with the sequence, `encoder_ids` of those that hold the encoder's input.

    Only KVCacheManager changes a table. `writable_until` lets the scheduler skip the manager in
    the common case: the slots of positions below it are read by no other sequence, so they may be
    written without asking. `settle_at` does the same for the time after a step.
    """

    __slots__ = (
        "block_ids",
        "encoder_ids",
        "has_new_input",
        "is_decoding",
        "num_dropped",
        "num_registered",
        "on_device",
        "settle_at",
        "writable_until",
    )

    def __init__(self, num_groups: int) -> None:
        self.block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        self.encoder_ids: list[list[int]] = []  # until the encoder's input has its blocks
        self.writable_until = 0  # tokens
        # In tokens: once so many are computed, a block is full, or a window has left one behind. 0
        # until it is decoding: it settles after every step.
        self.settle_at = 0
        # All tokens that were known have been computed, and one was drawn after them: from now on
        # only the newest token is still to be computed.
        self.is_decoding = False
        self.num_registered = 0  # leading full blocks already offered to the prefix cache
        self.has_new_input = False  # the encoder's input was not yet offered to the prefix cache
        self.on_device = True  # or in the swap tier
        # Leading entries of each group that its sliding window has left behind, and which are null.
        self.num_dropped = [0] * num_groups

    def copy(self) -> BlockTable:
        twin = BlockTable(0)
        twin.block_ids = [list(ids) for ids in self.block_ids]
        twin.encoder_ids = [list(ids) for ids in self.encoder_ids]
        twin.writable_until = self.writable_until
        twin.settle_at = self.settle_at
        twin.is_decoding = self.is_decoding
        twin.num_registered = self.num_registered
        twin.has_new_input = self.has_new_input
        twin.num_dropped = list(self.num_dropped)
        twin.on_device = self.on_device
        return twin

    def offer_again(self) -> None:
        """Nothing that this table holds is known to the prefix cache any more."""
        self.num_registered = 0
        self.has_new_input = bool(self.encoder_ids)

    def by_group(self) -> list[list[int]]:
        """The block ids of every KV group, in the order of the model's layout."""
        return [*self.block_ids, *self.encoder_ids]

    def held(self) -> list[int]:
        """Every block that this table holds, in order, group by group."""
        return [b for ids in self.by_group() for b in ids if b != NULL_BLOCK]
