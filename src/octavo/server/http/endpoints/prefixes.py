"""Pinned prefixes (paper section 4.4): computed once, and kept in the cache until unpinned."""

from __future__ import annotations

import uuid
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta
from pydantic import Field

from octavo.errors import InvalidRequest
from octavo.server.engine_process.client import PinnedPrefix as Pin
from octavo.server.http.bodies import WHOLE_FLOATS, Body
from octavo.server.http.context import context_of, reply, tenant_of
from octavo.server.http.errors import ApiError
from octavo.server.http.generation import NonEmptyIds, ShortText, Text
from octavo.server.http.keys import Tenant
from octavo.server.http.schema import PREFIX_EXAMPLE, documented

router = APIRouter(prefix="/v1/prefixes", tags=["Pinned prefixes"])

NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # "." and ".." mean others in a URL


class PrefixBody(Body):
    """POST /v1/prefixes: a prefix to compute once and keep in the cache."""

    model: str | None = None
    prefix: Annotated[Text | NonEmptyIds, WHOLE_FLOATS]
    """Text or token ids; whole blocks of it are kept."""
    name: Annotated[str, Field(pattern=NAME)] | None = None
    """Not given: the server makes one."""
    add_special_tokens: bool | None = None
    cache_salt: ShortText | None = None
    """The salt of the requests that are to find the prefix."""


class PinnedPrefix(msgspec.Struct, kw_only=True):
    """A prefix whose blocks stay in the cache."""

    name: str
    object: Literal["prefix"] = "prefix"
    num_tokens: Annotated[int, Meta(description="Whole blocks of the prefix.")]
    num_blocks: int


class PrefixList(msgspec.Struct, kw_only=True):
    """All prefixes that are pinned."""

    object: Literal["list"] = "list"
    data: list[PinnedPrefix]


class Deleted(msgspec.Struct, kw_only=True):
    """A prefix is pinned no more."""

    name: str
    object: Literal["prefix"] = "prefix"
    deleted: bool = True


@router.post("", **documented(PrefixBody, PinnedPrefix, example=PREFIX_EXAMPLE, status=201))
async def pin_prefix(request: Request) -> Response:
    """Compute a prefix that many prompts will share, and keep it."""
    context = context_of(request)
    body = await context.body(request, PrefixBody)
    context.model_name(body.model)
    tenant = tenant_of(request)
    name = f"prefix-{uuid.uuid4().hex[:12]}" if body.name is None else body.name
    token_ids = body.prefix
    if isinstance(token_ids, str):
        add_special = body.add_special_tokens is not False
        [token_ids] = await context.client.encode([token_ids], "prefix", add_special)
    try:
        pin = await context.client.pin_prefix(
            token_ids, tenant.scoped(name), tenant.cache_salt(body.cache_salt)
        )
    except InvalidRequest as error:
        raise _in_clients_words(error, tenant, name) from error
    return reply(_shown(pin, tenant, context.client.info.block_size), 201)


@router.get("", **documented(None, PrefixList))
async def list_prefixes(request: Request) -> Response:
    """The prefixes that the holder of this key has pinned."""
    client, tenant = context_of(request).client, tenant_of(request)
    size = client.info.block_size
    own = [pin for pin in client.list_prefixes() if tenant.unscoped(pin.name) is not None]
    return reply(PrefixList(data=[_shown(pin, tenant, size) for pin in own]))


@router.delete("/{name}", **documented(None, Deleted))
async def unpin_prefix(request: Request, name: str) -> Response:
    """Let a prefix be evicted again, like any other cached one."""
    client, tenant = context_of(request).client, tenant_of(request)
    scoped = tenant.scoped(name)
    if all(pin.name != scoped for pin in client.list_prefixes()):
        raise ApiError(404, f"name: no prefix {name[:64]!r} is pinned", "name", "prefix_not_found")
    await client.unpin_prefix(scoped)
    return reply(Deleted(name=name))


def _shown(pin: Pin, tenant: Tenant, block_size: int) -> PinnedPrefix:
    return PinnedPrefix(
        name=tenant.unscoped(pin.name) or pin.name,
        num_tokens=pin.num_tokens,
        num_blocks=pin.num_tokens // block_size,
    )


def _in_clients_words(error: InvalidRequest, tenant: Tenant, name: str) -> InvalidRequest:
    """The same error in the client's own words."""
    field = "name" if error.field == "name" else "prefix"
    message = error.reason.replace(tenant.scoped(name), name)
    return type(error)(field, message)
