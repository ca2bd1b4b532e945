"""Finding blocks by the tokens they were computed from (paper section 4.4, made automatic).

A full block is named by its *prefix*: its own tokens and all tokens before them. The name is a
chained 128-bit digest, so that processes agree on it without talking; every hit is verified
against the stored tokens of the whole chain, so a collision can cost a miss but never return
another prefix's KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator

Digest = Callable[[bytes], bytes]
MAX_EVICTED_KEYS = 1 << 16  # remembered, to tell an evicted prefix from one never seen


def sha256_128(content: bytes) -> bytes:
    """The first 128 bits of SHA-256."""
    return hashlib.sha256(content).digest()[:16]


class PrefixNode:
    """A full block of tokens after a given prefix: one link of a chain that ends in a root."""

    __slots__ = ("key", "parent", "tokens")

    def __init__(self, parent: PrefixNode | None, tokens: bytes, key: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.key = key


def pack_tokens(token_ids: list[int]) -> bytes:
    """Token ids as 32-bit integers, the form in which they are hashed and compared."""
    return array("i", token_ids).tobytes()


def same_prefix(a: PrefixNode, b: PrefixNode) -> bool:
    """Whether two chains hold the same tokens under the same root.

    Chains found equal come to share their links, so that comparing their successors, block after
    block, takes constant time each.
    """
    top_a, top_b = a, b
    while a is not b:
        if a.key != b.key or a.tokens != b.tokens:
            return False
        if a.parent is None or b.parent is None:
            if a.parent is not b.parent:
                return False
            break
        a, b = a.parent, b.parent
    top_b.parent = top_a.parent
    return True


class CachedPrefix:
    """The blocks, one per KV group (None where a group has none), that hold a node's KV."""

    __slots__ = ("block_ids", "node", "parent")

    def __init__(self, node: PrefixNode, num_groups: int) -> None:
        self.node = node
        assert node.parent is not None, "a root holds no block"
        self.parent = node.parent
        self.block_ids: list[int | None] = [None] * num_groups


class PrefixCache:
    """Owns the index from prefixes to blocks. It holds no reference to any block."""

    def __init__(self, num_groups: int, digest: Digest = sha256_128) -> None:
        self._num_groups = num_groups
        self._digest = digest
        self._entries: dict[bytes, CachedPrefix] = {}
        self._places: dict[int, tuple[CachedPrefix, int]] = {}  # block id -> entry, group
        self._children: dict[bytes, dict[bytes, CachedPrefix]] = {}  # by the parent's key
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # keys, the oldest first

    def __len__(self) -> int:
        return len(self._entries)

    def root(self, cache_salt: str) -> PrefixNode:
        """Where a tenant's prefixes begin: tenants with other salts never meet."""
        salt = cache_salt.encode()
        return PrefixNode(None, salt, self._digest(b"octavo " + salt))

    def node(self, parent: PrefixNode, token_ids: list[int]) -> PrefixNode:
        """The link for a full block of `token_ids` after `parent`."""
        tokens = pack_tokens(token_ids)
        return PrefixNode(parent, tokens, self._digest(parent.key + tokens))

    def find(self, node: PrefixNode) -> CachedPrefix | None:
        """The blocks that hold exactly this prefix, if any."""
        entry = self._entries.get(node.key)
        if entry is None or not same_prefix(entry.node, node):
            return None
        return entry

    def add(self, node: PrefixNode, group: int, block_id: int) -> bool:
        """Index a computed block. False if the prefix is indexed already, or its key is taken."""
        entry = self._entries.get(node.key)
        if entry is None:
            entry = CachedPrefix(node, self._num_groups)
            self._entries[node.key] = entry
            self._children.setdefault(entry.parent.key, {})[node.key] = entry
        elif entry.block_ids[group] is not None or not same_prefix(entry.node, node):
            return False
        entry.block_ids[group] = block_id
        self._places[block_id] = (entry, group)
        return True

    def forget(self, block_id: int) -> None:
        """Take a block out of the index, because it is about to be overwritten."""
        entry, group = self._places.pop(block_id)
        entry.block_ids[group] = None
        if all(other is None for other in entry.block_ids):
            node = entry.node
            del self._entries[node.key]
            self._evicted[node.key] = None
            if len(self._evicted) > MAX_EVICTED_KEYS:
                self._evicted.popitem(last=False)
            siblings = self._children[entry.parent.key]
            del siblings[node.key]
            if not siblings:
                del self._children[entry.parent.key]

    def was_evicted(self, node: PrefixNode) -> bool:
        """Whether a prefix that is not in the index was there, as far as that is remembered."""
        return node.key in self._evicted

    def continuations(self, parent: PrefixNode) -> Iterator[CachedPrefix]:
        """Cached blocks that come directly after `parent`."""
        for entry in self._children.get(parent.key, {}).values():
            if same_prefix(entry.parent, parent):
                yield entry

    def clear(self) -> None:
        self._entries.clear()
        self._places.clear()
        self._children.clear()
