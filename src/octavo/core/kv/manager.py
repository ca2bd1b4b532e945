"""The KV cache manager (paper sections 4.2 to 4.5): the block tables of all sequences.

The invariants that it keeps are numbered in docs/kv_cache.md and checked by `core/invariants.py`.
Every operation is all or nothing: one that cannot be met returns None and changes nothing.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import chain

from octavo.core.block_table import NULL_BLOCK, BlockTable
from octavo.core.kv.batch_formation import BatchFormation, ContinuousBatching
from octavo.core.kv.block_pool import BlockPool
from octavo.core.kv.encoder_inputs import EncoderInputs
from octavo.core.kv.prefix_cache import Digest, PrefixCache, sha256_128
from octavo.core.kv.prefix_matcher import PrefixHit, PrefixMatcher
from octavo.core.kv.specs import (
    FullAttention,
    KVSpec,
    check_order,
    first_needed_block,
    node_places,
)
from octavo.core.prefix_node import PrefixNode
from octavo.core.sequence import Request, Sequence
from octavo.core.step import BlockCopy, TableWrite


@dataclass(slots=True)
class Changes:
    """What the worker must do before the tokens are computed."""

    copies: list[BlockCopy] = field(default_factory=list)
    table_writes: list[TableWrite] = field(default_factory=list)
    # Sources of copies, which must not be overwritten before the step is over.
    held: list[int] = field(default_factory=list)


class KVCacheManager:
    """Owns the block tables of all sequences, and is the only caller of the block pools.

    All KV groups share the pool. Two tiers: blocks on the device, 1 .. num_blocks, and blocks in
    the swap tier, 1 .. num_swap_blocks.

    `specs` and `block_sizes` are those of the groups that grow with the sequence, and
    `encoder_block_sizes` of those that hold the encoder's input, which come after them in tables.
    `block_size` is the largest of `block_sizes`: the tokens that a node of the prefix cache stands
    for, and a multiple of all others.
    """

    batch_formation: BatchFormation = ContinuousBatching()

    def __init__(
        self,
        specs: Seq[KVSpec],
        block_size: int | Seq[int],
        num_blocks: int,
        num_swap_blocks: int = 0,
        enable_prefix_caching: bool = True,
        digest: Digest = sha256_128,
        max_tails: int = 0,
    ) -> None:
        """`specs`: of all KV groups. `block_size`: tokens per block, in all groups or in each.
        `max_tails`: last blocks that are cached although they are not full, at most."""
        check_order(specs)
        if isinstance(block_size, int):
            block_size = [block_size] * len(specs)
        self.specs = tuple(spec for spec in specs if spec.follows == "sequence")
        self.block_sizes = tuple(block_size[: len(self.specs)])
        self.encoder_block_sizes = tuple(block_size[len(self.specs) :])
        self.block_size = max(self.block_sizes)
        self._least_block_size = min(self.block_sizes)
        self._is_uniform = self._least_block_size == self.block_size
        self._windowed = [  # KV groups whose sequences free blocks while they grow
            group for group, spec in enumerate(self.specs) if not isinstance(spec, FullAttention)
        ]
        self._windows = tuple(  # the different ones, with the block size of their groups
            {(self.specs[group], self.block_sizes[group]): None for group in self._windowed}
        )
        self.enable_prefix_caching = enable_prefix_caching
        self.max_tails = max_tails
        # The group of each block of a prefix node, and the block's number among the group's.
        self._places = node_places(self.block_sizes)
        self.prefix_cache = PrefixCache(len(self._places), digest)
        self.encoder_inputs = EncoderInputs()
        self.pool = BlockPool(num_blocks, self._evict, self.prefix_cache.forget_copy)
        # I8: the swap tier never holds more than the device could.
        self.swap_pool = BlockPool(min(num_swap_blocks, num_blocks))
        self.pins: dict[str, Sequence] = {}  # prefixes that the provider keeps in the cache
        self.pinned: Counter[int] = Counter()  # blocks of these -> how many prefixes hold them
        self.num_cow_copies = 0
        # Tokens looked up in the prefix cache and tokens found there, when requests were first
        # admitted.
        self.num_lookup_tokens = 0
        self.num_hit_tokens = 0
        self.num_evicted_blocks = 0
        # For observers: evicted blocks are recorded if this is a list; `on_allocate` is called with
        # each sequence that starts, and with its prefix hit.
        self.evicted_ids: list[int] | None = None
        self.on_allocate: Callable[[Sequence, PrefixHit], None] | None = None
        self.held_sources: Counter[int] = Counter()  # sources of copies not yet done
        self._prefixes = PrefixMatcher(
            self.specs,
            self.block_sizes,
            len(self.encoder_block_sizes),
            self.prefix_cache,
            self.encoder_inputs,
        )

    # ---------------------------------------------------------------- sizes

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_pinned_blocks(self) -> int:
        return len(self.pinned)

    @property
    def num_table_blocks(self) -> int:
        """Blocks in the tables of sequences: without those that are held only to be copied."""
        only_held = sum(self.pool.ref_count(block_id) == 1 for block_id in self.held_sources)
        return self.pool.num_held - only_held

    def num_rounding_slots(self, request: Request) -> int:
        """Slots per sequence beyond the reservation, because its size was rounded up."""
        return 0

    def worst_case_blocks(self, request: Request, chunk: int) -> int:
        """The most blocks that a request may hold. Samples and beams always share the full blocks
        of the prompt and all of the encoder's input, but nothing else is certain to be shared."""
        method = request.method
        each = self.num_blocks_for(method.max_length, chunk)
        shared = self.num_shared_blocks(request.num_prompt_tokens, method.max_length)
        own = method.max_sequences * each - (method.max_sequences - 1) * shared
        return own + self.num_encoder_blocks(len(request.encoder_token_ids))

    def num_encoder_blocks(self, num_tokens: int) -> int:
        """The blocks that an encoder input of `num_tokens` takes."""
        num_blocks = 0
        for size in self.encoder_block_sizes:
            num_blocks += -(-num_tokens // size)
        return num_blocks

    def num_blocks_for(self, num_tokens: int, chunk: int) -> int:
        """The most blocks that one sequence of `num_tokens` holds at any moment, beside those of
        the encoder's input."""
        return sum(
            spec.max_blocks(num_tokens, size, chunk)
            for spec, size in zip(self.specs, self.block_sizes, strict=True)
        )

    def longest_sequence(self, limit: int, chunk: int, num_encoder_tokens: int = 0) -> int:
        """The longest sequence, at most `limit` tokens, that the whole pool can hold beside an
        encoder input of `num_encoder_tokens`."""
        fits = range(1, limit + 1)
        room = self.pool.num_blocks - self.num_encoder_blocks(num_encoder_tokens)
        return bisect_right(fits, room, key=lambda n: self.num_blocks_for(n, chunk))

    def num_shared_blocks(self, num_common: int, num_tokens: int) -> int:
        """How many of its `num_blocks_for` a sequence is certain to share with one that has its
        first `num_common` tokens. Only full attention counts, as windows may have moved on."""
        return sum(
            min(num_common, num_tokens) // size
            for spec, size in zip(self.specs, self.block_sizes, strict=True)
            if isinstance(spec, FullAttention)
        )

    # ---------------------------------------------------------------- the prefix cache

    def no_hit(self, seq: Sequence) -> PrefixHit:
        """An empty hit: nothing is taken from the cache."""
        return self._prefixes.no_hit(seq)

    def lookup(
        self, seq: Sequence, max_tokens: int | None = None, max_hashes: int | None = None
    ) -> PrefixHit:
        """What the prefix cache holds of a sequence's tokens; at least one is left to compute.

        At most `max_tokens` are taken from the cache. If more than `max_hashes` blocks would have
        to be hashed, that many are, and the hit is unfinished: ask again.
        """
        if not self.enable_prefix_caching:
            return self.no_hit(seq)
        limit = seq.num_tokens - 1
        if max_tokens is not None:
            limit = min(limit, max_tokens)
        return self._prefixes.match(seq, limit, max_hashes)

    def is_cached(self, node: PrefixNode) -> bool:
        """Whether the block or encoder input that a hit has named as `missing` is cached now."""
        return self._prefixes.is_cached(node)

    def is_in_progress(self, key: bytes) -> bool:
        """Whether a running sequence is computing the block that a hit has named as `awaited`."""
        return self._prefixes.is_in_progress(key)

    def seqs_in_progress(self) -> set[int]:
        """Sequences that compute blocks which others may be waiting for; for inspection."""
        return self._prefixes.seqs_in_progress()

    def recent_prompts(self) -> list[Sequence]:
        """Sequences whose hashes other prompts reuse; for inspection."""
        return list(self._prefixes.recent)

    def register(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Add full blocks to the prefix cache: those of the first `num_computed_tokens` tokens,
        whose KV has been written."""
        table = seq.table
        if not self.enable_prefix_caching or table is None or not table.on_device:
            return
        num_full = num_computed_tokens // self.block_size
        self._prefixes.hash_blocks(seq, num_full)
        blocks_of_node = self._blocks_of_node
        for i in range(table.num_registered, num_full):
            node = seq.prefix_nodes[i]
            for place, block_id in enumerate(blocks_of_node(table, i)):
                if block_id == NULL_BLOCK:
                    continue
                if self.prefix_cache.tail_of(block_id) is not None:
                    self._forget_block(block_id)  # it has become full
                if self.prefix_cache.add(node, place, block_id):
                    self._mark(block_id)
            self._prefixes.progressed(seq, node)
        if table.has_new_input:
            table.has_new_input = False
            for block_id in self._prefixes.encoded(seq, table.encoder_ids):
                self.pool.mark_cached(block_id)
        table.num_registered = max(table.num_registered, num_full)

    def settle(self, seq: Sequence, num_computed_tokens: int) -> None:
        """The KV of a sequence's first `num_computed_tokens` has been written: full blocks enter
        the prefix cache, and blocks that its windows have left become free."""
        self.register(seq, num_computed_tokens)
        table = _table(seq)
        table.is_decoding = table.is_decoding or num_computed_tokens == seq.num_tokens
        self._leave_behind(table, num_computed_tokens)
        table.settle_at = self._next_settling(table, num_computed_tokens)

    def offer_tail(self, seq: Sequence) -> None:
        """Add the last block of a sequence to the prefix cache although it is not full, so that a
        prompt which goes on where the sequence stands now computes nothing of it again. Nothing
        happens if the sequence does not decode, or is full to the end.

        The sequence may go on writing after the tokens that are there now. Once the block is free
        it is one of the cached ones, so it is overwritten before any request is preempted; and the
        tail that was used longest ago is forgotten where there would be more than `max_tails`.
        """
        table = seq.table
        if not self.max_tails or not self.enable_prefix_caching:
            return
        if table is None or not table.on_device or not table.is_decoding:
            return
        num_known = seq.num_tokens - 1  # the newest token is yet to be computed
        num_full, length = divmod(num_known, self.block_size)
        if not length:
            return
        self.register(seq, num_known)
        held: list[int | None] = []
        for group, number in self._places:
            size = self.block_sizes[group]
            index = num_full * self.block_size // size + number
            held.append(table.block_ids[group][index] if number * size < length else None)
        if NULL_BLOCK in held:
            return  # a window has left a part of it behind
        for block_id in held:
            if block_id is not None and self.prefix_cache.tail_of(block_id) is not None:
                self._forget_block(block_id)  # it was offered before, with other tokens
        parent = self._prefixes.parent_of_tail(seq, num_full)
        tokens = seq.packed_tokens(num_full * self.block_size, num_known)
        for block_id in self.prefix_cache.add_tail(parent, tokens, held):
            self._mark(block_id)
        while self.prefix_cache.num_tails > self.max_tails:
            self._forget_prefix(self.prefix_cache.oldest_tail, ())

    def forget(self, seq: Sequence) -> None:
        """Remove the blocks of a sequence's prefix and of its encoder input from the prefix cache,
        and those of which it has copied the beginning, no matter which sequence computed them,
        except pinned ones, which were verified when they were pinned."""
        for node in [*seq.prefix_nodes, *self._prefixes.tails_of(seq)]:
            self._forget_prefix(node, self.pinned)
        if seq.copied_from is not None:
            self._forget_prefix(seq.copied_from, self.pinned)
        if seq.request.encoder_node is not None:
            for block_id in self.encoder_inputs.forget(seq.request.encoder_node):
                self.pool.forget_cached(block_id)

    def is_verified(self, hit: PrefixHit) -> bool:
        """Whether all blocks that a hit takes are those of pinned prefixes, which were verified."""
        taken = [*hit.block_ids, hit.partial or (), *hit.encoder_ids]
        return all(
            block_id in self.pinned or block_id == NULL_BLOCK
            for block_ids in taken
            for block_id in block_ids
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes except pinned ones."""
        self.prefix_cache.clear()
        self.encoder_inputs.clear()
        self.pool.drop_cached()
        for seq in self.pins.values():
            _table(seq).offer_again()
            self.register(seq, seq.num_computed_tokens)

    def pin(self, name: str, seq: Sequence) -> None:
        """Keep a computed sequence's blocks until `unpin`: the provider's prefix (section 4.4)."""
        assert name not in self.pins, f"prefix {name!r} is pinned already"
        self.register(seq, seq.num_computed_tokens)
        self._index_verified(seq)
        self._hold_indexed_blocks(seq)
        self._prefixes.abandon(seq)
        self.pins[name] = seq
        self.pinned.update(_table(seq).held())

    def unpin(self, name: str) -> None:
        """Release a pinned prefix's blocks; they stay cached until they are evicted."""
        seq = self.pins.pop(name)
        for block_id in _table(seq).held():
            self.pinned[block_id] -= 1
            if not self.pinned[block_id]:
                del self.pinned[block_id]
        self.free(seq)

    # ---------------------------------------------------------------- the paper's verbs

    def allocate(self, seq: Sequence, hit: PrefixHit, num_tokens: int) -> Changes | None:
        """Give a sequence its first blocks: those of `hit`, new ones up to `num_tokens`, and new
        ones for the encoder's input if that is not part of the hit.

        The sequence starts with `hit.num_tokens` computed.
        """
        assert seq.table is None, f"{seq} has blocks already"
        # Free blocks of the hit are counted only if that matters.
        num_free, most = self.pool.num_free, num_tokens // self._least_block_size + 2
        most *= len(self.specs)
        if hit.encoder_ids:
            most += self.num_encoder_blocks(hit.num_input_tokens)
        if most > num_free < self.num_new_blocks(hit, num_tokens):
            return None
        changes = Changes()
        table = BlockTable(len(self.specs))
        for ids, shared in zip(table.block_ids, hit.block_ids, strict=True):
            self.pool.share_all(shared)
            ids.extend(shared)
        if hit.encoder_ids:
            self._allocate_input(table, hit)
        table.num_registered = hit.num_tokens // self.block_size
        if hit.partial is not None:
            # Held until the step is over: they must not be overwritten before they are copied.
            changes.held = [source for source in hit.partial if source != NULL_BLOCK]
            for source in changes.held:
                self.pool.share(source)
                self.prefix_cache.note_use(source)
            self.held_sources.update(changes.held)
            for group, source in enumerate(hit.partial):
                if source != NULL_BLOCK:
                    used = hit.num_tokens % self.block_sizes[group]
                    destination = self.pool.allocate()
                    changes.copies.append(BlockCopy(source, destination, used))
                    table.block_ids[group].append(destination)
        seq.table = table
        seq.num_computed_tokens = hit.num_tokens
        seq.copied_from = hit.source
        for group in self._windowed:
            table.num_dropped[group] = hit.block_ids[group].count(NULL_BLOCK)
        self._leave_behind(table, hit.num_tokens)  # the copied tokens may have moved a window on
        new_block = self.pool.allocate
        for ids, size in zip(table.block_ids, self.block_sizes, strict=True):
            while len(ids) * size < num_tokens:
                ids.append(new_block())
        changes.table_writes = self.table_writes(seq)
        table.writable_until = self._capacity(table)
        if hit.ended_by != "not_asked" and not seq.request.was_admitted:
            self.num_lookup_tokens += hit.num_input_tokens + seq.num_tokens
            self.num_hit_tokens += hit.num_found_tokens
        if self.enable_prefix_caching:
            self._prefixes.announce(seq, num_tokens)
        if self.on_allocate is not None:
            self.on_allocate(seq, hit)
        return changes

    def _allocate_input(self, table: BlockTable, hit: PrefixHit) -> None:
        """Give a table the blocks of its encoder input: those of the hit, or new ones, and then the
        hit has no others that they could overwrite."""
        for shared, size in zip(hit.encoder_ids, self.encoder_block_sizes, strict=True):
            self.pool.share_all(shared)
            ids = list(shared)
            while len(ids) * size < hit.num_to_encode:
                ids.append(self.pool.allocate())
            table.encoder_ids.append(ids)
        table.has_new_input = hit.num_to_encode > 0

    def without_partial(self, hit: PrefixHit) -> PrefixHit:
        """The same hit without its partial block."""
        num_tokens = hit.num_tokens // self.block_size * self.block_size
        block_ids = [
            ids[: num_tokens // size]
            for ids, size in zip(hit.block_ids, self.block_sizes, strict=True)
        ]
        return replace(hit, num_tokens=num_tokens, block_ids=block_ids, partial=None, source=None)

    def num_blocks_to_admit(self, hit: PrefixHit, num_tokens: int, chunk: int) -> int:
        """How many free blocks a sequence needs until all its `num_tokens` are computed."""
        excess = 0
        for spec, size, shared in zip(self.specs, self.block_sizes, hit.block_ids, strict=True):
            total = -(-num_tokens // size)
            held = len(shared) - shared.count(NULL_BLOCK)
            most = max(held, spec.max_blocks(num_tokens, size, chunk))
            excess += (total - len(shared)) - min(total - len(shared), most - held)
        return self.num_new_blocks(hit, num_tokens) - excess

    def num_releasable_blocks(self, seqs: Seq[Sequence], wanted: PrefixHit) -> int:
        """How many blocks become free when `seqs` are released: those without other holders, except
        blocks of the hit `wanted`."""
        kept = {b for ids in [*wanted.block_ids, *wanted.encoder_ids] for b in ids}
        kept.update(wanted.partial or ())
        holders = Counter(b for seq in seqs for b in _table(seq).held())
        return sum(self.pool.ref_count(b) == count for b, count in holders.items() if b not in kept)

    def num_table_entries(self, seqs: Seq[Sequence]) -> int:
        """No fewer than `num_releasable_blocks`, and found without looking at each block."""
        return sum(len(ids) for seq in seqs for ids in _table(seq).by_group())

    def num_new_blocks(self, hit: PrefixHit, num_tokens: int) -> int:
        """How many free blocks a sequence takes that starts from `hit` and reaches `num_tokens`."""
        taken = 0
        for shared, size in zip(hit.block_ids, self.block_sizes, strict=True):
            taken += -(-num_tokens // size) - len(shared)
            taken += self.pool.count_free(shared)
        if hit.partial is not None:
            taken += self.pool.count_free(hit.partial)
        if hit.encoder_ids:
            taken += self.num_encoder_blocks(hit.num_to_encode)
            taken += sum(map(self.pool.count_free, hit.encoder_ids))
        return taken

    def append(self, targets: Seq[tuple[Sequence, int]]) -> Changes | None:
        """Allocate the blocks that each sequence needs for its target number of tokens.

        It succeeds for all of the sequences or for none. A block at the end of a table
        that has other holders is copied before it is written (copy-on-write, section 4.4).
        """
        num_new, sizes = 0, self.block_sizes
        for seq, num_tokens in targets:
            for group, ids in enumerate(_table(seq).block_ids):
                missing = num_tokens - len(ids) * sizes[group]
                if missing > 0:
                    num_new += -(-missing // sizes[group])
        # Each tail block may have to be copied; they are counted only if that matters.
        if num_new + len(targets) * len(self.specs) > self.pool.num_free:
            num_new += self._num_tail_copies(targets)
            if num_new > self.pool.num_free and not self._leave_early(targets, num_new):
                return None
        changes = Changes()
        for seq, num_tokens in targets:
            self._append_one(seq, num_tokens, changes)
        return changes

    def rewind(self, seq: Sequence, num_tokens: int) -> bool:
        """Let a sequence compute its tokens from `num_tokens` on again, of which no step in flight
        computes any. False, and nothing is changed, if its windows have left what they read."""
        table = _table(seq)
        for group in self._windowed:
            spec, size = self.specs[group], self.block_sizes[group]
            if first_needed_block(spec, size, num_tokens) < table.num_dropped[group]:
                return False
        self._prefixes.abandon(seq)  # other prompts need not wait until it goes on
        pool = self.pool if table.on_device else self.swap_pool
        for ids, size in zip(table.block_ids, self.block_sizes, strict=True):
            while (len(ids) - 1) * size >= num_tokens:
                pool.release(ids.pop())
        table.writable_until = min(table.writable_until, num_tokens)
        seq.num_computed_tokens = num_tokens
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share the blocks of `parent` that it will read. Allocates nothing."""
        child.table = _table(parent).copy()
        child.num_computed_tokens = parent.num_computed_tokens
        for block_id in child.table.held():
            self.pool.share(block_id)
        self._leave_behind(child.table, child.num_computed_tokens)
        self._begin_sharing(parent, child)

    def replace(self, seq: Sequence, parent: Sequence) -> None:
        """Like `free(seq)` and `fork(parent, seq)`, for two sequences of a request that have
        computed equally many tokens.

        Few entries change: sequences that share a block share all blocks before it, so their
        tables differ only at the ends, and where a window has moved on in just one of them.
        """
        self._prefixes.abandon(seq)
        table, other, pool = _table(seq), _table(parent), self.pool
        for group in self._windowed:
            ids, wanted = table.block_ids[group], other.block_ids[group]
            for i in range(table.num_dropped[group], other.num_dropped[group]):
                pool.release(ids[i])
                ids[i] = NULL_BLOCK
            for i in range(other.num_dropped[group], table.num_dropped[group]):
                pool.share(wanted[i])
                ids[i] = wanted[i]
            table.num_dropped[group] = other.num_dropped[group]
        for ids, wanted in zip(table.block_ids, other.block_ids, strict=True):
            i = len(ids) - 1
            while i >= 0 and ids[i] != wanted[i]:
                pool.release(ids[i])
                pool.share(wanted[i])
                ids[i] = wanted[i]
                i -= 1
        table.num_registered = other.num_registered
        self._begin_sharing(parent, seq)

    def free(self, seq: Sequence) -> None:
        """Release all blocks of a sequence; does nothing if it has none."""
        self._prefixes.abandon(seq)
        if seq.table is not None:
            self._release_table(seq.table)
            seq.table = None

    def swap_out(self, seqs: Seq[Sequence]) -> list[tuple[int, int]] | None:
        """Move the sequences of a request to the swap tier; shared blocks stay shared.

        Returns (device block, swap block) pairs. None if the swap tier is too full.
        """
        held = _distinct(seqs)
        if len(held) > self.swap_pool.num_free:
            return None
        for seq in seqs:
            self._prefixes.abandon(seq)
        return self._move(seqs, held, self.swap_pool)

    def num_swap_in_blocks(self, seqs: Seq[Sequence]) -> int:
        return len(_distinct(seqs))

    def num_distinct_tokens(self, seqs: Seq[Sequence]) -> int:
        """How many tokens the sequences have computed, counting those in blocks that they share
        once. What windows have left behind counts as shared."""
        most = 0
        for group, size in enumerate(self.block_sizes):
            blocks = {block for seq in seqs for block in enumerate(_table(seq).block_ids[group])}
            most = max(most, len(blocks) * size)
        return min(most, sum(seq.num_computed_tokens for seq in seqs))

    def swap_in(self, seqs: Seq[Sequence]) -> tuple[list[tuple[int, int]], Changes] | None:
        """Bring swapped sequences back. Returns (swap block, device block) pairs."""
        held = _distinct(seqs)
        if len(held) > self.pool.num_free:
            return None
        pairs = self._move(seqs, held, self.pool)
        return pairs, Changes(table_writes=[w for seq in seqs for w in self.table_writes(seq)])

    def table_writes(self, seq: Sequence) -> list[TableWrite]:
        """A sequence's whole table, for a row that the worker opens: all but what its windows have
        left behind, which may be most of it."""
        table = _table(seq)
        writes = [
            TableWrite(seq.seq_id, group, first, tuple(ids[first:]))
            for group, (ids, first) in enumerate(
                zip(table.block_ids, table.num_dropped, strict=True)
            )
        ]
        for ids in table.encoder_ids:
            writes.append(TableWrite(seq.seq_id, len(writes), 0, tuple(ids)))
        return writes

    def release_sources(self, block_ids: Seq[int]) -> None:
        """Release the blocks of `Changes.held`, whose copies are done."""
        for block_id in block_ids:
            self.pool.release(block_id)
        self.held_sources -= Counter(block_ids)

    # ---------------------------------------------------------------- inside

    def _begin_sharing(self, parent: Sequence, child: Sequence) -> None:
        """Called when the two sequences have come to share all their blocks."""
        num_computed = parent.num_computed_tokens
        table = _table(parent)
        # Both must check for copy-on-write, since the tail block is shared.
        table.writable_until = min(table.writable_until, num_computed)
        _table(child).writable_until = table.writable_until
        # Beyond what is computed, the two may already have different tokens.
        child.prefix_nodes = parent.prefix_nodes[: num_computed // self.block_size]

    def _index_verified(self, seq: Sequence) -> None:
        """Index the blocks of a sequence that was verified in place of others with its tokens,
        which may be spoilt, except pinned ones, which were verified, too."""
        table, has_forgotten = _table(seq), False
        for i, node in enumerate(seq.prefix_nodes):
            entry = self.prefix_cache.find(node)
            if entry is None:
                continue
            pairs = zip(self._blocks_of_node(table, i), entry.block_ids, strict=True)
            if any(NULL_BLOCK != own != indexed is not None for own, indexed in pairs):
                has_forgotten |= self._forget_prefix(node, self.pinned)
        if has_forgotten:
            table.num_registered = 0
            self.register(seq, seq.num_computed_tokens)

    def _hold_indexed_blocks(self, seq: Sequence) -> None:
        """Hold the indexed blocks, which are pinned, where the sequence's own are copies of them:
        those are what later prompts find, and they must not be evicted."""
        for i, node in enumerate(seq.prefix_nodes):
            entry = self.prefix_cache.find(node)
            if entry is None:
                continue  # the key is another prefix's, or the windows have passed the block
            table = _table(seq)
            held = self._blocks_of_node(table, i)
            for (group, number), block_id, indexed in zip(
                self._places, held, entry.block_ids, strict=True
            ):
                if indexed is not None and block_id not in (indexed, NULL_BLOCK):
                    self.pool.share(indexed)
                    self.pool.release(block_id)
                    first = i * self.block_size // self.block_sizes[group]
                    table.block_ids[group][first + number] = indexed

    def _evict(self, block_id: int) -> None:
        """Remove a block that will be overwritten from the cache; a held copy takes its place. The
        rest of an encoder's input goes with it."""
        evicted, node = [block_id], self.encoder_inputs.owner(block_id)
        if node is not None:
            evicted = self.encoder_inputs.forget(node)
            self.prefix_cache.note_evicted(node)
            for other in evicted:
                self.pool.forget_cached(other)
        elif (copy := self.prefix_cache.forget(block_id)) is not None:
            self.pool.mark_cached(copy)
        self.num_evicted_blocks += len(evicted)
        if self.evicted_ids is not None:
            self.evicted_ids += evicted

    def _mark(self, block_id: int) -> None:
        """Let the pool know what the prefix cache has made of a block that was added to it."""
        if self.prefix_cache.is_indexed(block_id):
            self.pool.mark_cached(block_id)
        else:
            self.pool.mark_copy(block_id)

    def _forget_block(self, block_id: int) -> None:
        """Remove a held block from the prefix cache; if it has copies, one takes its place."""
        if not self.prefix_cache.is_indexed(block_id):
            self.prefix_cache.forget_copy(block_id)
        elif (copy := self.prefix_cache.forget(block_id)) is not None:
            self.pool.mark_cached(copy)
        self.pool.forget_cached(block_id)

    def _forget_prefix(self, node: PrefixNode, kept: Container[int]) -> bool:
        """See PrefixCache.forget_prefix. Whether any block was removed."""
        removed = self.prefix_cache.forget_prefix(node, kept)
        for block_id in removed:
            self.pool.forget_cached(block_id)
        return bool(removed)

    def _capacity(self, table: BlockTable) -> int:
        """How many tokens there is room for in all groups."""
        return min(
            len(ids) * size for ids, size in zip(table.block_ids, self.block_sizes, strict=True)
        )

    def _blocks_of_node(self, table: BlockTable, i: int) -> list[int]:
        """The blocks of a table that hold the tokens of the sequence's prefix node i."""
        if self._is_uniform:
            return [ids[i] for ids in table.block_ids]
        return [
            block_id
            for ids, size in zip(table.block_ids, self.block_sizes, strict=True)
            for block_id in ids[i * self.block_size // size : (i + 1) * self.block_size // size]
        ]

    def _num_tail_copies(self, targets: Seq[tuple[Sequence, int]]) -> int:
        """How many of `targets` will write into a block that has another holder."""
        writers: dict[int, int] = {}
        for seq, _ in targets:
            for ids, size in zip(_table(seq).block_ids, self.block_sizes, strict=True):
                index, offset = divmod(seq.num_computed_tokens, size)
                if offset and self.pool.ref_count(ids[index]) > 1:
                    writers[ids[index]] = writers.get(ids[index], 0) + 1
        # The last holder keeps the block; all others need a copy.
        return sum(min(n, self.pool.ref_count(tail) - 1) for tail, n in writers.items())

    def _append_one(self, seq: Sequence, num_tokens: int, changes: Changes) -> None:
        table, pool = _table(seq), self.pool
        if self.enable_prefix_caching and num_tokens - seq.num_computed_tokens > 1:
            self._prefixes.announce(seq, num_tokens)
        end = sys.maxsize
        for group, ids in enumerate(table.block_ids):
            start, size = len(ids), self.block_sizes[group]
            index, offset = divmod(seq.num_computed_tokens, size)
            if offset and pool.ref_count(ids[index]) > 1:
                source, start = ids[index], index
                ids[index] = pool.allocate()
                changes.copies.append(BlockCopy(source, ids[index], offset))
                pool.release(source)
                self.num_cow_copies += 1
            while len(ids) * size < num_tokens:
                ids.append(pool.allocate())
            if start < len(ids):
                write = TableWrite(seq.seq_id, group, start, tuple(ids[start:]))
                changes.table_writes.append(write)
            end = min(end, len(ids) * size)
        table.writable_until = end
        if table.is_decoding:
            table.settle_at = end
            if self._windows:
                table.settle_at = self._next_settling(table, seq.num_computed_tokens)

    def _next_settling(self, table: BlockTable, num_computed_tokens: int) -> int:
        """How many tokens will be computed when the next block is full, or a window leaves one."""
        if not table.is_decoding:
            return 0
        end = self._capacity(table)
        for spec, size in self._windows:
            later = range(num_computed_tokens + 1, end)
            first = first_needed_block(spec, size, num_computed_tokens)
            moved = bisect_left(later, (first + 1) * size, key=spec.first_needed_token)
            end = min(end, num_computed_tokens + 1 + moved)
        return end

    def _leave_behind(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Release the blocks that queries at `num_computed_tokens` and later do not read."""
        pool = self.pool if table.on_device else self.swap_pool
        for group, first, ids in self._left_behind(table, num_computed_tokens):
            for i in range(table.num_dropped[group], first):
                pool.release(ids[i])
                ids[i] = NULL_BLOCK
            table.num_dropped[group] = first

    def _left_behind(
        self, table: BlockTable, num_computed_tokens: int
    ) -> Iterator[tuple[int, int, list[int]]]:
        """Groups whose windows have left blocks behind: the first block still read, and all ids."""
        for group in self._windowed:
            size = self.block_sizes[group]
            first = first_needed_block(self.specs[group], size, num_computed_tokens)
            if first > table.num_dropped[group]:
                yield group, first, table.block_ids[group]

    def _leave_early(self, targets: Seq[tuple[Sequence, int]], num_wanted: int) -> bool:
        """Release what the windows will have left when the steps in flight are over, if that makes
        `num_wanted` blocks free; those blocks do not enter the prefix cache."""
        freed = sum(
            self.pool.ref_count(block_id) == 1
            for seq, _ in targets
            for group, first, ids in self._left_behind(_table(seq), seq.num_computed_tokens)
            for block_id in ids[_table(seq).num_dropped[group] : first]
        )
        if num_wanted > self.pool.num_free + freed:
            return False
        for seq, _ in targets:
            self._leave_behind(_table(seq), seq.num_computed_tokens)
        return True

    def _release_table(self, table: BlockTable) -> None:
        # Tails are released first, of all groups together, and so evicted first: a cached head is
        # useful without its tail, but neither the reverse nor the head in some of the groups.
        pool = self.pool if table.on_device else self.swap_pool
        for block_id in chain(self._tail_first(table), *map(reversed, table.encoder_ids)):
            if block_id != NULL_BLOCK:
                pool.release(block_id)

    def _tail_first(self, table: BlockTable) -> Iterable[int]:
        """The blocks of the sequence's tokens in all groups, those of the last tokens first."""
        if self._is_uniform:
            rows = zip(*map(reversed, table.block_ids), strict=True)
            return chain.from_iterable(rows)
        starts = sorted(
            (
                (i * size, ids[i])
                for ids, size, first in zip(
                    table.block_ids, self.block_sizes, table.num_dropped, strict=True
                )
                for i in range(first, len(ids))
            ),
            reverse=True,
        )
        return [block_id for _, block_id in starts]

    def _move(
        self, seqs: Seq[Sequence], held: list[int], target: BlockPool
    ) -> list[tuple[int, int]]:
        """Replace each block of the sequences by one of the other tier; sharing is preserved."""
        moved = {block_id: target.allocate() for block_id in held}
        seen: set[int] = set()
        for seq in seqs:
            table = _table(seq)
            self._release_table(table)
            for ids in table.by_group():
                for i, block_id in enumerate(ids):
                    if block_id == NULL_BLOCK:
                        continue
                    if block_id in seen:
                        target.share(moved[block_id])
                    seen.add(block_id)
                    ids[i] = moved[block_id]
            table.offer_again()
            table.on_device = target is self.pool
        return list(moved.items())


def _table(seq: Sequence) -> BlockTable:
    assert seq.table is not None, f"{seq} holds no blocks"
    return seq.table


def _distinct(seqs: Seq[Sequence]) -> list[int]:
    """The blocks that the sequences hold, each once, in a fixed order."""
    return list(dict.fromkeys(b for seq in seqs for b in _table(seq).held()))
