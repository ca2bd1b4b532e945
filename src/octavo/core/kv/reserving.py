"""KV cache managers that reserve memory ahead: the systems that the paper compares with (6.1).

A reservation is a block table of consecutive blocks, so the scheduler, the worker and the kernels
are the same as with paged memory, and so are the tokens. What differs is how much memory
is wasted, and that nothing is shared: each sample or beam has its own extent, and a fork copies.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.core.block_table import BlockTable
from octavo.core.kv.batch_formation import RequestLevelBatching
from octavo.core.kv.extent_pool import Arena, BuddyPool, ExtentPool
from octavo.core.kv.manager import Changes, KVCacheManager
from octavo.core.kv.prefix_matcher import PrefixHit
from octavo.core.kv.specs import KVSpec
from octavo.core.sequence import Request, Sequence
from octavo.core.step import BlockCopy, TableWrite

Extent = list[list[int]]  # the blocks of one sequence, by KV group


@dataclass(slots=True)
class _Reservation:
    """What one request has reserved."""

    request: Request
    num_holders: int = 0  # sequences with a table
    spares: list[Extent] = field(default_factory=list)  # for sequences that do not exist yet


class ReservingKVCacheManager(KVCacheManager):
    """Reserves memory for the longest possible length of every sequence at admission.

    No sequence ever runs out of memory, so nothing is preempted. A fork shares its parent's
    table until the next step and then moves to its own extent.
    """

    pool: ExtentPool

    def __init__(
        self,
        specs: Seq[KVSpec],
        block_size: int | Seq[int],
        num_blocks: int,
        num_swap_blocks: int,
        max_model_len: int,
    ) -> None:
        super().__init__(specs, block_size, num_blocks, num_swap_blocks, False)
        self.pool = self.make_pool(num_blocks, max_model_len)
        self._windowed = []  # what windows leave behind stays reserved
        self._reservations: dict[str, _Reservation] = {}
        self._limit = self.longest_sequence(max_model_len, max_model_len)

    def make_pool(self, num_blocks: int, max_model_len: int) -> ExtentPool:
        """The allocator of extents."""
        raise NotImplementedError

    def reserved_tokens(self, num_prompt_tokens: int, max_length: int) -> int:
        """Tokens to reserve for a sequence that can grow to `max_length`."""
        raise NotImplementedError

    # ---------------------------------------------------------------- sizes

    @property
    def num_table_blocks(self) -> int:
        spares = sum(len(ids) for extent in self.spare_extents() for ids in extent)
        return self.pool.num_referenced - spares

    def spare_extents(self) -> list[Extent]:
        """Reserved for sequences that do not exist yet."""
        return [extent for each in self._reservations.values() for extent in each.spares]

    def num_rounding_slots(self, request: Request) -> int:
        num_tokens = self.reserved_tokens(request.num_prompt_tokens, request.method.max_length)
        return -num_tokens % self.block_size

    def num_blocks_for(self, num_tokens: int, chunk: int) -> int:
        return sum(self.pool.extent_size(-(-num_tokens // size)) for size in self.block_sizes)

    def worst_case_blocks(self, request: Request, chunk: int) -> int:
        num_tokens = self.reserved_tokens(request.num_prompt_tokens, request.method.max_length)
        return request.method.max_sequences * self.num_blocks_for(num_tokens, chunk)

    def num_blocks_to_admit(self, hit: PrefixHit, num_tokens: int, chunk: int) -> int:
        """0 as a lower bound: only `allocate` knows whether there are extents."""
        return 0

    # ---------------------------------------------------------------- verbs

    def allocate(self, seq: Sequence, hit: PrefixHit, num_tokens: int) -> Changes | None:
        """Reserve extents for all sequences that the request may have, or none at all."""
        assert seq.table is None, f"{seq} has blocks already"
        request = seq.request
        reserved = self.reserved_tokens(request.num_prompt_tokens, request.method.max_length)
        extents = self._reserve(request.method.max_sequences, reserved)
        if extents is None:
            return None
        first, *spares = extents
        self._reservations[request.request_id] = _Reservation(request, 1, spares)
        seq.num_computed_tokens = 0
        seq.table = BlockTable(len(self.specs))
        seq.table.block_ids = first
        if self.on_allocate is not None:
            self.on_allocate(seq, hit)
        return Changes(table_writes=self.table_writes(seq))

    def append(self, targets: Seq[tuple[Sequence, int]]) -> Changes:
        """Never fails. Sequences that share a table after a fork get separate extents now."""
        changes = Changes()
        for seq, _ in targets:
            table = seq.table
            assert table is not None, f"{seq} holds no blocks"
            if self.pool.ref_count(table.block_ids[0][0]) > 1:
                self._separate(seq, table, changes)
            table.writable_until = self._capacity(table)
        return changes

    def rewind(self, seq: Sequence, num_tokens: int) -> bool:
        """See KVCacheManager.rewind. What is reserved stays."""
        assert seq.table is not None, f"{seq} holds no blocks"
        seq.table.writable_until = min(seq.table.writable_until, num_tokens)
        seq.num_computed_tokens = num_tokens
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        super().fork(parent, child)
        self._reservations[parent.request.request_id].num_holders += 1

    def replace(self, seq: Sequence, parent: Sequence) -> None:
        self.free(seq)
        self.fork(parent, seq)

    def free(self, seq: Sequence) -> None:
        table, request = seq.table, seq.request
        if table is None:
            return
        reservation = self._reservations[request.request_id]
        reservation.num_holders -= 1
        is_shared = self.pool.ref_count(table.block_ids[0][0]) > 1
        if reservation.num_holders and not is_shared and _may_fork(request):
            reservation.spares.append(table.block_ids)
        else:
            self._release_table(table)
            if is_shared and reservation.spares and not _may_fork(request):
                self._release(reservation.spares.pop())  # one sequence fewer needs an extent
        seq.table = None
        if not reservation.num_holders:
            for extent in self._reservations.pop(request.request_id).spares:
                self._release(extent)

    # ---------------------------------------------------------------- inside

    def _reserve(self, num_extents: int, num_tokens: int) -> list[Extent] | None:
        extents: list[Extent] = []
        for _ in range(num_extents):
            extent: Extent = []
            extents.append(extent)
            for size in self.block_sizes:
                held = self.pool.reserve(-(-num_tokens // size))
                if held is None:
                    for taken in extents:
                        self._release(taken)
                    return None
                extent.append(held)
        return extents

    def _release(self, extent: Extent) -> None:
        for ids in extent:
            for block_id in ids:
                self.pool.release(block_id)

    def _separate(self, seq: Sequence, table: BlockTable, changes: Changes) -> None:
        """Move a sequence to its own extent, with all that it has computed."""
        shared = table.block_ids
        table.block_ids = self._reservations[seq.request.request_id].spares.pop()
        for group, (old, new) in enumerate(zip(shared, table.block_ids, strict=True)):
            size = self.block_sizes[group]
            num_used = -(-seq.num_computed_tokens // size)
            self.num_cow_copies += num_used
            for source, target in zip(old[:num_used], new[:num_used], strict=True):
                changes.copies.append(BlockCopy(source, target, size))
            changes.table_writes.append(TableWrite(seq.seq_id, group, 0, tuple(new)))
        self._release(shared)


class OrcaMax(ReservingKVCacheManager):
    """Orca (Max): every sequence reserves the longest length that the model allows."""

    def make_pool(self, num_blocks: int, max_model_len: int) -> ExtentPool:
        return BuddyPool(num_blocks, -(-max_model_len // min(self.block_sizes)))

    def reserved_tokens(self, num_prompt_tokens: int, max_length: int) -> int:
        return max(max_length, self._limit)


class OrcaPow2(OrcaMax):
    """Orca (Pow2): the output length is over-reserved by at most a factor of two."""

    def reserved_tokens(self, num_prompt_tokens: int, max_length: int) -> int:
        output = max(1, max_length - num_prompt_tokens)
        rounded = num_prompt_tokens + (1 << (output - 1).bit_length())
        return max(max_length, min(rounded, self._limit))


class OrcaOracle(OrcaMax):
    """Orca (Oracle): the output length is known in advance, as far as `max_tokens` tells it."""

    def reserved_tokens(self, num_prompt_tokens: int, max_length: int) -> int:
        return max_length


class FasterTransformer(ReservingKVCacheManager):
    """Request-level batching: a batch is formed when nothing runs, and ends as a whole.

    Prompts are padded to the longest and all outputs have room for the longest, so a batch of B
    sequences holds B times (longest prompt + longest output). It takes requests in order as long as
    that fits into the memory and into the model's context, and all have the same number of samples.
    Each sequence's table covers its own tokens; the padding is room that no other sequence gets.
    """

    batch_formation = RequestLevelBatching()

    def make_pool(self, num_blocks: int, max_model_len: int) -> ExtentPool:
        return Arena(num_blocks)

    def reserved_tokens(self, num_prompt_tokens: int, max_length: int) -> int:
        return max_length

    def allocate(self, seq: Sequence, hit: PrefixHit, num_tokens: int) -> Changes | None:
        if not self._fits([*(each.request for each in self._reservations.values()), seq.request]):
            return None
        changes = super().allocate(seq, hit, num_tokens)
        assert changes is not None, "the padded batch takes more room"
        return changes

    def _fits(self, batch: Seq[Request]) -> bool:
        width = batch[0].method.max_sequences
        padded = max(request.num_prompt_tokens for request in batch) + max(
            request.method.max_length - request.num_prompt_tokens for request in batch
        )
        needed = len(batch) * width * self.num_blocks_for(padded, padded)
        return (
            padded <= self._limit
            and needed <= self.pool.num_blocks
            and all(request.method.max_sequences == width for request in batch)
        )


def _may_fork(request: Request) -> bool:
    """Whether a request may come to have more sequences than it has now: beams always, samples
    until all have begun."""
    known = len(request.sequences) + len(request.finished)
    return request.method.wants == "candidates" or known < request.method.max_sequences
