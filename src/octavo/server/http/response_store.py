"""Conversations that `previous_response_id` continues, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.server.http.errors import ApiError
from octavo.server.http.keys import Tenant
from octavo.server.http.shares import Shares

MAX_CHARACTERS = 1 << 26  # of all stored conversations together
MESSAGE_CHARACTERS = 512  # about what a message takes beside its text


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with the whole conversation that it ends."""

    response: Any  # as it was sent, in JSON
    messages: Sequence[Any]


class ResponseStore:
    """Owns the stored responses, of which each tenant has its share."""

    def __init__(self, most: int) -> None:
        """`most`: how many of each tenant are kept; 0: none."""
        self.most = most
        self._stored: Shares[tuple[str, str], StoredResponse] = Shares(most, MAX_CHARACTERS)

    def __len__(self) -> int:
        return len(self._stored)

    def put(
        self,
        tenant: Tenant,
        response_id: str,
        response: Any,
        messages: Sequence[Any],
        num_characters: int,
    ) -> None:
        """Keep a response, if there is room for it; num_characters: with its conversation."""
        size = num_characters + MESSAGE_CHARACTERS * len(messages)
        key, stored = (tenant.salt, response_id), StoredResponse(response, messages)
        self._stored.put(tenant.name, key, stored, size)

    def get(self, tenant: Tenant, response_id: str, param: str) -> StoredResponse:
        """A tenant's response; ApiError 404 if it has none of this id, or no longer."""
        stored = self._stored.get((tenant.salt, response_id))
        if stored is None:
            raise ApiError(
                404,
                f"{param}: no response {response_id[:64]!r} is stored; the last {self.most} are",
                param,
                "response_not_found",
            )
        return stored

    def remove(self, tenant: Tenant, response_id: str) -> None:
        """Forget a response, if it is known."""
        self._stored.remove((tenant.salt, response_id))
