"""Which cached blocks a sequence can start from (paper section 4.4, made automatic)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, cast

from octavo.core.block_table import NULL_BLOCK
from octavo.core.kv.encoder_inputs import EncoderInputs
from octavo.core.kv.prefix_cache import CachedPrefix, PrefixCache
from octavo.core.kv.recent_prompts import RecentPrompts
from octavo.core.kv.specs import FullAttention, KVSpec, first_needed_block, node_places
from octavo.core.prefix_node import TOKEN_BYTES, PrefixNode, pack_tokens, same_prefix
from octavo.core.sequence import Sequence

# How many nodes taken over from a recent prompt count as one hash. Taking them over is 9 times as
# fast, but admitting a prompt takes time for each of its blocks, too.
REUSED_PER_HASH = 3
MIN_TO_REUSE = 4  # hashed blocks that make a prompt worth comparing with
# Why a hit is not longer. complete: only what must be computed is left; unknown: the next block was
# never cached; evicted: it was; differs: another block comes next, or one that is not full, and was
# copied as far as it is equal; window: blocks that a sliding window needs are gone; not_asked:
# nothing was looked up.
HitEnd = Literal["complete", "unknown", "evicted", "differs", "window", "not_asked"]


@dataclass(slots=True)
class PrefixHit:
    """Blocks of the prefix cache that a prompt can start from."""

    num_tokens: int = 0  # tokens of the sequence that need not be computed
    block_ids: list[list[int]] = field(default_factory=list)  # per group, for whole blocks
    # The encoder's input is found as a whole: `num_encoder_tokens` of it in these blocks, per
    # cross-attention group, or nothing, and then the encoder runs for `num_to_encode` tokens.
    num_encoder_tokens: int = 0
    num_to_encode: int = 0
    encoder_ids: Seq[list[int]] = ()
    # The hit ends inside a block: these blocks, one per group, are to be copied; the null block
    # where a group's blocks end there.
    partial: list[int] | None = None
    source: PrefixNode | None = None  # the prefix that these hold
    # The key of the next block, if another running request is computing it.
    awaited: bytes | None = None
    # The next block, or the encoder's input, if that is not cached and the lookup has hashed it.
    missing: PrefixNode | None = None
    # There were too many blocks to hash for one lookup: the next lookup continues.
    is_unfinished: bool = False
    num_hashes: int = 0  # what the lookup took of its `max_hashes`
    ended_by: HitEnd = "not_asked"

    @property
    def in_progress(self) -> bool:
        """Whether it is worth waiting: the next block is being computed."""
        return self.awaited is not None

    @property
    def num_input_tokens(self) -> int:
        """Tokens of the encoder's input."""
        return self.num_encoder_tokens + self.num_to_encode

    @property
    def num_found_tokens(self) -> int:
        """Tokens of the encoder's input and of the sequence that need not be computed."""
        return self.num_encoder_tokens + self.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Of them, those of what clients call the prompt: the encoder's input, if there is one."""
        return self.num_encoder_tokens if self.num_input_tokens else self.num_tokens


