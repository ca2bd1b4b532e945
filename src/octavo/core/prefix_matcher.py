"""Which cached blocks a sequence can start from (paper section 4.4, made automatic)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from octavo.core.block_pool import NULL_BLOCK
from octavo.core.kv_spec import FullAttention, KVSpec, first_needed_block
from octavo.core.prefix_cache import CachedPrefix, PrefixCache, PrefixNode
from octavo.core.sequence import Sequence

# Why a hit is not longer. complete: only what must be computed is left; unknown: the next block was
# never cached; evicted: it was; differs: another block comes next, and was copied as far as it is
# equal; window: blocks that a sliding window needs are gone; not_asked: nothing was looked up.
HitEnd = Literal["complete", "unknown", "evicted", "differs", "window", "not_asked"]


@dataclass(slots=True)
class PrefixHit:
    """Blocks of the prefix cache that a prompt can start from."""

    num_tokens: int = 0  # tokens that need not be computed
    block_ids: list[list[int]] = field(default_factory=list)  # per group, for whole blocks
    # The hit ends inside a block: these blocks, one per group, are to be copied.
    partial: list[int] | None = None
    # Another running request is computing the block that comes next.
    in_progress: bool = False
    ended_by: HitEnd = "not_asked"


class PrefixMatcher:
    """Names the blocks of sequences, and matches them with what is cached or being computed.

    It only looks: the manager holds and releases blocks.
    """

    def __init__(self, specs: Seq[KVSpec], block_size: int, cache: PrefixCache) -> None:
        self._specs = specs
        self._block_size = block_size
        self._cache = cache
        # Prefixes that a running request is computing: an equal prompt waits and shares them.
        self._in_progress: dict[bytes, int] = {}  # key -> sequence id

    def no_hit(self) -> PrefixHit:
        return PrefixHit(block_ids=[[] for _ in self._specs])

    def match(self, seq: Sequence, limit: int) -> PrefixHit:
        """The longest hit of at most `limit` tokens."""
        self.name_blocks(seq, seq.num_tokens // self._block_size)
        found = self._longest_cached(seq.prefix_nodes[: limit // self._block_size])
        num_full = len(found)
        hit = self.no_hit()
        hit.num_tokens = num_full * self._block_size
        for group, (spec, ids) in enumerate(zip(self._specs, hit.block_ids, strict=True)):
            first = first_needed_block(spec, self._block_size, hit.num_tokens)
            ids.extend([NULL_BLOCK] * first)
            ids.extend(_block_of(entry, group) for entry in found[first:])
        if num_full < len(seq.prefix_nodes):
            hit.in_progress = seq.prefix_nodes[num_full].key in self._in_progress
        if not hit.in_progress:
            self._extend_into_block(seq, hit, limit)
        hit.ended_by = self._reason_of_end(seq, hit, limit)
        return hit

    def _reason_of_end(self, seq: Sequence, hit: PrefixHit, limit: int) -> HitEnd:
        if hit.num_tokens == limit:
            return "complete"
        if hit.partial is not None:
            return "differs"
        num_full = len(hit.block_ids[0])
        if num_full == len(seq.prefix_nodes):
            return "unknown"  # less than a block is left
        following = seq.prefix_nodes[num_full]
        if self._cache.find(following) is not None:
            return "window"
        return "evicted" if self._cache.was_evicted(following) else "unknown"

    def name_blocks(self, seq: Sequence, num_full: int) -> None:
        """Extend the sequence's chain of nodes over its first `num_full` blocks."""
        nodes, size = seq.prefix_nodes, self._block_size
        for i in range(len(nodes), num_full):
            parent = nodes[-1] if nodes else self._root(seq)
            nodes.append(self._cache.node(parent, seq.token_ids[i * size : (i + 1) * size]))

    def announce(self, seq: Sequence) -> None:
        """A sequence is about to compute its blocks: equal prompts should wait for them."""
        first = seq.num_computed_tokens // self._block_size
        for node in seq.prefix_nodes[first : seq.num_tokens // self._block_size]:
            self._in_progress.setdefault(node.key, seq.seq_id)

    def progressed(self, seq: Sequence, node: PrefixNode) -> None:
        """A sequence has computed a block: nobody needs to wait for it any more."""
        if self._in_progress.get(node.key) == seq.seq_id:
            del self._in_progress[node.key]

    def abandon(self, seq: Sequence) -> None:
        """A sequence leaves: what it has not computed, nobody should wait for."""
        if self._in_progress:
            for node in seq.prefix_nodes:
                self.progressed(seq, node)

    def _root(self, seq: Sequence) -> PrefixNode:
        # Made each time: anybody can come with any number of salts.
        return self._cache.root(seq.request.cache_salt)

    def _longest_cached(self, nodes: list[PrefixNode]) -> list[CachedPrefix | None]:
        """The longest run of leading blocks that every group can start from.

        None stands for a block that all groups' windows have left behind.
        """
        full = [g for g, spec in enumerate(self._specs) if isinstance(spec, FullAttention)]
        windows = [g for g in range(len(self._specs)) if g not in full]
        found: list[CachedPrefix | None] = []
        for node in nodes:
            entry = self._cache.find(node)
            if full and (entry is None or any(entry.block_ids[g] is None for g in full)):
                break
            found.append(entry)
        # A window needs only its own blocks before the end of the hit: shorten until all agree.
        while (missing := self._last_missing(found, windows)) is not None:
            del found[missing:]
        return found

    def _last_missing(self, found: list[CachedPrefix | None], groups: list[int]) -> int | None:
        """The last block that a hit of `found` needs in one of `groups` and lacks."""
        for group in groups:
            first = first_needed_block(
                self._specs[group], self._block_size, len(found) * self._block_size
            )
            for i in range(len(found) - 1, first - 1, -1):
                entry = found[i]
                if entry is None or entry.block_ids[group] is None:
                    return i
        return None

    def _extend_into_block(self, seq: Sequence, hit: PrefixHit, limit: int) -> None:
        """Let the hit end inside a cached block that begins with the sequence's next tokens."""
        start = hit.num_tokens
        wanted = seq.token_ids[start : min(start + self._block_size, limit)]
        if not wanted:
            return
        num_full = start // self._block_size
        parent = seq.prefix_nodes[num_full - 1] if num_full else self._root(seq)
        best = 0
        for entry in self._cache.continuations(parent):
            if any(block_id is None for block_id in entry.block_ids):
                continue
            shared = _num_equal(memoryview(entry.node.tokens).cast("i"), wanted)
            if shared > best:
                best = shared
                hit.partial = [_block_of(entry, g) for g in range(len(self._specs))]
            if best == len(wanted):
                break
        hit.num_tokens += best


def _block_of(entry: CachedPrefix | None, group: int) -> int:
    block_id = entry.block_ids[group] if entry is not None else None
    assert block_id is not None, "a prefix hit includes a block that is not cached"
    return block_id


def _num_equal(a: Seq[int], b: Seq[int]) -> int:
    """How many leading elements are equal."""
    for count, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return count
    return min(len(a), len(b))
