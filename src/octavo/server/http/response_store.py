"""Conversations that `previous_response_id` continues, in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.server.http.errors import ApiError
from octavo.server.http.keys import Tenant

MAX_CHARACTERS = 1 << 26  # of all stored conversations together
MESSAGE_CHARACTERS = 512  # about what a message takes beside its text


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with the whole conversation that it ends."""

    response: Any  # as it was sent, in JSON
    messages: Sequence[Any]
    num_characters: int


@dataclass(slots=True)
class _Share:
    """What one tenant has stored, the least recently used first."""

    # By salt and id.
    stored: OrderedDict[tuple[str, str], StoredResponse] = field(default_factory=OrderedDict)
    num_characters: int = 0


class ResponseStore:
    """Owns the stored responses and evicts the least recently used ones: of a tenant that has more
    than `most`, and, while all tenants together have more than MAX_CHARACTERS, of the tenant that
    has the most characters. So no tenant can have another one's responses evicted.
    """

    def __init__(self, most: int) -> None:
        """`most`: how many of each tenant are kept; 0: none."""
        self.most = most
        self._shares: dict[str, _Share] = {}  # by the names of tenants
        self._owners: dict[tuple[str, str], str] = {}  # salt and id of a response -> whose it is

    def __len__(self) -> int:
        return len(self._owners)

    def put(
        self,
        tenant: Tenant,
        response_id: str,
        response: Any,
        messages: Sequence[Any],
        num_characters: int,
    ) -> None:
        """Keep a response, if there is room for it; num_characters: with its conversation."""
        self.remove(tenant, response_id)
        size = num_characters + MESSAGE_CHARACTERS * len(messages)
        if not self.most or size > MAX_CHARACTERS:
            return
        share = self._shares.setdefault(tenant.name, _Share())
        share.stored[tenant.salt, response_id] = StoredResponse(response, messages, size)
        share.num_characters += size
        self._owners[tenant.salt, response_id] = tenant.name
        if len(share.stored) > self.most:
            self._evict_from(share)
        while sum(each.num_characters for each in self._shares.values()) > MAX_CHARACTERS:
            self._evict_from(max(self._shares.values(), key=lambda each: each.num_characters))

    def get(self, tenant: Tenant, response_id: str, param: str) -> StoredResponse:
        """A tenant's response; ApiError 404 if it has none of this id, or no longer."""
        key = (tenant.salt, response_id)
        owner = self._owners.get(key)
        if owner is None:
            raise ApiError(
                404,
                f"{param}: no response {response_id[:64]!r} is stored; the last {self.most} are",
                param,
                "response_not_found",
            )
        stored = self._shares[owner].stored
        stored.move_to_end(key)
        return stored[key]

    def remove(self, tenant: Tenant, response_id: str) -> None:
        """Forget a response, if it is known."""
        key = (tenant.salt, response_id)
        if key in self._owners:
            self._forget(self._shares[self._owners[key]], key)

    def _evict_from(self, share: _Share) -> None:
        self._forget(share, next(iter(share.stored)))

    def _forget(self, share: _Share, key: tuple[str, str]) -> None:
        share.num_characters -= share.stored.pop(key).num_characters
        del self._owners[key]
