"""Conversations that `previous_response_id` continues, in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.server.http.errors import ApiError
from octavo.server.http.keys import Tenant

MAX_CHARACTERS = 1 << 26  # of all stored conversations together
MESSAGE_CHARACTERS = 512  # about what a message takes beside its text


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with the whole conversation that it ends."""

    response: Any  # as it was sent
    messages: Sequence[Any]
    num_characters: int


class ResponseStore:
    """Owns the stored responses; the least recently used ones are forgotten."""

    def __init__(self, most: int) -> None:
        """`most`: how many are kept; 0: none."""
        self.most = most
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._num_characters = 0

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
        """Keep a response, if there is room for it; `num_characters`: of the conversation."""
        self.remove(tenant, response_id)
        size = num_characters + MESSAGE_CHARACTERS * len(messages)
        if not self.most or size > MAX_CHARACTERS:
            return
        self._stored[tenant.salt, response_id] = StoredResponse(response, messages, size)
        self._num_characters += size
        while len(self._stored) > self.most or self._num_characters > MAX_CHARACTERS:
            _, oldest = self._stored.popitem(last=False)
            self._num_characters -= oldest.num_characters

    def get(self, tenant: Tenant, response_id: str, param: str) -> StoredResponse:
        """A tenant's response; ApiError 404 if it has none of this id, or no longer."""
        found = self._stored.get((tenant.salt, response_id))
        if found is None:
            raise ApiError(
                404,
                f"{param}: no response {response_id[:64]!r} is stored; the last {self.most} are",
                param,
                "response_not_found",
            )
        self._stored.move_to_end((tenant.salt, response_id))
        return found

    def remove(self, tenant: Tenant, response_id: str) -> None:
        """Forget a response, if it is known."""
        found = self._stored.pop((tenant.salt, response_id), None)
        if found is not None:
            self._num_characters -= found.num_characters
