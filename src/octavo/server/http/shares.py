"""What tenants keep in memory, each up to its share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class _Share(Generic[K, V]):
    """What one tenant has, with sizes, the least recently used first."""

    kept: OrderedDict[K, tuple[V, int]] = field(default_factory=OrderedDict)
    size: int = 0


class Shares(Generic[K, V]):
    """Owns values by their keys, and evicts the least recently used ones: of a tenant that has more
    than `most`, and, while all together have more than `max_size`, of the tenant that has the
    largest share. So no tenant can have the small share of another one evicted.
    """

    def __init__(self, most: int, max_size: int) -> None:
        """
        Args:
            most: how many of each tenant are kept; 0: none.
            max_size: of all of them together, in any unit.
        """
        self._most = most
        self._max_size = max_size
        self._shares: dict[str, _Share[K, V]] = {}  # by the names of tenants that have any
        self._owners: dict[K, str] = {}  # whose a key is
        self._size = 0

    def __len__(self) -> int:
        return len(self._owners)

    def put(self, tenant: str, key: K, value: V, size: int) -> None:
        """Keep a value as the one used last, if there is room for it, in place of the one that the
        key had."""
        self.remove(key)
        if not self._most or size > self._max_size:
            return
        share = self._shares.setdefault(tenant, _Share())
        share.kept[key] = value, size
        share.size += size
        self._size += size
        self._owners[key] = tenant
        if len(share.kept) > self._most:
            self._evict_from(share)
        while self._size > self._max_size:
            self._evict_from(max(self._shares.values(), key=lambda each: each.size))

    def get(self, key: K) -> V | None:
        """A value, which is used with that; None if there is none, or none any more."""
        owner = self._owners.get(key)
        if owner is None:
            return None
        kept = self._shares[owner].kept
        kept.move_to_end(key)
        return kept[key][0]

    def remove(self, key: K) -> None:
        """Forget a value, if there is one."""
        owner = self._owners.pop(key, None)
        if owner is None:
            return
        share = self._shares[owner]
        _, size = share.kept.pop(key)
        share.size -= size
        self._size -= size
        if not share.kept:
            del self._shares[owner]

    def _evict_from(self, share: _Share[K, V]) -> None:
        self.remove(next(iter(share.kept)))