class PrefixMatcher:
    """Hashes the blocks of sequences, and matches them with blocks cached or being computed.

    It never holds or releases blocks; the manager does.
    """

    def __init__(
        self,
        specs: Seq[KVSpec],
        block_sizes: Seq[int],
        num_encoder_groups: int,
        cache: PrefixCache,
        inputs: EncoderInputs,
    ) -> None:
        """`specs` and `block_sizes` are those of the groups that grow with the sequence."""
        self._specs = specs
        self._num_encoder_groups = num_encoder_groups
        self._inputs = inputs
        self._block_sizes = block_sizes
        self._block_size = max(block_sizes)  # of a node; smaller blocks share one
        self._cache = cache
        places = node_places(block_sizes)
        # Where each group's blocks of a node stand among those of all groups.
        self._places = [
            [place for place, (group, _) in enumerate(places) if group == each]
            for each in range(len(specs))
        ]
        self._windowed = [
            group for group, spec in enumerate(specs) if not isinstance(spec, FullAttention)
        ]
        self._full = [
            place for place, (group, _) in enumerate(places) if group not in self._windowed
        ]
        # Prefixes that a running request is computing: an equal prompt waits and shares them.
        self._in_progress: dict[bytes, int] = {}  # key -> sequence id
        self.recent = RecentPrompts(self._block_size)

    def no_hit(self, seq: Sequence) -> PrefixHit:
        hit = PrefixHit(block_ids=[[] for _ in self._specs])
        if self._num_encoder_groups:
            hit.num_to_encode = len(seq.request.encoder_token_ids)
            hit.encoder_ids = [[] for _ in range(self._num_encoder_groups)]
        return hit

    def match(self, seq: Sequence, limit: int, max_hashes: int | None = None) -> PrefixHit:
        """The longest hit of at most `limit` tokens.

        At most `max_hashes` more of the sequence's blocks are hashed, if that is given; blocks
        that a recent prompt has hashed count `1 / REUSED_PER_HASH` each.
        """
        hit = self.no_hit(seq)
        if hit.num_to_encode and not self._find_input(seq, hit):
            return hit
        num_cached = self._hash_what_may_hit(seq, limit, max_hashes, hit)
        if hit.is_unfinished:
            return hit
        hit.awaited = self._awaited(seq, limit, num_cached)
        if hit.in_progress:
            return hit
        found = self._longest_cached(seq.prefix_nodes[: limit // self._block_size])
        num_full = len(found)
        hit.num_tokens = num_full * self._block_size
        for group, (ids, places) in enumerate(zip(hit.block_ids, self._places, strict=True)):
            first = self._first_needed(group, hit.num_tokens)
            node, number = divmod(first, len(places))
            needed = cast("list[CachedPrefix]", found[node:])
            ids.extend([NULL_BLOCK] * first)
            ids += _known([e.block_ids[place] for e in needed for place in places][number:])
            assert len(ids) == num_full * len(places), "a hit includes a block that is left behind"
        following = seq.prefix_nodes[num_full] if num_full < len(seq.prefix_nodes) else None
        if following is not None and self.is_in_progress(following.key):
            hit.awaited = following.key
        else:
            self._extend_into_block(seq, hit, limit)
        if following is not None and not self.is_cached(following):
            hit.missing = following
        hit.ended_by = self._reason_of_end(seq, hit, limit)
        return hit

    def _find_input(self, seq: Sequence, hit: PrefixHit) -> bool:
        """Let the hit include the encoder's input, if that is cached.

        Otherwise all of the sequence is computed again: the step that runs the encoder needs a
        token to compute, and blocks of an input outlive those of the sequences that read it.
        """
        node = self._input(seq)
        found = self._inputs.find(node)
        if found is not None:
            hit.num_encoder_tokens, hit.num_to_encode = hit.num_to_encode, 0
            hit.encoder_ids = found
        elif self.is_in_progress(node.key):
            hit.awaited = node.key
        else:
            hit.missing = node
            hit.ended_by = "evicted" if self._cache.was_evicted(node) else "unknown"
        return found is not None

    def encoded(self, seq: Sequence, block_ids: list[list[int]]) -> list[int]:
        """Called when the encoder has run for a sequence. Returns the blocks that are now indexed:
        none if the input is in others already."""
        node = self._input(seq)
        self.progressed(seq, node)
        is_new = self._inputs.add(node, block_ids)
        return [block_id for ids in block_ids for block_id in ids] if is_new else []

    def _reason_of_end(self, seq: Sequence, hit: PrefixHit, limit: int) -> HitEnd:
        if hit.num_tokens == limit:
            return "complete"
        if hit.partial is not None:
            return "differs"
        num_full = hit.num_tokens // self._block_size
        if num_full == len(seq.prefix_nodes):
            return "unknown"  # less than a block is left
        following = seq.prefix_nodes[num_full]
        if self._cache.find(following) is not None:
            return "window"
        return "evicted" if self._cache.was_evicted(following) else "unknown"

    def hash_blocks(self, seq: Sequence, num_full: int) -> None:
        """Extend the sequence's chain of nodes over its first `num_full` blocks."""
        nodes, size = seq.prefix_nodes, self._block_size
        if num_full <= len(nodes):
            return
        packed, width = seq.packed_tokens(len(nodes) * size, num_full * size), size * TOKEN_BYTES
        node = nodes[-1] if nodes else self._root(seq)
        for start in range(0, len(packed), width):
            node = self._cache.node(node, packed[start : start + width])
            nodes.append(node)

    def tails_of(self, seq: Sequence) -> list[PrefixNode]:
        """The tails in the cache whose tokens the sequence begins with, as far as it is hashed."""
        tails = self._cache.tails
        if not tails:
            return []
        size = self._block_size
        chain = {node.key: i for i, node in enumerate([self._root(seq), *seq.prefix_nodes])}
        found = []
        for node in tails:
            assert node.parent is not None, "a root is no tail"
            i = chain.get(node.parent.key)
            if i is None:
                continue
            own = self._root(seq) if i == 0 else seq.prefix_nodes[i - 1]
            packed = seq.packed_tokens(i * size, (i + 1) * size)
            if packed.startswith(node.tokens) and same_prefix(own, node.parent):
                found.append(node)
        return found

    def parent_of_tail(self, seq: Sequence, num_full: int) -> PrefixNode:
        """What comes after a sequence's first `num_full` blocks, which are hashed."""
        return seq.prefix_nodes[num_full - 1] if num_full else self._root(seq)

    def is_cached(self, node: PrefixNode) -> bool:
        """Whether an encoder input is cached, or a block is in every full-attention group."""
        if self._inputs.find(node) is not None:
            return True
        entry = self._cache.find(node)
        return entry is not None and entry.is_in(self._full)

    def is_in_progress(self, key: bytes) -> bool:
        """Whether a running request is computing the block of this key."""
        return key in self._in_progress

    def seqs_in_progress(self) -> set[int]:
        """Sequences whose blocks other prompts may wait for; for inspection."""
        return set(self._in_progress.values())

    def announce(self, seq: Sequence, num_tokens: int) -> None:
        """Announce that a sequence will compute its tokens up to `num_tokens`, so that prompts with
        the same prefix wait for the blocks that these fill, as far as the tokens are known; and
        that the encoder will run for it, if its input has not been offered to the cache."""
        table = seq.table
        if table is not None and table.has_new_input:
            self._in_progress.setdefault(self._input(seq).key, seq.seq_id)
        first = seq.num_computed_tokens // self._block_size
        end = min(num_tokens, seq.num_tokens) // self._block_size
        self.hash_blocks(seq, end)
        for node in seq.prefix_nodes[first:end]:
            self._in_progress.setdefault(node.key, seq.seq_id)

    def progressed(self, seq: Sequence, node: PrefixNode) -> None:
        """Called when a sequence has computed a block: prompts no longer wait for it."""
        if self._in_progress.get(node.key) == seq.seq_id:
            del self._in_progress[node.key]

    def abandon(self, seq: Sequence) -> None:
        """Called when a sequence leaves: prompts must not wait for blocks it has not computed."""
        self.recent.drop(seq)
        if self._in_progress and seq.table is not None:
            if seq.table.has_new_input:
                self.progressed(seq, self._input(seq))
            for node in seq.prefix_nodes[seq.table.num_registered :]:
                self.progressed(seq, node)

    def _hash_what_may_hit(
        self, seq: Sequence, limit: int, max_hashes: int | None, hit: PrefixHit
    ) -> int:
        """Extend the sequence's chain of nodes over all leading blocks that are cached, and one
        more. Sets `hit.num_hashes`, and `hit.is_unfinished` if that takes more than `max_hashes`.

        Blocks after one that full attention lacks are of no use, so they are hashed when they
        are computed. Returns how many of the nodes are known to be cached.
        """
        num_wanted = self._num_wanted(seq, limit)
        left = num_wanted if max_hashes is None else max_hashes
        nodes, num_cached, num_hashed, num_reused = seq.prefix_nodes, 0, 0, None
        while len(nodes) < num_wanted and (not nodes or self._may_go_on(nodes[-1])):
            num_cached = len(nodes)
            if left <= 0:
                hit.is_unfinished = True
                break
            if nodes and num_reused is None:
                most = num_cached + left * REUSED_PER_HASH
                num_reused = self.recent.extend(seq, min(num_wanted, most))
                left -= -(-num_reused // REUSED_PER_HASH)
                continue
            num_new = min(max(1, num_hashed), num_wanted - num_cached, left)
            self.hash_blocks(seq, num_cached + num_new)
            num_hashed += num_new
            left -= num_new
        if num_hashed >= MIN_TO_REUSE:
            self.recent.add(seq)
        hit.num_hashes = num_hashed - (-(num_reused or 0) // REUSED_PER_HASH)
        return num_cached

    def _num_wanted(self, seq: Sequence, limit: int) -> int:
        """How many blocks a lookup considers: those that it can take, and the next one, which may
        be in progress."""
        return min(seq.num_tokens // self._block_size, limit // self._block_size + 1)

    def _awaited(self, seq: Sequence, limit: int, num_cached: int) -> bytes | None:
        """The key of the first block that is not cached, if it is in progress.

        Heads of prefixes outlive tails, so where the cached ones end is found by bisection; a long
        prompt that waits for another one is looked up often.
        """
        if not self._in_progress or not self._full:
            return None
        nodes = seq.prefix_nodes
        num_known = min(len(nodes), self._num_wanted(seq, limit))
        end = bisect_left(
            nodes, True, num_cached, num_known, key=lambda node: not self._may_go_on(node)
        )
        if end == num_known or not self.is_in_progress(nodes[end].key):
            return None
        return nodes[end].key

    def _may_go_on(self, node: PrefixNode) -> bool:
        """Whether a hit may include a block: every full-attention group has it cached."""
        if not self._full:
            return True
        entry = self._cache.find(node)
        return entry is not None and entry.is_in(self._full)

    def _root(self, seq: Sequence) -> PrefixNode:
        """Where a sequence's chain begins: the tenant's root, or the encoder's input after it, so
        that equal decoder tokens under different inputs have nothing in common."""
        if seq.request.encoder_token_ids:
            return self._input(seq)
        # Not stored, since clients may send any number of salts.
        return self._cache.root(seq.request.cache_salt)

    def _input(self, seq: Sequence) -> PrefixNode:
        """The name of a sequence's encoder input, which is hashed once."""
        request = seq.request
        if request.encoder_node is None:
            packed = pack_tokens(list(request.encoder_token_ids))
            request.encoder_node = self._cache.node(self._cache.root(request.cache_salt), packed)
        return request.encoder_node

    def _longest_cached(self, nodes: list[PrefixNode]) -> list[CachedPrefix | None]:
        """The longest run of leading blocks that every group can start from.

        None stands for a block that the windows of all groups have passed.
        """
        found: list[CachedPrefix | None]
        if self._full:
            leading: Iterable[CachedPrefix] = self._cache.find_leading(nodes)
            if len(self._specs) > 1:  # else an entry has the only group's block
                leading = takewhile(lambda entry: entry.is_in(self._full), leading)
            found = list(leading)
        else:
            found = [self._cache.find(node) for node in nodes]
        # A window needs only its own blocks before the end of the hit: shorten until all agree.
        while (missing := self._last_missing(found)) is not None:
            del found[missing:]
        return found

    def _last_missing(self, found: list[CachedPrefix | None]) -> int | None:
        """The last block that a hit of `found` needs in a windowed group and lacks."""
        for group in self._windowed:
            places = self._places[group]
            first = self._first_needed(group, len(found) * self._block_size)
            for block in range(len(found) * len(places) - 1, first - 1, -1):
                i, number = divmod(block, len(places))
                entry = found[i]
                if entry is None or entry.block_ids[places[number]] is None:
                    return i
        return None

    def _first_needed(self, group: int, num_tokens: int) -> int:
        """The first of a group's blocks that a hit of `num_tokens` includes."""
        return first_needed_block(self._specs[group], self._block_sizes[group], num_tokens)

    def _extend_into_block(self, seq: Sequence, hit: PrefixHit, limit: int) -> None:
        """Let the hit end inside a cached block that begins with the sequence's next tokens."""
        start = hit.num_tokens
        wanted = seq.token_ids[start : min(start + self._block_size, limit)]
        if not wanted:
            return
        num_full = start // self._block_size
        parent = self.parent_of_tail(seq, num_full)
        best, source = 0, None
        for entry in self._cache.closest(parent, pack_tokens(wanted)):
            shared = _num_equal(memoryview(entry.node.tokens).cast("i"), wanted)
            if shared > best:
                best, source = shared, entry
        if source is None:
            return
        hit.num_tokens += best
        hit.source = source.node
        hit.partial = [NULL_BLOCK] * len(self._specs)
        for group, (places, size) in enumerate(zip(self._places, self._block_sizes, strict=True)):
            num_whole, num_copied = divmod(best, size)
            needed = places[: num_whole + (num_copied > 0)]  # a tail has no more than these
            block_ids = _known([source.block_ids[place] for place in needed])
            hit.block_ids[group] += block_ids[:num_whole]
            if num_copied:
                hit.partial[group] = block_ids[num_whole]


def _known(block_ids: list[int | None]) -> list[int]:
    assert None not in block_ids, "a prefix hit includes a block that is not cached"
    return cast("list[int]", block_ids)


def _num_equal(a: Seq[int], b: Seq[int]) -> int:
    """How many leading elements are equal."""
    for count, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return count
    return min(len(a), len(b))
