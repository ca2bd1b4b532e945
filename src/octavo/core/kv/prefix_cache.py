"""Finding blocks by the tokens they were computed from (paper section 4.4, made automatic).

A full block is identified by its *prefix*: its own tokens and all tokens before them. The key is a
chained 128-bit digest, so that processes agree on it without communication; every hit is verified
against the stored tokens of the whole chain, so a collision can cost a miss but never return
the KV of another prefix.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Container
from operator import attrgetter

from octavo.core.prefix_node import PrefixNode, same_prefix

Digest = Callable[[bytes], bytes]
MAX_EVICTED_KEYS = 1 << 16  # kept to tell an evicted prefix from one never seen


def sha256_128(content: bytes) -> bytes:
    """The first 128 bits of SHA-256."""
    return hashlib.sha256(content).digest()[:16]


class CachedPrefix:
    """The blocks that hold a node's KV, in the order of `specs.node_places`: one per KV group,
    more where its blocks are smaller than a node, None where one is not cached.

    A *tail* is a node of fewer tokens than a whole block has. Nothing comes after it, and its
    blocks may have further tokens after those of the node. Of small blocks it needs fewer than a
    whole node does: `num_unused` places stay None."""

    __slots__ = ("block_ids", "is_tail", "node", "num_unused", "parent")

    def __init__(
        self, node: PrefixNode, num_places: int, is_tail: bool = False, num_unused: int = 0
    ) -> None:
        self.node = node
        self.is_tail = is_tail
        self.num_unused = num_unused
        assert node.parent is not None, "a root holds no block"
        self.parent = node.parent
        self.block_ids: list[int | None] = [None] * num_places

    def is_in(self, places: list[int]) -> bool:
        """Whether each of these places has a block."""
        block_ids = self.block_ids
        return None not in [block_ids[place] for place in places]

    @property
    def is_complete(self) -> bool:
        """Whether every place that it needs has a block, so that a hit may end inside it."""
        return self.block_ids.count(None) == self.num_unused


# Packed tokens are compared token by token, each as four bytes, and tails come before what they
# are the beginning of. In this order, the entry with the longest common prefix is next to where the
# tokens sought would be inserted.
_tokens_of = attrgetter("node.tokens")


class PrefixCache:
    """Owns the index from prefixes to blocks. It holds no reference to any block.

    If several blocks have the same contents, one is indexed. The others are its copies, one of
    which takes its place when it is overwritten.
    """

    def __init__(self, num_places: int, digest: Digest = sha256_128) -> None:
        self._num_places = num_places
        self._digest = digest
        self._entries: dict[bytes, CachedPrefix] = {}
        self._places: dict[int, tuple[CachedPrefix, int]] = {}  # block id -> entry, place
        self._copies: dict[int, dict[int, None]] = {}  # indexed block -> its copies, oldest first
        # Parent's key -> complete entries directly after this parent, in the order of their tokens.
        self._children: dict[bytes, list[CachedPrefix]] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # keys, the oldest first
        self._tails: OrderedDict[bytes, CachedPrefix] = (
            OrderedDict()
        )  # by key; those used last come last

    def __len__(self) -> int:
        return len(self._entries)

    def root(self, cache_salt: str) -> PrefixNode:
        """The root of a tenant's prefixes: tenants with different salts never share any."""
        salt = cache_salt.encode()
        return PrefixNode(None, salt, self._digest(b"octavo " + salt))

    def node(self, parent: PrefixNode, tokens: bytes) -> PrefixNode:
        """The node of a full block of packed `tokens` after `parent`. An indexed one is reused,
        which saves hashing and comparing."""
        siblings = self._children_of(parent)
        if siblings:
            place = bisect_left(siblings, tokens, key=_tokens_of)
            if place < len(siblings) and siblings[place].node.tokens == tokens:
                return siblings[place].node
        return PrefixNode(parent, tokens, self._digest(parent.key + tokens))

    def find(self, node: PrefixNode) -> CachedPrefix | None:
        """The blocks that hold exactly this prefix, if any."""
        entry = self._entries.get(node.key)
        if entry is None or not (entry.node is node or same_prefix(entry.node, node)):
            return None
        return entry

    def find_leading(self, nodes: list[PrefixNode]) -> list[CachedPrefix]:
        """The blocks of leading `nodes`, up to the first one that is not cached."""
        get, found = self._entries.get, []
        for node in nodes:
            entry = get(node.key)
            if entry is None or not (entry.node is node or same_prefix(entry.node, node)):
                break
            found.append(entry)
        return found

    def closest(self, parent: PrefixNode, tokens: bytes) -> list[CachedPrefix]:
        """At most two complete entries directly after `parent`; one of them has the longest common
        prefix with `tokens` of all. The cost is logarithmic in the number of entries."""
        siblings = self._children_of(parent)
        place = bisect_left(siblings, tokens, key=_tokens_of)
        return siblings[max(0, place - 1) : place + 1]

    def add(self, node: PrefixNode, place: int, block_id: int) -> bool:
        """Add a computed block, as the indexed one or as a copy of it.

        False if the block has been added before, or if another prefix has the same key.
        """
        if block_id in self._places:
            return False
        entry = self._entries.get(node.key)
        if entry is None:
            entry = self._entries[node.key] = CachedPrefix(node, self._num_places)
        elif not same_prefix(entry.node, node):
            return False
        self._places[block_id] = (entry, place)
        indexed = entry.block_ids[place]
        if indexed is not None:
            self._copies.setdefault(indexed, {})[block_id] = None
            return True
        entry.block_ids[place] = block_id
        if entry.is_complete:
            self._adopt(entry)
        return True

    def add_tail(self, parent: PrefixNode, tokens: bytes, block_ids: list[int | None]) -> list[int]:
        """Add the blocks of a tail: packed `tokens` after `parent`, fewer than a whole block has.

        `block_ids`: a block for each place, None where the tail needs none or it is gone. Those
        that hold more than the tail, and have been added for that, are left alone. Returns those
        that were added, as the indexed ones or as copies.
        """
        node = PrefixNode(parent, tokens, self._digest(parent.key + tokens))
        entry = self._entries.get(node.key)
        if entry is not None and not same_prefix(entry.node, node):
            return []
        new = {
            place: block_id
            for place, block_id in enumerate(block_ids)
            if block_id is not None and block_id not in self._places
        }
        if entry is None:
            if not new:
                return []  # an entry without a block would never be forgotten
            num_unused = block_ids.count(None)
            entry = CachedPrefix(node, self._num_places, is_tail=True, num_unused=num_unused)
            self._entries[node.key] = self._tails[node.key] = entry
        self._tails.move_to_end(node.key)
        return [block_id for place, block_id in new.items() if self.add(node, place, block_id)]

    @property
    def tails(self) -> list[PrefixNode]:
        """The nodes of all tails, the oldest first."""
        return [entry.node for entry in self._tails.values()]

    @property
    def num_tails(self) -> int:
        return len(self._tails)

    @property
    def oldest_tail(self) -> PrefixNode:
        """The tail that was added or used longest ago. There must be one."""
        return next(iter(self._tails.values())).node

    def tail_of(self, block_id: int) -> PrefixNode | None:
        """The tail that a block was added for, if it was."""
        place = self._places.get(block_id)
        return place[0].node if place is not None and place[0].is_tail else None

    def note_use(self, block_id: int) -> None:
        """A prompt starts from this block: if it is that of a tail, it is the newest one now."""
        node = self.tail_of(block_id)
        if node is not None:
            self._tails.move_to_end(node.key)

    def is_indexed(self, block_id: int) -> bool:
        """Whether lookups find this block: it was added, and not as a copy."""
        place = self._places.get(block_id)
        return place is not None and place[0].block_ids[place[1]] == block_id

    def forget(self, block_id: int) -> int | None:
        """Remove a block from the index, because it will be overwritten.

        Returns the copy that is indexed in its place, if it has one.
        """
        entry, place = self._places.pop(block_id)
        copies = self._copies.pop(block_id, None)
        if copies is None:
            self._drop(entry, place)
            return None
        heir = next(iter(copies))
        entry.block_ids[place] = heir
        del copies[heir]
        if copies:
            self._copies[heir] = copies
        return heir

    def forget_copy(self, block_id: int) -> None:
        """Remove a copy of an indexed block, which has become free."""
        entry, place = self._places.pop(block_id)
        indexed = entry.block_ids[place]
        assert indexed is not None, "a copy is a copy of an indexed block"
        copies = self._copies[indexed]
        del copies[block_id]
        if not copies:
            del self._copies[indexed]

    def forget_prefix(self, node: PrefixNode, kept: Container[int]) -> list[int]:
        """Remove all blocks that hold exactly this prefix, copies too, except indexed ones in
        `kept`. Returns the removed blocks."""
        entry, forgotten = self.find(node), []
        for indexed in () if entry is None else tuple(entry.block_ids):
            if indexed is None:
                continue
            for copy in tuple(self._copies.get(indexed, ())):
                self.forget_copy(copy)
                forgotten.append(copy)
            if indexed not in kept:
                self.forget(indexed)
                forgotten.append(indexed)
        return forgotten

    def was_evicted(self, node: PrefixNode) -> bool:
        """Whether a prefix was evicted recently; MAX_EVICTED_KEYS evictions are remembered."""
        return node.key in self._evicted

    def clear(self) -> None:
        self._entries.clear()
        self._places.clear()
        self._copies.clear()
        self._children.clear()
        self._tails.clear()

    def _children_of(self, parent: PrefixNode) -> list[CachedPrefix]:
        siblings = self._children.get(parent.key)
        if siblings is None:
            return []
        known = siblings[0].parent
        return siblings if known is parent or same_prefix(known, parent) else []

    def _adopt(self, entry: CachedPrefix) -> None:
        """List a complete entry under its parent. If two parents have the same key, `closest` finds
        only the children of one of them."""
        siblings = self._children.setdefault(entry.parent.key, [])
        if not siblings or same_prefix(siblings[0].parent, entry.parent):
            insort(siblings, entry, key=_tokens_of)

    def _disown(self, entry: CachedPrefix) -> None:
        siblings = self._children_of(entry.parent)
        place = bisect_left(siblings, entry.node.tokens, key=_tokens_of)
        if place < len(siblings) and siblings[place] is entry:
            del siblings[place]
            if not siblings:
                del self._children[entry.parent.key]

    def _drop(self, entry: CachedPrefix, place: int) -> None:
        """Remove one block from an entry."""
        if entry.is_complete:
            self._disown(entry)
        entry.block_ids[place] = None
        if any(block_id is not None for block_id in entry.block_ids):
            return
        del self._entries[entry.node.key]
        if entry.is_tail:
            del self._tails[entry.node.key]
        else:
            self.note_evicted(entry.node)

    def note_evicted(self, node: PrefixNode) -> None:
        """Remember that a prefix is gone, for `was_evicted`."""
        self._evicted[node.key] = None
        if len(self._evicted) > MAX_EVICTED_KEYS:
            self._evicted.popitem(last=False)
